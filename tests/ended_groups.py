"""Ends the process groups of checks that are over, in a world that runs many."""

from __future__ import annotations

import gc

import torch.distributed as dist

from mixmesh.runtime.messages import message_group

GROUPS_LEFT = 8  # in a process, that are not worth a look for what can be freed


class EndedChecks:
    """The groups that checks made. Each of gloo's has a thread that wakes a hundred times a second: a world
    of many checks would have hundreds of them, and no time for anything else.

    A check's groups are ended once every rank has passed it: ranks tell so in the store, and none waits.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.known = _groups()
        self.over: dict[str, list[dist.ProcessGroup]] = {}

    def add(self, check: str) -> None:
        """Says that this rank has passed a check, and ends the groups of those that all ranks have passed."""
        if not dist.is_initialized():
            return
        now = _groups()
        self.over[check] = [group for group in now if group not in self.known]
        self.known = now
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{check} passed {self.rank}", b"")
        everyone = range(self.world_size)
        done = [c for c in self.over if store.check([f"{c} passed {rank}" for rank in everyone])]
        if sum(self._end(c) for c in done) > GROUPS_LEFT:
            gc.collect()  # models that PyTorch wrapped hold their groups in cycles

    def _end(self, check: str) -> int:
        """How many groups were ended that the check made and left."""
        ended = self.known.intersection(self.over.pop(check))
        self.known -= ended
        for group in ended:
            dist.destroy_process_group(group)
        return len(ended)


def _groups() -> set[dist.ProcessGroup]:
    """Those of this process but for the default one and that of messages, which serve all checks."""
    if not dist.is_initialized():
        return set()
    return set(dist.distributed_c10d._world.pg_map) - {dist.group.WORLD, message_group()}
