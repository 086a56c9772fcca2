"""The sentences of a report: which device sets the pace, why the plan is faster than data parallelism, and
the effect of faster links."""

from __future__ import annotations

from ...base.units import seconds_text
from ..headline import times_text
from .drawing import device_name
from .facts import FASTER_LINKS, Facts
from .parts import OTHERS, WAITS, busiest_rank

BUSY = 0.9  # share of the step: a device that is busy for longer sets the pace, otherwise the waits do
SAME = 0.01  # share of a step


def sentences(facts: Facts) -> list[str]:
    """Three sentences, or fewer for one device or a plan that is not compared."""
    lines = [pace(facts), why(facts), links(facts)]
    return [text for text in lines if text]


def pace(facts: Facts) -> str:
    """Names what the step waits for: a device, links, or others' computing, as in a pipeline."""
    compute_s, step_s = facts.timeline.compute_s, facts.timeline.step_s
    rank = busiest_rank(compute_s)
    busy = f"computes for {compute_s[rank] / step_s:.0%} of the step of {seconds_text(step_s)}"
    if compute_s[rank] >= BUSY * step_s:
        return f"The bottleneck is {device_name(facts.cluster, rank)}: it {busy}."
    others_s, exposed_s = facts.parts.waits_s[WAITS.index(OTHERS)], facts.parts.exposed_s
    if others_s > exposed_s / 2:
        return (
            f"Devices wait for each other: even {device_name(facts.cluster, rank)}, the busiest device, "
            f"{busy}, and waits for others for {seconds_text(others_s)} in which no exchange is under way."
        )
    waited = seconds_text(exposed_s)
    return (
        f"Links are the bottleneck: even {device_name(facts.cluster, rank)}, the busiest device, {busy}, and "
        f"{waited} of communication and waiting are hidden behind nothing."
    )


def why(facts: Facts) -> str:
    """The reason why the plan is faster than data parallelism with equal parts, given by the part of the step
    in which it gains most; empty for one device, and for a plan that is not compared."""
    rival = facts.evenly
    if rival is None or rival.remade is None:
        return ""
    if not rival.fits:
        return "Data parallelism with equal parts does not fit in memory; the plan does."
    evenly, theirs, own = rival.remade.timeline, rival.remade.parts, facts.parts
    gain = evenly.step_s / facts.timeline.step_s
    than = f"data parallelism with equal parts ({seconds_text(evenly.step_s)})"
    if gain < 1 + SAME:
        return f"The plan is {'as fast as' if gain > 1 - SAME else 'slower than'} {than}."
    begin = f"The plan is {times_text(gain)} as fast as {than}, mostly because"
    if theirs.busy_s - own.busy_s >= theirs.exposed_s - own.exposed_s:
        slowest = theirs.busiest
        computes = f"computes for {seconds_text(facts.timeline.compute_s[slowest])}"
        here = computes if facts.samples[slowest] else "has no samples"
        there = seconds_text(evenly.compute_s[slowest])
        name = device_name(facts.cluster, slowest)
        return f"{begin} {name} would compute for {there} on an equal part, and {here} here."
    there, here = seconds_text(theirs.exposed_s), seconds_text(own.exposed_s)
    return f"{begin} there {there} of communication and waiting are hidden behind nothing, and {here} here."


def links(facts: Facts) -> str:
    """Says how much faster links would make the same program; empty for one device."""
    if facts.faster_s is None:
        return ""
    saved, step = 1 - facts.faster_s / facts.timeline.step_s, seconds_text(facts.faster_s)
    effect = f", {saved:.0%} less." if saved >= SAME else ": nothing is gained by faster links."
    return f"With links {FASTER_LINKS}x as fast this program would take {step} a step{effect}"
