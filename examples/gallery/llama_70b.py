"""The shapes of Llama 3 70B, to be planned: on the device meta its 70.6 billion parameters take no memory."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import mixmesh

SAMPLES, TOKENS = 64, 2048


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=128_256,
            hidden_size=8192,
            intermediate_size=28_672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            rope_theta=500_000.0,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config).to(torch.bfloat16)
        self.model.gradient_checkpointing_enable()

    def forward(self, tokens):
        return self.model(input_ids=tokens, labels=tokens).loss


def job() -> mixmesh.Job:
    with torch.device("meta"):
        model, tokens = Llama(), torch.empty(SAMPLES, TOKENS, dtype=torch.long)
    return mixmesh.Job(model, {"tokens": tokens}, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4))
