"""A random model as text: a frozen list of statements that prints as a Python file and builds from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn

NAME = re.compile(r"\b[vx]\d+\b")

HEADER = '''\
"""{title}"""

import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
{init}

    def forward(self, {arguments}):
{body}
        return {loss}


def make():
    torch.manual_seed({seed})
    model = Model().double()
    batch = {{
{batch}
    }}
    return model, batch


def job():
    import mixmesh

    return mixmesh.Job(*make())
'''


@dataclass(frozen=True)
class Line:
    """``name = code`` of a forward pass (a bare statement without a name), and what ``__init__`` does for
    it."""

    name: str
    code: str
    init: tuple[str, ...] = ()

    @property
    def uses(self) -> frozenset[str]:
        return frozenset(NAME.findall(self.code))

    def __str__(self) -> str:
        return f"{self.name} = {self.code}" if self.name else self.code


@dataclass(frozen=True)
class Source:
    """``inputs`` are names with the expressions of their values, ``losses`` names of scalars that are
    summed."""

    inputs: tuple[tuple[str, str], ...]
    lines: tuple[Line, ...]
    losses: tuple[str, ...]
    seed: int
    title: str = "A random model."

    def __str__(self) -> str:
        init = [text for line in self.lines for text in line.init] or ["pass"]
        return HEADER.format(
            title=self.title,
            init="\n".join(f"        {text}" for text in init),
            arguments=", ".join(name for name, _ in self.inputs),
            body="\n".join(f"        {line}" for line in self.lines),
            loss=" + ".join(self.losses),
            seed=self.seed,
            batch="\n".join(f'        "{name}": {value},' for name, value in self.inputs),
        )

    def build(self) -> tuple[nn.Module, dict[str, Tensor]]:
        return build(str(self))


def build(text: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and the batch of a file that ``Source`` printed."""
    space: dict = {"__name__": "random_model"}
    exec(compile(text, "<random model>", "exec"), space)
    return space["make"]()


def simpler(source: Source, shapes: dict[str, tuple]) -> Iterator[Source]:
    """Yields smaller sources, the smallest first: with fewer losses, cut off behind a value, without a line,
    with an earlier value in place of a later one. ``shapes`` are shapes and dtypes of values by name."""
    if len(source.losses) > 1:
        for loss in source.losses:
            yield needed(replace(source, losses=(loss,)))
    for line in source.lines:
        if line.name and line.name not in source.losses and "float64" in str(shapes.get(line.name, "")):
            lines = source.lines[: source.lines.index(line) + 1]
            loss = Line("v9999", f"{line.name}.square().mean()")
            yield needed(replace(source, lines=(*lines, loss), losses=(loss.name,)))
    dead = needed(source)
    if dead != source:
        yield dead
    for n, line in enumerate(source.lines):
        if not line.name:
            yield replace(source, lines=source.lines[:n] + source.lines[n + 1 :])
        elif line.name not in source.losses:
            for other in (*[name for name, _ in source.inputs], *[x.name for x in source.lines[:n]]):
                if other and line.name in shapes and shapes.get(other) == shapes[line.name]:
                    yield needed(_substituted(source, n, other))


def needed(source: Source) -> Source:
    """``source`` without statements and inputs that no loss depends on; those that bind no name stay."""
    wanted = set(source.losses)
    kept: list[Line] = []
    for line in reversed(source.lines):
        if line.name in wanted or not line.name:
            wanted |= line.uses
            kept.append(line)
    lines = tuple(reversed(kept))
    bound = {line.name for line in lines} | {name for name, _ in source.inputs}
    lines = tuple(line for line in lines if line.uses <= bound)
    made = {i for line in lines for i in line.init}
    lines = tuple(_with_modules(line, made, source) for line in lines)
    inputs = tuple(pair for pair in source.inputs if pair[0] in wanted)
    return replace(source, lines=lines, inputs=inputs or source.inputs[:1])


def _with_modules(line: Line, made: set[str], source: Source) -> Line:
    """``line`` with the ``__init__`` statements that make what it names, if the line that had them is
    gone."""
    names = set(re.findall(r"self\.\w+", " ".join((line.code, *line.init))))
    missing = [
        text
        for other in source.lines
        for text in other.init
        if text not in made and names & set(re.findall(r"self\.\w+", text)) and text not in line.init
    ]
    made.update(missing)
    return replace(line, init=(*missing, *line.init))


def _substituted(source: Source, n: int, other: str) -> Source:
    name = source.lines[n].name
    rest = tuple(
        replace(line, code=re.sub(rf"\b{name}\b", other, line.code)) for line in source.lines[n + 1 :]
    )
    return replace(source, lines=source.lines[:n] + rest)
