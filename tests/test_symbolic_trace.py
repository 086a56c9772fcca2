"""A trace with symbols for sizes gives the graphs of plain traces, or none."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.architectures import ARCHITECTURES
from benchmarks.many_sizes import serve
from mixmesh.frontend.trace import SymbolicTrace, trace, trace_symbolic

FREE = {"x": (0, 1), "y": (0, 1)}


class Scaled(nn.Module):
    """Multiplies a linear layer's output by ``factor(x)``."""

    def __init__(self, factor: Callable[[Tensor], Tensor | float]) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 4), factor

    def forward(self, x, y):
        return F.mse_loss(self.linear(x) * self.factor(x), y)


def batch(rows: int, length: int) -> dict[str, Tensor]:
    return {"x": torch.zeros(rows, length, 4), "y": torch.zeros(rows, length, 4)}


def symbolic(model: nn.Module) -> SymbolicTrace | None:
    return trace_symbolic(model, batch(12, 9), FREE)[1]


def served(factor: Callable[[Tensor], Tensor | float], lengths: Collection[int]) -> list[int]:
    """The lengths for which a trace with symbols gives a graph, each that of a plain trace."""
    model = Scaled(factor)
    made = symbolic(model)
    given = {n: made.at({"x": (8, n, 4), "y": (8, n, 4)}) for n in lengths} if made is not None else {}
    for n, result in given.items():
        assert result is None or result.graph == trace(model, batch(8, n)).graph, n
    return [n for n, result in given.items() if result is not None]


def test_types_of_sizes_are_those_of_numbers():
    assert served(lambda x: 2 if isinstance(x.shape[1], int) and x.shape[1] > 20 else 1, (5, 20, 21)) == [
        5,
        20,
    ]
    assert served(lambda x: 2 if x.shape[1].__class__ is int and x.shape[1] > 20 else 1, (5, 21)) == [5]
    assert "__getattribute__" not in vars(torch.SymInt)  # once the trace is over


def test_text_of_sizes_has_digits():
    assert served(lambda x: len(f"{x.shape[1]}"), (5, 9, 10)) == [9]
    assert served(lambda x: int(str(tuple(x.shape)).count("1")), (5, 9, 10)) == []  # 12 rows


def test_fractions_have_traces_of_their_own():
    tens = (10, 20, 21)
    assert served(lambda x: math.ceil(x.shape[1] * 0.1 * 3), tens) == []
    assert served(lambda x: 2 if x.shape[1] * 0.1 * 3 > 3 else 1, tens) == []
    assert served(lambda x: math.ceil(x.shape[1] / 2), tens) == [*tens]


def test_sizes_under_autocast():
    """Casts, a block that casts nothing and a write within them are those of plain traces."""

    def factor(x):
        with torch.autocast("cpu", enabled=False):
            scores = x @ x.transpose(1, 2)
        made = torch.zeros_like(scores)
        made[:, 0] = (x @ x.transpose(1, 2))[:, 1]
        return (scores + made).mean() / x.shape[1]

    model, autocast = Scaled(factor), ("cpu", "bf16")
    made = trace_symbolic(model, batch(12, 9), FREE, autocast=autocast)[1]
    assert made is not None
    for rows, length in ((12, 9), (8, 5), (3, 30)):
        shapes = {name: (rows, length, 4) for name in ("x", "y")}
        plain = trace(model, batch(rows, length), autocast=autocast).graph
        assert made.at(shapes).graph == plain
        assert any(t.dtype == "bf16" for t in plain.types.values())


def test_the_bench_counts_what_one_trace_serves():
    """``python -m benchmarks lengths --architectures``"""
    row = serve(next(a for a in ARCHITECTURES if a.name == "GPT-2"))
    assert row.served == row.shapes > 0 and row.wrong == 0


def test_whole_writes():
    """With symbols, a write to some columns writes all rows, too."""

    def every_other(x):
        mask = torch.zeros(x.shape[:2])
        mask[:, ::2] = x[:, ::2, 0]
        return mask[..., None]

    assert served(every_other, (5, 9, 30)) == [5, 9, 30]


class Spelled(nn.Module):
    """Gives scores of characters, with targets of as many lengths as there are batches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 10)

    def forward(self, x, y):
        scores = self.linear(x).log_softmax(-1).transpose(0, 1)
        times, lengths = (torch.full(x.shape[:1], z.shape[1]) for z in (x, y))
        return F.ctc_loss(scores, y, times, lengths)


def test_ctc_loss():
    model = Spelled()
    x, y = torch.zeros(12, 20, 4), torch.ones(12, 5, dtype=torch.long)
    _, made = trace_symbolic(model, {"x": x, "y": y}, FREE)
    assert made is not None
    for rows, time, longest in ((12, 20, 5), (7, 31, 9), (3, 12, 4)):
        shapes = {"x": (rows, time, 4), "y": (rows, longest)}
        other = {"x": torch.zeros(shapes["x"]), "y": torch.ones(shapes["y"], dtype=torch.long)}
        result = made.at(shapes)
        assert result is not None and result.graph == trace(model, other).graph


LENGTHS: dict[str, int] = {}


class Notes:
    length: int | None = None


def test_symbols_are_left_nowhere():
    notes, seen = Notes(), []

    def factor(x):
        LENGTHS["last"] = notes.length = x.shape[1]
        seen.append(x.shape[1])
        return 1

    assert symbolic(Scaled(factor)) is not None
    assert all(type(n) is int for n in (LENGTHS["last"], notes.length, *seen))
