"""The checks on a GPU: ``make gpu-check``, at most eight minutes. Figures go to out/gpu/check.json.

Bands: peak memory never under and at most 10 % over, a predicted step within 10 %.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from gloo_world import assert_passed

from mixmesh.lang.rules import RULES
from tests.gpu import checks

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: nothing of gpu-check was run"
)
STEPS = 10


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture(scope="module")
def rows(device):
    found: dict[str, dict] = {}
    yield found
    print(f"\n{checks.write(found, device, Path('out/gpu/check.json'))}")


def test_calibration(rows, device, tmp_path):
    """Every class gets a fit that is nearer than the datasheet on the kernels that it was fitted to. It comes
    first, as what this process holds of the card would count as memory of others."""
    row = rows["calibration"] = checks.calibration(device, 60, tmp_path)
    assert row["code"] == 0 and row["classes"] >= 14, row
    assert row["error"] < row["datasheet_error"] and row["context_bytes"] > 0, row


@pytest.mark.parametrize("world_size", [1, 2])
def test_doctor(rows, world_size):
    """One rank exchanges by NCCL, several on one GPU by gloo through the host."""
    row = rows[f"doctor on {world_size} ranks"] = checks.doctor(world_size, timeout_s=150)
    assert row["ok"], row


def test_nccl_with_one_rank(device):
    assert_passed(checks.meeting(device, 1))


def test_several_ranks_on_one_gpu(rows, device):
    """By gloo through the host, as NCCL takes one rank of a card."""
    assert_passed(checks.meeting(device, 2))
    assert_passed(checks.shared(device, 2))
    rows["ranks on one GPU"] = {"world_size": 2}


def test_a_checkpoint_is_staged_in_pinned_memory(rows, device):
    row = rows["staging"] = checks.staging(device)
    assert row == {"equal": True, "reused": True, "pinned": True}, row


def test_operators_and_rules(rows, device):
    wrong = checks.refuted(device, RULES)
    rows["operators"] = {"proved": len(RULES), "wrong": len(wrong)}
    assert not wrong, "\n".join(wrong)


def test_batch_norms(rows, device):
    row = rows["batch norms, float64"] = checks.batch_norms(device)
    assert max(row.values()) < 1e-9, row


def test_losses_are_those_of_the_plain_model(rows, device):
    row = rows["losses, float32"] = checks.agreement(device, checks.LARGE, torch.float32)
    assert row["error"] < 1e-3, row


def test_a_language_model_in_bf16(rows, device):
    row = rows["losses, bfloat16"] = checks.agreement(device, checks.LARGE, torch.bfloat16)
    assert row["error"] < 2e-2, row


def test_peak_memory(rows, device):
    gc.collect()  # what the tests before held
    row = rows["peak memory"] = checks.memory(device, checks.LARGE)
    assert 1.0 <= row["ratio"] <= 1.1, row
    assert row["of_process_ratio"] >= 1.0, row  # "fits" is said of all that a process holds


def test_predicted_step(rows, device):
    row = rows["predicted step"] = checks.prediction(device, checks.LARGE, budget_s=60, steps=STEPS)
    assert 0.9 <= row["ratio"] <= 1.1, row


def test_overhead(rows, device):
    """Told and not asserted: a shared machine's times say little."""
    row = rows["a step"] = checks.overhead(device, checks.LARGE, STEPS, compiles=True)
    assert row["over_plain"] > 0 and row["over_compiled"] > 0
