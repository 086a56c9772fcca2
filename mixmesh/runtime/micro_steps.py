"""Accumulation within a step: a rank runs its samples in several micro-batches and sums gradients once at the
end.

The forward call runs all micro-batches, and the backward passes of all but the last. ``backward`` of the
returned loss runs the last backward pass and sums the gradients, so the user's loop stays as it is. Since
``backward`` may come with another gradient than 1 (a loss that is divided, or scaled against underflow), the
earlier passes start from the gradient of the step before, and their results are scaled by the quotient.

The stages of a pipeline run all their passes, even the last backward passes, within the forward call (see
``pipeline``): stages wait for each other, so none may wait for the user's ``backward``. Sums of gradients
start in the last passes, and are scaled when ``backward`` comes.

If ranks only meet to sum gradients of replicated parameters, each takes its own number of micro-batches. If
they meet in every micro-batch (gathers of ZeRO stage 3), all take the same number, including ranks without
samples. ZeRO stage 2 sums in every micro-batch if all ranks take the same number, and otherwise once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MixmeshError
from ..lang.ir import (
    Program,
    Samples,
    Shard,
    micro_step_program,
    once_program,
)
from ..lang.plan_file import Plan, accumulation, schedule
from .gradients import GradientReducer, Sums, Taken
from .pipeline import Stage


@dataclass(frozen=True)
class MicroSteps:
    """The micro-batches of this rank, of ``sizes`` samples each, beginning at ``first_sample`` of the batch.
    ``once`` runs before them and ``program`` in each. ``sums`` says which gradients the passes before the
    last one sum. ``stage`` is the rank's stage of a pipeline, if there is one."""

    samples: Samples
    program: Program
    once: Program | None
    sizes: tuple[int, ...]
    first_sample: int
    sums: Sums
    stage: Stage | None = None

    @classmethod
    def of(cls, plan: Plan | Program, rank: int) -> MicroSteps | None:
        """The micro-batches of a plan on ``rank``; None for a plan without micro-batches. Raises PlanError
        like ``accumulation``."""
        if isinstance(plan, Program):
            return None
        samples = accumulation(plan)
        if samples is None or plan.micro_batches is None:
            return None
        program = plan.program
        planned = schedule(program, plan.micro_batches, samples)
        return cls(
            samples,
            micro_step_program(program, samples),
            once_program(program, samples),
            planned.sizes[rank],
            samples.offset(rank),
            Sums.EVERY_PASS if planned.scatters else Sums.NONE,
            Stage.of(program, samples, rank, len(planned.sizes[rank])),
        )

    @property
    def is_pipeline(self) -> bool:
        return bool(self.samples.stages)

    def cut(self, inputs: Mapping[str, Tensor], start: int, size: int) -> dict[str, Tensor]:
        """The samples of one micro-batch, cut from this rank's inputs."""
        out = dict(inputs)
        for i in self.program.instructions:
            if i.op == "input" and i.args[0] in out and isinstance(i.type.placement, Shard):
                if i.result in self.samples.values:
                    dim = i.type.placement.dim
                    each = i.type.value.shape[dim] // self.samples.batch_size
                    out[i.args[0]] = out[i.args[0]].narrow(dim, start * each, size * each)
        return out


class Earlier:
    """The gradients of all micro-batches but the last, or in a pipeline of all, waiting for ``backward``."""

    def __init__(self, reducer: GradientReducer, seed: Tensor) -> None:
        self._reducer = reducer
        self._taken: Taken | None = reducer.take()
        self._seed = seed

    @torch.no_grad()
    def deliver(self, gradient: Tensor) -> None:
        if self._taken is None:
            raise MixmeshError(
                "the loss of a step in micro-batches has one backward pass",
                expected="no retain_graph=True and no second backward",
                hint="call the model again, or plan without accumulation",
            )
        before, self._taken = self._taken, None
        factor = gradient / self._seed
        scaled = factor.device.type != "cpu" or factor.item() != 1
        self._reducer.deliver(before, lambda g: g.mul_(factor) if scaled else g)


@torch.no_grad()
def next_seed(gradient: Tensor, before: Tensor) -> Tensor:
    """The gradient from which the next step's earlier passes start: this one, if it is possible to divide by
    it."""
    return torch.where(torch.isfinite(gradient) & (gradient != 0), gradient, before)
