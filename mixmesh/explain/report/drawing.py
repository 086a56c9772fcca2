"""Draws the cluster: machines with their devices, and how busy each link is."""

from __future__ import annotations

import html
from collections.abc import Sequence

from ...base.timeline import BRIDGE, IN, INSIDE, OUT, OWN, Link, Timeline
from ...base.units import link_text, size_text
from ...cluster import Cluster, Machine
from ...cost.resources import bytes_per_s_of
from ...lang.plan_file import Plan

WAYS = OUT, IN


def device_name(cluster: Cluster, rank: int) -> str:
    """``rank 2 (T4-16GB, machine b)``."""
    return f"rank {rank} ({cluster.devices[rank].name}, {cluster.machine_of(rank).title})"


def busiest_link(cluster: Cluster, timeline: Timeline) -> str:
    """The link that is busy longest in a predicted step: ``1 Gbit/s link of machine b``; empty if none is
    used."""
    if not any(busy_s for _, busy_s in timeline.link_busy_s):
        return ""
    link, _ = max(timeline.link_busy_s, key=lambda pair: pair[1])
    machine = cluster.machines[link.machine]
    if link.way not in WAYS:
        what = "host bridge of" if link.way == BRIDGE else "link inside"
        return f"{link_text(bytes_per_s_of(cluster, link))} {what} {machine.title}"
    return f"{link_text(machine.nic_bytes_per_s)} link of {machine.title}"


def cluster_html(cluster: Cluster, plan: Plan, timeline: Timeline, samples: Sequence[int]) -> str:
    """The machines as boxes with their devices, and the network that joins them."""
    busy = {link: busy_s / timeline.step_s for link, busy_s in timeline.link_busy_s}
    boxes = [machine_html(cluster, n, plan, timeline, samples, busy) for n in range(len(cluster.machines))]
    network = ""
    if len(boxes) > 1:
        network = f'<p class="network">network of {link_text(cluster.bandwidth_bytes_per_s)}</p>'
    return f'<div class="machines">{"".join(boxes)}</div>{network}'


def machine_html(
    cluster: Cluster,
    number: int,
    plan: Plan,
    timeline: Timeline,
    samples: Sequence[int],
    busy: dict[Link, float],
) -> str:
    machine = cluster.machines[number]
    devices = "".join(device_html(cluster, r, plan, timeline, samples) for r in cluster.ranks_of(number))
    links = ""
    if len(machine.devices) > 1:
        links += "".join(
            link_html(f"{text}, {link_text(bytes_per_s_of(cluster, link))}", busy.get(link, 0.0))
            for link, text in links_inside(machine, number)
        )
    if len(cluster.machines) > 1:
        speed = link_text(min(machine.nic_bytes_per_s, cluster.bandwidth_bytes_per_s))
        links += "".join(
            link_html(f"{way} to the network, {speed}" if way == OUT else f"in from it, {speed}",
                      busy.get(Link(way, number), 0.0))
            for way in WAYS
        )  # fmt: skip
    return (
        f'<section class="machine"><h3>{html.escape(machine.name)}</h3>'
        f'<ul class="devices">{devices}</ul><ul class="links">{links}</ul></section>'
    )


def links_inside(machine: Machine, number: int) -> list[tuple[Link, str]]:
    """The links between devices of a machine, each with its label."""
    own = [
        (Link(OWN, number, n), f"link of devices {', '.join(map(str, link.devices))}")
        for n, link in enumerate(machine.links)
    ]
    is_direct = machine.bridge_bytes_per_s is None
    way, text = (INSIDE, "link inside") if is_direct else (BRIDGE, "shared host bridge")
    return [*own, (Link(way, number), text)]


def device_html(cluster: Cluster, rank: int, plan: Plan, timeline: Timeline, samples: Sequence[int]) -> str:
    device = cluster.devices[rank]
    used = timeline.compute_s[rank] / timeline.step_s
    lines = [
        f"<b>rank {rank}</b> {html.escape(device.name)}",
        f"{device.flop_per_s / 1e12:.3g} TFLOP/s, {size_text(device.memory_bytes)}",
    ]
    if any(samples):
        lines.append(f"{samples[rank]} samples, {samples[rank] / sum(samples):.0%}{micro_text(plan, rank)}")
    lines.append(f"computes {used:.0%} of the step{meter_html(used)}")
    return f"<li>{'<br>'.join(lines)}</li>"


def micro_text(plan: Plan, rank: int) -> str:
    """The micro-batches of a rank, in words: `` in 4 micro-batches``."""
    if plan.micro_batches is None or plan.micro_batches[rank].steps < 2:
        return ""
    return f", in {plan.micro_batches[rank].steps} micro-batches of {plan.micro_batches[rank].micro_batch}"


def link_html(text: str, busy: float) -> str:
    """A link and the share of the step in which it carries something."""
    told = f"{text}: busy {busy:.0%} of the step" if busy else f"{text}: carries nothing"
    return f"<li>{told}{meter_html(busy)}</li>"


def meter_html(share: float) -> str:
    """A bar that shows a share. Hidden from screen readers, because the text beside it says the same."""
    return f'<span class="meter" aria-hidden="true"><span style="width:{min(share, 1):.1%}"></span></span>'
