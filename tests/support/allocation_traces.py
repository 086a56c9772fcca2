"""Traces of what a training asks its allocator for: as it was on the CPU, and as a liveness walk has it."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence

from torch.profiler import ProfilerActivity, profile

from mixmesh.lang.ir import Program
from mixmesh.step.memory.moments import BEFORE

from .caching_allocator import Operation


def recorded(run: Callable[[], object]) -> list[Operation]:
    """The allocations of ``run`` in their order, each with the place in memory that tells it from others."""
    from torch._C._profiler import _EventType

    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        run()
    roots = measured.profiler.kineto_results.experimental_event_tree()
    events = [e for e in _events(roots) if e.tag == _EventType.Allocation]
    trace: list[Operation] = []
    names: dict[int, int] = {}  # of the tensor that a place in memory holds
    for number, event in enumerate(sorted(events, key=lambda e: e.start_time_ns)):
        size, place = event.extra_fields.alloc_size, event.extra_fields.ptr
        if size > 0:
            names[place] = number
            trace.append((True, number, size))
        elif size < 0 and place in names:
            trace.append((False, names.pop(place), -size))
    return trace


def _events(roots: Sequence) -> Iterator:
    for event in roots:
        yield event
        yield from _events(event.children)


def stored(program: Program) -> list[Operation]:
    """The parameters, buffers and inputs of a program on one device, which are there before any step."""
    leaves = [i for i in program.instructions if i.op in ("param", "buffer", "input")]
    return [(True, f"stored {n}", i.type.value.size_bytes) for n, i in enumerate(leaves)]


class Walked:
    """A trace of steps as a walk has them. ``moments`` say how many bytes of each kind are there at a time,
    and not in how many tensors: that is drawn, by ``seed``, alike in every step."""

    def __init__(self, seed: object) -> None:
        self.trace: list[Operation] = []
        self._seed, self._count = seed, 0
        self._draw = random.Random()
        self._live: dict[object, list[tuple[int, int]]] = {}  # tensors by their kind, with their bytes

    def store(self, program: Program, share: Callable[[object], float], kept: int) -> None:
        """Adds parameters, each with ``kept`` states of the optimizer, buffers and inputs, one by one."""
        for i in program.instructions:
            if i.op in ("param", "buffer", "input"):
                cut = i.type.cut
                self._live.setdefault(cut, [])
                for _ in range(1 + (kept if i.op == "param" else 0)):
                    self._take(cut, int(i.type.value.size_bytes * share(cut)))

    def step(self, moments: Sequence, share: Callable[[object], float]) -> None:
        """Adds a step; ``share`` gives the part of a kind's bytes that the device holds."""
        for number, moment in enumerate(m for m in moments if m.event != BEFORE):
            self._draw.seed(f"{self._seed} {number}")
            targets = {cut: int(size * share(cut)) for cut, size in moment.held.items()}
            for cut in sorted({*targets, *self._live}, key=str):
                self._hold(cut, targets.get(cut, 0))

    def _hold(self, cut: object, target: int) -> None:
        live = self._live.setdefault(cut, [])
        more = target - sum(size for _, size in live)
        if more > 0:
            parts = self._draw.choice((1, 1, 1, 2, 3))
            for part in range(parts):
                self._take(cut, more * (part + 1) // parts - more * part // parts)
        elif more < 0:
            self._give_back(cut, -more)

    def _take(self, cut: object, size: int) -> None:
        if size > 0:
            self._count += 1
            self._live[cut].append((self._count, size))
            self.trace.append((True, self._count, size))

    def _give_back(self, cut: object, size: int) -> None:
        """Frees tensors of so many bytes: one of just that size if there is one, else the newest ones, and a
        part of one for what is left."""
        live = self._live[cut]
        exact = [n for n, (_, own) in enumerate(live) if own == size]
        for n in [self._draw.choice(exact)] if exact else range(len(live) - 1, -1, -1):
            if live[n][1] <= size:
                size -= live[n][1]
                self._free(cut, n)
        if size:
            n = min((n for n, (_, own) in enumerate(live) if own > size), key=lambda n: live[n][1])
            rest = live[n][1] - size
            self._free(cut, n)
            self._take(cut, rest)

    def _free(self, cut: object, n: int) -> None:
        tensor, size = self._live[cut].pop(n)
        self.trace.append((False, tensor, size))
