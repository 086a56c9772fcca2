"""Keeps the regions that the user checkpointed (``torch.utils.checkpoint``) during export.

Export itself forgets them. Here every such call runs its function within a frame whose file name has the
number of the region, so that all nodes of the region carry the number in their stack traces, through every
later decomposition.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import checkpoint as checkpoints

from ...errors import TraceError
from ...lang.ir import Graph
from .locate import Place

_NUMBER = re.compile(r'File "<checkpoint (\d+)>"')
_DISABLED = "__dynamo_disable"  # torch calls this instead of a function that it does not compile


def region_of_stack(text: str | None) -> int | None:
    """The number of the outermost region of a node's stack trace, or None."""
    match = _NUMBER.search(text or "")
    return int(match[1]) if match else None


@contextmanager
def regions_kept() -> Iterator[None]:
    """A context in which checkpointed functions (reentrant or not) run once, as regions with numbers from
    0."""
    numbers = itertools.count()

    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_reentrant = kwargs.get("use_reentrant") is not False
        kwargs = {k: v for k, v in kwargs.items() if k not in OPTIONS}
        if is_reentrant and not any(map(_has_gradient, args)):
            with torch.no_grad():  # as on one device, where the backward pass does not reach the function
                return function(*args, **kwargs)
        code = compile("def run(function, args, kwargs): return function(*args, **kwargs)",
                       f"<checkpoint {next(numbers)}>", "exec")  # fmt: skip
        names: dict[str, Any] = {}
        exec(code, names)
        return names["run"](function, args, kwargs)

    # models refer to the function itself, so the function that it calls is replaced
    original = vars(checkpoints.checkpoint)["__wrapped__"]
    before = getattr(original, _DISABLED, None)
    setattr(original, _DISABLED, checkpoint)
    try:
        yield
    finally:
        setattr(original, _DISABLED, before)


def _has_gradient(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def check_updates(graph: Graph) -> None:
    """Raises TraceError for a region that updates a buffer: autograd runs the region again, so a single
    device makes the update twice in a step with a backward pass, and once in a step without."""
    producers = {r: n for n in graph.nodes for r in n.results if r is not None}
    flowing = {n.region for r, n in producers.items() if r in graph.requires_grad}
    for node in graph.nodes:
        if node.op != "update":
            continue
        by = producers[node.inputs[0]]
        if by.region is not None and by.region in flowing:
            raise TraceError(
                f"a checkpointed part of the model updates {node.args[0]}, on one device twice in a step",
                expected="no batch norm in training within torch.utils.checkpoint",
                got=f"{by.op} within it",
                where=str(Place(by.location, by.source)),
                hint=(
                    "leave torch.utils.checkpoint out: a plan runs parts again where memory is short",
                    "keep batch norm out of the checkpointed part, or in evaluation mode",
                ),
            )


OPTIONS = ("use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state")
