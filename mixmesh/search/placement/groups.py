"""Groups operators that are placed together, in one of two ways.

``partition``: a graph partition that cuts few bytes (METIS: Karypis and Kumar, 1998), as TAG does, with its
weights. ``centres``: the most expensive operators are centres and every other one joins the nearest, as
HeteroG does. Both work within pieces of the model: each block of a repeated run is a piece, and one block's
answer is used for all, so that equal layers are grouped alike.

The answer is made acyclic: groups are sorted by their mean position, and an operator joins the latest group
on which it depends if that is later than its own. So edges never go back.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import pymetis

from ...base.progress import flush_output, send_nowhere
from ...cost import VIEWS, CostModel
from ...errors import InputError
from ...lang.ir import Graph, Node
from ...lang.rules import Call, call_of
from ...step.kept import backward_bytes, extra_bytes, kept
from ..synthesis.fold import Run, find_runs
from .strategy import Group, Grouping, Value

NUM_GROUPS = 40
# for METIS, the largest part over the mean; loose, because a cut matters more than balance (TAG)
IMBALANCE = 5.0
LEAST_OPERATORS = 4  # mean number of operators per part

# (fixed seconds, further seconds of the whole batch): exact for a single device and for even shares
Affine = tuple[float, float]


class _Times(NamedTuple):
    """The times of an operator per device class; ``seconds`` is the mean over the classes for the whole
    batch."""

    forward: tuple[Affine, ...]
    backward: tuple[Affine, ...]
    seconds: float


@dataclass(frozen=True)
class _Operator:
    node: Node
    times: _Times


@dataclass(frozen=True)
class _Piece:
    """``count`` consecutive operators, with edges between them: (from, to, bytes)."""

    count: int
    edges: tuple[tuple[int, int, int], ...]
    seconds: tuple[float, ...]


Split = Callable[[_Piece, int], Sequence[int]]


def make_grouping(
    graph: Graph,
    costs: CostModel,
    count: int = NUM_GROUPS,
    method: str = "partition",
    runs: Sequence[Run] | None = None,
) -> Grouping:
    """About ``count`` groups by ``method``, a key of ``METHODS``. ``runs``: the graph's repeated blocks
    (``find_runs``), if they are known. Raises InputError for a bad count or method."""
    if method not in METHODS or count < 1:
        raise InputError(
            "operators cannot be grouped so",
            expected=f"at least one group, by {' or '.join(METHODS)}",
            got=f"{count} groups by {method!r}",
        )
    operators = _operators(graph, costs)
    at = {r: n for n, o in enumerate(operators) for r in o.node.results if r is not None}
    edges = [
        (at[name], n, graph.types[name].size_bytes)
        for n, o in enumerate(operators)
        for name in dict.fromkeys(o.node.inputs)
        if name in at
    ]
    labels: list[int] = []
    alike: dict[tuple, list[int]] = {}
    for kind, piece, parts in _pieces(graph, operators, edges, count, runs):
        if kind not in alike:
            alike[kind] = _acyclic(piece, METHODS[method](piece, parts) if parts > 1 else [0] * piece.count)
        first = max(labels, default=-1) + 1
        labels += [first + label for label in alike[kind]]
    return _grouping(graph, operators, labels)


def _operators(graph: Graph, costs: CostModel) -> list[_Operator]:
    """All operators except leaves, updates, and those that depend only on constants."""
    varying: set[str] = set()
    out = []
    times_of: dict[tuple, _Times] = {}  # layers repeat the same few calls
    for node in graph.nodes:
        if node.op in ("input", "param", "buffer") or any(name in varying for name in node.inputs):
            varying.update(r for r in node.results if r is not None)
            if not node.is_leaf and not node.is_sink:
                call = call_of(node, graph.types)
                grads = sum(1 for name in dict.fromkeys(node.inputs) if name in graph.requires_grad)
                if (call, grads) not in times_of:
                    times_of[call, grads] = _times(costs, call, grads)
                out.append(_Operator(node, times_of[call, grads]))
    return out


def _times(costs: CostModel, call: Call, grads: int) -> _Times:
    even = 1 / max(costs.cluster.world_size, 2)
    times = [costs.op(call, grads, c) for c in range(len(costs.classes))]
    forward = tuple(t.forward.chord(even) for t in times)
    backward = tuple(t.backward.chord(even) for t in times)
    return _Times(forward, backward, sum(map(sum, (*forward, *backward))) / len(times))


def _pieces(
    graph, operators, edges, count: int, runs: Sequence[Run] | None
) -> Iterator[tuple[tuple, _Piece, int]]:
    """Yields the parts of the model in order, each with a key that equal parts share and a number of groups
    in proportion to its seconds."""
    index = {o.node.results: n for n, o in enumerate(operators)}
    steps = [n for n in graph.nodes if not n.is_leaf]
    total = sum(o.times.seconds for o in operators)
    inside: dict[int, list[tuple[int, int, int]]] = {}
    for edge in edges:
        inside.setdefault(edge[1], []).append(edge)
    runs = tuple(find_runs(graph, steps)) if runs is None else runs
    for kind, start, stop in _spans(steps, runs, count):
        mine = tuple(index[s.results] for s in steps[start:stop] if s.results in index)
        if mine:
            kept = [
                (a - mine[0], b - mine[0], n) for to in mine for a, b, n in inside.get(to, ()) if a >= mine[0]
            ]
            seconds = tuple(operators[n].times.seconds for n in mine)
            parts = min(len(mine), max(1, round(count * sum(seconds) / total)))
            yield kind, _Piece(len(mine), tuple(kept), seconds), parts


def _spans(steps: list[Node], runs: Sequence[Run], count: int) -> Iterator[tuple[tuple, int, int]]:
    """Ranges of steps: those between the repeated runs, and the blocks of each run, several together if there
    are more blocks than groups."""
    at = 0
    for run in runs:
        yield ("between", at), at, run.start
        each = math.ceil(run.count / count)
        for block in range(0, run.count, each):
            blocks = min(each, run.count - block)
            start = run.start + block * run.period
            yield ("run", run.start, blocks), start, start + blocks * run.period
        at = run.stop
    yield ("between", at), at, len(steps)


def partition(piece: _Piece, parts: int) -> Sequence[int]:
    """METIS: vertices weigh the root of their microseconds, edges their bytes. METIS cannot make parts of
    very few operators; the most expensive operators then serve as centres."""
    if piece.count < LEAST_OPERATORS * parts:
        return centres(piece, parts)
    size: dict[tuple[int, int], int] = {}
    for a, b, size_bytes in piece.edges:
        for pair in ((a, b), (b, a)):
            size[pair] = size.get(pair, 0) + size_bytes
    largest = max(size.values(), default=1)
    adjacent: list[list[int]] = [[] for _ in range(piece.count)]
    for a, b in size:
        adjacent[a].append(b)
    starts = [0]
    for neighbours in adjacent:
        starts.append(starts[-1] + len(neighbours))
    # METIS adds up edges in 32 bits
    weights = [1 + 10_000 * size[a, b] // largest for a, near in enumerate(adjacent) for b in near]
    with silent():
        _, labels = pymetis.part_graph(
            parts,
            xadj=starts,
            adjncy=[b for neighbours in adjacent for b in neighbours],
            vweights=[1 + math.isqrt(round(s * 1e6)) for s in piece.seconds],
            eweights=weights,
            options=pymetis.Options(ufactor=round(1000 * (IMBALANCE - 1)), seed=0),
        )
    return labels


@contextmanager
def silent() -> Iterator[None]:
    """A context that discards standard output: METIS writes there if one of two halves turns out empty, which
    is not an error and must not appear in a command's output."""
    flush_output()
    kept = os.dup(1)
    try:
        send_nowhere(1)
        yield
        ctypes.CDLL(None).fflush(None)  # C code has written into a buffer of its own
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def centres(piece: _Piece, parts: int) -> Sequence[int]:
    """Every operator joins the centre that is the fewest edges away, in either direction."""
    near: list[list[int]] = [[] for _ in range(piece.count)]
    for a, b, _ in piece.edges:
        near[a].append(b)
        near[b].append(a)
    expensive = sorted(range(piece.count), key=lambda n: (-piece.seconds[n], n))[:parts]
    labels = [-1] * piece.count
    for label, centre in enumerate(sorted(expensive)):
        labels[centre] = label
    waiting = deque(sorted(expensive))
    while waiting:
        at = waiting.popleft()
        for other in near[at]:
            if labels[other] < 0:
                labels[other] = labels[at]
                waiting.append(other)
    for n, label in enumerate(labels):  # an operator without a path to a centre joins its predecessor
        if label < 0:
            labels[n] = labels[n - 1] if n else 0
    return labels


METHODS: dict[str, Split] = {"partition": partition, "centres": centres}


def _acyclic(piece: _Piece, labels: Sequence[int]) -> list[int]:
    """Labels in topological order, from 0 on."""
    places: dict[int, list[int]] = {}
    for n, label in enumerate(labels):
        places.setdefault(label, []).append(n)
    order = {
        label: k for k, label in enumerate(sorted(places, key=lambda la: sum(places[la]) / len(places[la])))
    }
    sources: list[list[int]] = [[] for _ in range(piece.count)]
    for a, b, _ in piece.edges:
        sources[b].append(a)
    out: list[int] = []
    for n, label in enumerate(labels):
        out.append(max([order[label], *(out[a] for a in sources[n])]))
    dense = {label: k for k, label in enumerate(sorted(set(out)))}
    return [dense[label] for label in out]


def _grouping(graph: Graph, operators: list[_Operator], labels: list[int]) -> Grouping:
    params = {n.result: n for n in graph.params}
    group_of = {r: label for o, label in zip(operators, labels) for r in o.node.results if r is not None}
    members: dict[int, list[_Operator]] = {}
    users: dict[str, dict[int, None]] = {}  # the users of values that leave their group
    for o, label in zip(operators, labels):
        members.setdefault(label, []).append(o)
        for name in o.node.inputs:
            if group_of.get(name, label) != label:
                users.setdefault(name, {})[label] = None
    kept_bytes = _kept_bytes(graph, operators)
    groups = []
    owned: set[str] = set()
    for label in sorted(members):
        names = dict.fromkeys(name for o in members[label] for name in o.node.inputs if name in params)
        # a tied parameter belongs to its first user
        mine = tuple(name for name in names if name not in owned)
        owned.update(mine)
        groups.append(_group(graph, members[label], mine, kept_bytes))
    values = [
        Value(group_of[name], tuple(labels), graph.types[name].size_bytes, name in graph.requires_grad)
        for name, labels in users.items()
    ]
    return Grouping(tuple(groups), tuple(values))


def _group(
    graph: Graph, members: list[_Operator], params: tuple[str, ...], kept_bytes: Mapping[str, int]
) -> Group:
    classes = range(len(members[0].times.forward))
    return Group(
        nodes=tuple(next(r for r in o.node.results if r is not None) for o in members),
        params=params,
        param_bytes=sum(graph.types[name].size_bytes for name in params if name in graph.requires_grad),
        forward=tuple(_sum(o.times.forward[c] for o in members) for c in classes),
        backward=tuple(_sum(o.times.backward[c] for o in members) for c in classes),
        passing_bytes=max(_passing_bytes(graph, o.node) for o in members),
        kept_bytes=sum(kept_bytes.get(r, 0) for o in members for r in o.node.results if r is not None),
    )


def _kept_bytes(graph: Graph, operators: list[_Operator]) -> dict[str, int]:
    """Bytes that the backward pass needs, by value; those of a view count for its base."""
    base: dict[str, str] = {}
    out: dict[str, int] = {}
    for o in operators:
        node, name = o.node, next(r for r in o.node.results if r is not None)
        if node.op in VIEWS and node.inputs:
            base.update((r, base.get(node.inputs[0], node.inputs[0])) for r in node.results if r is not None)
        if not any(r in graph.requires_grad for r in node.results):
            continue
        call = call_of(node, graph.types)
        for what, place in kept(call, tuple(n in graph.requires_grad for n in node.inputs)):
            value = node.inputs[place] if what == "input" else name
            value = base.get(value, value)
            out[value] = max(out.get(value, 0), graph.types[value].size_bytes)
        out[name] = out.get(name, 0) + round(extra_bytes(call))
    return out


def _passing_bytes(graph: Graph, node: Node) -> int:
    """Bytes of the gradients that an operator receives and makes in the backward pass, and of its
    temporaries."""
    if node.op in VIEWS or not any(r in graph.requires_grad for r in node.results):
        return 0
    operands = (name for name in dict.fromkeys(node.inputs) if graph.producers[name].op != "param")
    gradients = (name for name in (*node.results, *operands) if name in graph.requires_grad)
    return sum(graph.types[name].size_bytes for name in gradients) + round(
        backward_bytes(call_of(node, graph.types))
    )


def _sum(lines) -> Affine:
    fixed, slope = zip(*lines)
    return sum(fixed), sum(slope)
