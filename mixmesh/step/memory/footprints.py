"""The effect of one computation on memory: what autograd keeps, temporaries, and which results are views."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ...cost.calls import Kind
from ...lang.ir import Cut, Partial, Shard
from ...lang.rules import Call
from ..kept import Row, backward_bytes, extra_bytes, forward_bytes, kept, row_of
from .views import contiguous, is_dense, reshaped, view_of

Strides = tuple[int, ...]
# for each result, the input that it is a view of, and its strides
Results = tuple[tuple[int | None, Strides], ...]
LOOKUPS = ("aten.embedding", "aten.gather", "aten.index.Tensor", "aten.index_select")


@dataclass(slots=True)
class Footprint:
    """The effect on memory of computations of one kind. ``keeps`` are the inputs or results, by position,
    that autograd keeps if a gradient passes. ``results`` caches ``results_of`` by the strides of the inputs.
    ``passed`` has, by an input's position and the strides of the result's gradient, the strides of the
    input's gradient if that is a view."""

    call: Call
    row: Row
    keeps: tuple[tuple[str, int], ...]
    extra: float
    cut: Cut
    forward: tuple[tuple[float, Cut], ...]
    backward: tuple[tuple[float, Cut], ...]
    results: dict[tuple[Strides, ...], Results] = field(default_factory=dict)
    passed: dict[tuple[int, Strides], Strides | None] = field(default_factory=dict)

    @classmethod
    def of(cls, kind: Kind) -> Footprint:
        call, cut = kind.call, kind.work_type.cut
        return cls(
            call,
            row_of(call),
            tuple(kept(call, kind.takes)),
            extra_bytes(call) + mask_bytes(kind),
            cut,
            temporaries(kind, cut, forward_bytes(call)),
            temporaries(kind, cut, backward_bytes(call)),
        )

    def results_of(self, strides: tuple[Strides, ...]) -> Results:
        """For every result, the input of which it is a view, if any, and its strides; ``strides`` are those
        of the inputs."""
        if strides not in self.results:
            self.results[strides] = views_of(self.call, self.row, strides)
        return self.results[strides]

    def gradient_of(self, position: int, strides: Strides) -> Strides | None:
        """Strides of an input's gradient as a view of the result's, which has ``strides``; None if it is a
        new tensor."""
        if (position, strides) not in self.passed:
            self.passed[position, strides] = gradient_view(self.call, position, strides)
        return self.passed[position, strides]


def mask_bytes(kind: Kind) -> float:
    """The bytes of the mask of causal attention, which is written out if the queries are cut."""
    call = kind.call
    if call.op != "aten.scaled_dot_product_attention" or not call.arg(5, "is_causal", False):
        return 0.0
    query, placement = call.inputs[0], kind.inputs[0].placement
    if not isinstance(placement, Shard) or placement.dim != len(query.shape) - 2:
        return 0.0
    return query.shape[-2] * call.inputs[1].shape[-2] * query.size_bytes / max(query.num_elements, 1)


def temporaries(kind: Kind, cut: Cut, size_bytes: float) -> tuple[tuple[float, Cut], ...]:
    """The bytes of a computation's temporaries; a look-up in a piece of a table also masks its result."""
    masked = kind.call.op in LOOKUPS and isinstance(kind.outputs[0].placement, Partial)
    looked_up = [(float(kind.outputs[0].value.size_bytes), kind.outputs[0].cut.whole)] if masked else []
    return ((size_bytes, cut), *looked_up)


def views_of(call: Call, row: Row, strides: tuple[Strides, ...]) -> Results:
    """The results of a call as views of its inputs, like ``Footprint.results_of``."""
    shapes = [t.shape for t in call.outputs]
    if call.op == "aten.broadcast_tensors":
        return tuple(
            (k, own if shape == x.shape else (0,) * len(shape))
            for k, (own, shape, x) in enumerate(zip(strides, shapes, call.inputs))
        )
    if row.passes and not row.strided and call.op not in ("aten.sum", "aten.sum.dim_IntList", "aten.cat"):
        of_view = view_of(call, strides[0])
        if of_view is not None:
            return ((0, of_view),) * len(shapes)
    laid_out = _layout(call, row, strides)
    return tuple(
        (None, laid_out if laid_out and shape == shapes[0] else contiguous(shape)) for shape in shapes
    )


def _layout(call: Call, row: Row, strides: tuple[Strides, ...]) -> Strides | None:
    """Strides of a new result that is not in memory order."""
    shape = call.outputs[0].shape
    if call.op == "aten.scaled_dot_product_attention":
        b, h, s, d = shape if len(shape) == 4 else (0, 0, 0, 0)
        return (s * h * d, d, h * d, 1) if b else None
    if row.strided:
        for own, x in zip(strides, call.inputs):
            if x.shape == shape and is_dense(x.shape, own):
                return own
    return None


def copies_matrices(call: Call, position: int, strides: Strides) -> bool:
    """Whether a product of many matrices has to copy an input in order to treat it as one batch."""
    shape = call.inputs[position].shape
    if call.op != "aten.matmul" or len(shape) <= 2 or len(call.outputs[0].shape) <= 3:
        return False
    batch = 1
    for size in shape[:-2]:
        batch *= size
    return reshaped(shape, strides, (batch, *shape[-2:])) is None


# By operator: the strides of the gradient of the input at a position, seen as a view of the result's gradient
# with the given strides; None for a new tensor. Other operators reshape.
GradientView = Callable[[Call, int, Strides], Strides | None]


def _never(call: Call, position: int, strides: Strides) -> None:
    return None


def _spread(call: Call, position: int, strides: Strides) -> Strides:
    return (0,) * len(call.inputs[position].shape)


def _same(call: Call, position: int, strides: Strides) -> Strides:
    return strides


def _if_same_shape(call: Call, position: int, strides: Strides) -> Strides | None:
    return strides if call.inputs[position].shape == call.outputs[0].shape else None


def _first_if_same_shape(call: Call, position: int, strides: Strides) -> Strides | None:
    return None if position else _if_same_shape(call, position, strides)


def _transposed(call: Call, position: int, strides: Strides) -> Strides | None:
    return view_of(Call(call.op, call.args, call.kwargs, call.outputs, call.inputs), strides)


def _permuted(call: Call, position: int, strides: Strides) -> Strides:
    old = call.inputs[position].shape
    inverse = sorted(range(len(old)), key=lambda d: call.args[1][d] % len(old))
    return tuple(strides[d] for d in inverse)


NEW_GRADIENTS = """
broadcast_tensors expand slice.Tensor select.int unbind.int split.Tensor split_with_sizes chunk rsub.Scalar
"""
GRADIENT_VIEWS: dict[str, GradientView] = {
    **{f"aten.{name}": _never for name in NEW_GRADIENTS.split()},
    "aten.sum": _spread,
    "aten.sum.dim_IntList": _spread,
    "aten.cat": _same,
    "aten.add.Tensor": _if_same_shape,
    "aten.sub.Tensor": _first_if_same_shape,
    "aten.add.Scalar": _if_same_shape,
    "aten.sub.Scalar": _if_same_shape,
    "aten.transpose.int": _transposed,
    "aten.t": _transposed,
    "aten.permute": _permuted,
}


def gradient_view(call: Call, position: int, strides: Strides) -> Strides | None:
    """The gradient of an input, like ``Footprint.gradient_of``."""
    special = GRADIENT_VIEWS.get(call.op)
    if special is not None:
        return special(call, position, strides)
    return reshaped(call.outputs[0].shape, strides, call.inputs[position].shape)
