"""Transformers over tokens: HAP's BERT-Base and BERT-MoE, BERT-large, a small Transformer, Llama-like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from ..job import Job
from .layers import Layer, MoeLayer, adam, count_experts, join_heads

WIKITEXT2_WORDS = 33_278


class LanguageModel(nn.Module):
    """Token and position embeddings, layers, a projection to the vocabulary; the mean loss of all tokens."""

    def __init__(self, layers: Sequence[nn.Module], *, words: int, seq: int, width: int, tied: bool = False):
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.zeros(seq, width))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, words)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _job(model: nn.Module, global_batch: int, seq: int, words: int) -> Job:
    tokens = torch.randint(words, (2, global_batch, seq))
    return Job(model, {"tokens": tokens[0], "targets": tokens[1]}, optimizer=adam)


def bert_base(global_batch: int) -> Job:
    """HAP's BERT-Base, by its released code: 8 layers of 768, 128 words of WikiText-2, an untied head."""
    layers = [Layer(768, 12, 3072) for _ in range(8)]
    model = LanguageModel(layers, words=WIKITEXT2_WORDS, seq=128, width=768)
    return _job(model, global_batch, 128, WIKITEXT2_WORDS)


def bert_moe(global_batch: int) -> Job:
    """HAP's BERT-MoE: every second of 8 layers has two experts per device.

    With 32 sequences per device, the number of experts follows from the batch: a global batch of 256 stands
    for 8 devices and 16 experts.
    """
    experts = count_experts(global_batch)
    layers = [
        MoeLayer(768, 12, 3072, experts=experts, seq=128) if n % 2 else Layer(768, 12, 3072) for n in range(8)
    ]
    model = LanguageModel(layers, words=WIKITEXT2_WORDS, seq=128, width=768)
    return _job(model, global_batch, 128, WIKITEXT2_WORDS)


def _bert_large(layers: int, global_batch: int) -> Job:
    words, seq = 30_522, 512
    blocks = [Layer(1024, 16, 4096, causal=False) for _ in range(layers)]
    model = LanguageModel(blocks, words=words, seq=seq, width=1024, tied=True)
    return _job(model, global_batch, seq, words)


def bert_large(global_batch: int) -> Job:
    """BERT-large (Devlin et al., 2019): 24 layers of 1024, sequences of 512, a tied head."""
    return _bert_large(24, global_batch)


def bert_large_48(global_batch: int) -> Job:
    """BERT-large with 48 layers, too large for data parallelism in HeteroG's paper."""
    return _bert_large(48, global_batch)


def transformer(global_batch: int) -> Job:
    """A Transformer of 6 layers of 512, sequences of 10 (the batches of TAG's release)."""
    blocks = [Layer(512, 8, 2048) for _ in range(6)]
    return _job(LanguageModel(blocks, words=32_000, seq=10, width=512), global_batch, 10, 32_000)


class RelativeAttention(nn.Module):
    """XLNet's attention, with scores by content and by distance (Transformer-XL: Dai et al., 2019)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.query, self.key, self.value, self.distance, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(5)
        )
        self.content_bias = nn.Parameter(torch.zeros(heads, 1, self.head_width))
        self.distance_bias = nn.Parameter(torch.zeros(heads, 1, self.head_width))

    def forward(self, x, distances):
        q, k, v = (
            proj(x).unflatten(-1, (self.heads, self.head_width)).transpose(1, 2)
            for proj in (self.query, self.key, self.value)
        )
        r = self.distance(distances).unflatten(-1, (self.heads, self.head_width)).transpose(0, 1)
        content = (q + self.content_bias) @ k.transpose(2, 3)
        scores = content + self.shift((q + self.distance_bias) @ r.transpose(1, 2))
        return self.out(join_heads((scores * self.head_width**-0.5).softmax(-1) @ v))

    def shift(self, scores):
        """Maps scores by distance, [batch, heads, tokens, 2 * tokens], to [batch, heads, tokens, tokens] by
        key."""
        tokens, width = scores.shape[2:]
        rows = scores.flatten(2)[:, :, tokens:].unflatten(2, (tokens, width - 1))
        return rows[:, :, :, :tokens]


class XlnetLayer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.attention = RelativeAttention(width, heads)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x, distances):
        x = self.norm1(x + self.attention(x, distances))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Xlnet(nn.Module):
    """The content stream of XLNet (Yang et al., 2019), which is the part that is fine-tuned."""

    def __init__(self, *, words: int, seq: int, width: int, heads: int, layers: int):
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.layers = nn.ModuleList(XlnetLayer(width, heads, 4 * width) for _ in range(layers))
        self.head = nn.Linear(width, words)
        self.head.weight = self.tokens.weight
        angles = torch.outer(torch.arange(seq, -seq, -1.0), 10_000.0 ** (-torch.arange(0, width, 2) / width))
        self.register_buffer("distances", torch.cat([angles.sin(), angles.cos()], 1), persistent=False)

    def forward(self, tokens, targets):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.distances)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def xlnet_large(global_batch: int) -> Job:
    """XLNet-large: 24 layers of 1024; sequences of 128, our own choice."""
    model = Xlnet(words=32_000, seq=128, width=1024, heads=16, layers=24)
    return _job(model, global_batch, 128, 32_000)


class LlamaBlock(nn.Module):
    """RMS norms, rotary positions, grouped keys, a gated feed-forward; no biases."""

    def __init__(self, width: int, heads: int, key_heads: int, hidden: int):
        super().__init__()
        self.heads, self.key_heads, self.head_width = heads, key_heads, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, key_heads * self.head_width, bias=False)
        self.value = nn.Linear(width, key_heads * self.head_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def attention(self, x, cos, sin):
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for proj in (self.query, self.key, self.value)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = self.heads // self.key_heads
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(join_heads(h))


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


@dataclass(frozen=True)
class LlamaShape:
    width: int
    layers: int
    heads: int
    key_heads: int
    hidden: int
    tied: bool
    words: int = 32_000
    seq: int = 1024


class Llama(nn.Module):
    def __init__(self, shape: LlamaShape):
        super().__init__()
        width, heads = shape.width, shape.heads
        self.tokens = nn.Embedding(shape.words, width)
        blocks = (LlamaBlock(width, heads, shape.key_heads, shape.hidden) for _ in range(shape.layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(width, 1e-5)
        self.head = nn.Linear(width, shape.words, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight
        half = width // heads // 2
        positions, rates = torch.arange(shape.seq).float(), 10_000.0 ** (-torch.arange(half) / half)
        angles = torch.outer(positions, rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens, targets):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def llama_05b(global_batch: int) -> Job:
    """Llama-like with 0.5 B parameters: 24 layers of 1280; sequences of 1024. Poplar gives the size only."""
    shape = LlamaShape(width=1280, layers=24, heads=20, key_heads=20, hidden=3328, tied=True)
    return _job(Llama(shape), global_batch, shape.seq, shape.words)


def llama_11b(global_batch: int) -> Job:
    """Llama-like with 1.1 B parameters: the shape of TinyLlama (22 layers of 2048, 4 key heads)."""
    shape = LlamaShape(width=2048, layers=22, heads=32, key_heads=4, hidden=5632, tied=False)
    return _job(Llama(shape), global_batch, shape.seq, shape.words)
