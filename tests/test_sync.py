"""Owners per bucket: however each bucket meets, gradients are those of one device; what is chosen pays."""

from __future__ import annotations

import pytest
import torch
from gloo_world import assert_passed, run_world
from small_graphs import THREE, cluster
from torch import nn

from mixmesh.cost import CostModel
from mixmesh.cost.exchanges import Exchange
from mixmesh.cost.sums import gradient_sums
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import make_ratio, parse_program
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.measure.verification import verify
from mixmesh.passes.buckets import with_buckets
from mixmesh.passes.sync import best_sync, options
from mixmesh.passes.zero import ownable, with_owners, zero_stage
from mixmesh.planner import simple
from mixmesh.planner.budget import AMPLE
from mixmesh.planner.passes import REDUCTIONS
from mixmesh.planner.task import Task
from mixmesh.runtime.comm import Comm
from mixmesh.runtime.parallel import parallelize
from mixmesh.search.baselines import data_parallel
from mixmesh.simulator import simulate

RATIO = make_ratio([0.5, 0.3, 0.2])
OWNERS = {  # by the layer's name: sharded evenly, by other shares of some ranks, by a server, by nobody
    "0.weight": make_ratio([1, 1, 1]),
    "2.weight": make_ratio([0, 0.25, 0.75]),
    "4.weight": make_ratio([0, 0, 1]),
}


def model(width: int = 32) -> nn.Module:
    torch.manual_seed(0)

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.Tanh())]
            self.layers = nn.Sequential(*layers)

        def forward(self, x):
            return (self.layers(x) - x).square().mean()

    return Deep()


def batch(width: int = 32, rows: int = 20) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, width, generator=torch.Generator().manual_seed(1))}


def mixed():
    program = data_parallel(trace(model(), batch()).graph, CostModel(cluster(THREE)), RATIO)
    owners = {
        i.result: shares
        for i in ownable(program)
        for name, shares in OWNERS.items()
        if i.args[0].endswith(name)
    }
    assert len(owners) == 3
    return with_buckets(with_owners(program, owners), 1.0)


def test_a_mixture_verifies():
    report = verify(model(), batch(), mixed())
    assert report.ok, report


def test_a_mixture_prints_and_parses():
    program = mixed()
    assert parse_program(str(program)) == program
    assert [s.rooted for s in gradient_sums(program) if s.owned] == [True, False, False]
    assert with_owners(program, {}) != program
    assert all(s.owned is None for s in gradient_sums(with_owners(program, {})))


def trains(_) -> None:
    single, other = model(), model()
    reference = torch.optim.Adam(single.parameters(), lr=1e-2)
    made, optimizer = parallelize(
        other, torch.optim.Adam(other.parameters(), lr=1e-2), mixed(), device="cpu", timeout_s=60
    )
    for _ in range(4):
        losses = []
        for this, step in ((single, reference), (made, optimizer)):
            loss = this(**batch())
            loss.backward()
            step.step()
            step.zero_grad()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def make_comm() -> None:
    Comm.of_sets(3, (), device="cpu", timeout_s=60)


def test_a_mixture_trains_over_gloo():
    assert_passed(run_world(3, {"trains": trains}, make_comm)["trains"])


def test_a_server_costs_a_reduce_and_a_broadcast():
    costs = CostModel(cluster(THREE))
    ranks = (0, 1, 2)
    for name, other in (("reduce_scatter", "reduce"), ("all_gather", "broadcast")):
        served = Exchange(name, 10**6, ranks, rooted=True)
        assert served.seconds(costs) == costs.collective(other, ranks).seconds(10**6)
        assert served.seconds(costs) > Exchange(name, 10**6, ranks).seconds(costs)


@pytest.mark.parametrize("link", [0.5, 2, 1000])
def test_a_mixture_is_no_slower_than_one_way_for_all(link):
    costs = CostModel(cluster(THREE, link))
    program = data_parallel(trace(model(256), batch(256, rows=4096)).graph, costs, RATIO)
    program = with_buckets(program, 3e5)

    def step_s(p) -> float:
        return simulate(p, costs).step_s

    buckets = gradient_sums(program)
    assert len(buckets) == 3
    least_s = step_s(best_sync(program, costs, step_s, mixed=True))
    assert least_s <= step_s(best_sync(program, costs, step_s, mixed=False))
    assert least_s <= step_s(program)
    for shares in options(program, costs, buckets[0]):
        every = {p.result: shares for s in buckets for p in s.params if shares}
        assert least_s <= step_s(with_owners(program, every))


@pytest.mark.parametrize("link, hides", [(2, False), (1e5, True)])
def test_owners_where_sums_do_not_hide_or_for_the_optimizer(link, hides):
    graph = trace(model(768), batch(768, rows=4096)).graph
    task = Task(graph, CostModel(cluster(THREE, link)), ADAM, lambda _: None)
    (plain,) = simple.ddp_proportional(task)
    made = REDUCTIONS(task, plain, AMPLE)
    saved_s = plain.timeline.step_s - made.timeline.step_s
    optimizer_s = max(plain.simulation.sheet.optimizer_s(plain.program))
    assert zero_stage(made.program) > 0 or hides
    assert 0 <= saved_s
    assert (saved_s <= optimizer_s) == hides
