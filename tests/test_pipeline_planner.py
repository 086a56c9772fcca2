"""Pipelines as they are predicted and found: time and memory of stages, borders between them, and when the
planner takes one."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from pipelines import BATCH, COSTS, FOUR_STAGES, THREE_STAGES, batch, chain, cut_into, model_of, pipelined
from torch import nn

from mixmesh.base.timeline import ACCUMULATION, BUCKET, LOSS_SUM
from mixmesh.cluster import Cluster
from mixmesh.cost import BLOCKING_SENDS, CostModel
from mixmesh.cost.exchanges import held_share
from mixmesh.cost.micro_steps import costed_micro_step
from mixmesh.errors import Infeasible, InputError, PlanError
from mixmesh.frontend.trace import LossSource, trace
from mixmesh.lang.check import check_plan, check_program
from mixmesh.lang.ir import even_ratio, samples_of, support, with_whole_rows
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.lang.plan_file import MicroBatch, Plan, schedule
from mixmesh.measure.verification import verify
from mixmesh.passes.buckets import with_buckets
from mixmesh.planner import make_plan
from mixmesh.planner.pipelines import (
    GROUPS,
    _Estimate,
    arrangements,
    borders,
    hopeful,
    judged,
    kinds_of_stages,
    pipelines,
    proposed,
    through_s,
)
from mixmesh.planner.placed import model_parallel
from mixmesh.planner.spaces import space_of
from mixmesh.planner.task import Task
from mixmesh.search.baselines import data_parallel
from mixmesh.search.placement import Placed, Space, make_grouping
from mixmesh.simulator import Simulation, simulate
from mixmesh.simulator.pipeline import ACTIVATIONS, GRADIENTS, order_of_passes
from mixmesh.step.memory import ALLOWANCE, Flight, Held, Memory, Walked, flight_of

SUSTAINED = "issue_us = 8, sustained = 0.625"  # with the usual share of products half of the peaks
BIG = f"tflop_per_s = 2, memory_gib = 4, memory_gbyte_per_s = 100, {SUSTAINED}"
SMALL = f"tflop_per_s = 1, memory_gib = 4, memory_gbyte_per_s = 50, {SUSTAINED}"
SLOW_NETWORK = f"""\
name = "slow network"
[network]
bandwidth_gbit_per_s = 10
latency_us = 100
kind = "rdma"
[[machine]]
devices = [{{ name = "big", {BIG} }}]
[[machine]]
devices = [{{ name = "small", {SMALL} }}]
[[machine]]
devices = [{{ name = "small", {SMALL} }}]
"""


class Deep(nn.Module):
    """Many parameters for few activations: what a slow network wants in stages."""

    def __init__(self, width: int = 512, depth: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return (x - y).square().mean()


def deep(rows: int = 768, width: int = 1024):
    torch.manual_seed(0)
    return Deep(width), {name: torch.randn(rows, width) for name in ("x", "y")}


@pytest.fixture(scope="module")
def traced():
    return trace(*deep())


def task_of(graph, cluster: Cluster) -> Task:
    return Task(graph, CostModel(cluster), ADAM, lambda _: None)


# --- the simulator ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", (1, 2, 5))
@pytest.mark.parametrize("micro_steps", (1, 3, 8))
def test_every_pass_comes_after_what_it_needs(stages, micro_steps):
    done: set[tuple[int, bool, int]] = set()
    for stage, backward, k in order_of_passes(stages, micro_steps):
        needs = {(stage, False, k)} if backward else set()
        before = stage + 1 if backward else stage - 1
        if 0 <= before < stages:
            needs.add((before, backward, k))
        assert needs <= done
        done.add((stage, backward, k))
    assert len(done) == 2 * stages * micro_steps


def test_stages_compute_at_the_same_time():
    """With transfers that cost nothing, m micro-batches through equal stages take m + stages - 1 turns."""
    cluster = Cluster.parse(
        """name = "even"
        [network]
        bandwidth_gbit_per_s = 1e6
        latency_us = 0
        [[machine]]
        devices = [
          { name = "d", tflop_per_s = 1e-3, memory_gib = 4, memory_gbyte_per_s = 1, count = 4 },
        ]"""
    )
    costs = CostModel(cluster)
    model, inputs = deep(rows=64, width=64)
    program = chain(model, inputs, FOUR_STAGES, costs)
    whole = simulate(program, costs)
    plan = pipelined(program, 8, cluster)
    timeline = simulate(program, costs, micro_batches=plan.micro_batches)
    longest, optimizer_s = max(timeline.compute_s), max(timeline.compute_s) - max(whole.compute_s)
    assert timeline.step_s < 0.6 * whole.step_s
    assert timeline.step_s >= longest and optimizer_s < longest
    assert timeline.step_s <= longest * (8 + 3 + 1) / 8 * 1.2


def test_every_micro_step_but_the_first_adds_to_gradients():
    program, cluster = chain(model_of(), batch(), FOUR_STAGES), COSTS.cluster
    spread = data_parallel(trace(model_of(), batch()).graph, COSTS, even_ratio(4))
    for made, micro_batches in (
        (program, pipelined(program, 6).micro_batches),
        (spread, (MicroBatch(1, 3, 1),) * 3 + (MicroBatch(0, 0, 3),)),
    ):
        timeline = simulate(made, COSTS, micro_batches=micro_batches, events=True)
        for rank, device in enumerate(cluster.devices):
            added = [e.end_s - e.start_s for e in timeline.events if (e.rank, e.name) == (rank, ACCUMULATION)]
            held = sum(p.type.value.size_bytes * held_share(made, p.type, rank) for p in made.params)
            steps = micro_batches[rank].steps or 1
            assert added == pytest.approx([3 * held / device.memory_bytes_per_s] * (steps - 1))


def test_sums_of_a_stage_start_in_its_last_backward_pass():
    """Bucket by bucket; those that stages share wait for the earliest stage."""
    program = with_buckets(chain(model_of(), batch(), THREE_STAGES), 200)
    timeline = simulate(program, COSTS, micro_batches=pipelined(program, 4).micro_batches, events=True)
    ends = {
        rank: max(e.end_s for e in timeline.events if e.rank == rank and e.stream == "compute" and e.op)
        for rank in range(4)
    }
    sums: dict[str, tuple[set, float]] = {}
    for e in timeline.events:
        if e.name.startswith(BUCKET):
            sums.setdefault(e.name, (set(), e.start_s))[0].add(e.rank)
    within = sorted(start for ranks, start in sums.values() if ranks == {1, 2})
    assert len(within) > 2 and within[0] < max(ends[1], ends[2]) and within[0] < ends[0]
    shared = [start for ranks, start in sums.values() if ranks == {0, 3}]  # the table, the head's weight too
    assert len(shared) == 1 and shared[0] >= ends[0]


def test_a_link_is_used_in_both_directions_at_once(traced):
    """Activations to a stage share a link with gradients that come to it, and not with what leaves it."""
    costs = CostModel(Cluster.parse(SLOW_NETWORK))
    stages = [[float(r == n) for r in range(3)] for n in range(3)]
    simulation = Simulation(cut_into(traced.graph, stages, costs), costs, accumulating=True)
    number = {key: n for key, n in simulation.network.numbers.items() if key[0] in (ACTIVATIONS, GRADIENTS)}
    assert len(number) == 4
    named = {n: key for key, n in number.items()}

    def rivals(key: tuple) -> set:
        return {named[n] for n in simulation.network.rivals[number[key]] if n in named}

    assert rivals((ACTIVATIONS, (0, 1))) == {(GRADIENTS, (1, 2))}
    assert rivals((ACTIVATIONS, (1, 2))) == {(GRADIENTS, (0, 1))}


@pytest.mark.parametrize("what", ("tflop_per_s = 1,", "bandwidth_gbit_per_s = 10"))
def test_what_is_faster_makes_no_step_longer(traced, what):
    name, _, value = what.partition("= ")
    stages = [[float(r == n) for r in range(3)] for n in range(3)]
    steps = []
    for times in (1, 2, 8):
        text = SLOW_NETWORK.replace(
            what, f"{name}= {float(value.rstrip(',')) * times}{',' * value.count(',')}"
        )
        costs = CostModel(Cluster.parse(text))
        program = chain(*deep(), stages, costs)
        plan = pipelined(program, 6, costs.cluster)
        steps.append(simulate(program, costs, micro_batches=plan.micro_batches).step_s)
    assert steps == sorted(steps, reverse=True) and steps[0] > steps[-1]


def test_sends_hold_a_stage_where_that_is_asked_for(traced):
    """A stage computes nothing from the end of the pass that it sends of until that has arrived."""
    cluster = Cluster.parse(SLOW_NETWORK)
    stages = [[float(r == n) for r in range(3)] for n in range(3)]
    step_s = {}
    for unmeasured in ((), (BLOCKING_SENDS,)):
        costs = CostModel(cluster, unmeasured=unmeasured)
        program = chain(*deep(), stages, costs)
        plan = pipelined(program, 6, cluster)
        simulation = Simulation(program, costs, accumulating=True)
        timeline = simulation.run(program, plan.micro_batches, events=True)
        names = {m.name for m in simulation.pipeline.moves if m.sender == 0}
        mine = [e for e in timeline.events if e.rank == 0]
        sent = [e for e in mine if e.stream == "communication" and e.name in names]
        works = [e for e in mine if e.stream == "compute"]
        meanwhile = [
            w for s in sent for w in works if w.start_s < s.end_s - 1e-9 and w.end_s > s.start_s + 1e-9
        ]
        assert sent and bool(meanwhile) == (not unmeasured)
        step_s[unmeasured] = timeline.step_s
        assert timeline.step_s == pytest.approx(simulation.step_s(program, plan.micro_batches))
    assert step_s[BLOCKING_SENDS,] > step_s[()]


def two_stages(f: float, b: float, g: float, c: float, t: float, more: tuple, *, blocking: bool) -> dict:
    """When each event of two micro-batches through two stages ends, by hand.

    The first stage goes F0 F1 B0 B1, the second G0 C0 G1 C1; a and r are the transfers of activations and of
    their gradients. ``f``, ``b``, ``g`` and ``c`` are the seconds of a pass, ``t`` those of a transfer,
    ``more`` those in which each stage adds the gradients of the second micro-batch to those of the first.
    """
    out = {"F0": f, "a0": f + t}
    out["F1"] = out["a0" if blocking else "F0"] + f
    # the second are posted when they are there and the receiver has the first, on a link that is free by then
    out["a1"] = max(out["F1"], out["a0"]) + t
    out["G0"] = out["a0"] + g
    out["C0"] = out["G0"] + c
    out["r0"] = out["C0"] + t
    out["G1"] = max(out["r0" if blocking else "C0"], out["a1"]) + g
    out["C1"] = out["G1"] + more[1] + c
    out["B0"] = max(out["a1" if blocking else "F1"], out["r0"]) + b
    out["r1"] = max(out["C1"], out["r0"]) + t
    out["B1"] = max(out["B0"], out["r1"]) + more[0] + b
    return out


@pytest.mark.parametrize("gbit_per_s", (2, 10))
def test_two_stages_by_hand(traced, gbit_per_s):
    """The timeline with and without blocking sends, event by event."""
    cluster = with_network(gbit_per_s)
    ends: dict[bool, dict[str, float]] = {}
    for blocking in (False, True):
        costs = CostModel(cluster, unmeasured=(BLOCKING_SENDS,) if blocking else ())
        program = chain(*deep(), ((1, 0, 0), (0, 1, 0)), costs)
        plan = pipelined(program, 2, cluster)
        timeline = Simulation(program, costs, accumulating=True).run(program, plan.micro_batches, events=True)

        def halves(rank: int, stream: str, backward: bool, events=timeline.events) -> list[list]:
            """The events of the first and of the second micro-batch."""
            mine = [e for e in events if (e.rank, e.stream) == (rank, stream) and e.op and e.name != LOSS_SUM]
            mine = [e for e in mine if e.name.endswith(" grad") == backward and not e.name.startswith(BUCKET)]
            mine.sort(key=lambda e: e.start_s)
            return [mine[: len(mine) // 2], mine[len(mine) // 2 :]]

        kinds = {
            "F": halves(0, "compute", False), "B": halves(0, "compute", True),
            "G": halves(1, "compute", False), "C": halves(1, "compute", True),
            "a": halves(0, "communication", False), "r": halves(0, "communication", True),
        }  # fmt: skip
        took = [sum(e.end_s - e.start_s for e in events) for events, _ in kinds.values()]
        adding = {e.rank: e.end_s - e.start_s for e in timeline.events if e.name == ACCUMULATION}
        start_s = kinds["F"][0][0].start_s
        expected = two_stages(*took[:5], (adding[0], adding[1]), blocking=blocking)
        ends[blocking] = {
            f"{name}{k}": kinds[name][k][-1].end_s - start_s for name in kinds for k in range(2)
        }
        assert ends[blocking] == pytest.approx(expected, rel=1e-9)
    assert ends[True]["B1"] > ends[False]["B1"]


def with_network(gbit_per_s: float) -> Cluster:
    network = f"bandwidth_gbit_per_s = {gbit_per_s}"
    return Cluster.parse(SLOW_NETWORK.replace("bandwidth_gbit_per_s = 10", network))


def test_blocking_sends_change_what_is_planned(traced):
    """Where a chain of stages wins by little it loses if sends hold it up; a plan says on what it counts."""
    free, held = (make_plan(traced, with_network(2.6), unmeasured=names) for names in ((), (BLOCKING_SENDS,)))
    assert free.planner == "pipeline" and "blocking" not in str(free)
    assert held.planner != "pipeline" and len(held.program.working_ranks) == 1
    assert held.cost_source.endswith("counting on blocking-sends (never measured)")
    assert Plan.parse(str(held)).cost_source == held.cost_source


def test_borders_are_chosen_for_blocking_sends(traced):
    """A stage that sends takes longer, so that others are the slowest: a chain that was chosen without that
    is slower in the simulation with it."""
    kinds = (), (BLOCKING_SENDS,)
    free, held = (make_plan(traced, with_network(3), planner="pipeline", unmeasured=names) for names in kinds)
    costs = CostModel(with_network(3), unmeasured=(BLOCKING_SENDS,))
    unaware = simulate(free.program, costs, micro_batches=free.micro_batches)
    assert held.predicted_step_s < 0.97 * unaware.step_s


def test_a_stage_keeps_as_many_micro_batches_as_stages_follow():
    program = chain(model_of(), batch(), FOUR_STAGES)
    samples = samples_of(program)
    step = costed_micro_step(program, samples)

    def held(others: int) -> np.ndarray:
        """With so many micro-batches in flight in the second stage alone: by moment and rank."""
        second = (name for name, ratio in program.ratios if support(ratio) == (1,))
        flight = Flight(tuple((name, others) for name in second), samples.transfers)
        walked = Walked(step, ADAM, held=Held.ADDENDS, flight=flight)
        return Memory(step, ADAM, walked=walked).held_bytes(step)

    one, two = held(1) - held(0), held(2) - held(1)
    np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-3)
    assert one.max() == one[:, 1].max() > 0 and not one[:, [0, 2, 3]].any()
    for micro_steps, most in ((6, (3, 2, 1, 0)), (2, (1, 1, 1, 0))):
        planned = schedule(program, pipelined(program, micro_steps).micro_batches, samples)
        flight = dict(flight_of(program, samples, planned).others)
        for name, ratio in program.ratios:
            if len(support(ratio)) == 1:
                assert flight[name] == most[support(ratio)[0]]


def test_what_a_stage_sent_may_all_be_under_way():
    """No rank waits for its sends: each micro-batch between its passes may have a copy of what it sends."""
    program = chain(model_of(), batch(), FOUR_STAGES)
    samples = samples_of(program)
    step = costed_micro_step(program, samples)
    second = tuple(name for name, ratio in program.ratios if support(ratio) == (1,))

    def moving(others: int) -> float:
        """The bytes of transfers on the rank of the second stage."""
        of = (Flight(tuple((name, others) for name in second), moved) for moved in (samples.transfers, ()))
        walked = [Walked(step, ADAM, held=Held.ADDENDS, flight=flight) for flight in of]
        every, none = (Memory(step, ADAM, walked=one).held_bytes(step)[:, 1] for one in walked)
        return (every - none).max()

    moves = [i for i in step.instructions if i.result in samples.transfers]
    sent = sum(i.type.value.size_bytes for i in moves if step.types[i.inputs[0]].ratio in second)
    assert sent and moving(3) - moving(0) == pytest.approx(3 * sent * (1 + ALLOWANCE))


# --- borders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_borders_are_the_best(seed):
    rng = np.random.default_rng(seed)
    count, stages = 7, 3
    costs = []
    for _ in range(stages):
        cost = rng.random((count + 1, count + 1))
        cost[rng.random(cost.shape) < 0.3] = np.inf
        costs.append(np.where(np.tri(count + 1, dtype=bool), np.inf, cost))

    def slowest(ends: tuple[int, ...]) -> float:
        return max(cost[a, b] for cost, a, b in zip(costs, (0, *ends), ends))

    every = [(*inner, count) for inner in combinations(range(1, count), stages - 1)]
    best = min(map(slowest, every))
    found, least = borders(costs)
    assert least == best
    if best < np.inf:
        assert slowest(found) == best


# --- the planner ------------------------------------------------------------------------------------------


def test_a_pipeline_where_the_network_is_slow(traced):
    cluster = Cluster.parse(SLOW_NETWORK)
    plan = make_plan(traced, cluster, planner="model-parallel")
    assert plan.order == "1f1b" and Plan.parse(str(plan)) == plan
    check_plan(plan, cluster, traced.graph)
    check_program(plan.program)
    task = task_of(traced.graph, cluster)
    without = [p for p in model_parallel(task) if p.micro_batches is None]
    assert plan.predicted_step_s < 0.9 * min(p.timeline.step_s for p in without)
    spread = make_plan(traced, cluster, planner="ddp-proportional")
    assert plan.predicted_step_s < spread.predicted_step_s
    # a device that is twice as fast gets more of the model
    operators = {rank: 0 for rank in range(3)}
    for i in plan.program.instructions:
        if i.op == "aten.linear":
            (rank,) = plan.program.participants(i.type)
            operators[rank] += 1
    assert operators[0] > max(operators[1], operators[2]) > 0


def test_a_search_of_placements_is_followed_by_pipelines(traced):
    """Where one is faster than all that was found it is the plan, and says so; where there is little to gain
    none is looked at. Of devices that are alike placements can use one alone here, a pipeline all."""
    slow = SLOW_NETWORK.replace("bandwidth_gbit_per_s = 10", "bandwidth_gbit_per_s = 3")
    slow = slow.replace(SMALL, BIG)
    plan = make_plan(traced, Cluster.parse(slow), planner="placed", search_s=1)
    assert plan.planner == "pipeline" and plan.order == "1f1b"
    steps = {c.planner: c.predicted_step_s for c in plan.candidates}
    assert set(steps) == {"pipeline", "placed"} and steps["pipeline"] < 0.9 * steps["placed"]  # 0.73
    fast = SLOW_NETWORK.replace("bandwidth_gbit_per_s = 10", "bandwidth_gbit_per_s = 1e5")
    plan = make_plan(traced, Cluster.parse(fast), planner="placed", search_s=1)
    assert plan.planner == "placed" and [c.planner for c in plan.candidates] == ["placed"]


def test_a_plan_of_the_planner_trains_as_one_device():
    model = model_of()
    traced = trace(model, batch())
    cluster = Cluster.parse(SLOW_NETWORK)
    found = [p for p in pipelines(task_of(traced.graph, cluster)) if p.feasible]
    longest = max(found, key=lambda p: len(samples_of(p.program).stages))
    assert len(samples_of(longest.program).stages) == 3
    plan = pipelined(longest.program, max(m.steps for m in longest.micro_batches), cluster)
    report = verify(model, batch(), replace(plan, graph_fingerprint=traced.graph.fingerprint), traced=traced)
    assert report.ok and report.max_gradient_error_f64 < 1e-12


def test_memory_that_no_pipeline_fits_in_is_the_reason(traced):
    """Not that there is no pipeline for such a job."""
    small = Cluster.parse(SLOW_NETWORK.replace("memory_gib = 4", "memory_gib = 0.8"))
    with pytest.raises(Infeasible, match="no plan fits in memory") as caught:
        make_plan(traced, small, planner="pipeline", optimizer_states=ADAM)
    assert "usable on rank" in caught.value.expected and "GiB needed there by pipeline" in caught.value.got


@pytest.mark.parametrize("gives", ["a loss that the loop computes", "a value beside the loss"])
def test_a_pipeline_that_is_asked_for_outputs_says_what_to_write(gives):
    class Showing(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y if gives.startswith("a loss") else {"loss": y.mean(), "size": y.square().mean()}

    options = {"outputs": ("size",)} if gives.startswith("a value") else {"loss": LossSource.MAYBE_CALLER}
    showing = trace(Showing(8, 8), (torch.randn(8, 8),), **options)
    with pytest.raises(InputError, match="has no plan for this job") as caught:
        make_plan(showing, Cluster.parse(SLOW_NETWORK), planner="pipeline")
    wanted = "self.log" if gives.startswith("a value") else "loss=criterion"
    assert wanted in caught.value.hint[0]


def test_statistics_of_the_whole_batch_make_no_pipeline():
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4))
            )

        def forward(self, x):
            return self.layers(x).square().mean()

    graph = trace(Normed(), {"x": torch.randn(BATCH, 8)}).graph
    assert not list(pipelines(task_of(graph, Cluster.parse(SLOW_NETWORK))))


def test_only_borders_that_a_program_may_have_are_proposed():
    """A chain is refused if the sum of the loss and its division are in different stages, or the embedding of
    positions and its sum with that of tokens."""
    task = task_of(trace(model_of(), batch()).graph, Cluster.parse(SLOW_NETWORK))
    grouping = make_grouping(task.graph, task.costs, 999, "centres")
    space = Space(task.data_parallel(task.proportional), task.costs, grouping)
    forbidden = _Estimate(task, space, 1.0).is_forbidden
    assert forbidden[1:-1].any() and not forbidden[1:-1].all()
    ranks = [(0,), (1,)]
    for border in range(1, len(space.groups)):
        chosen = [space.even(ranks[group >= border]) for group in range(len(space.groups))]
        try:
            stages = samples_of(with_whole_rows(space.lower([Placed(ratio) for ratio in chosen]))).stages
        except PlanError:
            assert forbidden[border]
        else:
            assert len(stages) == 2 and not forbidden[border]


def test_the_passes_of_a_pipeline_take_as_long_as_estimated():
    """The slowest stage sets the pace of a chain without transfers, and with long ones the way through two
    stages and back, as only two micro-batches are between them at a time."""
    assert through_s([1.0, 2.0, 1.0], [0.0, 0.0, 0.0], 2.0, 6) == pytest.approx(4 + 5 * 2)
    assert through_s([1.0, 1.0], [0.0, 3.0], 3.0, 6) == pytest.approx(8 + 2 * 8)
    assert through_s([1.0, 1.0], [0.0, 3.0], 3.0, 1) == pytest.approx(8)


def test_estimates_of_pipelines_are_near_what_is_simulated(traced):
    task = task_of(traced.graph, Cluster.parse(SLOW_NETWORK))
    space = space_of(task, count=GROUPS)
    ratios = [judged(task, space, c).timeline.step_s / c.step_s for c in proposed(task, space)]
    assert len(ratios) > 2 and all(0.9 < ratio < 1.2 for ratio in ratios), ratios


def test_shares_within_a_stage_follow_speed():
    """The stages of machines of unequal devices divide every micro-batch by their speed."""
    machine = """[[machine]]
        devices = [
          { name = "fast", tflop_per_s = 3, memory_gib = 4, memory_gbyte_per_s = 150 },
          { name = "slow", tflop_per_s = 1, memory_gib = 4, memory_gbyte_per_s = 50 },
        ]
        link_gbit_per_s = 100
        """
    network = 'name = "pairs"\n[network]\nbandwidth_gbit_per_s = 0.5\nlatency_us = 100\n'
    graph = trace(*deep()).graph
    found = list(pipelines(task_of(graph, Cluster.parse(network + 2 * machine))))
    pairs = [p for p in found if samples_of(p.program).stages in (((0, 1), (2, 3)), ((2, 3), (0, 1)))]
    assert pairs
    for p in pairs:
        rows = p.micro_batches
        assert rows[0].micro_batch > rows[1].micro_batch > 0 and rows[2].micro_batch > rows[3].micro_batch > 0


def test_chains_of_other_stages_are_refused_nothing():
    """Data parallelism is no chain, and its micro-batches are as they were."""
    graph = trace(model_of(), batch()).graph
    program = data_parallel(graph, COSTS, even_ratio(4))
    samples = samples_of(program)
    assert samples.stages == () and samples.transfers == frozenset()
    assert samples_of(chain(model_of(), batch(), THREE_STAGES)).stages


def test_auto_lists_a_pipeline_where_it_is_fastest(traced):
    """On a slow network, of a model with many parameters; where nothing can be gained it asks for none."""
    plan = make_plan(traced, Cluster.parse(SLOW_NETWORK))
    assert plan.planner == "pipeline" and plan.order == "1f1b" and plan.predicted_step_s >= plan.bound_s
    alone = make_plan(traced, Cluster.parse(SLOW_NETWORK), planner="pipeline")
    assert alone.predicted_step_s == pytest.approx(plan.predicted_step_s, rel=0.1)
    task = task_of(traced.graph, Cluster.parse(SLOW_NETWORK))
    task.best_s = task.bound_s * 1.01
    assert not list(hopeful(task))
    fast = Cluster.parse(SLOW_NETWORK.replace("bandwidth_gbit_per_s = 10", "bandwidth_gbit_per_s = 1e5"))
    assert "pipeline" not in {c.planner for c in make_plan(traced, fast).candidates}


@pytest.mark.parametrize("micro_steps", (4, 24))
def test_leaving_out_hopeless_orders_changes_nothing(traced, micro_steps):
    task = task_of(traced.graph, Cluster.parse(SLOW_NETWORK))
    grouping = make_grouping(task.graph, task.costs, GROUPS)
    space = Space(task.data_parallel(task.proportional), task.costs, grouping)
    estimate = _Estimate(task, space, 1.0)
    for kind in kinds_of_stages(space, task.ranks):
        every = list(arrangements(space, kind))
        chains = [c for units in every if (c := estimate.best(units, micro_steps, float("inf"))) is not None]
        found = estimate.fastest(every, micro_steps, float("inf"))
        assert found.step_s == min(c.step_s for c in chains)
        assert estimate.fastest(every, micro_steps, found.step_s) is None
