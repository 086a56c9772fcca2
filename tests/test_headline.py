"""The line that begins a plan claims no more than the devices' speeds allow."""

from dataclasses import replace
from pathlib import Path

import pytest

import mixmesh
from mixmesh.cluster import Cluster
from mixmesh.explain.headline import headline, samples_per_rank, summed_speeds, times_text
from mixmesh.explain.overview import _whole
from mixmesh.frontend.job import load_job
from mixmesh.lang.ir import parse_program
from mixmesh.lang.plan_file import Candidate, Plan

ROOT = Path(__file__).parents[1]
DEVICES = "[[machine]]\ndevices = [{ cpu_share = 0.5 }, { cpu_share = 0.25 }, { cpu_share = 0.2 }]\n"
NETWORK = "[network]\nbandwidth_gbit_per_s = 100\nlatency_us = 1\n"


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return Cluster.parse('name = "three"\n' + NETWORK + DEVICES)


@pytest.fixture(scope="module")
def plan(cluster: Cluster) -> Plan:
    job = load_job(str(ROOT / "examples/gpt.py"))
    return mixmesh.plan(job.model, job.batch, cluster, planner="ddp-even")


def with_baselines(plan: Plan, times: dict[str, float]) -> Plan:
    candidates = tuple(Candidate(name, True, t * plan.predicted_step_s) for name, t in times.items())
    return replace(plan, planner="hap", candidates=candidates)


@pytest.mark.parametrize(("predicted", "told"), ((1.5, "1.5x"), (1.9, "1.9x"), (2.6, "1.9x"), (40.0, "1.9x")))
def test_devices_are_as_fast_as_their_sum_at_most(plan, cluster, predicted, told):
    """Together these are as fast as 1.9 of the fastest. A slow DDP is no matter of speeds."""
    line = headline(with_baselines(plan, {"single": predicted, "ddp-even": 2.6}), cluster)
    assert line.endswith(f"{told} of the fastest device alone, 2.6x of DDP")


def test_a_bound_is_never_rounded_up(plan, cluster):
    """15.6 of the fastest are told as 15 of them, not 16."""
    fast = cluster.devices[0]
    factor = 14.6 * fast.flop_per_s
    machine = replace(
        cluster.machines[0],
        devices=(fast, *(replace(fast, flop_per_s=factor / 16, half_flop_per_s=factor / 16,
                                 memory_bytes_per_s=14.6 * fast.memory_bytes_per_s / 16),) * 16),
    )  # fmt: skip
    many = replace(cluster, machines=(machine,))
    assert summed_speeds(many.devices, (fast,)) == pytest.approx(15.6)
    assert " 15x of the fastest device alone" in headline(with_baselines(plan, {"single": 99.0}), many)


def test_an_edited_step_of_nothing_is_compared_with_nothing(plan, cluster):
    edited = replace(with_baselines(plan, {"single": 1.0}), predicted_step_s=0.0)
    assert headline(edited, cluster).endswith(", 0 us")


def test_one_device_is_compared_with_nothing():
    one = Cluster.parse(DEVICES.replace("{ cpu_share = 0.25 }, { cpu_share = 0.2 }", ""))
    job = load_job(str(ROOT / "examples/gpt.py"))
    alone = mixmesh.plan(job.model, job.batch, one, planner="ddp-even")
    line = headline(with_baselines(alone, {"single": 1.0, "ddp-even": 1.0}), one)
    assert line.startswith("1 device in 1 machine: hap") and line.endswith("s")


def test_samples_of_a_device_that_works_alone(plan, cluster):
    """They were reported as 0 on every rank."""
    alone = replace(plan, program=parse_program(ALONE))
    assert samples_per_rank(alone) == (0, 8, 0)
    assert ", 0 / 8 / 0 samples, " in headline(alone, cluster)
    (unit,) = _whole(alone)
    assert unit.samples == (8,)


def test_samples_that_no_rank_cuts(plan, cluster):
    """All ranks compute all of them, which is no dealing out."""
    whole = replace(plan, program=parse_program(ALONE.replace("[0, 1, 0]", "[0.5, 0.25, 0.25]")))
    assert samples_per_rank(whole) == (8, 8, 8)
    assert "samples" not in headline(whole, cluster)


def test_ratios_in_two_digits():
    assert [times_text(ratio) for ratio in (1.44, 12.3, 99.4, 120.4)] == ["1.4x", "12x", "99x", "120x"]


ALONE = """
program alone world=3 {
  ratio r0 = [0, 1, 0]
  %x = input("x") : f32[8, 4] R@r0
  %w = param("w") : f32[4, 4] R@r0
  %h = aten.linear(%x, %w) : f32[8, 4] R@r0
  %loss = aten.mean(%h) : f32[] R@r0
  return %loss
}
"""

CUT_TABLE = """
program words world=3 {
  ratio r0 = [0.5, 0.25, 0.25]
  %t = param("t") : f32[10, 4] S(1)@r0
  %x = input("x") : i64[8] R
  %e = aten.embedding(%t, %x) : f32[8, 4] S(1)@r0
  %e.s0 = all_to_all(%e) : f32[8, 4] S(0)@r0
  %g = aten.gelu(%e.s0) : f32[8, 4] S(0)@r0
  %h = aten.relu(%g) : f32[8, 4] S(0)@r0
  %loss = aten.mean(%h) : f32[] P(sum)
  return %loss
}
"""


def test_samples_where_all_ranks_need_all_words(plan, cluster):
    """Columns of the table are for the words of all samples; the rest runs on the rank's own."""
    words = replace(plan, program=parse_program(CUT_TABLE))
    assert samples_per_rank(words) == (4, 2, 2)
    assert ", 4 / 2 / 2 samples, " in headline(words, cluster)
    (unit,) = _whole(words)
    assert unit.samples == (4, 2, 2)
