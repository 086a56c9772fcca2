"""Finds the computations of the rows that each of several masks selects, such as those of each expert, and
replaces each by one operator that computes no other row (``operators.selected``).

All rows are in the graph, with a number in place of those that are not selected (``selected``). A region
begins where that number is put in, and goes on through operators that treat every row by itself. It is
replaced if nothing else can see the values of other rows: every use of its last value ends in a choice by
the same mask. The masks of a router's choices share all rows, so that the expected part of each is known; a
mask that is by itself may select all rows, and is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate
from operator import mul

import torch

from ...lang.ir import Arg, DType, Graph, Node, Ref
from ...lang.ir.graph import computed_of
from ...lang.operators import RowOperands
from ...lang.rules import SELECTED
from .build import Builder, rewrite
from .dtypes import TORCH_DTYPE
from .mixture_readers import text_of
from .mixture_region import ROWS, Held, NoMixture, Region
from .schema import is_by_element, overload

CHOICES = ("aten.where.ScalarOther", "aten.where.self")
VIEWS = ("aten.view", "aten.unsqueeze", "aten.squeeze", "aten.squeeze.dim")
# between a mask and the numbers that it was made of
OF_NUMBERS = (
    *VIEWS, "aten.eq.Scalar", "aten.ne.Scalar", "aten.gt.Scalar", "aten.any.dim", "aten.select.int",
    "aten.permute", "aten.one_hot", "aten._to_copy",
)  # fmt: skip
PRODUCTS = ("aten.linear", "aten.mm", "aten.matmul")
NORMS = ("aten.layer_norm", "aten.rms_norm")
# the places of dims among arguments
DIM_OF = {
    "aten.softmax.int": 1, "aten.log_softmax.int": 1, "aten.unsqueeze": 1, "aten.squeeze.dim": 1,
    "aten.select.int": 1, "aten.split.Tensor": 2, "aten.split_with_sizes": 2, "aten.chunk": 2,
    "aten.slice.Tensor": 1,
}  # fmt: skip


@dataclass
class Selection:
    """The computation of the rows of one mask: the mask, perhaps in another shape, the dims ``layout`` of the
    rows, the places of nodes where it ``begins``, and what has been read, with the node of the last value.
    Masks with the same entry in ``roots`` are the same; ``along`` is the dim of the mask that some inputs
    have alone."""

    mask: str
    roots: Mapping[str, str]
    layout: tuple[int, ...]
    region: Region
    along: int = -1
    begins: list[int] = field(default_factory=list)
    last: Node | None = None

    @property
    def root(self) -> str:
        return self.roots.get(self.mask, self.mask)

    def is_mask(self, name: str) -> bool:
        """Whether a value is this mask, in any shape."""
        return self.roots.get(name, name) == self.root


def selected_as_operators(graph: Graph) -> Graph:
    """Replaces what is computed of the rows of each of several masks, of the same choices."""
    of_choices: dict[str, list[Selection]] = {}
    for selection in _selections(graph):
        choices = _choices_of(graph, selection.root)
        if choices is not None:
            of_choices.setdefault(choices, []).append(selection)
    if not of_choices:
        return graph
    learned = computed_of(graph.nodes, (n.result for n in graph.params))
    share_of: dict[int, tuple[Selection, float]] = {}
    for choices, alike in of_choices.items():
        num_masks = len({selection.root for selection in alike})
        for selection in alike:
            part = graph.types[choices].num_elements / (num_masks * math.prod(selection.layout))
            if part < 1 and selection.last is not None:
                # a router is trained to choose all alike; numbers in the data may be all the same
                share_of[id(selection.last)] = selection, part if choices in learned else 1.0
    if not share_of:
        return graph

    def rule(b: Builder, node: Node) -> tuple[Ref | None, ...] | None:
        selected = share_of.get(id(node))
        return None if selected is None else (_operator(b, *selected),)

    return rewrite(graph, {s.last.op: rule for s, _ in share_of.values() if s.last is not None})


def _operator(b: Builder, selection: Selection, share: float) -> Ref:
    region, layout = selection.region, selection.layout
    mask = Ref(selection.mask)
    if b.type(mask).shape != layout:
        mask = b("aten.view", mask, layout)
    groups = [tuple(map(Ref, region.inputs[prefix])) for prefix in "xsw"]
    rows, along, whole = ([_meta(b, ref) for ref in group] for group in groups)
    body, dim = "; ".join(region.body), max(selection.along, 0)
    operands = RowOperands(rows, along, dim, whole, [TORCH_DTYPE[name] for name in region.dtypes])
    kept_bytes = operands.kept_bytes(body, torch.Size(layout))
    named = tuple(map(DType, region.dtypes))
    return b(SELECTED, mask, groups[0], groups[1], dim, groups[2], named, body, share, kept_bytes)


def _meta(b: Builder, ref: Ref) -> torch.Tensor:
    value = b.type(ref)
    return torch.empty(value.shape, dtype=TORCH_DTYPE[value.dtype], device="meta")


def _choices_of(graph: Graph, mask: str) -> str | None:
    """The numbers that a mask compares with one of them, such as the experts that a router has chosen."""
    name, compares = mask, False
    while (node := graph.producers[name]).op in OF_NUMBERS:
        compares |= node.op in ("aten.eq.Scalar", "aten.one_hot")
        name = node.inputs[0]
    return name if compares and graph.types[name].dtype in ("i64", "i32") else None


# --- reading -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Uses:
    """The nodes of a graph by their places, and the places of the nodes that use each value."""

    graph: Graph
    of: Mapping[str, Sequence[int]]

    @classmethod
    def in_graph(cls, graph: Graph) -> Uses:
        of: dict[str, list[int]] = {}
        for n, node in enumerate(graph.nodes):
            for name in dict.fromkeys(node.inputs):
                of.setdefault(name, []).append(n)
        return cls(graph, of)

    def places(self, node: Node) -> Iterator[int]:
        """The places of the nodes that use results of a node."""
        for name in node.results:
            yield from self.of.get(name or "", ())


def _selections(graph: Graph) -> Iterator[Selection]:
    """Yields what is computed of the rows of each mask, as far as it can be read."""
    uses, roots = Uses.in_graph(graph), _roots(graph)
    begun: dict[tuple[str, tuple[int, ...]], Selection] = {}
    for n, node in enumerate(graph.nodes):
        read = _fill(graph, node)
        if read is not None:
            mask, layout = read
            selection = Selection(mask, roots, layout, Region(graph, mask))
            begun.setdefault((selection.root, layout), selection).begins.append(n)
    for selection in begun.values():
        try:
            selection.last = _read(uses, selection)
        except NoMixture:
            continue
        yield selection


def _fill(graph: Graph, node: Node) -> tuple[str, tuple[int, ...]] | None:
    """The mask by which a node puts one number in place of rows, and the dims of the rows."""
    if node.op != CHOICES[0] or graph.types[node.inputs[-1]] != node.types[0]:
        return None
    mask, shape = node.inputs[0], graph.types[node.inputs[0]].shape
    row_ndim = len(node.types[0].shape) - len(shape)
    if row_ndim or not shape:
        return None  # broadcast
    if shape != node.types[0].shape:
        row_ndim = next(n for n, size in enumerate(reversed((0, *shape))) if size != 1)
    layout = shape[: len(shape) - row_ndim]
    if node.types[0].shape[: len(layout)] != layout or not layout:
        return None
    while graph.producers[mask].op in VIEWS and graph.types[mask].shape != layout:
        mask = graph.producers[mask].inputs[0]
    return mask, layout


def _roots(graph: Graph) -> dict[str, str]:
    """For each value that may be a mask, the first one that it is a view of, or that is computed alike."""
    root_of: dict[str, str] = {}
    first: dict[object, str] = {}
    for node in graph.nodes:
        if node.op not in OF_NUMBERS or node.results[0] is None:
            continue
        name = node.results[0]
        if node.op in VIEWS:
            root_of[name] = root_of.get(node.inputs[0], node.inputs[0])
        else:
            alike = (
                node.op,
                tuple(Ref(root_of.get(a.name, a.name)) if isinstance(a, Ref) else a for a in node.args),
            )
            root_of[name] = first.setdefault((*alike, node.types), name)
    return root_of


def _read(uses: Uses, selection: Selection) -> Node:
    """Reads the computation of the rows of a mask, and returns the node of the last value. Raises
    NoMixture."""
    graph, region = uses.graph, selection.region
    inside: dict[int, Node] = {}
    ended: set[str] = set()
    to_read = list(selection.begins)
    while to_read:
        n = heappop(to_read)
        node = graph.nodes[n]
        held = None if n in inside else _read_node(selection, node, ended)
        if held is None:
            continue
        region.facts.update((name, each) for name, each in zip(node.results, held) if name is not None)
        inside[n] = node
        for place in uses.places(node):
            heappush(to_read, place)
    return _last(uses, selection, inside, ended)


def _last(uses: Uses, selection: Selection, inside: Mapping[int, Node], ended: set[str]) -> Node:
    """The node of the one value of a region that others use. Raises NoMixture if there are several, or if
    they would see other rows."""
    region = selection.region
    seen = {
        name: node
        for node in inside.values()
        for name in node.results
        if name is not None and not all(n in inside for n in uses.of.get(name, ()))
    }
    if len(seen) != 1 or uses.graph.loss in region.facts:
        raise NoMixture("several values are used outside")
    ((result, last),) = seen.items()
    if len(last.results) != 1 or not region.body or region.facts[result].name != _first_word(region.body[-1]):
        raise NoMixture("the value is not the last one")
    if not any(step.split(" = ")[1].startswith(("linear(", "mm(", "matmul(")) for step in region.body):
        raise NoMixture("no product")
    if result not in ended and not _is_masked(uses, selection, result):
        raise NoMixture("other rows are used")
    return last


def _first_word(step: str) -> str:
    return step.split(" = ")[0]


def _read_node(selection: Selection, node: Node, ended: set[str]) -> tuple[Held, ...] | None:
    """The facts about the results of a node that computes of selected rows. ``ended`` are values with zeros
    in other rows, of which nothing more is read."""
    region = selection.region
    if any(name in ended for name in node.inputs):
        return None
    fill = _fill(region.graph, node)
    if fill is not None and selection.is_mask(fill[0]) and fill[1] == selection.layout:
        source = node.inputs[1]
        if source not in region.facts:
            return (Held(ROWS, _row_input(selection, source)),)
        if node.args[2] == 0:
            ended.add(str(node.results[0]))
        return (region.facts[source],)
    if not any(name in region.facts for name in node.inputs) or not node.op.startswith("aten."):
        return None
    if node.op in CHOICES and selection.is_mask(node.inputs[0]):
        return None
    args = _arguments(selection, node)
    if args is None:
        return None
    names = {name: _name(selection, node, name) for name in node.inputs}
    if None in names.values():
        return None
    texts = [text_of(region, arg, names) for arg in args]  # type: ignore[arg-type]
    texts += [f"{key}={text_of(region, value, names)}" for key, value in node.kwargs]  # type: ignore[arg-type]
    op = node.op.removeprefix("aten.")
    results = region.step(len(node.types), f"{op}({', '.join(texts)})")
    return tuple(Held(ROWS, name) for name in results)


def _row_input(selection: Selection, source: str) -> str:
    """The name in the body of rows from outside: along one dim of the mask if they are repeated along the
    others."""
    graph, layout = selection.region.graph, selection.layout
    name, dims = source, None
    if len(layout) > 1 and graph.producers[name].op == "aten.expand":
        name = graph.producers[name].inputs[0]
        dims = [d for d, size in enumerate(graph.types[name].shape[: len(layout)]) if size != 1]
        while graph.producers[name].op == "aten.unsqueeze":
            name = graph.producers[name].inputs[0]
    row = graph.types[source].shape[len(layout) :]
    if dims is None or len(dims) != 1 or selection.along not in (-1, dims[0]):
        return selection.region.input("x", source)
    if graph.types[name].shape != (layout[dims[0]], *row):
        return selection.region.input("x", source)
    selection.along = dims[0]
    return selection.region.input("s", name)


def _name(selection: Selection, node: Node, name: str) -> str | None:
    """The name in the body of an input of a node; None if it is neither of the rows nor shared by all."""
    region, lead = selection.region, len(selection.layout)
    if name in region.facts:
        return region.facts[name].name
    shape, result = region.graph.types[name].shape, node.types[0].shape
    if shape[:lead] == selection.layout and len(shape) == len(result) and _is_by_element(node.op):
        return _row_input(selection, name)
    if node.op in (*PRODUCTS, *NORMS) or len(shape) <= len(result) - lead:
        return region.input("w", name)
    return None


def _is_by_element(op: str) -> bool:
    return op == "aten._to_copy" or is_by_element(overload(op))


def _arguments(selection: Selection, node: Node) -> tuple[Arg, ...] | None:
    """The arguments of a node for rows with one dim in place of those of the mask; None if it does not treat
    every row by itself."""
    region, layout = selection.region, selection.layout
    lead, shapes = len(layout), [region.graph.types[name].shape for name in node.inputs]
    if any(t.shape[:lead] != layout for t in node.types):
        return None
    if _is_by_element(node.op):
        ndim = len(node.types[0].shape)
        is_even = all(len(s) == ndim for s, n in zip(shapes, node.inputs) if n in region.facts)
        return node.args if is_even else None
    if node.inputs[0] not in region.facts or any(name in region.facts for name in node.inputs[1:]):
        return None
    if node.op in PRODUCTS:
        return node.args if len(shapes[1]) == 2 and len(shapes[0]) > lead else None
    if node.op in NORMS:
        size = node.args[1]
        return node.args if isinstance(size, tuple) and len(size) <= len(shapes[0]) - lead else None
    return _with_fewer_dims(node, lead, len(shapes[0]))


def _with_fewer_dims(node: Node, lead: int, ndim: int) -> tuple[Arg, ...] | None:
    """The arguments of an operator along a dim of each row, or a view, where one dim leads to a row."""
    place = DIM_OF.get(node.op, 1)
    arg = node.args[place] if place < len(node.args) else None
    if node.op == "aten.view" and isinstance(arg, tuple):
        return node.args[0], (-1, *arg[lead:])
    if node.op not in DIM_OF or not isinstance(arg, int):
        return None
    dim = arg % (ndim + (node.op == "aten.unsqueeze"))
    return None if dim < lead else (*node.args[:place], dim - lead + 1, *node.args[place + 1 :])


def _is_masked(uses: Uses, selection: Selection, result: str) -> bool:
    """Whether every use of a value of the rows ends in a choice by their mask."""
    graph = uses.graph
    num_rows = math.prod(selection.layout)
    to_see = [(result, len(selection.layout))]
    seen: set[tuple[int, str]] = set()
    while to_see:
        name, lead = to_see.pop()
        if name == graph.loss:
            return False
        shape = graph.types[name].shape
        for n in uses.of.get(name, ()):
            node = graph.nodes[n]
            if (n, name) in seen:
                continue
            is_choice = node.op in CHOICES and selection.is_mask(node.inputs[0])
            if is_choice and _is_laid_alike(graph, node, shape[:lead]) and node.inputs.count(name) == 1:
                if node.args[1] != Ref(name):
                    return False
                continue
            seen.add((n, name))
            after = _lead_after(graph, node, name, lead, num_rows)
            if not after:
                return False
            to_see += [(str(r), after) for r in node.results if r is not None]
    return True


def _is_laid_alike(graph: Graph, node: Node, layout: tuple[int, ...]) -> bool:
    """Whether the mask of a choice has the rows' own dims, and then dims of one."""
    shape = graph.types[node.inputs[0]].shape
    return shape[: len(layout)] == layout and all(size == 1 for size in shape[len(layout) :])


def _lead_after(graph: Graph, node: Node, name: str, lead: int, num_rows: int) -> int:
    """The number of dims that lead to a row in the results of a node that treats every row of ``name`` by
    itself; 0 for another node."""
    shape, result = graph.types[name].shape, node.types[0].shape if node.types else ()
    if not node.op.startswith("aten."):
        return 0
    if node.op in VIEWS:
        products = list(accumulate(result, mul))
        return products.index(num_rows) + 1 if num_rows in products else 0
    by_row = _is_by_element(node.op) or (node.op in (*PRODUCTS, *NORMS) and node.inputs.index(name) == 0)
    is_drawn = node.op in ("aten.native_dropout", "aten.dropout")
    keeps = len(result) == len(shape) and result[:lead] == shape[:lead] and len(shape) > lead
    return lead if (by_row or is_drawn) and (keeps or result == shape) else 0
