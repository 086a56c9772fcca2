"""Checks links: finds the interface by which each machine is reached, and compares measured rates with the
cluster file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import psutil

from ...base.units import GBIT, in_unit
from ...cluster import Cluster
from ...cluster.detection.assemble import nic_rates, rounded
from ...cluster.detection.links import Link, Links, measure_links
from ...errors import InputError
from .checks import own_host
from .ground import Ground, count

# Tolerated ratio between a file's rate and the measured one, in either direction. Rates of one link differ by
# a fifth from run to run, and gloo reaches 0.7 to 0.85 of a wire's rate.
LEAST_SHARE = 0.6
TRIES = 3  # measurements of a link that seems too slow, because another process may have used it


@dataclass(frozen=True)
class WrongRate:
    """A rate in the file that the link does not have: the machine's place in the file, and the key."""

    machine: int
    key: str
    expected: float
    measured: float

    def line(self, cluster: Cluster) -> str:
        """The line that the file should have instead."""
        name = cluster.machines[self.machine].name
        return f'{self.key} = {gbit(self.measured)} for machine "{name}" in the file, if that is right'


def links(ground: Ground) -> str:
    """Checks that links are as fast as the cluster file says; without a file, reports how fast they are."""
    cluster = ground.cluster
    machines = ground.inventory.machines if cluster is None else ranks_by_machine(cluster)

    def make() -> list:
        ground.take_device()
        links = measure_links(machines, ground.device)
        return [interface_text(own_host(ground.backend)), [[*key, asdict(link)] for key, link in flat(links)]]

    best: Links | None = None
    for _ in range(TRIES):
        told = ground.meeting.gather_together("the measuring of links", make)
        measured = links_of(told[0][1])
        best = measured if best is None else faster(best, measured)
        if cluster is None or not any(w.measured < w.expected for w in wrong_rates(cluster, best)):
            break
    assert best is not None  # there is at least one try
    ground.columns["interface"] = [interface for interface, _ in told]
    ground.columns["Gbit/s"] = rate_column(machines, best)
    if cluster is not None and (wrong := wrong_rates(cluster, best)):
        raise refusal(ground, cluster, wrong)
    slowest = min((link.bytes_per_s for _, link in flat(best)), default=None)
    if slowest is None:
        return "one process: nothing to measure"
    return f"{count(len(list(flat(best))), 'link')}, the slowest {gbit(slowest)} Gbit/s" + (
        "" if cluster is None else ", as the file says"
    )


def ranks_by_machine(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """The ranks of each machine of a cluster file."""
    return tuple(cluster.ranks_of(index) for index in range(len(cluster.machines)))


def flat(found: Links) -> list[tuple[tuple[int, ...], Link]]:
    """All links, each with its one machine or two."""
    return [*(((index,), link) for index, link in found.inside.items()), *found.between.items()]


def links_of(rows: Sequence[Sequence]) -> Links:
    """The links in the rows that a rank has reported."""
    inside = {row[0]: Link(**row[1]) for row in rows if len(row) == 2}
    return Links(inside, {(row[0], row[1]): Link(**row[2]) for row in rows if len(row) == 3})


def faster(one: Links, other: Links) -> Links:
    """For each link, the faster of two measurements."""

    def best(a: dict, b: dict) -> dict:
        return {key: max(a[key], b[key], key=lambda link: link.bytes_per_s) for key in a}

    return Links(best(one.inside, other.inside), best(one.between, other.between))


def wrong_rates(cluster: Cluster, found: Links) -> list[WrongRate]:
    """The rates of the file that are wrong. A machine's network card is judged by its fastest partner,
    against the smallest rate in the file along the path."""
    wrong = []
    for index, link in found.inside.items():
        expected = cluster.bandwidth_between(*cluster.ranks_of(index)[:2])
        if is_off(link.bytes_per_s, expected):
            wrong.append(WrongRate(index, "link_gbit_per_s", expected, link.bytes_per_s))
    measured = nic_rates(found, len(cluster.machines))
    for index, bytes_per_s in measured.items():
        partners = [pair for pair in found.between if index in pair]
        paths = [[cluster.ranks_of(machine)[0] for machine in pair] for pair in partners]
        expected = max(cluster.bandwidth_between(*path) for path in paths)
        own = min(cluster.machines[index].nic_bytes_per_s, cluster.bandwidth_bytes_per_s)
        if bytes_per_s < LEAST_SHARE * expected:
            wrong.append(WrongRate(index, "nic_gbit_per_s", expected, bytes_per_s))
        # otherwise the partner's figure is wrong, and is reported there
        elif bytes_per_s > own / LEAST_SHARE:
            wrong.append(WrongRate(index, "nic_gbit_per_s", own, bytes_per_s))
    return wrong


def is_off(measured: float, expected: float) -> bool:
    """Whether a rate differs too much from the expected one."""
    return not LEAST_SHARE * expected <= measured <= expected / LEAST_SHARE


def refusal(ground: Ground, cluster: Cluster, wrong: Sequence[WrongRate]) -> InputError:
    """The error that names every rate that is off."""
    names = ", ".join(dict.fromkeys(f'"{cluster.machines[w.machine].name}"' for w in wrong))
    slower = any(w.measured < w.expected for w in wrong)
    return InputError(
        f"links of {names} are not as fast as the cluster file says",
        expected="; ".join(_rate(cluster, w, w.expected) for w in wrong),
        got="; ".join(_rate(cluster, w, w.measured) for w in wrong),
        where=str(ground.asked.cluster_file),
        hint=(
            *(w.line(cluster) for w in wrong),
            *_network_line(cluster, wrong),
            *(
                ["ethtool INTERFACE | grep Speed, and GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME"]
                if slower
                else []
            ),
        ),
        ranks=tuple(sorted({rank for w in wrong for rank in cluster.ranks_of(w.machine)})),
    )


def _network_line(cluster: Cluster, wrong: Sequence[WrongRate]) -> list[str]:
    """The line for the network, if the file has it slower than a machine's measured card."""
    fastest = max((w.measured for w in wrong if w.key == "nic_gbit_per_s"), default=0.0)
    if fastest <= cluster.bandwidth_bytes_per_s:
        return []
    return [f"bandwidth_gbit_per_s = {gbit(fastest)} under [network]"]


def _rate(cluster: Cluster, wrong: WrongRate, bytes_per_s: float) -> str:
    return f'machine "{cluster.machines[wrong.machine].name}" {wrong.key} {gbit(bytes_per_s)}'


def rate_column(machines: Sequence[Sequence[int]], found: Links) -> list[str]:
    """For each rank, the rate of its machine to its fastest partner, or inside the machine if it has none."""
    rates = nic_rates(found, len(machines))
    inside = {index: link.bytes_per_s for index, link in found.inside.items()}
    by_machine = [rates.get(index, inside.get(index)) for index in range(len(machines))]
    return ["-" if rate is None else gbit(rate) for ranks, rate in zip(machines, by_machine) for _ in ranks]


def gbit(bytes_per_s: float) -> str:
    """A rate in Gbit/s, rounded to the digits that mean something."""
    return in_unit(rounded(bytes_per_s, GBIT), GBIT)


def interface_text(host: str) -> str:
    """The network interface that has an address, with the rate that its driver states."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            states = psutil.net_if_stats().get(name)
            return (
                f"{name} {states.speed / 1000:g} Gbit/s" if states is not None and states.speed > 0 else name
            )
    return host
