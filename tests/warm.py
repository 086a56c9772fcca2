"""Imported by the server that processes of tests are forked from: what a first trace imports is there for
all of them, and objects that live for ever are not looked at by the garbage collector again and again."""

import gc
import os

import torch
from torch import nn
from tqdm import tqdm

from mixmesh.frontend.trace import trace
from tests.support.collector import collect_seldom


class Least(nn.Module):
    """The least model that can be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum()


tqdm.monitor_interval = 0  # its thread would not be there in what is forked
if "MIXMESH_TEST_GPU" not in os.environ:  # a trace initialises CUDA, which does not survive a fork
    trace(Least(), (torch.zeros(2),))
collect_seldom()
gc.collect()
gc.freeze()
