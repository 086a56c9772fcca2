"""One instruction on one rank: the ATen operator on local shards, its baked-in sizes made local.

Where the local result is not the plain operator on the shards (a mean over a cut dim, a look-up in a
piece of a vocabulary, random numbers), a kernel below takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from ..errors import UnsupportedOp
from ..ir import Arg, DType, Instruction, Partial, Program, Ref, Shard, map_refs, shard_offsets, shard_sizes
from ..rules import RULES, LocalCall, call_of
from .random import RandomPolicy

LocalOp = Callable[..., tuple[torch.Tensor | None, ...]]

TORCH_DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16,
    "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2,
    "c64": torch.complex64, "c128": torch.complex128,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@cache
def aten_op(name: str) -> Callable:
    """The callable of ``aten.add.Tensor`` or ``aten.linear`` (the default overload)."""
    if name == "aten.view":
        return torch.ops.aten.reshape.default  # a shard need not be contiguous
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except AttributeError:
        raise UnsupportedOp(f"this PyTorch has no operator {name}") from None


def local_call(program: Program, i: Instruction, rank: int) -> LocalCall:
    """The call of ``i`` as ``rank`` makes it."""
    call = call_of(i, program.types)
    in_types = [program.types[name] for name in i.inputs]

    def shape(value, placement, ratio_name) -> tuple[int, ...]:
        if not isinstance(placement, Shard):
            return value.shape
        sizes = shard_sizes(value.shape[placement.dim], program.ratio_of[ratio_name], placement.unit)
        return value.shape[: placement.dim] + (sizes[rank],) + value.shape[placement.dim + 1 :]

    return LocalCall(
        call,
        tuple(t.placement for t in in_types),
        tuple(t.placement for t in i.types),
        tuple(shape(t.value, t.placement, t.ratio) for t in in_types),
        tuple(shape(t.value, t.placement, t.ratio) for t in i.types),
    )


def local_op(
    program: Program, i: Instruction, rank: int, device: torch.device, random: RandomPolicy
) -> LocalOp:
    """A function of the local inputs (in the order of ``i.inputs``) that gives the local results."""
    local = local_call(program, i, rank)
    kernel = KERNELS.get(i.op)
    made = kernel(Site(program, i, rank, device, random, local)) if kernel else None
    return made or plain_op(i, local, device)


def plain_op(i: Instruction, local: LocalCall, device: torch.device) -> LocalOp:
    """The ATen operator itself, its arguments made local by the rule's row."""
    rule = RULES.get(i.op)
    args, kwargs = i.args, i.kwargs
    if rule is not None and rule.local is not None:
        args, kwargs = rule.local(local)
    op = aten_op(i.op)
    slots: list[int] = []

    def slot(_: Ref) -> Slot:
        slots.append(len(slots))
        return Slot(slots[-1])

    args_template = tuple(to_torch(map_refs(a, slot)) for a in args)
    kwargs_template = {k: to_torch(map_refs(v, slot)) for k, v in kwargs}
    if not slots:
        kwargs_template["device"] = device
    single = len(i.results) == 1
    returns_list = not single or i.op in RETURNS_LIST
    if all(isinstance(a, Slot) or not _has_slot(a) for a in args_template) and not any(
        _has_slot(v) for v in kwargs_template.values()
    ):
        fixed = tuple(None if isinstance(a, Slot) else a for a in args_template)
        if all(isinstance(a, Slot) for a in args_template[: len(slots)]):
            rest = fixed[len(slots) :]  # the usual case: tensors first, then plain values

            def run(*tensors):
                out = op(*tensors, *rest, **kwargs_template)
                return tuple(out) if returns_list else (out,)

            return run

    def run(*tensors):
        out = op(
            *(_fill(a, tensors) for a in args_template),
            **{k: _fill(v, tensors) for k, v in kwargs_template.items()},
        )
        return tuple(out) if returns_list else (out,)

    return run


RETURNS_LIST = frozenset({"aten.split.Tensor", "aten.split_with_sizes", "aten.chunk", "aten.unbind.int"})


class Slot(int):
    """The place of a tensor in an argument template."""


def to_torch(arg: Arg):
    if isinstance(arg, DType):
        return TORCH_DTYPES[arg.name]
    if isinstance(arg, tuple):
        return [to_torch(a) for a in arg]
    return arg


def _has_slot(arg) -> bool:
    return isinstance(arg, Slot) or (isinstance(arg, list) and any(map(_has_slot, arg)))


def _fill(arg, tensors):
    if isinstance(arg, Slot):
        return tensors[arg]
    if isinstance(arg, list):
        return [_fill(a, tensors) for a in arg]
    return arg


# --- kernels -------------------------------------------------------------------------------------------


class Site:
    """Where a kernel runs: the instruction, the rank, and its local call."""

    def __init__(self, program, instruction, rank, device, random, local: LocalCall) -> None:
        self.program: Program = program
        self.instruction: Instruction = instruction
        self.rank: int = rank
        self.device: torch.device = device
        self.random: RandomPolicy = random
        self.local = local

    def span(self, name: str) -> tuple[int, int]:
        """First element and number of elements of this rank's piece of a sharded value."""
        t = self.program.types[name]
        sizes = shard_sizes(t.value.shape[t.placement.dim], self.program.ratio_of[t.ratio], t.placement.unit)
        return shard_offsets(sizes)[self.rank], sizes[self.rank]


class Dropout(torch.autograd.Function):
    """Inverted dropout with a given mask; the mask is kept as one byte per element."""

    @staticmethod
    def forward(ctx, x, keep, scale):
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return x * keep * scale

    @staticmethod
    def backward(ctx, grad):
        (keep,) = ctx.saved_tensors
        return grad * keep * ctx.scale, None, None


def dropout_kernel(site: Site) -> LocalOp:
    i, random, device = site.instruction, site.random, site.device
    p = float(i.args[1])
    operator = sum(1 for other in instructions_before(site.program, i) if other.op == i.op)
    placement = site.local.out_placements[0]
    shape, full_shape = site.local.out_shapes[0], i.types[0].value.shape
    sharded = isinstance(placement, Shard)
    start, length = site.span(i.inputs[0]) if sharded else (0, 0)
    scale = 0.0 if p == 1 else 1 / (1 - p)

    def run(x):
        if sharded and not random.exact:
            generator = random.generator(operator, site.rank + 1, device)
            keep = torch.empty(shape, device=device).bernoulli_(1 - p, generator=generator).bool()
        else:
            generator = random.generator(operator, 0, device)
            keep = torch.empty(full_shape, device=device).bernoulli_(1 - p, generator=generator).bool()
            if sharded:
                keep = keep.narrow(placement.dim, start, length)
        out = Dropout.apply(x, keep, scale)
        return (out, keep)[: len(i.results)]

    return run


def instructions_before(program: Program, i: Instruction):
    for other in program.instructions:
        if other is i:
            return
        yield other


def mean_kernel(site: Site) -> LocalOp | None:
    """A mean over a cut dim: the local mean, scaled by the local share of the count."""
    i = site.instruction
    shard = site.local.in_placements[0]
    if not (isinstance(shard, Shard) and isinstance(site.local.out_placements[0], Partial)):
        return None
    size = site.local.call.inputs[0].shape[shard.dim]
    _, length = site.span(i.inputs[0])
    plain = plain_op(i, site.local, site.device)
    if length == 0:
        out_shape, dims = i.types[0].value.shape, tuple(range(len(i.types[0].value.shape)))

        def run(x):
            return (x.sum().expand(out_shape) if dims else x.sum(),)  # nothing: a zero with a gradient

        return run
    return lambda x: (plain(x)[0] * (length / size),)


def arange_kernel(site: Site) -> LocalOp | None:
    i = site.instruction
    if not isinstance(site.local.out_placements[0], Shard):
        return None
    start, length = site.span(i.result)
    plain = plain_op(i, site.local, site.device)
    return lambda: (plain()[0].narrow(0, start, length),)


def embedding_kernel(site: Site) -> LocalOp | None:
    """A look-up in a piece of the vocabulary: ids outside the piece give zeros, to be summed."""
    i = site.instruction
    weight = site.local.in_placements[0]
    if not (isinstance(weight, Shard) and weight.dim == 0):
        return None
    start, length = site.span(i.inputs[0])
    padding_idx = i.args[2] if len(i.args) > 2 else -1

    def run(table, ids):
        if length == 0:
            return (table.sum() + torch.zeros((*ids.shape, *table.shape[1:]), dtype=table.dtype),)
        local_ids = ids - start
        inside = (local_ids >= 0) & (local_ids < length)
        rows = torch.nn.functional.embedding(local_ids.clamp(0, length - 1), table)
        keep = inside if padding_idx < 0 else inside & (ids != padding_idx)
        mask = inside.unsqueeze(-1).to(rows.dtype)
        if padding_idx >= 0:  # the pad row is looked up but takes no gradient
            rows = torch.where(keep.unsqueeze(-1), rows, rows.detach())
        return (rows * mask,)

    return run


KERNELS: dict[str, Callable[[Site], LocalOp | None]] = {
    "aten.native_dropout": dropout_kernel,
    "aten.mean": mean_kernel,
    "aten.mean.dim": mean_kernel,
    "aten.arange": arange_kernel,
    "aten.arange.start": arange_kernel,
    "aten.arange.start_step": arange_kernel,
    "aten.embedding": embedding_kernel,
}
