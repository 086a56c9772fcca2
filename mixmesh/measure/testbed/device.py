"""Functions that a rank inside the testbed calls. Standard library only, so that a worker may import it
first.

A rank starts in a cgroup without a quota, and so do the threads it makes, gloo's among them: a GPU's copy
engine does not slow its computing. When training starts, the computing thread alone moves itself into the
device's throttled cgroup; autograd on a CPU runs the backward pass in the calling thread, so it goes along.
Threads made by a throttled thread are throttled too: initialise the process group before entering.

Outside the testbed each of these does nothing.
"""

from __future__ import annotations

import os
import threading

from ...errors import TestbedUnavailable

COMPUTE_VARIABLE = "MIXMESH_COMPUTE_TASKS"
FREE_VARIABLE = "MIXMESH_FREE_TASKS"
EMULATED_VARIABLE = "MIXMESH_EMULATED"  # describes the emulation: it has another value for another cluster
MEMORY_PEAK_VARIABLE = "MIXMESH_MEMORY_PEAK_FILE"
JOIN_VARIABLE = "MIXMESH_JOIN_FILES"  # files of a device, for ranks started by a launcher inside a machine


def join_device() -> bool:
    """Puts this process, and all that it will start, under the memory limit of its device; returns whether
    there is one. For a rank whose launcher, such as torchrun, runs in the machine but outside the device."""
    files = os.environ.get(JOIN_VARIABLE)
    if not files:
        return False
    for path in files.split(os.pathsep):
        _write(path, "0", JOIN_VARIABLE)
    return True


def enter_device() -> bool:
    """Moves the calling thread into the device's CPU quota; returns whether it has one."""
    return _move_thread(COMPUTE_VARIABLE)


def leave_device() -> bool:
    """Moves the calling thread out of the device's CPU quota again; returns whether it has one."""
    return _move_thread(FREE_VARIABLE)


def device_memory_peak_bytes() -> int | None:
    """The most memory that this rank's device has held, including the start-up of the interpreter; None
    outside of the testbed."""
    path = os.environ.get(MEMORY_PEAK_VARIABLE)
    if not path:
        return None
    try:
        with open(path) as file:
            return int(file.read())
    except OSError:  # cgroup v2 has memory.peak from Linux 5.19 on
        return None


def _move_thread(variable: str) -> bool:
    path = os.environ.get(variable)
    if not path:
        return False
    _write(path, str(threading.get_native_id()), variable)
    return True


def _write(path: str, number: str, variable: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(number)
    except OSError as error:
        raise TestbedUnavailable(
            f"cannot move this thread into its device's cgroup: {error.strerror}",
            got=f"{variable}={path}",
            hint=f"start the process with `mixmesh testbed`, or unset {variable}",
        ) from None
