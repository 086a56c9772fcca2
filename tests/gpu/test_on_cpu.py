"""The functions behind ``make gpu-check``, on a CPU and small: they run before the first GPU is there."""

from __future__ import annotations

import json

import pytest
import torch

from mixmesh.cost import CostModel
from mixmesh.cost.gpu_memory import GROUP_BYTES, GROUPS, WORKSPACE_BYTES
from mixmesh.measure.profiler.constants import use_kernels
from mixmesh.runtime.accelerator import empty_cache, indexed, synchronize, take
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
        text = f'[[machine]]\ndevices = [{{ device = "V100-16GB", count = {count} }}]\n'
        return CostModel(checks.Cluster.parse(text)).memory_constant_bytes(0, idle=idle)

    assert constant(2, idle=True) - constant(1, idle=True) == GROUPS * GROUP_BYTES
    assert constant(2, idle=False) - constant(2, idle=True) == WORKSPACE_BYTES
