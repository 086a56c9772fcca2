"""Packs small sums that are independent of each other into one collective.

Parallel branches with batch norm (Inception, NASNet, the shortcuts of ResNet) have a sum of a few kilobytes
each, whose cost is its latency. Packed into one tensor they cost one latency, in the backward pass too, where
the gradients of the pieces are summed packed as well:

    %a.r = all_reduce(%a)        %p = aten.cat([%a, %b], 1)           P(sum)
    %b.r = all_reduce(%b)   ->   %p.r = all_reduce(%p)                R
                                 %a.r, %b.r = aten.split_with_sizes(%p.r, [8, 6], 1)

The *level* of a sum is the largest number of small sums on a path to it. No path leads from one sum of a
level to another, and packing whole levels makes no cycle: everything before a sum of level n depends only on
sums of lower levels. As many collectives remain as the longest path has, and fewer are not possible. A level
may also be packed in several runs, so that one run travels while the others' branches are computed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...cost import CostModel
from ...lang.ir import Instruction, Partial, Program, Ref, Replicate, TensorType, ValueType
from ...lang.ir.packed import packed_sums
from ...lang.ir.samples import draws_numbers

Groups = list[list[int]]  # indices of sums, in order within each group


def levels_of_sums(program: Program, costs: CostModel) -> Groups:
    """The small sums that can be packed, by level and kind; only kinds with several sums."""
    small = {n: kind for n, i in enumerate(program.instructions) if (kind := _kind(program, costs, i))}
    if len(small) < 2:
        return []
    passed: dict[str, int] = {}  # by value, the small sums on the longest path to it
    drawn = 0  # number of draws so far: random numbers are drawn in order
    groups: dict[tuple, list[int]] = defaultdict(list)
    for n, i in enumerate(program.instructions):
        level = max([passed[name] for name in i.inputs], default=0)
        if draws_numbers(i.op):
            level = drawn = max(level, drawn)
        if n in small:
            groups[level, small[n]].append(n)
            level += 1
        passed.update((r, level) for r in i.results if r is not None)
    return [members for members in groups.values() if len(members) > 1]


def _kind(program: Program, costs: CostModel, i: Instruction) -> tuple | None:
    """The facts that must agree within a group, for a sum whose bytes cost no more than its latency; None for
    other instructions."""
    if i.op != "all_reduce":
        return None
    source, t = program.types[i.inputs[0]], i.type
    ranks = program.participants(t)
    if source.placement != Partial("sum") or not isinstance(t.placement, Replicate) or len(ranks) < 2:
        return None
    fit = costs.collective("all_reduce", ranks)
    if t.value.size_bytes * fit.s_per_byte > fit.latency_s:
        return None
    return t.value.dtype, source.ratio, t.ratio, i.attrs, i.result in program.requires_grad


def most_saved_s(program: Program, costs: CostModel, groups: Groups) -> float:
    """An upper limit on the seconds of a step that packing groups can save: the latencies of both passes."""
    sums = [(program.instructions[members[0]], len(members) - 1) for members in groups]
    fits = [(costs.collective("all_reduce", program.participants(i.type)), saved) for i, saved in sums]
    return sum(2 * saved * fit.latency_s for fit, saved in fits)


def in_runs(groups: Groups, runs: int) -> Groups:
    """Each group cut into at most ``runs`` runs of about equal length, each with at least two sums."""
    out = []
    for members in groups:
        count = max(min(runs, len(members) // 2), 1)
        ends = [round(len(members) * k / count) for k in range(count + 1)]
        out += [members[a:b] for a, b in zip(ends, ends[1:])]
    return out


def coalesced(program: Program, groups: Groups) -> Program:
    """``program`` in which each group of sums, those of a level or a part of them, is packed into one.
    Instructions keep their places, except that the inputs of a packed sum come before its first use."""
    instructions = list(program.instructions)
    names = set(program.types)
    replaced: set[int] = set()
    for members in groups:
        replaced.update(members)
        instructions += _packed(program, [program.instructions[n] for n in members], names)
    order = _in_demand(instructions, replaced, len(program.instructions))
    return replace(program, instructions=tuple(instructions[n] for n in order))


def separated(program: Program) -> Program:
    """``program`` with each packed sum split into its parts; unchanged if there are none."""
    apart: dict[str, list[Instruction]] = {}  # by the result of a packed sum, the instructions in place of it
    dropped: set[str] = set()
    for cat, i, split in packed_sums(program):
        parts = [(r, t, Ref(name)) for r, t, name in zip(split.results, split.types, cat.inputs) if r]
        apart[i.result] = [
            Instruction((r,), (t,), i.op, (ref,), (), i.attrs, i.location) for r, t, ref in parts
        ]
        dropped.update((cat.result, *(r for r, _, _ in parts)))
    if not apart:
        return program
    out: list[Instruction] = []
    for i in program.instructions:
        if i.results and i.results[0] in apart:
            out += apart[i.results[0]]
        elif dropped.isdisjoint(i.results):
            out.append(i)
    return replace(program, instructions=tuple(out))


def _packed(program: Program, sums: Sequence[Instruction], names: set[str]) -> Iterator[Instruction]:
    """The instructions that replace some sums by a packed one."""
    sources = [i.inputs[0] for i in sums]
    held, summed = program.types[sources[0]], sums[0].type
    shapes = [i.type.value.shape for i in sums]
    location = sums[0].location

    def fresh(name: str) -> str:
        while name in names:
            name += "_"
        names.add(name)
        return name

    def of(t: TensorType, shape: tuple[int, ...]) -> TensorType:
        return TensorType(ValueType(t.value.dtype, shape), t.placement, t.ratio)

    results = [i.result for i in sums]
    dim = common_dim(shapes)
    if dim is None:
        shapes, dim, whole = [(math.prod(shape),) for shape in shapes], 0, shapes
        views = [fresh(f"{name}.flat") for name in sources]
        for name, view, shape in zip(sources, views, shapes):
            yield Instruction((view,), (of(held, shape),), "aten.view", (Ref(name), shape), location=location)
        sources, results = views, [fresh(f"{name}.flat") for name in results]
    sizes = tuple(shape[dim] for shape in shapes)
    shape = (*shapes[0][:dim], sum(sizes), *shapes[0][dim + 1 :])
    packed, total = fresh(f"{sums[0].inputs[0]}.packed"), fresh(f"{sums[0].result}.packed")
    cat = tuple(map(Ref, sources)), dim
    yield Instruction((packed,), (of(held, shape),), "aten.cat", cat, location=location)
    one = (Ref(packed),)
    yield Instruction((total,), (of(summed, shape),), "all_reduce", one, (), sums[0].attrs, location)
    types = tuple(of(summed, shape) for shape in shapes)
    split = Ref(total), sizes, dim
    yield Instruction(tuple(results), types, "aten.split_with_sizes", split, location=location)
    if results[0] != sums[0].result:
        for name, i, shape in zip(results, sums, whole):
            yield Instruction(i.results, i.types, "aten.view", (Ref(name), shape), location=location)


def common_dim(shapes: Sequence[tuple[int, ...]]) -> int | None:
    """The dim along which tensors of these shapes can be concatenated: the only one in which they differ, or
    the first if they are equal; None if there is no such dim."""
    first = shapes[0]
    if not first or any(len(shape) != len(first) for shape in shapes):
        return None
    differ = [d for d, sizes in enumerate(zip(*shapes)) if len({*sizes}) > 1]
    return None if len(differ) > 1 else (differ or [0])[0]


def _in_demand(instructions: Sequence[Instruction], replaced: set[int], count: int) -> list[int]:
    """The first ``count`` instructions in order, without the replaced ones, each after its inputs; added ones
    come where they are first needed. The order of random draws stays the same."""
    maker_of = {
        r: n for n, i in enumerate(instructions) if n not in replaced for r in i.results if r is not None
    }
    needs: dict[int, list[int]] = {}
    drawn: list[int] = []
    for n, i in enumerate(instructions):
        needs[n] = [maker_of[name] for name in i.inputs]
        if draws_numbers(i.op):
            needs[n] += drawn[-1:]
            drawn.append(n)
    order: list[int] = []
    placed = set(replaced)
    for first in range(count):
        waiting = [first]
        while waiting:
            n = waiting[-1]
            missing = [] if n in placed else [m for m in needs[n] if m not in placed]
            if missing:
                waiting += reversed(missing)
                continue
            waiting.pop()
            if n not in placed:
                placed.add(n)
                order.append(n)
    return order
