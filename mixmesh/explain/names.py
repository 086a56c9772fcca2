"""Finds the tensor of a program that a user means."""

from __future__ import annotations

import difflib
import re

from ..errors import InputError
from ..lang.ir import Graph, Node, Program, nameless

SHOWN = 4


def find_tensor(program: Program, text: str) -> str:
    """The name in ``program.graph`` of the tensor that ``text`` names: a value (``%h``, or the result of one
    of its redistributions), a path of the model (``blocks.0.fc1.weight``), or the end of exactly one of
    these. Raises InputError with similar names."""
    names = logical_names(program)
    asked = text.strip().removeprefix("%")
    if asked in names:
        return names[asked]
    matching = {name: of for name, of in names.items() if asked and name.endswith(f".{asked}")}
    distinct = {of: name for name, of in reversed(matching.items())}  # each with the first of its names
    if len(distinct) == 1:
        return next(iter(distinct))
    if distinct:
        shown = list(reversed(distinct.values()))[:SHOWN]
        raise InputError(
            f"{len(distinct)} tensors end in {text!r}",
            expected="one of " + ", ".join(shown) + (", ..." if len(distinct) > SHOWN else ""),
            got=text,
            hint=f"--tensor {shown[0]}",
        )
    close = difflib.get_close_matches(asked, names, SHOWN, cutoff=0.5)
    close += [name for name in names if asked and asked in name and name not in close][: SHOWN - len(close)]
    raise InputError(
        f"the plan has no tensor {text!r}",
        expected="a value of its program (%h), a parameter's path, or the end of one"
        + (f": {', '.join(close)}" if close else ""),
        got=text,
        hint=tuple(f"--tensor {name}" for name in close[:2]) or "mixmesh show X.plan names all of them",
    )


def logical_names(program: Program) -> dict[str, str]:
    """Maps every name of a tensor to its name in ``program.graph``: values first, then paths."""
    out: dict[str, str] = {}
    paths: dict[str, str] = {}
    for i in program.instructions:
        for name in i.results:
            if name is not None:
                out[name] = out[i.inputs[0]] if i.is_redistribution else name
        if i.is_leaf and i.args and isinstance(i.args[0], str):
            paths[i.args[0]] = i.result
    return {**out, **{path: name for path, name in paths.items() if path not in out}}


def in_all_layers(graph: Graph, name: str) -> tuple[str, ...]:
    """``name`` and its counterparts in other layers: parameters whose paths differ only in numbers, and
    values of the same operator that follow such a parameter at the same distance."""
    keys = _keys(graph)
    return tuple(other for other in graph.types if keys[other] == keys[name])


def _keys(graph: Graph) -> dict[str, tuple]:
    out: dict[str, tuple] = {}
    last, since = "", 0
    for node in graph.nodes:
        if node.is_leaf:
            out[node.result] = (node.op, _numberless(node), node.types)
            continue
        used = [graph.producers[name] for name in node.inputs]
        params = [n for n in used if n.op == "param"]
        last, since = (_numberless(params[0]), 0) if params else (last, since + 1)
        for k, result in enumerate(node.results):
            if result is not None:
                out[result] = (node.op, last, since, k, nameless(node.args), node.types)
    return out


def _numberless(leaf: Node) -> str:
    path = str(leaf.args[0]) if leaf.args else leaf.result
    return re.sub(r"(?<![^.])\d+(?![^.])", "#", path)
