"""Weights that every rank holds stay the same on all: what a data set draws does not move the numbers that a
script draws from, and ranks that were changed by numbers of their own are told."""

from __future__ import annotations

import math
import os
import random
import tempfile
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed
from plans import named
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import mixmesh
from mixmesh import checkpoint
from mixmesh.errors import InputError
from mixmesh.runtime.drift import EVERY, FIRST_CALLS, ROUNDING, DriftWatch, is_alike, is_due

UNEVEN = """
name = "uneven"
[network]
bandwidth_gbit_per_s = 10
latency_us = 50
[[machine]]
devices = [{ cpu_share = 0.6 }, { cpu_share = 0.3 }, { cpu_share = 0.3 }]
"""


class Augmented(Dataset):
    """Samples that are changed at random, by numbers of all three kinds."""

    def __init__(self, kinds: str = "torch python numpy") -> None:
        g = torch.Generator().manual_seed(0)
        self.x, self.y, self.kinds = torch.randn(14, 4, generator=g), torch.arange(14) % 3, kinds
        self.drawn: list[float] = []

    def __len__(self) -> int:
        return 14

    def __getitem__(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = 0.0
        if "torch" in self.kinds:
            noise += float(torch.rand(()))
        if "python" in self.kinds:
            noise += random.random()
        if "numpy" in self.kinds:
            noise += float(np.random.rand())
        self.drawn.append(noise)
        return self.x[n] + noise, self.y[n]


def prepared(data: Dataset, planner: str = "ddp-proportional", kind=torch.optim.SGD, model=None):
    torch.manual_seed(int(os.environ["RANK"]))  # a script without a seed
    mine = model or nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = kind(mine.parameters(), 0.05)
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(UNEVEN)
        file.flush()
        cache = os.path.join(tempfile.gettempdir(), f"mixmesh-drift-{os.environ['MASTER_PORT']}")
        return mixmesh.prepare(
            mine, optimizer, DataLoader(data, 7), loss=F.cross_entropy, planner=planner, profile_s=0,
            cluster=file.name, cache=cache, timeout_s=60,
        )  # fmt: skip


def train(model, optimizer, loader) -> None:
    for x, y in loader:
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def everyones(value) -> list:
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def weights_of_ranks(model) -> list[str]:
    return everyones(str([p.tolist() for p in model.parameters()]))


def check_new_weights_are_the_same_after_samples_that_draw(_) -> None:
    data = Augmented()
    model, optimizer, loader = prepared(data)
    train(model, optimizer, loader)
    assert len({tuple(drawn) for drawn in everyones(data.drawn)}) == 3, "each rank's rows have their own"
    before = everyones((float(torch.rand(())), random.random(), float(np.random.rand())))
    assert len(set(before)) == 1
    model[2].reset_parameters()
    assert len(set(weights_of_ranks(model))) == 1
    train(model, optimizer, loader)
    assert len(set(weights_of_ranks(model))) == 1


def check_samples_draw_new_numbers_in_every_batch_and_epoch(_) -> None:
    data = Augmented()
    model, optimizer, loader = prepared(data)
    data.drawn.clear()  # what was looked at
    for _ in range(2):
        train(model, optimizer, loader)
    all_drawn = [number for drawn in everyones(data.drawn) for number in drawn]
    assert len(all_drawn) == 2 * 14 and len(set(all_drawn)) == 2 * 14


def check_going_on_draws_the_same_numbers(_) -> None:
    data = Augmented()
    _, _, loader = prepared(data)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = [x.tolist() for x, _ in batches]
    loader.load_state_dict(state)
    assert [x.tolist() for x, _ in loader] == rest


def check_gradients_with_noise_of_their_own_are_told(_) -> None:
    """As by a script that seeds by the rank. The error names the parameter, two ranks and where."""
    model, optimizer, loader = prepared(Augmented(""))
    torch.manual_seed(100 + dist.get_rank())
    model[2].reset_parameters()
    with pytest.raises(InputError, match=r"2\.weight has other values on other ranks") as caught:
        for _ in range(4):
            train(model, optimizer, loader)
    assert "on rank 0" in str(caught.value) or "on rank 1" in str(caught.value)
    assert f"before forward pass {FIRST_CALLS[0]} of the training" in str(caught.value)
    assert "torch.manual_seed(0)" in str(caught.value)


def check_norms_are_taken_only_where_checksums_differ(_) -> None:
    """In the second case one rank has rounded otherwise, which is no error."""
    model, _, _ = prepared(Augmented(""))
    taken: list[list[str]] = []
    norms = DriftWatch._norms

    def noted(self, replicas):
        taken.append([r.name for r in replicas])
        return norms(self, replicas)

    with mock.patch.object(DriftWatch, "_norms", noted):
        model.check_replicas()
        assert not taken
        if dist.get_rank() == 1:
            with torch.no_grad():
                model[2].weight.mul_(1 + 2e-7)
        model.check_replicas()
    assert taken == [["2.weight"]]


def check_one_rank_that_changes_its_weights_alone_is_told_before_a_checkpoint(_) -> None:
    model, optimizer, loader = prepared(Augmented(""))
    train(model, optimizer, loader)
    model.check_replicas()
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[0].bias[3] += 0.1
    with tempfile.TemporaryDirectory() as folder:
        for save in (
            lambda: mixmesh.save(Path(folder, "x.pt"), model=model),
            lambda: checkpoint.save(everyones(folder)[0], step=2, model=model, optimizer=optimizer),
        ):
            with pytest.raises(InputError, match=r"0\.bias has other values on other ranks"):
                save()


def check_parameters_that_are_cut_are_not_compared(_) -> None:
    model, _, _ = prepared(Augmented(""), "fsdp-even")
    with torch.no_grad():
        model[0].weight.to_local().add_(dist.get_rank())
    model.check_replicas()


def check_other_learning_rates_are_told(_) -> None:
    """As of a scheduler that is given numbers of own rows; where parameters are cut no norm tells."""
    for planner in ("ddp-even", "fsdp-even"):
        model, optimizer, loader = prepared(Augmented(""), planner)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        for accuracy in (0.5, 0.5 + 0.1 * dist.get_rank()):
            scheduler.step(1 - accuracy)
        with pytest.raises(InputError, match="the optimizer has other settings on other ranks") as caught:
            for _ in range(2):
                train(model, optimizer, loader)
        assert "ReduceLROnPlateau" in str(caught.value)


def check_steps_that_one_rank_leaves_out_are_told(_) -> None:
    """As by a rank that judges by its own rows; where parameters are cut no norm tells."""
    for planner in ("ddp-even", "fsdp-even"):
        model, optimizer, loader = prepared(Augmented(""), planner)
        with pytest.raises(InputError, match="more steps on some ranks than on others") as caught:
            for number, (x, y) in enumerate([batch for _ in range(2) for batch in loader]):
                model(x, y).backward()
                if dist.get_rank() != 1 or number != 2:
                    optimizer.step()
                optimizer.zero_grad()
        counts = "3 steps on ranks 0, 2; 2 steps on rank 1, before forward pass 4 of the training"
        assert counts in str(caught.value)


def check_what_one_rank_alone_does_to_cut_parameters_is_told(_) -> None:
    """As by a rank that clips, drops or zeroes by its own judgement, or loads a state alone."""

    def drop(model, optimizer) -> None:
        model[0].weight.grad = None

    def clear(model, optimizer) -> None:
        optimizer.state.clear()

    alone = {
        "zero_grad": lambda model, optimizer: optimizer.zero_grad(),
        "drop": drop,
        "scale": lambda model, optimizer: model[0].weight.grad.mul_(0.1),
        "replace": lambda model, optimizer: setattr(model[0].weight, "grad", model[0].weight.grad * 0.1),
        "freeze": lambda model, optimizer: model[0].weight.requires_grad_(False),
        "clear": clear,
    }
    for name, act in alone.items():
        model, optimizer, loader = prepared(Augmented(""), "fsdp-even", torch.optim.Adam)
        with pytest.raises(InputError, match="is cut, and its pieces were trained in other ways") as caught:
            for number, (x, y) in enumerate([batch for _ in range(4) for batch in loader]):
                model(x, y).backward()
                if dist.get_rank() == 1 and number == 2:
                    act(model, optimizer)
                optimizer.step()
                optimizer.zero_grad()
        when = 8 if name == "freeze" else 4  # the gradient of that step was there already
        assert f"before forward pass {when} of the training" in str(caught.value), name


def check_updates_without_a_known_optimizer_that_one_rank_leaves_out_are_told(_) -> None:
    """By an optimizer that is made from the model's parameters later, and by hand."""

    def by_hand(model) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.1)

    for is_later in (True, False):
        model, _, loader = prepared(Augmented(""), "fsdp-even")
        later = torch.optim.Adam(model.parameters())
        with pytest.raises(InputError, match="written to after 2 backward passes") as caught:
            for number, (x, y) in enumerate([batch for _ in range(4) for batch in loader]):
                model(x, y).backward()
                if dist.get_rank() != 1 or number != 1:
                    later.step() if is_later else by_hand(model)
                model.zero_grad()
        assert "On rank 1" in str(caught.value) and "before forward pass 4" in str(caught.value)


def check_what_all_ranks_do_to_cut_parameters_is_no_drift(_) -> None:
    for planner in ("fsdp-even", "tensor-parallel", "poplar"):
        model, optimizer, loader = prepared(Augmented(""), planner, torch.optim.Adam)
        for number, (x, y) in enumerate([batch for _ in range(5) for batch in loader]):
            model(x, y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if number % 3 == 1:
                continue  # accumulates
            model[0].weight.grad = None if number % 3 else model[0].weight.grad * 0.5
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
        model.check_replicas()


def train_scaled(model, optimizer, loader, scale) -> None:
    """Trains with the loss of batch ``n`` multiplied by ``scale(n)``."""
    for number, (x, y) in enumerate([batch for _ in range(4) for batch in loader]):
        (model(x, y) * scale(number)).backward()
        optimizer.step()
        optimizer.zero_grad()


def check_a_loss_that_one_rank_alone_scales_later_is_told(_) -> None:
    scales = (3.0, float("nan"), float("inf"))
    for planner, scale in product(("ddp-even", "fsdp-even", "pipeline"), scales):
        own = scale if dist.get_rank() == 1 else 1
        with pytest.raises(InputError, match="multiplied or divided by another number on each") as caught:
            train_scaled(*prepared(Augmented(""), planner), lambda n, own=own: own if n == 4 else 1)
        assert math.isfinite(scale) or f"{scale} on rank 1 in all" in str(caught.value)


def check_a_loss_that_all_ranks_scale_by_nan_is_that_of_one_device(_) -> None:
    for planner in ("ddp-even", "fsdp-even"):
        model, *others = prepared(Augmented(""), planner)
        train_scaled(model, *others, lambda n: float("nan") if n == 4 else 1)
        assert all(value.isnan().any() for value in model.full_state_dict().values())


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        return super().forward(x) * self.scale


def check_a_buffer_that_one_rank_alone_changes_is_told(_) -> None:
    for planner in ("ddp-even", "fsdp-even"):
        model, optimizer, loader = prepared(Augmented(""), planner, model=Scaled())
        with pytest.raises(InputError, match="scale has other values on other ranks"):
            for number, (x, y) in enumerate([batch for _ in range(2) for batch in loader]):
                if dist.get_rank() == 1 and number == 2:
                    model.scale.mul_(0.5)
                model(x, y).backward()
                optimizer.step()
                optimizer.zero_grad()


def test_rounding_is_no_drift():
    """Norms of values that differ by ``d`` of their size at random, and by much less."""
    g = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        for count in (10, 1000, 100_000):
            p = torch.randn(count, generator=g, dtype=torch.float64)
            noise = torch.randn(count, generator=g, dtype=torch.float64)
            for share, alike in ((ROUNDING[dtype] / 10, True), (1.0, False)):
                norms = [float(torch.linalg.vector_norm(x)) for x in (p, p + share * p.std() * noise)]
                assert is_alike(norms, count, dtype) == alike, (dtype, count, share)
    assert is_alike([float("nan"), 1.0], 10, torch.float32), "found by others"


def test_comparisons_are_rare():
    due = [n for n in range(1, 10 * EVERY + 1) if is_due(n)]
    assert tuple(due[: len(FIRST_CALLS)]) == FIRST_CALLS and len(due) == len(FIRST_CALLS) + 10


IDIOMS = named(
    check_new_weights_are_the_same_after_samples_that_draw,
    check_samples_draw_new_numbers_in_every_batch_and_epoch,
    check_going_on_draws_the_same_numbers,
    check_gradients_with_noise_of_their_own_are_told,
    check_norms_are_taken_only_where_checksums_differ,
    check_one_rank_that_changes_its_weights_alone_is_told_before_a_checkpoint,
    check_parameters_that_are_cut_are_not_compared,
    check_other_learning_rates_are_told,
    check_steps_that_one_rank_leaves_out_are_told,
    check_what_one_rank_alone_does_to_cut_parameters_is_told,
    check_what_all_ranks_do_to_cut_parameters_is_no_drift,
    check_a_loss_that_one_rank_alone_scales_later_is_told,
    check_a_loss_that_all_ranks_scale_by_nan_is_that_of_one_device,
    check_a_buffer_that_one_rank_alone_changes_is_told,
)


@pytest.mark.parametrize("name", IDIOMS)
def test_drift(outcomes, name):
    assert_passed(outcomes[name])
