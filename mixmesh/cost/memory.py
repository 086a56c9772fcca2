"""Bytes that a program holds on a rank at its peak: parameters with gradients and optimizer state, what
the backward pass needs, and the largest temporary.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir import Program, TensorType
from .model import VIEWS, CostModel
from .placed import Cut, cut_of, cut_shares, is_computation, is_resharded, is_stored, synchronised

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
    gathered = [i for i in program.instructions if i.is_redistribution and is_stored(program, i)]
    gathered.sort(key=lambda i: -i.type.value.size_bytes)
    # of those that are let go of, one is in use and one under way; of all, one has its gradient whole
    passing = [i for i in gathered if is_resharded(program, i)][:2] + gathered[:1]
    out += [Held(i.type.value.size_bytes, i.type) for i in passing]
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
        producer = program.producers[root]
        if producer.op not in ("param", "buffer", "input") and not is_resharded(program, producer):
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


def held_by_cut(program: Program, optimizer_states: int) -> dict[Cut, float]:
    """What is held at the peak, in whole, by how it is cut."""
    out: dict[Cut, float] = {}
    for held in held_at_peak(program, optimizer_states):
        cut = cut_of(held.type)
        out[cut] = out.get(cut, 0.0) + held.size_bytes
    return out


def peak_memory_bytes(program: Program, costs: CostModel, optimizer_states: int = 2) -> tuple[int, ...]:
    """Per rank; a rank that takes part in nothing holds only its constant."""
    out = [float(costs.memory_constant_bytes(rank)) for rank in range(program.world_size)]
    for cut, size in held_by_cut(program, optimizer_states).items():
        for rank, share in enumerate(cut_shares(cut, program.ratio(cut[2]), program.world_size)):
            out[rank] += size * share
    return tuple(map(round, out))
