"""Tensors that a forward pass leaves outside of the model's modules: refused, unless the loss reads them."""

from __future__ import annotations

from collections import defaultdict, deque
from functools import cached_property, lru_cache
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from small_graphs import TWO, cluster
from torch import nn

from mixmesh.cost import CostModel
from mixmesh.errors import TraceError
from mixmesh.frontend.trace import trace
from mixmesh.frontend.trace.reads import Number, reads_of
from mixmesh.lang.ir import make_ratio
from mixmesh.measure.verification import verify
from mixmesh.search.baselines import data_parallel
from mixmesh.training.preparation.outside_loss import with_loss

X = torch.randn(10, 6, generator=torch.Generator().manual_seed(0))
BATCH = {"x": X, "y": torch.arange(10) % 4}


class Net(nn.Module):
    last = None  # an attribute of the class

    def __init__(self, keep) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.first, self.second, self.keep = nn.Linear(6, 8), nn.Linear(8, 4), keep

    def forward(self, x):
        h = self.first(x).relu()
        kept = self.keep(h)
        return self.second(h if kept is None else kept)


class WithLoss(Net):
    def forward(self, x, y):
        return F.cross_entropy(super().forward(x), y)


class Feature:
    def __init__(self, value) -> None:
        self.value = value


class Recorder:
    def __init__(self) -> None:
        self.last, self.all = None, []

    def note(self, h) -> None:
        self.last = h

    def __call__(self, h) -> None:
        self.all.append(Feature(h))


class Slotted:
    __slots__ = ("h",)

    def note(self, h) -> None:
        self.h = h


class Features(nn.Module):
    """A module outside of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.h, self.all, self.inner = 0.0, [], nn.Identity()

    def forward(self, h):
        self.h = h.square()
        return self.h


class Ruled:
    """A loss that is an object."""

    def __init__(self, weight=2.0) -> None:
        self.last, self.weight = None, weight

    def __call__(self, out, y):
        self.last = F.cross_entropy(out, y)
        return self.weight * self.last


SLOTTED, FEATURES = Slotted(), Features()
AUX, BY_NAME, RECENT = [], defaultdict(list), deque(maxlen=3)
TOTAL, SPACE, LAST, RECORDER = {"aux": 0.0}, SimpleNamespace(h=0.0), None, Recorder()


def append(h) -> None:
    AUX.append(h.square().mean())


def add(h) -> None:
    TOTAL["aux"] = TOTAL["aux"] + h.square().mean()


def set_global(h) -> None:
    global LAST
    LAST = h.detach()


def set_on_class(h) -> None:
    Net.last = h


def set_in_closure():
    last = None

    def keep(h) -> None:
        nonlocal last
        last = h

    return keep


LEAVING = {
    "AUX": append,
    "TOTAL['aux']": add,
    "BY_NAME['h']": lambda h: BY_NAME["h"].append(h),
    "RECENT": lambda h: RECENT.append(h),
    "SPACE.h": lambda h: setattr(SPACE, "h", h),
    "LAST": set_global,
    "Net.last": set_on_class,
    "last": set_in_closure(),
    "RECORDER.last": lambda h: RECORDER.note(h),
    "SLOTTED.h": lambda h: SLOTTED.note(h),
    "FEATURES.h": lambda h: FEATURES(h),
    "keep.last": Recorder().note,
    "keep.all": Recorder(),
}


@pytest.mark.parametrize("name", LEAVING)
def test_a_tensor_that_is_left_outside_is_refused_and_taken_out(name):
    with pytest.raises(TraceError, match="leaves a tensor in") as caught:
        trace(WithLoss(LEAVING[name]), BATCH)
    assert caught.value.got.startswith(f"{name}, ") and "test_left_outside.py:" in caught.value.where
    assert "loss=function" in caught.value.hint[0]
    assert (AUX, dict(BY_NAME), list(RECENT), TOTAL, SPACE.h) == ([], {}, [], {"aux": 0.0}, 0.0)
    assert LAST is Net.last is RECORDER.last is None
    assert FEATURES.h == 0.0 and not hasattr(SLOTTED, "h")


def criterion(out, y):
    return F.cross_entropy(out, y)


READ = {
    "AUX": lambda out, y: criterion(out, y) + AUX.pop(),
    "Net.last": lambda out, y: criterion(out, y) + Net.last.square().mean(),
    "RECORDER.last": lambda out, y: criterion(out, y) + RECORDER.last.square().mean(),
}


@pytest.mark.parametrize("name", READ)
def test_what_the_loss_reads_is_part_of_the_program(name):
    model = with_loss(Net(LEAVING[name]), READ[name])
    traced = trace(model, BATCH)
    ratio = make_ratio((0.6, 0.4))
    program = data_parallel(traced.graph, CostModel(cluster(TWO)), ratio)
    assert not AUX and Net.last is RECORDER.last is None
    assert verify(model, BATCH, program, traced=traced).ok
    Net.last = RECORDER.last = None  # verify has run the model itself
    without = with_loss(Net(lambda h: None), criterion)
    assert len(traced.graph.nodes) > len(trace(without, BATCH).graph.nodes)


def of_two(h) -> None:
    TOTAL["aux"], TOTAL["entropy"] = h.square().mean(), h.abs().mean()


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: criterion(out, y) + sum(TOTAL.values()),
        lambda out, y: criterion(out, y) + TOTAL["aux"] - TOTAL.get("entropy"),
        lambda out, y: criterion(out, y) + sum(TOTAL[name] for name in ("aux", "entropy")),
        lambda out, y: criterion(out, y) + TOTAL.pop("aux") + TOTAL.pop("entropy"),
    ],
)
def test_a_loss_reads_all_entries_of_a_dict(loss):
    trace(with_loss(Net(of_two), loss), BATCH)
    assert TOTAL == {"aux": 0.0}


def test_an_entry_that_the_loss_does_not_read_is_refused():
    with pytest.raises(TraceError, match=r"leaves a tensor in TOTAL\['entropy'\]"):
        trace(with_loss(Net(of_two), lambda out, y: criterion(out, y) + TOTAL["aux"]), BATCH)


def test_a_tensor_that_the_loss_leaves_is_refused():
    parts: dict = {}

    def noting(out, y):
        parts["ce"] = criterion(out, y)
        return 2 * parts["ce"]

    with pytest.raises(TraceError, match="leaves a tensor in parts"):
        trace(with_loss(Net(lambda h: None), noting), BATCH)
    assert not parts


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Features()

    def forward(self, out, y):
        return self.inner(out).mean() + F.cross_entropy(out, y)


DOUBLED = Doubled()


@pytest.mark.parametrize(
    "loss, name",
    [
        (Ruled(), "Ruled.last"),
        (DOUBLED, "Doubled.inner.h"),
        (lambda out, y: DOUBLED(out, y), "DOUBLED.inner.h"),
    ],
)
def test_what_the_object_or_the_modules_of_a_loss_keep_is_refused(loss, name):
    with pytest.raises(TraceError, match=f"leaves a tensor in {name}"):
        trace(with_loss(Net(lambda h: None), loss), BATCH)


def test_a_loss_that_is_an_object_reads_what_is_left_and_its_numbers_are_watched():
    class Summed(Ruled):
        def __call__(self, out, y):
            return F.cross_entropy(out, y) + self.weight * sum(AUX)

    loss = Summed()
    model = with_loss(Net(append), loss)
    trace(model, BATCH)
    assert not AUX and not reads_of(model).changed(Number)
    loss.weight = 3.0
    assert [path for path, _ in reads_of(model).changed(Number)] == ["Summed.weight"]


class Forwarding:
    """An object that has no attributes of its own besides the one that it forwards to."""

    __slots__ = ("of",)

    def __init__(self, of) -> None:
        self.of = of

    def __getattr__(self, name):
        return getattr(self.of, name)


FORWARDING = Forwarding(SimpleNamespace(scale=2.0))


def test_an_object_that_forwards_attributes_is_visited():
    trace(WithLoss(lambda h: h * FORWARDING.scale), BATCH)


MASKS: dict = {}


@lru_cache
def scale(size: int) -> torch.Tensor:
    return torch.linspace(0, 1, size)


class Tables:
    @cached_property
    def ramp(self) -> torch.Tensor:
        return torch.linspace(0, 1, 8)

    @staticmethod
    @lru_cache
    def scale(size: int) -> torch.Tensor:
        return torch.linspace(0, 1, size)


TABLES = Tables()


def masked(h):
    if h.shape[1] not in MASKS:
        MASKS[h.shape[1]] = torch.ones(h.shape[1]).cumsum(0)
    return h * MASKS[h.shape[1]] * scale(h.shape[1]) * TABLES.ramp * Tables.scale(h.shape[1])


def test_what_is_made_once_of_constants_can_be_made_again():
    """PyTorch's exporter refuses the tensors of another export, and a model cannot run with them."""
    model = WithLoss(masked)
    for _ in range(2):
        trace(model, BATCH)
        assert not MASKS and not scale.cache_info().currsize
    assert model(**BATCH).isfinite()
    MASKS.clear()


@lru_cache
def teacher() -> nn.Module:
    return nn.Linear(4, 4)


def test_what_is_cached_before_stays():
    made = teacher()
    trace(with_loss(Net(lambda h: None), lambda out, y: criterion(out, y) + teacher()(out).mean()), BATCH)
    assert teacher() is made
