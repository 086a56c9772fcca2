"""A small byte-level GPT: ``mixmesh plan examples/gpt.py --cluster examples/mixed-gpus.toml``"""

import torch
from torch import nn
from torch.nn import functional as F

import mixmesh

SAMPLES, CONTEXT = 32, 64


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        samples, time, width = x.shape
        shape = (samples, time, self.heads, width // self.heads)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(samples, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 128, heads: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Windows:
    """Endless random windows of a text; the same on every rank, and in every start."""

    def __init__(self, text: bytes) -> None:
        self.text = torch.tensor(list(text))

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        while True:
            starts = torch.randint(len(self.text) - CONTEXT - 1, (SAMPLES,), generator=generator)
            windows = torch.stack([self.text[s : s + CONTEXT + 1] for s in starts])
            yield {"tokens": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}


def job() -> mixmesh.Job:
    torch.manual_seed(0)
    with open(__file__, "rb") as file:  # it learns its own source
        data = Windows(file.read())
    batch = next(iter(data))
    return mixmesh.Job(GPT(), batch, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), data=data)
