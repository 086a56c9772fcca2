"""Gradient buckets: which parameters' gradients are summed together, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .cost.placed import synchronised
from .ir import Program


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
    waiting = [i for i in program.params if synchronised(program, i)]
    waiting.sort(key=lambda i: first_use.get(i.result, -1), reverse=True)
    gradients = [
        (i.result, i.type.value.size_bytes, (program.participants(i.type), i.type.value.dtype))
        for i in waiting
    ]
    numbers = dict.fromkeys(tuple(_numbers(gradients, capacity)) for capacity in capacities)
    return tuple(
        _numbered(program, dict(zip((name for name, _, _ in gradients), these))) for these in numbers
    )


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
