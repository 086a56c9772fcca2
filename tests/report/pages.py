"""Pages of every kind, to be looked at: made from what plans, trainings and benches leave behind."""

from __future__ import annotations

from dataclasses import replace

from mixmesh.base.run_log import mark_line, parse_log, step_line
from mixmesh.explain.report import Page, bench_page, plan_page, run_page
from mixmesh.explain.report.facts import Facts, what_if
from mixmesh.explain.report.pair import differences, side_by_side
from mixmesh.explain.report.recognise import Bench, Run

WHY = "has ended without a message: it was killed, perhaps for taking too much memory"
CAUSE = "compared with the others, device 2 takes 1.90x as long as planned"
LOG = "".join(
    [
        mark_line("start", 0, 1.0, world_size=2),
        *(step_line(n, 3.0 - n / 10, 0.2 + n / 100, 160, 1.0) for n in range(1, 40)),
        mark_line("checkpoint", 20, 1.0),
        mark_line("own", 30, 1.0, own_s=[0.1, 0.15]),
        mark_line("fault", 39, 1.0, rank=1, device='T4-16GB of machine "old"', why=WHY),
        mark_line("start", 20, 1.0, world_size=1, planner="single", predicted_step_s=0.2),
        *(step_line(n, 3.0 - n / 10, 0.2, 160, 1.0) for n in range(21, 60)),
        mark_line("own", 50, 1.0, own_s=[0.1, 0.15]),
        mark_line("shares", 55, 1.0, pause_s=0.5, cause=CAUSE),
        mark_line("plan", 57, 1.0, world_size=2, planner="hap", cause=CAUSE),
        mark_line("stop", 59, 1.0, cause="SIGTERM"),
    ]
)
RUN = Run("run", parse_log(LOG), (2,))
NAMES = ("a transformer of many layers on eight devices", "b", "c")
ROWS = tuple({"case": name, "step_s": n + 1.0, "speedup": 2.0 - n} for n, name in enumerate(NAMES))
BENCH = Bench("r.json", {"bench": "x"}, ROWS)


def plan(facts: Facts) -> Page:
    """A plan with what was measured and the answers to what-ifs."""
    asked = what_if(facts.plan, facts.cluster, None)
    return plan_page([replace(facts, measured=facts.timeline, what_if=asked)])


def two_plans(facts: Facts) -> Page:
    a, b = replace(facts, name="a.plan"), replace(facts, name="b.plan")
    return plan_page([a, b], differences(a, b), side_by_side(a, b))


def run(_: Facts) -> Page:
    return run_page([RUN])


def two_runs(_: Facts) -> Page:
    return run_page([RUN, replace(RUN, name="other")])


def bench(_: Facts) -> Page:
    return bench_page([BENCH])


def two_benches(_: Facts) -> Page:
    return bench_page([BENCH, replace(BENCH, name="s.json")])


PAGES = {
    "plan": plan,
    "two-plans": two_plans,
    "run": run,
    "two-runs": two_runs,
    "bench": bench,
    "two-benches": two_benches,
}
