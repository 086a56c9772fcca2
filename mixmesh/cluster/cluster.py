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

A table takes what it does not give from its ``device``; ``count`` repeats it. ``cpu_share`` is the share of
one CPU core that a device emulated by the testbed gets: its other figures then default to that share of a
CPU core, its memory to 2 GiB, and its machine's link to 20 Gbit/s and 30 us, as gloo has over loopback.

The clusters of the papers are files of the package: ``Cluster.load("hap-32")`` (``mixmesh/cluster/presets``).
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import itertools
import json
import math
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Literal

from ..base.lazy import lazy
from ..base.units import GBIT, GBYTE, GIB, MICRO, ONE, TFLOP, in_gib, in_unit, plural, si, si_bytes
from ..errors import ClusterError
from .catalogue import CATALOGUE
from .file import ClusterTable, DeviceTable, MachineTable, machine_name, read_tables

# One core of a current server CPU with AVX2, as a matrix product in PyTorch uses it.
CPU_CORETFLOP_PER_S = Decimal("0.05")
CPU_CORE_MEMORYGBYTE_PER_S = Decimal(10)
CPU_DEVICE_MEMORY_GIB = Decimal(2)

PCIE_LINK = (Decimal(100), Decimal(10))  # Gbit/s, us
LOOPBACK_LINK = (Decimal(20), Decimal(30))

PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class Device:
    """One accelerator. Devices of equal ``name`` are of one type: what was measured on one holds for all.

    ``flop_per_s`` is the fp32 peak without TF32, ``half_flop_per_s`` the fp16/bf16 peak. ``cpu_share`` is
    set on devices that the testbed emulates; ``kind`` says where the computing happens.
    """

    name: str
    flop_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    cpu_share: float | None = None
    kind: Literal["gpu", "cpu"] = "gpu"
    half_flop_per_s: float = 0.0  # 0: as flop_per_s
    supports_bf16: bool = False

    def __post_init__(self) -> None:
        if not self.half_flop_per_s:
            object.__setattr__(self, "half_flop_per_s", self.flop_per_s)
        _require_positive(
            self, "flop_per_s", "half_flop_per_s", "memory_bytes", "memory_bytes_per_s", "cpu_share"
        )
        if self.cpu_share is not None and self.cpu_share > 1:
            raise ClusterError("cpu_share is above 1", expected="at most one core", got=str(self.cpu_share))


@dataclass(frozen=True)
class Machine:
    """Devices joined by one link; ``nic_bytes_per_s`` limits what they exchange with other machines.
    ``price_per_hour`` is in any currency, that of the other machines."""

    name: str
    devices: tuple[Device, ...]
    link_bytes_per_s: float
    link_latency_s: float
    nic_bytes_per_s: float
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        _require_positive(self, "link_bytes_per_s", "nic_bytes_per_s")
        if not self.devices:
            raise ClusterError(f'machine "{self.name}" has no devices', expected="at least one device")


@dataclass(frozen=True)
class Cluster:
    """Machines on one network, whose bandwidth is that of a path between two of them."""

    name: str
    machines: tuple[Machine, ...]
    bandwidth_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        _require_positive(self, "bandwidth_bytes_per_s")
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
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ClusterError(
                f"cannot read the cluster file: {reason}",
                expected="a TOML file, or one of the presets " + ", ".join(presets()),
                where=str(path),
                hint=tuple(f'cluster="{n}"' for n in difflib.get_close_matches(str(path), presets(), 2)),
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
        """All devices in rank order."""
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

    def bandwidth_between(self, rank_a: int, rank_b: int) -> float:
        """Bytes per second from one rank to another with nothing else going on; infinite to itself."""
        if rank_a == rank_b:
            return math.inf
        a, b = self.machine_index_of(rank_a), self.machine_index_of(rank_b)
        if a == b:
            return self.machines[a].link_bytes_per_s
        nics = (self.machines[a].nic_bytes_per_s, self.machines[b].nic_bytes_per_s)
        return min(self.bandwidth_bytes_per_s, *nics)

    def latency_between(self, rank_a: int, rank_b: int) -> float:
        """Seconds before the first byte arrives; 0 to itself."""
        if rank_a == rank_b:
            return 0.0
        a, b = self.machine_index_of(rank_a), self.machine_index_of(rank_b)
        return self.machines[a].link_latency_s if a == b else self.latency_s

    @lazy
    def fingerprint(self) -> str:
        """12 hex digits of everything that affects a plan: all but names and prices."""
        facts = dataclasses.asdict(self)
        del facts["name"]
        for machine in facts["machines"]:
            del machine["name"], machine["price_per_hour"]
        return hashlib.sha256(json.dumps(_as_floats(facts), sort_keys=True).encode()).hexdigest()[:12]

    def describe(self) -> str:
        """A few lines for people."""
        gbit = 8e-9
        lines = [
            f"{self.name}: {plural(self.world_size, 'device')} in {plural(len(self.machines), 'machine')}, "
            f"network {self.bandwidth_bytes_per_s * gbit:.3g} Gbit/s {self.latency_s * 1e6:.3g} us "
            f"({self.fingerprint})"
        ]
        for index, machine in enumerate(self.machines):
            lines.append(
                f"  {machine.name}: link {machine.link_bytes_per_s * gbit:.3g} Gbit/s, "
                f"nic {machine.nic_bytes_per_s * gbit:.3g} Gbit/s"
            )
            for rank, device in zip(self.ranks_of(index), machine.devices):
                share = f", {device.cpu_share:g} of a CPU core" if device.cpu_share else ""
                memory = f"{device.memory_bytes / GIB:.3g} GiB at {device.memory_bytes_per_s / 1e9:.3g} GB/s"
                speed = f"{device.flop_per_s / 1e12:.3g} TFLOP/s"
                lines.append(f"    rank {rank}  {device.name}  {speed}, {memory}{share}")
        return "\n".join(lines)

    def to_toml(self) -> str:
        """The cluster file, every figure written out: ``Cluster.parse(c.to_toml()) == c``."""
        lines = [
            f"name = {_toml_string(self.name)}",
            "[network]",
            f"bandwidth_gbit_per_s = {in_unit(self.bandwidth_bytes_per_s, GBIT)}",
            f"latency_us = {in_unit(self.latency_s, MICRO)}",
        ]
        for machine in self.machines:
            lines += [
                "[[machine]]",
                f"name = {_toml_string(machine.name)}",
                f"link_gbit_per_s = {in_unit(machine.link_bytes_per_s, GBIT)}",
                f"link_latency_us = {in_unit(machine.link_latency_s, MICRO)}",
                f"nic_gbit_per_s = {in_unit(machine.nic_bytes_per_s, GBIT)}",
                *_price_toml(machine),
                "devices = [",
                *(f"  {_device_toml(device)}," for device in machine.devices),
                "]",
            ]
        return "\n".join(lines) + "\n"


def with_faster_links(cluster: Cluster, *, inside: float = 1.0, between: float = 1.0) -> Cluster:
    """``cluster`` with links inside machines, and those between them, faster by these factors."""
    machines = tuple(
        dataclasses.replace(
            machine,
            link_bytes_per_s=inside * machine.link_bytes_per_s,
            nic_bytes_per_s=between * machine.nic_bytes_per_s,
        )
        for machine in cluster.machines
    )
    bandwidth = between * cluster.bandwidth_bytes_per_s
    return dataclasses.replace(cluster, machines=machines, bandwidth_bytes_per_s=bandwidth)


def presets() -> tuple[str, ...]:
    """Names that ``Cluster.load`` knows, the small ones of a family first."""
    names = (path.stem for path in PRESETS.glob("*.toml"))
    return tuple(sorted(names, key=lambda n: [int(p) if p.isdigit() else p for p in n.split("-")]))


def _build(tables: ClusterTable) -> Cluster:
    if tables.network is not None:
        network = (tables.network.bandwidth_gbit_per_s, tables.network.latency_us)
    else:  # one machine: nothing crosses the network
        network = _link(tables.machine[0])
    machines = tuple(_machine(table, i, network[0]) for i, table in enumerate(tables.machine))
    name = tables.name if tables.name is not None else "cluster"
    return Cluster(name, machines, si(network[0], GBIT), si(network[1], MICRO))


def _link(table: MachineTable) -> tuple[Decimal, Decimal]:
    emulated = any(device.cpu_share is not None for device in table.devices)
    bandwidth, latency = LOOPBACK_LINK if emulated else PCIE_LINK
    return _first(table.link_gbit_per_s, bandwidth), _first(table.link_latency_us, latency)


def _machine(table: MachineTable, index: int, network_gbit_per_s: Decimal) -> Machine:
    bandwidth, latency = _link(table)
    return Machine(
        name=machine_name(table, index),
        devices=tuple(_device(device) for device in table.devices for _ in range(device.count)),
        link_bytes_per_s=si(bandwidth, GBIT),
        link_latency_s=si(latency, MICRO),
        nic_bytes_per_s=si(_first(table.nic_gbit_per_s, network_gbit_per_s), GBIT),
        price_per_hour=None if table.price_per_hour is None else float(table.price_per_hour),
    )


def _device(table: DeviceTable) -> Device:
    row = CATALOGUE[table.device] if table.device is not None else None
    share = table.cpu_share if table.cpu_share is not None else Decimal(1)
    tflop_per_s = _first(table.tflop_per_s, row and row.tflop_per_s, CPU_CORETFLOP_PER_S * share)
    half = _first(
        table.half_tflop_per_s, row.half_tflop_per_s if row and table.tflop_per_s is None else tflop_per_s
    )
    memory_gib = _first(table.memory_gib, row and row.memory_gib, CPU_DEVICE_MEMORY_GIB)
    memory_gbyte_per_s = _first(
        table.memory_gbyte_per_s, row and row.memory_gbyte_per_s, CPU_CORE_MEMORYGBYTE_PER_S * share
    )
    name = row.name if row else "cpu"
    if table.cpu_share is not None:
        name += f"@{table.cpu_share}"
    return Device(
        name=_first(table.name, name),
        flop_per_s=si(tflop_per_s, TFLOP),
        memory_bytes=si_bytes(memory_gib),
        memory_bytes_per_s=si(memory_gbyte_per_s, GBYTE),
        cpu_share=None if table.cpu_share is None else float(table.cpu_share),
        kind=_first(table.kind, "gpu" if table.cpu_share is None else "cpu"),
        half_flop_per_s=si(half, TFLOP),
        supports_bf16=_first(table.supports_bf16, row is not None and row.supports_bf16),
    )


def _check_types_agree(cluster: Cluster, tables: ClusterTable, where: str) -> None:
    """A device's name is its type: measurements are kept by it, so two types may not share one."""
    keys = [
        f"machine[{m}].devices[{d}]"
        for m, machine in enumerate(tables.machine)
        for d, table in enumerate(machine.devices)
        for _ in range(table.count)
    ]
    seen: dict[str, tuple[str, Device]] = {}
    for key, device in zip(keys, cluster.devices):
        other_key, other = seen.setdefault(device.name, (key, device))
        for field in (f.name for f in dataclasses.fields(Device)):
            one, two = getattr(other, field), getattr(device, field)
            if one != two:
                raise ClusterError(
                    f'two devices are named "{device.name}" but differ in {field}',
                    expected=f"{one}, as {other_key} has",
                    got=f"{two}",
                    where=f"{where}: {key}",
                    hint=f'give one of them a name of its own: name = "{device.name}-b"',
                )


def _device_toml(device: Device) -> str:
    pairs = {
        "name": _toml_string(device.name),
        "kind": _toml_string(device.kind),
        "tflop_per_s": in_unit(device.flop_per_s, TFLOP),
        "half_tflop_per_s": in_unit(device.half_flop_per_s, TFLOP),
        "supports_bf16": json.dumps(device.supports_bf16),
        "memory_gib": in_gib(device.memory_bytes),
        "memory_gbyte_per_s": in_unit(device.memory_bytes_per_s, GBYTE),
    }
    if device.cpu_share is not None:
        pairs["cpu_share"] = in_unit(device.cpu_share, ONE)
    return "{ " + ", ".join(f"{key} = {value}" for key, value in pairs.items()) + " }"


def _price_toml(machine: Machine) -> list[str]:
    price = machine.price_per_hour
    return [] if price is None else [f"price_per_hour = {in_unit(price, ONE)}"]


def _toml_string(text: str) -> str:
    # JSON's escapes are TOML's, but for characters above U+FFFF, and for U+007F, which TOML wants escaped
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _first(*values):
    return next(value for value in values if value is not None)


def _require_positive(owner: Device | Machine | Cluster, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ClusterError(
                f'{name} of {type(owner).__name__.lower()} "{owner.name}" is not usable',
                expected="a finite number above 0",
                got=str(value),
            )


def _as_floats(value):
    """``1`` and ``1.0`` are the same figure."""
    if isinstance(value, dict):
        return {key: _as_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_floats(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
