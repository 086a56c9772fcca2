"""One device: PyTorch's own steps of a transformer, with and without ``torch.compile``, and ours.

Each variant has a process of its own, as people run it: the allocator's settings and the fragments of a heap
belong to a process. The variants take turns, so that the comparison holds while the speed of a machine
drifts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from mixmesh.runtime.optimizers import fuse

from .demo.job import GPT
from .revision import revision
from .steps import Step, apart, our_step, step_of

EAGER, COMPILED, OURS, OURS_COMPILED = "eager", "torch.compile", "ours", "ours, compile=True"
FUSED = "{}, fused AdamW"  # with it the optimizer's step is one call, as in ours
# the reference of each target, and the largest share of its step
ASKED = {OURS: (EAGER, 0.95), OURS_COMPILED: (COMPILED, 1.03)}
CLUSTER = '[[machine]]\nname = "a"\ndevices = [{ cpu_share = 1.0 }]\n'
LAYERS, WIDTH, HEADS, SAMPLES, LENGTH = 24, 128, 4, 8, 64
SAME = 1e-5  # relative difference of losses in float32


@dataclass(frozen=True)
class Effort:
    rounds: int
    steps: int


FULL, QUICK = Effort(15, 5), Effort(5, 2)


@dataclass(frozen=True)
class Row:
    """A variant: seconds of a step in each round, of the first one, and its first losses."""

    name: str
    step_s: tuple[float, ...]
    first_s: float
    losses: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)


def run(effort: Effort, say: Callable[[str], None] = lambda _: None) -> list[Row]:
    """A row for each variant, on one thread."""
    with ExitStack() as processes:
        variants = {name: processes.enter_context(apart(partial(step_named, name))) for name in STEPS}
        losses, first_s = {}, {}
        for name, steps in variants.items():
            say(f"the first steps of {name}")
            first_s[name], losses[name] = steps(1)
            losses[name] += steps(2)[1]
        step_s: dict[str, list[float]] = {name: [] for name in variants}
        for number in range(effort.rounds):
            say(f"round {number + 1} of {effort.rounds}")
            for name, steps in variants.items():
                step_s[name].append(steps(effort.steps)[0] / effort.steps)
    return [Row(name, tuple(step_s[name]), first_s[name], tuple(losses[name])) for name in STEPS]


def step_named(name: str) -> Step:
    return STEPS[name](made_batch())


def made_model() -> GPT:
    torch.manual_seed(0)
    return GPT(width=WIDTH, layers=LAYERS, heads=HEADS, time=LENGTH)


def made_batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(256, (2, SAMPLES, LENGTH))
    return {"tokens": tokens[0], "targets": tokens[1]}


def plain_step(batch: dict, *, compiles: bool, is_fused: bool) -> Step:
    """A step by PyTorch alone, as people write it, or with the fused optimizer that ours also uses."""
    model = made_model()
    optimizer = made_optimizer(model)
    if is_fused:
        fuse(optimizer)
    return step_of(torch.compile(model) if compiles else model, optimizer, batch)


def own_step(batch: dict, *, compiles: bool) -> Step:
    return our_step(made_model, made_optimizer, batch, CLUSTER, compiles=compiles)


def made_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


STEPS: dict[str, Callable[[dict], Step]] = {
    EAGER: partial(plain_step, compiles=False, is_fused=False),
    FUSED.format(EAGER): partial(plain_step, compiles=False, is_fused=True),
    COMPILED: partial(plain_step, compiles=True, is_fused=False),
    FUSED.format(COMPILED): partial(plain_step, compiles=True, is_fused=True),
    OURS: partial(own_step, compiles=False),
    OURS_COMPILED: partial(own_step, compiles=True),
}


def ratio(rows: Sequence[Row], name: str, other: str) -> float:
    """The median over rounds of a variant's step over another's."""
    by_name = {row.name: row.step_s for row in rows}
    return statistics.median(a / b for a, b in zip(by_name[name], by_name[other]))


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Our time relative to each target's reference, and to the same with a fused optimizer."""
    pairs = [(name, form) for name, (other, _) in ASKED.items() for form in (other, FUSED.format(other))]
    return {f"{name} / {other}": ratio(rows, name, other) for name, other in pairs}


def targets(rows: Sequence[Row]) -> dict[str, bool]:
    """Whether each target is met, by its description."""
    reference = rows[0].losses
    found = {
        f"{name} at most {most:g} of {other}": ratio(rows, name, other) <= most
        for name, (other, most) in ASKED.items()
    }
    agree = all(abs(a - b) <= SAME * abs(b) for row in rows for a, b in zip(row.losses, reference))
    return {**found, "losses": agree}


def report(rows: Sequence[Row], command: str) -> dict:
    return {
        "command": command,
        "revision": revision(),
        "ratios": ratios(rows),
        "targets": targets(rows),
        "rows": [vars(row) | {"median_s": row.median_s} for row in rows],
    }
