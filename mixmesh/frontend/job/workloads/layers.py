"""Layers of the published language and vision models. Dropout is left out, as it changes little for a
plan."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

EXPERTS_PER_DEVICE = 2  # HAP, section 7.1
MOE_BATCH_PER_DEVICE = 32


def adam(parameters):
    return torch.optim.Adam(parameters, lr=5e-4)


def join_heads(x):
    """Maps [batch, heads, tokens, width] to [batch, tokens, heads * width].

    The memory layout of attention's result depends on the device. With the copy, which tracing drops, the
    graph is the same everywhere.
    """
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).flatten(2)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool = True):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        h = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(join_heads(h))


class Layer(nn.Module):
    """A Transformer encoder layer, normalised after each half (Vaswani et al., 2017)."""

    def __init__(self, width: int, heads: int, hidden: int, causal: bool = True):
        super().__init__()
        self.attention = Attention(width, heads, causal)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.down(F.relu(self.up(x))))


class MoeLayer(nn.Module):
    """A layer whose feed-forward is a mixture of experts, two per token, dispatched by dense products
    (GShard: Lepikhin et al., 2021). Every sequence is a group of its own: an expert takes at most
    ``capacity`` of its tokens, and the rest skip the experts."""

    def __init__(self, width: int, heads: int, hidden: int, *, experts: int, seq: int, factor: float = 2.5):
        super().__init__()
        self.attention = Attention(width, heads)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))
        self.experts = experts
        self.capacity = math.ceil(seq / experts * factor)
        for weight in (self.up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x):
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mixture(x))

    def mixture(self, x):
        combine = self.combine(self.gate(x).softmax(-1))  # [batch, tokens, experts, capacity]
        dispatch = (combine > 0).to(x.dtype)
        inputs = dispatch.flatten(2).transpose(1, 2) @ x  # [batch, experts x capacity, width]
        inputs = inputs.unflatten(1, (self.experts, self.capacity)).transpose(0, 1)
        h = inputs.flatten(1, 2)  # [experts, batch x capacity, width]
        h = torch.bmm(F.relu(torch.bmm(h, self.up)), self.down)
        outputs = h.unflatten(1, (-1, self.capacity)).transpose(0, 1).flatten(1, 2)
        return combine.flatten(2) @ outputs

    def combine(self, gates):
        """The weight of each token in each slot of an expert."""
        first = F.one_hot(gates.argmax(-1), self.experts).to(gates.dtype)
        rest = gates * (1 - first)
        second = F.one_hot(rest.argmax(-1), self.experts).to(gates.dtype)
        weights = gates * (first + second)
        weights = weights / weights.sum(-1, keepdim=True)
        weight = first.sum(1, keepdim=True)
        place1 = first.cumsum(1) - first
        place2 = second.cumsum(1) - second + weight  # placed behind all first choices
        return sum(
            (weights * chosen).unsqueeze(-1) * self.slots(place, chosen)
            for chosen, place in ((first, place1), (second, place2))
        )

    def slots(self, place, chosen):
        """The one-hot slot of each chosen token; zeros beyond the capacity."""
        slot = torch.arange(self.capacity, device=place.device, dtype=place.dtype)
        return (place.unsqueeze(-1) == slot).to(place.dtype) * chosen.unsqueeze(-1)


def count_experts(global_batch: int) -> int:
    return EXPERTS_PER_DEVICE * max(1, global_batch // MOE_BATCH_PER_DEVICE)
