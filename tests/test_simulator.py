"""The simulator: steps that can be worked out by hand, bytes that are conserved, no anomalies."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import GRAPHS, THREE, TWO, bodies, cluster, graph

from mixmesh.base.timeline import LOSS_SUM, bucket_name
from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.cost.calls import is_computation, work_type
from mixmesh.cost.exchanges import exchange_of, held_share
from mixmesh.cost.placed import op_time
from mixmesh.cost.resources import link_s_per_byte
from mixmesh.cost.sums import gradient_sums
from mixmesh.lang.ir import even_ratio, make_ratio, parse_program
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.passes.buckets import with_buckets
from mixmesh.search.baselines import data_parallel, fully_sharded, only
from mixmesh.search.ratios import with_ratio
from mixmesh.search.synthesis import Prices, Problem, emit, search
from mixmesh.simulator import Simulation, simulate
from mixmesh.simulator.simulation import AGREEMENT_BYTES
from mixmesh.step.memory import peak_memory_bytes

MLP2 = """
program mlp world=2 {{
  ratio r0 = [{a}, {b}]
  %x = input("x") : f32[512, 256] S(0)@r0
  %w = param("w") {{bucket=1}} : f32[384, 256] R
  %h = aten.linear(%x, %w) : f32[512, 384] S(0)@r0
  %g = aten.relu(%h) : f32[512, 384] S(0)@r0
  %v = param("v") {{bucket=0}} : f32[256, 384] R
  %y = aten.linear(%g, %v) : f32[512, 256] S(0)@r0
  %loss = aten.mean(%y) : f32[] P(sum)
  return %loss
}}
"""


class Clocks:
    """Seconds of a program's instructions, by result, worked out one by one."""

    def __init__(self, program, costs) -> None:
        self.program, self.costs = program, costs

    def forward(self, name: str, rank: int) -> float:
        return self._time(name, rank).forward.at(self._share(name, rank))

    def backward(self, name: str, rank: int) -> float:
        return self._time(name, rank).backward.at(self._share(name, rank))

    def all_forward(self, rank: int) -> float:
        return sum(self.forward(n, rank) for n in ("h", "g", "y", "loss"))

    def _time(self, name, rank):
        i = self.program.producers[name]
        return op_time(self.program, i, self.costs, self.costs.class_of[rank])

    def _share(self, name, rank):
        return held_share(self.program, work_type(self.program, self.program.producers[name]), rank)

    def optimizer(self, rank: int) -> float:
        return sum(self.costs.optimizer_s(rank, i.type.value.size_bytes) for i in self.program.params)


@pytest.mark.parametrize("link", [1, 1000])
def test_data_parallel_by_hand(link):
    """Optimizer, forward, backward; bucket 0 goes when both ranks have v's gradient, bucket 1 after it."""
    program = parse_program(MLP2.format(a=0.7, b=0.3))
    costs = CostModel(cluster(TWO, link))
    clocks = Clocks(program, costs)
    at = [clocks.optimizer(r) + sum(clocks.forward(n, r) for n in ("h", "g", "y", "loss")) for r in (0, 1)]
    at = [at[r] + clocks.backward("loss", r) + clocks.backward("y", r) for r in (0, 1)]
    fit = costs.collective("all_reduce", (0, 1))
    first_end = max(at) + fit.seconds(256 * 384 * 4)
    at = [at[r] + clocks.backward("g", r) + clocks.backward("h", r) for r in (0, 1)]
    second_end = max(*at, first_end) + fit.seconds(384 * 256 * 4)
    timeline = simulate(program, costs)
    assert timeline.step_s == pytest.approx(second_end)
    assert timeline.compute_s == pytest.approx(tuple(at))
    assert timeline.communication_s == pytest.approx(2 * fit.seconds(256 * 384 * 4) + fit.seconds(4))


def test_one_bucket_waits_for_the_last_gradient():
    program = parse_program(MLP2.format(a=0.7, b=0.3).replace("bucket=1", "bucket=0"))
    costs = CostModel(cluster(TWO, 10))
    timeline = simulate(program, costs)
    fit = costs.collective("all_reduce", (0, 1))
    assert timeline.step_s == pytest.approx(max(timeline.compute_s) + fit.seconds(2 * 384 * 256 * 4))


def test_collectives_wait_for_the_slowest():
    """Rank 1 does three quarters of the first operator; rank 0 waits for it at the all_gather."""
    program = parse_program(
        """
program gather world=2 {
  ratio r0 = [0.25, 0.75]
  %x = input("x") : f32[512, 256] S(0)@r0
  %w = param("w") : f32[384, 256] R
  %h = aten.linear(%x, %w) : f32[512, 384] S(0)@r0
  %h.r = all_gather(%h) : f32[512, 384] R
  %g = aten.relu(%h.r) : f32[512, 384] R
  %loss.r = aten.mean(%g) : f32[] R
  %loss = as_partial(%loss.r) : f32[] P(sum)
  return %loss
}
"""
    )
    costs = CostModel(cluster(TWO, 10))
    clocks = Clocks(program, costs)
    size = 512 * 384 * 4
    ranks = (0, 1)
    start = max(clocks.optimizer(r) + clocks.forward("h", r) for r in ranks)
    at = start + costs.collective("all_gather", ranks).seconds(size)
    after = [at + sum(clocks.forward(n, r) + clocks.backward(n, r) for n in ("g", "loss.r")) for r in ranks]
    scattered = max(after) + costs.collective("reduce_scatter", ranks).seconds(size)
    ready = max(scattered + clocks.backward("h", r) for r in ranks)
    expected = ready + costs.collective("all_reduce", ranks).seconds(384 * 256 * 4)
    assert simulate(program, costs).step_s == pytest.approx(expected)


def test_the_period_of_steps_that_follow_each_other():
    """Worked out step after step with a rank whose optimizer is slow: forward and backward as soon as the
    own optimizer is done, sums when all have issued them, the optimizer when all sums are there."""
    slow = TWO.replace("memory_gbyte_per_s = 80", "memory_gbyte_per_s = 2")
    program = parse_program(MLP2.format(a=0.7, b=0.3))
    costs = CostModel(cluster(slow, 10))
    clocks = Clocks(program, costs)
    sum_s = costs.collective("all_reduce", (0, 1)).seconds(256 * 384 * 4)
    assert clocks.optimizer(1) > 5 * clocks.optimizer(0)
    at, ends = [0.0, 0.3], []  # whatever the first step begins with
    for _ in range(5):
        at = [
            at[r] + clocks.optimizer(r) + sum(clocks.forward(n, r) for n in "h g y loss".split())
            for r in (0, 1)
        ]
        at = [at[r] + clocks.backward("loss", r) + clocks.backward("y", r) for r in (0, 1)]
        first = max(at) + sum_s
        at = [at[r] + clocks.backward("g", r) + clocks.backward("h", r) for r in (0, 1)]
        second = max(*at, first) + sum_s
        at = [max(at[r], first, second) for r in (0, 1)]
        ends.append(second)
    periods = [b - a for a, b in zip(ends, ends[1:])]
    assert periods == pytest.approx([simulate(program, costs).step_s] * 4)


def test_without_numbers_buckets_go_by_size_last_used_first():
    program = parse_program(MLP2.format(a=0.7, b=0.3).replace("{bucket=1}", "").replace("{bucket=0}", ""))
    numbered = parse_program(MLP2.format(a=0.7, b=0.3))
    costs = CostModel(cluster(TWO, 10))
    assert [[p.result for p in s.params] for s in gradient_sums(program)] == [["v", "w"]]  # below 4 MiB
    assert [[p.result for p in s.params] for s in gradient_sums(program, 2**18)] == [["v"], ["w"]]
    together = parse_program(MLP2.format(a=0.7, b=0.3).replace("bucket=1", "bucket=0"))
    assert simulate(program, costs).step_s == simulate(together, costs).step_s
    assert simulate(program, costs).step_s > simulate(numbered, costs).step_s


# two machines of two devices each; one device of each is in either group
PAIRS = """
[network]
bandwidth_gbit_per_s = LINK
latency_us = 10
[[machine]]
nic_gbit_per_s = NIC
link_gbit_per_s = 100
devices = [{ name = "d", tflop_per_s = 2.0, memory_gib = 4, memory_gbyte_per_s = 200, count = 2 }]
[[machine]]
nic_gbit_per_s = NIC
link_gbit_per_s = 100
devices = [{ name = "d", tflop_per_s = 2.0, memory_gib = 4, memory_gbyte_per_s = 200, count = 2 }]
"""
TWO_GROUPS = """
program groups world=4 {{
  ratio one = [{one}]
  ratio two = [{two}]
  %x = input("x") : f32[512, 256] S(0)@one
  %z = input("z") : f32[512, 256] S(0)@two
  %w = param("w", trainable=false) : f32[256, 256] R@one
  %v = param("v", trainable=false) : f32[256, 256] R@two
  %h = aten.linear(%x, %w) : f32[512, 256] S(0)@one
  %k = aten.linear(%z, %v) : f32[512, 256] S(0)@two
  %h.r = all_gather(%h) : f32[512, 256] R@one
  %k.r = all_gather(%k) : f32[512, 256] R@two
  %g = aten.relu(%h.r) : f32[512, 256] R@one
  %q = aten.relu(%k.r) : f32[512, 256] R@two
  %loss.r = aten.mean(%g) : f32[] R@one
  %loss = as_partial(%loss.r) : f32[] P(sum)@one
  return %loss
}}
"""


def gathers(one, two, nic_gbit_per_s):
    """Start and seconds of both groups' gathers, and the seconds that one would take alone."""
    costs = CostModel(Cluster.parse(PAIRS.replace("LINK", "10").replace("NIC", str(nic_gbit_per_s))))
    program = parse_program(TWO_GROUPS.format(one=one, two=two))
    events = {e.name: e for e in simulate(program, costs, events=True).events if e.stream == "communication"}
    ranks = program.participants(program.types["h.r"])
    alone = costs.collective("all_gather", ranks)
    return [events["h.r"], events["k.r"]], alone


def test_groups_that_cross_the_same_nics_share_them():
    pairs = ("0.5, 0, 0.5, 0", "0, 0.5, 0, 0.5")
    (first, second), alone = gathers(*pairs, 10)
    assert first.start_s == second.start_s
    seconds = alone.seconds(512 * 256 * 4)
    assert first.end_s - first.start_s == pytest.approx(seconds)
    # over TCP one alone does not fill the wire, which both together do
    assert second.end_s - second.start_s == pytest.approx(2 * 0.5 * 512 * 256 * 4 / 1.25e9)
    wide, alone = gathers(*pairs, 100)  # the network gives each path 10 Gbit/s, the NIC ten of them
    assert [e.end_s - e.start_s for e in wide] == pytest.approx([alone.seconds(512 * 256 * 4)] * 2)


def test_groups_inside_a_machine_use_its_link():
    (first, second), alone = gathers("0.5, 0.5, 0, 0", "0, 0, 0.5, 0.5", 1)
    for e in (first, second):
        assert e.end_s - e.start_s == pytest.approx(alone.seconds(512 * 256 * 4))
    assert alone.s_per_byte == pytest.approx(0.5 / 12.5e9)


def test_a_pair_that_is_late_does_not_block_another():
    """The second pair gathers long before the first, which stands earlier in the program."""
    text = TWO_GROUPS.format(one="0.5, 0, 0.5, 0", two="0, 0.5, 0, 0.5")
    big = "f32[8192, 256] R@one"
    late = f'  %big = input("big") : {big}\n  %slow = aten.linear(%big, %w) : {big}\n'
    program = parse_program(text.replace("  %h.r =", late + "  %h.r ="))
    costs = CostModel(Cluster.parse(PAIRS.replace("LINK", "10").replace("NIC", "10")))
    events = {e.name: e for e in simulate(program, costs, events=True).events if e.stream == "communication"}
    first, second = events["h.r"], events["k.r"]
    assert second.end_s < first.start_s
    assert second.end_s - second.start_s <= 2 * (first.end_s - first.start_s)


class Busy(CostModel):
    """Collectives that slow computing down and keep the computing thread busy, and devices that rest."""

    def __init__(self, cluster, slowdown=0.0, s_per_byte=0.0, rest=(0.0, 1.0), beside=0.0):
        super().__init__(cluster)
        self._slowdown, self._s_per_byte, self._rest, self._beside = slowdown, s_per_byte, rest, beside

    def rest(self, rank: int) -> tuple[float, float]:
        return self._rest

    def exchange_beside_s(self, rank: int, name: str, ranks: tuple[int, ...], size_bytes: float) -> float:
        return self._beside * size_bytes

    def slowdown(self, rank: int) -> float:
        return self._slowdown

    def exchange_host_s(self, rank: int, name: str, ranks: tuple[int, ...], size_bytes: float) -> float:
        return self._s_per_byte * size_bytes


RESTED = """program rested world=2 {
  ratio a = [1.0, 0.0]
  ratio b = [0.0, 1.0]
  %x = input("x") : f32[512, 256] R@a
  %w = param("w") : f32[256, 256] R@a
  %v = param("v") : f32[256, 256] R@b
  %h = aten.linear(%x, %w) : f32[512, 256] R@a
  %m = move(%h) : f32[512, 256] R@b
  %g = aten.linear(%m, %v) : f32[512, 256] R@b
  %s = aten.mean(%g) : f32[] R@b
  %loss = move(%s) : f32[] P(sum)
  return %loss
}
"""


@pytest.mark.parametrize("lead_s", [0.0, 1e-5, 1e3])
def test_who_has_waited_is_faster_until_it_is_ahead(lead_s):
    """Each rank waits while the other computes, so with a lead without end both always work at their best."""
    program, speed = parse_program(RESTED), 2.5
    base = cluster(TWO, 10)
    usual, timeline = simulate(program, CostModel(base)), simulate(program, Busy(base, rest=(lead_s, speed)))
    if lead_s == 0:
        assert timeline == usual
    for rank in (0, 1):
        saved = usual.compute_s[rank] - timeline.compute_s[rank]
        most = usual.compute_s[rank] * (1 - 1 / speed)
        assert -1e-12 <= saved <= most * (1 + 1e-9)
        if lead_s > 1:
            assert saved == pytest.approx(most)
    assert timeline.step_s <= usual.step_s
    assert usual.step_s - timeline.step_s <= 4 * lead_s + 1e-12  # of two ranks, forward and backward
    taken = simulate(program, Busy(base, rest=(lead_s, speed), beside=1e-9))
    assert timeline.step_s <= taken.step_s  # what communication takes is not saved up
    spent = simulate(program, Busy(base, rest=(lead_s, speed), beside=1.0))
    assert spent.step_s <= usual.step_s * (1 + 1e-9)  # nor is more than all of it taken


def slowed(at: float, seconds: float, until: float, slowdown: float) -> float:
    """When ``seconds`` of computing that begin at a time are done, slower up to another time."""
    beside = min(seconds * (1 + slowdown), max(until - at, 0.0))
    return at + beside + seconds - beside / (1 + slowdown)


@pytest.mark.parametrize("link", [1, 10, 1000])
def test_computing_is_slower_beside_a_collective(link):
    """From where a rank issues the sum of the loss, or v's, to where that ends."""
    program, slowdown = parse_program(MLP2.format(a=0.7, b=0.3)), 0.4
    costs = Busy(cluster(TWO, link), slowdown)
    clocks = Clocks(program, costs)
    fit = costs.collective("all_reduce", (0, 1))
    at = [clocks.optimizer(r) + clocks.all_forward(r) for r in (0, 1)]
    until = max(at) + fit.seconds(4)
    top = [clocks.backward("loss", r) + clocks.backward("y", r) for r in (0, 1)]
    at = [slowed(at[r], top[r], until, slowdown) for r in (0, 1)]
    first = until = max(*at, 0.0) + fit.seconds(256 * 384 * 4)
    rest = [clocks.backward("g", r) + clocks.backward("h", r) for r in (0, 1)]
    at = [slowed(at[r], rest[r], until, slowdown) for r in (0, 1)]
    timeline = simulate(program, costs)
    assert timeline.compute_s == pytest.approx(tuple(at))
    assert timeline.step_s == pytest.approx(max(*at, first) + fit.seconds(384 * 256 * 4))
    assert sum(timeline.compute_s) > 1.0001 * sum(simulate(program, CostModel(costs.cluster)).compute_s)
    # also on devices that are faster after a rest
    rested = simulate(program, Busy(costs.cluster, slowdown, rest=(1e-12, 2.0)))
    assert rested.compute_s == pytest.approx(timeline.compute_s)


@pytest.mark.parametrize("link", [1, 10, 1000])
def test_collectives_keep_the_computing_thread_busy(link):
    """Half where they start; the other halves of v's and w's sums at the end, where they are awaited."""
    program, s_per_byte = parse_program(MLP2.format(a=0.7, b=0.3)), 1e-9
    costs = Busy(cluster(TWO, link), s_per_byte=s_per_byte)
    clocks = Clocks(program, costs)
    size = 256 * 384 * 4
    half, sum_s = size * s_per_byte / 2, costs.collective("all_reduce", (0, 1)).seconds(size)
    agreed_s = AGREEMENT_BYTES * s_per_byte
    at = [agreed_s + clocks.optimizer(r) + clocks.all_forward(r) + 4 * s_per_byte / 2 for r in (0, 1)]
    at = [at[r] + clocks.backward("loss", r) + clocks.backward("y", r) + half for r in (0, 1)]
    first = max(at) + sum_s
    at = [at[r] + clocks.backward("g", r) + clocks.backward("h", r) + half for r in (0, 1)]
    second = max(*at, first) + sum_s
    at = [max(max(at[r], first) + half, second) + half for r in (0, 1)]
    timeline = simulate(program, costs)
    assert timeline.step_s == pytest.approx(max(at))
    assert timeline.compute_s == simulate(program, CostModel(costs.cluster)).compute_s


def test_a_gather_that_starts_early_is_hidden():
    """%v's gather runs beside the first operator; at its own place it would be waited for."""
    lines = {
        "early": '  %v.s = param("v") : f32[256, 384] S(0)@r0\n  %v = all_gather(%v.s) : f32[256, 384] R\n',
        "late": "",
    }
    texts = {}
    for name in lines:
        body = MLP2.format(a=0.7, b=0.3).replace('  %v = param("v") {bucket=0} : f32[256, 384] R\n', "")
        place = "  %x =" if name == "early" else "  %y ="
        texts[name] = body.replace(place, lines["early"] + place, 1)
    costs = CostModel(cluster(TWO, 10))
    early, late = (simulate(parse_program(texts[n]), costs) for n in ("early", "late"))
    assert early.communication_s == pytest.approx(late.communication_s)
    assert early.step_s < late.step_s


def test_who_takes_no_part_does_nothing():
    costs = CostModel(cluster(THREE))
    program = data_parallel(graph(GRAPHS["mlp"], 64), costs, make_ratio([0.6, 0, 0.4]))
    timeline = simulate(program, costs, events=True)
    assert timeline.compute_s[1] == 0
    assert [e.rank for e in timeline.events if e.name == LOSS_SUM] == [0, 2]
    assert not [e for e in timeline.events if e.rank == 1]
    alone = simulate(data_parallel(graph(GRAPHS["mlp"], 64), costs, only(0, 3)), costs)
    assert alone.communication_s == 0
    assert alone.step_s == pytest.approx(alone.compute_s[0])


def loss_sum_s(costs, program):
    """The sum of the loss, for the user to see, stands in no instruction."""
    return costs.collective("all_reduce", program.working_ranks).seconds(4)


def kinds(body, text, ratio, scale=64, link=10.0):
    costs = CostModel(cluster(text, link))
    small = graph(body, scale)
    spread = data_parallel(small, costs, make_ratio(ratio))
    problem = Problem(small, costs, make_ratio(ratio), prices=Prices(gradient_sync=1.0))
    yield spread, costs
    yield with_buckets(spread, 1e5), costs
    yield fully_sharded(spread), costs
    yield emit(problem, search(problem)), costs


@settings(deadline=None, max_examples=25)
@given(bodies(), st.sampled_from([(THREE, (0.5, 0.2, 0.3)), (THREE, (0.6, 0.0, 0.4)), (TWO, (0.5, 0.5))]))
def test_collectives_are_conserved(body, where):
    """What is simulated is what the program says: each exchange forward, its dual backward, once more if
    it is repeated, and every replicated gradient once."""
    for program, costs in kinds(body, *where):
        expected: Counter[str] = Counter({LOSS_SUM: len(program.working_ranks)})
        total = loss_sum_s(costs, program)
        grad = program.requires_grad
        for i in program.instructions:
            there, back = exchange_of(program, i), exchange_of(program, i, backward=True)
            if there is None:
                continue
            expected[i.result] += len(there.ranks)
            total += there.seconds(costs)
            if i.result in grad:
                expected[f"{i.result} grad"] += len(back.ranks)
                total += back.seconds(costs)
                users = [user for user in program.instructions if i.result in user.inputs]
                last = users[-1]
                if i.attr("reshard") and not last.is_redistribution and last.results[0] in grad:
                    expected[f"{i.result} again"] += len(there.ranks)
                    total += there.seconds(costs)
        for s in gradient_sums(program):
            expected[bucket_name([p.result for p in s.params])] += len(s.ranks)
            total += costs.collective("all_reduce", s.ranks).seconds(s.size_bytes)
        timeline = simulate(program, costs, events=True)
        assert timeline.communication_s == pytest.approx(total, abs=1e-15)
        assert expected == Counter(e.name for e in timeline.events if e.stream == "communication")
        work = sum(
            t.forward.at(s) + (t.backward.at(s) if any(r in grad for r in i.results) else 0.0)
            for i in program.instructions
            if is_computation(i)
            for rank in program.participants(work_type(program, i))
            for t in [op_time(program, i, costs, costs.class_of[rank])]
            for s in [held_share(program, work_type(program, i), rank)]
        )
        optimizer = sum(e.end_s - e.start_s for e in timeline.events if e.name == "optimizer")
        assert sum(timeline.compute_s) == pytest.approx(work + optimizer)


@settings(deadline=None, max_examples=20)
@given(bodies())
def test_events_tell_the_same_story(body):
    """With events or without, the same step; nothing ends after it, and after the last of all only links
    that several collectives shared have still to carry something; computing does not overlap."""
    for program, costs in kinds(body, THREE, (0.5, 0.2, 0.3)):
        plain, told = simulate(program, costs), simulate(program, costs, events=True)
        assert told.step_s == pytest.approx(plain.step_s)
        assert told.compute_s == pytest.approx(plain.compute_s)
        last = max(e.end_s for e in told.events)
        assert last <= told.step_s <= last + told.communication_s / 2
        for rank in range(3):
            mine = [e for e in told.events if e.rank == rank and e.stream == "compute"]
            assert all(a.end_s <= b.start_s + 1e-12 for a, b in zip(mine, mine[1:]))


GROUPS = {
    "all": "0.4, 0.3, 0.2, 0.1",
    "one": "0.6, 0, 0.4, 0",
    "two": "0, 0.5, 0, 0.5",
    "machine": "0.3, 0.7, 0, 0",
}


@st.composite
def layers_on_groups(draw) -> str:
    """Layers that each run on one of several groups of ranks, with parameters that are replicated, stored in
    shards, or whose gradients come from gathered factors, some of them shared between layers."""
    lines = [f"  ratio {name} = [{shares}]" for name, shares in GROUPS.items()]
    at = draw(st.sampled_from(sorted(GROUPS)))
    lines.append(f'  %x0 = input("x") : f32[512, 256] S(0)@{at}')
    whole: list[str] = []  # weights that every rank holds
    count = draw(st.integers(2, 6))
    for n in range(count):
        here, attrs = draw(st.sampled_from(sorted(GROUPS))), ""
        if here != at:
            lines.append(f"  %m{n} = move(%x{n}) : f32[512, 256] S(0)@{here}")
        source, weight = f"m{n}" if here != at else f"x{n}", f"w{n}"
        kind = draw(st.sampled_from(["replicated", "everywhere", "stored", "again", "sfb", "tied"]))
        if kind in ("stored", "again"):
            reshard = "{reshard=true} " if kind == "again" else ""
            lines.append(f'  %s{n} = param("w{n}") : f32[256, 256] S(0)@all')
            lines.append(f"  %w{n} = all_gather(%s{n}) {reshard}: f32[256, 256] R@{here}")
        elif kind == "tied" and whole:
            weight = draw(st.sampled_from(whole))
        else:
            held = "R" if kind in ("everywhere", "tied") else f"R@{here}"
            attrs = "{sfb=true} " if kind == "sfb" else ""
            number = draw(st.sampled_from(["", "{bucket=0} ", "{bucket=1} "]))
            lines.append(f'  %w{n} = param("w{n}") {number}: f32[256, 256] {held}')
            whole += [weight] * (held == "R")
        lines.append(f"  %x{n + 1} = aten.linear(%{source}, %{weight}) {attrs}: f32[512, 256] S(0)@{here}")
        at = here
    lines += [f"  %loss = aten.mean(%x{count}) : f32[] P(sum)@{at}", "  return %loss"]
    return "program groups world=4 {\n" + "\n".join(lines) + "\n}\n"


BETTER = (
    "device",
    "memory",
    "nic",
    "network",
    "link",
    "latency",
    "link latency",
    "slowdown",
    "host",
    "beside",
)


def better(costs: Busy, what: str, rank: int) -> Busy:
    """Twice a bandwidth or a speed, half a latency, of one rank, its machine or the network."""
    base = costs.cluster
    rank %= base.world_size
    number = base.machine_index_of(rank)
    machine, place = base.machines[number], base.ranks_of(number).index(rank)
    d = machine.devices[place]
    slowdown, s_per_byte, beside = costs._slowdown, costs._s_per_byte, costs._beside
    network, latency = base.bandwidth_bytes_per_s, base.latency_s
    match what:
        case "device":
            d = replace(d, flop_per_s=2 * d.flop_per_s, half_flop_per_s=2 * d.half_flop_per_s)
        case "memory":
            d = replace(d, memory_bytes_per_s=2 * d.memory_bytes_per_s)
        case "nic":
            machine = replace(machine, nic_bytes_per_s=2 * machine.nic_bytes_per_s)
        case "link":
            machine = replace(machine, link_bytes_per_s=2 * machine.link_bytes_per_s)
        case "link latency":
            machine = replace(machine, link_latency_s=machine.link_latency_s / 2)
        case "network":
            network *= 2
        case "latency":
            latency /= 2
        case "slowdown":
            slowdown /= 2
        case "host":
            s_per_byte /= 2
        case "beside":
            beside /= 2
    devices = (*machine.devices[:place], d, *machine.devices[place + 1 :])
    machines = list(base.machines)
    machines[number] = replace(machine, devices=devices)
    made = Cluster(base.name, tuple(machines), network, latency)
    return Busy(made, slowdown, s_per_byte, costs._rest, beside)


def does_not_grow(program, costs, what, rank, most=1 + 1e-9):
    before, after = simulate(program, costs).step_s, simulate(program, better(costs, what, rank)).step_s
    assert after <= before * most, (what, rank)


LONG, SHORT = (1.0, 3.0), (1e-5, 1.5)  # compared with a step of these programs
busy = st.sampled_from(
    [
        (0.0, 0.0), (0.4, 0.0), (0.0, 1e-9), (0.8, 1e-9), (0.0, 1e-9, SHORT), (0.0, 0.0, LONG),
        (0.0, 0.0, SHORT, 1e-9), (0.0, 1e-9, LONG, 1e-9),
    ]
)  # fmt: skip


@settings(deadline=None, max_examples=20)
@given(bodies(), st.sampled_from(BETTER), st.integers(0, 2), busy)
def test_nothing_that_gets_faster_makes_a_step_longer(body, what, rank, how):
    for program, costs in kinds(body, THREE, (0.5, 0.2, 0.3)):
        does_not_grow(program, Busy(costs.cluster, *how), what, rank)


@settings(deadline=None, max_examples=120)
@given(layers_on_groups(), st.sampled_from(BETTER), st.integers(0, 3), busy, st.sampled_from([1, 10, 100]))
def test_nor_by_much_with_several_groups(text, what, rank, how, link):
    """A collective that starts earlier may share a link with another group's, which then ends later."""
    base = Cluster.parse(PAIRS.replace("LINK", str(link)).replace("NIC", "10"))
    slow = replace(base.devices[3], name="slow", flop_per_s=5e11, memory_bytes_per_s=5e10)
    mixed = replace(base.machines[1], devices=(base.devices[2], slow))
    costs = Busy(replace(base, machines=(base.machines[0], mixed)), *how)
    does_not_grow(parse_program(text), costs, what, rank, most=1.05)


@settings(deadline=None, max_examples=60)
@given(layers_on_groups(), busy)
def test_links_carry_no_more_than_they_can(text, how):
    """What crosses a link takes at least as long as its bytes at the link's rate, from the first start on."""
    costs = Busy(Cluster.parse(PAIRS.replace("LINK", "10").replace("NIC", "10")), *how)
    program = parse_program(text)
    timeline = simulate(program, costs, events=True)
    met: dict[tuple, list[int]] = {}
    for e in timeline.events:
        if e.stream == "communication":
            met.setdefault((e.name, e.op, e.size_bytes, e.start_s), []).append(e.rank)
    moves = {i.result: i for i in program.instructions if i.op == "move"}
    starts, carried = {}, Counter()
    for (name, op, size, start), ranks in met.items():
        move = moves.get(name.split()[0])
        if move is None:
            crossed = link_s_per_byte(costs.cluster, op, tuple(sorted(ranks)))
        else:  # what changes its ratio crosses in part
            crossed = exchange_of(program, move, backward=name != move.result).link_s_per_byte(costs.cluster)
        for link, s in crossed.items():
            carried[link] += s * size
            starts[link] = min(starts.get(link, start), start)
    for link, seconds in carried.items():
        assert timeline.step_s >= (starts[link] + seconds) * (1 - 1e-9)


@settings(deadline=None, max_examples=15)
@given(bodies(), st.lists(st.integers(1, 9), min_size=3, max_size=3))
def test_one_simulation_serves_all_ratios(body, shares):
    """What is worked out once gives for other ratios and buckets what a fresh simulation gives."""
    for program, costs in kinds(body, THREE, (0.5, 0.2, 0.3)):
        simulation = Simulation(program, costs, ADAM)
        changed = with_buckets(with_ratio(program, "r0", make_ratio(shares)), 4e5)
        fresh = simulate(changed, costs)
        reused = simulation.run(changed)
        assert reused.step_s == pytest.approx(fresh.step_s, rel=1e-12)
        assert reused.peak_memory_bytes == fresh.peak_memory_bytes == peak_memory_bytes(changed, costs)


def test_another_set_of_ranks_needs_another_simulation():
    costs = CostModel(cluster(THREE))
    program = data_parallel(graph(GRAPHS["mlp"]), costs, even_ratio(3))
    with pytest.raises(ValueError, match="another Simulation"):
        Simulation(program, costs).run(with_ratio(program, "r0", make_ratio([1, 0, 1])))


def test_parameters_do_not_keep_samples_waiting():
    """A gather of a parameter that is used late starts early, on a group of its own; its gradient, for which
    nobody waits, goes back on it."""
    text = """program p world=2 {
      ratio r = [0.5, 0.5]
      %v = param("v") : f32[4096, 4096] S(0)@r
      %v.r = all_gather(%v) : f32[4096, 4096] R
      %w = param("w") : f32[64, 64] S(0)@r
      %x = input("x") : f32[64, 64] R
      %h = aten.linear(%x, %w) : f32[64, 64] S(1)@r
      %h.r = all_to_all(%h) : f32[64, 64] S(0)@r
      %g = aten.tanh(%h.r) : f32[64, 64] S(0)@r
      %o = aten.sum(%g) : f32[] P(sum)@r
      %s = aten.mul.Tensor(%v.r, 1e-6) : f32[4096, 4096] R
      %m = aten.sum(%s) : f32[] R
      %l = as_partial(%m) : f32[] P(sum)@r
      %loss = aten.add.Tensor(%o, %l) : f32[] P(sum)@r
      return %loss }"""
    named = {e.name: e for e in simulate(parse_program(text), CostModel(cluster(TWO)), events=True).events}
    gather, moved = named["v.r"], named["h.r"]
    assert gather.start_s <= moved.start_s and named["g"].end_s < gather.end_s <= named["s"].start_s
    back, moved_back = named["v.r grad"], named["h.r grad"]
    assert back.start_s < moved_back.start_s < named["h grad"].start_s < back.end_s


def fast_and_slow():
    text = MLP2.format(a=0.7, b=0.3)
    program = parse_program(text)
    other = with_ratio(program, "r0", make_ratio([0.4, 0.6]))
    return [with_buckets(p, size) for p in (program, other) for size in (1.0, 1e9)]


def test_a_simulation_that_is_asked_again_says_what_a_new_one_says():
    costs = CostModel(cluster(TWO))
    programs = fast_and_slow()
    one = Simulation(programs[0], costs)
    for program in (*programs, *programs[::2], *reversed(programs)):
        again, new = (s.run(program) for s in (one, Simulation(program, costs)))
        assert again == new
        assert one.step_s(program) == new.step_s
        assert one.least_s(program) == Simulation(program, costs).least_s(program)
    assert len({one.step_s(p) for p in programs}) == len(programs)


def test_simulations_do_not_outlive_their_use():
    """Nothing waits for the garbage collector, which looks at what planning made very rarely."""
    program = fast_and_slow()[0]
    gc.disable()
    try:
        simulation = Simulation(program, CostModel(cluster(TWO)))
        simulation.step_s(program)
        gone = weakref.ref(simulation)
        del simulation
        assert gone() is None
    finally:
        gc.enable()
