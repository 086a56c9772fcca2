"""The points of the backward pass at which gradients are complete."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..base.lazy import lazy
from ..cost.outline import Outline, is_synchronised, summed_params
from ..lang.ir import Program
from .alike import Alike, membership
from .reach import Ranks, reach, taking, uses_of

Points = tuple[tuple[float, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Readiness:
    """For each parameter whose gradient is summed, the ``points`` at which the backward pass completes it, by
    ranks; and the ``groups`` of ranks that sum any gradient."""

    points: Mapping[str, Points]
    groups: tuple[tuple[int, ...], ...]
    world_size: int

    @lazy
    def alike(self) -> Alike:
        """Ranks grouped by the points at which their gradients are complete, for any buckets."""
        groups = dict.fromkeys(ranks for points in self.points.values() for _, ranks in points)
        return Alike(membership(groups | dict.fromkeys(self.groups), self.world_size))

    @lazy
    def by_kind(self) -> dict[str, dict[int, float]]:
        """For each parameter, the point at which its gradient is complete, by kind of ``alike``."""
        return {
            name: {kind: point for point, ranks in points for kind in self.alike.of(ranks)}
            for name, points in self.points.items()
        }


def ready_points(program: Program, outline: Outline, later: Mapping[int, float]) -> dict[str, Points]:
    """For each parameter whose gradient is summed: the points of the backward pass at which it is complete,
    by ranks.

    A point is the instruction whose backward completes it, or the point at which a weight gradient is
    computed ``later`` (``weight_points``). A rank that does not use a parameter has no point: it sends its
    zeros when its pass ends.
    """
    out: dict[str, Points] = {}
    on = reach(outline)
    for first in summed_params(program):
        points: list[tuple[float, tuple[int, ...]]] = []
        if first.args[0] not in program.late:
            for p in program.copies.get(first.args[0], (first,)):
                points += _points(outline, p.result, later, on)
        out[first.result] = tuple(points)
    return out


def _points(
    outline: Outline, name: str, later: Mapping[int, float], on: Mapping[str, Ranks]
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """The points at which the gradient of one copy of a parameter is complete: at its first use on each
    rank."""
    program = outline.program
    everyone = program.participants(program.types[name])
    uses = sorted(uses_of(outline, name))
    if uses and not on and _is_everywhere(outline, uses[0][0], everyone):
        yield _point(outline, *uses[0], later), everyone
        return
    left = set(everyone)
    for n, used in uses:
        who = left & taking(outline, n, used, on)
        if who:
            ranks = everyone if len(who) == len(everyone) else tuple(sorted(who))
            yield _point(outline, n, used, later), ranks
            left -= who
        if not left:
            break


def _is_everywhere(outline: Outline, n: int, everyone: tuple[int, ...]) -> bool:
    """Whether instruction ``n`` computes a value that takes a gradient on all of these ranks: the usual case,
    for which sets of ranks would take up much of planning's time on a large cluster."""
    program = outline.program
    i = program.instructions[n]
    return not i.is_redistribution and any(
        result in program.requires_grad and program.participants(t) is everyone
        for result, t in zip(i.results, i.types)
    )


def _point(outline: Outline, n: int, used: str, later: Mapping[int, float]) -> float:
    """The point at which instruction ``n`` completes the gradient of an input."""
    is_late = n in later and used == outline.program.instructions[n].inputs[1]
    return later[n] if is_late else n


def completing(program: Program, outline: Outline, later: Mapping[int, float]) -> dict[str, float]:
    """For each parameter whose gradient is summed, and each of its copies, the point at which the backward
    pass reaches its first use: the last point at which any rank can get a gradient for it."""
    out: dict[str, float] = {}
    for p in program.params:
        n = outline.uses.get(p.result, (None,))[0]
        if n is not None and outline.flows[n] and is_synchronised(program, p):
            out[p.result] = _point(outline, n, p.result, later)
    return out
