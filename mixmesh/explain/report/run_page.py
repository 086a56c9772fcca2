"""The page of a training, or of two side by side: losses and throughput, with what happened."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ...base.run_log import CHECKPOINT, OWN, SHARES, START, Mark, RunLog
from ...base.units import plural, seconds_text
from .page import Page, asset, filled, section_html, table_html
from .recognise import Run

WARM_UP_STEPS = 2  # after a start: allocators and connections fill
POINTS = 4000  # points of a curve
NAMES = {START: "start", CHECKPOINT: "checkpoint", SHARES: "new shares"}
SAME = 0.01  # share of a step


def run_page(runs: Sequence[Run]) -> Page:
    """The page of one or two trainings."""
    words = sentences(runs[0])
    if len(runs) > 1:
        words = [f"{run.name}: {text[:1].lower()}{text[1:]}" for run in runs for text in sentences(run)]
        words = [*differences(*runs), *words]
    rows = [(run.name, *row) for run in runs for row in mark_rows(run)]
    header = ("training", "after step", "what", "more")
    if len(runs) == 1:
        rows, header = [row[1:] for row in rows], header[1:]
    marks = table_html(header, rows, words=range(len(header)))
    main = {"MARKS": section_html("marks", "What happened", marks) if rows else ""}
    lags = any(run.log.of(OWN) for run in runs)
    main["LAGS"] = LAGS if lags else ""
    data = {"runs": [run_object(run) for run in runs], "names": NAMES}
    title = " and ".join(run.name for run in runs)
    return Page(
        f"Training {title}", headline(runs[0]), words, filled(asset("run.html"), main), data, "run.js"
    )


LAGS = section_html(
    "lags",
    "What each rank works on a step",
    "<p>Seconds of a step in which a rank waits for nobody: the longest sets the pace.</p>\n"
    '<div class="chart" id="lags" role="img"></div>',
)


def headline(run: Run) -> str:
    starts = run.log.of(START)
    facts = starts[-1].facts if starts else {}
    where = f" on {plural(facts['world_size'], 'device')}" if "world_size" in facts else ""
    return f"{plural(len(run.log.steps), 'step')}{where}"


def usual_step_s(log: RunLog) -> float | None:
    """The median step, without those that warm up; None without steps."""
    starts = {mark.step for mark in log.of(START)} | {0}
    warm = [s.step_s for s in log.steps if not any(0 < s.step - n <= WARM_UP_STEPS for n in starts)]
    times = warm or [s.step_s for s in log.steps]
    return statistics.median(times) if times else None


def sentences(run: Run) -> list[str]:
    """The training in a few sentences: how far it is, how fast, what went wrong, and who is waited for."""
    log, lines = run.log, []
    if not log.steps:
        return ["No step was made."]
    losses = [s.loss for s in log.steps if s.loss is not None]
    step_s = usual_step_s(log)
    course = f", loss {losses[0]:.4g} to {losses[-1]:.4g}" if losses else ""
    lines.append(f"{plural(len(log.steps), 'step')}{course}; a step takes {seconds_text(step_s)} (median).")
    starts = log.of(START)
    predicted_s = starts[-1].facts.get("predicted_step_s") if starts else None
    if predicted_s:
        bound_s = starts[-1].facts.get("bound_s")
        share = f", and {bound_s / step_s:.0%} of what no plan can pass is reached" if bound_s else ""
        lines.append(f"{seconds_text(predicted_s)} were predicted ({step_s / predicted_s:.2f}x){share}.")
    again = [mark for mark in starts if mark.step or mark.num_undone]
    if again:
        undone = sum(mark.num_undone for mark in again)
        where = ", ".join(str(mark.step) for mark in again)
        lines.append(f"It was started again after step {where}; {plural(undone, 'step')} were made twice.")
    else:
        lines.append("It was never interrupted.")
    if saved := log.of(CHECKPOINT):
        lines.append(f"{plural(len(saved), 'checkpoint')}, the newest after step {saved[-1].step}.")
    if changed := log.of(SHARES):
        where = ", ".join(str(mark.step) for mark in changed)
        lines.append(f"Shares followed the devices' speeds after step {where}.")
    if own := log.of(OWN):
        lines.append(slowest_text(own[-1].facts["own_s"]))
    return lines


def slowest_text(own_s: Sequence[float]) -> str:
    """The rank that others wait for, by its own seconds of a step."""
    slowest = max(range(len(own_s)), key=own_s.__getitem__)
    behind_s = own_s[slowest] - min(own_s)
    if behind_s < SAME * own_s[slowest]:
        return "At last all ranks worked equally long on a step."
    more = f"{seconds_text(behind_s)} a step more than the first to be done"
    return f"At last rank {slowest} worked longest, {more}."


def differences(one: Run, two: Run) -> list[str]:
    """The differences of two trainings, in words."""
    a_s, b_s = usual_step_s(one.log), usual_step_s(two.log)
    lines = []
    if a_s and b_s:
        gain = a_s / b_s
        how = "as fast as" if abs(gain - 1) < SAME else f"{gain:.3g}x as fast as"
        times = f"{seconds_text(b_s)} a step, and {seconds_text(a_s)} there"
        lines.append(f"{two.name} is {how} {one.name}: {times}.")
    losses = [{s.step: s.loss for s in run.log.steps if s.loss is not None} for run in (one, two)]
    if common := sorted(losses[0].keys() & losses[1].keys()):
        last = common[-1]
        values = f"{losses[0][last]:.4g} in {one.name} and {losses[1][last]:.4g} in {two.name}"
        lines.append(f"After step {last}, the last that both made, the loss is {values}.")
    return lines


def mark_rows(run: Run) -> list[tuple[str, str, str]]:
    """The table of what happened: after which step, what, and more of it."""
    kept = set(run.kept_steps)
    return [(str(m.step), NAMES[m.event], more(m, kept)) for m in run.log.marks if m.event in NAMES]


def more(mark: Mark, kept: set[int]) -> str:
    """The rest of what is known of a mark."""
    if mark.event == START:
        devices = plural(mark.facts["world_size"], "device") if "world_size" in mark.facts else ""
        undone = f"{plural(mark.num_undone, 'step')} made again" if mark.num_undone else ""
        return ", ".join(filter(None, (devices, undone)))
    if mark.event == CHECKPOINT:
        return "still there" if mark.step in kept else ""
    return f"took {seconds_text(mark.facts['pause_s'])}" if "pause_s" in mark.facts else ""


def run_object(run: Run) -> dict[str, Any]:
    """All that is drawn of a training; of more than ``POINTS`` steps, means of several."""
    steps = run.log.steps
    every = -(-len(steps) // POINTS) or 1
    chunks = [steps[n : n + every] for n in range(0, len(steps), every)]
    points = []
    for chunk in chunks:
        losses = [s.loss for s in chunk if s.loss is not None]
        speeds = [s.samples_per_s for s in chunk if s.samples_per_s is not None]
        mean_s = statistics.fmean(s.step_s for s in chunk)
        loss = statistics.fmean(losses) if losses else None
        points.append([chunk[-1].step, loss, statistics.fmean(speeds) if speeds else None, mean_s])
    return {
        "name": run.name,
        "points": points,
        "marks": [[m.event, m.step] for m in run.log.marks if m.event in NAMES],
        "own": [[m.step, m.facts["own_s"]] for m in run.log.of(OWN)][-POINTS:],
    }
