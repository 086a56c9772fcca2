"""Splits recurrent layers with dropout between them, because the fused operator would draw its own
numbers."""

from __future__ import annotations

from ...lang.ir import Node, Ref
from .build import Builder, Rule
from .schema import bound


def layers(b: Builder, node: Node) -> tuple[Ref | None, ...] | None:
    """One operator per layer, and ``native_dropout`` on the results of all but the last."""
    arg = bound(node)
    if not (arg["dropout"] and arg["train"]):
        return None
    states = arg["hx"] if isinstance(arg["hx"], tuple) else (arg["hx"],)
    count, directions = arg["num_layers"], 2 if arg["bidirectional"] else 1
    params = arg["params"]
    each = len(params) // count
    x, last = arg["input"], []
    for layer in range(count):
        if layer:
            x = _dropout(b, x, arg["dropout"], arg["batch_first"])
        first = layer * directions
        own = tuple(b("aten.slice.Tensor", s, 0, first, first + directions) for s in states)
        hx = own if isinstance(arg["hx"], tuple) else own[0]
        options = (arg["has_biases"], 1, 0.0, True, arg["bidirectional"], arg["batch_first"])
        x, *left = b.all(node.op, x, hx, params[layer * each : (layer + 1) * each], *options)
        last.append(left)
    kept = (b("aten.cat", tuple(s), 0) if count > 1 else s[0] for s in zip(*last))
    # a later pass drops results that are not used
    return (x, *kept)


def _dropout(b: Builder, x: Ref, p: float, batch_first: bool) -> Ref:
    """Applies dropout that draws its numbers with time first, as PyTorch does."""
    if not batch_first:
        return b("aten.native_dropout", x, p, True)
    dropped = b("aten.native_dropout", b("aten.transpose.int", x, 0, 1), p, True)
    return b("aten.transpose.int", dropped, 0, 1)


RECURRENT_RULES: dict[str, Rule] = {
    f"aten.{name}.input": layers for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}
