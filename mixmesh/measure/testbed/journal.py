"""The journal: a list of all that a launcher is about to create. Only what it lists is ever removed.

It is written before anything is created, so that a launcher that dies at any moment leaves a complete list,
and the next start removes all of it. Only processes in the listed cgroups are killed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ...base.files import write_text
from .system import command, read, start_time, unmount

_NAMESPACE = re.compile(r"mm[0-9a-f]{8}(sw|m\d+)")
_FIELDS = {"bed": str, "pid": int, "start_time": str, "namespaces": list, "cgroups": list}  # in the file
_MAX_PID = 2**22  # the limit in Linux
_CGROUP = re.compile(r"/[^\0]*/mm[0-9a-f]{8}(/r\d+(free)?(/compute|/free)?)?")


@dataclass(frozen=True)
class Journal:
    bed: str
    pid: int
    start_time: str
    namespaces: tuple[str, ...]
    cgroups: tuple[str, ...]  # each parent before its children

    def save(self) -> None:
        directory().mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text(self.path, json.dumps(asdict(self)))

    @property
    def path(self) -> Path:
        return directory() / f"{self.bed}.json"

    @property
    def hosts_path(self) -> Path:
        """The file that ranks see as ``/etc/hosts``; it is removed with the journal."""
        return directory() / f"{self.bed}.hosts"

    def boot_path(self, machine: int) -> Path:
        """The file with the boot id of a machine; it is removed with the journal."""
        return directory() / f"{self.bed}.boot{machine}"

    @property
    def disk_path(self) -> Path:
        """The mount point of a disk of limited size, if there is one; it is removed with the journal."""
        return directory() / f"{self.bed}.disk"

    @property
    def is_stale(self) -> bool:
        """Whether the launcher has ended; its process id may belong to another process by now."""
        return start_time(self.pid) != self.start_time


def directory() -> Path:
    # only root can write to /run, so that no other user can list things to remove
    run = Path("/run")
    return (run if os.access(run, os.W_OK) else Path(tempfile.gettempdir())) / "mixmesh-testbed"


def load(path: Path) -> Journal | None:
    """Reads a journal; None for a file that this module did not write."""
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(raw, dict) or raw.keys() != _FIELDS.keys():
        return None
    if any(type(raw[name]) is not kind for name, kind in _FIELDS.items()):
        return None
    if raw["bed"] != path.stem or not 0 < raw["pid"] < _MAX_PID:
        return None
    if not _are_ours(raw["namespaces"], _NAMESPACE) or not _are_ours(raw["cgroups"], _CGROUP):
        return None
    return Journal(**{**raw, "namespaces": tuple(raw["namespaces"]), "cgroups": tuple(raw["cgroups"])})


def _are_ours(names: list, pattern: re.Pattern) -> bool:
    return all(isinstance(name, str) and pattern.fullmatch(name) for name in names)


def sweep() -> int:
    """Removes the leftovers of launchers that have ended; returns the number of launchers."""
    stale = [j for j in map(load, directory().glob("mm*.json")) if j is not None and j.is_stale]
    for journal in stale:
        remove(journal)
    return len(stale)


def remove(journal: Journal, limit_s: float = 10.0) -> None:
    """Removes everything that a journal lists, then the journal; missing entries are no error."""
    deadline = time.monotonic() + limit_s
    for cgroup in reversed(journal.cgroups):
        while not _remove_cgroup(cgroup):
            if time.monotonic() > deadline:
                print(f"mixmesh testbed: cannot remove {cgroup}; it stays in {journal.path}", file=sys.stderr)
                return
            time.sleep(0.01)
    existing = {line.split()[0] for line in command("ip", "netns", "list").splitlines() if line.strip()}
    for name in journal.namespaces:
        if name in existing:
            command("ip", "netns", "del", name, check=False)
    if journal.disk_path.is_dir():
        unmount(journal.disk_path)
        journal.disk_path.rmdir()
    for path in (journal.hosts_path, *directory().glob(f"{journal.bed}.boot*")):
        path.unlink(missing_ok=True)
    journal.path.unlink(missing_ok=True)


def _remove_cgroup(path: str) -> bool:
    if not os.path.isdir(path):
        return True
    for pid in _members(path):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:  # it still has members, or children
        return False
    return True


def _members(path: str) -> list[int]:
    # a threaded cgroup of version 2 does not allow reading the first file; a thread's id serves for a signal
    # as well
    for name in ("cgroup.procs", "cgroup.threads"):
        try:
            return [pid for pid in map(int, read(f"{path}/{name}").split()) if pid not in (0, os.getpid())]
        except OSError:
            continue
    return []
