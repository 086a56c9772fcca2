"""The models that the planning bench plans: depth, experts and branches as arguments, sizes as small as
layers come in practice. On the meta device; a graph is all that planning needs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from mixmesh.frontend.job import Job
from mixmesh.frontend.job.workloads.language import LanguageModel
from mixmesh.frontend.job.workloads.layers import Layer, MoeLayer

WIDTH, HEADS, HIDDEN, TOKENS, WORDS, EXPERTS = 512, 8, 2048, 128, 8192, 16


def transformer(layers: int, global_batch: int) -> Job:
    """An encoder of ``layers`` layers under a language model's head."""
    return _language(lambda n: Layer(WIDTH, HEADS, HIDDEN), layers, global_batch)


def mixture(layers: int, global_batch: int) -> Job:
    """The same with 16 experts in every second layer, as HAP's BERT-MoE has them."""

    def layer(n: int) -> nn.Module:
        if n % 2 == 0:
            return Layer(WIDTH, HEADS, HIDDEN)
        return MoeLayer(WIDTH, HEADS, HIDDEN, experts=EXPERTS, seq=TOKENS)

    return _language(layer, layers, global_batch)


def branches(count: int, global_batch: int) -> Job:
    """Four blocks of ``count`` parallel branches, each two dense layers, that are added up again."""
    with torch.device("meta"):
        return Job(Branches(count), (torch.empty(global_batch, WIDTH),))


class Branches(nn.Module):
    def __init__(self, count: int, blocks: int = 4):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
                for _ in range(count)
            )
            for _ in range(blocks)
        )

    def forward(self, x):
        for block in self.blocks:
            x = F.layer_norm(x + sum(branch(x) for branch in block), (WIDTH,))
        return x.square().mean()


def _language(layer: Callable[[int], nn.Module], layers: int, global_batch: int) -> Job:
    with torch.device("meta"):
        model = LanguageModel([layer(n) for n in range(layers)], words=WORDS, seq=TOKENS, width=WIDTH)
        tokens = torch.zeros(2, global_batch, TOKENS, dtype=torch.long)
    return Job(model, {"tokens": tokens[0], "targets": tokens[1]})
