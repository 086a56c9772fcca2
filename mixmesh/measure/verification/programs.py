"""The programs that ``verify`` runs: on one device, in float64, with all ranks in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...lang.ir import (
    Arg,
    DType,
    Graph,
    Instruction,
    Program,
    TensorType,
    ValueType,
    held_rows,
    outputs_of,
)
from ...lang.plan_file import MicroBatch
from ...lang.rules import RULES
from ...runtime.interpret_micro_steps import interpret_step
from ...runtime.random import RandomPolicy
from .compare import Outcome

WIDER = {"f32": "f64", "bf16": "f64", "f16": "f64", "c64": "c128"}
RMS_NORMS = ("aten.rms_norm", "aten._fused_rms_norm")


def unsupported_ops(program: Program) -> tuple[str, ...]:
    """Operators without a rule, each with the first place that uses it."""
    reasons: dict[str, str] = {}
    for i in program.instructions:
        if "." in i.op and i.op not in RULES:
            reasons.setdefault(i.op, i.location)
    return tuple(f"{op} ({place})" if place else op for op, place in reasons.items())


def single_device(graph: Graph) -> Program:
    """The graph as a program for one rank, with everything whole."""
    instructions = tuple(
        Instruction(
            n.results,
            tuple(TensorType(t) for t in n.types),
            n.op,
            n.args,
            n.kwargs,
            location=n.location,
        )
        for n in graph.nodes
    )
    return Program(graph.name, 1, (), instructions, graph.loss)


def in_float64(program: Program) -> Program:
    """Widens every floating type and dtype argument of a program. The eps of an RMS norm stays as PyTorch
    rounds it: to float32, unless the norm is one of float64."""

    def value(t: ValueType) -> ValueType:
        return replace(t, dtype=WIDER.get(t.dtype, t.dtype))

    def arg(a: Arg) -> Arg:
        if isinstance(a, DType):
            return DType(WIDER.get(a.name, a.name))
        return tuple(map(arg, a)) if isinstance(a, tuple) else a

    def widened(i: Instruction) -> Instruction:
        rounds = i.op in RMS_NORMS and i.types[0].value.dtype in WIDER
        convert = (lambda a: float32(a) if isinstance(a, float) else arg(a)) if rounds else arg
        return replace(
            i,
            types=tuple(replace(t, value=value(t.value)) for t in i.types),
            args=i.args if i.op == "const" else tuple(map(convert, i.args)),
            kwargs=tuple((k, convert(v)) for k, v in i.kwargs),
        )

    return replace(program, instructions=tuple(map(widened, program.instructions)))


def float32(x: float) -> float:
    """The number of float32 nearest to ``x``."""
    return torch.tensor(x, dtype=torch.float32).item()


def run_program(
    program: Program,
    micro_batches: tuple[MicroBatch, ...] | None,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
) -> Outcome:
    """Runs the forward and backward pass of one step on whole parameters and buffers by name, and leaves them
    unchanged. Random numbers depend on the shape (see ``draws``)."""
    trainable = {
        i.args[0] for i in program.instructions if i.op == "param" and dict(i.kwargs).get("trainable", True)
    }
    own = {n: t.detach().clone().requires_grad_(n in trainable) for n, t in {**params, **buffers}.items()}
    random = RandomPolicy(exact=True, by_shape=True)
    out = interpret_step(program, micro_batches, own, inputs, random=random)
    if out.loss.requires_grad:
        out.loss.backward()
    gradients = {n: own[n].grad for n in own if n in trainable}
    buffers = {**buffers, **{n: b.detach().clone() for n, b in out.buffers.items()}}
    shown = {name: whole_output(program, i, out.shown[name]) for name, i in outputs_of(program).items()}
    return Outcome(out.loss.item(), gradients, buffers, shown)


def whole_output(program: Program, i: Instruction, values: Sequence[Tensor | None]) -> Tensor:
    """Joins every rank's part of an output."""
    held = [v for v in values if v is not None]
    return held[0] if held_rows(program, i) is None else torch.cat(held)
