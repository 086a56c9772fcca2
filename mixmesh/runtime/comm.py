"""This rank's view of the world: process groups, and failures that say where they occurred."""

from __future__ import annotations

import atexit
import datetime
import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ..base.launched import rank_and_world_size
from ..errors import CollectiveError, InputError, PlanError
from ..lang.ir import Instruction, Program, print_instruction
from .accelerator import (
    HOST_BACKEND,
    backend_of,
    device_backend,
    device_count,
    indexed,
    is_accelerator,
    local_device,
    take,
)
from .agreement import Facts, batch_disagreement
from .failures import collective_error, is_timeout, limit_error, start_error
from .first_rank import wait_for_all
from .interfaces import choose_interface
from .launch_store import connect_store
from .layout import meetings
from .lost import Waiting
from .messages import begin_messages, end_messages
from .processes import end_with_launcher, open_sockets, show_crashes
from .taking_part import taking_part
from .watch import BACKWARD, Watch
from .works import begin_threads, end_threads

GROUPS = "making process groups"
LAST_TENSORS_S = 0.02  # a thread that waits for the interpreter gets it as soon as this one sleeps
LEAST_S = 60.0  # ranks wait at least this long for each other at the start
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(eq=False)
class Waits:
    """``time_s`` is how long this rank's computing thread has waited for others since the process groups were
    made; the rest of a step is its own time. On a GPU the stream waits instead of the thread."""

    time_s: float = 0.0


@dataclass(frozen=True)
class Comm:
    """Rank, device and one process group per set of ranks that ever communicates.

    ``groups`` maps (purpose, ranks) to a group; None stands for a group that this rank is not in.
    """

    rank: int
    world_size: int
    device: torch.device
    timeout_s: float
    groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup | None] = field(repr=False)
    watch: Watch | None = field(default=None, repr=False)
    waits: Waits = field(default_factory=Waits, repr=False)

    @classmethod
    def create(
        cls,
        program: Program,
        beside: Iterable[tuple[str, tuple[int, ...]]] = (),
        *,
        device: torch.device | str | None = None,
        timeout_s: float = 300.0,
        watch: Watch | None = None,
    ) -> Comm:
        """Makes the groups of a program, and others by purpose. Collective: every rank calls it, in the same
        order as the others.

        Initialises torch.distributed from the environment unless that was done. Raises InputError without a
        launcher's variables, PlanError if the number of processes is not the program's.
        """
        sets = (*meetings(program), *beside)
        return cls.of_sets(program.world_size, sets, device=device, timeout_s=timeout_s, watch=watch)

    @classmethod
    def of_sets(
        cls,
        world_size: int,
        sets: Iterable[tuple[str, tuple[int, ...]]],
        *,
        device: torch.device | str | None = None,
        timeout_s: float = 300.0,
        watch: Watch | None = None,
    ) -> Comm:
        where = indexed(device) if device is not None else default_device()
        initialise(world_size, where, timeout_s)
        if dist.get_world_size() != world_size:
            raise PlanError(
                "the plan is for another number of ranks",
                expected=f"{world_size} processes",
                got=f"{dist.get_world_size()} processes",
                hint=f"torchrun --nproc-per-node {world_size} ... on one machine",
            )
        comm = cls(dist.get_rank(), world_size, where, timeout_s, {}, watch)
        comm.add((("data", comm.everyone), *sets))
        return comm

    def add(self, sets: Iterable[tuple[str, tuple[int, ...]]], backend: str | None = None) -> None:
        """Makes the missing groups among these sets. Collective, in the same order on all ranks."""
        timeout = datetime.timedelta(seconds=self.timeout_s)
        missing = [one for one in dict.fromkeys(sets) if one not in self.groups and len(one[1]) > 1]
        watch = self.watch if missing else None  # a process may have many sockets
        others = {} if watch is None else open_sockets()
        # other ranks wait where a group is made: the call tells them of a rank that could not make its own
        with self.call(GROUPS) if missing else nullcontext(), self._waiting():
            for purpose, ranks in missing:
                # a group of our own even for all ranks: the default one may have another timeout
                group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
                self.groups[purpose, ranks] = group if self.rank in ranks else None
            if backend_of() == HOST_BACKEND:
                begin_threads()
        if watch is not None:
            watch.sockets |= {n: it for n, it in open_sockets().items() if others.get(n) != it}

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """A context that makes groups, in which this rank may wait for others. Raises CollectiveError for
        what PyTorch cannot do there."""
        watch = self.watch if self.watch is not None and self.watch.is_of_this_thread else None
        outer = None if watch is None else watch.waiting
        if watch is not None:
            watch.waiting = outer or Waiting.now(GROUPS)
        try:
            yield
        except RuntimeError as error:
            raise Channel(self, None, self.everyone, GROUPS, "", is_call=False).failed(error) from error
        finally:
            if watch is not None:
                watch.waiting = outer

    def call(self, kind: str) -> AbstractContextManager:
        """A context for a call in which ranks meet, announced to the watch."""
        return nullcontext() if self.watch is None else self.watch.call(kind)

    def begin_backward(self) -> None:
        """Called inside a backward pass: counts as a call until the pass is over, unless the pass is a part
        of one."""
        if self.watch is not None and not self.watch.doing:
            self.watch.begin(BACKWARD)
            torch.autograd.Variable._execution_engine.queue_callback(self.watch.end)

    def compare(self, facts: Callable[[], Facts]) -> None:
        """Raises InputError on all ranks if the call under way was not given the same on all. Collective."""
        if self.watch is not None:
            told = self.watch.exchange(facts(), self.watch.doing, self.timeout_s)
            if (error := batch_disagreement(told)) is not None:
                raise error

    def close(self) -> None:
        """Ends the groups and their threads. Collective; no collective of this program may be under way."""
        for group in self.groups.values():
            if group is not None:
                dist.destroy_process_group(group)
        self.groups.clear()

    @property
    def everyone(self) -> tuple[int, ...]:
        return tuple(range(self.world_size))

    def channel(
        self,
        ranks: tuple[int, ...],
        instruction: Instruction | str,
        purpose: str = "data",
        part: str = "",
        *,
        is_call: bool = True,
    ) -> Channel:
        """The group of ``ranks`` on behalf of an instruction (or of a description), or of a ``part`` of it
        such as its gradient. ``is_call`` is False if some ranks start this within a call and others after
        it."""
        if isinstance(instruction, str):
            what, where = instruction, ""
        else:
            what = f"{part} of {instruction.op}" if part else instruction.op
            where = f"{print_instruction(instruction)}  {instruction.location}".rstrip()
        group = None if len(ranks) == 1 else self.groups[purpose, ranks]
        return Channel(self, group, ranks, what, where, is_call)


@dataclass(frozen=True)
class Channel:
    """A process group in use for one purpose. Its errors name this rank and that purpose. ``is_call`` is
    False if ranks start its collectives at different points between their calls."""

    comm: Comm
    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    what: str
    where: str
    is_call: bool

    @property
    def me(self) -> int:
        return self.ranks.index(self.comm.rank)

    @property
    def alone(self) -> bool:
        return len(self.ranks) == 1

    @property
    def backend(self) -> str:
        return "" if self.group is None else backend_of(self.group)

    @property
    def staged(self) -> bool:
        """Whether tensors travel through host memory: with gloo between processes that share a GPU."""
        return is_accelerator(self.comm.device) and self.backend == HOST_BACKEND

    def start(self, call: Callable, *args, **kwargs) -> dist.Work | None:
        """Starts a collective. For the watch, a collective of all ranks is always a call, whatever starts
        it."""
        if self.is_call and self.comm.watch is not None and len(self.ranks) == self.comm.world_size:
            self.comm.watch.meet(self.what)
        try:
            return call(*args, group=self.group, async_op=True, **kwargs)
        except RuntimeError as error:
            raise self.failed(error) from error

    def finish(self, work: dist.Work | None) -> None:
        if work is None:
            return
        watch, started = self.comm.watch, time.monotonic()
        if watch is not None:
            watch.waiting = Waiting.now(self.what, self.where)
        try:
            work.wait()
        except RuntimeError as error:
            raise self.failed(error) from error
        finally:
            self.comm.waits.time_s += time.monotonic() - started
            if watch is not None:
                watch.waiting = None

    def failed(self, error: RuntimeError) -> CollectiveError:
        watch = self.comm.watch
        if (limited := limit_error(self.comm.rank, self.what, error)) is not None:
            return limited
        if watch is not None:
            watch.waiting = watch.waiting or Waiting.now(self.what, self.where)
            if (cause := watch.explain(self.comm.timeout_s if is_timeout(error) else None)) is not None:
                return cause
        ranks = ", ".join(map(str, self.ranks))
        of = self.comm.rank, self.what, error
        return collective_error(*of, timeout_s=self.comm.timeout_s, ranks=ranks, where=self.where)


def default_device() -> torch.device:
    """The device of this process, by its local rank."""
    return local_device()


def backend_for(device: torch.device) -> str:
    """The device's own backend (NCCL) if every process of this machine has its own GPU, else gloo: NCCL
    refuses two ranks on one GPU."""
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE") or rank_and_world_size()[1])
    has_own = is_accelerator(device) and local_world <= device_count()
    return device_backend(device) if has_own else HOST_BACKEND


def initialise(world_size: int, device: torch.device, timeout_s: float) -> None:
    """Initialises torch.distributed from the launcher's variables, unless it is initialised already."""
    take(device)
    # ranks may take longer to find each other than a short time-out of collectives: they import PyTorch first
    timeout = datetime.timedelta(seconds=max(timeout_s, LEAST_S))
    if not dist.is_initialized():
        end_with_launcher()
        show_crashes()
        try:
            _initialise(world_size, device, timeout)
        except RuntimeError as error:
            if (known := start_error(int(os.environ.get("RANK", 0)), error)) is not None:
                raise known from error
            raise
    begin_messages(timeout)


def _initialise(world_size: int, device: torch.device, timeout: datetime.timedelta) -> None:
    backend = backend_for(device)
    missing = [name for name in RANK_VARIABLES if name not in os.environ]
    if missing and world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        atexit.register(release_last_tensors)
    elif missing:
        raise InputError(
            f"this process is not one of the plan's {world_size}: it was started without a launcher",
            expected=f"the variables {', '.join(RANK_VARIABLES)}",
            got=f"no {', '.join(missing)}",
            hint=f"torchrun --nproc-per-node {world_size} {os.path.basename(sys.argv[0])}",
        )
    else:
        store = connect_store(timeout.total_seconds())
        choose_interface()
        rank, size = rank_and_world_size()
        dist.init_process_group(backend, store=store, timeout=timeout, rank=rank, world_size=size)
        atexit.register(release_last_tensors)


@taking_part("the end of all ranks")
def leave() -> None:
    """Ends together with the others: a rank that leaves early looks lost to them."""
    wait_for_all("the end of all ranks")
    end_threads()
    dist.destroy_process_group()
    end_messages()
    # frees groups, with their threads, that are held in cycles by models that PyTorch has wrapped
    gc.collect()


def release_last_tensors() -> None:
    """Releases the tensors of the last collective at the end of a script that did not destroy its groups.

    A thread of gloo drops these tensors after the caller has continued, and needs the interpreter for it. If
    the interpreter were ending by then, the process would abort ("terminate called without an active
    exception") although all of its work was done.
    """
    if dist.is_initialized():
        time.sleep(LAST_TENSORS_S)
