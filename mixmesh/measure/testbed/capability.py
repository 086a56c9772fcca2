"""Finds out whether this machine and this user can emulate a cluster, by trying in a temporary namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

from ...errors import TestbedUnavailable
from .cgroups import find_mounts
from .system import CLONE_NEWNET, call, libc

FORCE_PLAIN_VARIABLE = "MIXMESH_TESTBED_FORCE_PLAIN"

_TRIALS = (
    ("bridges", "ip link add br0 type bridge"),
    ("veth pairs", "ip link add v0 type veth peer name v1"),
    ("rate limits (tc tbf)", "tc qdisc add dev lo root tbf rate 1gbit burst 70000 limit 64000000"),
)


@dataclass(frozen=True)
class Capability:
    """Whether a cluster can be emulated: ``missing`` has a line for each thing that is missing."""

    missing: tuple[str, ...]
    cgroup_version: int | None = None

    @property
    def possible(self) -> bool:
        return not self.missing

    def __str__(self) -> str:
        if self.possible:
            return f"a mixed cluster can be emulated here (cgroup v{self.cgroup_version})"
        return "a mixed cluster cannot be emulated here: " + "; ".join(self.missing)

    def require(self) -> None:
        """Raises ``TestbedUnavailable`` if anything is missing."""
        if not self.possible:
            raise TestbedUnavailable(
                "a mixed cluster cannot be emulated here",
                expected="Linux, root, ip and tc (iproute2), cgroups with cpu and memory",
                got="; ".join(self.missing),
                hint="run as root on a Linux machine, or use the plain multi-process run",
            )


def probe() -> Capability:
    """Tries all that an emulated cluster needs."""
    if os.environ.get(FORCE_PLAIN_VARIABLE, "") not in ("", "0"):
        return Capability((f"{FORCE_PLAIN_VARIABLE} is set",))
    if os.uname().sysname != "Linux":
        return Capability((f"the system is {os.uname().sysname}, not Linux",))
    missing = [] if os.geteuid() == 0 else ["not root"]
    tools = [name for name in ("ip", "tc") if shutil.which(name) is None]
    missing += [f"no command {name} (package iproute2)" for name in tools]
    if not missing:
        missing += _try_network()
    version, reasons = _cgroup_version()
    return Capability((*missing, *reasons), version)


def _try_network() -> list[str]:
    """Tries network commands in a namespace that ends with its shell; returns a line for each failure."""
    script = "\n".join(f"{text} 2>&1 || echo 'failed: {name}'" for name, text in _TRIALS)
    try:
        ended = subprocess.run(
            ["sh", "-c", script],
            preexec_fn=lambda: call(libc.unshare, CLONE_NEWNET),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ["no network namespaces"]
    failed = [
        line.removeprefix("failed: ") for line in ended.stdout.splitlines() if line.startswith("failed: ")
    ]
    return [f"no {name}" for name in failed]


def _cgroup_version() -> tuple[int | None, list[str]]:
    mounts, unified = find_mounts()
    if unified is not None:
        writable = os.access(unified, os.W_OK)
        return 2, [] if writable else [f"{unified} is not writable"]
    reasons = [f"no cgroup controller {name}" for name in ("cpu", "cpuacct", "memory") if name not in mounts]
    reasons += [
        f"{path} is not writable" for path in dict.fromkeys(mounts.values()) if not os.access(path, os.W_OK)
    ]
    return (1 if mounts else None), reasons
