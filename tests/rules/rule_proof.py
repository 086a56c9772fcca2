"""Proof of rules by execution: an operator run whole against the same operator run on shards.

One call and one strategy make a program of one instruction, run on three ranks by the runtime's own
``local_op``. Inputs held R are copied, S cut unevenly, P made of random addends of either sign (a
positive multiple of the whole would let ``relu`` pass as linear). Results are put together by their
placements and compared; so are the gradients, by the dual placements (R <-> P(sum), S <-> S).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mixmesh.frontend.trace.dtypes import DTYPE_NAME, TORCH_DTYPE
from mixmesh.lang.ir import (
    PARTIAL,
    REPLICATE,
    Instruction,
    Partial,
    Placement,
    Program,
    Ref,
    Replicate,
    Shard,
    TensorType,
    ValueType,
    make_ratio,
    shard_sizes,
)
from mixmesh.lang.rules import RULES, Call, Strategy, strategies
from mixmesh.runtime.local import aten_op, local_op, to_torch
from mixmesh.runtime.random import RandomPolicy
from tests.support.rule_samples import Sample, Spec

with contextlib.suppress(ImportError):
    import transformers.integrations.moe  # noqa: F401  registers transformers.grouped_mm_fallback

WORLD_SIZE = 3
# uneven; the second leaves one rank, or two of a short dim, with a shard of nothing
RATIOS = (make_ratio([0.5, 0.3, 0.2]), make_ratio([0.06, 0.8, 0.14]))
TOLERANCE = 1e-10


class Refuted(AssertionError):
    """A strategy whose execution differs from the whole operator."""


@dataclass(frozen=True)
class Case:
    """A sample with values: the call, its whole inputs, results and gradients."""

    call: Call
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    out_grads: tuple[Tensor | None, ...]
    in_grads: tuple[Tensor | None, ...]
    specs: tuple[Spec, ...]


def draw(spec: Spec) -> Tensor:
    dtype = TORCH_DTYPE[spec.dtype]
    match spec.kind:
        case "normal":
            return torch.randn(spec.shape, dtype=dtype)
        case "positive":
            return torch.rand(spec.shape, dtype=torch.float64).to(dtype) * 0.8 + 0.1
        case "log":
            return torch.log_softmax(torch.randn(spec.shape, dtype=dtype), -1)
        case "below":
            return torch.randint(spec.low, spec.high, spec.shape, dtype=dtype)
        case "bool":
            return torch.rand(spec.shape) < 0.6
        case "alike":
            return torch.ones(spec.shape, dtype=dtype)
        case "sorted":
            return torch.randn(spec.shape, dtype=dtype).sort(-1).values
        case "one" | "all_but_one":  # what an "any" or "all" over less than everything would miss
            alone = torch.zeros(spec.shape, dtype=torch.bool)
            alone.view(-1)[0] = True
            return alone if spec.kind == "one" else ~alone
        case "signs":
            return torch.randn(spec.shape, dtype=dtype).sign()
        case "above_one":
            return 1.1 + torch.rand(spec.shape, dtype=dtype)
        case "definite":
            a = torch.randn(spec.shape, dtype=dtype)
            return a @ a.mT + torch.eye(spec.shape[-1], dtype=dtype)
        case "permuted":  # distinct along the last dim
            return torch.rand(spec.shape).argsort(-1)
        case "ends":
            ends = torch.randint(spec.low, spec.high + 1, spec.shape, dtype=dtype).sort().values
            ends[-1] = spec.high
            return ends
    raise ValueError(spec.kind)


def make_case(op: str, sample: Sample, seed: int = 0) -> Case:
    """Draws the inputs of a sample and runs the operator whole, with its gradients."""
    torch.manual_seed(seed)
    inputs: list[Tensor] = []
    specs: list[Spec] = []

    def name(arg):
        if isinstance(arg, Spec):
            specs.append(arg)
            inputs.append(draw(arg))
            return Ref(f"x{len(inputs) - 1}")
        return tuple(map(name, arg)) if isinstance(arg, tuple) else arg

    args = tuple(name(a) for a in sample.args)
    kwargs = tuple((k, name(v)) for k, v in sample.kwargs)
    leaves = [leaf(x, spec) for x, spec in zip(inputs, specs)]
    outputs = run_whole(op, args, kwargs, leaves)
    out_grads = tuple(torch.randn_like(y) if y.requires_grad else None for y in outputs)
    in_grads = gradients(outputs, out_grads, leaves)
    call = Call(op, args, kwargs, types_of(inputs), types_of(outputs))
    return Case(call, tuple(inputs), tuple(y.detach() for y in outputs), out_grads, in_grads, tuple(specs))


def run_whole(op: str, args, kwargs, leaves) -> tuple[Tensor, ...]:
    if op in RANDOM:
        return replicated_run(op, args, kwargs, leaves)

    def value(arg):
        if isinstance(arg, Ref):
            return leaves[int(arg.name[1:])]
        return [value(a) for a in arg] if isinstance(arg, tuple) else to_torch(arg)

    run, options = aten_op(op), {k: value(v) for k, v in kwargs}
    if any(a.name == "device" for a in run._schema.arguments):  # the default device is not for operators
        options["device"] = torch.get_default_device()
    out = run(*map(value, args), **options)
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def replicated_run(op: str, args, kwargs, leaves) -> tuple[Tensor, ...]:
    """A random operator's whole run is the runtime's own, replicated: same seed, same numbers."""
    if leaves:
        value = types_of(leaves)[0]
    else:
        value = ValueType(dict(kwargs)["dtype"].name, args[0])
    outputs = (value, ValueType("bool", value.shape)) if op == "aten.native_dropout" else (value,)
    call = Call(op, args, kwargs, types_of(leaves), outputs)
    strategy = Strategy("", (REPLICATE,) * len(leaves), (REPLICATE,) * len(outputs))
    program = one_instruction(call, strategy)
    return local_op(
        program, program.instructions[-1], 0, torch.get_default_device(), RandomPolicy(exact=True)
    )(*leaves)


RANDOM = frozenset(
    f"aten.{op}" for op in "native_dropout bernoulli bernoulli.p rand randn rand_like randn_like".split()
)


def leaf(x: Tensor, spec: Spec) -> Tensor:
    differentiable = spec.grad and (x.is_floating_point() or x.is_complex())
    return x.detach().clone().requires_grad_(differentiable)


def gradients(outputs, out_grads, leaves) -> tuple[Tensor | None, ...]:
    pairs = [(y, g) for y, g in zip(outputs, out_grads) if g is not None and y.requires_grad]
    wanted = [x for x in leaves if x.requires_grad]
    if not pairs or not wanted:
        return (None,) * len(leaves)
    results, grads = zip(*pairs)
    found = torch.autograd.grad(results, wanted, grads, allow_unused=True)
    by_id = {id(x): g for x, g in zip(wanted, found)}
    return tuple(by_id.get(id(x)) for x in leaves)


def types_of(tensors) -> tuple[ValueType, ...]:
    return tuple(ValueType(DTYPE_NAME[t.dtype], tuple(t.shape)) for t in tensors)


# --- one strategy on three ranks -----------------------------------------------------------------------


def one_instruction(call: Call, strategy: Strategy, ratio=None, units=None) -> Program:
    """The program that runs ``call`` by ``strategy``."""
    units = units or {}

    def typed(value: ValueType, placement: Placement, key) -> TensorType:
        if isinstance(placement, Shard):
            placement = Shard(placement.dim, units.get(key, 1))
        return TensorType(value, placement, "r" if ratio else None)

    in_types = [typed(v, p, ("in", n)) for n, (v, p) in enumerate(zip(call.inputs, strategy.inputs))]
    out_types = [typed(v, p, ("out", n)) for n, (v, p) in enumerate(zip(call.outputs, strategy.outputs))]
    leaves = tuple(Instruction((f"x{n}",), (t,), "input", (f"x{n}",)) for n, t in enumerate(in_types))
    results = tuple(f"y{n}" for n in range(len(out_types)))
    step = Instruction(results, tuple(out_types), call.op, call.args, call.kwargs)
    return Program("proof", WORLD_SIZE, (("r", ratio),) if ratio else (), (*leaves, step), results[0])


def units_of(rule, call: Call, strategy: Strategy) -> dict:
    """The unit of every sharded value: the elements behind one step of the factor that is cut."""
    if not strategy.is_sharded:
        return {}
    bound = rule.bound(call)
    units = {}
    for side, dims_of, placements in (
        ("in", bound.inputs, strategy.inputs),
        ("out", bound.outputs, strategy.outputs),
    ):
        for n, (dims, placement) in enumerate(zip(dims_of, placements)):
            if isinstance(placement, Shard):
                units[side, n] = bound.trailing(dims[placement.dim])
    return units


def pieces(whole: Tensor, t: TensorType, ratio) -> list[Tensor]:
    """What every rank holds of a whole tensor."""
    match t.placement:
        case Shard(dim, unit):
            return list(whole.split(list(shard_sizes(whole.shape[dim], ratio, unit)), dim))
        case Partial():
            return addends(whole)
    return [whole] * WORLD_SIZE


def addends(whole: Tensor) -> list[Tensor]:
    if whole.is_floating_point() or whole.is_complex():
        parts = [torch.randn_like(whole) for _ in range(WORLD_SIZE - 1)]
    else:
        parts = [torch.randint_like(whole, -3, 4) for _ in range(WORLD_SIZE - 1)]
    return [*parts, whole - sum(parts)]


def joined(parts: list[Tensor], placement: Placement) -> Tensor:
    match placement:
        case Shard(dim):
            return torch.cat(parts, dim)
        case Partial():
            return sum(parts[1:], parts[0])
    return parts[0]


def dual_pieces(grad: Tensor, t: TensorType, ratio) -> list[Tensor]:
    """What every rank holds of the gradient of a result of type ``t``."""
    match t.placement:
        case Replicate():
            return addends(grad)
        case Partial():
            return [grad] * WORLD_SIZE
    return pieces(grad, t, ratio)


def close(got: Tensor, want: Tensor) -> bool:
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if not (want.is_floating_point() or want.is_complex()):
        return torch.equal(got, want)
    return torch.allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


NO_VALUE = frozenset({"aten.empty_like", "aten.new_empty", "aten.empty.memory_format"})


def prove(case: Case, strategy: Strategy, ratio, units) -> None:
    """Runs a strategy. Raises Refuted with what differs."""
    program = one_instruction(case.call, strategy, ratio, units)
    *leaf_steps, step = program.instructions
    held = [pieces(x, i.type, ratio) for x, i in zip(case.inputs, leaf_steps)]
    random = RandomPolicy(exact=True)
    leaves, results = [], []
    for rank in range(WORLD_SIZE):
        mine = [leaf(parts[rank], spec) for parts, spec in zip(held, case.specs)]
        out = local_op(program, step, rank, torch.get_default_device(), random)(*mine)
        check(len(out) == len(case.outputs), f"{len(out)} results, not {len(case.outputs)}")
        for name, y in zip(step.results, out):
            want = program.local_shape(name, rank)
            check(tuple(y.shape) == want, f"rank {rank}: {name} has shape {tuple(y.shape)}, not {want}")
        leaves.append(mine)
        results.append(out)
    if case.call.op in NO_VALUE:
        return
    for n, (whole, t) in enumerate(zip(case.outputs, step.types)):
        parts = [out[n].detach() for out in results]
        check(all(p.dtype == whole.dtype for p in parts), f"result {n}: {parts[0].dtype}, not {whole.dtype}")
        if isinstance(t.placement, Replicate):
            check(all(close(p, whole) for p in parts), f"result {n} differs between ranks or from the whole")
        check(close(joined(parts, t.placement), whole), f"result {n} {t.placement} differs from the whole")
    prove_gradients(case, step, leaf_steps, leaves, results, ratio)


def prove_gradients(case: Case, step, leaf_steps, leaves, results, ratio) -> None:
    if all(g is None for g in case.in_grads):
        return
    given = [None if g is None else dual_pieces(g, t, ratio) for g, t in zip(case.out_grads, step.types)]
    found = []
    for rank in range(WORLD_SIZE):
        grads = [None if g is None else g[rank] for g in given]
        found.append(gradients(results[rank], grads, leaves[rank]))
    for n, (want, i) in enumerate(zip(case.in_grads, leaf_steps)):
        if want is None:
            continue
        parts = [grads[n] for grads in found]
        for rank, part in enumerate(parts):
            check(part is not None, f"rank {rank}: input {n} {i.type.placement} gets no gradient")
        match i.type.placement:
            case Replicate():
                whole = [joined(parts, PARTIAL)]
            case Partial():
                whole = parts
            case _:
                whole = [joined(parts, i.type.placement)]
        for got in whole:
            check(close(got, want), f"the gradient of input {n} {i.type.placement} differs")


def check(ok: bool, message: str) -> None:
    if not ok:
        raise Refuted(message)


# --- strategies that a row lacks -----------------------------------------------------------------------


# operators that do not check that their inputs fit together: a wrong guess overwrites memory
UNCHECKED = frozenset(
    f"aten.{op}"
    for op in """batch_norm native_batch_norm _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training _weight_norm _weight_norm_interface""".split()
)


def missing(op: str, samples) -> list[str]:
    """Strategies that execution proves right on every draw and that the row does not have.

    One factor at a time: all cut dims have the same number of units. Results are inferred from what
    the ranks hold; where the local run depends on them (a view), every candidate is tried.
    """
    found = []
    for sample in samples:
        draws = [make_case(op, sample, seed) for seed in (0, 1)]
        for strategy in guesses(draws[0].call):
            if any(
                all(holds(d, strategy, u) for d in draws) for u in possible_units(draws[0].call, strategy)
            ):
                found.append(show(strategy))
    return list(dict.fromkeys(found))


def show(strategy: Strategy) -> str:
    return ", ".join(map(str, strategy.inputs)) + " -> " + ", ".join(map(str, strategy.outputs))


def guesses(call: Call):
    """Strategies that the row does not have."""
    have = {(s.inputs, s.outputs) for s in strategies(RULES[call.op], call)}
    for inputs in itertools.product(*(candidates(t) for t in call.inputs)):
        cut = any(isinstance(p, Shard) for p in inputs)
        partial = any(isinstance(p, Partial) for p in inputs)
        if (inputs and not cut and not partial) or (cut and call.op in UNCHECKED):
            continue
        if cut and partial and len(inputs) > 3:
            continue
        for outputs in possible_outputs(call, inputs):
            if (inputs, outputs) not in have:
                yield Strategy("?", inputs, outputs)


def candidates(t: ValueType) -> list[Placement]:
    shards = [Shard(d) for d, n in enumerate(t.shape) if n > 1]
    return [REPLICATE, *([PARTIAL] if t.dtype != "bool" else []), *shards]


def possible_outputs(call: Call, inputs):
    """All results sharded, all partial, or all replicated."""
    cut = any(isinstance(p, Shard) for p in inputs)
    ranks = [range(len(t.shape)) for t in call.outputs]
    if cut or not inputs:
        for dims in itertools.product(*ranks) if len(set(map(len, ranks))) > 1 else zip(*ranks):
            if all(t.shape[d] > 1 for t, d in zip(call.outputs, dims)):
                yield tuple(Shard(d) for d in dims)
    if inputs and all(t.dtype != "bool" for t in call.outputs):
        yield (PARTIAL,) * len(call.outputs)
    if inputs:
        yield (REPLICATE,) * len(call.outputs)


def possible_units(call: Call, strategy: Strategy):
    """Units that give every cut dim as many steps as the shortest of them."""
    cut = {("in", n): t.shape[p.dim] for n, (t, p) in enumerate(zip(call.inputs, strategy.inputs))
           if isinstance(p, Shard)}  # fmt: skip
    cut |= {("out", n): t.shape[p.dim] for n, (t, p) in enumerate(zip(call.outputs, strategy.outputs))
            if isinstance(p, Shard)}  # fmt: skip
    if not cut:
        yield {}
        return
    steps = math.gcd(*cut.values())
    if steps > 1:
        yield {key: size // steps for key, size in cut.items()}


def holds(case: Case, strategy: Strategy, units) -> bool:
    try:
        prove(case, strategy, RATIOS[0], units)
    except Exception:  # whatever goes wrong: this is no strategy
        return False
    return True
