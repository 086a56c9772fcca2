"""Costs of the instructions of a program: the shares of work and times that simulator, LP and report read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass

from ..base.lazy import lazy
from ..lang.ir import (
    Cut,
    Instruction,
    Program,
    Shard,
    cells,
    owned_type,
    region_of,
    support,
    wgrad_of,
)
from ..lang.rules import call_of
from .curve import ZERO
from .exchanges import cut_shares, exchange_of
from .micro_steps import Part, scaled
from .model import CostModel, OpTime
from .outline import Outline, is_factored


def op_time(program: Program, i: Instruction, costs: CostModel, device_class: int) -> OpTime:
    call = call_of(i, program.types)
    grads = sum(1 for name in dict.fromkeys(i.inputs) if name in program.requires_grad)
    cut = costs.cut(call, [program.types[name].placement for name in i.inputs])
    return costs.op(call, grads, device_class, cut)


@dataclass(frozen=True, slots=True)
class Work:
    """Computations that cost alike: an operator's times per device class, and how its work is cut."""

    times: tuple[OpTime, ...]
    cut: Cut


class Sheet(Outline):
    """The costs of a program, whatever the values of its ratios and its buckets: made once, then read for
    many ratios. The ranks that take part must stay the same.
    """

    borders: tuple[Instruction, ...]
    works: list[Work]
    work_of: dict[int, int]  # index of a computation -> index of its work
    factor_work_of: dict[int, int]  # a computation with sfb -> that of the weight's gradient
    again_work_of: dict[int, int]  # a computation in a region -> its second run
    wgrad_work_of: dict[int, int]  # a computation with wgrad -> that of the weight's gradient

    def __init__(self, program: Program, costs: CostModel, like: Sheet | None = None) -> None:
        """``like`` is of the same instructions on other ranks."""
        super().__init__(program)
        self.costs = costs
        self.world_size = program.world_size
        if like is not None:
            self.kinds, self.borders, self.ratio_names = like.kinds, like.borders, like.ratio_names
            self.works, self.work_of = like.works, like.work_of
            self.factor_work_of, self.again_work_of = like.factor_work_of, like.again_work_of
            self.wgrad_work_of = like.wgrad_work_of
            self.uses, self.flows, self.optimized = like.uses, like.flows, like.optimized
            self.pattern = self.pattern_of(program)
            return
        self.borders = tuple(i for i in program.instructions if _moves_borders(program, i))
        self.pattern = self.pattern_of(program)
        self.works = []
        self.work_of, self.factor_work_of, self.again_work_of, self.wgrad_work_of = {}, {}, {}, {}
        numbers: dict[tuple[int, Cut, str], int] = {}

        def number(times: int, cut: Cut, part: str, found: tuple[OpTime, ...]) -> int:
            known = numbers.setdefault((times, cut, part), len(self.works))
            if known == len(self.works):
                self.works.append(Work(found, cut))
            return known

        known: dict[tuple, int] = {}  # calls that cost alike
        times: list[tuple[OpTime, ...]] = []
        # by the identity of a kind, and what else an instruction says: its work, that of the factors, of a
        # second run
        works: dict[tuple[int, str, bool], tuple[int, int | None, int | None]] = {}
        for n, (i, kind) in enumerate(zip(program.instructions, self.kinds)):
            if kind is None:
                continue
            apart = "factors" if is_factored(i) else "wgrad" if wgrad_of(i) else ""
            key_of_work = (id(kind), apart, region_of(i) is not None)
            found = works.get(key_of_work)
            if found is None:
                call, grads = kind.call, kind.grads
                inputs_cut = costs.cut(call, [t.placement for t in kind.inputs])
                key = (i.plain, call.inputs, call.outputs, grads, inputs_cut)
                at = known.setdefault(key, len(times))
                if at == len(times):
                    times.append(
                        tuple(costs.op(call, grads, c, inputs_cut) for c in range(len(costs.classes)))
                    )
                cut = kind.work_type.cut
                if apart:
                    own, product = split_by_factors(program, i, times[at])
                    cut_too = cut if apart == "wgrad" else (0, 1, cut[2])  # factors are gathered whole
                    own_work: int = number(at, cut, "own", own)
                    product_work: int | None = number(at, cut_too, apart, product)
                else:
                    own_work, product_work = number(at, cut, "", times[at]), None
                again = None
                if region_of(i) is not None:
                    second = tuple(OpTime(ZERO, t.forward) for t in times[at])
                    again = number(at, cut, "again", second)
                found = works[key_of_work] = own_work, product_work, again
            self.work_of[n] = found[0]
            if found[1] is not None:
                (self.wgrad_work_of if apart == "wgrad" else self.factor_work_of)[n] = found[1]
            if found[2] is not None:
                self.again_work_of[n] = found[2]

    def with_owners(self, program: Program) -> Sheet:
        """The costs of the same program with other owners of its parameters."""
        made = copy(self)
        made.program, made.pattern = program, self.pattern_of(program)
        for known in ("optimized", "cuts"):  # which are of what owners step
            made.__dict__.pop(known, None)
        return made

    def pattern_of(self, program: Program) -> tuple:
        """The key of which collectives there are and between whom: the ranks that take part, and what
        changes of ratio move, and what copies of a parameter share."""
        shared = [cells(program, i[0]) for i in program.copies.values()]
        return (supports(program), *(exchange_of(program, i) for i in self.borders), *shared)

    @lazy
    def ratio_names(self) -> frozenset[str | None]:
        """That types name."""
        return frozenset(t.ratio for i in self.program.instructions for t in i.types)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that take part in everything; none where types name several ratios, or some of them none."""
        if len(self.ratio_names) != 1:
            return ()
        (name,) = self.ratio_names
        return support(self.program.ratio_of[name]) if name else tuple(range(self.world_size))

    @lazy
    def cuts(self) -> tuple[Cut, ...]:
        """How works, and what the optimizer steps over, are cut."""
        return tuple(dict.fromkeys((*(work.cut for work in self.works), *self.optimized)))

    @lazy
    def optimized(self) -> dict[Cut, int]:
        """Bytes of trainable parameters, by how they are cut."""
        out: dict[Cut, int] = {}
        for i in self.program.params:
            if i.result in self.program.requires_grad:
                cut = (owned_type(self.program, i) or i.type).cut
                out[cut] = out.get(cut, 0) + i.type.value.size_bytes
        return out

    @lazy
    def gradients(self) -> dict[Cut, int]:
        """Bytes of the gradients that micro-steps add up, by how they are cut."""
        out: dict[Cut, int] = {}
        for i in self.program.params:
            if i.result in self.program.requires_grad:
                out[i.type.cut] = out.get(i.type.cut, 0) + i.type.value.size_bytes
        return out

    def shares(self, cut: Cut, program: Program, part: Part = None) -> tuple[float, ...]:
        """Shares of what is cut so; in a micro-step, in which ranks take this ``part`` of their samples."""
        return scaled(cut_shares(cut, program.ratio(cut[2]), self.world_size), cut[2], part)

    def seconds(
        self,
        program: Program,
        *,
        whole: bool = True,
        ranks: Sequence[int] | None = None,
        part: Part = None,
    ) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
        """Seconds of every work on every rank, or on ``ranks``, under the ratios of ``program``, forward and
        backward; if not ``whole``, as if a tensor could be cut within an element. ``part`` is that of a
        micro-step."""
        class_of = self.costs.class_of
        ranks = range(self.world_size) if ranks is None else ranks
        known: dict[tuple, tuple[float, float]] = {}
        forward, backward = [], []
        for n, work in enumerate(self.works):
            pairs = []
            ratio = program.ratio(work.cut[2])
            shares = self.shares(work.cut, program, part) if whole or not work.cut[0] else ratio
            assert shares is not None  # a cut has a ratio
            for rank in ranks:
                share = shares[rank]
                key = (n, class_of[rank], share)
                if key not in known:
                    time = work.times[class_of[rank]]
                    known[key] = (time.forward.at(share), time.backward.at(share))
                pairs.append(known[key])
            forward.append(tuple(f for f, _ in pairs))
            backward.append(tuple(b for _, b in pairs))
        return forward, backward

    def optimizer_s(self, program: Program) -> tuple[float, ...]:
        """Seconds of the optimizer's step on every rank."""
        held = self.held_bytes(self.optimized, program)
        return tuple(self.costs.optimizer_s(rank, size) for rank, size in enumerate(held))

    def accumulation_s(self, program: Program) -> tuple[float, ...]:
        """Seconds in which every rank adds the gradients of a micro-step to those of earlier ones."""
        held = self.held_bytes(self.gradients, program)
        return tuple(self.costs.accumulation_s(rank, size) for rank, size in enumerate(held))

    def held_bytes(self, sizes: Mapping[Cut, float], program: Program) -> list[float]:
        """Bytes on every rank of values with these unsharded ``sizes``."""
        out = [0.0] * self.world_size
        for cut, size in sizes.items():
            for rank, share in enumerate(self.shares(cut, program)):
                out[rank] += size * share
        return out


def _moves_borders(program: Program, i: Instruction) -> bool:
    """Whether a redistribution cuts by another ratio what is cut already."""
    if not i.is_redistribution:
        return False
    ends = program.types[i.inputs[0]], i.type
    return all(isinstance(t.placement, Shard) for t in ends) and ends[0].ratio != ends[1].ratio


def split_by_factors(
    program: Program, i: Instruction, times: tuple[OpTime, ...]
) -> tuple[tuple[OpTime, ...], tuple[OpTime, ...]]:
    """Times of a product whose weight's gradient is apart: those of the rest, and those of that gradient. Of
    two products in the backward pass one is the weight's."""
    share = 0.5 if i.inputs[0] in program.requires_grad else 0.0
    own = tuple(OpTime(t.forward, t.backward.scaled(share) if share else ZERO) for t in times)
    return own, tuple(OpTime(ZERO, t.backward.scaled(1 - share)) for t in times)


def supports(program: Program) -> tuple[tuple[int, ...], ...]:
    return tuple(support(ratio) for _, ratio in program.ratios)
