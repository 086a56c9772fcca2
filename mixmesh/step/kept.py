"""The values that PyTorch's operators keep for their backward pass, and the memory that they use besides
results.

One row per operator, after PyTorch's derivatives.yaml and the CPU kernels. An operator without a row keeps
its inputs, the usual maximum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..cost.model import VIEWS
from ..lang.rules import SELECTED, Call, count_whole, selected_share


@dataclass(frozen=True, slots=True)
class Row:
    """The memory of an operator. ``keeps`` names inputs and results: ``inputs``, ``result``, ``first``,
    ``rest``, ``tables``, ``whole``, ``factors`` (an input whose partner takes a gradient). Sizes are
    multiples of the first result's bytes: ``extra`` is kept as well, ``forward`` and ``backward`` are
    temporary. If it ``passes``, the gradient of an input is that of the result itself, provided that the
    shapes agree. If it is ``strided``, the result has the input's layout."""

    keeps: str = "inputs"
    extra: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    passes: bool = False
    strided: bool = False


def _rows(names: str, row: Row) -> dict[str, Row]:
    return {f"aten.{name}": row for name in names.split()}


_PASSES = Row("", passes=True)
ROWS: dict[str, Row] = {
    **dict.fromkeys(VIEWS, _PASSES),
    **_rows(
        "add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar broadcast_tensors",
        Row("", passes=True, strided=True),
    ),
    **_rows("sum sum.dim_IntList cat", _PASSES),
    **_rows("mean mean.dim stack repeat pad constant_pad_nd flip roll cumsum", Row("")),
    **_rows("neg _to_copy mul.Scalar div.Scalar", Row("", strided=True)),
    **_rows("tril triu", Row("")),
    **_rows("linear addmm mm bmm baddbmm matmul mv einsum outer dot", Row("factors")),
    **_rows("mul.Tensor", Row("factors", strided=True)),
    **_rows("div.Tensor true_divide.Tensor", Row("divisor", backward=1.0, strided=True)),
    **_rows("tanh sigmoid exp relu rsqrt sqrt", Row("result", strided=True)),
    **_rows("softmax.int log_softmax.int _softmax _log_softmax _safe_softmax", Row("result")),
    **_rows("gelu silu leaky_relu hardtanh hardswish softplus abs log clamp", Row("first", strided=True)),
    **_rows("pow.Tensor_Scalar", Row("first", backward=2.0, strided=True)),
    **_rows("where.self masked_fill.Scalar masked_fill.Tensor", Row("condition", strided=True)),
    **_rows("embedding gather index.Tensor index_select", Row("rest")),
    **_rows("layer_norm native_layer_norm rms_norm group_norm native_group_norm", Row("inputs")),
    "mixmesh.local_batch_norm": Row("inputs"),
    "mixmesh.moments": Row("first"),
    "mixmesh.normalise": Row("inputs"),
    "mixmesh.running_statistics": Row(""),
    "mixmesh.sum_exp": Row(""),
    "mixmesh.cross_entropy": Row("inputs"),
    "mixmesh.experts": Row("tables"),
    SELECTED: Row("whole"),
    # the mask has a byte per element and is drawn as numbers; the product with it comes before the scaling
    "aten.native_dropout": Row("", extra=0.25, forward=1.0, backward=1.0),
    # positions of the largest elements, eight bytes each
    **_rows("max_pool2d max_pool1d max_pool3d", Row("first", extra=2.0)),
    **_rows("avg_pool2d avg_pool1d adaptive_avg_pool2d adaptive_avg_pool1d", Row("first")),
}  # fmt: skip
INPUTS = Row("inputs")
CONVOLUTION = Row("factors", forward=1.0, backward=1.0)  # the result, or its gradient, in oneDNN's layout
CONVOLUTIONS = ("aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.conv_transpose")


def row_of(call: Call) -> Row:
    row = ROWS.get(call.op)
    if row is None:
        return CONVOLUTION if call.op.startswith(CONVOLUTIONS) else INPUTS
    return row


def kept(call: Call, takes_gradient: tuple[bool, ...]) -> Iterator[tuple[str, int]]:
    """Yields the values of a call that autograd keeps, as ("input" or "result", position). ``takes_gradient``
    has an entry per input."""
    last = len(call.inputs) - 1
    match row_of(call).keeps:
        case "inputs":
            yield from (("input", n) for n in range(last + 1))
        case "first":
            yield "input", 0
        case "rest":
            yield from (("input", n) for n in range(1, last + 1))
        case "result":
            yield "result", 0
        case "tables":  # tables of experts; ids, tokens and values are kept sorted (extra_bytes)
            first = 1 + len(call.args[1]) + len(call.args[2])
            yield from (("input", n) for n in range(first, last + 1))
        case "whole":  # tensors that rows share; the rows themselves are kept selected (extra_bytes)
            yield from (("input", n) for n in range(last + 1 - count_whole(call), last + 1))
        case "condition":
            yield from (("input", n) for n, t in enumerate(call.inputs) if t.dtype == "bool")
        case "divisor":
            if last > 0:
                yield "input", 1
                if takes_gradient[1]:
                    yield "input", 0
        case "factors":
            pair = (1, 2) if call.op in ("aten.addmm", "aten.baddbmm") else (0, 1)
            if last > 0:
                yield from (
                    ("input", n) for n, other in (pair, pair[::-1]) if takes_gradient[other] and n <= last
                )
    if call.op == "aten.scaled_dot_product_attention":
        yield "result", 0


def extra_bytes(call: Call) -> float:
    """Bytes kept other than inputs and results: masks, positions, logarithms."""
    result = call.outputs[0].size_bytes
    if call.op == "aten.cross_entropy_loss":
        return call.inputs[0].size_bytes  # the logarithms of the softmax; the logits are not kept
    if call.op == "mixmesh.experts":
        return call.inputs[0].num_elements * call.args[-1]  # the values of each choice
    if call.op == SELECTED:
        return selected_share(call) * call.inputs[0].num_elements * call.args[-1]
    if call.op == "aten.scaled_dot_product_attention":
        return result / max(call.outputs[0].shape[-1], 1)  # the logarithm of each row's sum
    return row_of(call).extra * result


def forward_bytes(call: Call) -> float:
    """Temporaries of the forward pass."""
    if call.op == "mixmesh.experts":  # the results of a token's choices, before they are summed
        return _choices(call) * call.outputs[0].size_bytes
    if call.op == SELECTED:  # the result of selected rows, before it is spread
        return selected_share(call) * call.outputs[0].size_bytes
    return row_of(call).forward * call.outputs[0].size_bytes


def backward_bytes(call: Call) -> float:
    """Temporaries of the backward pass, without the gradients of the inputs."""
    if call.op == "aten.cross_entropy_loss":
        return call.inputs[0].size_bytes  # the gradient of the logarithms
    if call.op == "mixmesh.experts":  # gradients of the choices' values, two at a time
        return max(_choices(call) * call.outputs[0].size_bytes, extra_bytes(call) / 2)
    if call.op == SELECTED:  # gradients of the rows' values, two at a time
        return max(selected_share(call) * call.outputs[0].size_bytes, extra_bytes(call) / 2)
    return row_of(call).backward * call.outputs[0].size_bytes


def _choices(call: Call) -> int:
    """The number of experts per token of a mixture."""
    return call.inputs[0].shape[0] // max(call.outputs[0].shape[0], 1)
