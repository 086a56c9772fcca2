"""Ranks that tell each other what they found, through the store of the launch and without any collective: a
rank that fails is heard of like one that succeeds."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import CollectiveError, InputError, MixmeshError
from ..runtime.agreement import Round
from ..runtime.comm import RANK_VARIABLES

POLL_S = 0.02
LAST_WORDS_S = 5.0  # that the first rank's output is waited for at the end, and the others' last reads
PREFIX = "mixmesh/doctor"


class Meeting:
    """The ranks of one launch. ``is_over`` says that a rank is missing, so that nothing more can be asked;
    ``is_abandoned`` that a thread of this process still waits in a collective."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
        self.store, self.rank, self.world_size, self.timeout_s = store, rank, world_size, timeout_s
        self.is_over = self.is_abandoned = False
        self._number = 0

    @classmethod
    def open(cls, timeout_s: float) -> Meeting:
        """The meeting of this process with the others of its launch, or with itself. Raises InputError if a
        launcher's variables are not all there, CollectiveError if the store is not reached in time."""
        if "RANK" not in os.environ:
            return cls(dist.HashStore(), 0, 1, timeout_s)
        missing = [name for name in RANK_VARIABLES if name not in os.environ]
        if missing:
            raise InputError(
                "this process was started with a rank, and not with all that it needs to find the others",
                expected=f"the variables {', '.join(RANK_VARIABLES)}",
                got=f"no {', '.join(missing)}",
                hint="torchrun --nproc-per-node gpu -m mixmesh doctor",
            )
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return cls(open_store(rank, timeout_s), rank, world_size, timeout_s)

    def gather(self, what: str, make: Callable[[], Any]) -> list[Any]:
        """The values of JSON that ``make`` returns on the ranks, by rank. Raises an error, on all ranks, that
        names the first rank on which ``make`` failed; CollectiveError if a rank does not come."""
        return self._exchange(what, outcome_of(make))

    def gather_together(self, what: str, make: Callable[[], Any]) -> list[Any]:
        """As ``gather``, of a ``make`` in which ranks wait for each other: where one of them fails the others
        stop waiting."""
        failed = f"{PREFIX}/failed/{self._number}"
        outcomes: list[dict[str, str]] = []
        thread = threading.Thread(target=lambda: outcomes.append(outcome_of(make)), daemon=True)
        thread.start()
        while thread.is_alive() and not self.store.check([failed]):
            thread.join(POLL_S)
        if outcomes and "error" in outcomes[0]:
            self.store.set(failed, "yes")
        self.is_abandoned = self.is_abandoned or thread.is_alive()
        return self._exchange(what, outcomes[0] if outcomes else {})

    def _exchange(self, what: str, outcome: dict[str, str]) -> list[Any]:
        self._number += 1
        try:
            key = f"{PREFIX}/{self._number}"
            told = Round(self.store, key, self.rank, self.world_size, what, self.timeout_s).exchange(outcome)
        except CollectiveError:
            self.is_over = True
            raise
        for rank, one in enumerate(told):
            if "error" in one:
                raise error_of(rank, json.loads(one["error"]))
        return [json.loads(one["value"]) for one in told]

    def close(self) -> None:
        """Has all ranks leave when the first one has said what was found: a launcher ends the others as soon
        as one fails, and the first rank's process may hold the store."""
        with suppress(RuntimeError):
            self.store.set(f"{PREFIX}/left/{self.rank}", "yes")
            awaited = [0] if self.rank or self.is_over else list(range(self.world_size))
            keys = [f"{PREFIX}/left/{rank}" for rank in awaited]
            deadline = time.monotonic() + LAST_WORDS_S
            while not self.store.check(keys) and time.monotonic() < deadline:
                time.sleep(POLL_S)


def open_store(rank: int, timeout_s: float) -> dist.Store:
    """The store of the launch: torchrun's own, or else one that the first rank serves."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not of_launcher
    try:
        return dist.TCPStore(
            host,
            port,
            is_master=serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {rank} cannot serve the store of the launch"
            if serves
            else f"rank {rank} does not reach the store of the launch within {timeout_s:g} s",
            expected=f"{host} port {port}" + (" to be free" if serves else " to answer"),
            got=first_line(error),
            hint=(
                "start the first machine's processes; let its firewall pass that port",
                "--rdzv-endpoint (MASTER_ADDR) must be a name of the first machine that all machines resolve",
            ),
        ) from None


def outcome_of(make: Callable[[], Any]) -> dict[str, str]:
    """The value that ``make`` returns, or the error that it raises, as text."""
    try:
        return {"value": json.dumps(make())}
    except MixmeshError as error:
        fields = {"expected": error.expected, "got": error.got, "where": error.where, "hint": error.hint}
        return {"error": json.dumps({"message": error.message, **fields})}
    except (Exception, SystemExit) as error:  # the user's own code, or a driver: of any kind
        return {"error": json.dumps({"message": f"{type(error).__name__}: {first_line(error)}"})}


def error_of(rank: int, fields: dict[str, Any]) -> InputError:
    """The error that a rank told of."""
    hint = tuple(fields.pop("hint", ()))
    return InputError(f"rank {rank}: {fields.pop('message')}", hint=hint, **fields)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, cut to what can be read."""
    return (str(error).strip().splitlines() or [""])[0][:300]
