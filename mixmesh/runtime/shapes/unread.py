"""The sizes of tensors that a program does not take, as the model reads nothing but their shapes.

A mask of which ``forward`` reads ``mask.shape`` is no input of the program, but its sizes are numbers in it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..calls import Calls, by_size, flat

# by name of a tensor: for each of its dims the input that has the same size there, or else the size
Sizes = tuple[tuple[str, tuple[str | int, ...]], ...]


@dataclass
class Unread:
    """Tells calls of a model apart that differ beyond the inputs of its program. A plan does not record the
    sizes of other tensors: those of the ``first`` call, if all are sizes of inputs, are taken for planned."""

    first: list[Sizes] = field(default_factory=list)

    def mark(self, calls: Calls, args: tuple, kwargs: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> int:
        """0 for a call whose other tensors have sizes as planned, else a number derived from them. ``inputs``
        are the tensors that the program takes."""
        sizes = _sizes(flat(calls.signature.bind(args, kwargs)), inputs)
        if not any(isinstance(size, int) for _, shape in sizes for size in shape):
            self.first = self.first or [sizes]
        return 0 if sizes in self.first else 1 + zlib.crc32(repr(sizes).encode())


def _sizes(leaves: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> Sizes:
    taken = {id(t) for t in inputs.values()}
    others = {name: x for name, x in leaves.items() if isinstance(x, Tensor) and id(x) not in taken}
    if not others:
        return ()
    # inputs whose names come first are preferred: labels, which evaluation leaves out, come late
    named = by_size(inputs, sorted(inputs, reverse=True))
    return tuple(
        (name, tuple(named.get(size, size[1]) for size in enumerate(x.shape))) for name, x in others.items()
    )
