"""Readers of the operators in a mixture of experts: each gives what is known of a node's results, or None for
a node that is not of its kind."""

from __future__ import annotations

from collections.abc import Callable

from ...lang.ir import REPLICATE, Arg, DType, Node, Ref, Shard, ValueType
from ...lang.ir.dtypes import LARGEST
from ...lang.ir.samples import draws_numbers
from ...lang.rules import RULES, Call, call_of, strategies
from .mixture_region import (
    BY_TOKEN,
    COUNTS,
    ENDS,
    IDS,
    INVERSE,
    PERMUTATION,
    ROWS,
    SORTED,
    TOKEN,
    Held,
    NoMixture,
    Region,
)
from .schema import bound

GROUPED = ("transformers.grouped_mm_fallback", "aten._grouped_mm")


def readers_of(region: Region) -> tuple[Callable[[Node], tuple[Held, ...] | None], ...]:
    return tuple(
        (lambda node, read=read: read(region, node))
        for read in (_read_positions, _read_rows, _read_products, _read_end, _read_row_operator)
    )


def kinds_of(region: Region, node: Node) -> list[str]:
    return [region.known[name].kind if name in region.known else "" for name in node.inputs]


def _integer(value: ValueType) -> bool:
    return value.dtype in ("i64", "i32")


def _read_positions(region: Region, node: Node) -> tuple[Held, ...] | None:
    """Reads an operator on values that are worked out of the ids alone."""
    kinds = kinds_of(region, node)
    first = region.known.get(node.inputs[0])
    match node.op, kinds:
        case ("aten.sort" | "aten.sort.stable", [k]) if node.inputs[0] == region.ids:
            arg = bound(node)
            if arg.get("descending"):
                return None
            return Held(IDS, "sorted"), Held(PERMUTATION)
        case ("aten.argsort" | "aten.argsort.stable" | "aten.sort", [k]) if k == PERMUTATION:
            inverse = Held(INVERSE)
            return (inverse,) if len(node.types) == 1 else (Held(TOKEN, "order"), inverse)
        case ("aten.argsort" | "aten.argsort.stable", [k]) if node.inputs[0] == region.ids:
            return None if bound(node).get("descending") else (Held(PERMUTATION),)
        case ("aten.floor_divide" | "aten.floor_divide.Scalar", [k]) if k == PERMUTATION:
            return _tokens_of(region, node.args[1])
        case ("aten.div.Tensor_mode" | "aten.div.Scalar_mode", [k]) if k == PERMUTATION:
            rounds = bound(node)["rounding_mode"]
            return _tokens_of(region, node.args[1]) if rounds in ("floor", "trunc") else None
        case ("aten._to_copy", [k]) if k in (IDS, COUNTS, ENDS):
            whole = _integer(node.types[0]) or node.types[0].dtype in ("f32", "f64")
            return (first,) if whole else None
        case ("aten.histc", [k]) if k == IDS:
            arg = bound(node)
            if (arg["min"], arg["max"]) != (0, arg["bins"] - 1):
                return None
            return _counts(region, arg["bins"])
        case ("aten.cumsum", [k]) if k == COUNTS:
            return (Held(ENDS),)
        case ("aten.index_put", kinds) if kinds.count(PERMUTATION) == 1:
            return _read_inverse(region, node)
        case ("aten.index.Tensor", ["", k]) if k == IDS:
            return _read_entry(region, node)
        case ("aten.index_select", ["", k]) if k == IDS and bound(node)["dim"] == 0:
            return _read_entry(region, node)
    return None


def _tokens_of(region: Region, choices: Arg) -> tuple[Held, ...] | None:
    if not isinstance(choices, int) or choices < 1 or region.num_choices % choices:
        return None
    region.choices_of(region.num_choices // choices)
    return (Held(TOKEN),)


def _counts(region: Region, bins: int) -> tuple[Held, ...]:
    if region.num_experts not in (0, bins):
        raise NoMixture("counts of another number of experts")
    region.num_experts = bins
    return (Held(COUNTS),)


def _read_inverse(region: Region, node: Node) -> tuple[Held, ...] | None:
    """Positions written where the permutation says: its inverse."""
    arg = bound(node)
    positions = region.graph.producers[arg["values"].name] if isinstance(arg["values"], Ref) else None
    indices = arg["indices"]
    if len(indices) != 1 or arg["accumulate"] or positions is None:
        return None
    numbers = positions.args[:2] if positions.op == "aten.arange.start" else (0, *positions.args[:1])
    if not positions.op.startswith("aten.arange") or numbers != (0, region.num_choices):
        return None
    return (Held(INVERSE),)


def _read_entry(region: Region, node: Node) -> tuple[Held, ...] | None:
    """Each choice's own entry of a table; in sorted order where the ids are sorted."""
    table = region.table(node.inputs[0])
    kind = SORTED if region.known[node.inputs[1]].name == "sorted" else ROWS
    return (Held(kind, entry=table),)


def _read_rows(region: Region, node: Node) -> tuple[Held, ...] | None:
    """Rows of choices: of a token's values, of the choices' own, or put back in order."""
    source = node.inputs[0]
    if node.op == "aten.index.Tensor":
        indices = node.args[1]
        if len(indices) != 1 or not isinstance(indices[0], Ref):
            return None
        by = indices[0].name
    elif node.op == "aten.index_select" and bound(node)["dim"] == 0:
        by = bound(node)["index"].name
    else:
        return None
    kind = region.known[by].kind if by in region.known else ""
    held, length = region.known.get(source), region.graph.types[source].shape[0]
    if kind == INVERSE and held is not None and held.kind == SORTED and not held.entry:
        return (Held(ROWS, held.name),)
    if held is not None or kind not in (TOKEN, PERMUTATION):
        return None
    if kind == TOKEN:
        region.choices_of(length)
        return (Held(SORTED, region.input("x", source)),)
    return (Held(SORTED, region.input("s", source)),) if length == region.num_choices else None


def _read_products(region: Region, node: Node) -> tuple[Held, ...] | None:
    """Every row times its expert's matrix: in pieces of sorted rows, or as a product of many matrices."""
    if node.op in GROUPED:
        return _read_grouped(region, node)
    if node.op == "aten.bmm":
        return _read_batched(region, node)
    return None


def _read_grouped(region: Region, node: Node) -> tuple[Held, ...] | None:
    arg = bound(node)
    rows, matrices = arg.get("input", arg.get("self")), arg.get("weight", arg.get("mat2"))
    ends = arg.get("offs")
    held = region.known.get(rows.name)
    if any(arg.get(name) is not None for name in ("bias", "out_dtype")) or ends is None:
        return None
    if ends.name not in region.known or region.known[ends.name].kind != ENDS:
        return None
    if held is None or held.kind != SORTED or held.entry or matrices.name in region.known:
        return None
    (product,) = region.step(1, f"{held.name} @ {region.table(matrices.name)}")
    return (Held(SORTED, product),)


def _read_batched(region: Region, node: Node) -> tuple[Held, ...] | None:
    """bmm(W[ids], x as columns) or bmm(x as rows, W[ids])."""
    left, right = (_row_value(region, name) for name in node.inputs)
    if left is None or right is None or (left.kind, bool(left.entry)) == (right.kind, bool(right.entry)):
        return None
    if left.kind != right.kind:
        return None
    shapes = [region.graph.types[name].shape for name in node.inputs]
    if left.entry and shapes[1][2] == 1:
        (flat,) = region.step(1, f"squeeze.dim({right.name}, 2)")
        (product,) = region.step(1, f"{flat} @ {left.entry}.mT")
        (column,) = region.step(1, f"unsqueeze({product}, 2)")
    elif right.entry and shapes[0][1] == 1:
        (flat,) = region.step(1, f"squeeze.dim({left.name}, 1)")
        (product,) = region.step(1, f"{flat} @ {right.entry}")
        (column,) = region.step(1, f"unsqueeze({product}, 1)")
    else:
        return None
    return (Held(left.kind, column),)


def _row_value(region: Region, name: str) -> Held | None:
    """A value as rows of choices: one of the region, or one from outside with a row for each choice."""
    held = region.known.get(name)
    if held is not None:
        return held if held.kind in (SORTED, ROWS) else None
    outside = _repeated_tokens(region, name)
    return outside or Held(ROWS, region.input("s", name))


def _repeated_tokens(region: Region, name: str) -> Held | None:
    """Rows from outside that are rows of tokens, each as often as it has choices."""
    node = region.graph.producers[name]
    views = []
    while node.op in ("aten.unsqueeze", "aten.squeeze.dim") and node.args[1] != 0:
        views.append(node)
        node = region.graph.producers[node.inputs[0]]
    if node.op != "aten.repeat_interleave.self_int":
        return None
    arg = bound(node)
    if arg["dim"] != 0 or region.num_choices % arg["repeats"]:
        return None
    if region.choices_of(region.num_choices // arg["repeats"]) != arg["repeats"]:
        return None
    rows = region.input("x", node.inputs[0])
    for view in reversed(views):
        (rows,) = region.step(1, f"{_short(view.op)}({rows}, {view.args[1]})")
    return Held(ROWS, rows)


def _read_end(region: Region, node: Node) -> tuple[Held, ...] | None:
    """The rows in order as [tokens, choices, ...], and their sum over the choices; or sorted rows added to
    zeros at their tokens."""
    held = region.known.get(node.inputs[0])
    if node.op == "aten.view" and held is not None and held.kind == ROWS and not held.entry:
        shape, old = node.types[0].shape, region.graph.types[node.inputs[0]].shape
        if len(shape) != len(old) + 1 or shape[2:] != old[1:] or shape[0] * shape[1] != old[0]:
            return None
        region.choices_of(shape[0])
        return (Held(BY_TOKEN, held.name),)
    if node.op == "aten.sum.dim_IntList" and held is not None and held.kind == BY_TOKEN:
        arg = bound(node)
        if tuple(arg["dim"]) != (1,) or arg["keepdim"] or node.types[0].dtype != _dtype(region, node):
            return None
    elif node.op == "aten.index_add":
        held = _added_at_tokens(region, node)
        if held is None:
            return None
    else:
        return None
    if region.result or not held.name.startswith("v") or region.body[-1].split(" = ")[0] != held.name:
        raise NoMixture("the sum is not of the last value")
    region.result = node.results[0]
    return (Held("result"),)


def _dtype(region: Region, node: Node) -> str:
    return region.graph.types[node.inputs[0]].dtype


def _added_at_tokens(region: Region, node: Node) -> Held | None:
    arg = bound(node)
    start = region.graph.producers[arg["self"].name]
    held, at = region.known.get(arg["source"].name), region.known.get(arg["index"].name)
    fits = held is not None and held.kind == SORTED and not held.entry and at == Held(TOKEN)
    zeros = start.op == "aten.full" and start.args[1] == 0
    fits = fits and start.types[0].shape[:1] == (region.num_tokens,)
    return held if fits and zeros and arg["dim"] == 0 and arg["alpha"] == 1 else None


# --- what treats every row by itself -------------------------------------------------------------------


def _read_row_operator(region: Region, node: Node) -> tuple[Held, ...] | None:
    """An operator whose rule lets dim 0 of all rows be cut, and nothing else: it treats any rows alike."""
    kinds = {k for k in kinds_of(region, node) if k}
    if len(kinds) != 1 or not kinds <= {SORTED, ROWS} or not node.op.startswith("aten."):
        return None
    (kind,) = kinds
    call = call_of(node, region.graph.types)
    if not _is_by_row(region, call, node):
        return None
    names: dict[str, str] = {}
    cut = _row_inputs(region, call, node)
    if cut is None:
        return None
    for name, is_row in zip(node.inputs, cut):
        names[name] = _name_in_body(region, name, is_row, kind)
    arguments = [_text(region, a, names) for a in _without_count(node, region.num_choices)]
    arguments += [f"{k}={_text(region, v, names)}" for k, v in node.kwargs]
    result = region.step(len(node.types), f"{_short(node.op)}({', '.join(arguments)})")
    return tuple(Held(kind, name) for name in result)


def _is_by_row(region: Region, call: Call, node: Node) -> bool:
    """Whether nothing in the call depends on where a row stands or how many there are."""
    rule = RULES.get(call.op)
    if rule is None or draws_numbers(call.op) or call.op == "aten.squeeze":
        return False
    return rule.local is None or call.op in ("aten.view", "aten.expand")


def _row_inputs(region: Region, call: Call, node: Node) -> list[bool] | None:
    """Which inputs have a row for each choice, by the strategy that cuts dim 0 of those of the region."""
    for strategy in strategies(RULES[call.op], call):
        cut = [placement == Shard(0) for placement in strategy.inputs]
        others = all(is_cut or placement == REPLICATE for is_cut, placement in zip(cut, strategy.inputs))
        inside = all(is_cut for is_cut, name in zip(cut, node.inputs) if name in region.known)
        rows = all(value.shape[0] == region.num_choices for is_cut, value in zip(cut, call.inputs) if is_cut)
        cuts_results = all(placement == Shard(0) for placement in strategy.outputs)
        if strategy.is_sharded and others and inside and rows and cuts_results:
            return cut
    return None


def _name_in_body(region: Region, name: str, is_row: bool, kind: str) -> str:
    held = region.known.get(name)
    if held is not None and held.entry:
        (in_body,) = region.step(1, f"{held.entry}[e]")
        region.known[name] = Held(held.kind, in_body)
        return in_body
    if held is not None:
        return held.name
    if not is_row:
        return region.input("w", name)
    if kind == SORTED:
        raise NoMixture("rows in their own order beside sorted ones")
    return _row_value(region, name).name


def _without_count(node: Node, num_choices: int) -> tuple[Arg, ...]:
    """Arguments without the number of choices: ``view`` and ``expand`` keep what rows there are."""
    if node.op not in ("aten.view", "aten.expand"):
        return node.args
    shape = node.args[1]
    if shape[:1] != (num_choices,):
        raise NoMixture(f"{node.op} to {shape}")
    return (node.args[0], (-1, *shape[1:]))


def _short(op: str) -> str:
    return op.removeprefix("aten.")


def _text(region: Region, arg: Arg, names: dict[str, str]) -> str:
    match arg:
        case Ref(name):
            return names[name]
        case DType(name):
            if name not in region.dtypes:
                region.dtypes.append(name)
            return f"d{region.dtypes.index(name)}"
        case tuple():
            return f"[{', '.join(_text(region, a, names) for a in arg)}]"
        case float() if arg in (float("inf"), -float("inf")):
            return "inf" if arg > 0 else "-inf"
        case float() if not abs(arg) <= LARGEST["f16"]:
            raise NoMixture(f"{arg}, which a device without bf16 could not hold")  # nor see it in a text
    return repr(arg)
