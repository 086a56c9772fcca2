"""Runs a plan's micro-batches with all ranks in one process: the definition of accumulation (see
``interpret``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..lang.ir import Program, Samples, micro_step_program, once_program, outputs_of, samples_of
from ..lang.plan_file import MicroBatch, Schedule, accumulates, schedule
from .interpret import Outcome, interpret
from .random import RandomPolicy
from .window import Window


def interpret_step(
    program: Program,
    micro_batches: tuple[MicroBatch, ...] | None,
    tensors: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    *,
    random: RandomPolicy,
) -> Outcome:
    """Like ``interpret``, for a step of several micro-batches; the loss is their total.

    Raises PlanError if the program cannot run in micro-batches.
    """
    if not accumulates(micro_batches):
        return interpret(program, tensors, batch, random=random)
    samples = samples_of(program)
    planned = schedule(program, micro_batches, samples)
    once, step = once_program(program, samples), micro_step_program(program, samples)
    once_values = {} if once is None else interpret(once, tensors, batch, random=random).updates
    outcomes = [
        interpret(
            step,
            tensors,
            batch,
            random=random,
            windows=windows(samples, planned, n, random),
            given=once_values,
        )
        for n in range(max(map(len, planned.sizes)))
    ]
    shown = {
        name: [_joined(pieces) for pieces in zip(*(o.shown[name] for o in outcomes))]
        for name in outputs_of(step)
    }
    loss = sum((outcome.loss for outcome in outcomes[1:]), outcomes[0].loss)
    return Outcome(loss, outcomes[-1].updates, shown)


def _joined(pieces: Sequence[Tensor | None]) -> Tensor | None:
    """The rows of a rank's micro-batches, one after the other."""
    held = [piece for piece in pieces if piece is not None]
    return torch.cat(held) if held else None


def windows(samples: Samples, planned: Schedule, number: int, random: RandomPolicy) -> list[Window]:
    """The samples of every rank's micro-batch with this number; none for a rank that takes fewer
    micro-batches."""
    out = []
    for rank, sizes in enumerate(planned.sizes):
        place = RandomPolicy(random.seed, exact=random.exact, by_shape=random.by_shape)
        place.step, place.micro_step = random.step, number
        place.first_sample = samples.first_sample(rank, sum(sizes[:number]), len(sizes))
        out.append(Window(samples, sizes[number] if number < len(sizes) else 0, place))
    return out
