"""``mixmesh.hf.SFTTrainer`` under torchrun against TRL's on one device; what it refuses.

The scenarios are in ``trl_script.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import run_each
from trl_folder import find_trl

from mixmesh.errors import InputError

if not find_trl():
    pytest.skip("TRL is not installed: make setup", allow_module_level=True)

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import RewardTrainer, SFTConfig
from trl import SFTTrainer as PlainSFTTrainer

from mixmesh.base.patch import patched
from mixmesh.training.integrations.huggingface import Trainer
from mixmesh.training.integrations.huggingface.refusals import check_library
from mixmesh.training.integrations.trl import SFTTrainer, refusals

SCRIPT = Path(__file__).parent / "trl_script.py"
RANKS = 2
TOLERANCE = 2e-5  # losses and weights are float32
METRICS = {"loss", "entropy", "mean_token_accuracy", "num_tokens", "grad_norm"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return run_each(SCRIPT, {"trl": 0, "mixmesh.hf": RANKS}, tmp_path_factory.mktemp)


def rows(runs, module: str, name: str) -> list[dict]:
    return [row for row in runs[module][1] if row["name"] == name]


@pytest.mark.parametrize("name", ["adapters", "answers", "experts"])
def test_all_that_is_logged_and_all_weights_are_those_of_one_device(runs, name):
    (single,) = rows(runs, "trl", name)
    ranks = rows(runs, "mixmesh.hf", name)
    assert len(ranks) == RANKS
    for rank in ranks:
        assert len(rank["history"]) == len(single["history"])
        for row, expected in zip(rank["history"], single["history"]):
            assert row == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
        assert rank["norms"] == pytest.approx(single["norms"], rel=TOLERANCE)
    assert all(row.keys() >= METRICS for row in ranks[0]["history"] if "loss" in row)


def test_evaluations_log_their_own_metrics(runs):
    (single,) = rows(runs, "trl", "adapters")
    evaluations = [row for row in single["history"] if "eval_loss" in row]
    assert len(evaluations) == 2 and all("eval_entropy" in row for row in evaluations)


def test_outputs_that_a_loss_of_ones_own_gets_have_no_gradient_as_in_trl(tmp_path):
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    words = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1}, unk_token="<pad>"))
    trainer = SFTTrainer(
        LlamaForCausalLM(config),
        SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[]),
        train_dataset=Dataset.from_dict({"input_ids": [[1, 1]], "labels": [[1, 1]]}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="a"),
    )
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": torch.ones(2, 3, dtype=torch.long)}
    with patched(trainer, "_shown", {}):  # as within a program
        loss, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    assert loss.requires_grad and not outputs.logits.requires_grad


@pytest.mark.parametrize(
    "changed, hint",
    [
        (dict(packing=True), 'packing_strategy="wrapped"'),
        (dict(padding_free=True), "padding_free=False"),
        (dict(activation_offloading=True), "gradient_checkpointing=True"),
    ],
)
def test_batches_without_rows_are_refused(changed, hint, tmp_path):
    with pytest.raises(InputError) as error:
        refusals.check_args(SFTConfig(str(tmp_path), use_cpu=True, bf16=False, **changed))
    assert hint in str(error.value)


def test_packing_in_whole_rows_is_taken(tmp_path):
    refusals.check_args(
        SFTConfig(str(tmp_path), use_cpu=True, bf16=False, packing=True, packing_strategy="wrapped")
    )


def test_trainers_of_its_own_are_followed_and_others_refused():
    """Also where a script mixes one with the Trainer of mixmesh."""
    for kind in (Trainer, SFTTrainer, type("Own", (SFTTrainer,), {})):
        check_library(kind)
    with pytest.raises(InputError, match="mixmesh has no RewardTrainer"):
        check_library(type("Own", (Trainer, RewardTrainer), {}))
    with pytest.raises(InputError, match="from mixmesh.hf import SFTTrainer"):
        check_library(type("Own", (Trainer, PlainSFTTrainer), {}))
    with pytest.raises(InputError, match="mixmesh.prepare"):
        from mixmesh.hf import DPOTrainer  # noqa: F401


def test_other_versions_are_refused(monkeypatch):
    monkeypatch.setattr(refusals.trl, "__version__", "0.24.0")
    with pytest.raises(InputError, match="TRL 1.16"):
        refusals.check_version()
