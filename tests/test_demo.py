"""The figures of ``make demo``, of measurements by hand, and its cases."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from benchmarks.demo.__main__ import Outcome, details, summarise, table
from benchmarks.demo.cases import CASES, EVENLY, GPT, PLAN, PROPORTIONAL, SHARDED, SINGLE, WORDS
from mixmesh.cluster import Cluster


def outcome(case, seconds: dict[str, list[float]]) -> Outcome:
    losses = {name: [4.0, 2.0] for name in seconds}
    plan = SimpleNamespace(predicted_step_s=1.5, planner="hap")
    cluster = Cluster.parse(case.cluster)
    return Outcome(
        replace(case, make=lambda: SimpleNamespace(batch={"x": SimpleNamespace(shape=(48, 2))})),
        cluster, None, {PLAN: plan}, seconds, losses, [24.0, 48.0, 96.0], [4.0, 2.5], "none",
    )  # fmt: skip


@pytest.fixture
def both() -> tuple[Outcome, Outcome]:
    gpt = {SHARDED: [5.0, 5.0], EVENLY: [4.0, 4.0], PROPORTIONAL: [2.0, 2.0], PLAN: [1.0, 3.0]}
    words = {SHARDED: [9.0], SINGLE: [3.0], EVENLY: [8.0], PROPORTIONAL: [6.0], PLAN: [1.0]}
    return outcome(GPT, gpt), outcome(WORDS, words)


def test_the_gain_of_search_is_over_the_best_of_what_a_person_writes(both):
    gpt, words = both
    summary = summarise(gpt, words)
    assert (words.best_baseline, gpt.best_baseline) == (SINGLE, PROPORTIONAL)
    assert summary["search_speedup_over_best_baseline"] == 3.0
    assert summary["search_speedup_over_ddp_even"] == 8.0
    assert summary["speedup_over_ddp_even"] == 2.0 and summary["speedup_over_ddp_proportional"] == 1.0
    assert summary["fraction_of_ideal"] == 0.5  # 48 samples at 48 a second, and a step of 2 s
    assert summary["max_loss_difference"] == pytest.approx(0.2)
    assert details(words)["reference"] == [4.0, 2.5]


def test_the_table_has_both_cases(both):
    console = Console(width=120, file=io.StringIO())
    console.print(table(*both))
    text = console.file.getvalue()
    lines = [line for line in text.splitlines() if PLAN + " " in line and "│" in line]
    assert len(lines) == 2 and "2.00x" in lines[0] and "8.00x" in lines[1]
    assert text.count(SINGLE) == 1


def test_cases_are_jobs_on_the_devices_of_their_clusters():
    for case in CASES.values():
        made = case.make()
        rows = next(iter(made.batch.values())).shape[0]
        assert rows % Cluster.parse(case.cluster).world_size == 0  # even batches are whole
        assert case.steps % case.rounds == 0
