"""A script for one device that tunes tiny models with the SFTTrainer of a module: arguments FOLDER MODULE.

``test_trl`` runs it with that of ``trl``, and under torchrun with that of ``mixmesh.hf``."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path

from trl_folder import find_trl

if find_trl():
    import torch
    from datasets import Dataset, disable_progress_bars
    from launches import cluster_file, tell
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        PreTrainedModel,
        PreTrainedTokenizerFast,
        set_seed,
    )
    from trl import SFTConfig

FOLDER, MODULE = Path(sys.argv[1]), sys.argv[2]
SPECIAL = "<pad>", "<eos>", "<unk>"
NUM_WORDS = 29
SIZES = dict(
    vocab_size=len(SPECIAL) + NUM_WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
)  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    words = [*SPECIAL, *(f"w{n}" for n in range(NUM_WORDS))]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def texts(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [
        " ".join(f"w{draw.randrange(NUM_WORDS)}" for _ in range(draw.randrange(4, 12))) for _ in range(count)
    ]


def tune(name: str, planner: str, model: PreTrainedModel, data: Dataset, peft=None, **changed) -> None:
    """Trains, and tells what was logged and the norms of all weights that train."""
    options = dict(
        output_dir=str(FOLDER / name), per_device_train_batch_size=5, max_steps=6, learning_rate=1e-2,
        logging_steps=1, report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, max_length=24,
        gradient_checkpointing=False, dataloader_pin_memory=False,
    )  # fmt: skip
    planning = {
        "profile_s": 0,
        "planner": planner,
        "cache": FOLDER / "cache",
        "cluster": cluster_file(FOLDER),
    }
    trainer = importlib.import_module(MODULE).SFTTrainer(
        model,
        SFTConfig(**{**options, **changed}),
        train_dataset=data,
        eval_dataset=Dataset.from_dict({"text": texts(7, seed=9)}) if "eval_strategy" in changed else None,
        processing_class=tokenizer(),
        peft_config=peft,
        **({"planning": planning} if MODULE == "mixmesh.hf" else {}),
    )
    trainer.train()
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    history = [
        {key: value for key, value in row.items() if not key.endswith(("runtime", "per_second", "flos"))}
        for row in trainer.state.log_history
    ]
    tell(FOLDER, name, history=history, norms=[float(p.detach().double().norm()) for p in trained])


def adapters() -> None:
    """LoRA as TRL does it if nothing else is said, with gradients checkpointed, and the best adapter."""
    set_seed(0)
    saved = dict(
        eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3, load_best_model_at_end=True
    )
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model, data = LlamaForCausalLM(LlamaConfig(**SIZES)), Dataset.from_dict({"text": texts(40, seed=1)})
    tune("adapters", "tensor-parallel", model, data, lora, gradient_checkpointing=True, **saved)


def answers() -> None:
    """Only completions are learnt, the loss is TRL's own, and a step has two batches."""
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    data = Dataset.from_dict(
        {"prompt": texts(60, seed=2), "completion": [f" {x}" for x in texts(60, seed=3)]}
    )
    tune("answers", "fsdp-even", model, data, loss_type="dft", gradient_accumulation_steps=2)


def experts() -> None:
    """The loss that balances experts is divided by the batches of a step. An epoch's last step has a
    single batch, of three samples."""
    set_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, experts_implementation="eager"))
    data = Dataset.from_dict({"text": texts(23, seed=4)})
    tune("experts", "ddp-proportional", model, data, gradient_accumulation_steps=2)


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    disable_progress_bars()
    adapters()
    answers()
    experts()
