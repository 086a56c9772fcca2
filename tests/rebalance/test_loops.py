"""Loops of a script's own whose devices change their speed: shares follow between two batches, whatever the
form of the loop, and where that would not be exact they stay."""

from __future__ import annotations

import gc
import os
import time

import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed, run_world
from idioms.plans import named
from rebalance.test_run_balancer import (
    BATCH,
    CLUSTER,
    FACTOR,
    QUICK,
    ROW_S,
    SLOWED,
    WORLD,
    Normed,
    Rows,
    plan_of,
)
from test_gloo import close
from torch.utils.data import DataLoader

from mixmesh.cluster import Cluster
from mixmesh.errors import InputError
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.runtime.comm import initialise
from mixmesh.runtime.parallel import parallelize
from mixmesh.training.preparation.loading import own_loader
from mixmesh.training.rebalance import LoopBalancer, Solver

SLOWED_AT, STEPS = 6, 38


class Loop:
    """A loop over ``parallelize``'s model whose rank takes ``ROW_S`` for each sample, one of them more from a
    step on; the balancer is told these seconds, as in ``Devices``."""

    def __init__(self, stage: int, *, workers: int = 0) -> None:
        gc.collect()  # the models of the check before
        plan = plan_of(stage)
        mine = Normed()
        optimizer = torch.optim.AdamW(mine.parameters(), lr=0.01)
        self.model, self.optimizer = parallelize(mine, optimizer, plan, device="cpu", timeout_s=60)
        shuffled = torch.Generator().manual_seed(3)
        data = DataLoader(Rows(), BATCH, shuffle=True, generator=shuffled, num_workers=workers)
        self.loader = own_loader(data, plan)
        self.said: list[str] = []
        solver = Solver(Cluster.parse(CLUSTER), None, ADAM)
        self.watch = LoopBalancer(self.model, optimizer, self.loader, solver, self.said.append, QUICK)
        self.own_s = 0.0  # in the last step
        told = self.watch.balancer.after_step
        self.watch.balancer.after_step = lambda num_steps, step_s, _: told(num_steps, step_s, self.own_s)
        self.rows: list[int] = []
        self.losses: list[torch.Tensor] = []

    def step(self, batch: dict[str, torch.Tensor], zero: str = "after") -> None:
        if zero == "before":
            self.optimizer.zero_grad()
        loss = self.model(**batch)
        if zero == "between":
            self.optimizer.zero_grad()
        loss.backward()
        self.rows.append(len(batch["x"]))
        rank = dist.get_rank()
        slow = FACTOR if rank == SLOWED and len(self.rows) > SLOWED_AT else 1.0
        self.own_s = ROW_S[rank] * self.rows[-1] * slow
        time.sleep(self.own_s)
        self.optimizer.step()
        if zero == "after":
            self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def run(self, zero: str = "after", per_epoch: int = 5, most_said: int = 99) -> torch.Tensor:
        """Losses of the loop; an epoch has five batches, and may be left early."""
        while len(self.losses) < STEPS and len(self.said) < most_said:
            for number, batch in enumerate(self.loader, start=1):
                self.step(batch, zero)
                if number == per_epoch:
                    break
        return torch.stack(self.losses)


def expected_losses(per_epoch: int = 5, workers: int = 0) -> torch.Tensor:
    """Losses of the same loop on one device."""
    model, losses = Normed(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    shuffled = torch.Generator().manual_seed(3)
    loader = DataLoader(Rows(), BATCH, shuffle=True, generator=shuffled, num_workers=workers)
    while len(losses) < STEPS:
        for number, batch in enumerate(loader, start=1):
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if number == per_epoch:
                break
    return torch.stack(losses)


def has_followed(loop: Loop) -> None:
    """The slow device has fewer rows, all rows are there in every step, and every rank was told the same."""
    told: list = [None] * WORLD
    dist.all_gather_object(told, (loop.said, loop.rows))
    assert all(said == loop.said for said, _ in told)
    assert loop.said and "device 0 takes" in loop.said[0] and "applied" in loop.said[0], loop.said
    for rows in zip(*(rows for _, rows in told)):
        assert sum(rows) == BATCH
    assert told[SLOWED][1][-1] < told[SLOWED][1][0] == 6


def check_losses_are_those_of_an_undisturbed_loop(_) -> None:
    for stage, zero in ((0, "after"), (3, "before")):
        loop = Loop(stage)
        close(loop.run(zero), expected_losses())
        has_followed(loop)
        del loop


def check_workers_and_epochs_that_are_left(_) -> None:
    """Batches that workers have loaded are given under the shares that they were cut by, and those of an
    epoch that is left are not given at all."""
    loop = Loop(3, workers=1 + dist.get_rank() % 2)
    workers = 2  # the most of any rank, whose batches all ranks draw
    close(loop.run("between", per_epoch=3), expected_losses(per_epoch=3, workers=workers))
    has_followed(loop)


def stays(loop: Loop, why: str) -> None:
    assert loop.said and all(why in said and "stay" in said for said in loop.said), loop.said
    assert len(set(loop.rows)) == 1
    assert not loop.watch.balancer.changes


def check_loops_that_keep_their_shares(_) -> None:
    ahead = Loop(0)  # asks for the next batch before it trains with this one
    batches = (batch for _ in range(99) for batch in ahead.loader)
    now = next(batches)
    while len(ahead.losses) < STEPS and not ahead.said:
        now, following = next(batches), now
        ahead.step(following)
    stays(ahead, "before it has called the model")
    del ahead, batches
    kept = Loop(0)
    kept.optimizer.zero_grad = lambda: None
    kept.run(most_said=1)
    stays(kept, "gradients are kept")
    del kept
    averaged = Loop(3)
    average = [p.detach().clone() for p in averaged.model.parameters()]
    averaged.run(most_said=1)
    stays(averaged, "other tensors that are cut")
    del averaged, average


def check_a_loop_that_changes_is_refused(_) -> None:
    """Gradients were dropped for a loop that has always done so, and now it does not."""
    loop = Loop(0)
    with pytest.raises(InputError, match="gradients were dropped when shares changed"):
        while True:
            for batch in loop.loader:
                loop.step(batch, "never" if loop.watch.balancer.changes else "before")
    assert loop.watch.balancer.changes


CHECKS = named(
    check_losses_are_those_of_an_undisturbed_loop,
    check_workers_and_epochs_that_are_left,
    check_loops_that_keep_their_shares,
    check_a_loop_that_changes_is_refused,
)


def start() -> None:
    initialise(int(os.environ["WORLD_SIZE"]), torch.device("cpu"), 60)


@pytest.fixture(scope="module")
def results():
    return run_world(WORLD, CHECKS, start)


@pytest.mark.parametrize("name", CHECKS)
def test_shares_follow_in_a_loop(name, results):
    assert_passed(results[name])
