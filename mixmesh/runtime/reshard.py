"""Gathered parameters that are freed after the forward pass and gathered again in the backward: ZeRO-3.

Autograd does not keep an ``all_gather`` of a parameter with the attribute ``reshard``: where it would save
the value, it saves a note of the gather. The value's last use carries a trigger, whose backward runs before
that of any other use, on all ranks in the same order, and starts the second gather. If a recomputed region
reads the value, the region's last computation carries the trigger.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..lang.ir import Program
from ..step.again import gathers_again
from .collectives import Handle
from .redistribute import Redistribution


def reshard_points(program: Program) -> dict[int, list[str]]:
    """Values with ``reshard``, by the index of the instruction before whose backward they are gathered
    again."""
    return {n: [i.result for i in gathers] for n, gathers in gathers_again(program).items()}


class _Record:
    """One gathered parameter of one forward pass. Lives as long as something saved refers to it."""

    def __init__(self, how: Redistribution, piece: Tensor | None, address: int | None) -> None:
        self.how, self.piece, self.address = how, piece, address
        self.handle: Handle | None = None

    def load(self) -> None:
        if self.handle is None:
            piece = None if self.piece is None else self.piece.detach()
            self.handle = self.how.begin(piece)

    def whole(self) -> Tensor:
        self.load()
        assert self.handle is not None
        return self.handle.wait()


class Keeper:
    """The gathered parameters of one forward pass that autograd must not save."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}  # by the address of their memory, as long as they hold it

    def hooks(self):
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def hold(self, whole: Tensor | None, how: Redistribution, piece: Tensor | None) -> _Record:
        address = None if whole is None else whole.untyped_storage().data_ptr()
        record = _Record(how, piece, address)
        if address:
            self._records[address] = record
        return record

    def forget(self, record: _Record) -> None:
        """Drops the record after the last use, because another tensor may then get the memory."""
        if record.address is not None:
            self._records.pop(record.address, None)

    def release(self, record: _Record, result: Tensor | None, tokens: list[Tensor]) -> Tensor | None:
        """Arranges that the parameter is gathered again before the backward of ``result``."""
        if not torch.is_grad_enabled():
            return result
        anchor = torch.empty(0, device=record.how.comm.device, requires_grad=True)
        result, token = _Trigger.apply(anchor, result, record)
        tokens.append(token)
        return result

    def note(self, x: Tensor) -> Any:
        """A record to keep in place of a tensor; ``take`` turns it into a tensor again."""
        return self._pack(x)

    def take(self, note: Any) -> Tensor:
        return self._unpack(note)

    def _pack(self, x: Tensor) -> Any:
        record = self._records.get(x.untyped_storage().data_ptr())
        if record is None:
            return x.detach()
        return record, x.size(), x.stride(), x.storage_offset()

    @staticmethod
    def _unpack(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        record, size, stride, offset = saved
        return record.whole().as_strided(size, stride, offset)


class _Trigger(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor: Tensor, result: Tensor | None, record: _Record):
        ctx.record = record
        ctx.set_materialize_grads(False)
        return None if result is None else result.view_as(result), anchor.new_empty(0)

    @staticmethod
    def backward(ctx, gradient: Tensor | None, _token):
        if ctx.record is not None:
            ctx.record.load()
            ctx.record = None  # now only saved tensors refer to it, so it is freed after its last use
        return None, gradient, None
