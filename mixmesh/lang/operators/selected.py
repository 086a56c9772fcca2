"""The operator for rows that a mask selects: it computes these rows and no others.

A loop over experts takes the rows of each from a mask: ``y[ids == e] = expert(x[ids == e])``. The number of
rows is data, so outside of this operator all rows stay where they are (``frontend.trace.selected``). Within
it the selected rows alone are computed, and the result has zeros in place of the others.

``body`` describes the computation in the syntax of ``mixtures``: ``x0`` are tensors with the dims of the
mask and then those of a row, ``s0`` have only the dim ``dim`` of the mask, in place of all of them, ``w0``
are shared by all rows, and ``d0`` are dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .mixtures import bytes_kept_by, run_steps

PLACE_BYTES = 8  # the place of a selected row among all


@dataclass(frozen=True)
class RowOperands:
    """The tensors and dtypes that a body names, with the prefixes x, s, w and d. Those ``along`` the dim
    ``dim`` of the mask have no other of its dims."""

    rows: Sequence[Tensor]
    along: Sequence[Tensor]
    dim: int
    whole: Sequence[Tensor]
    dtypes: Sequence[torch.dtype]

    def by_name(self, shape: torch.Size, places: Tensor) -> dict[str, Any]:
        """The operands at the ``places`` of a mask of this shape, counted in its elements."""
        after = shape[self.dim + 1 :].numel()
        along = places // after % shape[self.dim] if self.along else places
        return {
            **{
                f"x{n}": t.flatten(0, len(shape) - 1).index_select(0, places) for n, t in enumerate(self.rows)
            },
            **{f"s{n}": t.index_select(0, along) for n, t in enumerate(self.along)},
            **{f"w{n}": t for n, t in enumerate(self.whole)},
            **{f"d{n}": dtype for n, dtype in enumerate(self.dtypes)},
        }

    def kept_bytes(self, body: str, shape: torch.Size) -> int:
        """The bytes per selected row that ``body`` keeps for its gradient, with the row's place, measured on
        meta tensors."""

        def compute(tensors: Sequence[Tensor]) -> Tensor:
            left = iter(tensors)
            rows, along, whole = (
                [next(left) for _ in group] for group in (self.rows, self.along, self.whole)
            )
            operands = replace(self, rows=rows, along=along, whole=whole)
            return run_steps(body, operands.by_name(shape, torch.arange(shape.numel(), device="meta")))

        total = bytes_kept_by(compute, (*self.rows, *self.along, *self.whole))
        return PLACE_BYTES + -(-total // max(shape.numel(), 1))


def selected(
    mask: Tensor, rows: list[Tensor], along: list[Tensor], dim: int, whole: list[Tensor],
    dtypes: list[torch.dtype], body: str, share: float, kept_bytes: int,
) -> Tensor:  # fmt: skip
    """Computes ``body`` of the rows that ``mask`` [M, ...] selects: [M, ..., R, ...], zeros in other rows.

    ``rows`` are [M, ..., ...], ``along`` [M_dim, ...]. ``share`` is the expected part of the rows that are
    selected, and ``kept_bytes`` what the body keeps of each for its gradient: only the models of costs and of
    memory read them. Raises RuntimeError for tensors that do not fit together.
    """
    num_rows = mask.numel()
    if mask.is_meta:  # the number of selected rows is not known: all of them
        places = torch.arange(num_rows, device="meta")
    else:
        places = mask.flatten().nonzero().squeeze(1)
    computed = run_steps(body, RowOperands(rows, along, dim, whole, dtypes).by_name(mask.shape, places))
    spread = computed.new_zeros((num_rows, *computed.shape[1:])).index_copy_(0, places, computed)
    return spread.unflatten(0, mask.shape)


SCHEMAS = (
    (
        "selected(Tensor mask, Tensor[] rows, Tensor[] along, int dim, Tensor[] whole, ScalarType[] dtypes,"
        " str body, float share, int kept_bytes) -> Tensor",
        selected,
    ),
)
