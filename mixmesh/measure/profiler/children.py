"""Runs work that may run out of memory in a child process, so that running out is a result and does not end
the job."""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ...base.progress import flush_output
from ...runtime.accelerator import empty_cache
from ...runtime.allocator import give_back
from ..testbed.system import die_with

# messages of PyTorch's CPU allocator, whose errors have no type of their own
NO_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a piece of work: its ``value``, or the ``error`` that ended it, possibly because memory
    ran out."""

    value: Any = None
    error: str = ""
    out_of_memory: bool = False

    @property
    def done(self) -> bool:
        return not self.error


def attempt_on(device: torch.device, work: Callable[[], Any], timeout_s: float) -> Outcome:
    """Does the work so that running out of the device's memory is survived: CUDA's allocator raises an error,
    while a process over its memory limit is killed."""
    if device.type == "cpu":
        return in_child(work, timeout_s)
    outcome = attempt(work)
    gc.collect()
    empty_cache(device)
    return outcome


def attempt(work: Callable[[], Any]) -> Outcome:
    """Does the work in this process and catches its error."""
    try:
        return Outcome(work())
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        by_type = isinstance(error, MemoryError | torch.OutOfMemoryError)
        return Outcome(error=text, out_of_memory=by_type or any(words in text for words in NO_MEMORY))


def in_child(work: Callable[[], Any], timeout_s: float) -> Outcome:
    """Does the work in a fork of this process; the value is pickled. A child that is killed has run out of
    memory: it asks the kernel to be the first to go.

    Threads do not survive a fork: the work must not need any that this process has made. It may initialise
    ``torch.distributed`` if this process has not.
    """
    flush_output()
    # Linux starts the child's peak resident size at this process's size: free memory in its heap would hide
    # as much of the child's
    gc.collect()
    give_back()
    parent = os.getpid()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _work_and_leave(work, write_end, parent)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        # the child writes at its end, and closes the pipe by ending
        in_time = bool(select.select([pipe], [], [], timeout_s)[0])
        if not in_time:
            os.kill(pid, signal.SIGKILL)
        written = pipe.read()
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if not in_time:
        return Outcome(error=f"it did not end within {timeout_s:g} s")
    if code == -signal.SIGKILL:
        return Outcome(error="killed, as by a limit of memory", out_of_memory=True)
    if code:
        return Outcome(error=f"the child ended with status {code}")
    return pickle.loads(written)


def _work_and_leave(work: Callable[[], Any], write_end: int, parent: int) -> NoReturn:
    status = 1
    try:
        die_with(parent)
        _go_first()
        torch.set_num_threads(1)  # OpenMP's threads belong to the parent
        outcome = attempt(work)
        flush_output()
        with os.fdopen(write_end, "wb") as pipe:
            pickle.dump(outcome, pipe)
        status = 0
    finally:
        os._exit(status)  # exits without running the parent's handlers


def _go_first() -> None:
    """Makes the kernel end this process rather than its parent if memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass
