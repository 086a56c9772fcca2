"""Clusters, plans and skewed shares for random models, and a plan's steps with all ranks in one process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from mixmesh.cluster import Cluster
from mixmesh.errors import MixmeshError
from mixmesh.lang.check import check_program
from mixmesh.lang.ir import Program, make_ratio
from mixmesh.lang.plan_file import MicroBatch, Plan
from mixmesh.runtime.interpret_micro_steps import interpret_step
from mixmesh.runtime.random import RandomPolicy

from .steps import OptimizerOf, Steps, copy_of

DEVICES = (
    'name = "fast", tflop_per_s = 0.02, memory_gib = 8, memory_gbyte_per_s = 20',
    'name = "middle", tflop_per_s = 0.01, memory_gib = 4, memory_gbyte_per_s = 10',
    'name = "slow", tflop_per_s = 0.002, memory_gib = 4, memory_gbyte_per_s = 3',
)
SKEWED = {
    2: ((0.93, 0.07), (0.0, 1.0), (0.55, 0.45)),
    3: ((0.93, 0.07, 0.0), (0.05, 0.9, 0.05), (0.0, 0.4, 0.6), (0.34, 0.33, 0.33)),
    4: ((0.7, 0.0, 0.07, 0.23), (0.93, 0.03, 0.02, 0.02), (0.0, 0.0, 0.5, 0.5), (0.25, 0.25, 0.25, 0.25)),
}


def random_cluster(rng: random.Random) -> Cluster:
    """Two to four devices in one to three machines, with links fast or slow, so that planners choose
    differently."""
    lines = ['name = "random"', "[network]", f"bandwidth_gbit_per_s = {rng.choice((0.5, 10, 400))}",
             f"latency_us = {rng.choice((0.1, 5))}"]  # fmt: skip
    left = rng.choice((2, 2, 3, 3, 4))
    while left:
        here = rng.randint(1, left)
        left -= here
        tables = ", ".join(f"{{ {rng.choice(DEVICES)} }}" for _ in range(here))
        lines += [
            "[[machine]]",
            f"link_gbit_per_s = {rng.choice((10, 1000))}",
            "link_latency_us = 0.1",
            f"devices = [{tables}]",
        ]
    return Cluster.parse("\n".join(lines))


def skewed(plan: Plan, rng: random.Random) -> Iterator[Plan]:
    """The plan's program by other shares, where it has one ratio, is in no micro-batches, and stays a
    program."""
    program = plan.program
    choices = SKEWED.get(program.world_size, ())
    if plan.micro_batches is not None or not program.ratios or not choices:
        return
    name, _ = rng.choice(program.ratios)
    changed = program.changed(
        ratios=tuple((n, make_ratio(rng.choice(choices)) if n == name else r) for n, r in program.ratios)
    )
    try:
        check_program(changed)
    except MixmeshError:
        return
    yield replace(plan, program=changed)


def interpreted(
    program: Program,
    micro_batches: tuple[MicroBatch, ...] | None,
    model: nn.Module,
    batch: Mapping[str, Tensor],
    optimizer_of: OptimizerOf,
    num_steps: int,
) -> Steps:
    """Trains ``model`` by a program, all ranks in this process."""
    params, held = dict(model.named_parameters()), dict(model.named_buffers())
    optimizer = optimizer_of(list(params.values()))
    policy = RandomPolicy(exact=True)
    losses, parameters, buffers, gradients = [], [], [], []
    for _ in range(num_steps):
        policy.step += 1
        out = interpret_step(program, micro_batches, {**params, **held}, batch, random=policy)
        out.loss.backward()
        losses.append(out.loss.item())
        gradients.append({n: copy_of(p.grad, p) for n, p in params.items()})
        held.update({n: b.detach().clone() for n, b in out.buffers.items()})
        optimizer.step()
        optimizer.zero_grad()
        parameters.append({n: p.detach().clone() for n, p in params.items()})
        buffers.append({n: b.clone() for n, b in held.items()})
    with torch.no_grad():
        for values in (v for v in map(out.updates.get, held) if v is not None):
            copies = [v for v in values if v is not None]
            if any(not torch.equal(copies[0], other) for other in copies[1:]):
                raise AssertionError("ranks disagree on a buffer")
    return Steps(tuple(losses), tuple(parameters), tuple(buffers), tuple(gradients))
