"""Functions that read the operators in a mixture of experts. Each returns the facts about a node's results,
or None for a node of another kind."""

from __future__ import annotations

from collections.abc import Callable

from ...lang.ir import REPLICATE, Arg, DType, Node, Ref, Shard
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

Facts = tuple[Held, ...] | None


def read_node(region: Region, node: Node) -> Facts:
    """The facts about the results of a node that reads values of the region; None if no reader recognises
    it."""
    for read in (_read_positions, _read_rows, _read_products, _read_end, _read_row_operator):
        held = read(region, node)
        if held is not None:
            return held
    return None


def kinds_of(region: Region, node: Node) -> list[str]:
    """The kinds of a node's inputs, "" for those from outside of the region."""
    return [region.facts[name].kind if name in region.facts else "" for name in node.inputs]


def _only_kind(region: Region, node: Node) -> str:
    """The kind of a node's input if it has only one, else ""."""
    kinds = kinds_of(region, node)
    return kinds[0] if len(kinds) == 1 else ""


# --- values that follow from the ids alone --------------------------------------------------------------


def _read_positions(region: Region, node: Node) -> Facts:
    read = POSITIONS.get(node.op)
    return None if read is None else read(region, node)


def _read_sort(region: Region, node: Node) -> Facts:
    kind = _only_kind(region, node)
    if kind and node.inputs[0] == region.ids:
        permutation = Held(PERMUTATION)
        if bound(node).get("descending"):
            return None
        return (permutation,) if len(node.types) == 1 else (Held(IDS, "sorted"), permutation)
    if kind == PERMUTATION and node.op != "aten.sort.stable":
        inverse = Held(INVERSE)
        return (inverse,) if len(node.types) == 1 else (Held(TOKEN, "order"), inverse)
    return None


def _read_division(region: Region, node: Node) -> Facts:
    """The tokens of choices: their positions, divided by the choices of a token."""
    if _only_kind(region, node) != PERMUTATION:
        return None
    if bound(node).get("rounding_mode", "floor") not in ("floor", "trunc"):
        return None
    choices = node.args[1]
    if not isinstance(choices, int) or choices < 1 or region.num_choices % choices:
        return None
    region.choices_of(region.num_choices // choices)
    return (Held(TOKEN),)


def _read_cast(region: Region, node: Node) -> Facts:
    is_exact = node.types[0].dtype in ("i64", "i32", "f32", "f64")
    if _only_kind(region, node) not in (IDS, COUNTS, ENDS) or not is_exact:
        return None
    return (region.facts[node.inputs[0]],)


def _read_histogram(region: Region, node: Node) -> Facts:
    arg = bound(node)
    if _only_kind(region, node) != IDS or (arg["min"], arg["max"]) != (0, arg["bins"] - 1):
        return None
    return _counts(region, arg["bins"])


def _read_cumsum(region: Region, node: Node) -> Facts:
    return (Held(ENDS),) if _only_kind(region, node) == COUNTS else None


def _counts(region: Region, bins: int) -> tuple[Held, ...]:
    if region.num_experts not in (0, bins):
        raise NoMixture("counts of another number of experts")
    region.num_experts = bins
    return (Held(COUNTS),)


def _read_inverse(region: Region, node: Node) -> Facts:
    """The inverse of a permutation: positions that are written at its indices."""
    if kinds_of(region, node).count(PERMUTATION) != 1:
        return None
    arg = bound(node)
    positions = region.graph.producers[arg["values"].name] if isinstance(arg["values"], Ref) else None
    indices = arg["indices"]
    if len(indices) != 1 or arg["accumulate"] or positions is None:
        return None
    numbers = positions.args[:2] if positions.op == "aten.arange.start" else (0, *positions.args[:1])
    if not positions.op.startswith("aten.arange") or numbers != (0, region.num_choices):
        return None
    return (Held(INVERSE),)


def _read_entry(region: Region, node: Node) -> Facts:
    """The entry of each choice's expert in a table, in sorted order if the ids are sorted."""
    if kinds_of(region, node) != ["", IDS]:
        return None
    if node.op == "aten.index_select" and bound(node)["dim"] != 0:
        return None
    table = region.table(node.inputs[0])
    kind = SORTED if region.facts[node.inputs[1]].name == "sorted" else ROWS
    return (Held(kind, entry=table),)


POSITIONS: dict[str, Callable[[Region, Node], Facts]] = {
    **{f"aten.{name}": _read_sort for name in ("sort", "sort.stable", "argsort", "argsort.stable")},
    **{
        f"aten.{name}": _read_division
        for name in ("floor_divide", "floor_divide.Scalar", "div.Tensor_mode", "div.Scalar_mode")
    },
    "aten._to_copy": _read_cast,
    "aten.histc": _read_histogram,
    "aten.cumsum": _read_cumsum,
    "aten.index_put": _read_inverse,
    "aten.index.Tensor": _read_entry,
    "aten.index_select": _read_entry,
}


# --- rows of choices and their products -----------------------------------------------------------------


def _read_rows(region: Region, node: Node) -> Facts:
    """Rows of choices: the values of their tokens, values of their own, or sorted rows restored to order."""
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
    kind = region.facts[by].kind if by in region.facts else ""
    held, length = region.facts.get(source), region.graph.types[source].shape[0]
    if kind == INVERSE and held is not None and held.kind == SORTED and not held.entry:
        return (Held(ROWS, held.name),)
    if held is not None or kind not in (TOKEN, PERMUTATION):
        return None
    if kind == TOKEN:
        region.choices_of(length)
        return (Held(SORTED, region.input("x", source)),)
    return (Held(SORTED, region.input("s", source)),) if length == region.num_choices else None


def _read_products(region: Region, node: Node) -> Facts:
    """Every row times its expert's matrix: in groups of sorted rows, or as a batched product."""
    if node.op in GROUPED:
        return _read_grouped(region, node)
    if node.op == "aten.bmm":
        return _read_batched(region, node)
    return None


def _read_grouped(region: Region, node: Node) -> Facts:
    arg = bound(node)
    rows = arg["input" if "input" in arg else "self"]
    matrices = arg["weight" if "weight" in arg else "mat2"]
    ends = arg.get("offs")
    held = region.facts.get(rows.name)
    if any(arg.get(name) is not None for name in ("bias", "out_dtype")) or ends is None:
        return None
    if ends.name not in region.facts or region.facts[ends.name].kind != ENDS:
        return None
    if held is None or held.kind != SORTED or held.entry or matrices.name in region.facts:
        return None
    (product,) = region.step(1, f"{held.name} @ {region.table(matrices.name)}")
    return (Held(SORTED, product),)


def _read_batched(region: Region, node: Node) -> Facts:
    """bmm(W[ids], columns) or bmm(rows, W[ids])."""
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
    """A value as rows of choices: one of the region, or one from outside. None for values without rows."""
    held = region.facts.get(name)
    if held is None:
        return _outside_rows(region, name)
    return held if held.kind in (SORTED, ROWS) else None


def _outside_rows(region: Region, name: str) -> Held:
    return _repeated_tokens(region, name) or Held(ROWS, region.input("s", name))


def _repeated_tokens(region: Region, name: str) -> Held | None:
    """Rows of tokens from outside, each repeated for its choices."""
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


# --- the sum over choices -------------------------------------------------------------------------------


def _read_end(region: Region, node: Node) -> Facts:
    """The end of a mixture: rows in order as [tokens, choices, ...] and their sum over the choices, or sorted
    rows that are added to zeros at their tokens."""
    if node.op == "aten.view":
        return _read_rows_by_token(region, node)
    if node.op == "aten.sum.dim_IntList":
        summed = _sum_over_choices(region, node)
    elif node.op == "aten.index_add":
        summed = _sum_at_tokens(region, node)
    else:
        return None
    if summed is None:
        return None
    if region.result or not summed.name.startswith("v") or region.body[-1].split(" = ")[0] != summed.name:
        raise NoMixture("the sum is not of the last value")
    region.result = node.result
    return (Held("result"),)


def _read_rows_by_token(region: Region, node: Node) -> Facts:
    held = region.facts.get(node.inputs[0])
    if held is None or held.kind != ROWS or held.entry:
        return None
    shape, old = node.types[0].shape, region.graph.types[node.inputs[0]].shape
    if len(shape) != len(old) + 1 or shape[2:] != old[1:] or shape[0] * shape[1] != old[0]:
        return None
    region.choices_of(shape[0])
    return (Held(BY_TOKEN, held.name),)


def _sum_over_choices(region: Region, node: Node) -> Held | None:
    """The rows that a node sums over the choices of each token, or None."""
    arg, held = bound(node), region.facts.get(node.inputs[0])
    keeps_dtype = node.types[0].dtype == region.graph.types[node.inputs[0]].dtype
    if held is None or held.kind != BY_TOKEN or not keeps_dtype:
        return None
    return held if tuple(arg["dim"]) == (1,) and not arg["keepdim"] else None


def _sum_at_tokens(region: Region, node: Node) -> Held | None:
    """The sorted rows that a node adds to zeros at their tokens, or None."""
    arg = bound(node)
    start = region.graph.producers[arg["self"].name]
    held, at = region.facts.get(arg["source"].name), region.facts.get(arg["index"].name)
    fits = held is not None and held.kind == SORTED and not held.entry and at == Held(TOKEN)
    zeros = start.op == "aten.full" and start.args[1] == 0
    fits = fits and start.types[0].shape[:1] == (region.num_tokens,)
    return held if fits and zeros and arg["dim"] == 0 and arg["alpha"] == 1 else None


# --- operators that treat every row by itself -----------------------------------------------------------


def _read_row_operator(region: Region, node: Node) -> Facts:
    """An operator that treats every row by itself: its rule allows dim 0 of all rows to be cut."""
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
    arguments = [text_of(region, a, names) for a in _without_count(node, region.num_choices)]
    arguments += [f"{k}={text_of(region, v, names)}" for k, v in node.kwargs]
    result = region.step(len(node.types), f"{_short(node.op)}({', '.join(arguments)})")
    return tuple(Held(kind, name) for name in result)


def _is_by_row(region: Region, call: Call, node: Node) -> bool:
    """Whether a call depends neither on the position of a row nor on the number of rows."""
    rule = RULES.get(call.op)
    if rule is None or draws_numbers(call.op) or call.op == "aten.squeeze":
        return False
    return rule.local is None or call.op in ("aten.view", "aten.expand")


def _row_inputs(region: Region, call: Call, node: Node) -> list[bool] | None:
    """For each input, whether it has a row per choice, according to the strategy that cuts dim 0 of the
    region's values. None if there is no such strategy."""
    for strategy in strategies(RULES[call.op], call):
        cut = [placement == Shard(0) for placement in strategy.inputs]
        others = all(is_cut or placement == REPLICATE for is_cut, placement in zip(cut, strategy.inputs))
        inside = all(is_cut for is_cut, name in zip(cut, node.inputs) if name in region.facts)
        rows = all(value.shape[0] == region.num_choices for is_cut, value in zip(cut, call.inputs) if is_cut)
        cuts_results = all(placement == Shard(0) for placement in strategy.outputs)
        if strategy.is_sharded and others and inside and rows and cuts_results:
            return cut
    return None


def _name_in_body(region: Region, name: str, is_row: bool, kind: str) -> str:
    held = region.facts.get(name)
    if held is not None and held.entry:
        (in_body,) = region.step(1, f"{held.entry}[e]")
        region.facts[name] = Held(held.kind, in_body)
        return in_body
    if held is not None:
        return held.name
    if not is_row:
        return region.input("w", name)
    if kind == SORTED:
        raise NoMixture("rows in their own order beside sorted ones")
    return _outside_rows(region, name).name


def _without_count(node: Node, num_choices: int) -> tuple[Arg, ...]:
    """The arguments with -1 in place of the number of choices, in ``view`` and ``expand``."""
    if node.op not in ("aten.view", "aten.expand"):
        return node.args
    shape = node.args[1]
    if shape[:1] != (num_choices,):
        raise NoMixture(f"{node.op} to {shape}")
    return (node.args[0], (-1, *shape[1:]))


def _short(op: str) -> str:
    return op.removeprefix("aten.")


def text_of(region: Region, arg: Arg, names: dict[str, str]) -> str:
    match arg:
        case Ref(name):
            return names[name]
        case DType(name):
            if name not in region.dtypes:
                region.dtypes.append(name)
            return f"d{region.dtypes.index(name)}"
        case tuple():
            return f"[{', '.join(text_of(region, a, names) for a in arg)}]"
        case float() if arg in (float("inf"), -float("inf")):
            return "inf" if arg > 0 else "-inf"
        case float() if not abs(arg) <= LARGEST["f16"]:
            # a program's checks for such a device do not look into a body
            raise NoMixture(f"{arg}, which a device without bf16 could not hold")
    return repr(arg)
