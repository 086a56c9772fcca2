"""Sums the gradients of replicated parameters over their ranks while the backward pass still runs.

A parameter held as R has a gradient held as P(sum). Parameters are put into buckets. When the last gradient
of a bucket is ready, the bucket becomes one flat buffer whose all_reduce starts at once, and the gradients
become views of it. All ranks start buckets in one fixed order, and all sums are awaited before ``backward()``
returns, so that a caller may clip or read gradients as usual.

Two rules keep sums right when gradients accumulate over several backward passes. A gradient that was already
summed is R; before more is added to it, all ranks but the first drop theirs, which makes it P again. And a
rank whose part of the step gave a parameter no gradient contributes zeros.

Gradients from a redistribution (the reduce_scatter of a gathered parameter) come as handles, and are added to
their parameters as they arrive. The gradients of owned parameters (``owned``) are reduce_scattered to the
owners, bucket by bucket, and each whole gradient is freed once sent.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain

import torch
from torch import Tensor

from ..cost.sums import IN_FLIGHT_BYTES, gradient_sums
from ..lang.ir import Cell, Parts, Program
from .collectives import Handle, all_reduce, reduce_scatter
from .comm import Channel, Comm
from .levels import ByLevels
from .owned import Group, Owned, counts, cut, pack
from .sfb import summed_by_sfb


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters, by name, whose gradients are summed together over ``ranks``. The sums go to the owners if
    the parameters are ``owned`` (the name of a ratio). For parameters with copies only the gradients of
    ``cells`` are summed."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    owned: str | None = None
    stage: int = 0
    cells: tuple[Cell | None, ...] = ()  # for each name, the summed cell of a parameter with copies
    late: bool = False  # summed once all gradients that redistributions bring have arrived
    parts: Parts = ()  # the ranks by machine, if the sum is hierarchical


def assign_buckets(program: Program) -> tuple[Bucket, ...]:
    """The buckets of a program, in the order in which the backward pass completes them (``cost.sums``).

    Raises MixmeshError for a parameter that is used both with ``sfb`` and without it.
    """
    for param in program.factored:
        summed_by_sfb(program, param)
    return tuple(
        Bucket(tuple(p.args[0] for p in s.params), s.ranks, s.owned, s.stage, s.cells, s.late, s.parts)
        for s in gradient_sums(program)
    )


class Sums(Enum):
    """The gradients that a backward pass sums over ranks."""

    ALL = "all buckets"
    EVERY_PASS = "those of ZeRO stage 2, which never keeps a whole gradient"
    NONE = "none: gradients stay addends"


@dataclass(frozen=True, slots=True)
class Taken:
    """Gradients that were taken from their parameters, and the parameters (``summed``) whose gradients are
    already sums over ranks. Those of the buckets ``early`` also become sums, when ``handles`` have finished.
    """

    gradients: list[tuple[Tensor, Tensor]]
    summed: set[int]
    early: tuple[int, ...] = ()
    handles: Sequence[Handle] = ()
    is_unsummed: bool = False


@dataclass
class _Progress:
    """The progress of one backward pass: the gradients missing per bucket, and the position in the fixed
    order. A bucket that this pass does not sum has None."""

    missing: list[set[int] | None] = field(default_factory=list)
    next: int = 0
    handles: list[Handle] = field(default_factory=list)
    arriving: deque[tuple[Callable[[Tensor], None], Handle, int]] = field(default_factory=deque)
    postponed: list[tuple[Tensor, Callable[[], Tensor]]] = field(default_factory=list)
    # by the redistribution whose gradient they overlap
    waiting: dict[str, list[tuple[Tensor, Callable[[], Tensor]]]] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)  # buckets whose sums were delivered


class GradientReducer:
    """Sums the gradients of this rank's parameters by hooks on them.

    ``params`` are the parameters in use, by name; the gradients of those in ``owned`` go to their owners.
    ``on_sum`` is called in every pass that sums all gradients. ``origins`` gives, for parameters with copies,
    where this rank's piece begins in the whole.
    """

    def __init__(
        self,
        comm: Comm,
        buckets: Sequence[Bucket],
        params: Mapping[str, Tensor],
        owned: Mapping[str, Owned] | None = None,
        on_sum: Callable[[], object] = lambda: None,
        origins: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.sums = Sums.ALL
        self.is_unsummed = False  # whether some rank has gradients that wait to be summed: alike on all ranks
        self._has_sums = bool(buckets)
        self._rank, self._on_sum = comm.rank, on_sum
        self._all = list(
            {id(p): p for p in (*params.values(), *(o.piece for o in (owned or {}).values()))}.values()
        )
        self._groups: dict[int, Group] = {}  # by index of the bucket
        self._cells: dict[int, list[Cell]] = {}  # by index of the bucket, one per member
        self._origins = {
            id(params[name]): origin for name, origin in (origins or {}).items() if name in params
        }
        self._task = -1
        self._progress = _Progress()
        self._ready: dict[int, list[Callable[[Tensor], None]]] = {}  # by parameter, its hooks
        self._first: dict[int, bool] = {}  # whether this rank is the one that keeps an accumulated sum
        self._summed: set[int] = set()  # parameters whose .grad is a sum over ranks
        self._uses: dict[int, int] = {}  # gradients still expected, by parameter (``wgrad``)
        self._buckets: list[list[Tensor]] = []
        self._channels: list[Channel] = []
        self._levels: list[ByLevels | None] = []
        self._own: list[Bucket] = []
        by_whole = {id(o.whole): o for o in (owned or {}).values()}
        for n, bucket in enumerate(buckets):
            if comm.rank in bucket.ranks:
                self._add(bucket, n, comm, params, by_whole)

    def _add(
        self, bucket: Bucket, n: int, comm: Comm, params: Mapping[str, Tensor], by_whole: Mapping[int, Owned]
    ) -> None:
        """Puts hooks on the members of bucket ``n``; ``by_whole`` are the owned parameters by id."""
        by_param = dict(zip((id(params[name]) for name in bucket.names), bucket.cells))
        # tied parameters count once
        members = list({id(params[name]): params[name] for name in bucket.names}.values())
        members = [p for p in members if p.requires_grad and (id(p) not in self._first or by_param)]
        if not members:
            return
        index = len(self._buckets)
        if by_param:
            cells = [by_param[id(p)] for p in members]
            self._cells[index] = [cell for cell in cells if cell is not None]  # either all have cells or none
        if bucket.owned is not None:
            self._groups[index] = [by_whole[id(p)] for p in members]
        kind = "all_reduce" if bucket.owned is None else "reduce_scatter"
        text = f"{kind} of gradients, bucket {n} ({bucket.names[0]} ...)"
        self._channels.append(comm.channel(bucket.ranks, text, purpose="gradient"))
        self._levels.append(ByLevels(comm, bucket.parts) if bucket.parts else None)
        for p in members:
            cell = by_param.get(id(p))
            self._first[id(p)] = comm.rank == (bucket.ranks[0] if cell is None else cell.keeper)
            hook = self._hook(index, p)
            self._ready.setdefault(id(p), []).append(hook)
            p.register_post_accumulate_grad_hook(hook)
        self._buckets.append(members)
        self._own.append(bucket)

    @contextmanager
    def through(self, channel_of: Callable[[Channel, Bucket, int], Channel]):
        """A context in which every bucket's sum goes through the channel that ``channel_of`` returns when
        given the bucket's own channel, the bucket and the bytes."""
        before = self._channels
        sizes = [sum(p.numel() * p.element_size() for p in members) for members in self._buckets]
        for n, these in self._cells.items():
            sizes[n] = sum(c.num_elements * p.element_size() for c, p in zip(these, self._buckets[n]))
        self._channels = [channel_of(*of) for of in zip(before, self._own, sizes)]
        try:
            yield
        finally:
            self._channels = before

    @property
    def summed_params(self) -> set[int]:
        """Ids of the parameters for which a pass without sums over ranks has only an addend."""
        pieces = (id(o.piece) for group in self._groups.values() for o in group)
        return {*map(id, self._members()), *pieces}

    @contextmanager
    def summing(self, sums: Sums):
        """A context in which backward passes sum at most these gradients; the next pass outside sums the
        rest."""
        before = self.sums
        self.sums = before if before is Sums.NONE else sums
        try:
            yield
        finally:
            self.sums = before

    def take(self) -> Taken:
        """Takes the gradients of this rank; the parameters have none afterwards."""
        progress, self._progress = self._progress, _Progress()
        removed = Taken(
            [(p, p.grad) for p in self._all if p.grad is not None],
            self._summed,
            tuple(n for n, missing in enumerate(progress.missing) if missing is not None),
            progress.handles,
            self.is_unsummed,
        )
        self._summed, self.is_unsummed = set(), False
        for p, _ in removed.gradients:
            p.grad = None
        return removed

    def drop(self) -> None:
        """Drops gradients that ``no_sync`` has left unsummed."""
        for p in self._all:
            p.grad = None
        self._summed.clear()
        self.is_unsummed = False

    def put_back(self, taken: Taken) -> None:
        """Undoes ``take``, provided that nothing has accumulated since then."""
        for p, gradient in taken.gradients:
            p.grad = gradient
        self._summed, self.is_unsummed = taken.summed, taken.is_unsummed

    @contextmanager
    def early(self, held: Taken):
        """A context for a backward pass that starts its sums before ``backward`` is called, which is right
        because scaling a sum equals summing what was scaled. ``take`` hands over the sums it has started. A
        bucket waits for ``backward`` if it has owners or copies, or if its gradients are to be summed with
        some that are ``held``."""
        waiting = {id(p) for p, _ in held.gradients}
        self._progress = _Progress(
            [
                {id(p) for p in members} if plain and waiting.isdisjoint(map(id, members)) else None
                for members, b in zip(self._buckets, self._own)
                for plain in [self._is_summed(b) and not (b.owned or b.cells or b.late)]
            ]
        )
        yield
        self._start_ready(all_of_them=True)

    def deliver(self, taken: Taken, scale: Callable[[Tensor], Tensor]) -> None:
        """Adds the gradients that were taken before this backward pass began. A sum remains a sum if its
        parameter has no gradient yet; otherwise it becomes the first rank's addend."""
        progress = self._progress
        for handle in taken.handles:
            handle.wait()
        for n in progress.whole:  # from another loss in this pass
            for p in self._buckets[n]:
                self._summed.discard(id(p))
                if p.grad is not None and not self._first[id(p)]:
                    p.grad.zero_()
            progress.missing[n] = set() if self._is_summed(self._own[n]) else None
        progress.whole.clear()
        dropped: set[int] = set()
        for n in taken.early:
            members = self._buckets[n]
            if all(p.grad is None for p in members):
                progress.whole.add(n)
                progress.missing[n] = None
                self._summed.update(map(id, members))
            else:
                dropped.update(id(p) for p in members if not self._first[id(p)])
        for p, gradient in taken.gradients:
            if id(p) not in dropped:
                add(p, scale(gradient))

    def begin(self) -> None:
        """Called inside a backward pass, before any of its gradients is ready."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return  # two losses in one backward pass
        self._task = task
        for p in self._members():
            if id(p) in self._summed and p.grad is not None and not self._first[id(p)]:
                p.grad.zero_()
        self._summed.clear()
        pairs = zip(self._buckets, self._own)
        self._progress = _Progress([{id(p) for p in m} if self._is_summed(b) else None for m, b in pairs])
        self.is_unsummed = self._has_sums and self.sums is not Sums.ALL
        if self.sums is Sums.ALL:
            self._on_sum()
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _is_summed(self, bucket: Bucket) -> bool:
        return self.sums is Sums.ALL or (self.sums is Sums.EVERY_PASS and bucket.stage == 2)

    def sink(self, p: Tensor | None, handle: Handle, size_bytes: int) -> None:
        """Takes a gradient that is under way in buffers of ``size_bytes``, and adds those that have arrived
        meanwhile. Waits if the backward pass is faster than the network."""
        self._take(lambda gradient: add(p, gradient), handle, size_bytes)

    def expects(self, p: Tensor, uses: int) -> None:
        """Announces ``uses`` more uses of a parameter (or fewer) that bring gradients without autograd."""
        self._uses[id(p)] = self._uses.get(id(p), 0) + uses

    def arrived(self, p: Tensor, gradient: Tensor) -> None:
        """Takes a gradient that was made outside of autograd. It completes its parameter unless another use
        of that parameter, perhaps in another loss of this same pass, is still to bring one."""
        add(p, gradient)
        for ready in () if self._uses.get(id(p)) else self._ready.get(id(p), ()):
            ready(p)

    def postponed(self, p: Tensor, make: Callable[[], Tensor]) -> None:
        """Postpones making a gradient until the rest of the backward pass is over. Makes it at once in a pass
        whose end is not observed, such as a pipeline stage's."""
        if self._task == torch._C._current_graph_task_id():
            self._progress.postponed.append((p, make))
        else:
            self.arrived(p, make())

    def waiting(self, collective: str, p: Tensor, make: Callable[[], Tensor]) -> None:
        """Takes a gradient to be made when the gradient of that redistribution has been ``sent``."""
        self._progress.waiting.setdefault(collective, []).append((p, make))

    def sent(self, collective: str) -> None:
        """Makes the gradients that were waiting for this collective to start."""
        for p, make in self._progress.waiting.pop(collective, ()):
            self.arrived(p, make())

    def _take(self, deliver: Callable[[Tensor], None], handle: Handle, size_bytes: int) -> None:
        arriving = self._progress.arriving
        under_way = sum(size for _, _, size in arriving)
        arriving.append((deliver, handle, size_bytes))
        while arriving and (under_way > IN_FLIGHT_BYTES or arriving[0][1].is_ready()):
            under_way -= arriving[0][2]
            self._land()

    def _land(self) -> None:
        deliver, handle, _ = self._progress.arriving.popleft()
        deliver(handle.wait())

    def _members(self) -> Iterable[Tensor]:
        for members in self._buckets:
            yield from members

    def _hook(self, index: int, p: Tensor):
        # autograd keeps hooks where Python's garbage collector cannot see them: a reducer referenced from one
        # would never be freed, nor would its parameters and process groups
        key, reducer = id(p), weakref.ref(self)

        def ready(_: Tensor) -> None:
            me = reducer()
            if me is None or not me._progress.missing:
                return
            if missing := me._progress.missing[index]:
                missing.discard(key)
                me._start_ready()

        return ready

    def _start_ready(self, *, all_of_them: bool = False, late: bool = False) -> None:
        """Starts buckets in order, up to the first that still lacks a gradient. The late ones, which come
        last, start only if ``late``."""
        progress = self._progress
        while progress.next < len(progress.missing):
            if self._own[progress.next].late and not late:
                return
            missing = progress.missing[progress.next]
            if missing and not all_of_them:
                return
            if missing is not None:
                self._start(progress.next)
            progress.next += 1

    def _start(self, index: int) -> None:
        members = self._buckets[index]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in members]
        if index in self._groups:
            self._scatter(index, grads)
            return
        if index in self._cells:
            self._sum_cells(index, grads)
            return
        if len(grads) == 1 and grads[0].is_contiguous():
            flat = grads[0].view(-1)
        else:
            flat = torch.cat([g.reshape(-1) for g in grads])
        for p, piece in zip(members, flat.split([p.numel() for p in members])):
            p.grad = piece.view(p.shape)
            self._summed.add(id(p))
        handle = self._sum(index, flat)
        self._progress.handles.append(handle)

    def _sum(self, index: int, flat: Tensor) -> Handle:
        channel, levels = self._channels[index], self._levels[index]
        return all_reduce.start(channel, flat, levels=levels, in_place=True)

    def _scatter(self, index: int, grads: list[Tensor]) -> None:
        group, channel, rank = self._groups[index], self._channels[index], self._rank
        flat = pack(group, grads, channel.ranks)
        for o in group:
            o.whole.grad = None
        size_bytes = flat.nbytes
        parts = counts(group, channel.ranks)
        levels = self._levels[index]
        handle = reduce_scatter.start(channel, flat, parts, levels=levels, in_place=True)

        def deliver(mine: Tensor) -> None:
            for o, rows in zip(group, cut(group, mine, rank)):
                if rows.numel():
                    add(o.piece, rows)

        self._take(deliver, handle, size_bytes)

    def _sum_cells(self, index: int, grads: list[Tensor]) -> None:
        """Sums the cells that this rank's pieces share with those of other copies."""
        shared = []
        for p, grad, cell in zip(self._buckets[index], grads, self._cells[index]):
            p.grad = grad
            self._summed.add(id(p))
            shared += boxes_of(grad, cell, self._origins[id(p)])
        flat = torch.cat([box.reshape(-1) for box in shared])
        handle = self._sum(index, flat)

        def deliver(total: Tensor) -> None:
            for box, sums in zip(shared, total.split([box.numel() for box in shared])):
                box.copy_(sums.view(box.shape))

        self._take(deliver, handle, flat.nbytes)

    def _finish(self) -> None:
        progress = self._progress
        with torch.no_grad():
            # nothing is left waiting here, unless the pass covered only a part of the graph
            for p, make in (*chain(*progress.waiting.values()), *progress.postponed):
                self.arrived(p, make())
        progress.waiting.clear()
        progress.postponed.clear()
        self._start_ready(all_of_them=True)
        while progress.arriving:
            self._land()
        self._start_ready(all_of_them=True, late=True)
        while progress.arriving:
            self._land()
        for handle in progress.handles:
            handle.wait()
        self._progress = _Progress()
        self._task = -1


def boxes_of(held: Tensor, cell: Cell, origin: tuple[int, ...]) -> list[Tensor]:
    """Views of a cell within a piece that begins at ``origin`` of the whole tensor."""
    views = []
    for box in cell.boxes:
        view = held
        for dim, ((start, size), offset) in enumerate(zip(box, origin)):
            view = view.narrow(dim, start - offset, size)
        views.append(view)
    return views


def add(p: Tensor | None, gradient: Tensor | None) -> None:
    """Adds to the gradient of a parameter of this rank."""
    if p is not None and gradient is not None:
        p.grad = gradient if p.grad is None else p.grad.add_(gradient)


def wait_now(p: Tensor | None, handle: Handle, size_bytes: int = 0) -> None:
    """A sink for callers without a reducer: waits for the gradient and adds it."""
    add(p, handle.wait())
