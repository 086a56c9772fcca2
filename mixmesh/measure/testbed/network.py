"""Machines as network namespaces, connected by a bridge in a separate namespace.

The host's own network does not change. Token buckets limit a machine's rate in both directions: for sending
at its ``eth0``, for receiving at the bridge's end. Not emulated are latency beyond the natural one (about 30
us; many kernels lack netem), and the link inside a machine, which is loopback.
"""

from __future__ import annotations

import os

from .system import command

LIMIT_BYTES = 64_000_000  # so large a queue that senders wait and no packets are lost
MTU = 1500
OUTSIDE = "10.77.254.254"  # the address outside of all machines, which no fault of a machine affects


def burst_bytes(bytes_per_s: float) -> int:
    """About 0.5 ms at line rate, and at least one segment of 64 KB: with 8 kB, 1 Gbit/s becomes 561
    Mbit/s."""
    return int(max(70_000, bytes_per_s * 0.0005))


class Network:
    """The namespaces of one bed. ``namespaces`` lists them before they exist, for the journal."""

    def __init__(self, bed: str, num_machines: int) -> None:
        self._switch = f"{bed}sw"
        self._machines = [f"{bed}m{index}" for index in range(num_machines)]

    @property
    def namespaces(self) -> list[str]:
        return [self._switch, *self._machines]

    def namespace(self, machine: int | None) -> str:
        return self._switch if machine is None else self._machines[machine]

    def address(self, machine: int | None) -> str:
        if machine is None:
            return OUTSIDE
        return f"10.77.{(machine + 1) // 256}.{(machine + 1) % 256}"

    def create(self) -> None:
        command("ip", "netns", "add", self._switch)
        command("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        command("ip", "-n", self._switch, "addr", "add", f"{OUTSIDE}/16", "dev", "br0")
        command("ip", "-n", self._switch, "link", "set", "br0", "up")
        command("ip", "-n", self._switch, "link", "set", "lo", "up")
        # the host's firewall must not filter packets between the machines
        for name in ("iptables", "ip6tables", "arptables"):
            self._sysctl(self._switch, f"net/bridge/bridge-nf-call-{name}", 0)
        for machine in range(len(self._machines)):
            self._create_machine(machine)

    def _create_machine(self, machine: int) -> None:
        name, port = self._machines[machine], f"v{machine}"
        command("ip", "netns", "add", name)
        ends = (port, "mtu", MTU, "type", "veth", "peer", "name", "eth0", "mtu", MTU, "netns", name)
        command("ip", "-n", self._switch, "link", "add", *ends)
        command("ip", "-n", self._switch, "link", "set", port, "master", "br0", "up")
        command("ip", "-n", name, "addr", "add", f"{self.address(machine)}/16", "dev", "eth0")
        command("ip", "-n", name, "link", "set", "eth0", "up")
        command("ip", "-n", name, "link", "set", "lo", "up")
        self._sysctl(name, "net/ipv4/tcp_congestion_control", "reno")
        self._sysctl(name, "net/ipv4/tcp_slow_start_after_idle", 0)

    def set_rate(self, machine: int, bytes_per_s: float) -> None:
        for namespace, port in ((self._machines[machine], "eth0"), (self._switch, f"v{machine}")):
            bucket = (
                "rate",
                f"{int(bytes_per_s * 8)}bit",
                "burst",
                burst_bytes(bytes_per_s),
                "limit",
                LIMIT_BYTES,
            )
            command("tc", "-n", namespace, "qdisc", "replace", "dev", port, "root", "tbf", *bucket)

    def set_link(self, machine: int, is_up: bool) -> None:
        command("ip", "-n", self._machines[machine], "link", "set", "eth0", "up" if is_up else "down")

    def _sysctl(self, namespace: str, key: str, value: object) -> None:
        # a kernel without this setting needs nothing
        script = f"test ! -e /proc/sys/{key} || echo {value} > /proc/sys/{key}"
        command("ip", "netns", "exec", namespace, "sh", "-c", script, check=False)


def open_namespace(name: str) -> int:
    return os.open(f"/run/netns/{name}", os.O_RDONLY)
