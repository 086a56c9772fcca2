"""``mixmesh.accelerate.Accelerator`` under torchrun against Accelerate's on one device; what it refuses.

The scenarios are in ``accelerate_script.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator as PlainAccelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from launches import plans_with_earlier_gradients, run_each
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mixmesh
from mixmesh.accelerate import Accelerator
from mixmesh.training.integrations.accelerate.refusals import (
    check_accelerator,
    check_arguments,
    check_prepared,
)
from mixmesh.training.integrations.launched import check_not_spread

SCRIPT = Path(__file__).parent / "accelerate_script.py"
RANKS = 2
LIBRARIES = ("accelerate", "mixmesh.accelerate")
CLOSE = dict(rel=1e-9, abs=1e-9)
SAME = [
    "labelled",
    "resumed",
    "criterion",
    "frozen later",
    "evaluated between",
    "by one rank",
    "two models",
    "streamed",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, tuple[Path, dict[str, list[dict]]]]:
    """By library, the folder and what was told by each name: all scenarios, by one process and two ranks."""
    found = run_each(SCRIPT, dict(zip(LIBRARIES, (0, RANKS))), tmp_path_factory.mktemp)
    by_name: dict[str, dict[str, list[dict]]] = {library: {} for library in LIBRARIES}
    for library, (_, rows) in found.items():
        for row in rows:
            by_name[library].setdefault(row["name"], []).append(row)
    return {library: (folder, by_name[library]) for library, (folder, _) in found.items()}


def of(runs, library: str, name: str) -> list[dict]:
    return runs[library][1][name]


@pytest.mark.parametrize("name", SAME)
def test_losses_norms_and_metrics_are_those_of_one_device(runs, name):
    (single,) = of(runs, "accelerate", name)
    ranks = of(runs, "mixmesh.accelerate", name)
    assert len(ranks) == RANKS
    for rank in ranks:
        assert rank["told"] == pytest.approx(single["told"], **CLOSE)


@pytest.mark.parametrize("name", ["labelled", "resumed"])
def test_it_looks_like_one_process(runs, name):
    ranks = of(runs, "mixmesh.accelerate", name)
    assert [rank["processes"] for rank in ranks] == [[1, 0]] * RANKS
    assert [rank["main"] for rank in ranks] == [True, False]
    assert {rank["kind"] for rank in ranks} == {"Net"}
    assert [rank["found"] for rank in ranks] == [False, True]
    (single,) = of(runs, "accelerate", name)
    assert single["logged"] and [rank["logged"] for rank in ranks] == [single["logged"], 0]


@pytest.mark.parametrize("name", ["labelled", "resumed"])
def test_saved_models_are_those_of_one_device(runs, name):
    """Also one that the first rank unwrapped by itself."""
    expected, got = (
        load_file(runs[library][0] / name / "model" / "model.safetensors") for library in LIBRARIES
    )
    unwrapped = torch.load(runs["mixmesh.accelerate"][0] / name / "unwrapped.pt", weights_only=True)
    assert expected.keys() == got.keys() == unwrapped.keys()
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(unwrapped[key], value, rtol=1e-9, atol=1e-10)


def test_checkpoints_are_those_of_one_device(runs):
    expected, got = (runs[library][0] / "labelled" / "state" for library in LIBRARIES)
    assert {p.name for p in expected.iterdir()} == {p.name for p in got.iterdir()}  # none by rank
    before, after = (torch.load(f / "optimizer.bin", weights_only=True)["state"] for f in (expected, got))
    assert before.keys() == after.keys()
    for number, entries in before.items():
        for key, value in entries.items():
            torch.testing.assert_close(after[number][key], value, rtol=1e-8, atol=1e-12)


def test_plans_count_gradients_of_earlier_batches_where_steps_have_several(runs):
    assert plans_with_earlier_gradients(runs["mixmesh.accelerate"][0]) == {False, True}


def test_parameters_are_cut_in_one_of_the_scenarios(runs):
    plans = [p.read_text() for p in (runs["mixmesh.accelerate"][0] / "cache" / "plans").iterdir()]
    cut = [[line for line in plan.splitlines() if "= param(" in line and " S(" in line] for plan in plans]
    assert any(cut) and not all(cut)


def test_mixed_precision_is_that_of_the_arguments(runs):
    """Sums in bfloat16 in another order differ by a part of what bfloat16 changes."""
    whole, half = (of(runs, "accelerate", name)[0]["told"][0] for name in ("whole", "half"))
    for rank in of(runs, "mixmesh.accelerate", "half"):
        assert abs(rank["told"][0] - half) < 0.2 * abs(whole - half)


def test_the_loss_is_scaled_in_float16(runs):
    """All ranks skip the step whose gradients overflow, as a single device does."""
    (single,) = of(runs, "accelerate", "scaled")
    assert single["scales"][0] < 2.0**24
    for rank in of(runs, "mixmesh.accelerate", "scaled"):
        assert rank["scales"] == single["scales"]
        # of the last two, the sum of logits, and of the norm there: infinite in a step that is skipped
        assert rank["told"] == pytest.approx(single["told"], rel=5e-3, nan_ok=True)


def test_what_a_prepared_model_refuses(runs):
    for rank in of(runs, "mixmesh.accelerate", "refused"):
        other_batch, through_logits, changed, other_rates, unfrozen, *clipped = rank["errors"]
        assert "[0.1] and [1.1]" in other_rates
        assert "first.weight was frozen when the plan was made" in unfrozen
        assert "2 different batches" in other_batch
        assert "backward through logits" in through_logits
        assert "changed on some ranks only" in changed and "last.bias" in changed
        norms, values = clipped
        assert "if accelerator.sync_gradients: accelerator.clip_grad_norm_(...)" in norms
        assert "if accelerator.sync_gradients: accelerator.clip_grad_value_(...)" in values
        assert "accelerate_script.py" in norms


def test_training_without_a_plan_is_told(runs):
    first, second = of(runs, "mixmesh.accelerate", "unplanned")
    assert not second["warned"]
    assert any("every rank does all the work" in text for text in first["warned"])
    for rank in first, second:
        assert "prepare_optimizer(optimizer) by itself" in rank["error"]
        assert "accelerate_script.py" in rank["error"]


def test_cards_without_bf16_are_refused_where_nothing_scales_the_loss(runs):
    for rank in of(runs, "mixmesh.accelerate", "without bf16"):
        assert "rank 0 has no bf16 and computes it in float16" in rank["error"]
        assert 'Accelerator(mixed_precision="fp16")' in rank["error"]


@pytest.fixture
def fresh(monkeypatch):
    """Accelerate keeps one state for all of a process."""
    yield monkeypatch
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fsdp_plugin", FullyShardedDataParallelPlugin), ("dynamo_plugin", TorchDynamoPlugin),
        ("dynamo_backend", lambda: "inductor"), ("deepspeed_plugin", object), ("parallelism_config", object),
        ("dataloader_config", lambda: DataLoaderConfiguration(dispatch_batches=True)),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_kept_are_refused(fresh, name, value):
    fresh.setenv("RANK", "0")
    with pytest.raises(mixmesh.InputError, match="does not take"):
        Accelerator(**{name: value()})


def test_what_accelerate_launch_asks_for_is_refused(fresh):
    fresh.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(mixmesh.InputError, match="ACCELERATE_USE_FSDP"):
        check_arguments({})


def test_other_precisions_are_refused():
    with pytest.raises(mixmesh.InputError, match="mixed_precision"):
        check_accelerator(SimpleNamespace(mixed_precision="fp8"))


def test_another_device_than_the_plan_s_is_refused(fresh):
    fresh.setenv("RANK", "0")
    fresh.setattr(
        "mixmesh.training.integrations.accelerate.one_process.default_device", lambda: torch.device("cuda:0")
    )
    with pytest.raises(mixmesh.InputError, match="different devices"):
        Accelerator(cpu=True)


def test_one_call_prepares_what_is_planned_together():
    model, loader = nn.Linear(2, 2), DataLoader([1, 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for models, optimizers, loaders in (
        ([], [optimizer], [loader]), ([model], [optimizer], []), ([model, model], [optimizer], [loader]),
        ([model], [optimizer, optimizer], [loader]),
    ):  # fmt: skip
        with pytest.raises(mixmesh.InputError, match="one model with its optimizer"):
            check_prepared(models, optimizers, loaders)
    check_prepared([model], [], [loader])
    check_prepared([model], [optimizer], [loader, loader])
    check_prepared([model], [optimizer], [], has_batch=True)
    with pytest.raises(mixmesh.InputError, match="in a call of its own"):
        check_prepared([model, model], [optimizer, optimizer], [loader])


def test_models_on_devices_already_are_refused():
    model = nn.Linear(2, 2)
    check_not_spread(model)
    model.hf_device_map = {"": 0}
    with pytest.raises(mixmesh.InputError, match="device_map"):
        check_not_spread(model)


def test_without_torchrun_it_is_the_plain_accelerator(fresh):
    """But that a loss is part of the model, as it is under torchrun."""
    accelerator = Accelerator(cpu=True, planning={"loss": F.cross_entropy, "profile_s": 0})
    assert isinstance(accelerator, PlainAccelerator) and PartialState().num_processes == 1
    net = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(net, optimizer)
    x, y = torch.ones(4, 2), torch.zeros(4, dtype=torch.long)
    loss = model(x, y)
    torch.testing.assert_close(loss, F.cross_entropy(net(x), y))
    accelerator.backward(loss)
    optimizer.step()
    model.eval()
    with torch.no_grad():
        assert model(x).shape == (4, 3)


def test_it_says_what_to_install():
    script = "import sys; sys.modules['accelerate'] = None; import mixmesh; import mixmesh.accelerate"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "pip install 'mixmesh[accelerate]'" in done.stderr
