"""The cluster: devices in machines, machines on a network. Frozen values in SI base units.

A rank is a device's index in the order of the file. ``Cluster.load`` reads the TOML form::

    name = "two boxes"
    [network]                                # may be left out when there is one machine
    bandwidth_gbit_per_s = 10.4
    latency_us = 30                          # default 50
    [[machine]]
    name = "a"                               # default: machine0, machine1, ...
    devices = ["V100-16GB", "Tesla T4"]      # names from mixmesh.cluster.catalogue, or PyTorch's
    link_gbit_per_s = 160                    # inside the machine; default 100 (PCIe 3.0 x16 in practice)
    link_latency_us = 10                     # default
    [[machine]]
    nic_gbit_per_s = 10.4                    # this machine's own limit; default: the network's bandwidth
    price_per_hour = 1.2                     # of this machine; may be left out: for mixmesh what-if alone
    devices = [{ name = "slow", tflop_per_s = 4.3, memory_gib = 12, memory_gbyte_per_s = 500 }]
    [[machine]]
    devices = [{ device = "V100-16GB", memory_gib = 12, name = "V100-12GB", count = 2 }, { cpu_share = 0.35 }]

A table takes what it does not give from its ``device``, by its calibration where there is one; ``count``
repeats it. ``cpu_share`` is the share of one CPU core that a device emulated by the testbed gets: its other
figures then default to that share of a CPU core, its memory to 2 GiB, and its machine's link to 20 Gbit/s and
30 us, as gloo has over loopback.

The clusters of the papers are files of the package: ``Cluster.load("hap-32")`` (``mixmesh/cluster/presets``).
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import itertools
import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Literal

from ..base.lazy import lazy
from ..base.units import (
    GBIT,
    MICRO,
    ONE,
    flop_rate_text,
    in_unit,
    link_text,
    memory_rate_text,
    plural,
    seconds_text,
    si,
    size_text,
)
from ..errors import ClusterError, unreadable
from .device import Device, device_of, device_pairs, device_toml, first, require_positive
from .file import ClusterTable, MachineTable, machine_name, read_tables
from .toml import toml_string

PCIE_LINK = (Decimal(100), Decimal(10))  # Gbit/s, us
LOOPBACK_LINK = (Decimal(20), Decimal(30))

PRESETS = Path(__file__).parent / "presets"
LATER_FIELDS = (
    "tf32_flop_per_s", "issue_s", "sustained", "efficiency", "backward_issue_s", "optimizer_s_per_byte",
    "context_bytes", "kernel_bytes",
)  # fmt: skip
# Cards behind one host bridge without peer-to-peer access were measured to share 1.6 to 5 GB/s
BRIDGE_GBIT_PER_S = Decimal(24)


@dataclass(frozen=True)
class DeviceLink:
    """A separate link between some devices of a machine, such as an NVLink bridge between two; ``devices``
    are their numbers within the machine. Each device has its own path onto it."""

    devices: tuple[int, ...]
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Machine:
    """Devices joined by links; ``nic_bytes_per_s`` limits their exchange with other machines.

    Two devices have their own link (``links``), or else reach each other at ``link_bytes_per_s``. All pairs
    of the second kind share ``bridge_bytes_per_s``, if there is such a limit: a host bridge without
    peer-to-peer access (``p2p``). ``price_per_hour`` is in any currency, the same for all machines.
    """

    name: str
    devices: tuple[Device, ...]
    link_bytes_per_s: float
    link_latency_s: float
    nic_bytes_per_s: float
    price_per_hour: float | None = None
    links: tuple[DeviceLink, ...] = ()
    p2p: bool = True
    bridge_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        require_positive(self, "link_bytes_per_s", "nic_bytes_per_s", "bridge_bytes_per_s")
        if not self.devices:
            raise ClusterError(f'machine "{self.name}" has no devices', expected="at least one device")

    @property
    def title(self) -> str:
        """The machine's name in a sentence: ``machine a``, or just ``machine0``."""
        return self.name if self.name.startswith("machine") else f"machine {self.name}"

    @property
    def wiring(self) -> tuple[float, float, float, str]:
        """All differences between machines of equal devices, as a sort key."""
        more = str((self.links, self.bridge_bytes_per_s))
        return self.link_bytes_per_s, self.link_latency_s, self.nic_bytes_per_s, more

    @lazy
    def _link_of(self) -> dict[tuple[int, int], int]:
        return {(a, b): n for n, link in enumerate(self.links) for a in link.devices for b in link.devices}

    def link_between(self, a: int, b: int) -> int | None:
        """The number of the separate link between two of its devices; None without one."""
        return self._link_of.get((a, b))


@dataclass(frozen=True)
class Cluster:
    """Machines on one network; the bandwidth is that of a path between two of them. ``network_kind`` says how
    GPUs use it, which decides the share of the wire's rate that collectives reach."""

    name: str
    machines: tuple[Machine, ...]
    bandwidth_bytes_per_s: float
    latency_s: float
    network_kind: Literal["tcp", "rdma"] = "tcp"

    def __post_init__(self) -> None:
        require_positive(self, "bandwidth_bytes_per_s")
        if not self.machines:
            raise ClusterError(f'cluster "{self.name}" has no machines', expected="at least one machine")

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster file, or a preset if there is no file of that name. Raises ``ClusterError``."""
        if str(path) in presets() and not Path(path).exists():
            path = PRESETS / f"{path}.toml"
        try:
            text = Path(path).read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ClusterError(
                "the cluster file is not text in UTF-8",
                expected="a TOML file",
                got=f"byte 0x{error.object[error.start]:02x} at offset {error.start}",
                where=str(path),
            ) from None
        except (OSError, ValueError) as error:
            raise unreadable(
                "the cluster file",
                path,
                error,
                ClusterError,
                expected="a TOML file, or one of the presets " + ", ".join(presets()),
                hint=_near_files(Path(path)),
            ) from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, where: str = "<string>") -> Cluster:
        """Read the TOML form from text; ``where`` names it in errors. Raises ``ClusterError``."""
        tables = read_tables(text, where)
        cluster = _build(tables)
        _check_types_agree(cluster, tables, where)
        return cluster

    @lazy
    def devices(self) -> tuple[Device, ...]:
        """The devices of all machines in rank order."""
        return tuple(device for machine in self.machines for device in machine.devices)

    @property
    def world_size(self) -> int:
        return len(self.devices)

    @lazy
    def _machine_indices(self) -> tuple[int, ...]:
        return tuple(i for i, machine in enumerate(self.machines) for _ in machine.devices)

    def machine_index_of(self, rank: int) -> int:
        indices = self._machine_indices
        if not 0 <= rank < len(indices):
            raise IndexError(f"rank {rank} of a cluster of {len(indices)} devices")
        return indices[rank]

    def machine_of(self, rank: int) -> Machine:
        return self.machines[self.machine_index_of(rank)]

    @lazy
    def _ranks_by_machine(self) -> tuple[tuple[int, ...], ...]:
        ends = list(itertools.accumulate(len(machine.devices) for machine in self.machines))
        return tuple(tuple(range(start, end)) for start, end in zip([0, *ends], ends))

    def ranks_of(self, machine_index: int) -> tuple[int, ...]:
        return self._ranks_by_machine[machine_index]

    @lazy
    def _by_machine(self) -> dict[tuple[int, ...], dict[int, tuple[int, ...]]]:
        return {}

    def by_machine(self, ranks: tuple[int, ...]) -> Mapping[int, tuple[int, ...]]:
        """Ranks by the index of their machine, in their order. Cached, because planning asks thousands of
        times for the same few groups."""
        if ranks not in self._by_machine:
            parts: dict[int, list[int]] = {}
            for rank in ranks:
                parts.setdefault(self.machine_index_of(rank), []).append(rank)
            self._by_machine[ranks] = {m: tuple(mine) for m, mine in parts.items()}
        return self._by_machine[ranks]

    def bandwidth_between(self, rank_a: int, rank_b: int) -> float:
        """Bytes per second from one rank to another when nothing else is sent; infinite from a rank to
        itself."""
        if rank_a == rank_b:
            return math.inf
        a, b = self.machine_index_of(rank_a), self.machine_index_of(rank_b)
        if a == b:
            machine, link = self.machines[a], self.link_between(rank_a, rank_b)
            if link is not None:
                return link.bytes_per_s
            return min(machine.link_bytes_per_s, machine.bridge_bytes_per_s or math.inf)
        nics = (self.machines[a].nic_bytes_per_s, self.machines[b].nic_bytes_per_s)
        return min(self.bandwidth_bytes_per_s, *nics)

    def latency_between(self, rank_a: int, rank_b: int) -> float:
        """Seconds before the first byte arrives; 0 from a rank to itself."""
        if rank_a == rank_b:
            return 0.0
        a, b = self.machine_index_of(rank_a), self.machine_index_of(rank_b)
        if a != b:
            return self.latency_s
        link = self.link_between(rank_a, rank_b)
        return self.machines[a].link_latency_s if link is None else link.latency_s

    def link_between(self, rank_a: int, rank_b: int) -> DeviceLink | None:
        """The separate link between two ranks of one machine; None without one."""
        m = self.machine_index_of(rank_a)
        machine, first = self.machines[m], self.ranks_of(m)[0]
        number = machine.link_between(rank_a - first, rank_b - first) if machine.links else None
        return None if number is None else machine.links[number]

    @lazy
    def fingerprint(self) -> str:
        """12 hex digits of everything that affects a plan: all but names and prices."""
        facts = dataclasses.asdict(self)
        del facts["name"]
        _without_defaults(facts, Cluster, "network_kind")
        for machine in facts["machines"]:
            del machine["name"], machine["price_per_hour"]
            _without_defaults(machine, Machine, "links", "p2p", "bridge_bytes_per_s")
            for device in machine["devices"]:
                del device["calibrated"]  # a date
                _without_defaults(device, Device, *LATER_FIELDS)
        return hashlib.sha256(json.dumps(_as_floats(facts), sort_keys=True).encode()).hexdigest()[:12]

    def describe(self) -> str:
        """A few lines for people."""
        lines = [
            f"{self.name}: {plural(self.world_size, 'device')} in {plural(len(self.machines), 'machine')}, "
            f"network {link_text(self.bandwidth_bytes_per_s)} {seconds_text(self.latency_s)} "
            f"({self.fingerprint})"
        ]
        for index, machine in enumerate(self.machines):
            lines.append(
                f"  {machine.name}: link {link_text(machine.link_bytes_per_s)}, "
                f"nic {link_text(machine.nic_bytes_per_s)}{_inside_text(machine)}"
            )
            for rank, device in zip(self.ranks_of(index), machine.devices):
                share = f", {device.cpu_share:g} of a CPU core" if device.cpu_share else ""
                speed = flop_rate_text(device.flop_per_s)
                memory = f"{size_text(device.memory_bytes)} at {memory_rate_text(device.memory_bytes_per_s)}"
                date = f", calibrated {device.calibrated}" if device.calibrated else ""
                lines.append(f"    rank {rank}  {device.name}  {speed}, {memory}{share}{date}")
        return "\n".join(lines)

    def to_toml(self) -> str:
        """The cluster file, every figure written out: ``Cluster.parse(c.to_toml()) == c``."""
        lines = [
            f"name = {toml_string(self.name)}",
            "[network]",
            f"bandwidth_gbit_per_s = {in_unit(self.bandwidth_bytes_per_s, GBIT)}",
            f"latency_us = {in_unit(self.latency_s, MICRO)}",
            *([f'kind = "{self.network_kind}"'] if self.network_kind != "tcp" else []),
        ]
        for machine in self.machines:
            lines += [
                "[[machine]]",
                f"name = {toml_string(machine.name)}",
                f"link_gbit_per_s = {in_unit(machine.link_bytes_per_s, GBIT)}",
                f"link_latency_us = {in_unit(machine.link_latency_s, MICRO)}",
                f"nic_gbit_per_s = {in_unit(machine.nic_bytes_per_s, GBIT)}",
                *_inside_toml(machine),
                *_price_toml(machine),
                "devices = [",
                *(f"  {device_toml(device)}," for device in machine.devices),
                "]",
            ]
        return "\n".join(lines) + "\n"


def _inside_text(machine: Machine) -> str:
    links = (f", {link.devices} {link_text(link.bytes_per_s)}" for link in machine.links)
    shared = machine.bridge_bytes_per_s
    return "".join(links) + ("" if shared is None else f", all others share {link_text(shared)}")


def with_faster_links(cluster: Cluster, *, inside: float = 1.0, between: float = 1.0) -> Cluster:
    """``cluster`` with links inside machines, and those between them, faster by these factors."""
    machines = (with_faster_inside(machine, inside) for machine in cluster.machines)
    return dataclasses.replace(
        cluster,
        machines=tuple(dataclasses.replace(m, nic_bytes_per_s=between * m.nic_bytes_per_s) for m in machines),
        bandwidth_bytes_per_s=between * cluster.bandwidth_bytes_per_s,
    )


def with_faster_inside(machine: Machine, factor: float) -> Machine:
    """A machine whose devices reach each other faster by this factor."""
    bridge = machine.bridge_bytes_per_s
    return dataclasses.replace(
        machine,
        link_bytes_per_s=factor * machine.link_bytes_per_s,
        links=tuple(dataclasses.replace(x, bytes_per_s=factor * x.bytes_per_s) for x in machine.links),
        bridge_bytes_per_s=None if bridge is None else factor * bridge,
    )


def without_device(machine: Machine, number: int) -> Machine:
    """A machine without one device and its links."""
    devices = (*machine.devices[:number], *machine.devices[number + 1 :])
    kept = (
        dataclasses.replace(link, devices=tuple(n - (n > number) for n in link.devices if n != number))
        for link in machine.links
    )
    return dataclasses.replace(machine, devices=devices, links=tuple(x for x in kept if len(x.devices) > 1))


def presets() -> tuple[str, ...]:
    """Names that ``Cluster.load`` knows, the small ones of a family first."""
    names = (path.stem for path in PRESETS.glob("*.toml"))
    return tuple(sorted(names, key=lambda n: [int(p) if p.isdigit() else p for p in n.split("-")]))


def _near_files(path: Path) -> tuple[str, ...]:
    """Hints for a cluster file that is not there: presets and files of its folder with such a name, or else
    the command that writes one."""
    beside = [p.name for p in path.parent.glob("*.toml")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(str(path), presets(), 2)
    near += [str(path.parent / name) for name in difflib.get_close_matches(path.name, beside, 2)]
    if near or path.exists():
        return tuple(f'cluster="{name}"' for name in near)
    return (f"torchrun --nproc-per-node gpu -m mixmesh detect --out {shlex.quote(str(path))}",)


def _build(tables: ClusterTable) -> Cluster:
    if tables.network is not None:
        network = (tables.network.bandwidth_gbit_per_s, tables.network.latency_us)
    else:  # one machine: nothing crosses the network
        network = _link(tables.machine[0])
    machines = tuple(_machine(table, i, network[0]) for i, table in enumerate(tables.machine))
    name = tables.name if tables.name is not None else "cluster"
    kind = "tcp" if tables.network is None else tables.network.kind
    return Cluster(name, machines, si(network[0], GBIT), si(network[1], MICRO), kind)


def _link(table: MachineTable) -> tuple[Decimal, Decimal]:
    emulated = any(device.cpu_share is not None for device in table.devices)
    bandwidth, latency = LOOPBACK_LINK if emulated else PCIE_LINK
    return first(table.link_gbit_per_s, bandwidth), first(table.link_latency_us, latency)


def _machine(table: MachineTable, index: int, network_gbit_per_s: Decimal) -> Machine:
    bandwidth, latency = _link(table)
    bridge = table.bridge_gbit_per_s
    if bridge is None and not table.p2p:
        bridge = min(bandwidth, BRIDGE_GBIT_PER_S)
    return Machine(
        name=machine_name(table, index),
        devices=tuple(device_of(device) for device in table.devices for _ in range(device.count)),
        link_bytes_per_s=si(bandwidth, GBIT),
        link_latency_s=si(latency, MICRO),
        nic_bytes_per_s=si(first(table.nic_gbit_per_s, network_gbit_per_s), GBIT),
        price_per_hour=None if table.price_per_hour is None else float(table.price_per_hour),
        links=tuple(
            DeviceLink(
                tuple(link.devices), si(link.gbit_per_s, GBIT), si(first(link.latency_us, latency), MICRO)
            )
            for link in table.links or ()
        ),
        p2p=table.p2p,
        bridge_bytes_per_s=None if bridge is None else si(bridge, GBIT),
    )


def _check_types_agree(cluster: Cluster, tables: ClusterTable, where: str) -> None:
    """Raises ClusterError if two types of devices share a name: measurements are kept by name."""
    keys = [
        f"machine[{m}].devices[{d}]"
        for m, machine in enumerate(tables.machine)
        for d, table in enumerate(machine.devices)
        for _ in range(table.count)
    ]
    seen: dict[str, tuple[str, Device]] = {}
    for key, device in zip(keys, cluster.devices):
        other_key, other = seen.setdefault(device.name, (key, device))
        if other == device:
            continue
        one, two = device_pairs(other), device_pairs(device)
        figure = next(name for name in {**one, **two} if one.get(name) != two.get(name))
        raise ClusterError(
            f'two devices are named "{device.name}" but differ in {figure}',
            expected=f"{figure} = {one[figure]}, as {other_key} has" if figure in one else f"no {figure}",
            got=f"{figure} = {two[figure]}" if figure in two else f"no {figure}",
            where=f"{where}: {key}",
            hint=f'give one of them a name of its own: name = "{device.name}-b"',
        )


def _inside_toml(machine: Machine) -> list[str]:
    lines = [] if machine.p2p else ["p2p = false"]
    if machine.bridge_bytes_per_s is not None:
        lines.append(f"bridge_gbit_per_s = {in_unit(machine.bridge_bytes_per_s, GBIT)}")
    tables = [
        f"{{ devices = {list(link.devices)}, gbit_per_s = {in_unit(link.bytes_per_s, GBIT)}, "
        f"latency_us = {in_unit(link.latency_s, MICRO)} }}"
        for link in machine.links
    ]
    return [*lines, *([f"links = [{', '.join(tables)}]"] if tables else [])]


def _price_toml(machine: Machine) -> list[str]:
    price = machine.price_per_hour
    return [] if price is None else [f"price_per_hour = {in_unit(price, ONE)}"]


def _without_defaults(facts: dict, owner: type[Cluster | Machine | Device], *names: str) -> None:
    """Removes fields that early files did not have if they have their defaults, so that fingerprints stay the
    same."""
    for field in dataclasses.fields(owner):
        if field.name in names and facts[field.name] == field.default:
            del facts[field.name]


def _as_floats(value):
    """Converts integers to floats, so that ``1`` and ``1.0`` are the same figure."""
    if isinstance(value, dict):
        return {key: _as_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_floats(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
