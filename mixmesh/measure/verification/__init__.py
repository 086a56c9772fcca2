"""Verifies that a plan trains as a single device does: runs all ranks in one process and compares.

Every step is computed in float64, where rounding cannot hide a wrong term: by the user's own module, whatever
dtypes it uses (``wide``), and by the plan; both draw the same random numbers (``draws``). Then the job's
optimizer steps as on every rank, and as on one device. float32 is compared too, but only for information, as
a model may amplify rounding without bound. With local batch norm the module normalises the samples of each
rank on their own (``own_statistics``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...base.lazy import lazy
from ...frontend.trace import Traced, trace
from ...frontend.trace.capture import Batch
from ...frontend.trace.compiled import uncompiled
from ...frontend.trace.outputs import first_part
from ...lang.check import check_plan, check_program
from ...lang.ir import Program, batch_norm_of, outputs_of
from ...lang.ir.samples import draws_numbers
from ...lang.plan_file import MicroBatch, Plan
from ...runtime.calls import as_planned
from ...runtime.start import check_no_meta, check_values
from ...runtime.train import default_optimizer
from .compare import Difference, Outcome, compare, larger
from .module import Reference
from .own_statistics import Sizes, cut_norms, norms_of_pieces, sizes_of_norms
from .programs import in_float64, run_program, single_device, unsupported_ops
from .steps import OptimizerOf, Optimizers
from .wide import WIDE_DTYPE, default_dtype

__all__ = [
    "TOLERANCE", "TOLERANCE_F64", "TOLERANCE_UPDATE", "VerifyReport",
    "in_float64", "single_device", "unsupported_ops", "verify",
]  # fmt: skip

TOLERANCE = 1e-4  # relative, in the model's own precision: the usual error of float32
TOLERANCE_F64 = 1e-9
TOLERANCE_UPDATE = 1e-9  # after an optimizer's step; both sides have the same gradients


@dataclass(frozen=True)
class VerifyReport:
    """The result of a verification. Errors are relative.

    - ``ok``: in float64 the losses, gradients, buffers and outputs of all steps equal the module's, and the
      optimizer updates every parameter as on one device (``max_update_error``).
    - ``max_loss_error``, ``max_gradient_error``: errors of the first step in the model's own precision;
      ``max_rounding_error`` is the error of the module's own gradients there, compared with float64.
    - ``worst``: the name of the gradient, buffer or update with the largest error.
    - ``differs_in``: the cause of a difference: "trace" if the graph is not equal to the module, "plan" if
      the program is not equal to the graph, "optimizer" if only the updates differ.
    - ``batch_norm``: if it is "local", the module normalised the samples of each rank on their own, and the
      plan was compared with that, not with the whole batch.
    - ``unsupported_ops``: operators without a rule, which run replicated, with their places in the user's
      file.
    """

    ok: bool
    max_loss_error: float
    max_gradient_error: float
    max_loss_error_f64: float
    max_gradient_error_f64: float
    max_update_error: float
    max_rounding_error: float
    world_size: int
    unsupported_ops: tuple[str, ...]
    worst: str
    differs_in: str
    steps: int
    batch_norm: str = "exact"


def verify(
    model: nn.Module,
    batch: Mapping[str, Any] | tuple,
    plan: Plan | Program,
    *,
    steps: int = 1,
    optimizer: OptimizerOf | None = None,
    traced: Traced | None = None,
    where: str = "",
    progress: Callable[[str], None] | None = None,
) -> VerifyReport:
    """Compares ``steps`` training steps, with the micro-batches of the plan: the loss, every gradient, every
    buffer, every output, and every parameter after the step of ``optimizer`` (by default AdamW, as in
    ``train``). ``model`` stays as it is; ``where`` names the plan's file in errors.

    Raises VerificationError for a program that is not valid, PlanError for a plan of another model, and
    InputError for an optimizer that cannot work on shards, or a model or batch without values.
    """
    say = progress or (lambda text: None)
    model = uncompiled(model)
    check_values(model)
    flat = Batch.of(batch)
    check_no_meta(list(zip(flat.tensor_names, flat.tensors())), "batch")
    program = plan if isinstance(plan, Program) else plan.program
    micro_batches = None if isinstance(plan, Program) else plan.micro_batches
    batch = as_planned(model, batch, program)
    if traced is None:
        say("tracing the model")
        names = dict.fromkeys(first_part(name) for name in outputs_of(program))
        autocast = None if isinstance(plan, Program) else plan.autocast
        traced = trace(model, batch, batch_norm=batch_norm_of(program), outputs=names, autocast=autocast)
    say("checking the program")
    check_program(program, where)
    if isinstance(plan, Plan):
        check_plan(plan, graph=traced.graph, where=where)
    run = _Runs(model, Batch.of(batch), program, micro_batches, traced)
    say("running in float64")
    exact, rounding_reference = run.exact(steps, optimizer or default_optimizer)
    say("running in the model's own precision")
    own, rounding = run.own(rounding_reference)
    step = exact.of_steps
    ok = step.within(TOLERANCE_F64) and exact.updates.within(TOLERANCE_UPDATE)
    worst = (own if ok else exact.updates if step.within(TOLERANCE_F64) else step).worst
    return VerifyReport(
        ok=ok,
        max_loss_error=own.loss,
        max_gradient_error=own.largest,
        max_loss_error_f64=step.loss,
        max_gradient_error_f64=step.largest,
        max_update_error=exact.updates.largest,
        max_rounding_error=rounding.largest,
        world_size=program.world_size,
        unsupported_ops=unsupported_ops(program),
        worst=worst,
        differs_in=exact.differs_in,
        steps=steps,
        batch_norm=batch_norm_of(program),
    )


@dataclass(frozen=True)
class _Exact:
    """Differences in float64: those of all steps, those of the optimizer's updates, and their cause."""

    of_steps: Difference
    updates: Difference
    differs_in: str


@dataclass(frozen=True)
class _Runs:
    """The runs that one verification needs."""

    model: nn.Module
    batch: Batch
    program: Program
    micro_batches: tuple[MicroBatch, ...] | None
    traced: Traced

    @lazy
    def own_samples(self) -> list[Sizes]:
        """For each local batch norm, the samples of each rank that are normalised on their own."""
        return sizes_of_norms(self.traced.graph, self.program)

    def exact(self, steps: int, make: OptimizerOf) -> tuple[_Exact, Outcome]:
        """Compares in float64. Also returns the module's outcome of the first step."""
        params, buffers = _widened(self.params), _widened(self.buffers)
        reference = Reference(self.model, self.batch, wide=True, autocast=self.traced.autocast)
        optimizers = Optimizers(self.model, self.program, params, make)
        program, inputs = in_float64(self.program), _widened(self.inputs)
        outcomes: list[Outcome] = []
        differences, updates, differs_in = [], [], ""
        for _ in range(steps):
            with norms_of_pieces(self.own_samples):
                want = reference.run(params, buffers)
            outcomes.append(want)
            with default_dtype(torch.float64):
                got = run_program(program, self.micro_batches, params, buffers, inputs)
                differences.append(compare(got, want))
                if not differences[-1].within(TOLERANCE_F64) and not differs_in:
                    whole = cut_norms(self.traced.graph, self.own_samples)
                    graph = in_float64(single_device(whole))
                    alone = run_program(graph, None, params, buffers, inputs)
                    differs_in = "plan" if compare(alone, want).within(TOLERANCE_F64) else "trace"
            updates.append(Difference(0.0, optimizers.step(want.gradients, got.gradients)))
            params = {n: p.detach() for n, p in optimizers.params.items()}
            buffers = {**buffers, **want.buffers}
        of_steps, of_updates = _largest(differences), _largest(updates)
        if not differs_in and not of_updates.within(TOLERANCE_UPDATE):
            differs_in = "optimizer"
        return _Exact(of_steps, of_updates, differs_in), outcomes[0]

    def own(self, exact: Outcome) -> tuple[Difference, Difference]:
        """Compares the plan with the module in the model's own precision, and the module with ``exact``. The
        latter is empty for a model that draws random numbers, because they differ in another dtype."""
        with norms_of_pieces(self.own_samples):
            reference = Reference(self.model, self.batch, wide=False, autocast=self.traced.autocast)
            want = reference.run(self.params, self.buffers)
        got = run_program(self.program, self.micro_batches, self.params, self.buffers, self.inputs)
        if any(draws_numbers(node.op) for node in self.traced.graph.nodes):
            return compare(got, want), Difference(0.0, {})
        return compare(got, want), compare(want, exact)

    @property
    def params(self) -> dict[str, Tensor]:
        """The parameters, each by the first of its names, as in the graph."""
        return dict(self.model.named_parameters())

    @property
    def buffers(self) -> dict[str, Tensor]:
        return dict(self.model.named_buffers())

    @property
    def inputs(self) -> dict[str, Tensor]:
        return dict(zip(self.batch.tensor_names, self.batch.tensors()))


def _largest(differences: list[Difference]) -> Difference:
    largest = differences[0]
    for other in differences[1:]:
        largest = larger(largest, other)
    return largest


def _widened(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.detach().to(WIDE_DTYPE.get(t.dtype, t.dtype)) for n, t in tensors.items()}
