"""The answer to what a placement costs: the tensor's alternatives, beside the plan's own."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..lang.ir import Instruction, Program, print_instruction
from .changes import Collective

SAME = 1e-6  # share of a step: less is rounding


@dataclass(frozen=True)
class Alternative:
    """One placement of the tensor, with where it holds if that is not the whole plan: ``S(0)@r1`` under a
    ratio, ``R@m0`` in a machine. Where ``program`` is None there is none, and ``impossible`` says why.

    ``difference_s`` is to the plan's step. ``num_differing``, ``added``, ``removed`` and
    ``memory_difference_bytes`` (per rank, of the peak) are to the program of the plan's own placement.
    """

    placement: str
    is_plan: bool
    impossible: str = ""
    program: Program | None = field(default=None, repr=False)
    step_s: float = float("inf")
    fits: bool = False
    difference_s: float = float("inf")
    num_differing: int = 0
    added: tuple[Collective, ...] = ()
    removed: tuple[Collective, ...] = ()
    memory_difference_bytes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """Where a tensor stands in a plan, and what other placements of it would cost.

    ``tensors``: the tensor asked for, and with it those of the other layers that were forced alike.
    ``made`` and ``used`` are instructions of the plan; of a tensor in several machines, ``made`` is that of
    the first and ``used`` has those of the others too. ``can_be_improved``: one of
    the programs is faster than the plan's, by more than rounding.
    """

    tensors: tuple[str, ...]
    op: str
    location: str
    placement: str
    made: Instruction
    used: tuple[Instruction, ...]
    step_s: float
    alternatives: tuple[Alternative, ...]
    can_be_improved: bool
    notes: tuple[str, ...]
    summary: str

    @property
    def own(self) -> Alternative:
        return next(a for a in self.alternatives if a.is_plan)

    @property
    def lines(self) -> tuple[str, ...]:
        """The instructions of the plan that make, move and use the tensor."""
        return tuple(map(print_instruction, (self.made, *self.used)))
