"""Small passes from graph to graph: one name for each operator, and no operators without an effect."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...lang.ir import Arg, DType, Graph, Node, Ref
from ...lang.ir.graph import begins_gradient
from .build import Builder, Rule, rewrite
from .dtypes import TORCH_DTYPE
from .schema import bound, normalise


def drop_assertions(graph: Graph) -> Graph:
    return replace(graph, nodes=tuple(n for n in graph.nodes if n.results or n.is_sink))


def normal_arguments(graph: Graph) -> Graph:
    return replace(graph, nodes=tuple(map(normalise, graph.nodes)))


def one_spelling(graph: Graph) -> Graph:
    """Replaces aliases in PyTorch, such as ``multiply`` for ``mul``."""
    return replace(graph, nodes=tuple(replace(n, op=ALIASES.get(n.op, n.op)) for n in graph.nodes))


def _aliases(names: str, *overloads: str) -> dict[str, str]:
    pairs = [pair.split("=") for pair in names.split()]
    return {f"aten.{a}{o}": f"aten.{b}{o}" for a, b in pairs for o in overloads}


ALIASES: dict[str, str] = {
    **_aliases("multiply=mul subtract=sub divide=div", ".Tensor", ".Scalar"),
    **_aliases("greater=gt greater_equal=ge less=lt less_equal=le not_equal=ne", ".Tensor", ".Scalar"),
    **_aliases("concat=cat concatenate=cat clip=clamp absolute=abs negative=neg fix=trunc arctan2=atan2", ""),
    **_aliases("arctan=atan arcsin=asin arccos=acos special_expm1=expm1 special_erf=erf", ""),
    **_aliases("clip=clamp", ".Tensor"),
    # views that compute later, on which few operators and no collective can work
    **_aliases("conj=_conj_physical _conj=_conj_physical _neg_view=neg", ""),
}


def static_shapes(graph: Graph) -> Graph:
    """Replaces shapes with a -1 in ``view`` and ``expand`` by the shape of the result."""
    return replace(graph, nodes=tuple(map(_static_shape, graph.nodes)))


RESHAPES = ("aten.view", "aten.reshape", "aten._unsafe_view", "aten.view_copy", "aten._reshape_alias")


def _static_shape(node: Node) -> Node:
    if node.op in RESHAPES:
        return replace(node, op="aten.view", args=(node.args[0], node.types[0].shape), kwargs=())
    if node.op in ("aten.expand", "aten.expand_copy"):
        return replace(node, op="aten.expand", args=(node.args[0], node.types[0].shape), kwargs=())
    return node


def broadcasts_written_out(graph: Graph) -> Graph:
    """Replaces ``broadcast_tensors``, which the losses of torch.nn.functional begin with, by ``expand``."""
    return rewrite(graph, {"aten.broadcast_tensors": _broadcast_tensors})


def _broadcast_tensors(b: Builder, node: Node) -> tuple[Ref | None, ...]:
    shape = node.types[0].shape
    return tuple(x if b.type(x).shape == shape else b("aten.expand", x, shape) for x in node.args[0])


def one_factory(graph: Graph) -> Graph:
    """Replaces ``zeros``, ``ones_like``, ``new_full``, ``empty`` and the like by ``aten.full``, so that all
    memory has a defined value."""
    return replace(graph, nodes=tuple(map(_factory, graph.nodes)))


def _factory(node: Node) -> Node:
    stem = node.op.removeprefix("aten.").split(".")[0].removeprefix("new_").removesuffix("_like")
    if not node.op.startswith("aten.") or stem not in ("zeros", "ones", "empty", "full", "scalar_tensor"):
        return node
    value: Arg = 1 if stem == "ones" else 0
    if stem in ("full", "scalar_tensor"):
        arguments = bound(node)
        value = arguments["fill_value" if "fill_value" in arguments else "s"]
        if isinstance(value, Ref):
            return node
    (kind,) = node.types
    value = float(value) if kind.is_floating else bool(value) if kind.dtype == "bool" else int(value)
    kwargs = (("dtype", DType(kind.dtype)),)
    return replace(node, op="aten.full", args=(kind.shape, value), kwargs=kwargs)


def eps_written_out(graph: Graph) -> Graph:
    """Gives RMS norms without an eps the default of their dtype: verification runs a graph in another dtype,
    and it must stay the same function."""
    return rewrite(graph, {"aten.rms_norm": _rms_norm})


def _rms_norm(b: Builder, node: Node) -> tuple[Ref] | None:
    arg = bound(node)
    if arg["eps"] is not None:
        return None
    x = arg["input"]
    wide = torch.promote_types(TORCH_DTYPE[b.type(x).dtype], torch.float32)  # as in torch.nn.RMSNorm
    return (b(node.op, x, arg["normalized_shape"], arg["weight"], torch.finfo(wide).eps),)


def drop_identities(graph: Graph) -> Graph:
    """Drops operators whose result is their argument: copies, casts to the same dtype, whole slices, ..."""
    return rewrite(graph, IDENTITY_RULES)


def _if_same_type(b: Builder, node: Node) -> tuple[Ref] | None:
    x = node.args[0]
    return (x,) if b.type(x) == node.types[0] else None


def _slice(b: Builder, node: Node) -> tuple[Ref] | None:
    return _if_same_type(b, node) if bound(node)["step"] == 1 else None


def _slice_scatter(b: Builder, node: Node) -> tuple[Ref] | None:
    """A whole value that is written to is the other one."""
    written = node.args[1]
    return (written,) if bound(node)["step"] == 1 and b.type(written) == node.types[0] else None


def _cast(b: Builder, node: Node) -> tuple[Ref] | None:
    x = node.args[0]
    if b.type(x) == node.types[0]:
        return (x,)
    dtype = DType(node.types[0].dtype)
    canonical = node.op == "aten._to_copy" and node.kwargs == (("dtype", dtype),)
    return None if canonical else (b("aten._to_copy", x, dtype=dtype),)


def _dropout(b: Builder, node: Node) -> tuple[Ref | None, ...] | None:
    arg = bound(node)
    if arg["p"] != 0 and arg["train"] is not False:
        exact = node.op == "aten.native_dropout"
        return None if exact else (b("aten.native_dropout", arg["input"], arg["p"], True),)
    if any(r is not None for r in node.results[1:]):
        return None
    return (arg["input"],) + (None,) * (len(node.results) - 1)


def _cat(b: Builder, node: Node) -> tuple[Ref] | None:
    pieces, *rest = node.args
    full = tuple(p for p in pieces if b.type(p).num_elements)
    if not full or len(full) == len(pieces) > 1 or b.type(full[0]).dtype != node.types[0].dtype:
        return None
    return (full[0] if len(full) == 1 else b(node.op, full, *rest),)


def _copy(b: Builder, node: Node) -> tuple[Ref] | None:
    """The source of a copy in its dtype: PyTorch has no derivative for the operator itself."""
    source, made = node.args[1], node.types[0]
    if not isinstance(source, Ref) or b.type(source).shape != made.shape:
        return None
    is_same = b.type(source).dtype == made.dtype
    return (source if is_same else b("aten._to_copy", source, dtype=DType(made.dtype)),)


def _neutral(number: int) -> Rule:
    def rule(b: Builder, node: Node) -> tuple[Ref] | None:
        x, y = node.args[:2]
        same = isinstance(x, Ref) and b.type(x) == node.types[0]
        return (x,) if same and not isinstance(y, Ref) and y == number else None

    return rule


IDENTITY_RULES: dict[str, Rule] = {
    **{f"aten.{name}": _if_same_type for name in (
        "alias", "clone", "contiguous", "lift_fresh_copy", "lift_fresh", "expand", "view", "repeat",
        "squeeze", "squeeze.dim", "squeeze.dims", "sum_to_size")},
    **{f"aten.{name}": _cast for name in (
        "_to_copy", "to.dtype", "to.device", "to.dtype_layout", "to.other", "type_as")},
    **{f"aten.{name}": _neutral(0) for name in ("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar")},
    **{f"aten.{name}": _neutral(1) for name in ("mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar")},
    "aten.slice.Tensor": _slice,
    "aten.slice_scatter": _slice_scatter,
    "aten.native_dropout": _dropout,
    "aten.dropout": _dropout,
    "aten.cat": _cat,
    "aten.copy": _copy,
}  # fmt: skip


def drop_useless_detach(graph: Graph) -> Graph:
    """Drops a ``detach`` of a value without a gradient, for instance from ``no_grad`` around a mask. A script
    may ask for the gradients of the batch in a later step (``x.requires_grad_()``), so inputs have one."""
    flowing: set[str] = set()
    for node in graph.nodes:
        begins = node.op == "input" or begins_gradient(node)
        if begins or (node.op != "aten.detach" and any(name in flowing for name in node.inputs)):
            flowing.update(r for r, t in zip(node.results, node.types) if r is not None and t.is_floating)

    def rule(b: Builder, node: Node) -> tuple[Ref] | None:
        return None if node.inputs[0] in flowing else (node.args[0],)

    return rewrite(graph, {"aten.detach": rule})


def drop_dead(graph: Graph) -> Graph:
    """Keeps only nodes that the loss, an update or an output depends on, and every parameter."""
    needed = {graph.loss}
    kept = []
    for node in reversed(graph.nodes):
        if node.is_sink or node.op == "param" or any(r in needed for r in node.results):
            needed.update(node.inputs)
            results = tuple(r if r in needed or node.op == "param" else None for r in node.results)
            kept.append(replace(node, results=results))
    return replace(graph, nodes=tuple(reversed(kept)))


def leaves_at_first_use(graph: Graph) -> Graph:
    """Moves each leaf directly before the first node that uses it, and unused parameters to the end."""
    waiting = {n.result: n for n in graph.nodes if n.is_leaf}
    out: list[Node] = []
    for node in graph.nodes:
        if node.is_leaf:
            continue
        out += [waiting.pop(name) for name in dict.fromkeys(node.inputs) if name in waiting]
        out.append(node)
    return replace(graph, nodes=(*out, *waiting.values()))


def updates_at_once(graph: Graph) -> Graph:
    """Moves each update of a buffer directly after the node that makes its new value, and so into its layer,
    so that repeated layers with updates stay alike."""
    waiting: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "update":
            waiting.setdefault(node.inputs[0], []).append(node)
    out: list[Node] = []
    for node in graph.nodes:
        if node.op != "update":
            out += [node, *(update for r in node.results if r is not None for update in waiting.get(r, ()))]
    return replace(graph, nodes=tuple(out))
