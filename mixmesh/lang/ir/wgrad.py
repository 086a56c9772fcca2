"""Split weight gradients: they decide when in the backward pass the gradient of a weight is computed.

The backward pass of ``y = linear(x, w)`` has two products: the gradient of x (dgrad), which the preceding
layers wait for, and the gradient of w (wgrad), which only its all-reduce waits for. PyTorch computes both
before it goes on. The attribute ``wgrad`` of the instruction splits them:

- ``first``: wgrad is computed before dgrad, and its all-reduce may overlap with dgrad;
- ``last``: it is computed after all products that are not ``last``, which keep their order. So gradients that
  the backward pass completes last, such as that of a large embedding, are complete earlier, and their
  all-reduce overlaps with these products (as in pipelines without bubbles: Qi et al., "Zero Bubble Pipeline
  Parallelism", ICLR'24, section 2);
- ``beside``: it is overlapped with the next collective of the backward pass that dgrads wait for (as in
  Megatron-LM, which hides the all-reduces of tensor parallelism behind these products). Where no such
  collective follows, it is computed ``first``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from .instruction import Instruction, with_attrs
from .placement import Partial, Replicate, Shard
from .program import Program
from .recompute import region_of

WGRADS = ("first", "last", "beside")
PRODUCTS = ("aten.linear", "aten.conv1d", "aten.conv2d", "aten.conv3d")
NEVER = -(10**9)  # a point behind the end of every backward pass


def wgrad_of(i: Instruction) -> str | None:
    """``first``, ``last`` or ``beside`` for an instruction with a split weight gradient, else None."""
    return i.attr("wgrad") if i.attrs else None


def late_point(program: Program, n: int) -> int:
    """The point in the backward pass where the weight gradient of instruction ``n`` is computed if it is
    ``last``. All else happens at the index of its instruction, and the pass goes from high to low points."""
    return n - len(program.instructions) - 1


class Beside(NamedTuple):
    """The place of a weight gradient with ``beside``: the result of the redistribution whose gradient it
    overlaps, and the point in the backward pass, a number between two indices of instructions."""

    collective: str
    point: float


def beside_points(program: Program) -> dict[int, Beside]:
    """Maps the indices of products with ``beside`` to their places, if a collective follows that they can be
    overlapped with; the others are ``first``. When a collective starts, all products that wait are computed,
    in the order of the backward pass.

    It follows from the program alone, so it is the same on all ranks: gradient all-reduces need one order.
    """
    if "beside" not in program.wgrads.values():
        return {}
    out: dict[int, Beside] = {}
    sent = returned(program)
    waiting: list[int] = []
    for n in range(len(program.instructions) - 1, -1, -1):
        if program.wgrads.get(n) == "beside":
            waiting.append(n)
        if n not in sent or not waiting:
            continue
        # takes the last collective in which all ranks of the product take part; earlier ones still overlap
        carries: dict[str, list[int]] = {i.result: [] for i in sent[n]}
        for product in waiting:
            ranks = {*program.participants(program.instructions[product].type)}
            able = [i.result for i in sent[n] if ranks <= _waits_for(program, i)]
            if able:
                carries[able[-1]].append(product)
        here = [(name, product) for name, products in carries.items() for product in products]
        for k, (name, product) in enumerate(here, 1):
            out[product] = Beside(name, n - k / (len(here) + 1))
            waiting.remove(product)
    return out


def returned(program: Program) -> dict[int, list[Instruction]]:
    """The redistributions whose gradients the backward pass sends, in order, each with the index of the
    instruction before whose backward it is sent. That is the first instruction that uses the result: the
    forward pass waits for it there, and autograd runs in reverse. The loss has the index of the end."""
    out: dict[int, list[Instruction]] = {}
    first: dict[str, int] = {}
    for n, i in enumerate(program.instructions):
        for name in i.inputs:
            first.setdefault(name, n)
    count = len(program.instructions)
    for n, i in enumerate(program.instructions):
        if i.is_redistribution and i.result in program.requires_grad:
            unused = count if i.result == program.loss else n
            out.setdefault(first.get(i.result, unused), []).append(i)
    for n, moved in out.items():
        if n < count:
            order = {name: k for k, name in enumerate(dict.fromkeys(program.instructions[n].inputs))}
            moved.sort(key=lambda i: -order.get(i.result, -1))
    return out


def _waits_for(program: Program, i: Instruction) -> set[int]:
    """The ranks that take part in the gradient of a redistribution and wait for its result. Empty if the
    result goes straight to a parameter, if nothing is sent, or if only the borders between ranks move."""
    source = program.types[i.inputs[0]]
    if program.producers[i.inputs[0]].op == "param" or not i.type.value.size_bytes:
        return set()
    match source.placement, i.type.placement:
        case (Shard(), Replicate()) | (Partial(), Replicate() | Shard()):
            pass
        case Shard(dim=one), Shard(dim=other) if one != other:
            pass
        case _:
            return set()
    ranks = {*program.participants(source)} & {*program.participants(i.type)}
    return ranks if len(ranks) > 1 else set()


def weight_points(program: Program) -> dict[int, float]:
    """Maps the indices of instructions whose weight gradient comes later than their own backward to the point
    in the backward pass where it is computed."""
    out: dict[int, float] = {n: b.point for n, b in beside_points(program).items()}
    for n, when in program.wgrads.items():
        if when == "last":
            out[n] = late_point(program, n)
    return out


def last_points(program: Program) -> dict[str, float]:
    """Maps every value that is used to the point in the backward pass where its gradient is complete."""
    out: dict[str, float] = {}
    later = weight_points(program)
    for n, i in enumerate(program.instructions):
        if n not in later:
            for name in i.inputs:
                out.setdefault(name, n)
        else:
            for position, name in enumerate(i.inputs):
                out.setdefault(name, later[n] if position == 1 else n)
    return out


def separable(program: Program) -> tuple[int, ...]:
    """The indices of instructions that may have a ``wgrad``: products of a value that needs a gradient with
    parameters that nothing else uses."""
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
        # without a batch dim (x is [k], or [c, h, w]) these products have another form
        and len(program.types[x].value.shape) >= len(program.types[params[0]].value.shape)
    )


def with_wgrads(program: Program, chosen: Mapping[int, str]) -> Program:
    """Returns ``program`` with these values of ``wgrad``, by index of instruction, and no others."""

    def marked(n: int, i: Instruction) -> Instruction:
        if chosen.get(n) == wgrad_of(i):
            return i
        attrs = tuple((k, v) for k, v in i.attrs if k != "wgrad")
        return with_attrs(i, (*attrs, ("wgrad", chosen[n])) if n in chosen else attrs)

    return program.changed(instructions=tuple(marked(n, i) for n, i in enumerate(program.instructions)))
