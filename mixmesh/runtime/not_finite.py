"""Finds where a loss or gradient that is not finite comes from, by running the batch again and inspecting
every value.

A value that is not finite may do no harm: masks contain minus infinity, which a softmax turns into zeros. So
the instruction that is named is the first one from which an unbroken chain of values that are not finite
leads to the loss. Such a chain may pass through collectives from rank to rank. If the loss is finite, it is
the first instruction whose backward pass turns finite gradients into ones that are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from ..lang.ir import Instruction, Program, print_instruction
from .first_rank import everyones
from .inspection import Counts, Inspector, Place
from .parallel_model import ParallelModel
from .shard_tensor import plain

Held = tuple[int, str]  # (rank, name)


@dataclass(frozen=True)
class NotFinite:
    """The first instruction with an output, or an output of its backward pass, that is not finite, and its
    rank; ``got`` describes the values found. ``instruction`` is None if only the sum over ranks is not
    finite."""

    rank: int
    instruction: Instruction | None
    got: str

    @property
    def where(self) -> str:
        """The instruction, with the file and line of the model's code."""
        i = self.instruction
        return "" if i is None else f"{print_instruction(i)}  {i.location}".rstrip()

    def __str__(self) -> str:
        return f"{self.got}: {self.where}" if self.where else self.got


@dataclass(frozen=True)
class Findings:
    """All that one rank has found; ``params`` has the counts of the parameters' gradients by name."""

    values: Mapping[Place, Counts]
    gradients: Sequence[Place]
    params: Mapping[str, Counts]


def first_not_finite(model: nn.Module, *args: Any, **kwargs: Any) -> NotFinite | None:
    """Repeats the last call ``model(*args, **kwargs)`` with the same random numbers, in training with its
    backward pass, and returns the first instruction whose output is not finite; None if all are finite.

    Collective: every rank passes the same arguments as before, and before the optimizer's step. Gradients,
    buffers and random numbers are restored. Raises InputError for a model that is not parallel.
    """
    if not isinstance(model, ParallelModel):
        raise InputError(
            "only a parallel model can be inspected",
            expected="the model that mixmesh.prepare or parallelize returned",
            got=f"a {type(model).__name__}",
            hint="on one device: with torch.autograd.detect_anomaly(): ...",
        )
    run = model._runtime
    inspector = Inspector(run.random)
    with _as_it_was(model), model.inspected(inspector), torch.set_grad_enabled(model.training):
        run.random.step -= 1
        with model.no_sync():
            local = model.forward_addend(*args, **kwargs)
            if local.requires_grad:
                local.backward()
        loss = model.sum_of_ranks(local.detach()).wait()
        findings = Findings(inspector.values, inspector.gradients, dict(_spoilt_gradients(model)))
    assert run.summed is not None  # the pass above has set it
    return earliest(run.summed, everyones(findings), bool(loss.isfinite()))


@contextmanager
def _as_it_was(model: ParallelModel) -> Iterator[None]:
    """A context that restores gradients, buffers and random numbers at its end."""
    run = model._runtime
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(plain(b), plain(b).clone()) for b in model.buffers()]
    step, seed, held = run.random.step, run.seed, run.reducer.take()
    for p, _ in gradients:
        p.grad = None
    try:
        yield
    finally:
        run.reducer.drop()
        run.reducer.put_back(held)
        run.random.step, run.seed = step, seed
        for p, gradient in gradients:
            p.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _spoilt_gradients(model: ParallelModel) -> Iterator[tuple[str, Counts]]:
    """The parameters of this rank whose gradients, summed or not, are not finite."""
    names = {id(p): name for name, p in model.named_parameters()}
    for shown, inner in zip(model._runtime.node.shown, model._runtime.node.inner):
        for gradient in (shown.grad, inner.grad):
            if gradient is not None and (counts := Counts.of(plain(gradient))) is not None:
                yield names[id(shown)], counts
                break


def earliest(program: Program, told: Sequence[Findings], is_loss_finite: bool) -> NotFinite | None:
    """The earliest of the ranks' findings."""
    steps = {step for of in told for step, _ in (*of.values, *of.gradients)}
    for step in sorted(steps):
        if (first := _first_value(program, step, told)) is not None:
            return first
    if not is_loss_finite:
        return NotFinite(0, None, "the addends of all ranks are finite, and their sum is not")
    return _first_gradient(program, told) or _first_parameter(program, told)


def _first_value(program: Program, step: int, told: Sequence[Findings]) -> NotFinite | None:
    """The first instruction of a micro-batch from which values that are not finite lead to the loss."""

    def counts_of(held: Held) -> Counts | None:
        rank, name = held
        # values computed once for all micro-batches are noted with the first one
        return told[rank].values.get((step, name), told[rank].values.get((0, name)))

    def num_nan(held: Held) -> int:
        counts = counts_of(held)
        return 0 if counts is None else counts.num_nan

    reached: dict[Held, list[Held]] = {}  # for each value, the values from which it was made
    waiting = [(rank, program.loss) for rank in range(len(told)) if (step, program.loss) in told[rank].values]
    while waiting:
        held = waiting.pop()
        if held in reached:
            continue
        i = program.producers[held[1]]
        ranks = range(len(told)) if i.is_redistribution else (held[0],)
        reached[held] = [(rank, name) for name in i.inputs for rank in ranks if counts_of((rank, name))]
        waiting += reached[held]
    if not reached:
        return None
    number_of = {r: n for n, i in enumerate(program.instructions) for r in i.results}
    in_order = sorted(reached, key=lambda held: (number_of[held[1]], held[0]))
    rank, name = next(held for held in in_order if not reached[held])
    got = f"rank {rank}: {counts_of((rank, name))} of %{name}"
    if not num_nan((rank, name)):  # masks are infinite too, so the first nan may be more helpful
        later = next((held for held in in_order if num_nan(held)), None)
        if later is not None:
            got += f"; the first nan are of {_described(program.producers[later[1]])} on rank {later[0]}"
    return NotFinite(rank, program.producers[name], got)


def _described(i: Instruction) -> str:
    return f"%{i.results[0]}, {i.op}{f' ({i.location})' if i.location else ''}"


def _first_gradient(program: Program, told: Sequence[Findings]) -> NotFinite | None:
    """The instruction whose backward pass is the first to make a gradient that is not finite."""
    number_of = {r: n for n, i in enumerate(program.instructions) for r in i.results}
    passes = [
        (step, -number_of[name], rank, name) for rank, of in enumerate(told) for step, name in of.gradients
    ]
    if not passes:
        return None
    _, _, rank, name = min(passes)
    return NotFinite(
        rank,
        program.producers[name],
        f"rank {rank}: the backward pass of %{name} makes gradients that are not finite",
    )


def _first_parameter(program: Program, told: Sequence[Findings]) -> NotFinite | None:
    """A parameter whose gradient is not finite although no single operator is the cause."""
    for rank, of in enumerate(told):
        for name, counts in of.params.items():
            i = next((i for i in program.params if i.args[0] == name), None)
            return NotFinite(rank, i, f"rank {rank}: {counts} of the gradient of {name}")
    return None
