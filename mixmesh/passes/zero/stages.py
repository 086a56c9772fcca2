"""A data-parallel program in the stages of ZeRO (Rajbhandari et al., SC'20), with shares by memory.

0  everything is replicated
1  gradients and optimizer state belong to owners; gradients are summed to them once per step
2  as 1, but gradients are summed to them in every backward pass
3  parameters are stored by their owners, gathered for use and freed between the passes; parameters that
   the backward pass does not use, such as biases and tables, are not gathered again
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ...cost import VIEWS
from ...errors import InputError, PlanError
from ...lang.ir import (
    LEAVES,
    REPLICATE,
    Instruction,
    Program,
    Ratio,
    Ref,
    Shard,
    TensorType,
    make_ratio,
    owned_type,
    print_instruction,
    region_of,
    stage_of,
    support,
    with_attrs,
)
from ...step.repeats import kept_inputs

STAGES = (0, 1, 2, 3)
# operators whose results may be their inputs
COPIES = ("aten._to_copy", "aten.contiguous", "aten.clone", "aten.broadcast_tensors")


def with_stage(program: Program, stage: int, owners: Ratio) -> Program:
    """``program`` in a ZeRO stage, which changes its replicated parameters.

    ``owners`` has one share per rank, zeros allowed, for the gradient and optimizer state in stages 1 and 2,
    and for the parameter too in stage 3. Every row has one owner. Some parameters stay replicated: those
    without dims, without a gradient, of one rank only, or with a gradient from factors (``sfb``). Raises
    InputError for a bad stage or ratio, PlanError if an owner in stages 1 and 2 does not hold a parameter.
    """
    if isinstance(stage, bool) or stage not in STAGES:
        raise InputError("there is no such ZeRO stage", expected="0, 1, 2 or 3", got=f"stage={stage!r}")
    try:
        shares = make_ratio(owners)
    except (TypeError, ValueError) as err:
        raise InputError("the owners' shares are no ratio", got=str(err)) from None
    if len(shares) != program.world_size:
        raise InputError(
            "the owners' shares are for another number of ranks",
            expected=f"{program.world_size} shares",
            got=f"{len(shares)} shares",
        )
    candidates = {i.result for i in ownable(program)}
    if stage == 3 and candidates:
        program, ratio = _with_ratio(with_owners(program, {}), shares)
        return stored_by_owners(program, candidates, ratio)
    return with_owners(program, dict.fromkeys(candidates, shares) if stage else {}, stage)


def ownable(program: Program) -> tuple[Instruction, ...]:
    """Parameters that can have owners."""
    return tuple(i for i in program.params if _is_candidate(program, i))


def with_owners(program: Program, owners: Mapping[str, Ratio], stage: int = 1) -> Program:
    """``program`` with these ``owners`` (shares, by the parameter's result) of gradients and optimizer state,
    and without owners for any other parameter. A share of 1 is a parameter server.

    Raises PlanError if an owner does not hold its parameter.
    """
    if any(i.attr("owned") is not None for i in program.params):
        program = program.changed(instructions=tuple(map(_plain, program.instructions)))
    instructions = list(program.instructions)
    names: dict[tuple[Ratio, str | None], str] = {}  # the ratio for these shares of a parameter's ranks
    for n in [n for n, i in enumerate(instructions) if i.op == "param" and i.result in owners]:
        i, shares = instructions[n], owners[instructions[n].result]
        key = shares, i.type.ratio
        if key not in names:
            _check_held(program, i, shares)
            program, names[key] = _with_ratio(program, shares)
        instructions[n] = with_attrs(i, (*i.attrs, ("owned", names[key]), ("stage", stage)))
    return program.changed(instructions=tuple(instructions))


def _check_held(program: Program, i: Instruction, shares: Ratio) -> None:
    outside = sorted({*support(shares)} - {*program.participants(i.type)})
    if outside:
        raise PlanError(
            f"rank {outside[0]} cannot own rows of a parameter that it does not hold",
            where=print_instruction(i),
            expected=f"owners among the ranks {', '.join(map(str, program.participants(i.type)))}",
            got=f"shares {list(shares)}",
            hint="give it a share of 0, or take stage 3",
        )


def zero_stage(program: Program) -> int:
    """The highest ZeRO stage of a program's parameters; 0 if nothing has owners."""
    stages = [stage_of(i) for i in program.params if owned_type(program, i) is not None]
    gathered = any(i.op == "all_gather" and i.attr("reshard") is not None for i in program.instructions)
    return 3 if gathered else max(stages, default=0)


def _plain(i: Instruction) -> Instruction:
    if i.op != "param" or i.attr("owned") is None:
        return i
    return with_attrs(i, tuple((k, v) for k, v in i.attrs if k not in ("owned", "stage")))


def _is_candidate(program: Program, i: Instruction) -> bool:
    return (
        i.type.placement == REPLICATE
        and bool(i.type.value.shape)
        and i.result in program.requires_grad
        and i.result not in program.factored
        and i.args[0] not in program.copies
        and len(program.participants(i.type)) > 1
    )


def _with_ratio(program: Program, shares: Ratio) -> tuple[Program, str]:
    """The program with these shares under a ratio of their own."""
    name, n = "z", 0
    while name in program.ratio_of and program.ratio_of[name] != shares:
        n += 1
        name = f"z{n}"
    if name in program.ratio_of:
        return program, name
    return program.changed(ratios=(*program.ratios, (name, shares))), name


def stored_by_owners(program: Program, names: Collection[str], ratio: str) -> Program:
    """``program`` with these parameters stored S(0) in the shares of ``ratio``, and gathered for use.

    A gather starts one parameter-using operator ahead of its use, and the gathered parameter is freed after
    its last use, to be gathered again for the backward pass.
    """
    again = _needed_again(program, names)
    out: list[Instruction] = []
    waiting: list[Instruction] = []  # gathers since the last operator that uses a parameter
    ahead = 0  # where the next gathers go: before the operator that used the last ones
    shards: dict[TensorType, TensorType] = {}  # equal types share one object
    for i in program.instructions:
        if i.op == "param" and i.result in names:
            name = f"{i.result}.shard"
            held = shards.setdefault(i.type, TensorType(i.type.value, Shard(0), ratio))
            attrs = tuple((k, v) for k, v in i.attrs if k != "bucket")
            waiting.append(replace(i, results=(name,), types=(held,), attrs=attrs))
            reshard = (("reshard", i.result in again),)
            waiting.append(Instruction((i.result,), (i.type,), "all_gather", (Ref(name),), attrs=reshard))
            continue
        if waiting and any(name in names for name in i.inputs):
            out[ahead:ahead] = waiting
            ahead = len(out)
            waiting = []
        out.append(i)
    return replace(program, instructions=(*out, *waiting))


def _needed_again(program: Program, names: Collection[str]) -> set[str]:
    """The ``names`` that the backward pass reads: autograd keeps them, possibly through a view, or they are
    used again."""
    read_again: set[str] = set()
    for i in program.instructions:
        read = [name for name in i.inputs if name in names and name not in read_again]
        if not read:
            continue
        plain = not i.is_redistribution and i.op not in LEAVES and region_of(i) is None
        if plain and i.op not in VIEWS and i.op not in COPIES:
            kept = kept_inputs(program, i)
            read = [name for name in read if name in kept]
        read_again.update(read)
    return read_again
