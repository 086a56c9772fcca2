"""CPU time that a step takes, mostly beside its kernels: ``python tests/idioms/overhead.py``. One process, a
model of 200 small parameters, each of them cut (a shard, though one rank holds all of it) or whole."""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.ports import free_port  # noqa: E402

from mixmesh.cluster import Cluster  # noqa: E402
from mixmesh.cost import CostModel  # noqa: E402
from mixmesh.frontend.trace import trace  # noqa: E402
from mixmesh.lang.ir import parse_program  # noqa: E402
from mixmesh.runtime.parallel import parallelize  # noqa: E402
from mixmesh.search.baselines import data_parallel  # noqa: E402

LAYERS, STEPS = 100, 60
ONE = 'name = "one"\n[[machine]]\ndevices = [{ cpu_share = 1.0 }]\n'


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(LAYERS)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def program_of(batch, is_cut: bool):
    graph = trace(Deep(), batch).graph
    text = str(data_parallel(graph, CostModel(Cluster.parse(ONE)), (1.0,)))
    if is_cut:
        lines, ratio = [], "r0"
        for line in text.splitlines():
            if " = param(" in line:
                name, rest = line.split(" = ", 1)
                kept = name.replace("%", "%kept_", 1)
                lines.append(f"{kept} = {rest.removesuffix(' R')} S(0)@{ratio}")
                lines.append(f"{name} = all_gather({kept.strip()}) : {rest.split(' : ')[1]}")
            else:
                lines.append(line)
        text = "\n".join(lines)
    return parse_program(text)


def median_ms(durations: list[float]) -> float:
    return 1e3 * statistics.median(durations[10:])


def measure(is_cut: bool) -> dict[str, float]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 16)}
    model = Deep()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = parallelize(model, optimizer, program_of(batch, is_cut), device="cpu")
    spent: dict[str, list[float]] = {}

    def timed(name: str, call) -> None:
        started = time.process_time()
        call()
        spent.setdefault(name, []).append(time.process_time() - started)

    for _ in range(STEPS):
        timed("forward and backward", lambda: model(**batch).backward())
        timed("clip", lambda: model.clip_grad_norm_(1.0))
        timed("optimizer", optimizer.step)
        timed("zero_grad", optimizer.zero_grad)
    return {name: median_ms(s) for name, s in spent.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    for is_cut in (False, True):
        figures = ", ".join(f"{name} {ms:.2f} ms" for name, ms in measure(is_cut).items())
        print(f"{'cut' if is_cut else 'whole'} parameters: {figures}")
