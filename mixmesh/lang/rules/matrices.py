"""Rules of operators of batches of matrices (``torch.linalg``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .rule import Call
from .shapes import rank_of


def mapped(call: Call) -> str:
    """The rule of operators that map each matrix to a matrix, a vector or a number: the last two dims are
    whole."""
    batch = rank_of(call) - 2
    return f"{'... ' if batch else ''}x! y! -> {', '.join(_of_batch(call, batch))}"


def solved(at: int) -> Callable[[Call], str]:
    """The rule of operators that solve equations of matrices for the columns of another operand, at ``at``,
    or for a vector: each column by itself. The dims before are the same, or the other operand has those
    alone; where PyTorch repeats matrices otherwise, all is whole."""

    def rule(call: Call) -> str:
        shape, matrix = call.inputs[at].shape, call.inputs[1 - at].shape
        is_vector, batch = shape == matrix[:-1], len(matrix) - 2
        if matrix[:-2] not in (shape[: len(shape) - 2 + is_vector], ()):
            left, outs = _whole("x", shape), [_whole(f"z{n}", t.shape) for n, t in enumerate(call.outputs)]
            operands = left, _whole("y", matrix)
        else:
            left = "... u!" if is_vector else "... u! v"
            operands = left, f"{'... ' if batch else ''}x! y!"
            first, *others = _of_batch(call, batch)
            outs = [first if is_vector else "... w! v", *others]
        return f"{', '.join(operands if at == 0 else operands[::-1])} -> {', '.join(outs)}"

    return rule


def _whole(name: str, shape: Sequence[int]) -> str:
    return " ".join(f"{name}{i}!" for i in range(len(shape)))


def _of_batch(call: Call, batch: int) -> list[str]:
    """The text of each result: its dims after the first ``batch`` are whole."""
    before = ("...",) if batch else ()
    return [
        " ".join([*before, *(f"b{n}{i}!" for i in range(len(t.shape) - batch))])
        for n, t in enumerate(call.outputs)
    ]
