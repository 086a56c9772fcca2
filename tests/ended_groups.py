"""Ends the process groups of checks that are over, in a world that runs many."""

from __future__ import annotations

import gc

import torch.distributed as dist

from mixmesh.runtime.comm import Comm
from mixmesh.runtime.messages import message_group

GROUPS_LEFT = 8  # so few in a process are not worth a look at what is still in use


class EndedChecks:
    """The groups that checks made. Each of gloo's has a thread that wakes a hundred times a second: a world
    of many checks would have hundreds of them, and no time for anything else.

    A check's groups are ended once every rank has passed it, unless a model that a later check may use has
    them: ranks tell so in the store, and none waits.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.known = _groups()
        self.over: dict[str, set[dist.ProcessGroup]] = {}

    def add(self, check: str) -> None:
        """Says that this rank has passed a check, and ends the groups of those that all ranks have passed."""
        if not dist.is_initialized():
            return
        now = _groups()
        self.over[check] = now - self.known
        self.known = now
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{check} passed {self.rank}", b"")
        everyone = range(self.world_size)
        if sum(map(len, self.over.values())) > GROUPS_LEFT:
            done = [c for c in self.over if store.check([f"{c} passed {rank}" for rank in everyone])]
            gc.collect()  # models that PyTorch wrapped hold their groups in cycles
            in_use = _groups_in_use()
            for passed in done:
                for group in self.over[passed] & self.known - in_use:
                    dist.destroy_process_group(group)
                self.over[passed] &= in_use
            self.known = _groups()


def _groups() -> set[dist.ProcessGroup]:
    """Those of this process but for the default one and that of messages, which serve all checks."""
    if not dist.is_initialized():
        return set()
    return set(dist.distributed_c10d._world.pg_map) - {dist.group.WORLD, message_group()}


def _groups_in_use() -> set[dist.ProcessGroup | None]:
    comms = [value for value in gc.get_objects() if type(value) is Comm]
    return {group for comm in comms for group in comm.groups.values()}
