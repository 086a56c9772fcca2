"""The costs of the instructions of a program: their shares of work and their times, for simulator, LP and
reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..base.lazy import lazy
from ..lang.ir import Cut, Instruction, Program, cells, owned_type, support
from ..lang.rules import call_of
from .exchanges import cut_shares, exchange_of
from .micro_steps import Part, scaled
from .model import CostModel, OpTime
from .outline import Outline
from .table import PassSeconds, Table, table_of

KEPT_RATIOS = 16  # the newest, whose seconds are kept: programs with different owners come in sequence


def op_time(program: Program, i: Instruction, costs: CostModel, device_class: int) -> OpTime:
    call = call_of(i, program.types)
    grads = sum(1 for name in dict.fromkeys(i.inputs) if name in program.requires_grad)
    cut = costs.cut(call, [program.types[name].placement for name in i.inputs])
    return costs.op(call, grads, device_class, cut)


class Sheet(Outline):
    """The cost table of a program for any values of its ratios and buckets: made once, then read for many
    ratios. The participating ranks must stay the same."""

    def __init__(self, program: Program, costs: CostModel, table: Table | None = None) -> None:
        """``table`` is that of another sheet with the same computations, whatever its ranks and shard
        owners."""
        super().__init__(program)
        self.costs = costs
        self.world_size = program.world_size
        self.table = table = table_of(self, costs) if table is None else table
        self.kinds, self.borders, self.ratio_names = table.kinds, table.borders, table.ratio_names
        self.works, self.work_of = table.works, table.work_of
        self.factor_work_of, self.again_work_of = table.factor_work_of, table.again_work_of
        self.wgrad_work_of = table.wgrad_work_of
        self.uses, self.flows = table.uses, table.flows
        self.pattern = self.pattern_of(program)

    def pattern_of(self, program: Program) -> tuple:
        """A key for the collectives and their ranks: the participating ranks, the data moved where the ratio
        changes, and the cells that copies of a parameter share."""
        shared = [cells(program, i[0]) for i in program.copies.values()]
        return (supports(program), *(exchange_of(program, i) for i in self.borders), *shared)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part in everything; empty if types name several ratios, or only some of them
        name one."""
        if len(self.ratio_names) != 1:
            return ()
        (name,) = self.ratio_names
        return support(self.program.ratio_of[name]) if name else tuple(range(self.world_size))

    @lazy
    def cuts(self) -> tuple[Cut, ...]:
        """All ways in which works and the optimizer's tensors are cut."""
        return tuple(dict.fromkeys((*(work.cut for work in self.works), *self.optimized)))

    @lazy
    def optimized(self) -> dict[Cut, int]:
        """Bytes of trainable parameters, by their cut."""
        out: dict[Cut, int] = {}
        for i in self.program.params:
            if i.result in self.program.requires_grad:
                cut = (owned_type(self.program, i) or i.type).cut
                out[cut] = out.get(cut, 0) + i.type.value.size_bytes
        return out

    @lazy
    def gradients(self) -> dict[Cut, int]:
        """Bytes of the gradients that micro-batches add up, by their cut."""
        out: dict[Cut, int] = {}
        for i in self.program.params:
            if i.result in self.program.requires_grad:
                out[i.type.cut] = out.get(i.type.cut, 0) + i.type.value.size_bytes
        return out

    def shares(self, cut: Cut, program: Program, part: Part = None) -> tuple[float, ...]:
        """Shares under a ``cut``; in a micro-batch ranks take this ``part`` of their samples."""
        return scaled(cut_shares(cut, program.ratio(cut.ratio), self.world_size), cut, part)

    def seconds(
        self, program: Program, *, whole: bool = True, ranks: Sequence[int] | None = None, part: Part = None
    ) -> PassSeconds:
        """Forward and backward seconds of every work on every rank, or on ``ranks``, under the ratios of
        ``program``. If not ``whole``, tensors are cut as if within elements. ``part`` is that of a
        micro-batch."""
        class_of = self.costs.class_of
        ranks = tuple(range(self.world_size) if ranks is None else ranks)
        ratios = tuple([program.ratio(name) for name in self.ratio_names])
        key = (ratios, whole, ranks, part and tuple(part))
        if key in self.table.seconds:
            return self.table.seconds[key]
        forward, backward = [], []
        for work in self.works:
            ratio = program.ratio(work.cut.ratio)
            shares = self.shares(work.cut, program, part) if whole or not work.cut.size else ratio
            assert shares is not None  # tensors with a cut have a ratio
            seconds_by_share: dict[tuple[int, float], tuple[float, float]] = {}
            for c, share in (pairs := [(class_of[rank], shares[rank]) for rank in ranks]):
                if (c, share) not in seconds_by_share:
                    seconds_by_share[c, share] = (
                        work.times[c].forward.at(share),
                        work.times[c].backward.at(share),
                    )
            forward.append(tuple([seconds_by_share[pair][0] for pair in pairs]))
            backward.append(tuple([seconds_by_share[pair][1] for pair in pairs]))
        known_seconds = self.table.seconds
        if len(known_seconds) == KEPT_RATIOS:
            del known_seconds[next(iter(known_seconds))]
        known_seconds[key] = forward, backward
        return forward, backward

    def optimizer_s(self, program: Program, ranks: Sequence[int] | None = None) -> list[float]:
        """Seconds of the optimizer's step on every rank, or on ``ranks``."""
        ranks = range(self.world_size) if ranks is None else ranks
        held = self.held_bytes(self.optimized, program, ranks)
        return [self.costs.optimizer_s(rank, size) for rank, size in zip(ranks, held)]

    def accumulation_s(self, program: Program, ranks: Sequence[int]) -> list[float]:
        """Seconds in which ``ranks`` add the gradients of a micro-batch to those of earlier ones."""
        held = self.held_bytes(self.gradients, program, ranks)
        return [self.costs.accumulation_s(rank, size) for rank, size in zip(ranks, held)]

    def held_bytes(self, sizes: Mapping[Cut, float], program: Program, ranks: Sequence[int]) -> list[float]:
        """Bytes on ``ranks`` of values with these unsharded ``sizes``."""
        out = [0.0] * len(ranks)
        for cut, size in sizes.items():
            shares = self.shares(cut, program)
            for n, rank in enumerate(ranks):
                out[n] += size * shares[rank]
        return out


def supports(program: Program) -> tuple[tuple[int, ...], ...]:
    return tuple(support(ratio) for _, ratio in program.ratios)
