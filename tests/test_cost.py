"""Curves and fits, and the sheet that prices a program."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_graphs import GRAPHS, THREE, cluster, graph

from mixmesh.base.timeline import BRIDGE, INSIDE, OWN, Link
from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel, Curve, affine_curve, ring_fit
from mixmesh.cost.calls import is_computation, work_type
from mixmesh.cost.curve import issued_curve
from mixmesh.cost.efficiency import ANY, ELEMENTWISE, USUAL
from mixmesh.cost.exchanges import held_share
from mixmesh.cost.micro_steps import costed_micro_step
from mixmesh.cost.model import GPU_ISSUE_S, VIEW_ISSUE
from mixmesh.cost.placed import Sheet, op_time
from mixmesh.cost.resources import link_s_per_byte, links_of, sent_s_per_byte
from mixmesh.errors import ParseError
from mixmesh.lang.ir import Scope, Shard, ValueType, even_ratio, make_ratio, parse_program, samples_of
from mixmesh.lang.rules import Call
from mixmesh.search.baselines import data_parallel, fully_sharded
from mixmesh.search.ratios import with_ratio

points = st.lists(
    st.tuples(st.floats(0.01, 1), st.floats(1e-6, 1)), min_size=1, max_size=6, unique_by=lambda p: p[0]
).map(lambda p: Curve(tuple(sorted(p))))
shares = st.floats(0, 2)


@given(points, shares, shares)
def test_more_work_never_takes_less_time(curve, a, b):
    low, high = sorted((a, b))
    assert curve.at(low) <= curve.at(high) * (1 + 1e-9) + 1e-15


@given(st.floats(0, 1), st.floats(0, 1), shares)
def test_affine_curve_is_its_line(fixed, full, share):
    curve = affine_curve(fixed, full)
    assert curve.at(share) == pytest.approx(fixed + full * share if share > 0 else 0.0, abs=1e-12)
    assert curve.affine == pytest.approx((fixed, full), rel=1e-6, abs=1e-9)


@given(st.floats(0, 1e-4), st.floats(0, 1e-4), st.floats(0, 1), st.floats(1e-3, 1))
def test_what_is_issued_while_others_run_takes_the_longer_of_both(issue, fixed, full, share):
    curve = issued_curve(issue, fixed, full)
    assert curve.at(share) == pytest.approx(max(issue, fixed + full * share), rel=1e-6, abs=1e-12)
    assert curve.least_s <= curve.at(share) / share * (1 + 1e-9)


@given(points)
def test_measured_points_that_rise_are_met(curve):
    for share, seconds in curve.rising:
        assert curve.at(share) == pytest.approx(seconds)
    if all(a[1] <= b[1] for a, b in zip(curve.points, curve.points[1:])):
        assert curve.rising == curve.points


def test_beyond_the_measured_range_is_not_free():
    """Two noisy points of equal time at the end once made the whole work look as cheap as a part of it."""
    curve = Curve(((0.1, 1.0), (0.2, 2.0), (0.3, 2.9), (0.32, 2.9)))
    assert curve.at(1.0) > 7 and not curve.covers(1.0)


def test_noise_is_averaged():
    assert Curve(((0.1, 1.0), (0.2, 3.0), (0.3, 2.0))).rising == ((0.1, 1.0), (0.2, 2.5), (0.3, 2.5))


@pytest.mark.parametrize("bad", [(-1.0, 0.0), (0.0, float("nan")), (float("inf"), 1.0)])
def test_a_cost_is_finite_and_not_negative(bad):
    with pytest.raises(ValueError):
        affine_curve(*bad)


def forward_s(costs: CostModel, op: str, size: int) -> float:
    t = ValueType("f32", (size, 512))
    return costs.op(Call(op, (), (), (t,), (t,)), 1, 0).forward.at(1.0)


def test_a_gpu_computes_while_it_is_issued_to():
    """A kernel of milliseconds takes no longer for its issue, one of microseconds as long as it; a view has
    no kernel."""
    costs = CostModel(Cluster.load("heterog-8"))
    usual = USUAL[ELEMENTWISE, ANY]
    moved_s = 2 * 2**20 * 512 * 4 / costs.classes[0].memory_bytes_per_s / usual.share
    assert forward_s(costs, "aten.relu", 8) == GPU_ISSUE_S
    assert forward_s(costs, "aten.detach", 2**20) == pytest.approx(VIEW_ISSUE * GPU_ISSUE_S)
    assert forward_s(costs, "aten.relu", 2**20) == pytest.approx(moved_s + usual.ramp_s)


def test_ring_of_one_is_free():
    assert ring_fit(cluster(THREE), "all_reduce", (1,)).seconds(1e9) == 0.0


def test_ring_crosses_the_slowest_link():
    """2 (n - 1) / n of the bytes at 0.9 of 10 Gbit/s, and 2 latencies for every hop of the link that it
    takes."""
    within = THREE.replace("]\n[[machine]]", "]\nlink_latency_us = 1\n[[machine]]")
    within = within.replace("latency_us = 10\n", "latency_us = 10\nkind = 'rdma'\n")
    fit = ring_fit(cluster(within, 10), "all_reduce", (0, 1, 2))
    assert fit.latency_s == pytest.approx(2 * (1e-6 + 10e-6)) and fit.s_per_byte == pytest.approx(
        4 / 3 / 1.25e9 / 0.9
    )
    assert ring_fit(cluster(within, 10), "all_gather", (0, 1, 2)).latency_s == pytest.approx(1e-6 + 10e-6)


MACHINES = "[network]\nbandwidth_gbit_per_s = 80\nlatency_us = 20\nkind = 'rdma'\n" + 5 * (
    "[[machine]]\nlink_latency_us = 3\n"
    "devices = [{ name = 'a', tflop_per_s = 2, memory_gib = 4, memory_gbyte_per_s = 200, count = 3 }]\n"
)


@pytest.mark.parametrize(
    ("machines", "depth"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3)], ids=lambda n: f"{n}"
)
def test_small_sums_of_gpus_go_along_trees(machines, depth):
    """Two hops inside each machine and the depth of a tree between them, there and back; large sums ring."""
    n, slope = 3 * machines, 1e-10 / 0.9 if machines > 1 else 8e-11  # 100 Gbit/s inside, RDMA between
    fit = ring_fit(Cluster.parse(MACHINES), "all_reduce", tuple(range(n)))
    ring_s = 2 * (2 * machines * 3e-6 + (machines - 1) * 20e-6)
    assert fit.latency_s == pytest.approx(2 * (2 * 3e-6 + depth * 20e-6))
    assert fit.s_per_byte == pytest.approx(2 * (n - 1) / n * slope)
    assert fit.seconds(0) == fit.latency_s
    assert fit.seconds(1e9) == pytest.approx(ring_s + 1e9 * fit.s_per_byte)


def test_a_sum_takes_the_faster_way_at_every_size():
    costs = Cluster.parse(MACHINES)
    fit = ring_fit(costs, "all_reduce", tuple(range(15)))
    assert len(fit.lines) == 2
    for size in (1, 1e3, 1e6, 3e6, 1e7, 1e9):
        assert fit.seconds(size) == min(latency + slope * size for latency, slope in fit.lines)
    levelled = ring_fit(costs, "levelled_all_reduce", tuple(range(15)))
    leaders = ring_fit(costs, "all_reduce", (0, 3, 6, 9, 12))
    reduce = ring_fit(costs, "reduce", (0, 1, 2))
    for size in (1, 1e6, 1e9):
        assert levelled.seconds(size) == pytest.approx(leaders.seconds(size) + 2 * reduce.seconds(size))


def test_what_collectives_reach_of_the_wire():
    """Over TCP the more, the larger the tensor and the fewer the machines; by RDMA 0.9; between CPUs, and
    inside a machine, all of it."""

    def share(text: str, machines: int, size_bytes: float) -> float:
        where = Cluster.parse(text)
        ranks = tuple(3 * m for m in range(machines))
        fit = ring_fit(where, "all_gather", ranks)
        return (machines - 1) / machines * size_bytes / 1e10 / (fit.seconds(size_bytes) - fit.latency_s)

    tcp = MACHINES.replace("kind = 'rdma'\n", "")
    assert share(tcp, 2, 2**20) == pytest.approx(0.7)
    assert share(tcp, 2, 2**40) == pytest.approx(0.85, rel=1e-3)
    assert 0.7 < share(tcp, 2, 2**27) < 0.85 and share(tcp, 4, 2**40) == pytest.approx(0.8, rel=1e-3)
    assert share(MACHINES, 4, 2**20) == pytest.approx(0.9) == share(MACHINES, 4, 2**40)
    on_cpus = tcp.replace("memory_gib = 4", "memory_gib = 4, kind = 'cpu'")
    assert share(on_cpus, 4, 2**20) == pytest.approx(1.0)
    inside = ring_fit(Cluster.parse(tcp), "all_gather", (0, 1, 2))
    assert inside.s_per_byte == pytest.approx(2 / 3 / 12.5e9)


FOUR_CARDS = "[[machine]]\ndevices = [{ device = 'RTX3090-24GB', count = 4 }]\nlink_gbit_per_s = 100\n"
PAIRS = "links = [{ devices = [0, 2], gbit_per_s = 400 }, { devices = [1, 3], gbit_per_s = 400 }]\n"


@pytest.mark.parametrize(
    ("collective", "hops"), [("all_reduce", 4 * 1.5), ("all_gather", 4 * 0.75), ("broadcast", 3.0)]
)
def test_hops_through_one_host_bridge_add_up(collective, hops):
    """Four cards without peer-to-peer access share 3 GB/s, or what the file says."""
    plain, shared = Cluster.parse(FOUR_CARDS), Cluster.parse(FOUR_CARDS + "p2p = false\n")
    everyone = (0, 1, 2, 3)
    fit, bridged = (ring_fit(c, collective, everyone) for c in (plain, shared))
    assert fit.s_per_byte == pytest.approx(
        {"all_reduce": 1.5, "all_gather": 0.75}.get(collective, 1) / 12.5e9
    )
    assert bridged.s_per_byte == pytest.approx(hops / 3e9)
    told = Cluster.parse(FOUR_CARDS + "bridge_gbit_per_s = 40\n")
    assert ring_fit(told, collective, everyone).s_per_byte == pytest.approx(hops / 5e9)
    assert ring_fit(shared, "send", (0, 1)).s_per_byte == pytest.approx(1 / 3e9)
    assert links_of(shared, everyone) == {Link(BRIDGE, 0)} and links_of(plain, everyone) == {Link(INSIDE, 0)}


def test_pairs_with_a_link_of_their_own_use_it():
    """Only two of the four hops of a ring are then through the bridge, and two pairs share nothing."""
    where = Cluster.parse(FOUR_CARDS + PAIRS + "p2p = false\n")
    assert ring_fit(where, "all_reduce", (0, 2)).s_per_byte == pytest.approx(1 / 50e9)
    assert ring_fit(where, "all_reduce", (0, 1)).s_per_byte == pytest.approx(2 / 3e9)
    assert ring_fit(where, "all_reduce", (0, 1, 2, 3)).s_per_byte == pytest.approx(2 * 1.5 / 3e9)
    busy = link_s_per_byte(where, "all_reduce", (0, 1, 2, 3))
    assert busy == pytest.approx(
        {Link(OWN, 0, 0): 1.5 / 50e9, Link(OWN, 0, 1): 1.5 / 50e9, Link(BRIDGE, 0): 3 / 3e9}
    )
    assert links_of(where, (0, 2)) == {Link(OWN, 0, 0)} and links_of(where, (1, 3)) == {Link(OWN, 0, 1)}
    # each sends each other one a sixteenth: two by links, eight through the bridge
    assert link_s_per_byte(where, "all_to_all", (0, 1, 2, 3)) == pytest.approx(
        {Link(OWN, 0, 0): 1 / 16 / 50e9, Link(OWN, 0, 1): 1 / 16 / 50e9, Link(BRIDGE, 0): 8 / 16 / 3e9}
    )
    assert sent_s_per_byte(where, ((0, 2, 0.5), (0, 1, 0.25), (1, 0, 0.25))) == pytest.approx(
        {Link(OWN, 0, 0): 0.5 / 50e9, Link(BRIDGE, 0): 0.5 / 3e9}
    )


def test_gloo_sums_along_a_ring():
    """Whatever the size: every hop waits for the processes at its ends."""
    on_cpus = MACHINES.replace("memory_gib = 4", "memory_gib = 4, kind = 'cpu'")
    fit = ring_fit(Cluster.parse(on_cpus), "all_reduce", tuple(range(15)))
    assert not fit.lines and fit.latency_s == pytest.approx(28 * (20e-6 + 5e-5))


def test_emulated_devices_wait_for_their_processes_too():
    """gloo between throttled processes takes milliseconds for a few bytes, whatever the wire does."""
    emulated = THREE.replace("gbyte_per_s = 200", "gbyte_per_s = 200, cpu_share = 0.5").replace(
        "gbyte_per_s = 80", "gbyte_per_s = 80, cpu_share = 0.2"
    )
    few, many = (ring_fit(cluster(emulated), "all_reduce", ranks).latency_s for ranks in ((0, 1), (0, 1, 2)))
    assert 1e-3 < few < many < 10e-3


RATIO = make_ratio([0.5, 0.3, 0.2])


@pytest.mark.parametrize("name", GRAPHS)
def test_sheet_agrees_with_every_instruction(name):
    """What is worked out once and shared is what each instruction costs by itself."""
    costs = CostModel(cluster(THREE))
    program = data_parallel(graph(GRAPHS[name], 16), costs, RATIO)
    sheet = Sheet(program, costs)
    for ratio in (RATIO, make_ratio([0.2, 0.2, 0.6])):
        changed = with_ratio(program, "r0", ratio)
        forward, backward = sheet.seconds(changed)
        for n, i in enumerate(changed.instructions):
            assert (n in sheet.work_of) == is_computation(i)
            if not is_computation(i):
                continue
            for rank in range(3):
                time = op_time(changed, i, costs, costs.class_of[rank])
                share = held_share(changed, work_type(changed, i), rank)
                assert forward[sheet.work_of[n]][rank] == time.forward.at(share)
                assert backward[sheet.work_of[n]][rank] == time.backward.at(share)
        whole = sum(i.type.value.size_bytes for i in changed.params)
        expected = tuple(costs.optimizer_s(r, whole) for r in range(3))
        assert sheet.optimizer_s(changed) == pytest.approx(expected)


def test_a_part_of_the_samples_scales_what_is_cut_between_them_and_nothing_else():
    """Parameters are stored in shards of the same ratio, and whole of them belongs to no micro-batch."""
    costs = CostModel(cluster(THREE))
    program = fully_sharded(data_parallel(graph(GRAPHS["mlp"], 16), costs, even_ratio(3)))
    samples = samples_of(program)
    step = costed_micro_step(program, samples)
    assert step.ratios == program.ratios
    sheet, halves = Sheet(step, costs), (0.5, 0.5, 0.5)
    scopes = set()
    for name, t in step.types.items():
        is_cut = name in samples.values and isinstance(t.placement, Shard)
        assert (t.scope is Scope.MICRO_BATCH) == is_cut
        full, half = sheet.shares(t.cut, step), sheet.shares(t.cut, step, halves)
        assert half == (tuple(share / 2 for share in full) if is_cut else full)
        assert sheet.shares(t.cut.of_step, step, halves) == full
        assert sheet.shares(t.cut.whole, step, halves) == ((0.5,) * 3 if is_cut else (1.0,) * 3)
        scopes.add((t.cut.ratio, t.cut.scope, t.cut.size > 0))
    assert {("r0", Scope.STEP, True), ("r0", Scope.MICRO_BATCH, True)} <= scopes
    with pytest.raises(ParseError, match="of"):
        parse_program(str(step))  # it is no program of a whole step


def test_shares_of_a_program_are_those_of_its_first_ratio():
    program = data_parallel(graph(GRAPHS["mlp"], 16), CostModel(cluster(THREE)), even_ratio(3))
    ratio, other = make_ratio([5, 3, 2]), make_ratio([1, 2, 1])
    owned = program.changed(ratios=(*program.ratios, ("z", other)))
    assert owned.with_shares(ratio).ratios == ((owned.main_ratio, ratio), ("z", other))
    assert owned.with_shares(ratio).shares == with_ratio(owned, owned.main_ratio, ratio).shares == ratio
    assert with_ratio(owned, "z", ratio).ratios == ((owned.main_ratio, owned.shares), ("z", ratio))
    with pytest.raises(KeyError):
        with_ratio(program, "z", ratio)
