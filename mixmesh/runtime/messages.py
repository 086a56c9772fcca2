"""The group for small messages between ranks, which go through the hosts' memory.

On cards the default group would need a communicator for them, which takes some hundred MiB of each card, and
every message would wait for all work queued on the card.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from .accelerator import HOST_BACKEND, is_on_device, synchronize

# the default group, and the group for its messages
_made: list[tuple[dist.ProcessGroup | None, dist.ProcessGroup]] = []


def begin_messages(timeout: timedelta) -> None:
    """Makes the group for messages if the default group is one of accelerators and has none yet.
    Collective."""
    if is_on_device() and message_group() is None:
        _made[:] = [(dist.group.WORLD, dist.new_group(timeout=timeout, backend=HOST_BACKEND))]


def message_group() -> dist.ProcessGroup | None:
    """The group for messages; None if the default group can be used."""
    return next((group for world, group in _made if world is dist.group.WORLD), None)


def end_messages() -> None:
    """Forgets the group, after the default one was destroyed."""
    _made.clear()


def meet() -> None:
    """Waits for all ranks, after this rank's device has finished its work. Collective."""
    if is_on_device():
        synchronize()
    dist.barrier(group=message_group())
