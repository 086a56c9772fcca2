"""Does a plan train as the single device does? All its ranks in one process, held against the model.

In the model's own precision the plan is held against the real module; with random operators, whose
numbers the module draws differently, against the traced graph on one device. In float64 it is always held
against the graph: there, rounding cannot hide a wrong term.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .check import check_plan, check_program
from .ir import REPLICATE, DType, Graph, Instruction, Program, TensorType, ValueType
from .ir.samples import draws_numbers
from .plan_file import MicroBatch, Plan
from .rules import RULES
from .runtime.interpret_micro_steps import interpret_step
from .runtime.random import RandomPolicy
from .trace import TORCH_DTYPE, Traced, trace
from .trace.capture import Batch, loss_of

TOLERANCE = 1e-4  # relative, as computed
TOLERANCE_F64 = 1e-9
FLOOR = 1e-3  # of the largest gradient entry: below it, a tensor is compared on that scale
BUFFER_FLOOR = 1e-2  # of the largest buffer entry: the running mean of centred activations is rounding
MAX_ROUNDING = 1e-2
ROUNDING = 10.0  # times the single device's own rounding error is not told from it (ill-conditioned models)
WIDER = {"f32": "f64", "bf16": "f64", "f16": "f64", "c64": "c128"}

OptimizerOf = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True)
class VerifyReport:
    """Errors are relative. ``worst`` names the gradient or buffer with the largest one.

    ``max_rounding_error`` is the single device's own: its gradients as computed against float64. Where a
    model amplifies rounding beyond the tolerance, the plan is allowed ``ROUNDING`` times as much.
    ``reference`` is what the plan was held against: "module", or "graph" if random numbers are drawn.
    ``unsupported_ops`` have no rule and run replicated, each with its place in the user's file.
    """

    ok: bool
    max_loss_error: float
    max_gradient_error: float
    max_loss_error_f64: float
    max_gradient_error_f64: float
    max_rounding_error: float
    world_size: int
    unsupported_ops: tuple[str, ...]
    worst: str
    reference: str
    steps: int


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
    """Compares the loss, every gradient and every updated buffer of one step, and the losses of
    ``steps`` steps of ``optimizer`` (plain SGD if there is none), in the micro-steps of the plan. ``model``
    is left as it is; ``where`` names the plan's file in errors.

    Raises VerificationError for a program that is not valid, PlanError for a plan of another model.
    """
    say = progress or (lambda text: None)
    program = plan if isinstance(plan, Program) else plan.program
    micro_batches = None if isinstance(plan, Program) else plan.micro_batches
    if traced is None:
        say("tracing the model")
        traced = trace(model, batch)
    say("checking the program")
    check_program(program, where)
    if isinstance(plan, Plan):
        check_plan(plan, graph=traced.graph, where=where)
    optimizer = optimizer or (lambda params: torch.optim.SGD(params, lr=0.01))
    tensors = _tensors(model)
    flat = Batch.of(batch)
    inputs = dict(zip(flat.tensor_names, flat.tensors()))
    whole = single_device(traced.graph)
    random = any(draws_numbers(node.op) for node in traced.graph.nodes)
    say("running in the model's own precision")
    if random:
        reference = _run_program(whole, tensors, inputs, optimizer, steps)
    else:
        reference = _run_module(model, flat, optimizer, steps)
    own = _compare(_run_program(program, tensors, inputs, optimizer, steps, micro_batches), reference)
    say("running in float64")
    with _default_dtype(torch.float64):
        wide, wide_inputs = _widened(tensors), _widened(inputs)
        wide_reference = _run_program(in_float64(whole), wide, wide_inputs, optimizer, steps)
        wide_own = _run_program(in_float64(program), wide, wide_inputs, optimizer, steps, micro_batches)
        exact = _compare(wide_own, wide_reference)
    # random numbers are drawn in the dtype of the run, so only without them do the two compare
    rounding = None
    if not random:
        graph_reference = _run_program(whole, tensors, inputs, optimizer, steps)
        rounding = _larger(_compare(reference, wide_reference), _compare(graph_reference, wide_reference))
    return VerifyReport(
        ok=own.within(_tolerance(traced.graph), rounding) and exact.within(TOLERANCE_F64),
        max_loss_error=own.loss,
        max_gradient_error=own.gradient,
        max_loss_error_f64=exact.loss,
        max_gradient_error_f64=exact.gradient,
        max_rounding_error=rounding.gradient if rounding else 0.0,
        world_size=program.world_size,
        unsupported_ops=unsupported_ops(program),
        worst=exact.worst if exact.gradient > TOLERANCE_F64 else own.worst,
        reference="graph" if random else "module",
        steps=steps,
    )


def unsupported_ops(program: Program) -> tuple[str, ...]:
    """Operators without a rule, each once, with the first place that uses it."""
    found: dict[str, str] = {}
    for i in program.instructions:
        if "." in i.op and i.op not in RULES:
            found.setdefault(i.op, i.location)
    return tuple(f"{op} ({place})" if place else op for op, place in found.items())


# --- programs ----------------------------------------------------------------------------------------


def single_device(graph: Graph) -> Program:
    """The graph as a program of one rank, everything whole."""
    instructions = tuple(
        Instruction(
            n.results,
            tuple(TensorType(t, (REPLICATE,)) for t in n.types),
            n.op,
            n.args,
            n.kwargs,
            location=n.location,
        )
        for n in graph.nodes
    )
    return Program(graph.name, 1, (), instructions, graph.loss)


def in_float64(program: Program) -> Program:
    """The program with every floating type and dtype argument widened."""

    def value(t: ValueType) -> ValueType:
        return replace(t, dtype=WIDER.get(t.dtype, t.dtype))

    def arg(a):
        if isinstance(a, DType):
            return DType(WIDER.get(a.name, a.name))
        return tuple(map(arg, a)) if isinstance(a, tuple) else a

    instructions = tuple(
        replace(
            i,
            types=tuple(replace(t, value=value(t.value)) for t in i.types),
            args=i.args if i.op == "const" else tuple(map(arg, i.args)),
            kwargs=tuple((k, arg(v)) for k, v in i.kwargs),
        )
        for i in program.instructions
    )
    return replace(program, instructions=instructions)


# --- running -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Outcome:
    """Losses of all steps; gradients and new buffers of the first."""

    losses: tuple[float, ...]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under the first name of each, as the graph names them."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: t for name, t in named}


def _run_module(model: nn.Module, batch: Batch, optimizer: OptimizerOf, steps: int) -> _Outcome:
    model = _copied(model)
    params = dict(model.named_parameters())
    model.zero_grad(set_to_none=True)
    stepper = optimizer(list(params.values())) if steps > 1 else None
    losses, first = [], None
    for step in range(steps):
        loss = loss_of(batch.call(model, batch.tensors()))
        losses.append(loss.item())
        if step and step == steps - 1:
            break  # nobody looks at the last step's gradients
        loss.backward()
        if first is None:
            gradients = {n: None if p.grad is None else p.grad.detach().clone() for n, p in params.items()}
            first = gradients, {n: b.detach().clone() for n, b in model.named_buffers()}
        if stepper:
            stepper.step()
            stepper.zero_grad(set_to_none=True)
    return _Outcome(tuple(losses), *first)


def _copied(model: nn.Module) -> nn.Module:
    """A copy of a module, also of one that keeps results of its parameters as attributes, which PyTorch does
    not copy: torch.nn.utils.weight_norm leaves such a weight, and makes it anew in every forward pass."""
    kept = [x for m in model.modules() for x in vars(m).values() if isinstance(x, Tensor) and not x.is_leaf]
    return copy.deepcopy(model, {id(x): x.detach().clone() for x in kept})


def _run_program(
    program: Program,
    tensors: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    optimizer: OptimizerOf,
    steps: int,
    micro_batches: tuple[MicroBatch, ...] | None = None,
) -> _Outcome:
    trainable = {
        i.args[0] for i in program.instructions if i.op == "param" and dict(i.kwargs).get("trainable", True)
    }
    own = {n: t.detach().clone().requires_grad_(n in trainable) for n, t in tensors.items()}
    params = {n: t for n, t in own.items() if n in trainable}
    stepper = optimizer(list(params.values())) if steps > 1 else None
    random = RandomPolicy(exact=True)
    losses, first = [], None
    for step in range(steps):
        random.step += 1
        out = interpret_step(program, micro_batches, own, inputs, random=random)
        losses.append(out.loss.item())
        if step and step == steps - 1:
            break
        if out.loss.requires_grad:
            out.loss.backward()
        if first is None:
            gradients = {n: None if p.grad is None else p.grad.detach().clone() for n, p in params.items()}
            first = gradients, {n: b.clone() for n, b in out.buffers.items()}
        own.update({n: b.detach().clone() for n, b in out.buffers.items()})
        if stepper:
            stepper.step()
            stepper.zero_grad(set_to_none=True)
    return _Outcome(tuple(losses), *first)


def _widened(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    wider = {TORCH_DTYPE[narrow]: TORCH_DTYPE[wide] for narrow, wide in WIDER.items()}
    return {n: t.detach().to(wider.get(t.dtype, t.dtype)) for n, t in tensors.items()}


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """A quotient of integers is of the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# --- comparing ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Difference:
    """Relative errors: of the losses, and of every gradient and buffer by name."""

    loss: float
    errors: Mapping[str, float]

    @property
    def worst(self) -> str:
        return max(self.errors, key=self.errors.__getitem__, default="")

    @property
    def gradient(self) -> float:
        return self.errors.get(self.worst, 0.0)

    def within(self, tolerance: float, rounding: _Difference | None = None) -> bool:
        # amplification is the model's: one run shows it in other tensors than the next, and convolutions
        # of other batch sizes run by other algorithms; float64 is where nothing is allowed
        own = min(ROUNDING * rounding.gradient, MAX_ROUNDING) if rounding else 0.0
        return self.loss <= tolerance and self.gradient <= max(tolerance, own)


def _tolerance(graph: Graph) -> float:
    """Half types round every sum at about 1e-3: there, float64 decides."""
    half = any(t.dtype in ("bf16", "f16") for t in graph.types.values())
    return 0.1 if half else TOLERANCE


def _compare(got: _Outcome, want: _Outcome) -> _Difference:
    losses = [_relative(abs(a - b), abs(b)) for a, b in zip(got.losses, want.losses)]
    errors: dict[str, float] = {}
    floor = max(FLOOR * _largest_of(want.gradients), _resolution(want))
    for name in {**want.gradients, **got.gradients}:
        errors[name] = _error(got.gradients.get(name), want.gradients.get(name), floor)
    floor = BUFFER_FLOOR * _largest_of(want.buffers)
    for name in got.buffers.keys() & want.buffers.keys():
        a, b = got.buffers[name], want.buffers[name]
        errors[name] = _error(a, b.to(a.dtype), floor if a.is_floating_point() else 0.0)
    return _Difference(max(losses), errors)


def _larger(a: _Difference, b: _Difference) -> _Difference:
    """The larger of two errors, each by name."""
    names = {*a.errors, *b.errors}
    worst = {n: max(a.errors.get(n, 0.0), b.errors.get(n, 0.0)) for n in names}
    return _Difference(max(a.loss, b.loss), worst)


def _largest_of(tensors: Mapping[str, Tensor | None]) -> float:
    return max(
        (_largest(t) for t in tensors.values() if t is not None and t.is_floating_point()), default=0.0
    )


def _resolution(outcome: _Outcome) -> float:
    """Gradients that are this small beside the loss are rounding noise, however they are computed."""
    dtypes = [g.dtype for g in outcome.gradients.values() if g is not None and g.is_floating_point()]
    eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    return math.sqrt(eps) * abs(outcome.losses[0])


def _error(a: Tensor | None, b: Tensor | None, floor: float) -> float:
    if a is None and b is None:
        return 0.0
    # no gradient at all is a gradient of zero
    a = torch.zeros_like(b) if a is None else a
    b = torch.zeros_like(a) if b is None else b
    if a.is_sparse or b.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    return _relative(_largest(a.double() - b.double()), max(_largest(b), floor))


def _largest(t: Tensor) -> float:
    t = t.to_dense() if t.is_sparse else t
    return t.abs().max().item() if t.numel() else 0.0


def _relative(difference: float, scale: float) -> float:
    if math.isnan(difference):
        return math.inf
    return difference / scale if scale > 0 else (0.0 if difference == 0 else math.inf)
