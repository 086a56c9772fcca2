"""When in the backward pass the gradient of a weight is computed.

The backward pass of ``y = linear(x, w)`` makes two products: the gradient of x, for which what comes next
waits, and that of w, for which only a sum over ranks does. PyTorch makes both before anything else goes on.
The attribute ``wgrad`` of the instruction has them apart:

- ``first``: that of w is made first, and its sum may begin while that of x is computed;
- ``last``: it is made after all that is not ``last``, in the same order. So what the backward pass completes
  last, such as a large table of words, is complete earlier, and summed while these products are computed
  (pipelines without bubbles do so too: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR'24, section 2);
- ``beside``: it is made when the next gradient that a redistribution sends back, and that the pass will have
  to wait for, is on its way: beside it (as Megatron-LM does, which hides the sums of tensor parallelism
  behind these products). A gradient that waits for no such collective is made ``first``.
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
NEVER = -(10**9)  # before which every gradient is complete


def wgrad_of(i: Instruction) -> str | None:
    """``first``, ``last`` or ``beside``, if that is apart."""
    return i.attr("wgrad") if i.attrs else None


def late_point(program: Program, n: int) -> int:
    """Where in the backward pass what instruction ``n`` leaves for last is done. All else is done at its own
    index, and the pass goes from high ones to low ones."""
    return n - len(program.instructions) - 1


class Beside(NamedTuple):
    """The place of a weight gradient with ``beside``: the result of the redistribution whose gradient travels
    meanwhile, and where in the backward pass that is: after what is done at the index above, before what is
    at the one below."""

    collective: str
    point: float


def beside_points(program: Program) -> dict[int, Beside]:
    """By index of the products with ``beside`` before a collective that they can be computed beside; the
    others are ``first``. All that waits when a collective is sent is computed then, in the order of the pass.

    A function of the program alone: the same on all ranks, as sums of gradients keep one order.
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
        # the last one that all ranks of a product have a part in: what is sent before it is on its way too
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
    """Redistributions whose gradients the backward pass sends, in the order in which it does, by the index of
    the instruction after whose backward that is: the first that uses what they bring, as there the forward
    pass awaits them, and autograd goes back in the order in which it came. That of the loss is behind all."""
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
    """The ranks that have a part in a redistribution's gradient and wait for what it brings: none where it
    goes straight to a parameter, nothing is sent, or it only moves the borders between ranks."""
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
    """By index of what computes its weight's gradient after its input's, where in the backward pass that is;
    all else is at the index."""
    out: dict[int, float] = {n: b.point for n, b in beside_points(program).items()}
    for n, when in program.wgrads.items():
        if when == "last":
            out[n] = late_point(program, n)
    return out


def last_points(program: Program) -> dict[str, float]:
    """By value that is used, where in the backward pass its gradient is complete."""
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
