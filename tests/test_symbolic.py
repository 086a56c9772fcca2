"""Traces with symbols for sizes: the graphs of plain traces wherever they serve, and nothing elsewhere."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mixmesh.frontend.trace import LossSource, trace, trace_symbolic
from mixmesh.frontend.trace.symbolic import END, written_out
from mixmesh.frontend.trace.symbolic_trace import SymbolicTrace

aten = torch.ops.aten
SIZES = ((4, 6), (5, 6), (4, 9), (7, 3), (2, 12), (3, 2))


def pixels(samples: int, length: int) -> dict[str, torch.Tensor]:
    return {"x": torch.zeros(samples, length), "y": torch.zeros(samples, length)}


def shapes_of(batch: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in batch.items()}


def symbolic(model: nn.Module, batch: dict, **options) -> SymbolicTrace | None:
    """A trace in which every dim of every input is free."""
    free = {name: range(x.ndim) for name, x in batch.items()}
    return trace_symbolic(model, batch, free, **options)[1]


class Rows(nn.Module):
    """A layer for each element of a row, and what a subclass makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(1, 4), nn.Linear(4, 1)
        self.register_buffer("places", torch.arange(32.0))

    def forward(self, x, y):
        return F.mse_loss(self.last(self.taken(self.layer(x[..., None])))[..., 0], y)

    def taken(self, h):
        return h


class Masked(Rows):
    def taken(self, h):
        n = h.shape[1]
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        h = h + self.places[:n, None] / n
        return F.scaled_dot_product_attention(h, h, h, attn_mask=mask)


class Padded(Rows):
    """Pads rows to a multiple, as windowed attention does, and rolls the windows."""

    def taken(self, h):
        n = h.shape[1]
        h = F.pad(h, (0, 0, 0, -n % 4))
        h = h.view(len(h), -1, 4, 4).roll(1, 2).flatten(1, 2)
        return h[:, :n]


class Convolved(Rows):
    def taken(self, h):
        short = F.max_pool1d(h.mT, 2, ceil_mode=True)
        return F.interpolate(short, size=h.shape[1]).mT


class Written(Rows):
    """Writes in place into a part whose size is computed."""

    def taken(self, h):
        h = h.clone()
        h[:, : h.shape[1] // 2] *= 2
        return h


# how many of SIZES a trace with symbols serves: PyTorch fixes some for windows, and for interpolation
@pytest.mark.parametrize("kind, count", [(Rows, 6), (Masked, 6), (Written, 4), (Padded, 2), (Convolved, 2)])
def test_graphs_are_those_of_plain_traces(kind, count):
    model = kind()
    made = symbolic(model, pixels(*SIZES[0]))
    assert made is not None
    served = 0
    for size in SIZES:
        traced, plain = made.at(shapes_of(pixels(*size))), trace(model, pixels(*size))
        if traced is not None:
            assert traced.graph == plain.graph and traced == plain, size
            served += 1
    assert served == count


class Long(Rows):
    def taken(self, h):
        return h.tanh() if h.shape[1] > 8 else h


class Unrolled(Rows):
    def taken(self, h):
        return torch.stack([h[:, n].sin() for n in range(h.shape[1])], 1)


class Cached(Rows):
    """Keeps what it has made for a length, by length."""

    known: dict[int, float] = {}

    def taken(self, h):
        return h * self.known.setdefault(h.shape[1], float(h.shape[1]))


class Counted(Rows):
    """Asks for the types of sizes and of their quotients, and for their digits."""

    def taken(self, h):
        n = h.shape[1]
        are_numbers = isinstance(n, int) and isinstance(n / 2, float) and isinstance(n > 1, bool)
        return h * 2 if are_numbers and "1" in str(n) else h


@pytest.mark.parametrize("kind", [Long, Unrolled, Cached, Counted])
def test_sizes_that_the_model_reads_are_not_left_open(kind):
    """Each of these computes something else for another length: other lengths have no trace with symbols."""
    model = kind()
    made = symbolic(model, pixels(4, 6))
    for samples, length in ((4, 6), (6, 6), (4, 11), (4, 3)):
        shapes = shapes_of(pixels(samples, length))
        traced = None if made is None else made.at(shapes)
        if traced is not None:
            assert traced.graph == trace(model, pixels(samples, length)).graph, (samples, length)
    assert made is None or made.at(shapes_of(pixels(4, 11))) is None


class Quotient(Rows):
    def taken(self, h):
        return h * (1 / h.shape[1]) + h.sum() / (h.shape[0] / h.shape[1])


def test_quotients_of_sizes_are_those_of_python():
    made = symbolic(Quotient(), pixels(4, 6))
    assert made is not None
    for size in SIZES:
        traced = made.at(shapes_of(pixels(*size)))
        assert traced is not None and traced.graph == trace(Quotient(), pixels(*size)).graph


class Root(Rows):
    def taken(self, h):
        return h * h.shape[1] ** -0.5


def test_other_fractions_have_traces_of_their_own():
    assert symbolic(Root(), pixels(4, 6)) is None


def test_other_inputs_are_not_served():
    made = symbolic(Rows(), pixels(4, 6))
    assert made is not None
    for shapes in (
        {"x": (4, 6)},
        {"x": (4, 6), "y": (4,)},
        {"x": (4, 6), "y": (4, 5)},
        {"x": (4, 6), "y": None},
    ):
        assert made.at(shapes) is None


class Shown(Rows):
    """Returns outputs beside the loss: one with a row per sample, and one without."""

    def forward(self, x, y):
        h = self.layer(x[..., None])
        return {"loss": F.mse_loss(self.last(h)[..., 0], y), "rows": h.sum(1), "columns": h.sum((0, 2))}


@pytest.mark.parametrize("loss", [LossSource.RETURNED, LossSource.CALLER])
def test_outputs_keep_their_marks(loss):
    options = dict(outputs=("rows", "columns")) if loss is LossSource.RETURNED else {}
    made = symbolic(Shown(), pixels(4, 6), loss=loss, **options)
    assert made is not None
    for size in SIZES:
        traced, plain = made.at(shapes_of(pixels(*size))), trace(Shown(), pixels(*size), loss=loss, **options)
        assert traced is not None and (traced.graph, traced.returned) == (plain.graph, plain.returned)


@pytest.mark.parametrize("given, written", [
    (("x",), ("x", 0, 0, END)), (("x", 1), ("x", 1, 0, END)), (("x", 1, None, 5), ("x", 1, 0, 5)),
    (("x", 1, 2), ("x", 1, 2, END)), (("x", 1, 2, 7, 3), ("x", 1, 2, 7, 3)),
])  # fmt: skip
def test_slices_are_written_out(given, written):
    assert written_out(aten.slice.Tensor, given) == written
    assert written_out(aten.slice_scatter.default, ("h", *given)) == ("h", *written)
    assert written_out(aten.select.int, given) == given


class Chosen(Rows):
    """Skips rows that a mask selects where it selects none, which is proved by exports without symbols."""

    def taken(self, h):
        h, mask = h.clone(), h[:, 0, 0] > 0
        if mask.any():
            h[mask] = h[mask].tanh()
        return h


def test_a_call_with_such_branches_is_exported_with_symbols_once(monkeypatch):
    export, seen = torch.export.export, []

    def counted(*args, dynamic_shapes=None, **options):
        seen.append(dynamic_shapes is not None)
        return export(*args, dynamic_shapes=dynamic_shapes, **options)

    monkeypatch.setattr(torch.export, "export", counted)
    assert symbolic(Chosen(), pixels(4, 6)) is None
    assert seen.count(True) == 1


def tensors_of(shape: tuple[int, ...]) -> list[torch.Tensor]:
    """All tensors of this shape that hold memory in this process."""
    gc.collect()
    return [x for x in gc.get_objects() if type(x) is torch.Tensor and x.shape == shape and not x.is_meta]


def test_no_batch_is_kept():
    """A batch of images would take much of a small card for as long as the trace is there."""
    earlier = len(tensors_of((4, 7)))
    batch = pixels(4, 7)
    kept = [weakref.ref(x) for x in batch.values()]
    made = symbolic(Rows(), batch)
    assert made is not None and len(tensors_of((4, 7))) == earlier + len(batch)
    del batch
    assert len(tensors_of((4, 7))) == earlier
    assert not any(each() is not None for each in kept)


def test_a_trace_that_takes_too_long_is_given_up():
    assert symbolic(Rows(), pixels(4, 6), limit_s=0.0) is None
