"""Devices with the memory for their part of the model's state, whatever else a stage of ZeRO needs.

A rank holds at least, in bytes, with F of parameters without a gradient and of buffers, T of trained
parameters, and k tensors of the optimizer for each parameter:

    stage 0       F + T (2 + k)
    stages 1, 2   F + T, and its share of T (1 + k); the whole gradients may be gone before the last is made
    stage 3       F, and its share of T (2 + k)

These are lower bounds: what they leave out (activations, small parameters without an owner) needs more.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..passes.zero import STAGES
from .task import Task


def able_ranks(task: Task, stage: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """The ranks that can hold what each of them needs in a ZeRO stage; none if these ranks together cannot
    hold what they divide among them."""
    whole, divided = least_state_bytes(task, stage)
    constants = task.costs.memory_constants_bytes((), working=set(ranks))
    left = {r: task.usable_bytes[r] - constants[r] - whole for r in ranks}
    able = tuple(r for r in ranks if left[r] >= 0)
    return able if sum(left[r] for r in able) >= divided else ()


def stages_with_room(task: Task, ranks: Sequence[int]) -> tuple[int, ...]:
    """The ZeRO stages in which some of these ranks may hold the model's state."""
    return tuple(stage for stage in STAGES if able_ranks(task, stage, ranks))


def least_state_bytes(task: Task, stage: int) -> tuple[int, int]:
    """Bytes of state that every rank holds in a ZeRO stage, and those that all ranks divide, at least."""
    graph, kept = task.choices.fold.whole, task.optimizer_states.kept
    trained, fixed = graph.trained_bytes, graph.fixed_bytes
    if stage == 0:
        return fixed + round(trained * (2 + kept)), 0
    if stage == 3:
        return fixed, round(trained * (2 + kept))
    return fixed + trained, round(trained * (1 + kept))
