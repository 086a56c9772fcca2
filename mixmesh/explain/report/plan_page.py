"""The page of a plan, or of several plans between which the reader switches."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from ...base.timeline import STREAMS
from ...base.units import seconds_text
from ...simulator.memory import MemoryCourse
from ..headline import headline
from .drawing import cluster_html
from .facts import Facts
from .packing import packed_timeline
from .page import Page, asset, filled, section_html
from .parts import KINDS, PARTS, WAITS, Parts, waits
from .words import sentences

MOMENTS = 240  # moments of a step at which the memory of a device is drawn
MILLION = 1_000_000


def plan_page(shown: Sequence[Facts], words: Sequence[str] = (), side: str = "") -> Page:
    """The page of plans, which shows the first one initially. ``words`` defaults to those of the first plan;
    ``side`` is HTML that goes above the plans."""
    first = shown[0]
    clusters = [cluster_html(f.cluster, f.plan, f.timeline, f.samples) for f in shown]
    main = {
        "SIDE": side,
        "CHOICE": choice_html([f.name for f in shown]) if len(shown) > 1 else "",
        "CLUSTERS": variants_html(clusters),
        "BOUNDS": variants_html([bounds_html(f.parts) for f in shown]),
        "COMPARED": COMPARED if any(f.rivals for f in shown) else "",
        "WHAT_IF": what_if_html(first) if first.what_if else "",
    }
    return Page(
        f"{first.plan.program.name} on {first.cluster.name}",
        headline(first.plan, first.cluster),
        list(words) or sentences(first),
        filled(asset("plan.html"), main),
        page_object(shown),
        "plan.js",
    )


COMPARED = section_html(
    "candidates",
    "Plans compared",
    """<p>The step of every plan that was considered, of what it is made, and why it was not chosen.</p>
<div class="chart" id="candidates" role="img"></div>
<div class="scroll" id="candidates-table" tabindex="0"></div>""",
)


def choice_html(names: Sequence[str]) -> str:
    """Radio buttons that choose the plan to show."""
    labels = (
        f'<label><input type="radio" name="variant" value="{n}"{"" if n else " checked"}> '
        f"{html.escape(name)}</label>"
        for n, name in enumerate(names)
    )
    return (
        f'<fieldset id="variants"><legend>The plan that is shown below</legend>{"".join(labels)}</fieldset>'
    )


def variants_html(contents: Sequence[str]) -> str:
    """Content for each plan, with only the chosen plan's visible."""
    return "\n".join(
        f'<div data-variant="{n}"{" hidden" if n else ""}>{content}</div>'
        for n, content in enumerate(contents)
    )


def bounds_html(parts: Parts) -> str:
    """The lower bound of any plan's seconds, and the distance of this plan from it."""
    bounds = parts.bounds
    told = (
        f"<b>The bound is {seconds_text(bounds.bound_s)}</b>: no plan for these devices is faster, however "
        f"fast the links. It is all devices computing all the time, {bounds.basis}. This plan's step is "
        f"{seconds_text(parts.step_s)}: at least {bounds.bound_s / parts.step_s:.0%} of the possible speed."
    )
    if not bounds.is_measured:
        told += (
            f" At the speeds that the plan counts on, all devices computing all the time would take "
            f"{seconds_text(bounds.ideal_s)}, the ideal."
        )
    return f"<p>{told}</p>"


def what_if_html(facts: Facts) -> str:
    asked = facts.what_if
    assert asked is not None  # the caller has checked this
    told = (
        "Each row is the fastest plan for the cluster after one change, as predicted. "
        f"{len(asked.answers)} plans were made in {seconds_text(asked.took_s)}. Twice the batch has no row: "
        "it needs the model (<code>mixmesh what-if JOB</code>). Links are those of the cluster file in every "
        "row, also where they were measured."
    )
    chart = '<div class="chart" id="what-if" role="img"></div>'
    table = '<div class="scroll" id="what-if-table" tabindex="0"></div>'
    return section_html("what-if", "What would change the step", f"<p>{told}</p>\n{chart}\n{table}")


def page_object(shown: Sequence[Facts]) -> dict[str, Any]:
    """The data that the script draws. Times are in seconds, those of packed events in nanoseconds."""
    names = {"streams": STREAMS, "kinds": KINDS, "waits": WAITS, "parts": PARTS}
    return {**names, "variants": [variant(f) for f in shown]}


def variant(facts: Facts) -> dict[str, Any]:
    """All data of one plan that is drawn."""
    plan, timeline, measured = facts.plan, facts.timeline, facts.measured
    return {
        "name": facts.name,
        "planner": plan.planner,
        "step_s": timeline.step_s,
        "bound_s": facts.parts.bounds.bound_s,
        "ideal_s": facts.parts.bounds.ideal_s,
        "ranks": [rank_object(facts, rank) for rank in range(facts.cluster.world_size)],
        "waterfall": facts.parts.named(),
        "candidates": candidates(facts),
        "predicted": packed_timeline(timeline, facts.critical, facts.kind_of),
        "measured": None if measured is None else packed_timeline(measured, (), facts.kind_of),
        "program": [[line.text, line.source, line.name, line.time_s] for line in facts.lines],
        "what_if": what_if_rows(facts),
    }


def rank_object(facts: Facts, rank: int) -> dict[str, Any]:
    device, course = facts.cluster.devices[rank], facts.memory[rank]
    micro = facts.plan.micro_batches[rank] if facts.plan.micro_batches else None
    return {
        "name": device.name,
        "machine": facts.cluster.machine_of(rank).name,
        "samples": facts.samples[rank],
        "computes_s": facts.timeline.compute_s[rank],
        "waits_s": list(waits(facts.timeline, rank, facts.kind_of).values()),
        "before_bytes": course.before_bytes,
        "peak_bytes": course.peak_bytes,
        "limit_bytes": device.memory_bytes,
        "memory": thinned(course, facts.timeline.step_s),
        "micro_batches": "" if micro is None else f"{micro.steps} x {micro.micro_batch}",
    }


def thinned(course: MemoryCourse, step_s: float) -> list[tuple[float, int]]:
    """The largest value in each of ``MOMENTS`` parts of the step, so that no peak is lost."""
    most: dict[int, int] = {}
    held = 0
    points = iter([*course.points, (math.inf, 0)])
    time_s, size_bytes = next(points)
    for number in range(MOMENTS):
        largest, end_s = held, (number + 1) * step_s / MOMENTS
        while time_s < end_s or (number == MOMENTS - 1 and time_s < math.inf):
            held, largest = size_bytes, max(largest, size_bytes)
            time_s, size_bytes = next(points)
        most[number] = largest
    return [(number * step_s / MOMENTS, size) for number, size in most.items()]


def candidates(facts: Facts) -> list[dict[str, Any]]:
    """The chosen plan and the others, the fastest that fits first, with their parts if known."""
    own = {"name": facts.plan.planner, "chosen": True, "fits": True, "step_s": facts.timeline.step_s,
           "parts": facts.parts.seconds, "why": "chosen"}  # fmt: skip
    rows = [
        {
            "name": rival.planner,
            "chosen": False,
            "fits": rival.fits,
            "step_s": rival.step_s,
            "parts": rival.remade.parts.seconds if rival.remade else None,
            "why": rival.why,
        }
        for rival in facts.rivals
        if math.isfinite(rival.step_s)
    ]
    return sorted([own, *rows], key=lambda row: (not row["fits"], row["step_s"])) if rows else []


def what_if_rows(facts: Facts) -> list[list[Any]]:
    """Rows of a table: change, step, seconds of a sample, factor on the samples per second, planner, price of
    a million."""
    if facts.what_if is None:
        return []
    now, *rest = facts.what_if.answers
    ranked = sorted(rest, key=lambda answer: answer.sample_s)
    return [
        [
            a.change.text,
            a.step_s if math.isfinite(a.step_s) else None,
            a.sample_s if math.isfinite(a.step_s) else None,
            a.speedup(now) if math.isfinite(now.step_s) else 0.0,
            a.planner,
            None if a.sample_price is None else MILLION * a.sample_price,
        ]
        for a in (now, *ranked)
    ]
