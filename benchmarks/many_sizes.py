"""Architectures whose traces with symbols for sizes serve other shapes, held against plain traces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from mixmesh.errors import MixmeshError
from mixmesh.frontend.trace import trace, trace_symbolic
from mixmesh.frontend.trace.capture import shapes_of
from mixmesh.frontend.trace.symbolic import free_dims

from .architectures import Architecture, build
from .coverage import chosen
from .inputs import LENGTH

CUTS = ((0, 0), (0, 2), (1, 3))  # by how many samples and tokens each shape is smaller


@dataclass(frozen=True)
class Served:
    """An architecture. ``served`` counts the ``shapes`` with the graph of a plain trace, and ``wrong`` those
    with another one; -1 where there is no trace with symbols."""

    name: str
    shapes: int
    served: int
    wrong: int


def run(say: Callable[[str], None] = lambda _: None) -> list[Served]:
    """A row for each architecture that can be traced."""
    rows = []
    for architecture in chosen():
        say(architecture.name)
        try:
            rows.append(serve(architecture))
        except MixmeshError:  # it cannot be traced at all
            continue
    return rows


def serve(architecture: Architecture) -> Served:
    """How many of three shapes, with fewer samples and tokens, one trace with symbols serves."""
    model, batch = build(architecture)
    size = max(x.shape[0] for x in pytree.tree_leaves(batch) if isinstance(x, Tensor) and x.ndim)
    batches = [smaller(batch, size, samples, tokens) for samples, tokens in CUTS]
    graphs = [trace(model, each).graph for each in batches]
    shapes = [shapes_of(each) for each in batches]
    _, symbolic = trace_symbolic(model, batches[0], free_dims(shapes))
    if symbolic is None:
        return Served(architecture.name, len(CUTS), -1, 0)
    traced = [symbolic.at(each) for each in shapes]
    same = [t.graph == graph for t, graph in zip(traced, graphs) if t is not None]
    return Served(architecture.name, len(CUTS), sum(same), len(same) - sum(same))


def smaller(batch: Any, size: int, samples: int, tokens: int) -> Any:
    """A batch of ``size`` samples without so many of its samples, and of the tokens of each."""

    def cut(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        for dim, n in enumerate(x.shape):
            if dim == 0 and n == size:
                x = x[: n - samples]
            elif n == LENGTH:
                x = x.narrow(dim, 0, n - tokens)
        return x

    return pytree.tree_map(cut, batch)
