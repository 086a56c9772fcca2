"""Bytes that a program holds on a rank at its peak: parameters with gradients and optimizer state, what
the backward pass needs, and the largest temporary.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir import Program, TensorType
from .model import VIEWS, CostModel
from .placed import held_share, is_computation, synchronised

# what autograd keeps: operators that need none of their inputs, and those that keep their result instead
KEEPS_NOTHING = VIEWS | {
    "aten.add.Tensor", "aten.sub.Tensor", "aten.neg", "aten.cat", "aten.stack", "aten.sum",
    "aten.sum.dim_IntList", "aten.mean", "aten.mean.dim", "aten._to_copy", "aten.pad", "aten.mul.Scalar",
    "aten.add.Scalar", "aten.sub.Scalar", "aten.constant_pad_nd",
}  # fmt: skip
KEEPS_RESULT = frozenset(
    f"aten.{op}" for op in "tanh sigmoid exp relu softmax.int log_softmax.int _softmax rsqrt sqrt".split()
)
KEEPS_BOTH = frozenset({"aten.scaled_dot_product_attention", "aten.max_pool2d", "aten.rms_norm"})


@dataclass(frozen=True, slots=True)
class Held:
    """Something that lives at the peak: ``size_bytes`` of the whole tensor, held as ``type`` says."""

    size_bytes: float
    type: TensorType


def held_at_peak(program: Program, optimizer_states: int) -> tuple[Held, ...]:
    """All that is live when the backward pass begins, and the largest temporary."""
    out: list[Held] = []
    for i in program.instructions:
        if i.op == "param":
            copies = 1
            if i.result in program.requires_grad:
                # its gradient, the optimizer's state, and the flat bucket that the gradient travels in
                copies = 2 + optimizer_states + (1 if synchronised(program, i) else 0)
            out.append(Held(copies * i.type.value.size_bytes, i.type))
        elif i.op in ("input", "buffer"):
            out.append(Held(i.type.value.size_bytes, i.type))
    out += [Held(t.value.size_bytes, t) for t in saved(program).values()]
    largest = max(
        (i for i in program.instructions if is_computation(i) and i.types),
        key=lambda i: sum(t.value.size_bytes for t in i.types),
        default=None,
    )
    if largest is not None:
        out += [Held(2 * t.value.size_bytes, t) for t in largest.types]
    return tuple(out)


def saved(program: Program) -> dict[str, TensorType]:
    """Values that autograd keeps for the backward pass, each storage once."""
    base: dict[str, str] = {}
    kept: dict[str, TensorType] = {}

    def keep(name: str) -> None:
        root = base.get(name, name)
        if program.producers[root].op not in ("param", "buffer", "input"):
            kept[root] = program.types[root]

    for i in program.instructions:
        if i.op in VIEWS and i.inputs:
            for name in i.results:
                base[name] = base.get(i.inputs[0], i.inputs[0])
        if not is_computation(i) or not any(r in program.requires_grad for r in i.results):
            continue
        if i.op == "aten.native_dropout":
            keep(i.results[0])  # its mask; one byte an element, charged as the result
        elif i.op in KEEPS_RESULT or i.op in KEEPS_BOTH:
            keep(i.results[0])
        if i.op not in KEEPS_NOTHING and i.op not in KEEPS_RESULT and i.op != "aten.native_dropout":
            for name in i.inputs:
                keep(name)
    return kept


def peak_memory_bytes(program: Program, costs: CostModel, optimizer_states: int = 2) -> tuple[int, ...]:
    """Per rank; a rank that takes part in nothing holds only its constant."""
    held = held_at_peak(program, optimizer_states)
    return tuple(
        round(
            costs.memory_constant_bytes(rank)
            + sum(h.size_bytes * held_share(program, h.type, rank) for h in held)
        )
        for rank in range(program.world_size)
    )
