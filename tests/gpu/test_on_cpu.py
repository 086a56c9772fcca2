"""The functions behind ``make gpu-check``, on a CPU and small: they run before the first GPU is there."""

from __future__ import annotations

import json

import pytest
import torch
from gloo_world import assert_passed

from mixmesh.cost import CostModel
from mixmesh.cost.gpu_memory import KERNEL_BYTES, communicator_bytes, usual_communicators, workspace_bytes
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.measure.profiler.constants import use_kernels
from mixmesh.runtime.accelerator import empty_cache, indexed, synchronize, take
from mixmesh.step.memory import Memory
from tests.gpu import checks
from tests.support.rule_samples import SAMPLES

CPU = torch.device("cpu")


def test_operators_are_proved_where_the_default_device_is():
    assert not checks.refuted(CPU, ("aten.linear", "aten.softmax.int", "aten.native_dropout"))
    with torch.device("meta"):  # a device on which no value is: what runs there cannot be proved
        case = checks.make_case("aten.relu", SAMPLES["aten.relu"][0])
    assert all(x.is_meta for x in (*case.inputs, *case.outputs))


def test_losses_are_those_of_the_plain_model():
    assert checks.agreement(CPU, checks.SMALL, torch.float32)["error"] < 1e-5
    row = checks.agreement(CPU, checks.SMALL, torch.bfloat16)
    assert row["error"] < 2e-2 and row["ours"] != row["ours"][:1] * len(row["ours"])


def test_steps_are_predicted_and_timed():
    row = checks.prediction(CPU, checks.SMALL, budget_s=4, steps=2)
    assert row["predicted_s"] > 0 and row["ratio"] == pytest.approx(row["predicted_s"] / row["measured_s"])
    row = checks.overhead(CPU, checks.SMALL, 2, compiles=False)
    assert row["over_plain"] == pytest.approx(row["ours_s"] / row["plain_s"])


def test_batch_norms_are_those_of_the_plain_model():
    assert max(checks.batch_norms(CPU).values()) < 1e-9


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_meet(world_size):
    assert_passed(checks.meeting(CPU, world_size))


def test_ranks_share_a_device():
    assert_passed(checks.shared(CPU, 2))


def test_a_checkpoint_is_staged():
    assert checks.staging(CPU) == {"equal": True, "reused": True, "pinned": False}


def test_rows_become_a_table(tmp_path):
    shown = checks.write({"a step": {"ours_s": 0.25, "ok": True}}, CPU, tmp_path / "gpu" / "check.json")
    assert "| a step | ours_s 0.25, ok True |" in shown
    assert json.loads((tmp_path / "gpu" / "check.json").read_text())["rows"]["a step"]["ok"] is True


def test_a_device_has_an_index(monkeypatch):
    assert indexed("cpu") == CPU and indexed("cuda:3") == torch.device("cuda", 3)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert indexed("cuda") == torch.device("cuda", 0)  # to which a thread can be set
    use_kernels(CPU)
    for nothing_to_do in (take, synchronize, empty_cache):
        nothing_to_do(CPU)


def test_a_process_on_a_gpu_holds_more_among_others():
    """Buffers of communicators, where there are several ranks; workspaces, where it computes."""

    def constant(count: int, *, idle: bool) -> int:
        return CostModel(v100s(count)).memory_constant_bytes(0, idle=idle)

    communicators = sum(communicator_bytes(v100s(2), c, 0) for c in usual_communicators(2))
    assert constant(2, idle=True) - constant(1, idle=True) == communicators > 0
    assert constant(2, idle=False) - constant(2, idle=True) == KERNEL_BYTES + workspace_bytes("V100-16GB")


def test_what_is_held_against_the_allocators_count_is_of_tensors_alone():
    cluster = v100s(1)
    plan = checks.planned(checks.SMALL.job(), cluster)
    tensors = Memory(plan.program, ADAM, cuda=True).moments
    largest = max(sum(moment.held.values()) for moment in tensors)
    assert checks.predicted_bytes(plan, cluster) == pytest.approx(largest, abs=2)


def v100s(count: int) -> checks.Cluster:
    return checks.Cluster.parse(f'[[machine]]\ndevices = [{{ device = "V100-16GB", count = {count} }}]\n')
