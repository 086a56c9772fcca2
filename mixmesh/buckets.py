"""Gradient buckets: which parameters' gradients are summed together, and in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from .cost import CostModel
from .cost.placed import summed_params
from .cost.sums import order_of_sums
from .ir import Instruction, Program, cells


def with_buckets(program: Program, capacity_bytes: float) -> Program:
    """``program`` with a bucket number on every parameter whose gradient is summed over ranks.

    Gradients become ready in the reverse of the order of first use; a bucket is closed when it holds
    ``capacity_bytes``. Parameters of different rank sets or dtypes never share one.
    """
    (made,) = bucketed(program, (capacity_bytes,))
    return made


def bucketed(program: Program, capacities: Sequence[float]) -> tuple[Program, ...]:
    """``with_buckets`` for every capacity that leads to other buckets than those before it."""
    first_use: dict[str, int] = {}
    for n, i in enumerate(program.instructions):
        for name in i.inputs:
            first_use.setdefault(name, n)
    waiting = summed_params(program)
    waiting.sort(key=lambda i: first_use.get(i.result, -1), reverse=True)
    gradients = [
        (i.result, i.type.value.size_bytes, (_ranks(program, i), i.type.value.dtype)) for i in waiting
    ]
    numbers = dict.fromkeys(tuple(_numbers(gradients, capacity)) for capacity in capacities)
    return tuple(
        _numbered(program, dict(zip((name for name, _, _ in gradients), these))) for these in numbers
    )


def _ranks(program: Program, param: Instruction) -> tuple:
    """Between whom the gradient is summed."""
    if param.args[0] in program.copies:
        return tuple(cell.ranks for cell in cells(program, param))
    return program.participants(param.type)


def merged(program: Program, costs: CostModel, ready_s: Mapping[str, float]) -> Program:
    """``program`` with those buckets whose sums would end first, were each on its own link.

    ``ready_s`` is when each parameter's gradient is there. Between one set of ranks, sums follow each other
    in the order of readiness; with r_j the time when gradient j is there, the best sums of the first j end at

        end(j) = min over i < j of max(end(i), r_j) + latency_s + s_per_byte * bytes(i + 1, ..., j)

    which merges as MG-WFBP does (Shi et al., INFOCOM'19), but exactly: a sum that waits longer for more
    gradients saves a latency. Of equally good ones that with the fewest buckets.
    """
    params = program.params
    kinds: dict[tuple, list[str]] = {}
    for s in order_of_sums(program):
        kinds.setdefault(s.kind, []).append(params[s.place].result)
    found: list[tuple[float, list[str]]] = []
    for (_, ranks, owned, _), names in kinds.items():
        fit = costs.collective("all_reduce" if owned is None else "reduce_scatter", ranks)
        names.sort(key=ready_s.__getitem__)  # stable
        carried_s = [fit.s_per_byte * program.types[name].value.size_bytes for name in names]
        ready = [ready_s[name] for name in names]
        found += [(ready[b - 1], names[a:b]) for a, b in _cuts(ready, carried_s, fit.latency_s)]
    found.sort(key=lambda bucket: bucket[0])
    return _numbered(program, {name: n for n, (_, names) in enumerate(found) for name in names})


def _cuts(ready: list[float], carried_s: list[float], latency_s: float) -> list[tuple[int, int]]:
    """Where the runs begin and end that make the last one end first."""
    before = np.concatenate(([0.0], np.cumsum(carried_s)))
    end = np.zeros(len(ready) + 1)
    begin = [0] * (len(ready) + 1)
    for j in range(1, len(ready) + 1):
        ends = np.maximum(end[:j], ready[j - 1]) + latency_s + before[j] - before[:j]
        begin[j] = int(ends.argmin())
        end[j] = ends[begin[j]]
    cuts = []
    j = len(ready)
    while j:
        cuts.append((begin[j], j))
        j = begin[j]
    return cuts[::-1]


def _numbers(gradients: list[tuple[str, int, tuple]], capacity_bytes: float) -> list[int]:
    number, filled, kind, out = -1, 0.0, None, []
    for _, size, this in gradients:
        if this != kind or filled + size > capacity_bytes:
            number, filled, kind = number + 1, 0.0, this
        filled += size
        out.append(number)
    return out


def _numbered(program: Program, numbers: dict[str, int]) -> Program:
    instructions = list(program.instructions)
    for n, i in enumerate(instructions):
        if i.op == "param" and i.result in numbers:
            attrs = tuple((k, v) for k, v in i.attrs if k != "bucket")
            instructions[n] = replace(i, attrs=(*attrs, ("bucket", numbers[i.result])))
    return program.changed(instructions=tuple(instructions))
