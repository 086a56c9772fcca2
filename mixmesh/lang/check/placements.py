"""Checks the names, placements and ratios of a program."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import partial

from ...errors import VerificationError
from ..ir import (
    LEAVES,
    REDISTRIBUTIONS,
    SINKS,
    Instruction,
    Partial,
    Placement,
    Program,
    Replicate,
    Shard,
    TensorType,
    lonely_norms,
    redistribution,
    separable,
    stage_of,
    support,
    wgrad_of,
)
from ..ir.ownership import STAGES
from ..ir.recompute import updated_buffers
from ..rules import RULES, Call, PatternMismatch, Rule, call_of, find_strategy, strategies
from .attributes import check_attributes
from .dtypes import check_dtypes
from .factors import check_factors
from .failure import Fail, invalid
from .form import check_form
from .outputs import check_output
from .recomputed import check_region
from .wgrads import check_wgrad

SHOWN = 8  # strategies listed in an error


def check_names(program: Program, where: str = "") -> None:
    """Raises VerificationError naming the first line with a name that is unknown or defined twice."""
    for name, ratio in program.ratios:
        if len(ratio) != program.world_size:
            raise VerificationError(
                f"ratio {name} has {len(ratio)} shares",
                expected=f"{program.world_size}, one per rank",
                where=where,
            )
    defined: dict[str, Instruction] = {}
    for i in program.instructions:
        fail = partial(invalid, program, i, where)
        _check_names(i, defined, fail)
        for t in i.types:
            _check_type(program, t, fail)
        if "." not in i.op and i.op not in (*LEAVES, *REDISTRIBUTIONS, *SINKS):
            names = [*RULES, *REDISTRIBUTIONS, *LEAVES, *SINKS]
            near = [n for n in names if n.split(".")[1:2] == [i.op]] or difflib.get_close_matches(i.op, names)
            raise fail(f"unknown operator {i.op}", "an ATen operator or a redistribution", i.op, *near[:3])
        check_form(i, fail)
        check_attributes(i, fail)
        defined.update((r, i) for r in i.results if r is not None)
    if program.loss not in defined:
        raise VerificationError(f"the loss %{program.loss} is not defined", where=where)


def check_placements(program: Program, where: str = "") -> None:
    """Raises VerificationError naming the first line whose placements are not allowed."""
    check_names(program, where)
    check_placements_only(program, where)


def check_placements_only(program: Program, where: str = "") -> None:
    """Like ``check_placements``, for a program whose names have already been checked."""
    check_dtypes(program, where)
    stale = updated_buffers(program)
    able = frozenset(separable(program) if any(map(wgrad_of, program.instructions)) else ())
    # allowed calls, without the names of their values: repeated layers make equal ones
    allowed: set[tuple] = set()
    for n, i in enumerate(program.instructions):
        fail = partial(invalid, program, i, where)
        check_region(i, stale, fail)
        check_wgrad(i, n in able, fail)
        check_factors(program, i, fail)
        if i.is_leaf:
            _check_leaf(i, fail)
            _check_owners(program, i, fail)
            _check_copies(program, i, fail)
        elif i.op == "update":
            _check_update(program, i, fail)
        elif i.op == "output":
            check_output(program, i, fail)
        elif i.is_redistribution:
            _check_redistribution(program, i, fail)
        else:
            call = i.plain, i.types, tuple([program.types[name] for name in i.inputs])
            if call not in allowed:
                _check_operator(program, i, fail)
                allowed.add(call)
    _check_loss(program, where)
    _check_local_norms(program, where)


def _check_local_norms(program: Program, where: str) -> None:
    for lonely in lonely_norms(program):
        got = f"rank {lonely.rank} has {lonely.values} of them"
        expected = "two values of a channel at least on every rank that takes part"
        hint = 'a larger share for that rank, or none; or batch_norm="exact"'
        what = "a rank has too few samples for batch norm of its own"
        raise invalid(program, lonely.instruction, where, what, expected, got, hint)


def _check_names(i: Instruction, defined: dict[str, Instruction], fail: Fail) -> None:
    if len(i.types) != len(i.results):
        raise fail(f"{len(i.results)} results but {len(i.types)} types", "one type per result")
    for name in i.inputs:
        if name not in defined:
            raise fail(f"%{name} is used before it is defined")
    for result in i.results:
        if result in defined:
            raise fail(f"%{result} is defined twice")


def _check_type(program: Program, t: TensorType, fail: Fail) -> None:
    if t.ratio is not None and t.ratio not in program.ratio_of:
        raise fail(f"unknown ratio {t.ratio}", ", ".join(program.ratio_of) or "a ratio line", t.ratio)
    p = t.placement
    if isinstance(p, Partial) and p.op != "sum":
        raise fail(f"{p} is not supported", "P(sum)", str(p))
    if isinstance(p, Shard):
        if t.ratio is None:
            raise fail("a sharded type needs a ratio", f"{p}@NAME", str(t))
        if p.dim >= len(t.value.shape):
            raise fail(f"{t.value} has no dim {p.dim}", f"a dim below {len(t.value.shape)}", str(p))
        if p.unit < 1 or t.value.shape[p.dim] % p.unit:
            size = t.value.shape[p.dim]
            raise fail(f"dim {p.dim} of {t.value} cannot be cut in units of {p.unit}", f"a divisor of {size}")


def _check_leaf(i: Instruction, fail: Fail) -> None:
    p = i.type.placement
    if isinstance(p, Partial):
        raise fail(f"{_article(i.op)} {i.op} cannot be held as {p}", "R or S(dim)", str(p))
    if i.op == "const" and not isinstance(p, Replicate):
        raise fail("a constant is held whole by everyone", "R", str(p), "hold it as R and add a local_slice")


def _check_owners(program: Program, i: Instruction, fail: Fail) -> None:
    ratio = i.attr("owned")
    if ratio is None:
        return
    if i.op != "param" or not isinstance(i.type.placement, Replicate) or not i.type.value.shape:
        raise fail("only a replicated parameter with dims has owners", 'a param held as R, or no "owned"')
    if ratio not in program.ratio_of:
        ratio_names = ", ".join(f'"{name}"' for name in program.ratio_of)
        raise fail(f"unknown ratio {ratio!r}", ratio_names or "a ratio line", f"owned={ratio!r}")
    if isinstance(stage_of(i), bool) or stage_of(i) not in STAGES:
        raise fail(
            "there is no such stage of owned parameters", "stage=1 or stage=2", f"stage={stage_of(i)!r}"
        )
    outside = sorted({*support(program.ratio_of[ratio])} - {*program.participants(i.type)})
    if outside:
        got = f"rank {outside[0]} owns rows by {ratio}"
        raise fail("an owner does not hold the parameter", f"owners among {_ranks(program, i.type)}", got)
    if i.result in program.factored:
        raise fail("a gradient out of factors (sfb) is not summed, and has no owner", "one of owned and sfb")


def _check_copies(program: Program, i: Instruction, fail: Fail) -> None:
    copies = program.copies.get(i.args[0], ()) if i.op == "param" else ()
    mine = program.participants(i.type)
    for other in copies:
        shared = sorted({*mine} & {*program.participants(other.type)})
        if other.result != i.result and shared:
            raise fail(
                f"rank {shared[0]} holds {i.args[0]} twice", "copies on different ranks", _placed(i.type)
            )
    if not copies:
        return
    if i.attr("owned") is not None:
        raise fail("a parameter with copies has no owners", "one of owned and copies")
    if i.result in program.factored:
        raise fail("a gradient out of factors (sfb) is not summed between copies", "one of sfb and copies")


def _check_update(program: Program, i: Instruction, fail: Fail) -> None:
    t = program.types[i.inputs[0]]
    if not isinstance(t.placement, Replicate):
        hint = "all_reduce" if isinstance(t.placement, Partial) else "all_gather"
        raise fail("a buffer is updated with a whole value", "R", str(t), f"%x = {hint}(%{i.inputs[0]})")
    for leaf in program.instructions:
        if leaf.op == "buffer" and leaf.args == i.args[:1] and leaf.type.value != t.value:
            raise fail("the value does not fit the buffer", str(leaf.type.value), str(t.value))
    _check_reach(program, i, fail)


def _check_reach(program: Program, i: Instruction, fail: Fail) -> None:
    """Checks that all ranks which read a buffer in the next step have its new value."""
    updates = [u for u in program.instructions if u.op == "update" and u.args[:1] == i.args[:1]]
    reached = {
        rank for u in updates for name in u.inputs for rank in program.participants(program.types[name])
    }
    for leaf in program.instructions:
        if leaf.op == "buffer" and leaf.args == i.args[:1]:
            stale = sorted({*program.participants(leaf.type)} - reached)
            if stale:
                got = f"rank {stale[0]} reads %{leaf.result} and keeps its old value"
                hint = "move the value to all ranks that read the buffer"
                raise fail("not all ranks that read a buffer get its new value", "", got, hint)


def check_same_value(program: Program, i: Instruction, fail: Fail) -> None:
    src, dst = program.types[i.inputs[0]], i.type
    if src.value != dst.value:
        raise fail(f"{i.op} does not change the value", str(src.value), str(dst.value))


def _check_redistribution(program: Program, i: Instruction, fail: Fail) -> None:
    check_same_value(program, i, fail)
    src, dst = program.types[i.inputs[0]], i.type
    change = f"{_placed(src)} -> {_placed(dst)}"
    same_ranks = program.participants(src) == program.participants(dst)
    cuts = [program.ratio(t.ratio) for t in (src, dst) if isinstance(t.placement, Shard)]
    if isinstance(src.placement, Partial) and isinstance(dst.placement, Partial) and same_ranks:
        raise fail("a partial sum stays where it is", "R or S(dim) as the result", change)
    if not same_ranks or len(set(cuts)) > 1:
        # ranks that hold no piece may gather all of them
        gathered = isinstance(src.placement, Shard) and isinstance(dst.placement, Replicate)
        if i.op != "move" and not (i.op == "all_gather" and gathered):
            raise fail(f"{i.op} does not change the ratio", "move", change)
        return
    try:
        name = redistribution(src.placement, dst.placement)
    except ValueError:
        raise fail(f"nothing to do: {change}", "another placement or ratio", change) from None
    if src.placement == dst.placement:
        raise fail(f"nothing to do: {change}", "another placement or ratio", change)
    if i.op not in (name, "move"):
        raise fail(f"{i.op} does not turn {src.placement} into {dst.placement}", name, i.op)


def _check_operator(program: Program, i: Instruction, fail: Fail) -> None:
    rule = RULES.get(i.op)
    inputs = [(f"%{name}", program.types[name]) for name in i.inputs]
    placed = inputs + [(f"%{r}" if r is not None else "_", t) for r, t in zip(i.results, i.types)]
    _check_agreement(program, placed, fail)
    if rule is None:
        for name, t in placed:
            if not isinstance(t.placement, Replicate):
                raise fail(f"{i.op} has no sharding rule", "R everywhere", f"{name} {_placed(t)}")
        return
    call = call_of(i, program.types)
    ins = tuple(t.placement for _, t in inputs)
    outs = tuple(t.placement for t in i.types)
    try:
        strategy = find_strategy(rule, call, ins, outs)
    except PatternMismatch as error:
        raise fail(f"the shapes do not fit {i.op}: {error}") from None
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        # rules expect arguments in the form that PyTorch's exporter writes, but edited text may hold anything
        raise fail(f"the arguments do not fit {i.op}: {error}") from error
    if strategy is None:
        got = f"{_signature(ins)} -> {_signature(outs)}"
        raise fail(f"{i.op} cannot be computed with these placements", _allowed(rule, call, ins), got)


def _check_agreement(program: Program, placed: list[tuple[str, TensorType]], fail: Fail) -> None:
    """Checks that one set of ranks holds all values of an operator, and that they are cut in one way."""
    for (name, t), (other, u) in zip(placed, placed[1:]):
        if program.participants(t) != program.participants(u):
            got = f"{name} on ranks {_ranks(program, t)}, {other} on ranks {_ranks(program, u)}"
            raise fail("the values of one operator are held by the same ranks", "one set of ranks", got)
    cuts = [(name, t) for name, t in placed if isinstance(t.placement, Shard)]
    for (name, t), (other, u) in zip(cuts, cuts[1:]):
        if program.ratio(t.ratio) != program.ratio(u.ratio):
            got = f"{name} {_placed(t)}, {other} {_placed(u)}"
            raise fail("the shards of one operator are cut by one ratio", f"@{t.ratio} everywhere", got)


def _check_loss(program: Program, where: str) -> None:
    t, i = program.types[program.loss], program.producers[program.loss]
    if t.value.shape or not t.value.is_floating:
        raise invalid(program, i, where, "the loss is no scalar", "f32[]", str(t.value))
    if not isinstance(t.placement, Partial):
        name = redistribution(t.placement, Partial())
        hint = f"%total = {name}(%{program.loss}) : {t.value} P(sum)"
        raise invalid(program, i, where, "the loss is not held as a sum", "P(sum)", str(t.placement), hint)


def _allowed(rule: Rule, call: Call, ins: Sequence[Placement]) -> str:
    options = strategies(rule, call)
    fitting = [o for o in options if _bare(ins) == _bare(o.inputs)]
    shown = [f"{_signature(o.inputs)} -> {_signature(o.outputs)}" for o in fitting or options]
    more = f" or {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    text = " or ".join(shown[:SHOWN]) + more
    units = [t for t in ins if isinstance(t, Shard)]
    if fitting and units:
        text += ", in units that fit the operator"
    return text or "nothing"


def _bare(placements: Sequence[Placement]) -> tuple[object, ...]:
    return tuple(p.dim if isinstance(p, Shard) else type(p) for p in placements)


def _signature(placements: Sequence[Placement]) -> str:
    inner = ", ".join(map(str, placements))
    return inner if len(placements) == 1 else f"({inner})"


def _placed(t: TensorType) -> str:
    return f"{t.placement}@{t.ratio}" if t.ratio else str(t.placement)


def _ranks(program: Program, t: TensorType) -> str:
    return " ".join(map(str, program.participants(t)))


def _article(word: str) -> str:
    return "an" if word[:1] in "aeiou" else "a"
