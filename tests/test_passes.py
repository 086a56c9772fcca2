"""The list of passes that finish a plan, and what it says of each."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from small_graphs import GRAPHS, graph

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.frontend.job.workloads import make
from mixmesh.frontend.trace import trace
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.planner import make_plan
from mixmesh.planner.budget import AMPLE
from mixmesh.planner.passes import FLAT, ORDER, PASSES, REMATERIALISATION, Pass
from mixmesh.planner.proposal import Proposal
from mixmesh.planner.task import Task


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


UNEVEN = """
[network]
bandwidth_gbit_per_s = 10
[[machine]]
devices = ["V100-16GB", "V100-16GB"]
[[machine]]
devices = ["V100-16GB"]
"""


def hierarchical() -> tuple[Task, Proposal]:
    """A proposal with sums in levels, whose step is so long that flat ones are as fast."""
    task = Task(graph(GRAPHS["mlp"], 1024), CostModel(Cluster.parse(UNEVEN)), ADAM, lambda _: None)
    made = task.judge("hap", task.data_parallel(task.shares(task.ranks)))
    timeline = replace(made.timeline, peak_memory_bytes=made.peak_memory_bytes, step_s=1.0)
    return task, replace(made, timeline=timeline)


def test_flat_sums_have_memory_of_their_own():
    """Other ranks meet, so communicators differ: a plan once told the memory of the sums it no longer had."""
    task, made = hierarchical()
    flat = FLAT(task, made, AMPLE)
    assert made.program.levels is not None and flat.program.levels is None
    peaks = flat.simulation.peak_memory_bytes(flat.program)
    assert flat.peak_memory_bytes == peaks != made.peak_memory_bytes


def test_sums_stay_hierarchical_where_flat_ones_do_not_fit():
    task, made = hierarchical()
    task.usable_bytes = (0.0,) * task.world_size
    assert FLAT(task, made, AMPLE) is made
