"""The page of a plan: its sentences and its numbers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from unpack import unpacked

import mixmesh
from benchmarks.demo.cases import CLUSTER as DEMO_CLUSTER
from benchmarks.demo.job import job
from mixmesh.__main__ import execute
from mixmesh.base.timeline import IN, INSIDE, OUT, Event, Link, Timeline, save_trace, to_chrome_trace
from mixmesh.base.units import seconds_text
from mixmesh.cli.plan import bound
from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel, Profile
from mixmesh.errors import InputError
from mixmesh.explain.report import facts_of, page_text, plan_page
from mixmesh.explain.report.facts import Facts, bounds_of
from mixmesh.explain.report.measured import read_trace
from mixmesh.explain.report.page import asset
from mixmesh.explain.report.pair import differences, side_by_side
from mixmesh.explain.report.parts import (
    AGAIN,
    COMPUTES,
    EXCHANGES,
    GATHERS,
    GRADIENTS,
    OTHERS,
    PARTS,
    Bounds,
    Parts,
    waits,
)
from mixmesh.explain.report.path import critical_path
from mixmesh.explain.report.plan_page import rank_object
from mixmesh.explain.report.words import sentences
from mixmesh.frontend.trace import trace
from mixmesh.planner import make_plan

CLUSTER = """
name = "<b>two</b> boxes"
[network]
bandwidth_gbit_per_s = {network}
[[machine]]
name = "new & fast"
link_gbit_per_s = 1000
devices = ["RTX4090-24GB", "RTX3090-24GB"]
[[machine]]
name = "old"
devices = ["RTX2080Ti-11GB"]
"""
SMALL = '{ name = "small", tflop_per_s = 10, memory_gib = 2.55, memory_gbyte_per_s = 500 }'


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3)))

    def forward(self, x):
        return self.layers(x).square().mean()


def made(network: float = 1000, samples: int = 16384) -> Facts:
    cluster = Cluster.parse(CLUSTER.format(network=network))
    plan = mixmesh.plan(Model(), {"x": torch.randn(samples, 1024)}, cluster, planner="ddp-proportional")
    return facts_of(plan, cluster)


@pytest.fixture(scope="module")
def facts() -> Facts:
    return made()


DEMO = [
    "The bottleneck is rank 1 (cpu-35, machine a): it computes for 100% of the step of 5.52 s.",
    "The plan is 2.1x as fast as data parallelism with equal parts (11.7 s), mostly because rank 3 "
    "(cpu-18, machine b) would compute for 11.6 s on an equal part, and computes for 4.95 s here.",
    "With links 2x as fast this program would take 5.51 s a step: nothing is gained by faster links.",
]
DEMO_PROFILE = Path(__file__).with_name("demo_profile.json")
DEMO_MEASURED = [
    "The bottleneck is rank 0 (cpu-70, machine a): it computes for 98% of the step of 1.7 s.",
    "The plan is 2.1x as fast as data parallelism with equal parts (3.53 s), mostly because rank 3 "
    "(cpu-18, machine b) would compute for 3.47 s on an equal part, and computes for 1.63 s here.",
    "With links 2x as fast this program would take 1.68 s a step: nothing is gained by faster links.",
]


def demo_trace():
    made_job = job()
    return trace(made_job.model, made_job.batch)


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page)[1])


# --- facts -------------------------------------------------------------------------------------------------


def test_the_critical_path_leads_from_the_first_event_to_the_last():
    def event(rank: int, name: str, start_s: float, end_s: float, stream: str = "compute") -> Event:
        return Event(rank, stream, name, start_s, end_s)

    events = [
        event(0, "a", 0, 1), event(1, "a", 0, 3), event(0, "idle", 1, 2),
        event(0, "sum", 3, 4, "communication"), event(1, "sum", 3, 4, "communication"), event(0, "b", 4, 6),
    ]  # fmt: skip
    path = [(events[i].rank, events[i].name) for i in critical_path(events)]
    assert path == [(1, "a"), (0, "sum"), (0, "b")]


def test_the_path_of_a_plan_has_no_gap(facts):
    events = [facts.timeline.events[i] for i in facts.critical]
    assert events[0].start_s == 0 and events[-1].end_s == pytest.approx(facts.timeline.step_s)
    for before, after in zip(events, events[1:]):
        assert after.start_s == pytest.approx(before.end_s, abs=2e-9)


def test_the_parts_are_the_whole_step(facts):
    assert facts.parts.step_s == pytest.approx(facts.timeline.step_s)
    for rival in facts.rivals:
        assert rival.remade.parts.step_s == pytest.approx(rival.remade.timeline.step_s)


def test_the_bound_is_that_of_the_plan(facts):
    """The page's first bar is what ``mixmesh plan`` prints."""
    plan, parts = facts.plan, facts.parts
    assert plan.bound_s < plan.ideal_s < facts.timeline.step_s and not plan.is_bound_measured
    assert (parts.bounds.bound_s, parts.bounds.ideal_s) == (plan.bound_s, plan.ideal_s)
    assert parts.named()[0] == ("the bound", plan.bound_s)
    page = page_text(plan_page([facts]))
    assert f"<b>The bound is {seconds_text(plan.bound_s)}</b>: no plan for these devices is faster" in page
    assert f"{seconds_text(plan.ideal_s)}, the ideal." in page
    printed = bound(plan)
    assert printed.startswith(f"no plan can be faster than {seconds_text(plan.bound_s)} ")


def test_a_plan_of_other_costs_has_their_bound(facts):
    """The page of a plan that was made from a profile, without one: the bound is of what it simulates."""
    plan = replace(facts.plan, cost_source="profile", bound_s=1e3, ideal_s=2e3)
    bounds = bounds_of(plan, CostModel(facts.cluster))
    assert bounds.bound_s == pytest.approx(facts.plan.bound_s, rel=1e-9) and not bounds.is_measured
    assert bounds_of(plan, CostModel(facts.cluster)).ideal_s == pytest.approx(facts.plan.ideal_s, rel=1e-9)


def test_what_is_computed_again_is_a_part():
    """By hand: rank 1 computes 5 s, one of them again, where an even part would be 3."""
    events = (
        Event(0, "compute", "a", 0, 2), Event(1, "compute", "a", 0, 4), Event(1, "compute", "a again", 5, 6),
        Event(1, "communication", "b", 4, 5),
    )  # fmt: skip
    timeline = Timeline(6.0, (), (2.0, 5.0), 1.0, events)
    kinds = {"compute": {"a": COMPUTES, "a again": AGAIN}, "communication": {"b": EXCHANGES}}
    parts = Parts.of(timeline, Bounds(1.5, 3.0, False), lambda e: kinds[e.stream][e.name])
    assert dict(zip(PARTS, parts.seconds)) == {
        "bound": 1.5, "below the peaks": 1.5, "computed again": 1.0, "imbalance": 1.0,
        "waits for sums of gradients": 0, "waits for gathers of parameters": 0,
        "waits for other exchanges": 1.0, "waits for other devices": 0,
    }  # fmt: skip
    assert parts.step_s == 6.0 and parts.busiest == 1


def test_sentences_where_a_device_sets_the_pace(facts):
    pace, why, links = sentences(facts)
    assert re.fullmatch(
        r"The bottleneck is rank \d \(RTX\S+, machine .+\): it computes for 9\d% of the step of .+ ms\.", pace
    )
    assert "mostly because rank 2 (RTX2080Ti-11GB, machine old) would compute for" in why
    assert links.startswith("With links 2x as fast this program would take")


def test_sentences_where_links_do():
    slow = made(network=0.2, samples=4096)
    pace, _, links = sentences(slow)
    assert pace.startswith("Links are the bottleneck: even rank")
    saved = int(re.search(r", (\d+)% less\.", links)[1])
    assert 30 < saved <= 50


def test_sentences_where_devices_wait_for_each_other(facts):
    """As in a pipeline that fills and drains: faster links would gain little."""
    step_s = facts.timeline.step_s
    timeline = replace(facts.timeline, compute_s=tuple(s / 2 for s in facts.timeline.compute_s))
    parts = replace(facts.parts, waits_s=(0.1 * step_s, 0.0, 0.0, 0.4 * step_s))
    pace = sentences(replace(facts, timeline=timeline, parts=parts))[0]
    waited = re.escape(seconds_text(0.4 * step_s))
    assert re.fullmatch(
        rf"Devices wait for each other: even rank \d .+, and waits for others for {waited} .+", pace
    )


def test_where_equal_parts_do_not_fit(facts):
    (evenly,) = (rival for rival in facts.rivals if rival.planner == "ddp-even")
    alone = replace(facts, rivals=(replace(evenly, fits=False),))
    assert sentences(alone)[1] == "Data parallelism with equal parts does not fit in memory; the plan does."


# --- parts, memory, links, candidates ---------------------------------------------------------------------


def test_what_a_device_waits_for(facts):
    """By hand: rank 0 computes 0-2 and 6-7 of 8 s, its sum of gradients is under way from 3 to 5."""
    events = (
        Event(0, "compute", "a", 0, 2), Event(0, "compute", "b", 6, 7),
        Event(0, "communication", "gradients of w", 3, 5), Event(1, "compute", "a", 0, 8),
    )  # fmt: skip
    timeline = Timeline(8.0, (), (3.0, 8.0), 2.0, events)
    assert waits(timeline, 0, facts.kind_of) == {GRADIENTS: 2.0, GATHERS: 0.0, EXCHANGES: 0.0, OTHERS: 3.0}
    assert sum(waits(timeline, 1, facts.kind_of).values()) == 0


def test_memory_over_the_step_peaks_where_the_plan_says(facts):
    peaks = facts.timeline.peak_memory_bytes
    assert tuple(course.peak_bytes for course in facts.memory) == peaks
    for rank, course in enumerate(facts.memory):
        times_s = [time_s for time_s, _ in course.points]
        assert times_s == sorted(set(times_s)) and times_s[0] == 0 and times_s[-1] < facts.timeline.step_s
        assert len(times_s) > 10 and len({size for _, size in course.points}) > 5  # it rises and falls
        drawn = rank_object(facts, rank)["memory"]
        assert max(size for _, size in drawn) == max(size for _, size in course.points)


def test_links_are_busy_for_as_long_as_their_collectives(facts):
    """One machine of two devices and one of one: a ring crosses each network card once each way."""
    sums = {(e.name, e.start_s): e for e in facts.timeline.events if e.stream == "communication"}
    carried = sum(e.size_bytes for e in sums.values())
    busy = dict(facts.timeline.link_busy_s)
    card = facts.cluster.machines[0].nic_bytes_per_s
    assert busy[Link(OUT, 0)] == busy[Link(IN, 1)] == pytest.approx(2 * 2 / 3 * carried / card)
    assert busy[Link(INSIDE, 0)] > 0 and Link(INSIDE, 1) not in busy


def test_why_data_parallelism_lost(facts):
    (even,) = facts.rivals
    assert re.fullmatch(
        r"[\d.]+ ms more, as rank 2 \(RTX2080Ti-11GB, machine old\) computes for [\d.]+ ms", even.why
    )


def test_why_what_does_not_fit_lost(facts):
    """Three devices, of which none has the memory for all samples."""
    text = CLUSTER.format(network=1000)
    for name in ("RTX4090-24GB", "RTX3090-24GB", "RTX2080Ti-11GB"):
        text = text.replace(f'"{name}"', SMALL)
    cluster = Cluster.parse(text)
    plan = mixmesh.plan(Model(), {"x": torch.randn(16384, 1024)}, cluster)
    single = next(r for r in facts_of(plan, cluster).rivals if r.planner == "single")
    assert not single.fits
    assert re.search(
        r" more, as rank 0 \(small, machine new & fast\) computes for .*s; and rank 0 \(small, .*\) "
        r"would need 2\.\d+ GiB and may use 2\.\d+ GiB$",
        single.why,
    )


# --- the page ----------------------------------------------------------------------------------------------


def test_the_page_asks_nobody_and_shows_names_as_text(facts):
    page = page_text(plan_page([facts]))
    own = page.replace(asset("echarts.min.js"), "")
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//|@import|url\(""", own)
    assert "<b>two</b>" not in own and "&lt;b&gt;two&lt;/b&gt; boxes" in own and "new &amp; fast" in own
    assert "@@" not in own and len(page) < 2e6


def test_the_numbers_of_the_page(facts):
    (data,) = data_of(page_text(plan_page([facts])))["variants"]
    assert [rank["samples"] for rank in data["ranks"]] == list(facts.samples) and sum(facts.samples) == 16384
    assert {row["name"] for row in data["candidates"]} == {facts.plan.planner, "ddp-even"}
    assert sum(time_s for _, time_s in data["waterfall"]) == pytest.approx(facts.timeline.step_s)
    events = unpacked(data["predicted"])
    assert max(e[5] for e in events) == pytest.approx(facts.timeline.step_s, rel=1e-6)
    assert sum(e[8] for e in events) == len(facts.critical)
    names = data["predicted"]["names"]
    linear = next(line for line in data["program"] if "aten.linear" in line[0])
    assert linear[2] in names and linear[3] > 0 and linear[1].startswith("tests/report/test_report.py:")


def test_a_measured_timeline(facts, tmp_path):
    file = tmp_path / "t.json"
    save_trace(to_chrome_trace(facts.timeline, name="measured"), file)
    measured = read_trace(file, 3)
    assert measured.step_s == pytest.approx(facts.timeline.step_s)
    assert measured.compute_s == pytest.approx(facts.timeline.compute_s, rel=1e-6)
    assert data_of(page_text(plan_page([replace(facts, measured=measured)])))["variants"][0]["measured"][
        "events"
    ]
    with pytest.raises(InputError, match="other devices"):
        read_trace(file, 2)
    for text, place, got in (("{}", ": traceEvents", "Field required"), ("x", "", "Invalid JSON")):
        file.write_text(text)
        with pytest.raises(InputError, match="not a timeline") as refused:
            read_trace(file, 3)
        assert refused.value.where == f"{file}{place}" and got in refused.value.got


def test_the_command(facts, tmp_path, capsys):
    plan, cluster, page = tmp_path / "x.plan", tmp_path / "c.toml", tmp_path / "r.html"
    facts.plan.save(plan)
    cluster.write_text(facts.cluster.to_toml())
    assert execute(["report", str(plan)]) == 2
    assert f"try      mixmesh report {plan} --cluster C.toml" in capsys.readouterr().err
    words = ["report", str(plan), "--cluster", str(cluster), "--out"]
    assert execute([*words, str(page), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["size_bytes"] == page.stat().st_size and len(printed["sentences"]) == 3
    assert execute([*words, str(tmp_path / "none" / "r.html")]) == 2
    assert "cannot write the report" in capsys.readouterr().err


def test_two_plans_side_by_side(facts):
    """Equal parts against parts by speed: the oldest device computes longest on an equal part."""
    even = mixmesh.plan(Model(), {"x": torch.randn(16384, 1024)}, facts.cluster, planner="ddp-even")
    a, b = replace(facts, name="a.plan"), facts_of(even, facts.cluster, name="b.plan", is_compared=False)
    step, shares, memory = differences(a, b)
    assert re.fullmatch(
        r"a\.plan is [\d.]+x as fast as b\.plan: [\d.]+ ms a step, and [\d.]+ ms there. "
        r"Of the [\d.]+ ms between them [\d.]+ ms are computing of the busiest device \(rank 2\)\.",
        step,
    )
    most = max(range(3), key=lambda rank: abs(facts.samples[rank] - b.samples[rank]))
    assert shares.startswith(
        f"Samples in a.plan and in b.plan: rank {most} has {facts.samples[most]} and {b.samples[most]}, rank"
    )
    assert re.match(r"a\.plan fills rank \d most, \d+% of its memory", memory)
    _, alike, _ = differences(b, replace(b, name="c.plan"))
    assert alike == "Every device has as many samples in b.plan as in c.plan."
    page = plan_page([a, b], differences(a, b), side_by_side(a, b))
    assert [v["name"] for v in page.data["variants"]] == ["a.plan", "b.plan"]
    assert "Side by side" in page_text(page) and page.sentences[0] == step


def test_the_sentences_of_the_demo():
    """The page of ``make demo``, as its cluster file alone lets the times be expected."""
    cluster = Cluster.parse(DEMO_CLUSTER)
    plan = make_plan(demo_trace(), cluster)
    assert sentences(facts_of(plan, cluster)) == DEMO


def test_the_sentences_of_the_demo_by_what_was_measured():
    """The same from a profile that the demo measured (``python -m benchmarks.demo --profile P.json``, figures
    rounded to four digits): another device sets the pace, by the kernels that each really has."""
    cluster, profile = Cluster.parse(DEMO_CLUSTER), Profile.load(DEMO_PROFILE)
    plan = make_plan(demo_trace(), cluster, profile=profile)
    facts = facts_of(plan, cluster, profile=profile)
    assert plan.cost_source == "profile" and facts.parts.step_s == pytest.approx(facts.timeline.step_s)
    assert sentences(facts) == DEMO_MEASURED
