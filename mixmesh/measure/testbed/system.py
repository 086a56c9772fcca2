"""System calls and commands that the testbed uses."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

CLONE_NEWNS = 0x00020000  # mounts
CLONE_NEWUTS = 0x04000000
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
BOOT_ID = b"/proc/sys/kernel/random/boot_id"
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000

libc = ctypes.CDLL(None, use_errno=True)


class CommandFailed(Exception):
    pass


def command(*words: object, check: bool = True) -> str:
    """Runs a command and returns its output. Raises ``CommandFailed`` with its stderr."""
    argv = [str(word) for word in words]
    try:
        ended = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise CommandFailed(f"{argv[0]}: {error.strerror}") from None
    if check and ended.returncode:
        raise CommandFailed(f"{' '.join(argv)}: {ended.stderr.strip() or f'status {ended.returncode}'}")
    return ended.stdout


def write(path: str, value: object) -> None:
    with open(path, "w") as file:
        file.write(str(value))


def read(path: str) -> str:
    with open(path) as file:
        return file.read()


def read_table(path: str) -> dict[str, int]:
    """Reads a file of ``key value`` lines, as in cgroups."""
    pairs = (line.split() for line in read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


def start_time(pid: int) -> str | None:
    """The start of a process, in ticks since boot: together with its id it identifies a process."""
    try:
        # the second field, the name in parentheses, may contain any character
        return read(f"/proc/{pid}/stat").rsplit(")", 1)[1].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None


def call(function: Callable[..., int], *arguments: object) -> None:
    """Calls a function of libc that returns 0 or sets errno. Raises OSError."""
    if function(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def die_with(parent: int) -> None:
    """Makes the calling child process get killed when the parent's thread that started it ends."""
    if sys.platform != "linux":
        return
    call(libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(97)


def mount_memory(path: Path, size_bytes: int) -> None:
    """Mounts a file system in memory, of ``size_bytes``, on a folder."""
    command("mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "mixmesh", path)


def unmount(path: Path) -> None:
    """Ends a mount, even if its files are open; a folder that is not mounted is no error."""
    if os.path.ismount(path):
        command("umount", "--lazy", path, check=False)


def enter_machine(namespace_fd: int, host_name: bytes, hosts_file: bytes, boot_file: bytes) -> None:
    """Moves the calling child process into a machine, with its network, host name, ``/etc/hosts``, and its
    own boot id: ranks must not find out that they can see the processes of other machines."""
    call(libc.setns, namespace_fd, CLONE_NEWNET)
    call(libc.unshare, CLONE_NEWUTS | CLONE_NEWNS)
    call(libc.sethostname, host_name, len(host_name))
    call(libc.mount, None, b"/", None, MS_REC | MS_PRIVATE, None)
    if os.path.exists("/etc/hosts"):
        call(libc.mount, hosts_file, b"/etc/hosts", None, MS_BIND, None)
    call(libc.mount, boot_file, BOOT_ID, None, MS_BIND, None)
