"""Gradients of replicated parameters: summed over their ranks while the backward pass still runs.

A parameter held as R has a gradient held as P(sum). Parameters are put into buckets; when the last
gradient of a bucket is there, the bucket becomes one flat buffer whose all_reduce starts at once, and
the gradients become views of it. Buckets are started in one fixed order on all ranks, and all are
awaited before ``backward()`` returns, so that a caller may clip or read gradients as usual.

Two rules keep sums right when gradients accumulate over several backward passes. A gradient that was
summed already is R; before more is added to it, all ranks but the first drop theirs, which makes it P
again. And a rank whose part of the step gave a parameter no gradient contributes zeros.

Gradients that a redistribution brings (the reduce_scatter of a gathered parameter) are handed over as
handles, and added to their parameters as they arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..ir import Program, Replicate
from .collectives import Handle, all_reduce
from .comm import Channel, Comm
from .sfb import summed_by_sfb

BUCKET_CAP_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters by name whose gradients travel together, between ``ranks``."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]


def assign_buckets(program: Program, cap_bytes: int = BUCKET_CAP_BYTES) -> tuple[Bucket, ...]:
    """The buckets of a program, in the order in which the backward pass completes them.

    A ``param`` with an attribute ``bucket`` goes where it says; the others are taken by first use, last
    first, up to ``cap_bytes`` each. A bucket holds one dtype and one set of ranks.
    """
    first_use: dict[str, int] = {}
    for n, i in enumerate(program.instructions):
        for name in i.inputs:
            first_use.setdefault(name, n)
    summed = [
        p
        for p in program.params
        if isinstance(p.type.placement, Replicate)
        and p.result in program.requires_grad
        and len(program.participants(p.type)) > 1
        and not summed_by_sfb(program, p.result)
    ]
    summed.sort(key=lambda p: -first_use[p.result])
    groups: dict[tuple, list] = {}
    filled: dict[tuple, tuple[int, int]] = {}  # per dtype and ranks: (open bucket, bytes in it)
    for p in summed:
        kind = (p.type.value.dtype, program.participants(p.type))
        size = p.type.value.size_bytes
        number = p.attr("bucket")
        if number is None:
            index, held = filled.get(kind, (0, 0))
            if held and held + size > cap_bytes:
                index, held = index + 1, 0
            filled[kind] = (index, held + size)
            number = -1 - index  # apart from the numbers that the program gives
        groups.setdefault((number, *kind), []).append(p)

    def ready(item):
        # numbered ones in the order of their numbers; the others by when their last gradient is ready
        (number, *_), members = item
        return (0, number) if number >= 0 else (1, -min(first_use[p.result] for p in members))

    ordered = sorted(groups.items(), key=ready)
    return tuple(Bucket(tuple(p.args[0] for p in members), key[2]) for key, members in ordered)


@dataclass
class _Progress:
    """Of one backward pass: what is missing per bucket, how far the fixed order has got."""

    missing: list[set[int]] = field(default_factory=list)  # empty in a pass that sums nothing
    next: int = 0
    handles: list[Handle] = field(default_factory=list)
    arriving: deque[tuple[Tensor | None, Handle]] = field(default_factory=deque)


class GradientReducer:
    """Hooks on the parameters of this rank that sum their gradients."""

    def __init__(self, comm: Comm, buckets: Sequence[Bucket], params: dict[str, Tensor]) -> None:
        self.enabled = True
        self._task = -1
        self._progress = _Progress()
        self._first: dict[int, bool] = {}  # is this the rank that keeps an accumulated sum?
        self._summed: set[int] = set()  # parameters whose .grad is a sum over ranks
        self._buckets: list[list[Tensor]] = []
        self._channels: list[Channel] = []
        self._own: list[Bucket] = []
        for n, bucket in enumerate(buckets):
            members = list({id(params[n]): params[n] for n in bucket.names}.values())  # tied: once
            members = [p for p in members if p.requires_grad and id(p) not in self._first]
            if comm.rank not in bucket.ranks or not members:
                continue
            text = f"all_reduce of gradients, bucket {n} ({bucket.names[0]} ...)"
            self._channels.append(comm.channel(bucket.ranks, text, purpose="gradient"))
            for p in members:
                self._first[id(p)] = comm.rank == bucket.ranks[0]
                p.register_post_accumulate_grad_hook(self._hook(len(self._buckets), p))
            self._buckets.append(members)
            self._own.append(bucket)

    @contextmanager
    def through(self, channel_of: Callable[[Channel, Bucket, int], Channel]):
        """Within it, every bucket's sum goes through ``channel_of`` its channel, the bucket and bytes."""
        before = self._channels
        sizes = [sum(p.numel() * p.element_size() for p in members) for members in self._buckets]
        self._channels = [channel_of(*of) for of in zip(before, self._own, sizes)]
        try:
            yield
        finally:
            self._channels = before

    @contextmanager
    def paused(self):
        """Gradients stay addends: the next backward pass outside sums what has accumulated."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def begin(self) -> None:
        """Called inside a backward pass, before any gradient of it is ready."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return  # two losses in one backward pass
        self._task = task
        for p in self._members():
            if id(p) in self._summed and p.grad is not None and not self._first[id(p)]:
                p.grad.zero_()
        self._summed.clear()
        missing = [{id(p) for p in members} for members in self._buckets]
        self._progress = _Progress(missing if self.enabled else [])
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def sink(self, p: Tensor | None, handle: Handle) -> None:
        """Takes a gradient that is on its way. Those that have arrived meanwhile are added."""
        arriving = self._progress.arriving
        arriving.append((p, handle))
        while arriving and arriving[0][1].is_ready():
            self._add(*arriving.popleft())

    @staticmethod
    def _add(p: Tensor | None, handle: Handle) -> None:
        gradient = handle.wait()
        if p is not None and gradient is not None:
            p.grad = gradient if p.grad is None else p.grad.add_(gradient)

    def _members(self) -> Iterable[Tensor]:
        for members in self._buckets:
            yield from members

    def _hook(self, index: int, p: Tensor):
        key = id(p)

        def ready(_: Tensor) -> None:
            progress = self._progress
            if not progress.missing:
                return
            progress.missing[index].discard(key)
            while progress.next < len(progress.missing) and not progress.missing[progress.next]:
                self._start(progress.next)
                progress.next += 1

        return ready

    def _start(self, index: int) -> None:
        members = self._buckets[index]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in members]
        if len(grads) == 1 and grads[0].is_contiguous():
            flat = grads[0].view(-1)
        else:
            flat = torch.cat([g.reshape(-1) for g in grads])
        for p, piece in zip(members, flat.split([p.numel() for p in members])):
            p.grad = piece.view(p.shape)
            self._summed.add(id(p))
        handle = all_reduce(self._channels[index], flat, in_place=True, async_op=True)
        self._progress.handles.append(handle)

    def _finish(self) -> None:
        progress = self._progress
        while progress.next < len(progress.missing):
            self._start(progress.next)
            progress.next += 1
        while progress.arriving:
            self._add(*progress.arriving.popleft())
        for handle in progress.handles:
            handle.wait()
        self._progress = _Progress()
        self._task = -1
