"""Gradient buckets: which parameters' gradients are summed together, and in which order."""

from __future__ import annotations

from dataclasses import replace

from .cost.placed import synchronised
from .ir import Program


def with_buckets(program: Program, capacity_bytes: float) -> Program:
    """``program`` with a bucket number on every parameter whose gradient is summed over ranks.

    Gradients become ready in the reverse of the order of first use; a bucket is closed when it holds
    ``capacity_bytes``. Parameters of different rank sets or dtypes never share one.
    """
    first_use: dict[str, int] = {}
    for n, i in enumerate(program.instructions):
        for name in i.inputs:
            first_use.setdefault(name, n)
    waiting = [i for i in program.params if synchronised(program, i)]
    waiting.sort(key=lambda i: first_use.get(i.result, -1), reverse=True)
    number, filled, kind, numbers = -1, 0.0, None, {}
    for i in waiting:
        this = (program.participants(i.type), i.type.value.dtype)
        size = i.type.value.size_bytes
        if this != kind or filled + size > capacity_bytes:
            number, filled, kind = number + 1, 0.0, this
        filled += size
        numbers[i.result] = number
    return replace(
        program,
        instructions=tuple(
            replace(
                i, attrs=tuple((k, v) for k, v in i.attrs if k != "bucket") + (("bucket", numbers[i.result]),)
            )
            if i.op == "param" and i.result in numbers
            else i
            for i in program.instructions
        ),
    )
