"""Regions that the user checkpointed (``torch.utils.checkpoint``), in a program of the same model."""

from __future__ import annotations

from collections.abc import Mapping

from ..lang.ir import Graph, Program, with_regions
from ..lang.ir.recompute import updated_buffers
from .recomputation import can_run_again


def user_regions(graph: Graph) -> dict[str, int]:
    """Maps each result of a computation that the user checkpointed to the number of its region."""
    return {r: n.region for n in graph.nodes if n.region is not None for r in n.results if r is not None}


def with_user_regions(program: Program, region_of: Mapping[str, int]) -> Program:
    """``program`` in which the computations whose first result is in ``region_of`` run again, as far as they
    can, and no others."""
    stale = updated_buffers(program)
    numbers = {
        n: region_of[name]
        for n, i in enumerate(program.instructions)
        for name in i.results[:1]
        if name is not None and name in region_of and can_run_again(program, n, stale)
    }
    return with_regions(program, numbers)
