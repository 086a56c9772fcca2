"""The short forms of ``make fuzz``, with fixed seeds, and what longer ones have found."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz import models, programs
from fuzz.cases import Case, Worlds, make_case, quietly, read_plan, try_plan
from fuzz.report import Report

CORPUS = Path(__file__).with_name("corpus")
FOUND, PLANNED = (sorted(CORPUS.glob(f"{kind}/*.py")) for kind in ("programs", "models"))


@pytest.fixture(scope="module")
def worlds():
    with Worlds() as opened:
        yield opened


@pytest.mark.parametrize("case_seed", range(12))
def test_random_models(case_seed):
    report = models.replay(case_seed)
    assert not report.failures, "\n".join(f.what for f in report.failures)


@pytest.mark.parametrize("case_seed", range(310, 322))
def test_random_programs(case_seed):
    report = programs.replay(case_seed)
    assert not report.failures, "\n".join(f.what for f in report.failures)


def case_of(path: Path, report: Report) -> tuple[Case, dict]:
    text = path.read_text()
    known: dict = {}
    exec(compile(text, str(path), "exec"), known)
    case = make_case("corpus", 0, text, known["OPTIMIZER"], report)
    assert case is not None, report.outcomes
    return case, known


@pytest.mark.parametrize("path", FOUND, ids=lambda p: p.stem)
def test_programs_that_were_found(path, worlds):
    report = Report("corpus")
    with quietly():
        case, known = case_of(path, report)
        try_plan(case, read_plan(known["PLAN"]), path.stem, worlds, report)
    assert not report.failures, report.failures[0].what
    assert report.outcomes == {"right, over gloo too": 1}


@pytest.mark.parametrize("path", PLANNED, ids=lambda p: p.stem)
def test_models_that_were_found(path):
    report = Report("corpus")
    with quietly():
        case, known = case_of(path, report)
        for planner in known["PLANNERS"]:
            models.try_planner(case, report, planner, known.get("CLUSTER_SEED", 0), None)
    assert not report.failures, report.failures[0].what
    assert report.outcomes["right"]
