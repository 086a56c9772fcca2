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
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlparse

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import _env_rendezvous_handler, _rendezvous_handlers

from ..base.launched import rank_and_world_size, store_address
from ..base.progress import tell
from ..base.units import ranks_text
from ..errors import CollectiveError, InputError
from .agreement import NOTICE_S, POLL_S

KEY = "mixmesh/start"
MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
HINT = "with --nnodes MIN:MAX: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every machine, before torchrun"
TRY_S = 5.0  # longest wait for one connection, and pause between two
TOLD_S = 2.0  # seconds after which a store that cannot be reached is told of


def own_connection(store: dist.Store) -> dist.Store:
    """A second connection to the same store, because a thread that waits for an answer blocks the first."""
    return store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it


def is_of_launcher() -> bool:
    """Whether the store of this process's launch is torchrun's own, which outlives the process."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_store(timeout_s: float, *, serves: bool = False) -> dist.Store:
    """The store of the launch, including data of earlier starts: a connection to it, or the store itself if
    this process ``serves`` it."""
    address, port = store_address()
    timeout = timedelta(seconds=timeout_s)
    # in one process groups may be made again, at the same port
    options = {"multi_tenant": True} if serves else {}
    return dist.TCPStore(address, port, is_master=serves, timeout=timeout, wait_for_workers=False, **options)


def connect_store(timeout_s: float) -> dist.Store:
    """The part of the launch's store that belongs to this start: torchrun's store, or one that the first rank
    serves. Collective; raises CollectiveError if not all ranks come within ``timeout_s``, InputError for a
    port that another program has taken."""
    rank, world_size = rank_and_world_size()
    serves = not rank and not is_of_launcher()
    if not is_of_launcher():
        wait_for_address(rank, timeout_s, listens=not serves)
    store = _opened(rank, timeout_s, serves)
    if not rank and may_change():
        text = f"mixmesh: no machine can come back under this torchrun; {HINT}"
        tell(text)
    return store_of_start(store, rank, world_size, timeout_s)


def keep_starts_apart() -> None:
    """Lets groups that libraries make from the launcher's variables, as transformers does for the arguments
    of a Trainer, use the store of this start too: PyTorch would connect to processes of an earlier one."""
    if _rendezvous_handlers["env"] is _env_rendezvous_handler:
        _rendezvous_handlers["env"] = _rendezvous_of_start


def _rendezvous_of_start(
    url: str, timeout: timedelta = default_pg_timeout, **options: Any
) -> Iterator[tuple[dist.Store, int, int]]:
    """PyTorch's handler of ``env://``; under torchrun with restarts, the store of this start."""
    own = rank_and_world_size()
    asked = dict(parse_qsl(urlparse(url).query))
    is_of_all = all(int(asked.get(name, n)) == n for name, n in zip(("rank", "world_size"), own))
    if not (is_of_all and is_of_launcher() and os.environ.get(MAX_RESTARTS, "0") != "0"):
        yield from _env_rendezvous_handler(url, timeout=timeout, **options)
        return
    yield connect_store(timeout.total_seconds()), *own
    raise RuntimeError("env:// does not rendezvous again")


def wait_for_address(rank: int, timeout_s: float, *, listens: bool) -> None:
    """Waits until the name of the store's machine has an address, and, if it ``listens``, answers there:
    PyTorch would try again without saying why. A cluster may give the name an address only when the machine
    is there, and the first rank may start later. Raises CollectiveError after ``timeout_s``."""
    address, port = store_address()
    started, has_told = time.monotonic(), False
    while reason := _unreachable(address, port, listens):
        waited_s = time.monotonic() - started
        if waited_s > timeout_s:
            raise CollectiveError(
                f"rank {rank} has not reached the store of the launch within {timeout_s:g} s",
                expected=f"the machine of rank 0 at MASTER_ADDR={address}, listening at MASTER_PORT={port}",
                got=reason,
                hint=(
                    "export MASTER_ADDR=HOST MASTER_PORT=PORT, alike on all ranks: of rank 0's machine",
                    "look at the output of rank 0: it may have ended, or not have started",
                ),
                ranks=(rank,),
            )
        if waited_s > TOLD_S and not has_told:
            has_told = True
            tell(
                f"mixmesh: rank {rank} does not reach MASTER_ADDR={address}, MASTER_PORT={port} yet "
                f"({reason}); waiting up to {timeout_s:g} s"
            )
        time.sleep(min(POLL_S[1] * (1 + waited_s), TRY_S))


def _unreachable(address: str, port: int, listens: bool) -> str:
    """The reason why the store's machine cannot be reached; empty if it can."""
    try:
        if listens:
            socket.create_connection((address, port), TRY_S).close()
        else:
            socket.getaddrinfo(address, port)
    except (OSError, UnicodeError) as error:  # Python refuses some names before it looks for them
        return str(getattr(error, "strerror", None) or error)
    return ""


def _opened(rank: int, timeout_s: float, serves: bool) -> dist.Store:
    """The store, opened in a thread: PyTorch waits without end for the answer of another program that listens
    there."""
    opened: list[dist.Store] = []
    failed: list[Exception] = []

    def open_it() -> None:
        try:
            opened.append(open_store(timeout_s, serves=serves))
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=open_it, daemon=True)
    thread.start()
    thread.join(timeout_s + TRY_S)
    for store in opened:
        return store
    for error in failed:
        if isinstance(error, dist.DistNetworkError) and "EADDRINUSE" in str(error):
            raise _port_taken(error) from None
        raise error
    raise CollectiveError(
        f"rank {rank}: what listens at MASTER_PORT={os.environ['MASTER_PORT']} is no store of a launch",
        expected=f"rank 0 at MASTER_ADDR={os.environ['MASTER_ADDR']}",
        got=f"a connection, and no answer within {timeout_s:g} s",
        hint="export MASTER_PORT=PORT, alike on all ranks: the output of rank 0 says whether it is free",
        ranks=(rank,),
    )


def _port_taken(error: dist.DistNetworkError) -> InputError:
    port = os.environ["MASTER_PORT"]
    return InputError(
        f"rank 0 cannot serve the store of the launch at MASTER_PORT={port}: another program listens there",
        expected="a free port, on the machine of rank 0",
        got=str(error).partition("\n")[0][:200],
        hint=(f"export MASTER_PORT={int(port) % 65535 + 1} on all ranks", f"ss -ltnp | grep :{port}"),
        ranks=(0,),
    )


def may_change() -> bool:
    """Whether torchrun may restart on several machines. In PyTorch 2.13 a machine that joins later then waits
    forever for the store's address, which the other machines publish only once."""
    num_machines, restarts = (int(os.environ.get(name, "0")) for name in ("GROUP_WORLD_SIZE", MAX_RESTARTS))
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
            got=str(error).partition("\n")[0]
            + (f"; nothing from {ranks_text(meeting.missing)} until then" if meeting.missing else ""),
            hint=f"{_holder()} holds it, and has ended: its own output says why",
        ) from None
    return dist.PrefixStore(f"{KEY}/{name}", store)


def _holder() -> str:
    return "torchrun on the first machine" if is_of_launcher() else "rank 0"


class _Meeting:
    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._store, self._rank, self._world_size, self._timeout_s = store, rank, world_size, timeout_s
        self._own = uuid.uuid4().hex
        self._started, self._pause_s, self._has_told = time.monotonic(), POLL_S[0], False
        self.missing: list[int] = []  # the ranks that the first one misses

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
            missing = [r for r in others if not numbers[r]]
            missing = missing or [r for r in others if self._read(f"confirmed/{r}") != name]
            self._write("missing", json.dumps(missing))
            self._wait(missing)

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
            # an earlier start of torchrun has written there, too
            told = "" if is_of_launcher() else self._read("missing")
            self.missing = [r for r in json.loads(told or "[0]") if r != self._rank]
            self._wait(self.missing or [0])

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
                hint=("look at the output of each", HINT if is_of_launcher() else ""),
            )
        if waited_s > NOTICE_S and not self._has_told:
            self._has_told = True
            text = f"mixmesh: rank {self._rank}: nothing from {ranks_text(missing)} at the start yet"
            tell(text)
        time.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 1.5, POLL_S[1])


def _name(numbers: list[str]) -> str:
    return hashlib.sha256("".join(numbers).encode()).hexdigest()[:16]
