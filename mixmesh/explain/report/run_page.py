"""The page of a training, or of two side by side: losses, throughput and events."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from ...base.run_log import CHECKPOINT, FAULT, OWN, PLAN, SHARES, START, STOP, Mark, RunLog
from ...base.units import number_text, plural, seconds_text
from .page import Page, asset, filled, section_html, table_html
from .recognise import Run

WARM_UP_STEPS = 2  # after every start, while allocators and connections fill
POINTS = 4000  # points of a curve
NAMES = {
    START: "start",
    FAULT: "fault",
    PLAN: "new plan",
    SHARES: "new shares",
    CHECKPOINT: "checkpoint",
    STOP: "stopped",
}
CHANGES = {PLAN: "Training went on with another plan", SHARES: "Shares followed the devices' speeds"}
SAME = 0.01  # share of a step
MOST_TOLD = 3  # faults told in words


def run_page(runs: Sequence[Run]) -> Page:
    """The page of one or two trainings."""
    words = sentences(runs[0])
    if len(runs) > 1:
        words = [f"{run.name}: {text[:1].lower()}{text[1:]}" for run in runs for text in sentences(run)]
        words = [*differences(*runs), *words]
    rows: list[tuple[str, ...]] = [(run.name, *row) for run in runs for row in mark_rows(run)]
    header: tuple[str, ...] = ("training", "after step", "what", "more")
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
    """The median step without warm-up steps; None without steps."""
    starts = {mark.step for mark in log.marks if mark.event in (START, PLAN)} | {0}
    warm = [s.step_s for s in log.steps if not any(0 < s.step - n <= WARM_UP_STEPS for n in starts)]
    times = warm or [s.step_s for s in log.steps]
    return statistics.median(times) if times else None


def sentences(run: Run) -> list[str]:
    """The training in a few sentences: its progress and speed, its problems, and the rank that the others
    wait for."""
    log = run.log
    if not log.steps:
        return ["No step was made."]
    lines = [*progress_texts(log), *interruption_texts(log), *kept_texts(log), *stop_texts(log)]
    if own := log.of(OWN):
        lines.append(slowest_text(own[-1].facts["own_s"]))
    return lines


def progress_texts(log: RunLog) -> Iterator[str]:
    """Yields the number of steps and their time, compared with the last prediction."""
    losses = [s.loss for s in log.steps if s.loss is not None]
    step_s = usual_step_s(log)
    assert step_s is not None  # there are steps
    course = f", loss {losses[0]:.4g} to {losses[-1]:.4g}" if losses else ""
    yield f"{plural(len(log.steps), 'step')}{course}; a step takes {seconds_text(step_s)} (median)."
    planned = [mark for mark in log.marks if mark.event in (START, PLAN)]
    predicted_s = planned[-1].facts.get("predicted_step_s") if planned else None
    if predicted_s:
        bound_s = planned[-1].facts.get("bound_s")
        share = (
            f", and {bound_s / step_s:.0%} of the rate that no plan can exceed was reached" if bound_s else ""
        )
        yield f"{seconds_text(predicted_s)} were predicted ({step_s / predicted_s:.2f}x){share}."


def interruption_texts(log: RunLog) -> Iterator[str]:
    """Describes the faults and the starts after them, or says that there was neither a fault nor a stop by a
    signal."""
    faults, stops = log.of(FAULT), log.of(STOP)
    again = [mark for mark in log.of(START) if mark.step or mark.num_undone]
    yield from (f"{fault_text(mark)}." for mark in faults[-MOST_TOLD:])
    if again:
        undone = sum(mark.num_undone for mark in again)
        where = ", ".join(str(mark.step) for mark in again)
        twice = f"{plural(undone, 'step')} {'was' if undone == 1 else 'were'} made twice"
        yield f"It was started again from step {where}; {twice}."
    if not (again or faults or stops):
        yield "It was never interrupted."


def kept_texts(log: RunLog) -> Iterator[str]:
    """Yields the number of checkpoints, and where the plan or its shares changed during the run."""
    if saved := log.of(CHECKPOINT):
        yield f"{plural(len(saved), 'checkpoint')}, the newest after step {saved[-1].step}."
    changes = [(marks, text) for event, text in CHANGES.items() if (marks := log.of(event))]
    for changed, text in sorted(changes, key=lambda change: change[0][-1].step):
        where = ", ".join(str(mark.step) for mark in changed)
        cause = changed[-1].facts.get("cause")
        yield f"{text} after step {where}{f': {cause}' if cause else ''}."


def stop_texts(log: RunLog) -> Iterator[str]:
    """The last stop by a signal, if there was one."""
    for stop in log.of(STOP)[-1:]:
        yield f"It was stopped by {stop.facts.get('cause', 'a signal')} after step {stop.step}."


def slowest_text(own_s: Sequence[float]) -> str:
    """Names the rank that the others wait for, judging by its own seconds of a step."""
    slowest = max(range(len(own_s)), key=own_s.__getitem__)
    behind_s = own_s[slowest] - min(own_s)
    if behind_s < SAME * own_s[slowest]:
        return "At the end all ranks worked equally long on a step."
    more = f"{seconds_text(behind_s)} a step more than the fastest"
    return f"At the end rank {slowest} worked longest, {more}."


def differences(one: Run, two: Run) -> list[str]:
    """The differences of two trainings, in words."""
    a_s, b_s = usual_step_s(one.log), usual_step_s(two.log)
    lines = []
    if a_s and b_s:
        gain = a_s / b_s
        how = "as fast as" if abs(gain - 1) < SAME else f"{number_text(gain)}x as fast as"
        times = f"{seconds_text(b_s)} a step, and {seconds_text(a_s)} there"
        lines.append(f"{two.name} is {how} {one.name}: {times}.")
    losses = [{s.step: s.loss for s in run.log.steps if s.loss is not None} for run in (one, two)]
    if common := sorted(losses[0].keys() & losses[1].keys()):
        last = common[-1]
        values = f"{losses[0][last]:.4g} in {one.name} and {losses[1][last]:.4g} in {two.name}"
        lines.append(f"After step {last}, the last that both made, the loss is {values}.")
    return lines


def rank_text(facts: dict[str, Any]) -> str:
    """``rank 1 (T4-16GB of machine "b")``; empty for events of all ranks."""
    if "rank" not in facts:
        return ""
    return f"rank {facts['rank']}" + (f" ({facts['device']})" if "device" in facts else "")


def fault_text(mark: Mark) -> str:
    """``After step 20 rank 1 (cpu-35) was lost: it is stopped (by a signal), for 20 s``."""
    who = rank_text(mark.facts)
    why = mark.facts.get("why", "for an unknown reason")
    why = f"it {why}" if why.startswith(("has ", "is ")) else why
    return f"After step {mark.step} {f'{who} was lost' if who else 'an error ended it'}: {why}"


def mark_rows(run: Run) -> list[tuple[str, str, str]]:
    """The rows of a table of events: after which step, what happened, and details."""
    kept, rows = set(run.kept_steps), []
    before: dict[str, Any] = {}  # facts about the plan, known so far
    for mark in run.log.marks:
        if mark.event in NAMES:
            rows.append((str(mark.step), NAMES[mark.event], more(mark, kept, before)))
        if mark.event in (START, PLAN):
            before = mark.facts
    return rows


def more(mark: Mark, kept: set[int], before: dict[str, Any]) -> str:
    """Further facts about a mark; ``before`` are the facts of the plan until then."""
    facts = mark.facts
    if mark.event in (START, PLAN):
        undone = f"{plural(mark.num_undone, 'step')} made again" if mark.num_undone else ""
        return ", ".join(filter(None, (*plan_texts(facts, before), facts.get("cause", ""), undone)))
    if mark.event == CHECKPOINT:
        return "still there" if mark.step in kept else ""
    if mark.event == FAULT:
        return ": ".join(filter(None, (rank_text(facts), facts.get("why", ""))))
    pause = f"took {seconds_text(facts['pause_s'])}" if "pause_s" in facts else ""
    return ", ".join(filter(None, (facts.get("cause", ""), pause)))


def plan_texts(facts: dict[str, Any], before: dict[str, Any]) -> Iterator[str]:
    """The devices of a plan, its planner and its step, each compared with the plan ``before`` if it
    differs."""
    shown = (
        ("world_size", lambda count: plural(count, "device")),
        ("planner", lambda planner: f"planned by {planner}"),
        ("predicted_step_s", lambda step_s: f"{seconds_text(step_s)} a step predicted"),
    )
    for name, text in shown:
        if name in facts:
            is_other = name in before and before[name] != facts[name]
            was = seconds_text(before[name]) if is_other and name.endswith("_s") else before.get(name)
            yield text(facts[name]) + (f" (before: {was})" if is_other else "")


def run_object(run: Run) -> dict[str, Any]:
    """All data of a training that is drawn; beyond ``POINTS`` steps, each point is the mean of several."""
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
