"""Single changes of a cluster or of the batch. Equal devices and machines count once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...base.units import GBIT, GIB, number_text, si
from ...cluster import Cluster, Device, Machine, with_faster_inside, with_faster_links, without_device
from ...cluster.catalogue import CATALOGUE
from ...cluster.devices_folder import names_meant
from ...cluster.spelling import devices_like
from ...cluster.toml import toml_string
from ...errors import InputError

CARDS_GBIT_PER_S = (10, 25, 100)  # rates of network cards on the market; the next faster one is tried
FASTER = 2  # factor by which links are made faster
MORE_MEMORY = 2  # factor by which devices get more memory


@dataclass(frozen=True)
class Change:
    """One change: ``kind`` is its word for ``--only``, ``text`` its description for people. The batch has
    ``batches`` times its samples. ``adds_price``: the prices in the cluster file do not include its cost."""

    kind: str
    text: str
    cluster: Cluster
    batches: int = 1
    adds_price: bool = False


def changes(cluster: Cluster, swaps: Sequence[str] = ()) -> tuple[Change, ...]:
    """All changes of ``cluster``. ``swaps`` names devices of the catalogue, for which one device of each
    other type is swapped; the default is the fastest device of the cluster. Raises InputError for a name that
    the catalogue lacks."""
    others = tuple(device_of(name) for name in swaps) or (max(cluster.devices, key=_speed),)
    possible = [change for make in KINDS.values() for change in make(cluster, others)]
    return (*possible, Change("batch", "twice the batch", cluster, batches=2))


def device_of(name: str) -> Device:
    """The device of the catalogue, or of a device file, that ``name`` means. Raises InputError."""
    names = names_meant(name)
    if len(names) != 1:
        near = names or devices_like(name) or ["A100-80GB"]
        raise InputError(
            "no such device in the catalogue" if not names else "several devices have this name",
            expected=", ".join(names or CATALOGUE),
            got=name,
            hint=f"--swap {near[0]}",
        )
    text = f"[[machine]]\ndevices = [{toml_string(names[0])}]\n"
    return Cluster.parse(text, f"catalogue: {name}").devices[0]


def _speed(device: Device) -> tuple[float, float]:
    return device.flop_per_s, device.memory_bytes_per_s


def without_devices(cluster: Cluster, others: Sequence[Device]) -> Iterator[Change]:
    """One device less, once for each type in each machine that has several devices."""
    for index, machine in enumerate(cluster.machines):
        for device in dict.fromkeys(machine.devices):
            if len(machine.devices) > 1:
                count = machine.devices.count(device)
                which = device.name if count == 1 else f"one of {count} {device.name}"
                rest = without_device(machine, machine.devices.index(device))
                changed = _with_machine(cluster, index, rest)
                yield Change("device", f"without {which} of {machine.name}", changed)


def without_machines(cluster: Cluster, others: Sequence[Device]) -> Iterator[Change]:
    """One machine less."""
    if len(cluster.machines) == 1:
        return
    for index, machine in enumerate(cluster.machines):
        rest = cluster.machines[:index] + cluster.machines[index + 1 :]
        text = f"without {machine.title} ({devices_text(machine.devices)})"
        yield Change("machine", text, replace(cluster, machines=rest))


def faster_network(cluster: Cluster, others: Sequence[Device]) -> Iterator[Change]:
    """Links between machines twice as fast, and network cards of the next speed on the market."""
    if len(cluster.machines) == 1:
        return
    slowest = min(cluster.bandwidth_bytes_per_s, *(m.nic_bytes_per_s for m in cluster.machines))
    twice = f"links between machines {FASTER}x as fast"
    yield Change("network", twice, with_faster_links(cluster, between=FASTER), adds_price=True)
    for gbit_per_s in CARDS_GBIT_PER_S:
        if si(gbit_per_s, GBIT) > slowest:
            at_least = _with_network_of(cluster, si(gbit_per_s, GBIT))
            text = f"{gbit_per_s} Gbit/s between machines (now {number_text(slowest / float(GBIT))})"
            yield Change("network", text, at_least, adds_price=True)
            return


def faster_links(cluster: Cluster, others: Sequence[Device]) -> Iterator[Change]:
    """Links inside machines of several devices twice as fast."""
    for index, machine in enumerate(cluster.machines):
        if len(machine.devices) > 1:
            faster = with_faster_inside(machine, FASTER)
            text = f"links inside {machine.name} {FASTER}x as fast"
            yield Change("link", text, _with_machine(cluster, index, faster), adds_price=True)


def swapped_devices(cluster: Cluster, others: Sequence[Device]) -> Iterator[Change]:
    """One device swapped for another, once for each type in each machine."""
    for index, machine in enumerate(cluster.machines):
        for device in dict.fromkeys(machine.devices):
            for other in others:
                if other.name == device.name:
                    continue
                place = machine.devices.index(device)
                devices = (*machine.devices[:place], other, *machine.devices[place + 1 :])
                text = f"{other.name} instead of one {device.name} in {machine.name}"
                changed = _with_machine(cluster, index, replace(machine, devices=devices))
                yield Change("swap", text, changed, adds_price=True)


def more_memory(cluster: Cluster, others: Sequence[Device]) -> Iterator[Change]:
    """More memory on all devices of a type."""
    for device in dict.fromkeys(cluster.devices):
        larger = replace(device, memory_bytes=MORE_MEMORY * device.memory_bytes)

        machines = tuple(
            replace(machine, devices=tuple(larger if d == device else d for d in machine.devices))
            for machine in cluster.machines
        )
        text = f"{number_text(larger.memory_bytes / GIB)} GiB on every {device.name}"
        yield Change("memory", text, replace(cluster, machines=machines), adds_price=True)


KINDS: dict[str, Callable[[Cluster, Sequence[Device]], Iterator[Change]]] = {
    "device": without_devices,
    "machine": without_machines,
    "network": faster_network,
    "link": faster_links,
    "swap": swapped_devices,
    "memory": more_memory,
}


def devices_text(devices: Sequence[Device]) -> str:
    """``2 V100-16GB, 1 T4-16GB``."""
    names = [device.name for device in devices]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


def _with_machine(cluster: Cluster, index: int, machine: Machine) -> Cluster:
    machines = (*cluster.machines[:index], machine, *cluster.machines[index + 1 :])
    return replace(cluster, machines=machines)


def _with_network_of(cluster: Cluster, bytes_per_s: float) -> Cluster:
    """A cluster whose network, and every machine's card, is at least as fast as this."""
    machines = tuple(
        replace(m, nic_bytes_per_s=max(bytes_per_s, m.nic_bytes_per_s)) for m in cluster.machines
    )
    bandwidth = max(bytes_per_s, cluster.bandwidth_bytes_per_s)
    return replace(cluster, machines=machines, bandwidth_bytes_per_s=bandwidth)
