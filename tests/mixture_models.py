"""Small mixtures of experts of ``transformers``, and programs that cut what a test wants cut."""

from __future__ import annotations

import torch
from torch import nn

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.lang.ir import Graph, Placement, Program, make_ratio
from mixmesh.search.baselines import DATA_PARALLEL
from mixmesh.search.synthesis import Choices, Problem, emit, search
from mixmesh.search.synthesis.choices import code_of

UNEVEN = make_ratio([0.5, 0.3, 0.2])
COMMON = dict(
    vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MANY = dict(intermediate_size=24, moe_intermediate_size=12, num_experts=5, num_experts_per_tok=2)
# the class of each family's config, what it is made with, and how many of its layers are mixtures
FAMILIES: dict[str, tuple[str, dict, int]] = {
    "mixtral": ("Mixtral", dict(intermediate_size=24, num_local_experts=5, num_experts_per_tok=2), 2),
    "qwen3": ("Qwen3Moe", MANY | dict(head_dim=4), 2),
    "qwen2": ("Qwen2Moe", MANY | dict(shared_expert_intermediate_size=24), 2),
    "olmoe": ("Olmoe", dict(intermediate_size=12, num_experts=5, num_experts_per_tok=3), 2),
    "gpt-oss": ("GptOss", dict(
        intermediate_size=12, num_local_experts=5, num_experts_per_tok=2, head_dim=4, sliding_window=4), 2),
    "deepseek": ("DeepseekV3", dict(
        num_key_value_heads=4, intermediate_size=24, moe_intermediate_size=12, n_routed_experts=6,
        num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1, first_k_dense_replace=1,
        q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4), 1),
}  # fmt: skip


class LossOf(nn.Module):
    """A model of ``transformers`` that returns its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, labels=labels, use_cache=False).loss


def mixture(family: str, implementation: str = "grouped_mm", **changes) -> nn.Module:
    import transformers

    name, settings, _ = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**COMMON | settings | changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.config._experts_implementation = implementation
    for p in model.parameters():  # a router that tells its experts apart
        p.data.mul_(3)
    return LossOf(model)


def tokens(samples: int = 7, length: int = 6, seed: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 64, (samples, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def cut_program(graph: Graph, cluster: Cluster, op: str, placement: Placement, **options) -> Program:
    """The cheapest program in which every result of operator ``op`` is held as ``placement``, on devices with
    shares of UNEVEN."""
    costs = CostModel(cluster)
    choices = Choices(graph, costs)
    code = code_of(placement)
    forced = {choices.ids[n.results[0]]: code for n in choices.steps if n.op == op}
    problem = Problem(graph, costs, UNEVEN, prices=DATA_PARALLEL, choices=choices, forced=forced, **options)
    return emit(problem, search(problem, weight=1.05, max_states=20_000))
