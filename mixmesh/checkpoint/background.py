"""Checkpoints that are written while the training goes on, which only waits for copies of its tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import CollectiveError
from ..measure.testbed import leave_device
from ..runtime.accelerator import synchronize
from ..runtime.failures import limits_named
from ..runtime.shard_tensor import ShardTensor, plain, shard
from ..runtime.streams import host_buffer, issue_copy
from ..runtime.watch import THREADS
from .ranks import Ranks


class Saving:
    """A checkpoint that is being written from copies of the tensors, ``buffers``."""

    def __init__(self, ranks: Ranks, buffers: Mapping[str, Tensor], write: Callable[[], Path | None]) -> None:
        self.buffers = buffers
        self._ranks, self._write = ranks, write
        self._path: Path | None = None
        self._error: BaseException | None = None
        # not a daemon, so that an interpreter that ends waits for the checkpoint
        self._thread = threading.Thread(target=self._run, name=f"{THREADS}checkpoint")
        with limits_named("a checkpoint", ranks.rank):
            self._thread.start()

    def _run(self) -> None:
        leave_device()  # the emulated device's quota is for computing: a GPU would not write files either
        try:
            self._path = self._write()
        except BaseException as error:
            self._error = error

    def result(self) -> Path | None:
        """Waits until the checkpoint is written, and returns its folder, or None if it could not be written.
        Raises, on all ranks, what ``save`` raises. Collective."""
        with self._ranks.meeting("waiting for a checkpoint"), self._ranks.waiting():
            self._thread.join()
            if isinstance(self._error, CollectiveError):  # the watch knows which rank was lost
                raise RuntimeError(self._error.got) from self._error
        if self._error is not None:
            raise self._error
        return self._path


_last: WeakKeyDictionary[nn.Module, Saving] = WeakKeyDictionary()  # each model's newest checkpoint


def begin(
    model: nn.Module, ranks: Ranks, buffers: Mapping[str, Tensor], write: Callable[[], Path | None]
) -> Saving:
    """Starts ``write`` in its own thread."""
    _last[model] = saving = Saving(ranks, buffers, write)
    return saving


def finish(model: nn.Module) -> Mapping[str, Tensor]:
    """Waits for the checkpoint of ``model`` that is being written, and returns its buffers for reuse.
    Collective. Raises the error of that checkpoint, if it failed."""
    last = _last.pop(model, None)
    if last is None:
        return {}
    last.result()
    return last.buffers


@torch.no_grad()
def staged(tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies ``tensors`` to host memory, pinned if they are on an accelerator; reusing ``buffers`` of the
    same shape and dtype if there are any."""
    copies = {}
    for name, tensor in tensors.items():
        piece, buffer = plain(tensor), buffers.get(name)
        room = None if buffer is None else plain(buffer)
        if room is None or room.shape != piece.shape or room.dtype != piece.dtype:
            room = host_buffer(piece)
        issue_copy(piece, room)
        if isinstance(tensor, ShardTensor):
            room = shard(room, replace(tensor.whole, written=None))
        copies[name] = room
    for device in {plain(tensor).device for tensor in tensors.values()}:
        synchronize(device)
    return copies
