"""Reads Linux's information about this process and others on this machine; on other systems nothing is
known."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import stat
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

LAUNCHER_VARIABLE = "TORCHELASTIC_RUN_ID"  # set in processes that torchrun started
STDERR = 2
SIGNAL_OF_PARENTS_END = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


@cache
def process_place() -> str:
    """A text that is equal for two processes that see each other's ids; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_state(pid: int) -> str:
    """The state letter from /proc: R, S, D, T (stopped), t (traced), Z (zombie); empty if there is none, "?"
    if this process cannot look, as at its limit of open files: the other one may well be there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return ""
    except OSError:
        return "?"


def is_gone(pid: int) -> bool:
    return process_state(pid) in ("", "Z", "X")


def is_stopped(pid: int) -> bool:
    return process_state(pid) in ("T", "t")


def memory_kills(counters: Path = Path("/proc/vmstat")) -> int | None:
    """How many processes the kernel of this machine has killed for lack of memory so far; None if unknown."""
    with suppress(OSError, ValueError):
        for line in counters.read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return None


def show_crashes() -> None:
    """Makes this process print the lines that it was in if it crashes, as by a segmentation fault: Python
    prints nothing then. A setting of the script stays."""
    if not faulthandler.is_enabled():
        faulthandler.enable(STDERR)


def end_with_launcher() -> None:
    """Makes a process that torchrun started get SIGTERM when torchrun ends, even by SIGKILL: otherwise it
    would train on and keep its device while its replacement starts. Linux only."""
    if LAUNCHER_VARIABLE in os.environ:
        end_with_parent()


def end_with_parent() -> None:
    """Makes this process get SIGTERM when its parent ends, even by SIGKILL. Linux only."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(SIGNAL_OF_PARENTS_END, signal.SIGTERM)
        if os.getppid() != parent:  # the parent ended just before
            os.kill(os.getpid(), signal.SIGTERM)


def open_sockets() -> dict[int, int]:
    """This process's sockets by file descriptor, each with its number in the kernel."""
    sockets = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    sockets[int(name)] = status.st_ino
    return sockets


def shut(sockets: dict[int, int]) -> None:
    """Shuts those of the sockets that are still the same as before, which wakes threads that wait for them.
    Listening sockets stay open, because gloo ends the process if accepting fails."""
    now = open_sockets()
    for number, in_kernel in sockets.items():
        if now.get(number) != in_kernel:
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
            one.getpeername()
            one.shutdown(socket.SHUT_RDWR)
