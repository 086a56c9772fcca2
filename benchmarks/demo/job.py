"""The demo's job: a byte-level GPT on the source text of Python's own standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixmesh.frontend.job import Job

BATCH, TIME = 48, 64
TEXT_BYTES = 4_000_000


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(d, dim=-1)
        q, k, v = (y.view(b, t, self.heads, d // self.heads).transpose(1, 2) for y in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """10.9 million parameters at the default sizes."""

    def __init__(self, width: int = 384, layers: int = 6, heads: int = 6, time: int = TIME) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(time, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def library_text() -> Tensor:
    """Bytes of the standard library's top-level modules, in alphabetical order."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:TEXT_BYTES].long()


class Batches:
    """The same endless stream of batches at every iteration."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        text = library_text()
        generator = torch.Generator().manual_seed(0)
        while True:
            starts = torch.randint(len(text) - TIME - 1, (BATCH,), generator=generator)
            rows = text[starts[:, None] + torch.arange(TIME + 1)]
            yield {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


def adamw(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-4)


def job() -> Job:
    torch.manual_seed(0)
    batches = Batches()
    return Job(GPT(), next(iter(batches)), adamw, batches)
