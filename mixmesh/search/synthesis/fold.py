"""Repeated blocks, searched once: a graph of many equal layers folded to four of them.

A *run* is a part of the steps that equals itself ``period`` steps later: the same operators, arguments and
types, each input from as far back, or the same value. The first two of its ``K`` blocks, the third and the
last are kept. The second and third stand for all between the first and the last: what they cost counts
``(K - 2) / 2`` times, and a path must leave them holding all that it entered them with, so that they can be
repeated. A shortest path through many equal stages runs into its cheapest cycle and stays there until
shortly before the end: the ends may differ from the middle, and the middle alternates between two blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from ...base.lazy import lazy
from ...lang.ir import Graph, Node, with_names

KEPT = 4  # kept blocks: the first, two for the middle, the last
WINDOW = 6  # number of steps that must match before a period is tried
PERIODS = 8  # number of distances that are tried
LEAST_SAVED = 24  # number of steps; if fewer are saved, folding is not worth the loss


@dataclass(frozen=True)
class Run:
    """``count`` equal blocks of ``period`` steps from step ``start`` on."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count

    @property
    def saved(self) -> int:
        return self.period * (self.count - KEPT)


@dataclass(frozen=True)
class Fold:
    """A folded graph. ``weights`` says how often each of its steps counts, and ``kept`` gives its step in the
    whole graph. ``runs`` are those of the whole graph."""

    whole: Graph
    graph: Graph
    weights: tuple[float, ...]
    kept: tuple[int, ...]
    runs: tuple[Run, ...]

    @lazy
    def middles(self) -> tuple[tuple[int, int], ...]:
        """The folded step at which the first block of each run's middle begins, and the run's period."""
        at = {step: n for n, step in enumerate(self.kept)}
        return tuple((at[run.start + run.period], run.period) for run in self.runs)

    @lazy
    def origins(self) -> tuple[int, ...]:
        """For each step of the whole graph, the folded step whose choice it takes; the middle alternates
        between the two kept blocks."""
        at = {step: n for n, step in enumerate(self.kept)}
        out = list(range(sum(1 for n in self.whole.nodes if not n.is_leaf)))
        for run in self.runs:
            for step in range(run.start, run.stop):
                block, place = divmod(step - run.start, run.period)
                if 0 < block < run.count - 1:
                    out[step] = run.start + (2 - block % 2) * run.period + place
        return tuple(at[step] for step in out)


def fold(graph: Graph) -> Fold:
    """``graph`` with its repeated blocks folded; unchanged if nothing repeats."""
    steps = [n for n in graph.nodes if not n.is_leaf]
    runs = tuple(find_runs(graph, steps))
    weights = [1.0] * len(steps)
    dropped: set[int] = set()
    other: dict[str, str] = {}  # value of a dropped block -> its counterpart in the kept block
    for run in runs:
        for block in range(1, 3):
            first = run.start + block * run.period
            weights[first : first + run.period] = [(run.count - 2) / 2] * run.period
        away = (run.count - KEPT) * run.period
        gone = range(run.start + 3 * run.period, run.start + (run.count - 1) * run.period)
        dropped.update(gone)
        # values that the last block takes from those before it now come from as many blocks before
        for step in range(run.start + away, run.start + away + 3 * run.period):
            if step in gone:
                for name, there in zip(steps[step].results, steps[step - away].results):
                    if name is not None and there is not None:
                        other[name] = there
    if not runs:
        return unfolded(graph)
    used = {name for n, step in enumerate(steps) if n not in dropped for name in step.inputs}
    of_gone = {name for n in dropped for name in steps[n].inputs} - used
    numbers = count()  # steps are numbered without the leaves among the nodes
    nodes = tuple(
        with_names(node, other)
        for node in graph.nodes
        if (node.result not in of_gone if node.is_leaf else next(numbers) not in dropped)
    )
    kept = tuple(n for n in range(len(steps)) if n not in dropped)
    return Fold(graph, Graph(graph.name, nodes, graph.loss), tuple(weights[n] for n in kept), kept, runs)


def unfolded(graph: Graph) -> Fold:
    count = sum(1 for n in graph.nodes if not n.is_leaf)
    return Fold(graph, graph, (1.0,) * count, tuple(range(count)), ())


class _Steps:
    """The origins of every step's inputs, for comparing two steps."""

    def __init__(self, graph: Graph, steps: list[Node]) -> None:
        self.producer = {r: (n, k) for n, s in enumerate(steps) for k, r in enumerate(s.results) if r}
        leaves = {n.result: n for n in graph.nodes if n.is_leaf}
        self.inputs = [s.inputs for s in steps]
        number: dict[tuple, int] = {}
        last: dict[str, int] = {}
        self.kinds: list[int] = []
        # for each input that is a leaf, the step that used it last
        self.before: list[tuple[int | None, ...]] = []
        for n, s in enumerate(steps):
            inputs = self.inputs[n]
            types = tuple(graph.types[name] for name in inputs)
            loaded = tuple(
                (leaves[name].op, leaves[name].kwargs) if name in leaves else None for name in inputs
            )
            flows = tuple(name in graph.requires_grad for name in (*inputs, *s.results))
            plain = s.op if s.op == "update" else s.plain  # ignores the buffer's name
            kind = (plain, types, s.types, loaded, flows)
            self.kinds.append(number.setdefault(kind, len(number)))
            self.before.append(tuple(last.get(name) if name in leaves else None for name in inputs))
            last.update((name, n) for name in inputs if name in leaves)
        self.uses: dict[str, list[int]] = {}
        for n, inputs in enumerate(self.inputs):
            for name in inputs:
                self.uses.setdefault(name, []).append(n)

    def alike(self, step: int, period: int) -> bool:
        """Whether a step and the one ``period`` steps later do the same to corresponding values."""
        if self.kinds[step] != self.kinds[step + period]:
            return False
        for n, (name, there) in enumerate(zip(self.inputs[step], self.inputs[step + period])):
            if name == there:
                continue
            source, other = self.producer.get(name), self.producer.get(there)
            if (source is None) != (other is None):
                return False
            if source is not None:
                if other != (source[0] + period, source[1]):
                    return False
            else:
                used, later = self.before[step][n], self.before[step + period][n]
                if later is not None and (used is None or later != used + period):
                    return False
                if later is None and used is not None:
                    return False
        return True


def find_runs(graph: Graph, steps: list[Node]) -> Iterator[Run]:
    """Yields runs that do not overlap and whose values are used only where the folded graph keeps them."""
    if len(steps) < LEAST_SAVED:
        return
    alike_steps = _Steps(graph, steps)
    distances = _distances(alike_steps.kinds)
    candidates = []
    # if a block has equal parts, its period is the sum of several distances
    common = [d for d, _ in distances.most_common(PERIODS)]
    tried = dict.fromkeys(common + [a + b for a in common[:3] for b in common[:3]] + [sum(common[:4])])
    for period in filter(None, tried):  # 0 if nothing repeats
        start = None
        for step in range(len(steps) - period + 1):
            if step < len(steps) - period and alike_steps.alike(step, period):
                start = step if start is None else start
            elif start is not None:
                run = _even(Run(start, period, (step - start) // period + 1))
                if run.saved >= LEAST_SAVED:
                    candidates.append(run)
                start = None
    chosen: list[Run] = []
    for longest in sorted(candidates, key=lambda r: (-r.saved, r.period)):
        narrow = narrowest(alike_steps, longest, len(steps))
        if narrow is None or narrow.saved < LEAST_SAVED:
            continue
        if all(narrow.stop <= other.start or narrow.start >= other.stop for other in chosen):
            chosen.append(narrow)
    yield from sorted(chosen, key=lambda r: r.start)


def _distances(kinds: Sequence[int]) -> Counter[int]:
    """How often a window of steps is repeated at each distance."""
    seen: dict[tuple[int, ...], int] = {}
    distances: Counter[int] = Counter()
    for n in range(len(kinds) - WINDOW + 1):
        window = tuple(kinds[n : n + WINDOW])
        if window in seen:
            distances[n - seen[window]] += 1
        seen[window] = n
    return distances


def _even(run: Run) -> Run:
    """The run with an even number of blocks, which take turns; an odd first block stays outside."""
    return run if run.count % 2 == 0 else Run(run.start + run.period, run.period, run.count - 1)


def narrowest(known: _Steps, run: Run, count: int) -> Run | None:
    """``run`` with its blocks starting where the fewest values pass from one block to the next; None if a
    later step uses a value that exists only in the folded graph's middle."""
    live = [0] * run.period
    for name, uses in known.uses.items():
        if name in known.producer:
            maker = known.producer[name][0]
            for step in range(max(maker + 1, run.start), min(uses[-1] + 1, run.start + run.period)):
                live[step - run.start] += 1
    best = min(range(run.period), key=lambda n: (live[n], n))
    moved = _even(Run(run.start + best, run.period, run.count - (1 if best else 0)))
    for start in dict.fromkeys((moved, run)):
        if start.saved >= LEAST_SAVED and _closed(known, start):
            return start
    return None


def _closed(known: _Steps, run: Run) -> bool:
    """Whether all values made before the last block are used within two blocks, and never after the run."""
    for name, uses in known.uses.items():
        maker = known.producer.get(name)
        if maker is not None and run.start <= maker[0] < run.stop - run.period:
            if uses[-1] >= run.stop or uses[-1] - maker[0] > 2 * run.period:
                return False
        if maker is None and len(uses) > 1:
            inside = [u for u in uses if run.start <= u < run.stop]
            # a leaf of a block must not be used after the run, unless all blocks share it
            if inside and uses[-1] >= run.stop and len(inside) < run.count:
                return False
    return True
