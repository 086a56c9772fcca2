"""The position of each live value in the packed masks of a state, the same for all problems of a graph.

The middle of a run of equal layers is searched once for all of them, so it must be left holding as much as on
entry. To compare, the masks on entry are carried through it, after those of the values themselves, as masks
of a value ``-1 - v`` for each value v.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ...lang.ir import Node
from .fold import Fold

BITS = 16  # bits in a mask: R, P and up to 14 dims

Shifts = tuple[tuple[int, int], ...]  # pairs of a shift before a step and the shift after it


@dataclass(frozen=True)
class Lives:
    """The layout of masks per step. ``live`` are the values before it, with a last entry for those after the
    last step. ``shifts`` gives the position of each value's mask after the step, ``needed`` the positions of
    live values that the step may need. ``carried`` are the masks that it leaves alone, in groups that stay
    together: their position before, all their bits, and their position after. ``entered``: whether a folded
    middle begins after it. ``left``: if one ends there, what was held on entry, and what must hold as
    much."""

    live: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    shifts: list[dict[int, int]] = field(default_factory=list)
    needed: list[tuple[int, ...]] = field(default_factory=list)
    carried: list[tuple[tuple[int, int, int], ...]] = field(default_factory=list)
    entered: list[bool] = field(default_factory=list)
    left: list[Shifts] = field(default_factory=list)


class Steps(Protocol):
    """The part of ``Choices`` that says when values are made and used."""

    steps: tuple[Node, ...]
    ids: dict[str, int]
    values: tuple[tuple[int, ...], ...]
    fold: Fold

    @property
    def leaves(self) -> Mapping[int, Node]: ...
    @property
    def tracked(self) -> frozenset[int]: ...
    @property
    def uses(self) -> tuple[int, ...]: ...
    def shifts(self, step: int, other: int, count: int) -> dict[int, int]: ...


def lives_of(choices: Steps) -> Lives:
    out = Lives()
    # maps values at the entry of a folded middle to values at its end
    entries, exits = {}, {}
    for at, period in choices.fold.middles:
        entries[at] = exits[at + 2 * period] = choices.shifts(at, at + 2 * period, period)
    for step in range(len(choices.steps)):
        before = out.live[-1]
        used = dict.fromkeys(choices.values[step])
        after = _live_after(choices, step, before)
        if step + 1 not in exits:
            after += tuple(v for v in before if v < 0)
        if step + 1 in entries:
            after += tuple(-1 - v for v in after if entries[step + 1].get(v, v) != v)
        shifts = {v: BITS * n for n, v in enumerate(after)}
        out.needed.append(tuple(n for n, v in enumerate(before) if v in used))
        alone = [(BITS * n, shifts[v]) for n, v in enumerate(before) if v in shifts and v not in used]
        out.carried.append(_together(alone))
        out.live.append(after)
        out.shifts.append(shifts)
        out.entered.append(step + 1 in entries)
        out.left.append(_returns(before, shifts, exits[step + 1]) if step + 1 in exits else ())
    return out


def _live_after(choices: Steps, step: int, before: tuple[int, ...]) -> tuple[int, ...]:
    """The values themselves that are live behind a step."""
    results = [choices.ids[r] for r in choices.steps[step].results if r is not None]
    used = dict.fromkeys(choices.values[step])
    loaded = [v for v in used if v in choices.leaves and v in choices.tracked and v not in before]
    return tuple(v for v in (*before, *loaded, *results) if v >= 0 and choices.uses[v] > step)


def _together(moved: list[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Groups masks that are adjacent both before and after a step, so that they move as one."""
    runs: list[list[int]] = []
    for old, new in moved:
        if runs and (old - runs[-1][0], new - runs[-1][2]) == (runs[-1][1], runs[-1][1]):
            runs[-1][1] += BITS
        else:
            runs.append([old, BITS, new])
    return tuple((old, (1 << bits) - 1, new) for old, bits, new in runs)


def _returns(inside: tuple[int, ...], shifts: dict[int, int], moved: dict[int, int]) -> Shifts:
    return tuple(
        (BITS * n, shifts[moved[-1 - v]]) for n, v in enumerate(inside) if v < 0 and moved[-1 - v] in shifts
    )
