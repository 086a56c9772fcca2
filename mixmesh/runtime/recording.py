"""Measures a step: the work of this rank's compute and communication streams, as a ``Timeline``.

A recording temporarily replaces a model's functions by the same ones with clocks around them; without one,
nothing is measured and nothing costs time. A collective lasts from its issue to its completion, which the
future of its work reports. In the backward pass there is no call around which to put a clock: an instruction
is charged with the time from when autograd reaches its nodes until it reaches those of another. Waiting is
charged to nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.timeline import (
    Event,
    Timeline,
    communication_s,
    durations,
    gradient_name,
    repeated_name,
    wgrad_name,
)
from ..cost.exchanges import DUAL_COLLECTIVE
from ..lang.ir import Instruction
from .accelerator import synchronize
from .comm import Channel, Comm
from .first_rank import everyones
from .messages import meet
from .streams import Clock

SYNCHRONISATIONS = 15  # for synchronising the clocks: one barrier each
PERIOD = "optimizer"  # a timeline lasts from one event of this name to the next


@dataclass
class _Span:
    stream: str
    name: str
    op: str
    start: Any
    end: Any = None
    size_bytes: int | None = None


class Recorder:
    """The spans of one rank, in the order in which they began."""

    def __init__(self, comm: Comm) -> None:
        self.clock = Clock(comm.device)
        self.rank = comm.rank
        self._spans: list[_Span] = []
        self._backward: _Span | None = None  # for the instruction whose backward is running
        self._without_future: dict[int, Callable[[], None]] = {}  # by the id of the work

    # computation

    @contextmanager
    def span(self, name: str, op: str = "") -> Iterator[None]:
        self.leave()
        span = _Span("compute", name, op, self.clock.now())
        self._spans.append(span)
        yield
        span.end = self.clock.now()

    def timed(self, i: Instruction, call: Callable[..., tuple]) -> Callable[..., tuple]:
        """Puts clocks around a local operator, in its forward and its backward."""
        name = next(r for r in i.results if r is not None)
        grad = gradient_name(name)

        def run(*args):
            with self.span(name, i.op):
                out = call(*args)
            passed = {id(a.grad_fn) for a in args if isinstance(a, Tensor)}
            nodes = {id(o.grad_fn): o.grad_fn for o in out if isinstance(o, Tensor) and o.grad_fn is not None}
            for key, node in nodes.items():
                if key not in passed:  # if the key was passed in, the call returned its argument
                    node.register_prehook(lambda _: self._enter(grad, i.op))
            return out

        return run

    def timed_again(self, i: Instruction, call: Callable[..., tuple]) -> Callable[..., tuple]:
        """Puts a clock around a local operator that runs again in the backward pass."""
        name = repeated_name(next(r for r in i.results if r is not None))

        def run(*args):
            with self.span(name, i.op):
                return call(*args)

        return run

    @contextmanager
    def apart(self, i: Instruction) -> Iterator[None]:
        """Measures a weight's gradient, wherever in the backward pass it is made."""
        paused = self.leave()
        with self.span(wgrad_name(i.result), i.op):
            yield
        if paused is not None:
            self._enter(paused.name, paused.op)

    def outside(self, x: Tensor | None) -> None:
        """Charges the backward of the operation that made ``x`` to no instruction."""
        if x is not None and x.grad_fn is not None:

            def leave(_) -> None:
                self.leave()

            x.grad_fn.register_prehook(leave)

    def reach(self, name: str, op: str = "") -> None:
        """Charges this rank's time to ``name`` from here until it reaches another name or leaves."""
        self._enter(name, op)

    def transfer(self, name: str, op: str, size_bytes: int) -> Callable[[], None]:
        """Records a collective outside of our channels, from now until the returned function is called."""
        span = _Span("communication", name, op, self.clock.now(), None, size_bytes)
        self._spans.append(span)

        def arrived() -> None:
            span.end = self.clock.now()

        return arrived

    def _enter(self, name: str, op: str) -> None:
        if self._backward is None or self._backward.name != name:
            self.leave()
            self._backward = _Span("compute", name, op, self.clock.now())
            self._spans.append(self._backward)

    def leave(self) -> _Span | None:
        """Ends the running backward, if there is one, and returns it."""
        left, self._backward = self._backward, None
        if left is not None:
            left.end = self.clock.now()
        return left

    # communication

    def issue(self, channel: RecordedChannel, call: Callable[[], dist.Work | None]) -> dist.Work | None:
        clock = time.perf_counter if channel.staged else self.clock.now
        if not channel.last or self._spans[-1] is not channel.last[0]:
            span = _Span("communication", channel.title(), channel.op, clock(), None, channel.size_bytes)
            channel.last[:] = [span]
            self._spans.append(span)
        # one more transfer of the same collective, if that was the last one that began
        last = channel.last[0]
        work = call()
        if work is None:
            return work

        def arrived(_=None) -> None:
            last.end = clock()

        try:
            work.get_future().then(arrived)
        # gloo's reduce_scatter has none: it is complete when it is awaited, at the latest
        except RuntimeError:
            self._without_future[id(work)] = arrived
        return work

    def finish(self, work: dist.Work, wait: Callable[[], None]) -> None:
        """Waits for a work."""
        self.wait(wait)
        arrived = self._without_future.pop(id(work), None)
        if arrived is not None:
            arrived()

    def wait(self, finish: Callable[[], None]) -> None:
        """Calls ``finish``, which waits, or runs a region again: its time is charged to no instruction's
        backward."""
        paused = self.leave()
        finish()
        if paused is not None:
            self._enter(paused.name, paused.op)

    def events(self, offset_s: float) -> list[Event]:
        """All events that have ended, with the clock set back by ``offset_s``."""
        self.leave()
        seconds = lambda moment: self.clock.seconds(moment) - offset_s  # noqa: E731
        return [
            Event(self.rank, s.stream, s.name, seconds(s.start), seconds(s.end), s.op, s.size_bytes)
            for s in self._spans
            if s.end is not None
        ]


@dataclass(frozen=True)
class RecordedComm(Comm):
    """A Comm whose collectives are recorded."""

    recorder: Recorder = field(repr=False, kw_only=True)

    @classmethod
    def of(cls, comm: Comm, recorder: Recorder) -> RecordedComm:
        plain = {f.name: getattr(comm, f.name) for f in fields(Comm)}
        return cls(**plain, recorder=recorder)

    def channel(self, ranks, instruction, purpose="data", part="", *, is_call=True) -> RecordedChannel:
        plain = super().channel(ranks, instruction, purpose, part, is_call=is_call)
        if isinstance(instruction, str):
            return recorded(plain, self.recorder, instruction, instruction.split()[0])
        result = next(r for r in instruction.results if r is not None)
        size = instruction.types[0].value.size_bytes
        op = instruction.op
        if part == "gradient":
            return recorded(plain, self.recorder, gradient_name(result), DUAL_COLLECTIVE.get(op, op), size)
        if part:
            return recorded(plain, self.recorder, f"{result} {part}", "all_gather")
        return recorded(plain, self.recorder, result, op, size, in_backward=repeated_name(result))


@dataclass(frozen=True)
class RecordedChannel(Channel):
    """A channel whose collectives are recorded by ``name``, or ``in_backward`` if they begin there."""

    recorder: Recorder
    name: str
    in_backward: str
    op: str
    size_bytes: int | None
    last: list[_Span] = field(default_factory=list)  # the channel's last activity, if any

    def title(self) -> str:
        return self.name if torch._C._current_graph_task_id() == -1 else self.in_backward

    def start(self, call: Callable, *args, **kwargs) -> dist.Work | None:
        return self.recorder.issue(self, lambda: Channel.start(self, call, *args, **kwargs))

    def finish(self, work: dist.Work | None) -> None:
        if work is not None:
            self.recorder.finish(work, lambda: Channel.finish(self, work))


def recorded(
    c: Channel,
    recorder: Recorder,
    name: str,
    op: str,
    size_bytes: int | None = None,
    *,
    in_backward: str = "",
) -> RecordedChannel:
    of = (recorder, name, in_backward or name, op, size_bytes)
    return RecordedChannel(c.comm, c.group, c.ranks, c.what, c.where, c.is_call, *of)


# --- from the spans of all ranks to steps -----------------------------------------------------------------


def clock_offset_s() -> float:
    """Seconds by which this rank's clock is ahead of rank 0's. Collective.

    All ranks leave a barrier at about the same moment, but notice it after varying delays, hence the median
    of several.
    """
    moments = []
    for _ in range(SYNCHRONISATIONS):
        meet()
        moments.append(time.perf_counter())
    return statistics.median(mine - first for mine, first in zip(moments, everyones(moments)[0]))


def gather_steps(recorder: Recorder, comm: Comm, peak_memory_bytes: tuple[int, ...]) -> tuple[Timeline, ...]:
    """One timeline per recorded step, on every rank. Collective."""
    synchronize(comm.device)
    events = recorder.events(clock_offset_s())
    cut = [_periods(own) for own in everyones(events)]
    return tuple(_timeline(per_rank, peak_memory_bytes) for per_rank in zip(*cut))


def typical(steps: tuple[Timeline, ...]) -> Timeline:
    """The step of median length."""
    return sorted(steps, key=lambda step: step.step_s)[len(steps) // 2]


_Period = tuple[float, float, list[Event]]  # (start, end, events that began in between)


def _periods(events: list[Event]) -> list[_Period]:
    """Cuts events where the optimizer begins. The last optimizer step belongs to no whole period."""
    starts = [e.start_s for e in events if e.name == PERIOD]
    return [
        (start, end, [e for e in events if start <= e.start_s < end])
        for start, end in zip(starts, starts[1:])
    ]


def _timeline(per_rank: tuple[_Period, ...], peak_memory_bytes: tuple[int, ...]) -> Timeline:
    zero = min(start for start, _, _ in per_rank)
    events = tuple(
        replace(e, start_s=e.start_s - zero, end_s=e.end_s - zero) for _, _, own in per_rank for e in own
    )
    compute = tuple(sum(e.end_s - e.start_s for e in own if e.stream == "compute") for _, _, own in per_rank)
    timeline = Timeline(
        max(end - start for start, end, _ in per_rank), peak_memory_bytes, compute, 0.0, events
    )
    return replace(timeline, communication_s=communication_s(durations(timeline)))
