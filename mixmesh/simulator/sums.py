"""The sums of gradients of a program under its buckets, and the gathers of what owners stepped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..cost.sums import GradientSum
from ..ir import NEVER
from ..timeline import bucket_name, parameters_name
from .values import Call

if TYPE_CHECKING:
    from .simulation import Simulation

AT_THE_END = NEVER  # a point below all others


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums of gradients: what they are, and at which point which ranks issue their part of which. What
    owners have stepped is gathered in the reverse order, by the same buckets."""

    names: tuple[str, ...]
    calls: tuple[Call, ...]
    issues: dict[float, list[tuple[int, tuple[int, ...]]]]  # by point: (sum, ranks)
    gathers: tuple[tuple[str, Call], ...] = ()
    gather_of: Mapping[str, int] = field(default_factory=dict)  # by owned parameter
    late: frozenset[int] = frozenset()  # those that wait for gradients which redistributions bring
    plain: frozenset[int] = frozenset()  # sums of whole gradients, for all ranks


NO_SUMS = Sums((), (), {})


def sums_of(simulation: Simulation, sums: tuple[GradientSum, ...]) -> Sums:
    """A rank starts its buckets in their order, each when it is complete."""
    issues: dict[float, list[tuple[int, tuple[int, ...]]]] = {}
    alike = simulation.in_sums
    passed: dict[int, float] = {}  # by kind of rank: where it started its last one
    for k, s in enumerate(sums):
        by_point: dict[float, list[int]] = {}
        complete = [simulation.complete[p.result] for p in s.params]
        for kind in alike.of(s.ranks):
            last = min([at.get(kind, AT_THE_END) for at in complete])
            passed[kind] = min(last, passed.get(kind, last))
            by_point.setdefault(passed[kind], []).append(kind)
        for point, kinds in by_point.items():
            ranks = s.ranks if len(by_point) == 1 else alike.ranks(kinds)
            issues.setdefault(point, []).append((k, ranks))
    members = [[p.result for p in s.params] for s in sums]
    calls = [simulation.call(s.exchange, "gradient") for s in sums]
    gathers, gather_of = [], {}
    for s, names in reversed([*zip(sums, members)]):
        if s.owned is not None:
            gather_of |= dict.fromkeys(names, len(gathers))
            gathers.append((parameters_name(names), simulation.call(s.gather, "gradient")))
    late = frozenset(k for k, s in enumerate(sums) if s.late)
    names = tuple(bucket_name(n, s.ranks if s.cells else ()) for s, n in zip(sums, members))
    plain = frozenset(k for k, s in enumerate(sums) if not (s.owned or s.cells or s.late))
    return Sums(names, tuple(calls), issues, tuple(gathers), gather_of, late, plain)
