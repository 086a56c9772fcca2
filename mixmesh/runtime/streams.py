"""Streams and events of a device, and copies to it.

Uses ``torch.Stream`` and ``torch.Event``, which work for CUDA, ROCm and XPU. A CPU does everything at once,
so its events are readings of the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from .accelerator import is_accelerator, synchronize


def copied(x: Tensor, device: torch.device) -> Tensor:
    """Copies ``x`` to the device. From pinned host memory the copy is only issued, and runs in the current
    stream before anything issued there later; PyTorch keeps ``x`` until then."""
    return x.to(device, non_blocking=True)


def host_buffer(x: Tensor) -> Tensor:
    """Host memory into which the values of ``x`` can be copied (``issue_copy``), pinned if ``x`` is on an
    accelerator."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=is_accelerator(x.device))


def issue_copy(x: Tensor, buffer: Tensor) -> None:
    """Copies the values of ``x`` into a buffer of the host, in the current stream. They are valid when the
    device has finished its work (``accelerator.synchronize``); on a CPU at once."""
    buffer.copy_(x, non_blocking=True)


@cache
def side_stream(device: torch.device) -> torch.Stream:
    """An accelerator's second stream, for work that overlaps its current one; the same at every call."""
    return torch.Stream(device)


Moment = torch.Event  # on a stream


def issue_beside(device: torch.device, x: Tensor, issue: Callable[[], None]) -> Moment:
    """Runs ``issue``, which issues work on ``x``, in the side stream, after all work issued in the current
    one, and returns the moment of its end. The memory of ``x`` is not used for another tensor before that."""
    stream = side_stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        issue()
        end = torch.Event(device)
        end.record(stream)
    x.record_stream(stream)
    return end


def await_moment(device: torch.device, moment: Moment) -> None:
    """Makes the current stream wait for the moment; the host does not wait."""
    torch.accelerator.current_stream(device).wait_event(moment)


class Clock:
    """Reads the time on this rank: that of the host, or on an accelerator that of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base: Moment | None = None
        if is_accelerator(device):
            self._base = self._event()
            synchronize(device)
        self._base_s = time.perf_counter()

    def now(self) -> float | Moment:
        """The present moment, which ``seconds`` converts once the device has reached it."""
        return time.perf_counter() if self._base is None else self._event()

    def seconds(self, moment: float | Moment) -> float:
        """The seconds of a moment, on the scale of ``time.perf_counter``. The device must have reached the
        moment."""
        if isinstance(moment, float):
            return moment
        assert self._base is not None
        return self._base_s + self._base.elapsed_time(moment) / 1e3

    def _event(self) -> Moment:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event
