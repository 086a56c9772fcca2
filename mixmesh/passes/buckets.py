"""Gradient buckets: the parameters whose gradients are summed together, and the order of the sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..cost import LEVELLED, CostModel
from ..cost.sums import Summed, order_of_sums, parts_of
from ..lang.ir import Buckets, Program, with_attrs


def with_buckets(program: Program, capacity_bytes: float) -> Program:
    """``program`` with a bucket number on every parameter whose gradient is summed over ranks.

    Gradients become ready in the reverse of the order of first use; a bucket is closed when it holds
    ``capacity_bytes``. Parameters of different rank sets or dtypes never share one.
    """
    (buckets,) = bucketings(program, (capacity_bytes,))
    return numbered(program, buckets)


def bucketings(
    program: Program, capacities: Sequence[float], order: tuple[Summed, ...] | None = None
) -> tuple[Buckets, ...]:
    """The different buckets of ``with_buckets`` for these capacities. ``order`` is that of the program's
    sums, if it is already known: it does not depend on buckets."""
    params = program.params
    kinds: dict[int, list[tuple]] = {}  # for each place, the kinds; a parameter with copies has several
    for s in order_of_sums(program) if order is None else order:
        kinds.setdefault(s.place, []).append((s.kind.dtype, s.kind.ranks))
    gradients = [(params[place].type.value.size_bytes, tuple(kind)) for place, kind in kinds.items()]
    partitions: dict[Buckets, None] = {}
    for capacity in capacities:
        buckets = list(program.buckets)
        for place, number in zip(kinds, _numbers(gradients, capacity)):
            buckets[place] = number
        partitions[tuple(buckets)] = None
    return tuple(partitions)


def numbered(program: Program, buckets: Buckets) -> Program:
    """``program`` with these bucket numbers on its parameters; None leaves the parameter unchanged."""
    instructions = list(program.instructions)
    params = [n for n, i in enumerate(instructions) if i.op == "param"]
    for n, number in zip(params, buckets):
        i = instructions[n]
        if number is not None:
            attrs = (*((k, v) for k, v in i.attrs if k != "bucket"), ("bucket", number))
            instructions[n] = i if attrs == i.attrs else with_attrs(i, attrs)
    return program.changed(instructions=tuple(instructions))


def merged(program: Program, costs: CostModel, ready_s: Mapping[str, float]) -> Program:
    """``program`` with the buckets whose sums would end earliest if each had a link of its own.

    ``ready_s`` is when each parameter's gradient is ready. Sums between one set of ranks follow each other in
    the order of readiness. With r_j the time when gradient j is ready, the best sums of the first j end at

    end(j) = min over i < j of max(end(i), r_j) + seconds(bytes(i + 1, ..., j))

    where the seconds are the least of some lines ``latency_s + s_per_byte * bytes``. This merges like MG-WFBP
    (Shi et al., INFOCOM'19), but exactly: a sum that waits longer for more gradients saves a latency. Among
    equally good choices, the one with the fewest buckets is taken.
    """
    params = program.params
    kinds: dict[tuple, list[int]] = {}  # the places of parameters
    for s in order_of_sums(program):
        kinds.setdefault(s.kind, []).append(s.place)
    groups: list[tuple[float, list[int]]] = []
    for (_, ranks, owned, _), places in kinds.items():
        fit = costs.collective(_way(program, ranks, owned), ranks)
        places.sort(key=lambda place: ready_s[params[place].result])  # the sort is stable
        sizes = [params[place].type.value.size_bytes for place in places]
        ready = [ready_s[params[place].result] for place in places]
        groups += [(ready[b - 1], places[a:b]) for a, b in _cuts(ready, sizes, fit.affine_lines)]
    groups.sort(key=lambda bucket: bucket[0])
    buckets = list(program.buckets)
    for number, (_, places) in enumerate(groups):
        for place in places:
            buckets[place] = number
    return numbered(program, tuple(buckets))


def _way(program: Program, ranks: tuple[int, ...], owned: str | None) -> str:
    name = "all_reduce" if owned is None else "reduce_scatter"
    large = 0 if program.levels is None else program.levels.least_bytes
    return LEVELLED[name] if parts_of(program, large, ranks, owned) else name


def _cuts(
    ready: list[float], sizes: list[int], lines: Sequence[tuple[float, float]]
) -> list[tuple[int, int]]:
    """The runs (begin, end) for which the last sum ends earliest. A sum takes the least of these ``lines``,
    each a latency in seconds and seconds per byte."""
    before = np.concatenate(([0.0], np.cumsum(sizes)))
    end = np.zeros(len(ready) + 1)
    begin = [0] * (len(ready) + 1)
    for j in range(1, len(ready) + 1):
        run = before[j] - before[:j]
        takes = np.minimum.reduce([latency_s + s_per_byte * run for latency_s, s_per_byte in lines])
        ends = np.maximum(end[:j], ready[j - 1]) + takes
        begin[j] = int(ends.argmin())
        end[j] = ends[begin[j]]
    cuts = []
    j = len(ready)
    while j:
        cuts.append((begin[j], j))
        j = begin[j]
    return cuts[::-1]


def _numbers(gradients: list[tuple[int, tuple]], capacity_bytes: float) -> list[int]:
    number, filled, kind, out = -1, 0.0, None, []
    for size, this in gradients:
        if this != kind or filled + size > capacity_bytes:
            number, filled, kind = number + 1, 0.0, this
        filled += size
        out.append(number)
    return out
