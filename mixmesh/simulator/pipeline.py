"""A pipeline: the passes of its stages in 1F1B order, on the clocks of a run.

As in the runtime (``runtime.pipeline``): a stage sends when a pass ends and asks for what it receives one
micro-step ahead, so a transfer begins when its last rank has done either. A transfer under way holds links,
and only its receiver waits for it; the senders do when all their passes are through. With ``BLOCKING_SENDS``
a transfer begins when its sender's pass ends, and holds the sender until it is over. Passes are gone through
in an order that does not depend on how long they take, so that nothing that gets faster can make a step
longer.
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
    """From a stage to another, or the gradient back; ``exchange`` is of the whole batch."""

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
    """The works of a pass in order, and the computations that they are of."""

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
    """All that does not depend on ratios and the number of micro-steps."""

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
            ends = self.stages.index(held), self.stages.index(wanted)
            there, back = (sheet.exchanges[i.result, backward] for backward in (False, True))
            yield _Move(i.result, *ends, False, there)
            if i.result in program.requires_grad:
                yield _Move(gradient_name(i.result), *reversed(ends), True, back)

    def run(self, run: Run, micro_steps: int, seconds: tuple[Seconds, Seconds], sums: Sums) -> None:
        """All passes of a step, the sum of the loss and those of gradients: each starts in the last backward
        pass of every stage, or at the end if it is for owners or copies."""
        run.begin(sums)
        _Clocks(self, run, micro_steps, seconds).passes()
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

    def passes(self) -> None:
        run, pipeline = self.run, self.pipeline
        for stage, backward, k in together(len(pipeline.stages), self.micro_steps):
            kinds = self.kinds[stage]
            run.active = [kind in kinds for kind in range(len(run.clock))]
            if run.gathers and not backward and k == 0:
                run.fetch(len(run.gathers) - 1)
            mine = [m for m in pipeline.moves if m.backward == backward]
            for m in mine:
                if m.receiver == stage:
                    self._receive(m, k)
            if backward:
                run.accumulate(kinds)
            if backward and k == self.micro_steps - 1:
                self._last_backward(stage)
            else:
                self._work(self.pipeline.backward if backward else self.pipeline.forward, stage, backward)
            for m in mine:
                if m.sender == stage:
                    self._occupy(m, kinds)
                    self.offered[m, k] = self._clock(stage)
                    self._fly(m, k)
                    if self.is_blocking:
                        run.until(self.ends[m, k], kinds)
        for (m, _), end in self.ends.items():
            self.run.until(end, self.kinds[m.sender])

    def _work(self, made: _Works, stage: int, backward: bool) -> None:
        total, table = self.work[stage, backward]
        if self.run.keep_events:
            self.run.work_in_turn(made.timed, made.works, made.computes, table)
        else:
            self.run.work(total)

    def _last_backward(self, stage: int) -> None:
        """Every rank of the stage starts sums where its gradients are complete, those that are left when the
        pass is over."""
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

    def _receive(self, m: _Move, k: int) -> None:
        self.run.until(self.ends[m, k], self.kinds[m.receiver])
        self._occupy(m, self.kinds[m.receiver])
        self._ask(m, k + 1)

    def _ask(self, m: _Move, k: int) -> None:
        if k < self.micro_steps:
            self.asked[m, k] = self._clock(m.receiver)
            self._fly(m, k)

    def _fly(self, m: _Move, k: int) -> None:
        """Begins where both sides are there; a sender that is held has not to be asked, as what it sends is
        kept for the receiver."""
        if self.is_blocking:
            self.asked[m, k] = 0.0
        if (m, k) in self.offered and (m, k) in self.asked and (m, k) not in self.ends:
            issued = max(self.offered[m, k], self.asked[m, k])
            self.ends[m, k] = self.run.communicate(self.calls[m], m.name, issued)

    def _clock(self, stage: int) -> float:
        return max(self.run.clock[k] for k in self.kinds[stage])

    def _occupy(self, m: _Move, kinds: tuple[int, ...]) -> None:
        for _half in range(2):
            self.run.occupy(self.calls[m], kinds)


@lru_cache(maxsize=256)
def together(stages: int, micro_steps: int) -> tuple[tuple[int, bool, int], ...]:
    """The passes of all stages, (stage, backward, micro-step), each after those that it needs: as they would
    begin if a backward pass took two forward ones."""
    left = [list(reversed(passes_of(stage, stages, micro_steps))) for stage in range(stages)]
    free, ends, out = [0] * stages, {}, []
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
