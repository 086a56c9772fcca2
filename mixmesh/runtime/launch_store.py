"""The store of a launch, without anything that an earlier start has written.

torchrun keeps one store for all starts of its processes, and no machine can name the current start in a way
that all others know: each counts its own restarts (https://github.com/pytorch/pytorch/issues/135712). Values
written by ranks of an earlier start, such as the addresses of processes that are gone, would be read as if
they were new. So the ranks of a start agree on a name that no other start has, and use only keys that begin
with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from ..base.progress import tell
from ..base.units import ranks_text
from ..errors import CollectiveError
from .agreement import NOTICE_S, POLL_S

KEY = "mixmesh/start"
HINT = "with --nnodes MIN:MAX: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every machine, before torchrun"


def own_connection(store: dist.Store) -> dist.Store:
    """A second connection to the same store, because a thread that waits for an answer blocks the first."""
    return store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it


def is_of_launcher() -> bool:
    """Whether the store of this process's launch is torchrun's own, which outlives the process."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_store(timeout_s: float, *, serves: bool = False) -> dist.Store:
    """The store of the launch, including data of earlier starts: a connection to it, or the store itself if
    this process ``serves`` it."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(address, port, is_master=serves, timeout=timeout, wait_for_workers=False)


def connect_store(timeout_s: float) -> dist.Store:
    """The part of torchrun's store that belongs to this start. Collective; raises CollectiveError if not all
    ranks come within ``timeout_s``."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = open_store(timeout_s)
    if not rank and may_change():
        text = f"mixmesh: no machine can come back under this torchrun; {HINT}"
        tell(text)
    return store_of_start(store, rank, world_size, timeout_s)


def may_change() -> bool:
    """Whether torchrun may restart on several machines. In PyTorch 2.13 a machine that joins later then waits
    forever for the store's address, which the other machines publish only once."""
    num_machines, restarts = (
        int(os.environ.get(name, "0")) for name in ("GROUP_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS")
    )
    return num_machines > 1 and restarts > 0


def store_of_start(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """The part of ``store`` that belongs to the ranks of this start. Collective; raises CollectiveError if
    not all of them come within ``timeout_s``.

    Each rank writes a unique number. The first rank makes a name of the numbers that it finds, and makes a
    new one as long as some rank does not confirm it, because that rank's number was from an earlier start.
    """
    meeting = _Meeting(store, rank, world_size, timeout_s)
    try:
        name = meeting.follow() if rank else meeting.lead()
    except dist.DistError as error:
        raise CollectiveError(
            f"rank {rank} has lost the store of the launch at the start",
            got=str(error).partition("\n")[0],
            hint="torchrun on the first machine holds it, and has ended: its own output says why",
        ) from None
    return dist.PrefixStore(f"{KEY}/{name}", store)


class _Meeting:
    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._store, self._rank, self._world_size, self._timeout_s = store, rank, world_size, timeout_s
        self._own = uuid.uuid4().hex
        self._started, self._pause_s, self._has_told = time.monotonic(), POLL_S[0], False

    def lead(self) -> str:
        """The name that all other ranks have confirmed."""
        others = range(1, self._world_size)
        written = ""
        while True:
            numbers = [self._own, *(self._read(f"number/{rank}") for rank in others)]
            name = _name(numbers)
            if all(numbers):
                if name != written:
                    self._write("numbers", json.dumps(numbers))
                    written = name
                if all(self._read(f"confirmed/{rank}") == name for rank in others):
                    self._write("name", name)
                    return name
            self._wait([r for r in others if not numbers[r] or self._read(f"confirmed/{r}") != name])

    def follow(self) -> str:
        """The name that the first rank has made from the numbers of all ranks, including this one's."""
        while True:
            self._write(f"number/{self._rank}", self._own)
            numbers = json.loads(self._read("numbers") or "[]")
            if len(numbers) == self._world_size and numbers[self._rank] == self._own:
                name = _name(numbers)
                self._write(f"confirmed/{self._rank}", name)
                if self._read("name") == name:
                    return name
            self._wait([0])

    def _read(self, key: str) -> str:
        """The value of a key; empty if nobody has written it."""
        key = f"{KEY}/{key}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _write(self, key: str, value: str) -> None:
        self._store.set(f"{KEY}/{key}", value)

    def _wait(self, missing: list[int]) -> None:
        """Pauses briefly, because the ranks that are ``missing`` may still come."""
        waited_s = time.monotonic() - self._started
        if waited_s > self._timeout_s:
            raise CollectiveError(
                f"rank {self._rank}: not all ranks have come to the start within {self._timeout_s:g} s",
                expected=f"{self._world_size} ranks",
                got=f"nothing from {ranks_text(missing)}",
                hint=("look at the output of each", HINT),
            )
        if waited_s > NOTICE_S and not self._has_told:
            self._has_told = True
            text = f"mixmesh: rank {self._rank}: nothing from {ranks_text(missing)} at the start yet"
            tell(text)
        time.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 1.5, POLL_S[1])


def _name(numbers: list[str]) -> str:
    return hashlib.sha256("".join(numbers).encode()).hexdigest()[:16]
