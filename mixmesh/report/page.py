"""The page: facts as JSON, a script that draws them, and everything that it needs, in one file."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..explain.headline import headline
from ..timeline import STREAMS, Event, Timeline
from ..units import size_text
from .facts import EVENLY, Facts
from .words import sentences

ASSETS = Path(__file__).parent / "assets"
SHORTEST_S = 1e-9  # of an event that is drawn
NS = 1e9


def save_page(facts: Facts, path: str | Path) -> None:
    """Writes the page; the file is either whole or not there. Raises InputError."""
    path = Path(path)
    partial = path.with_name(f"{path.name}.partial{os.getpid()}")
    try:
        partial.write_text(page_text(facts), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"cannot write the report: {error.strerror}", where=str(path)) from None


def page_text(facts: Facts) -> str:
    """The HTML of the page."""
    content = {
        "TITLE": html.escape(f"{facts.plan.program.name} on {facts.cluster.name}"),
        "HEADLINE": html.escape(headline(facts.plan, facts.cluster)),
        "SENTENCES": "\n".join(f"<li>{html.escape(text)}</li>" for text in sentences(facts)),
        "CLUSTER": cluster_html(facts),
        "STYLE": (ASSETS / "page.css").read_text(),
        "DATA": script_json(page_object(facts)),
        "ECHARTS": (ASSETS / "echarts.min.js").read_text().replace("</script", "<\\/script"),
        "SCRIPT": (ASSETS / "page.js").read_text(),
    }
    text = (ASSETS / "page.html").read_text()
    for name, value in content.items():
        text = text.replace(f"@@{name}@@", value)
    return text


def script_json(value: Any) -> str:
    """JSON that may stand in a script element: nothing in it ends the element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def page_object(facts: Facts) -> dict[str, Any]:
    """All that the script draws. Times are in seconds, those of events in nanoseconds."""
    plan, timeline = facts.plan, facts.timeline
    micro_batches = plan.micro_batches or (None,) * facts.cluster.world_size
    ranks = [
        {
            "name": device.name,
            "machine": facts.cluster.machine_of(rank).name,
            "samples": facts.samples[rank],
            "computes_s": timeline.compute_s[rank],
            "memory_bytes": timeline.peak_memory_bytes[rank] if timeline.peak_memory_bytes else 0,
            "limit_bytes": device.memory_bytes,
            "micro_batches": "" if micro is None else f"{micro.steps} x {micro.micro_batch}",
        }
        for rank, (device, micro) in enumerate(zip(facts.cluster.devices, micro_batches))
    ]
    candidates = {c.planner: c.predicted_step_s for c in plan.candidates if c.feasible}
    candidates[plan.planner] = timeline.step_s
    compared = [(name, step_s) for name, step_s in candidates.items() if math.isfinite(step_s)]
    return {
        "step_s": timeline.step_s,
        "ranks": ranks,
        "planner": plan.planner,
        "candidates": sorted(compared, key=lambda pair: pair[1]),
        "parts": [
            {"plan": name, "ideal": p.ideal_s, "imbalance": p.imbalance_s, "exposed": p.exposed_s}
            for name, p in ((plan.planner, facts.parts), (EVENLY, facts.evenly_parts))
            if p is not None
        ],
        "streams": STREAMS,
        "predicted": timeline_object(timeline, facts.critical),
        "measured": None if facts.measured is None else timeline_object(facts.measured, ()),
        "program": [[line.text, line.source, line.name, line.time_s] for line in facts.lines],
    }


def timeline_object(timeline: Timeline, critical: Sequence[int]) -> dict[str, Any]:
    """Events as rows: rank, stream, name, operator, start and duration, bytes, whether it is on the critical
    path. Names are numbers of a table."""
    on_path = set(critical)
    names: dict[str, int] = {}

    def number(name: str) -> int:
        return names.setdefault(name, len(names))

    def row(index: int, e: Event) -> list[int]:
        start_ns, end_ns = round(e.start_s * NS), round(e.end_s * NS)
        size_bytes = -1 if e.size_bytes is None else e.size_bytes
        place = [e.rank, STREAMS.index(e.stream), number(e.name), number(e.op)]
        return [*place, start_ns, end_ns - start_ns, size_bytes, int(index in on_path)]

    rows = [
        row(i, e)
        for i, e in enumerate(timeline.events)
        if math.isfinite(e.end_s) and e.end_s - e.start_s >= SHORTEST_S
    ]
    return {"step_s": timeline.step_s, "names": list(names), "events": rows}


def cluster_html(facts: Facts) -> str:
    """The machines as boxes with their devices."""
    cluster = facts.cluster
    boxes = []
    for index, machine in enumerate(cluster.machines):
        devices = []
        for rank in cluster.ranks_of(index):
            device = cluster.devices[rank]
            samples = f"{facts.samples[rank]} samples, " if any(facts.samples) else ""
            used = facts.timeline.compute_s[rank] / facts.timeline.step_s
            devices.append(
                f"<li><b>rank {rank}</b> {html.escape(device.name)}<br>"
                f"{device.flop_per_s / 1e12:.3g} TFLOP/s, {size_text(device.memory_bytes)}<br>"
                f"{samples}computes {used:.0%} of the step</li>"
            )
        boxes.append(
            f'<section class="machine"><h3>{html.escape(machine.name)}</h3><p>'
            + (f"{gbit(machine.link_bytes_per_s)} inside, " if len(machine.devices) > 1 else "")
            + f"{gbit(min(machine.nic_bytes_per_s, cluster.bandwidth_bytes_per_s))} to others</p>"
            f"<ul>{''.join(devices)}</ul></section>"
        )
    return "\n".join(boxes)


def gbit(bytes_per_s: float) -> str:
    return f"{round(bytes_per_s * 8e-9, 3):g} Gbit/s"
