"""The answer to a question about a placement: the alternatives to it with their costs."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..lang.ir import Instruction, Program, print_instruction
from .changes import Collective

SAME = 1e-6  # share of a step; smaller differences are rounding


@dataclass(frozen=True)
class Alternative:
    """One placement of the tensor. A placement that holds only in a part of the plan names that part:
    ``S(0)@r1`` under a ratio, ``R@m0`` in a machine. ``program`` is None if no program has the placement;
    ``impossible`` says why.

    ``difference_s`` compares with the plan's step. ``num_differing``, ``added``, ``removed`` and
    ``memory_difference_bytes`` (the peak of each rank) compare with the program of the plan's own placement.
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
    """The place of a tensor in a plan, and the costs of its other placements.

    ``tensors`` are the tensor itself, and its counterparts in other layers that were forced with it.
    ``maker`` and ``used`` are the instructions of the plan that make it and use it; for a tensor in several
    machines, ``maker`` is that of the first, and ``used`` begins with those of the others.
    ``can_be_improved``: one of the programs is faster than the plan's by more than rounding errors.
    """

    tensors: tuple[str, ...]
    op: str
    location: str
    placement: str
    maker: Instruction
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
        return tuple(map(print_instruction, (self.maker, *self.used)))
