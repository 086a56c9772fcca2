"""``mixmesh.lightning.Strategy`` under torchrun against Lightning on one device; what it refuses.

The scenarios are in ``lightning_script.py``."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from launches import plans_with_earlier_gradients, run_each
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelPruning
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import nn
from torch.utils.data import DataLoader

import mixmesh
from mixmesh.lightning import Strategy
from mixmesh.training.integrations.lightning.refusals import check_device, check_precision, check_training
from mixmesh.training.integrations.lightning.step import Form

SCRIPT = Path(__file__).parent / "lightning_script.py"
RANKS = 2
WORLDS = {"auto": 0, "mixmesh": RANKS}
IMPORTS = ("torchmetrics",)  # not Lightning's own modules, some of which read the rank


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, tuple[Path, list[dict]]]:
    """By strategy, the folder and what was told: all scenarios, by one process and by two ranks at a time."""
    return run_each(SCRIPT, WORLDS, tmp_path_factory.mktemp, IMPORTS)


def of(runs, strategy: str, name: str) -> list[dict]:
    return [row for row in runs[strategy][1] if row["name"] == name]


@pytest.mark.parametrize("name", ["usual", "resumed"])
def test_metrics_are_those_of_one_device(runs, name):
    (single,) = of(runs, "auto", name)
    ranks = of(runs, "mixmesh", name)
    assert len(ranks) == RANKS and len(single["told"]) > 2
    for rank in ranks:
        assert len(rank["told"]) == len(single["told"])
        for row, expected in zip(rank["told"], single["told"]):
            assert row == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert rank["tested"] == pytest.approx(single["tested"], rel=1e-9)
        assert rank["processes"] == 1


@pytest.mark.parametrize("name", ["usual", "resumed"])
def test_weights_and_checkpoints_are_those_of_one_device(runs, name):
    """Also the module itself after ``fit``, on every rank."""
    expected, got = (runs[strategy][0] / name for strategy in WORLDS)
    assert {p.name for p in expected.glob("*.ckpt")} == {p.name for p in got.glob("*.ckpt")}
    for path in expected.glob("*.ckpt"):
        assert_same(
            torch.load(got / path.name, weights_only=False), torch.load(path, weights_only=False), path.name
        )
    module = torch.load(expected / "module-0.pt", weights_only=True)
    for rank in range(RANKS):
        assert_same(torch.load(got / f"module-{rank}.pt", weights_only=True), module, "module")


def assert_same(got, expected, where: str) -> None:
    """All of a checkpoint but folders, and what the fused optimizers note."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-10)
    elif isinstance(expected, dict):
        got, expected = ({_file(key): value for key, value in each.items()} for each in (got, expected))
        assert got.keys() - {"fused"} == expected.keys() - {"fused"}, where
        for key in expected.keys() - {"fused", "foreach"}:
            assert_same(got[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), where
        for n, each in enumerate(expected):
            assert_same(got[n], each, f"{where}.{n}")
    elif isinstance(expected, float):
        assert got == pytest.approx(expected, rel=1e-9), where
    elif not isinstance(expected, str):
        assert got == expected, where


def _file(key):
    return Path(key).name if isinstance(key, str) and key.startswith("/") else key


def test_plans_count_gradients_of_earlier_batches_where_steps_have_several(runs):
    assert plans_with_earlier_gradients(runs["mixmesh"][0]) == {False, True}


def test_parameters_are_cut_in_one_of_the_scenarios(runs):
    plans = [p.read_text() for p in (runs["mixmesh"][0] / "cache" / "plans").iterdir()]
    cut = [[line for line in plan.splitlines() if "= param(" in line and " S(" in line] for plan in plans]
    assert any(cut) and not all(cut)


@pytest.mark.parametrize("name", ["usual", "resumed"])
def test_one_rank_writes(runs, name):
    assert [rank["writes"] for rank in of(runs, "mixmesh", name)] == [True, False]
    logs = [list((runs[strategy][0] / name / "log").rglob("metrics.csv")) for strategy in WORLDS]
    single, parallel = (list(csv.DictReader(path.open())) for (path,) in logs)
    assert len(single) == len(parallel) > 2


def test_autocast_is_that_of_the_precision(runs):
    """Sums in bfloat16 in another order differ by a part of what bfloat16 changes."""
    whole, half = (of(runs, "auto", name)[0]["told"][0]["loss"] for name in ("whole", "half"))
    for rank in of(runs, "mixmesh", "half"):
        assert abs(rank["told"][0]["loss"] - half) < 0.2 * abs(whole - half)
    for rank in of(runs, "mixmesh", "whole"):
        assert rank["told"][0]["loss"] == pytest.approx(whole, rel=1e-6)


def test_the_loss_is_scaled_in_float16(runs):
    """All ranks skip the step whose gradients overflow, as a single device does."""
    (single,) = of(runs, "auto", "scaled")
    assert single["told"][0]["scale"] < 2.0**24
    for rank in of(runs, "mixmesh", "scaled"):
        assert [row["scale"] for row in rank["told"]] == [row["scale"] for row in single["told"]]
        losses, expected = ([row["loss"] for row in run["told"]] for run in (rank, single))
        assert losses == pytest.approx(expected, rel=2e-3)


MANUAL = {
    2: ("by-hand", "by-hand-resumed", "gan", "forward", "halves", "halves-resumed"),
    3: ("by-hand", "gan", "halves", "halves-resumed"),
}


@pytest.fixture(scope="module")
def manual(runs, tmp_path_factory) -> dict[int, tuple[Path, list[dict]]]:
    """By the number of ranks, the folder and what was told of manual optimization."""
    script = SCRIPT.parent / "lightning_manual.py"
    three = run_each(script, {"mixmesh": 3}, tmp_path_factory.mktemp, IMPORTS)
    return {1: runs["auto"], 2: runs["mixmesh"], 3: three["mixmesh"]}


@pytest.mark.parametrize(
    ("ranks", "name"), [(ranks, name) for ranks, names in MANUAL.items() for name in names]
)
def test_manual_optimization_is_that_of_one_device(manual, ranks, name):
    """Losses, norms of gradients and weights in every step, and the weights at the end; on ranks of unequal
    shares."""
    folder, rows = manual[ranks]
    (expected,) = (row["told"] for row in manual[1][1] if row["name"] == name)
    told = [row["told"] for row in rows if row["name"] == name]
    assert len(told) == ranks and len(expected) > 3
    for each in told:
        assert sum(each, []) == pytest.approx(sum(expected, []), rel=1e-9, abs=1e-12)
    weights = torch.load(manual[1][0] / f"{name}-0.pt", weights_only=True)
    for rank in range(ranks):
        got = torch.load(folder / f"{name}-{rank}.pt", weights_only=True)
        assert_same({key.replace("_orig_mod.", ""): x for key, x in got.items()}, weights, name)


def test_shares_of_manual_optimization_are_unequal(manual):
    plans = [p.read_text() for p in (manual[3][0] / "cache" / "plans").iterdir()]
    assert any("# local 3 2 2" in plan for plan in plans)


@pytest.mark.parametrize("name", ["by-hand", "by-hand-resumed", "gan", "forward"])
def test_checkpoints_of_manual_optimization_are_those_of_one_device(manual, name):
    got, expected = (torch.load(manual[n][0] / f"{name}.ckpt", weights_only=False) for n in (2, 1))
    assert_same(got, expected, name)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("within", "calls self.last, which is planned as a part of self"),
        ("epoch", "forward uses self.current_epoch"), ("second", "has no gradient itself"),
    ],
)  # fmt: skip
def test_what_manual_optimization_cannot_keep_is_refused(runs, what, expected):
    errors = [row["error"] for row in of(runs, "mixmesh", "manual refused") if row["what"] == what]
    assert len(errors) == RANKS
    assert all(expected in error and "lightning_manual.py:" in error for error in errors)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("index", "uses batch_idx"), ("step", "uses self.global_step"), ("trainer", "uses self.trainer"),
        ("optimizers", "uses self.optimizers"), ("keep", "uses self.seen to collect"),
        ("measure", "self.log('mean', MeanMetric)"), ("count", "cannot be traced"),
        ("number", "self.log('number', float)"), ("more", "a dict with other, a int"),
        ("nothing", "has to return its loss"), ("batches", "2 different batches"), ("modes", "norm"),
        ("rates", "[0.01] and [1.0]"), ("again", "a second fit"),
        ("whole", "changed on some ranks only"),
    ],
)  # fmt: skip
def test_what_is_refused_in_the_first_steps(runs, what, expected):
    ranks = [row for row in of(runs, "mixmesh", "refused") if row["what"] == what]
    assert len(ranks) == RANKS
    assert all(expected in row["error"] for row in ranks)
    if what in ("index", "step", "trainer", "optimizers", "number", "more", "nothing"):
        assert all("lightning_script.py:" in row["error"] for row in ranks)


class Tiny(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Reads(Tiny):
    def training_step(self, dataloader_iter):
        return super().training_step(next(dataloader_iter), 0)


@pytest.mark.parametrize(
    ("module", "callbacks", "optimizers", "expected"),
    [
        (Reads, [], 1, "dataloader_iter"),
        (Tiny, [], 2, "2 optimizers"), (Tiny, [BatchSizeFinder()], 1, "BatchSizeFinder"),
        (Tiny, [LearningRateFinder()], 1, "LearningRateFinder"),
        (Tiny, [ModelPruning("l1_unstructured")], 1, "ModelPruning"),
    ],
)  # fmt: skip
def test_modules_and_callbacks_that_cannot_be_kept_are_refused(module, callbacks, optimizers, expected):
    trainer = SimpleNamespace(callbacks=callbacks)
    with pytest.raises(mixmesh.InputError, match=expected) as caught:
        check_training(trainer, module(), [None] * optimizers)
    assert callbacks or "test_lightning.py:" in caught.value.where
    check_training(SimpleNamespace(callbacks=[]), Tiny(), [None])


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler")
def test_precisions():
    both = (MixedPrecision("bf16-mixed", "cpu"), MixedPrecision("16-mixed", "cpu"))
    for plugin in (Precision(), DoublePrecision(), *both):
        check_precision(plugin)
    with pytest.raises(mixmesh.InputError, match="precision="):
        check_precision(HalfPrecision("bf16-true"))


def test_another_device_than_the_plan_s_is_refused():
    check_device(torch.device("cpu"), torch.device("cpu"))
    with pytest.raises(mixmesh.InputError, match="accelerator of cpu"):
        check_device(torch.device("cpu"), torch.device("cuda:0"))


def test_cards_without_bf16_are_refused_where_nothing_scales_the_loss(runs):
    errors = [row["error"] for row in of(runs, "mixmesh", "without bf16")]
    assert len(errors) == RANKS
    assert all("no bf16" in error and 'precision="16-mixed"' in error for error in errors)


def test_batches_are_put_together_again():
    batch = {"x": torch.ones(2), "rest": [torch.zeros(3), "word", 4]}
    form, tensors = Form.of(batch)
    again = form.batch(tensors)
    assert again["x"] is batch["x"] and again["rest"][0] is batch["rest"][0]
    assert again["rest"][1:] == ["word", 4]
    assert Form.of({**batch, "rest": [torch.zeros(3), "other", 4]})[0] != form
    with pytest.raises(mixmesh.InputError, match="no tensor"):
        Form.of([torch.ones(1), object()])


def test_without_torchrun_it_is_a_single_device(tmp_path):
    quiet = dict(enable_progress_bar=False, enable_model_summary=False, logger=False)
    module, strategy = Tiny(), Strategy(planning={"profile_s": 0})
    before = module.layer.weight.detach().clone()
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", max_steps=1, default_root_dir=tmp_path, **quiet)
    trainer.fit(module, DataLoader(torch.ones(4, 2), batch_size=2))
    assert strategy.parallel is None and not torch.equal(module.layer.weight, before)


def test_it_says_what_to_install():
    script = "import sys; sys.modules['lightning'] = None; import mixmesh; import mixmesh.lightning"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "pip install 'mixmesh[lightning]'" in done.stderr
