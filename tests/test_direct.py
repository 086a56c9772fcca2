"""Small values that are summed in one shot: what says so, what it costs, what it gives."""

from __future__ import annotations

import pytest
from gloo_world import assert_passed, assert_trains_alike, run_world
from small_graphs import THREE, cluster
from test_coalesced import Branches, pictures

from benchmarks.measure import cluster_text
from mixmesh.base.timeline import OUT, Link
from mixmesh.cluster import Cluster
from mixmesh.cost import DIRECT, ONE_SHOT_SUMS, CostModel, LinkMeasurement, Profile
from mixmesh.cost.direct import SIZES_BYTES, best_direct_bytes
from mixmesh.cost.exchanges import Exchange, exchange_of
from mixmesh.errors import InputError, ParseError
from mixmesh.explain import explain_plan
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import Program, make_ratio, parse_program
from mixmesh.measure.profiler.links import link_cases
from mixmesh.planner import make_plan
from mixmesh.search.baselines import data_parallel
from mixmesh.simulator import simulate

UNEVEN = make_ratio([0.5, 0.3, 0.2])
COSTS = CostModel(cluster(THREE))


def trusting(devices: Cluster, profile: Profile | None = None) -> CostModel:
    """Costs that count on one-shot sums without a measurement."""
    return CostModel(devices, profile, unmeasured=(ONE_SHOT_SUMS,))


def branches(ratio=UNEVEN) -> Program:
    """Data parallelism of a network with batch norm."""
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in pictures().items()}
    return data_parallel(trace(Branches().double(), inputs).graph, COSTS, ratio)


def direct_sums(program: Program) -> list[bool]:
    found = [exchange_of(program, i, backward=b) for i in program.instructions for b in (False, True)]
    return [e.direct for e in found if e is not None and e.name == "all_reduce"]


def test_text_says_up_to_which_size():
    program = branches()
    assert "direct" not in str(program) and not any(direct_sums(program))
    for most in (16, 64, 2**20):
        made = program.changed(direct_bytes=most)
        assert f"\n  direct to {most}\n" in str(made)
        assert parse_program(str(made)) == made
    sums = direct_sums(program.changed(direct_bytes=64))
    assert any(sums) and not all(sums)  # of two rows of 5 and of 12 channels
    assert all(direct_sums(made))


@pytest.mark.parametrize("line", ["direct 64", "direct to", "direct to -1", "direct to many"])
def test_text_that_says_something_else(line):
    text = str(branches().changed(direct_bytes=64))
    with pytest.raises(ParseError):
        parse_program(text.replace("direct to 64", line))


def test_one_hop_and_more_bytes():
    devices = Cluster.load("heterog-8")
    costs, everyone = CostModel(devices), tuple(range(8))
    usual, direct = (Exchange("all_reduce", 2**12, everyone, direct=how) for how in (False, True))
    assert direct.seconds(costs) < 0.65 * usual.seconds(costs)
    # a machine's two devices send six others each what they have
    assert direct.link_s_per_byte(devices)[Link(OUT, 0)] == pytest.approx(
        12 / devices.machines[0].nic_bytes_per_s
    )
    most = best_direct_bytes(trusting(devices))
    assert 2**12 <= most < SIZES_BYTES[-1]
    beyond = Exchange("all_reduce", 4 * most, everyone, direct=True)
    assert beyond.seconds(costs) > Exchange("all_reduce", 4 * most, everyone).seconds(costs)


def test_nothing_goes_directly_that_was_not_measured():
    """Not on GPUs by the links' figures alone, unless that is asked for by name."""
    devices = Cluster.load("heterog-8")
    assert best_direct_bytes(CostModel(devices)) == 0 < best_direct_bytes(trusting(devices))
    assert trusting(devices).source == "roofline, counting on one-shot-sums (never measured)"
    with pytest.raises(InputError, match="no unmeasured mechanism 'one-shot'"):
        CostModel(devices, unmeasured=("one-shot",))


def test_nothing_goes_directly_where_it_does_not_pay():
    assert best_direct_bytes(trusting(Cluster.load("hap-64"))) == 0  # 63 messages in place of 16 hops
    alone = '[network]\nbandwidth_gbit_per_s = 1\nlatency_us = 50\n[[machine]]\ndevices = ["V100-16GB"]\n'
    assert best_direct_bytes(trusting(Cluster.parse(alone, where="test"))) == 0


def test_cpus_leave_sums_to_the_library():
    """In a step it gains nothing there, and is not measured either."""
    gpus = Cluster.load("heterog-8")
    cpus = Cluster.parse(cluster_text("0.5", ("0.30", "0.30"), ("0.20",)), where="test")
    for devices, sums in ((gpus, 1), (cpus, 0)):
        assert sum(case.collective == DIRECT for case in link_cases(devices, "gloo")) == sums
        assert (best_direct_bytes(trusting(devices)) > 0) == bool(sums)


def test_what_was_measured_decides():
    def costs(direct_s: float | None) -> CostModel:
        seconds = {"all_reduce": 0.01} | ({DIRECT: direct_s} if direct_s else {})
        rows = [LinkMeasurement(n, "", (), ((2.0**8, s), (2.0**18, 2 * s))) for n, s in seconds.items()]
        return CostModel(cluster(THREE), Profile({}, tuple(rows)))

    assert best_direct_bytes(costs(0.02)) == 0
    assert best_direct_bytes(costs(0.002)) == SIZES_BYTES[-1]
    everyone = (0, 1, 2)
    usual, known = (COSTS.collective(name, everyone).seconds(2**8) for name in ("all_reduce", DIRECT))
    # without a measurement of its own it is as much faster as the links say
    guessed = costs(None).collective(DIRECT, everyone).seconds(2**8)
    assert guessed == pytest.approx(0.01 * known / usual, rel=0.2)


def test_plans_sum_directly_and_baselines_do_not():
    graph = trace(Branches(), pictures(64)).graph
    devices = Cluster.load("heterog-8")
    parallel = make_plan(graph, devices, planner="ddp-proportional")
    assert not parallel.program.direct_bytes
    made = parallel.program.changed(direct_bytes=best_direct_bytes(trusting(devices)))
    timelines = [simulate(p, CostModel(devices)) for p in (parallel.program, made)]
    assert timelines[1].step_s < 0.9 * timelines[0].step_s
    for planner, unmeasured in (("hap", ()), ("hap", (ONE_SHOT_SUMS,)), ("auto", (ONE_SHOT_SUMS,))):
        plan = make_plan(graph, devices, planner=planner, unmeasured=unmeasured)
        assert unmeasured or not plan.program.direct_bytes
        assert any(direct_sums(plan.program)) == bool(plan.program.direct_bytes)
        said = any("are summed in one shot" in s for s in explain_plan(plan, devices).sentences)
        assert said == bool(plan.program.direct_bytes)


class Trained:
    """Three steps of Adam on every rank, held against the single device."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, _) -> None:
        inputs = {name: x.double() if x.is_floating_point() else x for name, x in pictures().items()}
        single, mine = Branches().double(), Branches().double()
        assert_trains_alike(single, mine, parse_program(self.text), [inputs] * 3)


def test_processes_train_as_one_device_does():
    programs = {
        "some": branches().changed(direct_bytes=64),
        "all": branches().changed(direct_bytes=2**18),
        "one without samples": branches(make_ratio([0.6, 0, 0.4])).changed(direct_bytes=2**18),
    }
    assert all(any(direct_sums(p)) for p in programs.values())
    for failures in run_world(3, {name: Trained(str(p)) for name, p in programs.items()}).values():
        assert_passed(failures)
