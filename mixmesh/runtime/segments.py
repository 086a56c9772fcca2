"""Runs of a rank's instructions between collectives, each handed to ``torch.compile`` as one function.

A segment ends at anything but an operator of this rank: a collective that begins or is awaited, a random
operator (whose numbers are those of the whole batch), experts (the numbers of whose rows are data), a region
that is rematerialised, a split weight gradient. It also ends at the first use of parameters from another
bucket: compiled code returns the gradients of a segment together, and a bucket's gradients should travel
while the backward pass of earlier segments computes. Programs that gather parameters again for the backward
pass (ZeRO-3) are not compiled: they decide tensor by tensor what to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ..errors import InputError

SMALL = 2  # with fewer operators, calling compiled code does not pay


@dataclass
class Segment:
    """Consecutive operators. ``lines`` call them one by one. ``made`` are the values defined within the
    segment and still needed at its end, ``used`` those from before it, and ``dropped`` those of ``used`` that
    are dropped within it, in the order of their first mention."""

    lines: list[str] = field(default_factory=list)
    num_operators: int = 0
    buckets: set[int] = field(default_factory=set)
    used: dict[str, None] = field(default_factory=dict)
    made: dict[str, None] = field(default_factory=dict)
    dropped: dict[str, None] = field(default_factory=dict)
    _defined: set[str] = field(default_factory=set)

    def add(self, line: str, results: Sequence[str], arguments: Sequence[str]) -> None:
        """Adds the line of one operator; a result that is not used is ``_``."""
        self.lines.append(line)
        self.num_operators += 1
        self.used.update((name, None) for name in arguments if name not in self._defined)
        kept = [name for name in results if name != "_"]
        self._defined.update(kept)
        self.made.update((name, None) for name in kept)

    def drop(self, names: Sequence[str]) -> None:
        """Notes that these values are no longer needed."""
        for name in names:
            if name in self._defined:
                del self.made[name]
                self.lines.append(f"del {name}")
            else:
                self.dropped[name] = None

    def source(self, name: str) -> str:
        """The segment's code as a function of this name."""
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def {name}({', '.join(self.used)}):\n{body}    return ({_tuple(self.made)})\n"

    def call(self, name: str) -> str:
        """The line that calls the whole segment."""
        return f"({_tuple(self.made)}) = {name}({', '.join(self.used)})"


def _tuple(names) -> str:
    return "".join(f"{name}, " for name in names)


def compiled(function: Callable) -> Callable:
    """The segment compiled by TorchInductor, for the shapes with which it is called."""
    return torch.compile(function, dynamic=False)


def check_can_compile(device: torch.device) -> None:
    """Raises InputError if ``torch.compile`` has no compiler to call."""
    if device.type != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        raise InputError(
            "torch.compile finds no C++ compiler on this machine",
            expected="g++ or clang++, or its path in the environment variable CXX",
            got=str(error).partition("\n")[0],
            hint="compile=False (mixmesh run without --compile)",
        ) from None
