"""``mixmesh.hf.Trainer`` under torchrun against the Trainer of transformers on one device; what it refuses.

The scenarios are in ``hf_trainer_script.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launches import plans_with_earlier_gradients, run_each
from safetensors.torch import load_file
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    TrainingArguments,
)
from transformers import Trainer as PlainTrainer

import mixmesh
from mixmesh.frontend.trace import trace
from mixmesh.frontend.trace.reads import Number, reads_of
from mixmesh.hf import Trainer
from mixmesh.training.integrations.huggingface.loss import with_trainer_loss
from mixmesh.training.integrations.huggingface.refusals import check_args

SCRIPT = Path(__file__).parent / "hf_trainer_script.py"
RANKS = 2
NAMES = {
    "cut": AutoModelForCausalLM,
    "resumed": AutoModelForCausalLM,
    "classes": AutoModelForSequenceClassification,
    "own loss": AutoModelForSequenceClassification,
    "adafactor": AutoModelForSequenceClassification,
    "watched": AutoModelForSequenceClassification,
    "deciding": AutoModelForSequenceClassification,
    "streamed": AutoModelForSequenceClassification,
    "streamed on": AutoModelForSequenceClassification,
    "written": AutoModelForSeq2SeqLM,
    "masked": AutoModelForCausalLM,
}
# Trainer sums losses in float32
LOGGED = 2e-6
LEAST_ROWS = 6
IMPORTS = (
    "transformers.trainer_seq2seq",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "t5")),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, tuple[Path, list[dict]]]:
    """By library, the folder and what was told: all scenarios, by one process and by two ranks at a time."""
    return run_each(SCRIPT, {"transformers": 0, "mixmesh.hf": RANKS}, tmp_path_factory.mktemp, IMPORTS)


def histories(runs, library: str, name: str) -> list[list[dict]]:
    return [row["history"] for row in runs[library][1] if row["name"] == name]


@pytest.mark.parametrize("name", NAMES)
def test_all_that_is_logged_is_that_of_one_device(runs, name):
    (single,) = histories(runs, "transformers", name)
    ranks = histories(runs, "mixmesh.hf", name)
    assert len(ranks) == RANKS
    for rank in ranks:
        assert len(rank) == len(single) >= LEAST_ROWS
        for row, expected in zip(rank, single):
            assert row == pytest.approx(expected, rel=LOGGED, abs=LOGGED)
    assert ranks[0] == ranks[1]  # decisions are made by it


@pytest.mark.parametrize("name", NAMES)
def test_saved_models_load_and_are_those_of_one_device(runs, name):
    expected, got = (
        NAMES[name].from_pretrained(runs[library][0] / name / "final", dtype=torch.float64).state_dict()
        for library in runs
    )
    assert expected.keys() == got.keys()
    for key, value in expected.items():
        if name == "adafactor" and key.endswith("key.bias"):
            continue  # softmax does not depend on it: its gradient is rounding, which Adafactor scales up
        torch.testing.assert_close(got[key], value, rtol=1e-8, atol=1e-9)


def test_numbers_of_the_model_change_as_on_one_device(runs):
    """Of the script's own model and of its configuration: ranks train a copy that computes the loss."""
    (single,) = histories(runs, "transformers", "changing")
    losses = [row["loss"] for row in single if "loss" in row]
    assert len(losses) == 3 and losses[1] < 0.7 * losses[0] and losses[2] > 1.5 * losses[1]
    for rank in histories(runs, "mixmesh.hf", "changing"):
        assert [row["loss"] for row in rank if "loss" in row] == pytest.approx(losses, rel=LOGGED)


def test_callbacks_decide_once_for_all_ranks(runs):
    """As on one device: the training ended when one rank said so, and saved where one asked for it."""
    for library, (folder, _) in runs.items():
        for history in histories(runs, library, "deciding"):
            assert history[-1]["step"] == 5 and [r["step"] for r in history if "eval_loss" in r] == [2]
        assert [path.name for path in (folder / "deciding").glob("checkpoint-*")] == ["checkpoint-2"]


def test_checkpoints_are_those_of_one_device(runs):
    expected, got = (runs[library][0] / "cut" / "checkpoint-2" for library in runs)
    assert {p.name for p in expected.iterdir()} == {p.name for p in got.iterdir()}  # none by rank
    assert load_file(expected / "model.safetensors").keys() == load_file(got / "model.safetensors").keys()
    before, after = (torch.load(f / "optimizer.pt", weights_only=True)["state"] for f in (expected, got))
    assert before.keys() == after.keys()
    for number, entries in before.items():
        for key, value in entries.items():
            torch.testing.assert_close(after[number][key], value, rtol=1e-7, atol=1e-10)


def test_plans_count_gradients_of_earlier_batches_where_steps_have_several(runs):
    assert plans_with_earlier_gradients(runs["mixmesh.hf"][0]) == {False, True}


def test_parameters_are_cut_in_one_of_the_scenarios(runs):
    plans = [p.read_text() for p in (runs["mixmesh.hf"][0] / "cache" / "plans").iterdir()]
    cut = [[line for line in plan.splitlines() if "= param(" in line and " S(" in line] for plan in plans]
    assert any(cut) and not all(cut)


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_writes(runs, name):
    assert sorted(row["writes"] for row in runs["mixmesh.hf"][1] if row["name"] == name) == [False, True]


def test_batches_are_alike_on_all_ranks(runs):
    """Also where one of them draws more random numbers in a step."""
    for name in ("cut", "whole", "half"):
        ranks = [row["seen"] for row in runs["mixmesh.hf"][1] if row["name"] == name]
        assert len(ranks) == RANKS and len(set(ranks[0])) > LEAST_ROWS - 1
        assert ranks[0] == ranks[1]


def test_batches_of_each_rank_are_refused(runs):
    errors = [row["error"] for row in runs["mixmesh.hf"][1] if row["name"] == "unlike"]
    assert len(errors) == RANKS and all("2 different batches" in error for error in errors)


def test_cards_without_bf16_are_refused_where_nothing_scales_the_loss(runs):
    errors = [row["error"] for row in runs["mixmesh.hf"][1] if row["name"] == "without bf16"]
    assert len(errors) == RANKS
    assert all("no bf16" in error and "TrainingArguments(fp16=True)" in error for error in errors)


def test_autocast_is_that_of_the_arguments(runs):
    """With a loss function, and regions that are computed again. Sums in bfloat16 in another order differ by
    a part of what bfloat16 changes."""
    (half,) = (first_loss(history) for history in histories(runs, "transformers", "half"))
    (whole,) = (first_loss(history) for history in histories(runs, "transformers", "whole"))
    for history in histories(runs, "mixmesh.hf", "half"):
        assert abs(first_loss(history) - half) < 0.2 * abs(whole - half)
    for history in histories(runs, "mixmesh.hf", "whole"):
        assert first_loss(history) == pytest.approx(whole, rel=LOGGED)


def test_the_loss_is_scaled_in_float16(runs):
    """All ranks skip the step whose gradients overflow, as a single device does."""
    (single,) = histories(runs, "transformers", "scaled")
    scale = single[-1]["scale"]
    assert scale < 2.0**24
    for history in histories(runs, "mixmesh.hf", "scaled"):
        assert history[-1]["scale"] == scale
        losses, expected = ([row["loss"] for row in rows if "loss" in row] for rows in (history, single))
        assert losses == pytest.approx(expected, rel=5e-3)


def first_loss(history: list[dict]) -> float:
    """The loss of the first step."""
    return history[0]["loss"]


@pytest.fixture
def launched(monkeypatch):
    monkeypatch.setenv("RANK", "0")


def arguments(tmp_path: Path, **options) -> TrainingArguments:
    return TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fsdp", "full_shard"), ("deepspeed", {"stage": 3}), ("torch_compile", True),
        ("optim", "lomo"),
        ("auto_find_batch_size", True), ("push_to_hub", True),
        ("use_liger_kernel", True), ("bf16_full_eval", True),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_kept_are_refused(tmp_path, name, value):
    args = arguments(tmp_path)
    check_args(args)
    setattr(args, name, value)
    with pytest.raises(mixmesh.InputError, match=name) as error:
        check_args(args)
    assert error.value.hint


def test_they_are_refused_when_the_trainer_is_made(tmp_path, launched):
    with pytest.raises(mixmesh.InputError, match="torch_compile"):
        args = arguments(tmp_path)
        args.torch_compile = True
        Trainer(torch.nn.Linear(2, 2), args)


def test_a_training_step_of_a_subclass_is_refused(tmp_path, launched):
    class Own(Trainer):
        def training_step(self, model, inputs, *_):
            return model(**inputs).sum().backward()

    with pytest.raises(mixmesh.InputError, match=r"Own\.training_step would not run"):
        Own(torch.nn.Linear(2, 2), arguments(tmp_path))


def test_a_loss_that_is_set_on_the_trainer_is_refused(tmp_path, launched):
    args = arguments(tmp_path)
    trainer = Trainer(torch.nn.Linear(2, 2), args, train_dataset=[{"input": torch.ones(2)}])
    trainer.compute_loss = lambda model, inputs, **_: model(**inputs).sum()
    with pytest.raises(mixmesh.InputError, match="would not be the loss that trains") as error:
        trainer.train()
    assert "class MyTrainer" in str(error.value)


def test_a_last_batch_that_a_pipeline_cannot_cut_is_refused_before_training(runs):
    told = [row for row in runs["mixmesh.hf"][1] if row["name"] == "smaller last"]
    assert [row["steps"] for row in told] == [0] * RANKS
    for row in told:
        assert "which the last batch cannot be cut into" in row["error"]
        assert "TrainingArguments(dataloader_drop_last=True)" in row["error"]


def test_a_loss_that_notes_its_steps_is_refused(runs):
    errors = [row["error"] for row in runs["mixmesh.hf"][1] if row["name"] == "noting"]
    assert len(errors) == RANKS and all("self.calls to keep something" in error for error in errors)


def test_noise_on_embeddings_is_drawn_at_every_step(runs):
    losses = [row["losses"] for library in runs for row in runs[library][1] if row["name"] == "noisy"]
    single, *ranks = losses
    assert len(ranks) == RANKS and ranks[0] == ranks[1]
    assert len(set(ranks[0])) == len(single) == 6
    assert sum(ranks[0]) == pytest.approx(sum(single), rel=0.1)


def test_a_loss_that_collects_something_in_its_class_is_refused(runs):
    errors = [row["error"] for row in runs["mixmesh.hf"][1] if row["name"] == "collecting"]
    assert len(errors) == RANKS and all("self.seen to keep something" in error for error in errors)


@pytest.mark.parametrize("name", ["state", "log"])
def test_what_changes_from_step_to_step_is_refused_in_a_loss(tmp_path, name):
    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            getattr(self, name)
            return model(**inputs).sum()

    wrapped = with_trainer_loss(torch.nn.Linear(2, 2), Own(torch.nn.Linear(2, 2), arguments(tmp_path)))
    with pytest.raises(mixmesh.InputError, match=rf"uses self\.{name}, and is traced once"):
        wrapped(input=torch.ones(3, 2))


class Returning(torch.nn.Linear):
    def forward(self, input):
        return {"loss": super().forward(input).square().mean()}


def test_a_step_is_not_traced_again_because_training_has_begun(tmp_path):
    """It was, with a warning that named ``trainer.parallel``, which the Trainer's own code reads."""
    model = Returning(2, 2)
    trainer = Trainer(model, arguments(tmp_path))
    wrapped = with_trainer_loss(model, trainer)
    trace(wrapped, {"input": torch.ones(3, 2)})
    trainer.parallel = torch.nn.Linear(2, 2)
    assert not reads_of(wrapped).changed(Number)


class Numbers(IterableDataset):
    def __iter__(self):
        yield {"input": torch.ones(2)}


def test_without_torchrun_it_is_the_plain_trainer(tmp_path):
    args = arguments(tmp_path, max_steps=1)
    trainer = Trainer(torch.nn.Linear(2, 2), args, train_dataset=Numbers(), planning={"profile_s": 0})
    assert isinstance(trainer, PlainTrainer) and trainer.parallel is None
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input"].shape == (1, 2)


def test_batches_that_one_rank_loads_for_all_are_refused(tmp_path):
    with pytest.raises(mixmesh.InputError, match=r"accelerator_config=\{'dispatch_batches': True\}"):
        check_args(arguments(tmp_path, accelerator_config={"dispatch_batches": True}))
    check_args(arguments(tmp_path, accelerator_config={"split_batches": True}))


def test_it_says_what_to_install():
    script = "import sys; sys.modules['transformers'] = None; import mixmesh; import mixmesh.hf"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "pip install transformers accelerate" in done.stderr
