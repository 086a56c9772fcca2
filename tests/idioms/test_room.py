"""A loop is told where a device has no room for what it holds beside a step: gradients, a whole model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gloo_world import assert_passed
from plans import batch, named, plan_of
from torch import nn

import mixmesh
from mixmesh.base.patch import patched
from mixmesh.runtime import earlier_gradients, whole_model
from mixmesh.runtime.parallel import parallelize

STEPS, WIDTH = 3, 60_000
GRADIENTS = 8 * (10 * WIDTH + WIDTH + 4)  # bytes of all of them


class Wide(nn.Module):
    """More parameters than activations."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, WIDTH), nn.Linear(WIDTH, 4)).double()

    def forward(self, x, y):
        return (self.layers(x) - y).square().mean()


def warnings_of(loop, *, room_bytes: int, stage: int = 0, knows_room: bool = True) -> list[str]:
    """What is warned of in ``loop``, under a plan with so much room beside its peak on every rank."""
    plan = plan_of(Wide(), batch(0), stage)
    if knows_room:
        plan = replace(plan, predicted_peak_memory_bytes=(10**9,) * 3, usable_bytes=(10**9 + room_bytes,) * 3)
    model = Wide()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    model, sgd = parallelize(model, sgd, plan, device="cpu", timeout_s=60)
    told: list[str] = []
    with patched(earlier_gradients, "warn_once", told.append):
        for step in range(STEPS):
            loop(model, sgd, step)
    assert model.comm.rank == 0 or not told
    return [] if model.comm.rank else told


def early(model, optimizer, step: int) -> None:
    optimizer.zero_grad()
    model(**batch(step)).backward()
    optimizer.step()
    optimizer.zero_grad()


def late(model, optimizer, step: int) -> None:
    loss = model(**batch(step))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def accumulating(model, optimizer, step: int) -> None:
    for n in range(2):
        model(**batch(2 * step + n)).backward()
    optimizer.step()
    optimizer.zero_grad()


def accumulating_unsummed(model, optimizer, step: int) -> None:
    with model.no_sync():
        model(**batch(2 * step)).backward()
    model(**batch(2 * step + 1)).backward()
    optimizer.step()
    optimizer.zero_grad()


def check_what_does_not_fit_is_told(_) -> None:
    for stage in (0, 2, 3):
        for loop in (late, accumulating, accumulating_unsummed):
            told = warnings_of(loop, room_bytes=0, stage=stage)
            assert all("gradients of the pass before are held" in text for text in told), told
            assert len(told) == (torch.distributed.get_rank() == 0), (loop, stage, told)


def check_what_fits_is_not_told(_) -> None:
    assert not warnings_of(early, room_bytes=0)
    assert not warnings_of(accumulating, room_bytes=0, knows_room=False)
    for loop in (late, accumulating, accumulating_unsummed):
        assert not warnings_of(loop, room_bytes=2 * GRADIENTS)


def check_a_whole_model_that_does_not_fit_is_told(_) -> None:
    def lent(stage: int, room_bytes: int) -> list[str]:
        plan = plan_of(Wide(), batch(0), stage)
        room = dict(predicted_peak_memory_bytes=(10**9,) * 3, usable_bytes=(10**9 + room_bytes,) * 3)
        model, _ = parallelize(Wide(), None, replace(plan, **room), device="cpu", timeout_s=60)
        told: list[str] = []
        with patched(whole_model, "warn_once", told.append), mixmesh.whole(model):
            pass
        return told

    has_told = torch.distributed.get_rank() == 0
    for stage in (2, 3):
        told = lent(stage, -3 * GRADIENTS)
        assert ["every rank holds the whole model" in text for text in told] == [True] * has_told, told
        assert not lent(stage, 0)
    assert not lent(0, -3 * GRADIENTS)  # nothing is cut


IDIOMS = named(
    check_what_does_not_fit_is_told,
    check_what_fits_is_not_told,
    check_a_whole_model_that_does_not_fit_is_told,
)


@pytest.mark.parametrize("name", IDIOMS)
def test_room(outcomes, name):
    assert_passed(outcomes[name])
