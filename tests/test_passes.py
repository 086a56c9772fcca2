"""The list of passes that finish a plan, and what it says of each."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mixmesh.cluster import Cluster
from mixmesh.frontend.job.workloads import make
from mixmesh.frontend.trace import trace
from mixmesh.planner import make_plan
from mixmesh.planner.budget import AMPLE
from mixmesh.planner.passes import ORDER, PASSES, REMATERIALISATION, Pass
from mixmesh.planner.proposal import Proposal


@pytest.fixture(scope="module")
def plan():
    made = make("vgg19:512")
    return make_plan(trace(made.model, made.batch), Cluster.load("hap-8"), planner="hap")


def test_a_plan_says_what_each_pass_has_brought(plan):
    assert [row.name for row in plan.passes] == [row.name for row in PASSES]
    assert all(row.gained_s >= 0 for row in plan.passes)
    # everything fits, so there was nothing to run again
    assert [row.name for row in plan.passes if row.spent_s == 0] == [REMATERIALISATION.name]
    assert sum(row.gained_s for row in plan.passes) > 0.01 * plan.predicted_step_s


def test_gains_add_up_along_the_list():
    def proposal(step_s: float, micro_batches=None) -> Proposal:
        return Proposal("hap", None, SimpleNamespace(step_s=step_s), True, None, None, micro_batches)

    task = SimpleNamespace(pass_s={})
    halves = Pass("halves", "", lambda task, p, budget: proposal(p.timeline.step_s / 2))
    keeps = Pass("keeps", "", lambda task, p, budget: p)
    made = proposal(8.0)
    for row in (halves, keeps, halves):
        made = row(task, made, AMPLE)
    assert made.gained_s == (("halves", 4.0), ("halves", 2.0))
    assert set(task.pass_s) == {"halves", "keeps"}
    in_micro_batches = proposal(8.0, micro_batches=())
    assert halves(task, in_micro_batches, AMPLE) is in_micro_batches
    assert not ORDER.keeps_micro_batches
