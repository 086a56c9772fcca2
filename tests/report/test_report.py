"""The page of a plan: its sentences, its numbers, and, where there is a Chromium, how it looks in it."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import mixmesh
from benchmarks.demo.cases import CLUSTER as DEMO_CLUSTER
from benchmarks.demo.job import job
from mixmesh.__main__ import execute
from mixmesh.base.run_log import mark_line, parse_log, step_line
from mixmesh.base.timeline import Event, Timeline, save_trace, to_chrome_trace
from mixmesh.cluster import Cluster
from mixmesh.errors import InputError
from mixmesh.explain.report import Page, bench_page, facts_of, page_text, plan_page, run_page
from mixmesh.explain.report.facts import Facts, what_if
from mixmesh.explain.report.measured import read_trace
from mixmesh.explain.report.pair import differences, side_by_side
from mixmesh.explain.report.parts import EXCHANGES, GATHERS, GRADIENTS, OTHERS, waits
from mixmesh.explain.report.path import critical_path
from mixmesh.explain.report.plan_page import rank_object
from mixmesh.explain.report.recognise import Bench, Run
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
SMALL = '{ name = "small", tflop_per_s = 10, memory_gib = 1.7, memory_gbyte_per_s = 500 }'
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


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


LOG = "".join(
    [
        mark_line("start", 0, 1.0, world_size=2),
        *(step_line(n, 3.0 - n / 10, 0.2 + n / 100, 160, 1.0) for n in range(1, 40)),
        mark_line("checkpoint", 20, 1.0),
        mark_line("own", 30, 1.0, own_s=[0.1, 0.15]),
        mark_line("start", 20, 1.0, world_size=2),
        *(step_line(n, 3.0 - n / 10, 0.2, 160, 1.0) for n in range(21, 60)),
        mark_line("own", 50, 1.0, own_s=[0.1, 0.15]),
        mark_line("shares", 55, 1.0, pause_s=0.5),
    ]
)
DEMO = [
    "The bottleneck is rank 1 (cpu-35, machine a): it computes for 100% of the step of 5.52 s.",
    "The plan is 2.1x as fast as data parallelism with equal parts (11.7 s), mostly because rank 3 "
    "(cpu-18, machine b) would compute for 11.6 s on an equal part, and computes for 4.95 s here.",
    "With links 2x as fast this program would take 5.51 s a step: nothing is gained by faster links.",
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
    busy = {(way, number): busy_s for way, number, busy_s in facts.timeline.link_busy_s}
    card = facts.cluster.machines[0].nic_bytes_per_s
    assert busy["out", 0] == busy["in", 1] == pytest.approx(2 * 2 / 3 * carried / card)
    assert busy["inside", 0] > 0 and ("inside", 1) not in busy


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
        r"would need 1\.\d+ GiB and may use 1\.6\d GiB$",
        single.why,
    )


# --- the page ----------------------------------------------------------------------------------------------


def test_the_page_asks_nobody_and_shows_names_as_text(facts):
    page = page_text(plan_page([facts]))
    own = page.replace(
        (Path(mixmesh.__file__).parent / "explain/report/assets/echarts.min.js").read_text(), ""
    )
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//|@import|url\(""", own)
    assert "<b>two</b>" not in own and "&lt;b&gt;two&lt;/b&gt; boxes" in own and "new &amp; fast" in own
    assert "@@" not in own and len(page) < 2e6


def test_the_numbers_of_the_page(facts):
    (data,) = data_of(page_text(plan_page([facts])))["variants"]
    assert [rank["samples"] for rank in data["ranks"]] == list(facts.samples) and sum(facts.samples) == 16384
    assert {row["name"] for row in data["candidates"]} == {facts.plan.planner, "ddp-even"}
    assert sum(time_s for _, time_s in data["waterfall"]) == pytest.approx(facts.timeline.step_s)
    events = data["predicted"]["events"]
    assert max(e[4] + e[5] for e in events) == pytest.approx(1e9 * facts.timeline.step_s, rel=1e-6)
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
    file.write_text("{}")
    with pytest.raises(InputError, match="not a timeline"):
        read_trace(file, 3)


def test_the_command(facts, tmp_path, capsys):
    plan, cluster, page = tmp_path / "x.plan", tmp_path / "c.toml", tmp_path / "r.html"
    facts.plan.save(plan)
    cluster.write_text(facts.cluster.to_toml())
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
    page = plan_page([a, b], differences(a, b), side_by_side(a, b))
    assert [v["name"] for v in page.data["variants"]] == ["a.plan", "b.plan"]
    assert "Side by side" in page_text(page) and page.sentences[0] == step


def test_the_sentences_of_the_demo():
    """The page of ``make demo``, as its cluster file alone lets the times be expected."""
    cluster = Cluster.parse(DEMO_CLUSTER)
    plan = make_plan(demo_trace(), cluster)
    assert sentences(facts_of(plan, cluster)) == DEMO


# --- in a browser ------------------------------------------------------------------------------------------

# counts what is wrong with any page as it stands: what is cut off or overlaps, what cannot be read
LOOK = r"""
<script>
const wrong = [];
addEventListener('error', e => wrong.push(String(e.message)));
document.addEventListener('securitypolicyviolation', e => wrong.push('asked for ' + e.blockedURI));
const right = () => document.documentElement.getBoundingClientRect().right + 1;
function overlapping(boxes, what) {
  boxes.forEach((a, n) => boxes.slice(n + 1).forEach(b => {
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const tall = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 3 && tall > 3) wrong.push('overlap: ' + what);
  }));
}
function look(when) {
  for (const each of document.querySelectorAll('body *')) {
    if (each.closest('.scroll, .skip, .chart') || !each.getClientRects().length) continue;
    const end = each.getBoundingClientRect().right;
    if (end > right()) wrong.push(`cut off ${when}: ${each.tagName} ${each.id}`);
  }
  const sections = [...document.querySelectorAll('main > section')];
  overlapping(sections.map(s => s.getBoundingClientRect()), 'sections');
  for (const chart of document.querySelectorAll('.chart')) {
    if (!chart.getClientRects().length) continue;
    if (!chart.querySelector('canvas, svg')) wrong.push('nothing drawn in ' + chart.id);
    if (!chart.getAttribute('aria-label')) wrong.push('no label on ' + chart.id);
    const inside = chart.getBoundingClientRect();
    const texts = [...chart.querySelectorAll('svg text')].filter(t => !t.closest('[clip-path]'));
    overlapping(texts.map(t => t.getBoundingClientRect()), `texts in ${chart.id} ${when}`);
    for (const t of texts) {
      const box = t.getBoundingClientRect();
      const isInside = box.left >= inside.left - 1 && box.bottom <= inside.bottom + 1;
      if (!isInside) wrong.push(`cut off: ${t.textContent}`);
    }
  }
}
const linear = x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
const luminance = text => {
  const [r, g, b] = text.match(/\d+/g).map(x => linear(x / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
function ground(each) {
  for (let e = each; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (!/, 0\)$/.test(colour)) return luminance(colour);
  }
  return 1;
}
function contrast() {
  const all = 'h1, h2, h3, p, li, th, td, footer, summary, label, button, select';
  for (const each of document.querySelectorAll(all)) {
    const text = luminance(getComputedStyle(each).color), under = ground(each);
    const found = (Math.max(text, under) + 0.05) / (Math.min(text, under) + 0.05);
    if (found < 4.5) wrong.push(`contrast ${found.toFixed(1)} of ${each.tagName}`);
  }
}
setTimeout(() => {
  look('at first');
  contrast();
  USE
  const told = JSON.stringify([...new Set(wrong)]).replace(/[<&]/g, ' ');
  document.body.insertAdjacentHTML('beforeend', `<pre id="seen">${told}</pre>`);
}, 500);
</script></body>"""

USE_PLAN = r"""
  const search = document.getElementById('search');
  search.value = 'aten.linear'; search.oninput();
  if (!/^[1-9]\d* of \d+ lines$/.test(document.getElementById('found').textContent)) wrong.push('search');
  const before = JSON.stringify(shown());
  document.getElementById('zoom-in').click();
  if (JSON.stringify(shown()) === before) wrong.push('zoom');
  const timeline = document.getElementById('timeline');
  const press = key => timeline.dispatchEvent(new KeyboardEvent('keydown', { key }));
  press('0');
  if (JSON.stringify(shown()) !== before) wrong.push('key 0');
  press('+');
  if (JSON.stringify(shown()) === before) wrong.push('key +');
  document.querySelector('#program tr:not([hidden]) button').click();
  if (!document.getElementById('picked').textContent.includes('from')) wrong.push('no event of a line');
  document.querySelectorAll('#variants input')[1].click();
  const first = document.querySelector('[data-variant="0"]');
  if (plan.name !== 'b' || first.checkVisibility()) wrong.push('choice');
  look('after the choice');
"""
USE_BENCH = """
  const label = document.getElementById('bars').getAttribute('aria-label');
  select.selectedIndex = 1; select.onchange();
  if (document.getElementById('bars').getAttribute('aria-label') === label) wrong.push('figure');
  look('after the choice');
"""
# a window of Chromium is at least 500 wide: a phone's width is that of the page
PHONE, LAPTOP = 390, 1280


def browsed(page: Page, use: str, tmp_path: Path, width: int, scheme: str, shot: str) -> list[str]:
    """What is wrong with a page in Chromium, after it was used."""
    file = tmp_path / "r.html"
    text = page_text(page).replace("</head>", f"<style>html {{ width: {width}px }}</style></head>")
    start, _, end = text.rpartition("</body>")
    dark = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", *dark,
        "--hide-scrollbars", f"--user-data-dir={tmp_path / 'user'}", "--virtual-time-budget=3000",
    ]  # fmt: skip
    shots = os.environ.get("REPORT_SHOTS")
    if shots:
        file.write_text(text)
        target = Path(shots, f"{shot}-{width}-{scheme}.png")
        size = f"--window-size={width},{6000 if width == PHONE else 4200}"
        picture = [*command, size, f"--screenshot={target}", f"file://{file}"]
        subprocess.run(picture, capture_output=True, timeout=90)
        assert target.is_file()
    file.write_text(start + LOOK.replace("USE", use) + end)
    look = [*command, f"--window-size={width},900", "--dump-dom", f"file://{file}"]
    done = subprocess.run(look, capture_output=True, text=True, timeout=90)
    seen = re.findall(r'<pre id="seen">(\[.*?\])</pre>', done.stdout)
    assert seen, done.stderr[-2000:]
    return json.loads(html.unescape(seen[-1]))


BOTH = ((PHONE, "light"), (PHONE, "dark"), (LAPTOP, "light"), (LAPTOP, "dark"))


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width, scheme", BOTH)
def test_plans_in_a_browser(facts, tmp_path, width, scheme):
    asked = what_if(facts.plan, facts.cluster, None)
    a = replace(facts, name="a", measured=facts.timeline, what_if=asked)
    b = replace(facts, name="b")
    page = plan_page([a, b], differences(a, b), side_by_side(a, b))
    assert browsed(page, USE_PLAN, tmp_path, width, scheme, "plan") == []


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width, scheme", ((PHONE, "dark"), (LAPTOP, "light")))
def test_a_training_and_a_bench_in_a_browser(tmp_path, width, scheme):
    run = Run("run", parse_log(LOG), (2,))
    assert browsed(run_page([run, replace(run, name="other")]), "", tmp_path, width, scheme, "run") == []
    names = ("a transformer of many layers on eight devices", "b", "c")
    rows = tuple({"case": name, "step_s": n + 1.0, "speedup": 2.0 - n} for n, name in enumerate(names))
    bench = Bench("r.json", {"bench": "x"}, rows)
    assert (
        browsed(
            bench_page([bench, replace(bench, name="s.json")]), USE_BENCH, tmp_path, width, scheme, "bench"
        )
        == []
    )
