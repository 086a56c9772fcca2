"""Reductions of gradients under a program's buckets, and gathers of parameters that owners have stepped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..base.timeline import bucket_name, parameters_name
from ..cost.exchanges import Exchange
from ..cost.sums import GradientSum
from ..lang.ir import NEVER
from .ready import Readiness

AT_THE_END = NEVER  # a point below all others
Issues = Mapping[float, list[tuple[int, tuple[int, ...]]]]


@dataclass(frozen=True, slots=True)
class Reductions:
    """The reductions by number: names and collectives, and the points at which ranks issue their parts.
    Stepped parameters are gathered from their owners in the reverse order, by the same buckets."""

    names: tuple[str, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    issues: Issues = field(default_factory=dict)  # for each point, (reduction, ranks)
    gathers: tuple[tuple[str, Exchange], ...] = ()
    gather_of: Mapping[str, int] = field(default_factory=dict)  # for each owned parameter, its gather
    late: frozenset[int] = frozenset()  # those that wait for gradients from redistributions
    plain: frozenset[int] = frozenset()  # reductions of whole gradients, by all ranks


def reductions_of(sums: tuple[GradientSum, ...], ready: Readiness) -> Reductions:
    """The reductions of these buckets. Every rank starts them in their order, each when it is complete."""
    alike, complete = ready.alike, ready.by_kind
    issues: dict[float, list[tuple[int, tuple[int, ...]]]] = {}
    passed: dict[int, float] = {}  # for each kind of rank, where it started its last one
    for k, s in enumerate(sums):
        by_point: dict[float, list[int]] = {}
        points = [complete[p.result] for p in s.params]
        for kind in alike.of(s.ranks):
            last = min([at.get(kind, AT_THE_END) for at in points])
            passed[kind] = min(last, passed.get(kind, last))
            by_point.setdefault(passed[kind], []).append(kind)
        for point, kinds in by_point.items():
            ranks = s.ranks if len(by_point) == 1 else alike.ranks(kinds)
            issues.setdefault(point, []).append((k, ranks))
    members = [[p.result for p in s.params] for s in sums]
    gathers: list[tuple[str, Exchange]] = []
    gather_of: dict[str, int] = {}
    for s, names in reversed([*zip(sums, members)]):
        if s.owned is not None:
            gather_of |= dict.fromkeys(names, len(gathers))
            gathers.append((parameters_name(names), s.gather))
    return Reductions(
        tuple(bucket_name(n, s.ranks if s.cells else ()) for s, n in zip(sums, members)),
        tuple(s.exchange for s in sums),
        issues,
        tuple(gathers),
        gather_of,
        frozenset(k for k, s in enumerate(sums) if s.late),
        frozenset(k for k, s in enumerate(sums) if not (s.owned or s.cells or s.late)),
    )
