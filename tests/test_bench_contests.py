"""bench order, sync, sfb and collectives: their programs, what they make of times, their cases."""

from __future__ import annotations

import pytest
from small_graphs import TWO, cluster

from benchmarks import collectives, jobs, order, sfb, sync
from benchmarks.contest import Contest, ContestResult, Turns, report
from benchmarks.training_results import Timing
from mixmesh.cluster import Cluster
from mixmesh.cost import CollectiveFit, CostModel, ring_fit
from mixmesh.cost.sums import gradient_sums
from mixmesh.frontend.trace import trace

CONTESTS = {"order": order, "sync": sync}


@pytest.mark.parametrize("bench", CONTESTS)
def test_programs_compute_the_same(bench):
    contest = CONTESTS[bench].QUICK[0]
    made = jobs.make(contest.job)
    graph = trace(made.model, made.batch).graph
    programs = contest.programs(graph, CostModel(Cluster.parse(contest.cluster)))
    operators = {name: sorted(str((n.op, n.types)) for n in p.graph.nodes) for name, p in programs.items()}
    assert all(found == sorted(str((n.op, n.types)) for n in graph.nodes) for found in operators.values())
    assert {name for name, _ in contest.targets} < set(programs)
    if bench == "order":
        sums = gradient_sums(programs["ddp"])
        assert all(s.size_bytes >= order.DDP_BYTES[min(n, 1)] for n, s in enumerate(sums[:-1]))


def test_a_speedup_that_is_too_small_is_missed():
    contest = Contest("c", "bert", "", lambda graph, costs: {}, (("fifo", 1.08), ("ddp", 1.0)))
    rounds = {"fifo": (1.0, 1.2, 1.1), "ddp": (1.3, 1.0, 1.1), "ours": (1.0, 1.0, 1.1)}
    timings = tuple(Timing(name, "", r) for name, r in rounds.items())
    result = ContestResult(contest, dict.fromkeys(rounds, 1.0), timings, 1e-6, "quota")
    assert result.targets == {"1.08x fifo": False, "1x ddp": True, "losses": True}
    assert report("order", [result], "x")["targets_met"] == 2


def test_the_crossing_is_found_and_the_formula_is_the_closed_one():
    crossing = sfb.Crossing("c", TWO.replace("LINK", "1"), (0.5, 0.5), (100, 300, 500))
    rounds = {}
    for rows in crossing.rows:
        rounds[f"summed {rows}"], rounds[f"factors {rows}"] = (1.0, 1.1), (0.2 + rows / 400, 0.3 + rows / 400)
    found = Turns({}, tuple(Timing(name, "", r) for name, r in rounds.items()), {}, "quota")
    assert sfb.measured_rows(found, crossing.rows) == pytest.approx(320)
    costs = CostModel(cluster(TWO, 1))

    def no_latency(name, ranks):
        return CollectiveFit(0.0, ring_fit(costs.cluster, name, ranks).s_per_byte)

    beta = 1 / (2 * ring_fit(costs.cluster, "all_gather", (0, 1)).s_per_byte)
    rows = sfb.formula_rows(crossing, costs, no_latency)
    h, f, rate = 1024, 1024, 0.7e12 * 0.5  # the slower device's, at half of its peak
    assert rows == pytest.approx(2 * h * f / (h + f + 2 * h * f * beta / (4 * rate)), rel=0.05)


def test_collectives_are_compared_over_their_skew():
    sweep = collectives.Sweep(collectives.FULL.cluster, (1.0, 2.0, 3.0), (2**20,), 1)
    found = {}
    for name, forms in (("all_gather", ("padded", "broadcasts")), ("reduce_scatter", ("padded", "reduces"))):
        for skew in sweep.skews:
            found[name, forms[0], skew], found[name, forms[1], skew] = [0.5 * skew], [0.8]
    for skew in sweep.skews:
        found["all_to_all", "", skew] = [0.1]
        assert sum(collectives.shares(skew, 4)) == pytest.approx(1)
    rows = collectives.rows(sweep, Cluster.parse(sweep.cluster), found)
    gathers = [r for r in rows if r.collective == "all_gather"]
    assert collectives.crossing(gathers) == pytest.approx(1.6)
    assert [r.fastest for r in gathers] == ["padded", "broadcasts", "broadcasts"]
    assert [r.planned for r in gathers] == ["padded", "broadcasts", "broadcasts"]
    assert collectives.mean_regret(rows) == 1.0
