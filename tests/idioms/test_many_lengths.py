"""Batches that are padded to their longest row, each to another length: right, and traced a few times."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gloo_world import assert_passed
from plans import named, plan_of
from test_any_batch import Words, numbers, same_step, words
from torch import nn

from mixmesh.base.patch import patched
from mixmesh.runtime.parallel import parallelize
from mixmesh.runtime.shapes import traces
from mixmesh.runtime.shapes.traces import OWN

LENGTHS = (3, 9, 4, 7, 8, 5, 10, 11)


def parallel(single: nn.Module, other: nn.Module, batch: dict, stage: int = 0):
    model, _ = parallelize(other, None, plan_of(single, batch, stage), device="cpu", timeout_s=60)
    return model


def num_traces(model) -> int:
    """The number of traces since planning; the first rank makes them for all."""
    return len(model._runtime.forms.traces.spent_s)


def check_lengths(_) -> None:
    single = Words()
    model = parallel(Words(), Words(), words(12, 6), stage=3)
    for length in LENGTHS:
        same_step(single, model, words(12, length))
    assert num_traces(model) == (0 if model.comm.rank else OWN + 1)


def check_sizes_and_lengths(_) -> None:
    single = Words()
    model = parallel(Words(), Words(), words(12, 6))
    for size, length in zip((5, 12, 7, 3, 9, 1, 8, 11), LENGTHS):
        same_step(single, model, words(size, length))
    assert num_traces(model) == (0 if model.comm.rank else OWN + 2)  # a single row has a trace of its own


class Shifted(Words):
    """Predicts the next word: slices of every row, which an export with symbols writes out."""

    def forward(self, ids, labels):
        h = self.norm(self.embedding(ids))
        h = h[:, :-1] + torch.arange(ids.shape[1] - 1)[:, None] / 7
        return F.cross_entropy(self.head(h).flatten(0, 1), ids[:, 1:].flatten())


def check_whole_slices(_) -> None:
    """The planned names of slices are those of others with symbols, where whole slices stand before them."""
    single = Shifted()
    model = parallel(Shifted(), Shifted(), words(12, 6))
    for size, length in zip((12, 12, 7, 3, 9, 12, 8, 11), LENGTHS):
        same_step(single, model, words(size, length))
    assert num_traces(model) == (0 if model.comm.rank else OWN + 1)


def check_evaluation(_) -> None:
    single = Words(dropout=0.3).eval()
    model = parallel(Words(dropout=0.3), Words(dropout=0.3), words(12, 6)).eval()
    for length in LENGTHS:
        with torch.no_grad():
            expected, loss = single(**words(12, length)), model(**words(12, length))
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    assert num_traces(model) == (0 if model.comm.rank else OWN + 1)


class Branches(nn.Module):
    """Computes something else for long rows, and for an odd number of columns."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.first, self.second = nn.Linear(1, 8), nn.Linear(8, 1)
        self.double()

    def forward(self, x, y):
        h = self.first(x.unsqueeze(-1))
        if x.shape[1] > 8:
            h = h.tanh()
        if x.shape[1] % 2:
            h = h[:, 1:]
        return F.mse_loss(self.second(h).squeeze(-1).mean(1), y.mean(1)) * x.shape[1] ** 0.5


class Loops(Branches):
    """Takes columns one by one, as a recurrent model does."""

    def forward(self, x, y):
        h = x.new_zeros(len(x), 8)
        for column in x.unbind(1):
            h = torch.tanh(self.first(column[:, None]) + h)
        return F.mse_loss(self.second(h)[:, 0], y.mean(1)) + torch.tensor(float(x.shape[1]))


def columns(length: int) -> dict:
    g = torch.Generator().manual_seed(length)
    return {key: torch.randn(12, length, generator=g, dtype=torch.float64) for key in ("x", "y")}


def check_branches_on_lengths(_) -> None:
    for kind in (Branches, Loops):
        single, model = kind(), parallel(kind(), kind(), columns(6))
        for length in (3, 9, 4, 7, 8, 5, 10, 11, 12, 2, 14, 13):
            same_step(single, model, columns(length))


def check_a_number_that_changes(_) -> None:
    """Between the calls: what was traced with symbols holds the old one."""
    single, model = Scaled(), parallel(Scaled(), Scaled(), numbers(12))
    for n, size in enumerate((5, 7, 4, 9, 8, 3, 6)):
        single.scale = model.scale = 1.0 + (n > 4)
        same_step(single, model, numbers(size))


class Scaled(nn.Module):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 4).double(), 1.0

    def forward(self, x, y):
        return F.mse_loss(self.linear(x) * self.scale, y)


def check_without_symbols(_) -> None:
    """Each length has a trace of its own where symbols are not used: what the counts above would be."""
    model = parallel(Words(), Words(), words(12, 6))
    with patched(traces, "OWN", 100):
        for length in LENGTHS:
            model(**words(12, length))
    assert num_traces(model) == (0 if model.comm.rank else len(LENGTHS))


IDIOMS = named(
    check_lengths, check_sizes_and_lengths, check_whole_slices, check_evaluation, check_branches_on_lengths,
    check_a_number_that_changes, check_without_symbols,
)  # fmt: skip


@pytest.mark.parametrize("name", IDIOMS)
def test_many_lengths(outcomes, name):
    assert_passed(outcomes[name])
