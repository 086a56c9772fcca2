"""Steps on one device, as people write them, for the benches and checks that compare with them."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

import mixmesh
from mixmesh.cluster import Cluster
from mixmesh.frontend.trace import trace
from mixmesh.planner import make_plan

ONE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
PROCESSES = multiprocessing.get_context("spawn")
Step = Callable[[], Tensor]


def as_one_process() -> None:
    """Sets what torchrun would, for a world of this process alone."""
    for name, value in ONE_PROCESS.items():
        os.environ.setdefault(name, value)


def step_of(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, Tensor],
    context: Callable[[], AbstractContextManager] = nullcontext,
) -> Step:
    """A function that makes a step, its forward pass in a ``context``, and gives the loss."""

    def step() -> Tensor:
        with context():
            loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def our_step(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    batch: Mapping[str, Tensor],
    cluster: str,
    *,
    compiles: bool = False,
) -> Step:
    """A step of a model by a plan for the single device of a ``cluster``."""
    plan = make_plan(trace(make_model(), batch), Cluster.parse(cluster), planner="single")
    model = make_model()
    optimizer = make_optimizer(model)
    return step_of(*mixmesh.parallelize(model, optimizer, plan, check_model=False, compile=compiles), batch)


@contextmanager
def apart(make: Callable[[], Step]) -> Iterator[Callable[[int], tuple[float, list[float]]]]:
    """A context with a process that makes the steps of ``make()``, on one thread. Yields a function that lets
    it make so many steps, and returns their seconds and losses."""
    here, there = PROCESSES.Pipe()
    process = PROCESSES.Process(target=_serve, args=(make, there), daemon=True)
    process.start()
    there.close()

    def steps(count: int) -> tuple[float, list[float]]:
        here.send(count)
        return here.recv()

    try:
        yield steps
    finally:
        here.close()
        process.join()


def _serve(make: Callable[[], Step], asked: Connection) -> None:
    """Makes as many steps as are ``asked`` for, until nobody asks any more."""
    as_one_process()
    torch.set_num_threads(1)
    step = make()
    with suppress(EOFError):
        while True:
            count, started = asked.recv(), time.perf_counter()
            losses = [step().item() for _ in range(count)]
            asked.send((time.perf_counter() - started, losses))
