"""Where in the backward pass gradients are complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..base.lazy import lazy
from ..cost.outline import Outline, summed_params, synchronised
from ..lang.ir import Program
from .alike import Alike, membership

Points = tuple[tuple[float, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Readiness:
    """Per parameter whose gradient is summed, the ``points`` where the backward pass completes it, by ranks;
    and the ``groups`` of ranks that sum some gradient."""

    points: Mapping[str, Points]
    groups: tuple[tuple[int, ...], ...]
    world_size: int

    @lazy
    def alike(self) -> Alike:
        """Ranks whose gradients are complete at the same points, whatever the buckets."""
        groups = dict.fromkeys(ranks for points in self.points.values() for _, ranks in points)
        return Alike(membership(groups | dict.fromkeys(self.groups), self.world_size))

    @lazy
    def by_kind(self) -> dict[str, dict[int, float]]:
        """Per parameter the point where its gradient is complete, by kind of ``alike``."""
        return {
            name: {kind: point for point, ranks in points for kind in self.alike.of(ranks)}
            for name, points in self.points.items()
        }


def ready_points(program: Program, outline: Outline, later: Mapping[int, float]) -> dict[str, Points]:
    """For each parameter whose gradient is summed: where in the backward pass it is complete, by ranks.

    A point is the instruction after whose backward that is, or where a weight's gradient is computed
    ``later`` (``weight_points``). A rank that makes no use of a parameter is in none: it sends its zeros when
    its pass ends.
    """
    out: dict[str, Points] = {}
    for first in summed_params(program):
        found: list[tuple[float, tuple[int, ...]]] = []
        if first.args[0] in program.late:
            out[first.result] = ()
            continue
        for p in program.copies.get(first.args[0], (first,)):
            everyone = program.participants(p.type)
            left = set(everyone)
            for n in outline.uses.get(p.result, ()):
                user = program.instructions[n]
                if not outline.flows[n]:
                    continue
                types = (p.type,) if user.is_redistribution else user.types
                taking = [program.participants(t) for t in types]
                if len(left) == len(everyone) and taking.count(everyone) == len(taking):
                    late = n in later and p.result == user.inputs[1]
                    found.append((later[n] if late else n, everyone))  # nearly always
                    break
                who = left.intersection(*taking)
                if who:
                    found.append((n, tuple(sorted(who))))
                    left -= who
        out[first.result] = tuple(found)
    return out


def completing(program: Program, outline: Outline, later: Mapping[int, float]) -> dict[str, float]:
    """Where the backward pass comes to the first use of each parameter whose gradient is summed, every copy
    of one counted: the last point at which it gets a gradient, whatever ranks do."""
    out: dict[str, float] = {}
    for p in program.params:
        n = outline.uses.get(p.result, (None,))[0]
        if n is not None and outline.flows[n] and synchronised(program, p):
            is_late = n in later and p.result == program.instructions[n].inputs[1]
            out[p.result] = later[n] if is_late else n
    return out
