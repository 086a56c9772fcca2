"""A record of what a launcher is about to create, and the only list that anything is removed from.

It is written before the first thing is made, so a launcher that dies at any moment leaves a complete list;
the next start sweeps it. Only processes inside the listed cgroups are ever killed.
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

from .system import command, read, start_time, unmount

_NAMESPACE = re.compile(r"mm[0-9a-f]{8}(sw|m\d+)")
_FIELDS = {"bed": str, "pid": int, "start_time": str, "namespaces": list, "cgroups": list}  # in the file
_MAX_PID = 2**22  # Linux allows no larger one
_CGROUP = re.compile(r"/[^\0]*/mm[0-9a-f]{8}(/r\d+(free)?(/compute|/free)?)?")


@dataclass(frozen=True)
class Journal:
    bed: str
    pid: int
    start_time: str
    namespaces: tuple[str, ...]
    cgroups: tuple[str, ...]  # parents first

    def save(self) -> None:
        directory().mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(asdict(self)))
        os.replace(unfinished, self.path)

    @property
    def path(self) -> Path:
        return directory() / f"{self.bed}.json"

    @property
    def hosts_path(self) -> Path:
        """The machines' names, for the ranks to see as ``/etc/hosts``; goes with the journal."""
        return directory() / f"{self.bed}.hosts"

    def boot_path(self, machine: int) -> Path:
        """The boot id of a machine; goes with the journal."""
        return directory() / f"{self.bed}.boot{machine}"

    @property
    def disk_path(self) -> Path:
        """Where a disk of limited size is mounted, if one was asked for; goes with the journal."""
        return directory() / f"{self.bed}.disk"

    @property
    def is_stale(self) -> bool:
        """The launcher has ended, or another process has its id by now."""
        return start_time(self.pid) != self.start_time


def directory() -> Path:
    # /run belongs to root: nobody else can put a list of things to remove there
    run = Path("/run")
    return (run if os.access(run, os.W_OK) else Path(tempfile.gettempdir())) / "mixmesh-testbed"


def load(path: Path) -> Journal | None:
    """None for anything that this module did not write."""
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
    """Remove what launchers that have ended left behind; how many of them."""
    stale = [j for j in map(load, directory().glob("mm*.json")) if j is not None and j.is_stale]
    for journal in stale:
        remove(journal)
    return len(stale)


def remove(journal: Journal, limit_s: float = 10.0) -> None:
    """Everything in the journal, then the journal; what is gone already is no error."""
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
    except OSError:  # still has members, or children
        return False
    return True


def _members(path: str) -> list[int]:
    # a threaded cgroup of version 2 refuses the first file: its threads' ids do as well for a signal
    for name in ("cgroup.procs", "cgroup.threads"):
        try:
            return [pid for pid in map(int, read(f"{path}/{name}").split()) if pid not in (0, os.getpid())]
        except OSError:
            continue
    return []
