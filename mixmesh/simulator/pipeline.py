"""Simulates a pipeline: the passes of its stages in 1F1B order.

As in the runtime (``runtime.pipeline``), a stage sends when a pass ends and posts its receives one
micro-batch ahead, so a transfer begins when all its ranks have posted their part. A transfer occupies links,
and only its receiver waits for it; senders wait after all of their passes. With ``BLOCKING_SENDS`` a transfer
begins at the end of its sender's pass and blocks the sender until it is over. The order in which passes are
simulated does not depend on their durations, so that nothing faster can make a step longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ..base.timeline import LOSS_SUM, gradient_name
from ..cost.exchanges import Exchange
from ..cost.unmeasured import BLOCKING_SENDS
from ..lang.ir import passes_of, transfers_of
from ..lang.ir.samples import Samples
from ..step import AT_THE_END, Compute, Ready
from .run import Run
from .sums import Sums
from .timed import Parts, TimedPass
from .values import Call, Seconds

ACTIVATIONS, GRADIENTS = "activations", "gradients of activations"


@dataclass(frozen=True)
class _Move:
    """A transfer between stages, or its gradient's; ``exchange`` is that of the whole batch."""

    name: str
    sender: int
    receiver: int
    backward: bool
    exchange: Exchange

    @property
    def purpose(self) -> str:
        return GRADIENTS if self.backward else ACTIVATIONS


@dataclass(frozen=True)
class _Works:
    """The pieces of work of a timed pass, by number and in order, and the computations among them."""

    timed: TimedPass
    works: tuple[int, ...]
    computes: tuple[Compute, ...]

    @classmethod
    def of(cls, timed: TimedPass) -> _Works:
        return cls(
            timed,
            tuple(work for segment in timed.segments for work in segment.works),
            tuple(compute for segment in timed.segments for compute in segment.computes),
        )


class Pipeline:
    """The parts of a pipeline that do not depend on ratios or the number of micro-batches."""

    def __init__(self, parts: Parts, samples: Samples) -> None:
        self.parts, self.stages = parts, samples.stages
        self.forward, self.backward = map(_Works.of, (parts.forward, parts.backward))
        self.moves = tuple(self._moves())
        for move in self.moves:
            parts.network.channel(move.purpose, move.exchange.ranks, move.exchange)

    def _moves(self) -> Iterator[_Move]:
        sheet, program = self.parts.sheet, self.parts.sheet.program
        for i in transfers_of(program):
            held, wanted = map(program.participants, (program.types[i.inputs[0]], i.type))
            sender, receiver = self.stages.index(held), self.stages.index(wanted)
            there, back = (sheet.exchanges[i.result, backward] for backward in (False, True))
            if there is not None:
                yield _Move(i.result, sender, receiver, False, there)
            if back is not None and i.result in program.requires_grad:
                yield _Move(gradient_name(i.result), receiver, sender, True, back)

    def run(self, run: Run, micro_steps: int, seconds: tuple[Seconds, Seconds], sums: Sums) -> None:
        """Simulates all passes of a step, and the all-reduces of the loss and of gradients. The latter start
        in the last backward pass of every stage, or at the end if they are for shard owners or copies."""
        run.begin(sums)
        _Clocks(self, run, micro_steps, seconds).run_passes()
        if self.parts.loss is not None:
            run.start(self.parts.loss, LOSS_SUM)
        late = [
            (n, call.exchange.ranks) for n, call in enumerate(sums.calls) if n not in sums.reductions.plain
        ]
        run.active = [True] * len(run.clock)
        run.sums = replace(sums, reductions=replace(sums.reductions, issues={AT_THE_END: late}))
        run.end_of_backward(seconds[1])


class _Clocks:
    """One step of a pipeline."""

    def __init__(
        self, pipeline: Pipeline, run: Run, micro_steps: int, seconds: tuple[Seconds, Seconds]
    ) -> None:
        self.pipeline, self.run, self.micro_steps = pipeline, run, micro_steps
        self.is_blocking = BLOCKING_SENDS in pipeline.parts.sheet.costs.unmeasured
        self.kinds = [run.alike.of(ranks) for ranks in pipeline.stages]
        self.work: dict[tuple[int, bool], tuple[list[float], Seconds]] = {}
        for stage, kinds in enumerate(self.kinds):
            mask = [float(k in kinds) for k in range(len(run.clock))]
            for backward in (False, True):
                table = np.array(seconds[backward]).reshape(-1, len(mask)) * mask
                works = (pipeline.backward if backward else pipeline.forward).works
                total = table[list(works)].sum(axis=0)
                self.work[stage, backward] = total.tolist(), table.tolist()
        whole = pipeline.moves
        self.calls = {m: self._call(m) for m in whole}
        self.offered: dict[tuple[_Move, int], float] = {}
        self.asked: dict[tuple[_Move, int], float] = {}
        self.ends: dict[tuple[_Move, int], float] = {}
        for m in whole:
            self._ask(m, 0)

    def _call(self, move: _Move) -> Call:
        part = replace(move.exchange, size_bytes=move.exchange.size_bytes // self.micro_steps)
        return self.pipeline.parts.network.call(part, move.purpose)

    def run_passes(self) -> None:
        for stage, backward, k in order_of_passes(len(self.pipeline.stages), self.micro_steps):
            self._run_pass(stage, backward, k)
        for (m, _), end in self.ends.items():
            self.run.until(end, self.kinds[m.sender])

    def _run_pass(self, stage: int, backward: bool, k: int) -> None:
        run, kinds = self.run, self.kinds[stage]
        run.active = [kind in kinds for kind in range(len(run.clock))]
        if run.gathers and not backward and k == 0:
            run.fetch(len(run.gathers) - 1)
        moves = [m for m in self.pipeline.moves if m.backward == backward]
        for m in moves:
            if m.receiver == stage:
                self._receive(m, k)
        if backward:
            run.accumulate(kinds)
        if backward and k == self.micro_steps - 1:
            self._last_backward(stage)
        else:
            self._work(self.pipeline.backward if backward else self.pipeline.forward, stage, backward)
        for m in moves:
            if m.sender == stage:
                self._send(m, k)

    def _work(self, works: _Works, stage: int, backward: bool) -> None:
        total, table = self.work[stage, backward]
        if self.run.keep_events:
            self.run.work_in_turn(works.timed, works.works, works.computes, table)
        else:
            self.run.work(total)

    def _last_backward(self, stage: int) -> None:
        """Runs a backward pass in which every rank of the stage starts each all-reduce as soon as its
        gradients are complete, and the remaining ones at the end."""
        run, timed, (_, table) = self.run, self.pipeline.backward.timed, self.work[stage, True]
        mine = {*self.pipeline.stages[stage]}
        busy = iter((timed.counts @ np.array(table).reshape(len(table), -1)).tolist())
        for works, computes, end in timed.segments:
            if works:
                seconds = next(busy)
                if run.keep_events:
                    run.work_in_turn(timed, works, computes, table)
                elif any(seconds):
                    run.work(seconds)
            if isinstance(end, Ready):
                self._issue(end.point, mine)
        self._issue(AT_THE_END, mine)

    def _issue(self, point: float, mine: set[int]) -> None:
        for n, ranks in self.run.sums.reductions.issues.get(point, ()):
            here = tuple(r for r in ranks if r in mine)
            if here and n in self.run.sums.reductions.plain:
                self.run.issue(n, here)

    def _send(self, m: _Move, k: int) -> None:
        kinds = self.kinds[m.sender]
        self._occupy(m, kinds)
        self.offered[m, k] = self._clock(m.sender)
        self._fly(m, k)
        if self.is_blocking:
            self.run.until(self.ends[m, k], kinds)

    def _receive(self, m: _Move, k: int) -> None:
        self.run.until(self.ends[m, k], self.kinds[m.receiver])
        self._occupy(m, self.kinds[m.receiver])
        self._ask(m, k + 1)

    def _ask(self, m: _Move, k: int) -> None:
        if k < self.micro_steps:
            self.asked[m, k] = self._clock(m.receiver)
            self._fly(m, k)

    def _fly(self, m: _Move, k: int) -> None:
        """Begins a transfer once both sides have posted it. A blocking send does not wait for the receiver,
        as its data is kept for it."""
        if self.is_blocking:
            self.asked[m, k] = 0.0
        if (m, k) in self.offered and (m, k) in self.asked and (m, k) not in self.ends:
            issued = max(self.offered[m, k], self.asked[m, k])
            self.ends[m, k] = self.run.communicate(self.calls[m], m.name, issued)

    def _clock(self, stage: int) -> float:
        return max(self.run.clock[k] for k in self.kinds[stage])

    def _occupy(self, m: _Move, kinds: tuple[int, ...]) -> None:
        for issues in (True, False):
            self.run.occupy(self.calls[m], kinds, issues=issues)


@lru_cache(maxsize=256)
def order_of_passes(stages: int, micro_steps: int) -> tuple[tuple[int, bool, int], ...]:
    """The passes of all stages as (stage, backward, micro-batch), each after those that it depends on: in the
    order in which they would begin if a backward pass took as long as two forward passes."""
    left = [list(reversed(passes_of(stage, stages, micro_steps))) for stage in range(stages)]
    free, out = [0] * stages, []
    ends: dict[tuple[int, bool, int], int] = {}
    while any(left):
        ready = []
        for stage, passes in enumerate(left):
            if not passes:
                continue
            backward, k = passes[-1]
            before = stage + 1 if backward else stage - 1
            if not 0 <= before < stages:
                ready.append((free[stage], stage))
            elif (before, backward, k) in ends:
                ready.append((max(free[stage], ends[before, backward, k]), stage))
        start, stage = min(ready)
        backward, k = left[stage].pop()
        free[stage] = ends[stage, backward, k] = start + (2 if backward else 1)
        out.append((stage, backward, k))
    return tuple(out)
