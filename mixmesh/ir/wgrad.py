"""When in the backward pass the gradient of a weight is computed.

The backward pass of ``y = linear(x, w)`` makes two products: the gradient of x, for which what comes next
waits, and that of w, for which only a sum over ranks does. PyTorch makes both before anything else goes on.
The attribute ``wgrad`` of the instruction has them apart:

- ``first``: that of w is made first, and its sum may begin while that of x is computed;
- ``last``: it is made after all that is not ``last``, in the same order. So what the backward pass completes
  last, such as a large table of words, is complete earlier, and summed while these products are computed
  (pipelines without bubbles do so too: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR'24, section 2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from .placement import Partial
from .program import Instruction, Program, with_attrs
from .recompute import region_of

WGRADS = ("first", "last")
PRODUCTS = ("aten.linear", "aten.conv1d", "aten.conv2d", "aten.conv3d")
NEVER = -(10**9)  # before which every gradient is complete


def wgrad_of(i: Instruction) -> str | None:
    """``first`` or ``last``, if that is apart."""
    return i.attr("wgrad") if i.attrs else None


def late_point(program: Program, n: int) -> int:
    """Where in the backward pass what instruction ``n`` leaves for last is done. All else is done at its own
    index, and the pass goes from high ones to low ones."""
    return n - len(program.instructions) - 1


def last_points(program: Program) -> dict[str, int]:
    """By value that is used, where in the backward pass its gradient is complete."""
    out: dict[str, int] = {}
    for n, i in enumerate(program.instructions):
        late = wgrad_of(i) == "last"
        for position, name in enumerate(i.inputs):
            if name not in out:
                out[name] = late_point(program, n) if late and position == 1 else n
    return out


def separable(program: Program) -> tuple[int, ...]:
    """Indices of the instructions that may have a ``wgrad``: products of something that takes a gradient
    too with parameters that nothing else uses."""
    users = Counter(name for i in program.instructions for name in dict.fromkeys(i.inputs))
    return tuple(n for n, i in enumerate(program.instructions) if _fits(program, i, users))


def _fits(program: Program, i: Instruction, users: Counter[str]) -> bool:
    if i.op not in PRODUCTS or region_of(i) is not None or (i.attrs and i.attr("sfb", False)):
        return False
    x, *params = i.inputs
    return (
        {x, params[0]} <= program.requires_grad
        and all(program.producers[name].op == "param" and users[name] == 1 for name in params)
        and not isinstance(program.types[x].placement, Partial)
        # without a batch dim (x of [k], or [c, h, w]) the products are others
        and len(program.types[x].value.shape) >= len(program.types[params[0]].value.shape)
    )


def with_wgrads(program: Program, chosen: Mapping[int, str]) -> Program:
    """``program`` with these ``wgrad`` on instructions by index, and on no others."""

    def marked(n: int, i: Instruction) -> Instruction:
        if chosen.get(n) == wgrad_of(i):
            return i
        attrs = tuple((k, v) for k, v in i.attrs if k != "wgrad")
        return with_attrs(i, (*attrs, ("wgrad", chosen[n])) if n in chosen else attrs)

    return program.changed(instructions=tuple(marked(n, i) for n, i in enumerate(program.instructions)))
