"""Sums of gradients by levels: what they are, what they cost, and that many on their way do not mix."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed, run_world
from small_graphs import MLP, graph

from mixmesh.base.timeline import OUT, Link
from mixmesh.cluster import Cluster
from mixmesh.cost import LEVELLED, CostModel, LinkMeasurement, Profile
from mixmesh.cost.exchanges import Exchange
from mixmesh.cost.levels import best_levels
from mixmesh.cost.sums import gradient_sums
from mixmesh.errors import ParseError
from mixmesh.lang.ir import Levels, parse_program
from mixmesh.planner import make_plan
from mixmesh.runtime import collectives
from mixmesh.runtime.comm import Comm
from mixmesh.runtime.layout import level_groups, meetings
from mixmesh.runtime.levels import ByLevels
from mixmesh.simulator import simulate

TWO_BOXES = """
[network]
bandwidth_gbit_per_s = {rate}
latency_us = 50
[[machine]]
name = "a"
devices = [{{ device = "A100-80GB", count = 2 }}]
link_gbit_per_s = 2400
[[machine]]
name = "b"
devices = [{{ device = "V100-16GB", count = 3 }}]
link_gbit_per_s = 1200
"""
TEXT = """program p world=3 {{
  ratio r0 = [0.5, 0.25, 0.25]
  {levels}
  %w = param("w") : f32[64, 8] R
  %x = input("x") : f32[12, 8] S(0)@r0
  %y = aten.linear(%x, %w) : f32[12, 64] S(0)@r0
  %l = aten.sum(%y) : f32[] P(sum)@r0
  return %l
}}
"""


def cluster(rate: float = 1.0) -> Cluster:
    return Cluster.parse(TWO_BOXES.format(rate=rate), where="test")


def test_parts_are_the_ranks_of_each_machine():
    levels = Levels((2, 3), 100)
    assert levels.parts((0, 1, 2, 3, 4), 100) == ((0, 1), (2, 3, 4))
    assert levels.parts((1, 2, 4), 100) == ((1,), (2, 4))
    assert levels.parts((0, 1, 2, 3, 4), 99) == ()  # small
    assert levels.parts((0, 1), 100) == () and levels.parts((1, 3), 100) == ()  # one level alone


def test_text_says_how_many_ranks_a_machine_has():
    program = parse_program(TEXT.format(levels="levels = [2, 1] from 512"))
    assert program.levels == Levels((2, 1), 512)
    assert parse_program(str(program)) == program
    assert list(meetings(program)) == [
        ("gradient", (0, 1, 2)),
        ("gradient, up", (0, 1)),
        ("gradient, down", (0, 1)),
        ("gradient, between", (0, 2)),
    ]


@pytest.mark.parametrize("sizes", ["[2, 2]", "[]", "[3, 0]"])
def test_machines_have_all_the_ranks(sizes):
    with pytest.raises(ParseError, match="machines of") as caught:
        parse_program(TEXT.format(levels=f"levels = {sizes} from 0"))
    assert "3 together" in str(caught.value)


def test_levels_pass_a_thin_link_less_often():
    costs, everyone = CostModel(cluster()), (0, 1, 2, 3, 4)
    flat, levelled = (Exchange("all_reduce", 2**24, everyone, levelled=by) for by in (False, True))
    loads = [e.link_s_per_byte(costs.cluster)[Link(OUT, 0)] for e in (flat, levelled)]
    assert loads[1] / loads[0] == pytest.approx((2 * 1 / 2) / (2 * 4 / 5))
    assert levelled.seconds(costs) / flat.seconds(costs) == pytest.approx(5 / 8, rel=0.05)
    assert 0 < levelled.lag_s(costs) < 0.1 * levelled.seconds(costs)
    assert best_levels(costs).sizes == (2, 3)


def test_levels_are_no_use_on_one_level():
    alone = "[network]\nbandwidth_gbit_per_s = 1\nlatency_us = 50\n"
    machine = '[[machine]]\nname = "{}"\ndevices = [{{ device = "V100-16GB", count = {} }}]\n'
    for counts in ((4,), (1, 1, 1)):
        text = alone + "".join(machine.format(n, count) for n, count in enumerate(counts))
        assert best_levels(CostModel(Cluster.parse(text, where="test"))) is None


def test_what_was_measured_decides():
    sizes = (2.0**12, 2.0**26)

    def costs(levelled_s: float | None) -> CostModel:
        seconds = {"all_reduce": 1.0} | ({LEVELLED["all_reduce"]: levelled_s} if levelled_s else {})
        rows = [
            LinkMeasurement(name, "", (), ((sizes[0], 0.001), (sizes[1], s))) for name, s in seconds.items()
        ]
        return CostModel(cluster(), Profile({}, tuple(rows)))

    assert best_levels(costs(1.2)) is None
    assert best_levels(costs(0.6)) is not None
    estimated = costs(None).collective(LEVELLED["all_reduce"], (0, 1, 2, 3, 4)).seconds(sizes[1])
    assert estimated == pytest.approx(5 / 8, rel=0.05)  # as the links do flat


def test_a_plan_sums_by_levels_and_baselines_do_not():
    small = graph(MLP, scale=256)
    plan = make_plan(small, cluster(rate=0.5), planner="hap")
    assert plan.program.levels is None or plan.program.levels.sizes == (2, 3)
    parallel = make_plan(small, cluster(rate=0.5), planner="ddp-proportional")
    assert parallel.program.levels is None
    costs = CostModel(cluster(rate=0.5))
    levelled = parallel.program.changed(levels=Levels((2, 3), 0))
    assert simulate(levelled, costs).step_s < 0.8 * simulate(parallel.program, costs).step_s


@pytest.mark.parametrize("rate", [0.01, 0.1, 1, 10, 100])
def test_a_plan_speaks_of_levels_only_where_a_sum_goes_by_them(rate):
    plan = make_plan(graph(MLP, scale=256), cluster(rate))
    by_levels = any(s.parts for s in gradient_sums(plan.program))
    assert by_levels == (plan.program.levels is not None)
    if by_levels:
        costs = CostModel(cluster(rate))
        flat = simulate(plan.program.changed(levels=None), costs, micro_batches=plan.micro_batches)
        assert plan.predicted_step_s <= flat.step_s * (1 + 1e-9)


# --- between processes ----------------------------------------------------------------------------------

WORLD, PARTS = 5, ((0, 1), (2, 3, 4))
SUMS = 24


def make_comm() -> Comm:
    sets = [("gradient", tuple(range(WORLD))), *level_groups(PARTS)]
    return Comm.of_sets(WORLD, sets, device="cpu", timeout_s=20)


def check_many_at_a_time(comm: Comm) -> None:
    """Ranks issue in one order, each at its own pace."""
    pace, levels = random.Random(comm.rank), ByLevels(comm, PARTS)
    channel = comm.channel(comm.everyone, "sum", purpose="gradient")
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int16):
        handles = []
        for n in range(SUMS):
            time.sleep(pace.random() * 0.01)
            x = torch.full((n + 1, 3), comm.rank + n, dtype=dtype)
            handles.append(collectives.all_reduce.start(channel, x, levels=levels, in_place=True))
        for n, handle in enumerate(handles):
            assert torch.equal(handle.wait(), torch.full((n + 1, 3), 10 + 5 * n, dtype=dtype))
            assert handle.is_ready()


def check_beside_flat_sums(comm: Comm) -> None:
    levels = ByLevels(comm, PARTS)
    channel = comm.channel(comm.everyone, "sum", purpose="gradient")
    handles = [
        collectives.all_reduce.start(
            channel, torch.full((1000,), float(comm.rank)), levels=levels if n % 2 else None
        )
        for n in range(10)
    ]
    for handle in handles:
        assert handle.wait().tolist() == [10.0] * 1000


def check_pieces_of_leaders(comm: Comm) -> None:
    """Two leaders own 3 and 4 rows: sums come to them, and their rows to all."""
    levels, sizes = ByLevels(comm, PARTS), (3, 0, 4, 0, 0)
    channel = comm.channel(comm.everyone, "owned", purpose="gradient")
    start = {0: 0, 2: 3}.get(comm.rank, 0)
    for dtype in (torch.float32, torch.int64):
        x = torch.arange(14, dtype=dtype).view(7, 2)
        scattered = [collectives.reduce_scatter.start(channel, x + n, sizes, levels=levels) for n in range(5)]
        for n, handle in enumerate(scattered):
            mine = handle.wait()
            assert torch.equal(mine, (5 * (x + n)).narrow(0, start, sizes[comm.rank]))
        gathered = [
            collectives.all_gather.start(
                channel, x.narrow(0, start, sizes[comm.rank]) + n, sizes, levels=levels
            )
            for n in range(5)
        ]
        for n, handle in enumerate(gathered):
            assert torch.equal(handle.wait(), x + n)


def check_only_sums(comm: Comm) -> None:
    with pytest.raises(ValueError, match="levels sum"):
        ByLevels(comm, PARTS).all_reduce(torch.ones(2), dist.ReduceOp.MAX, None, True)


CHECKS = {name[6:]: f for name, f in list(globals().items()) if name.startswith("check_")}


@pytest.fixture(scope="module")
def results():
    return run_world(WORLD, CHECKS, make_comm)


@pytest.mark.parametrize("name", CHECKS)
def test_between_processes(results, name):
    assert_passed(results[name])
