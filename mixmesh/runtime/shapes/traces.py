"""The traces of a model for batches of several shapes.

Each of the first shapes has a trace of its own. More may follow, where texts are padded to the longest of a
batch. Then the sizes that differ become symbols of one trace, which serves further shapes.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ...base.progress import warn_once
from ...base.units import seconds_text
from ...frontend.trace import SymbolicTrace, Traced, trace, trace_symbolic
from ...frontend.trace.symbolic import Shape, free_dims
from ...lang.ir import Graph

# a trace with symbols takes as long as three to five without: it is made from this number of shapes on, and
# again if as many shapes have come that it does not serve
OWN = 3
ATTEMPTS = 2
MAX_KINDS = 16  # kinds of calls that are remembered, those that came last
# the script is told that shapes cost time from this number of traces on, if they took that long
MANY, TOLD_S = 6, 20.0

NamedShapes = Mapping[str, Shape]


@dataclass
class _Kind:
    """The traces of calls that differ in nothing but shapes. ``own`` are the latest ones without symbols."""

    shapes: list[NamedShapes]
    own: list[tuple[NamedShapes, Graph]] = field(default_factory=list)
    symbolic: SymbolicTrace[Traced] | None = None
    attempts: int = 0


@dataclass
class Traces:
    """Makes the traces of a model that was planned for inputs of ``planned`` shapes. One with symbols takes
    ``limit_s`` at most, as other ranks wait for it. ``spent_s`` are the seconds of each."""

    planned: NamedShapes
    limit_s: float
    kinds: OrderedDict[Hashable, _Kind] = field(default_factory=OrderedDict)
    spent_s: list[float] = field(default_factory=list)
    has_told: bool = False  # whether the script knows that many shapes cost time

    def traced(
        self, kind: Hashable, shapes: NamedShapes, model: nn.Module, batch: Any, **options: Any
    ) -> Traced:
        """``trace(model, batch, **options)`` for a batch whose tensors, also those that the program does not
        take, have these ``shapes``. Calls of one ``kind`` differ in nothing else, or in the inputs that they
        have. Raises what ``trace`` does."""
        dims = tuple((name, len(shape)) for name, shape in sorted(shapes.items()))
        past = self._kind((kind, dims), shapes)
        traced = past.symbolic.at(shapes) if past.symbolic is not None else None
        if traced is not None:
            return traced
        if past.attempts < ATTEMPTS:
            past.shapes.append(shapes)
        started = time.perf_counter()
        if len(past.own) < OWN or past.attempts == ATTEMPTS:
            traced = trace(model, batch, **options)
            past.own = [*past.own, (shapes, traced.graph)][-OWN:]
        else:
            free = free_dims(past.shapes)
            traced, symbolic = trace_symbolic(model, batch, free, limit_s=self.limit_s, **options)
            if symbolic is not None and _agrees(symbolic, past.own):
                past.symbolic = symbolic
            past.attempts, past.own = past.attempts + 1, []
        self.spent_s.append(time.perf_counter() - started)
        if len(self.spent_s) >= MANY and not self.has_told and sum(self.spent_s) >= TOLD_S:
            self.has_told = True
            warn_once(_of_many_shapes(self.spent_s))
        return traced

    def _kind(self, kind: Hashable, shapes: NamedShapes) -> _Kind:
        if kind not in self.kinds:
            self.kinds[kind] = _Kind(
                [{name: self.planned.get(name, shape) for name, shape in shapes.items()}]
            )
            if len(self.kinds) > MAX_KINDS:
                self.kinds.popitem(last=False)
        self.kinds.move_to_end(kind)
        return self.kinds[kind]


def _agrees(symbolic: SymbolicTrace[Traced], own: Sequence[tuple[NamedShapes, Graph]]) -> bool:
    """Whether a trace with symbols gives the graphs of traces without, wherever it gives any."""
    pairs = [(symbolic.at(shapes), graph) for shapes, graph in own]
    return all(traced is None or traced.graph == graph for traced, graph in pairs)


def _of_many_shapes(spent_s: Sequence[float]) -> str:
    total = seconds_text(sum(spent_s))
    return (
        f"mixmesh: {len(spent_s)} shapes of batches have been traced so far, in {total}: "
        "pad to few lengths, as by pad_to_multiple_of=32 of a data collator, to have fewer of them"
    )
