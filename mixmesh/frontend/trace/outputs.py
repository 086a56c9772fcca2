"""The names of the outputs of a forward pass besides the loss.

The name of a tensor is its path: ``logits``, ``hidden_states.2``, or ``1`` in a tuple. Users select outputs
by the first part of the path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from ...errors import TraceError

NOTHING = "?"  # suffix of the name of an output that was None


def named_tensors(output: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in a model's return value, with their paths. In an object, it examines the
    attributes, and lists, tuples, mappings and dataclasses within these."""
    if isinstance(output, torch.Tensor):
        yield path, output
        return
    for name, value in parts_of(output, top=not path):
        yield from named_tensors(value, f"{path}.{name}" if path else str(name))


def parts_of(output: Any, *, top: bool = True) -> Iterator[tuple[Any, Any]]:
    """Yields the names and values in a part of a model's return value. For an object without items these are
    its attributes, but only at the ``top``."""
    if isinstance(output, Mapping) or hasattr(output, "items"):
        yield from output.items()
    elif isinstance(output, tuple) and hasattr(output, "_fields"):
        yield from zip(output._fields, output)
    elif isinstance(output, tuple | list):
        yield from enumerate(output)
    elif dataclasses.is_dataclass(output):
        yield from ((f.name, getattr(output, f.name)) for f in dataclasses.fields(output))
    elif top and hasattr(output, "__dict__"):
        yield from vars(output).items()


def names_of_all(output: Any, where: str) -> tuple[str, ...]:
    """The names of all tensors that a model returned, and of each None at the top level, followed by NOTHING.
    Raises TraceError for a tuple with other values, whose positions could not be kept."""
    if isinstance(output, torch.Tensor):
        return ("",)
    names: list[str] = []
    for name, part in parts_of(output):
        paths = [f"{name}{NOTHING}"] if part is None else [path for path, _ in named_tensors(part, str(name))]
        if not paths and isinstance(output, tuple | list):
            raise TraceError(
                "the model returns something that is no tensor",
                expected="a tensor, or tensors in a tuple, a dict or an object",
                got=f"a {type(part).__name__} at place {name} of a tuple",
                where=where,
                hint="mixmesh.prepare(..., loss=function of (outputs, targets))",
            )
        names += paths
    return tuple(names)


def first_part(name: str) -> str:
    """The part of a tensor's path that users select it by."""
    return name.partition(".")[0]


class IfGiven(str):
    """The name of an output that the model may leave out."""


def selected(returns: Sequence[str], loss: str, wanted: Collection[str | int], where: str) -> tuple[str, ...]:
    """Selects the ``wanted`` names among those of the returned tensors. Raises TraceError for a name that
    selects nothing."""
    optional = {str(name) for name in wanted if isinstance(name, IfGiven)}
    wanted = tuple(map(str, wanted))
    offered = tuple(dict.fromkeys(first_part(name) for name in returns if name != loss))
    for name in wanted:
        if name not in offered and name not in optional:
            raise TraceError(
                f"the model returns no tensor {name!r} beside its loss",
                expected=", ".join(offered) or "nothing: the model returns the loss alone",
                got=f"outputs=({', '.join(map(repr, wanted))},)",
                where=where,
                hint=f"outputs=({offered[0]!r},)" if offered else "return an object with .loss and .logits",
            )
    return tuple(name for name in returns if name != loss and first_part(name) in wanted)
