"""Parameters that share memory without being one tensor, as after ``b.weight.data = a.weight.data``."""

from __future__ import annotations

import pytest
import torch
from plans import EVEN, output_plan
from torch import nn

from mixmesh.errors import InputError
from mixmesh.runtime.overlaps import check_apart
from mixmesh.runtime.shards import stored_tensors


class Pair(nn.Module):
    """Two layers whose weights ``shares`` sets."""

    def __init__(self, shares) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        shares(self.first, self.second)

    def forward(self, x):
        return self.second(self.first(x).relu()).square().mean()


def by_data(first, second) -> None:
    second.weight.data = first.weight.data


def by_a_row(first, second) -> None:
    second.bias = nn.Parameter(first.weight.data[1])


def by_a_column(first, second) -> None:
    second.bias = nn.Parameter(first.weight.data[:, 1])


def as_columns(first, second) -> None:
    both = torch.randn(6, 12)
    first.weight, second.weight = nn.Parameter(both[:, :6]), nn.Parameter(both[:, 6:])


def as_parts(first, second) -> None:
    both = torch.randn(72)
    first.weight, second.weight = (nn.Parameter(part.view(6, 6)) for part in both.split(36))


def as_one(first, second) -> None:
    second.weight = first.weight


def frozen(first, second) -> None:
    by_data(first, second)
    first.weight.requires_grad_(False)
    second.weight.requires_grad_(False)


def check(kind: str, shares) -> None:
    torch.manual_seed(0)
    model = Pair(shares)
    program = output_plan(kind, model, {"x": torch.randn(12, 6)}).program
    check_apart(model, stored_tensors(program, model), len(EVEN))


@pytest.mark.parametrize("shares", [by_data, by_a_row])
def test_parameters_of_one_memory_are_refused_where_they_are_cut(shares):
    """A step of either changes both on one device, and pieces have memory of their own."""
    with pytest.raises(InputError, match="share memory, and under the plan each has its own"):
        check("fsdp", shares)


def test_one_that_is_copied_to_be_contiguous_is_refused_too():
    with pytest.raises(InputError, match="share memory"):
        check("data_parallel", by_a_column)


def test_they_are_kept_where_parameters_are_whole():
    check("data_parallel", by_data)


@pytest.mark.parametrize("shares", [as_columns, as_parts, as_one, frozen])
def test_what_no_step_changes_twice_is_cut(shares):
    check("fsdp", shares)
