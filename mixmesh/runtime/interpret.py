"""Runs all ranks of a program in one process, in lock step: the definition of what a program means.

Redistributions are plain differentiable expressions over the list of all ranks' values, so their gradients
come from autograd and not from a table. The multi-process runtime is checked against this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import MixmeshError
from ..frontend.trace.dtypes import TORCH_DTYPE
from ..lang.ir import (
    Instruction,
    Partial,
    Program,
    Ratio,
    Replicate,
    Shard,
    TensorType,
    print_instruction,
    rank_sizes,
    region_of,
    shard_sizes,
)
from ..lang.ir.dtypes import on_rank
from .local import local_op
from .random import RandomPolicy
from .recompute import Region, Step
from .window import Window, local_move

Values = list[Tensor | None]  # one per rank; None for a rank that takes no part
Regions = dict[tuple[int, int], Region]  # by number and rank


@dataclass(frozen=True)
class Outcome:
    """The global ``loss`` with its graph, the new values of updated buffers on every rank (``updates``), and
    every rank's part of the outputs (``shown``)."""

    loss: Tensor
    updates: dict[str, Values]
    shown: dict[str, Values] = field(default_factory=dict)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The new values of updated buffers, whole."""
        return {name: next(v for v in values if v is not None) for name, values in self.updates.items()}


def interpret(
    program: Program,
    tensors: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    *,
    random: RandomPolicy | None = None,
    windows: Sequence[Window] | None = None,
    given: Mapping[str, Values] | None = None,
) -> Outcome:
    """Runs a program. ``tensors`` holds whole parameters and buffers by name, ``batch`` whole inputs.

    ``loss.backward()`` then leaves whole gradients in the parameters, for any placement of them. In a
    micro-batch ranks see only their ``windows``, and ``given`` holds, by name, inputs that the ranks already
    have.
    """
    random = random or RandomPolicy(exact=True)
    env: dict[str, Values] = {}
    updates: dict[str, Values] = {}
    shown: dict[str, Values] = {}
    given = given or {}
    again: Regions = {}
    programs = [on_rank(program, rank) for rank in range(program.world_size)]
    device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
    last_use = {name: n for n, i in enumerate(program.instructions) for name in i.inputs}
    for n, i in enumerate(program.instructions):
        if i.op == "update":
            values = detached(env[i.inputs[0]])
            # the buffer is held by another set of ranks
            before = updates.get(i.args[0], [None] * len(values))
            updates[i.args[0]] = [old if v is None else v for v, old in zip(values, before)]
        elif i.op == "output":
            shown[i.args[0]] = detached(env[i.inputs[0]])
        elif i.is_leaf and i.args[0] in given:
            env[i.result] = given[i.args[0]]
        elif i.is_leaf:
            env[i.result] = cut_leaf(program, i, leaf_value(i, tensors, batch, device), windows)
        elif i.is_redistribution:
            env[i.result] = redistribute_in(program, i, env[i.inputs[0]], windows)
        else:
            run_everywhere(programs, n, env, device, random, again, windows)
        for name in i.inputs:
            if last_use[name] == n and name != program.loss:
                env.pop(name, None)
    return Outcome(whole_loss(program, env[program.loss]), updates, shown)


def detached(values: Values) -> Values:
    """The values without their graphs."""
    return [None if v is None else v.detach() for v in values]


def whole_loss(program: Program, values: Values) -> Tensor:
    """The loss of all ranks, from the values that they hold."""
    held = [v for v in values if v is not None]
    is_partial = isinstance(program.types[program.loss].placement, Partial)
    return sum(held[1:], held[0]) if is_partial else held[0]


def leaf_value(i: Instruction, tensors, batch, device) -> Tensor:
    if i.op == "const":
        t = i.type.value
        return torch.tensor(i.args[0], dtype=TORCH_DTYPE[t.dtype], device=device).reshape(t.shape)
    return (batch if i.op == "input" else tensors)[i.args[0]]


def cut_leaf(program: Program, i: Instruction, whole: Tensor, windows: Sequence[Window] | None) -> Values:
    """Every rank's part of an input, parameter or buffer; for an input in a micro-batch, its samples."""
    if windows is not None and i.op == "input" and i.result in windows[0].samples.values:
        return cut_by_windows(whole, i.type, program, windows)
    return cut(whole, i.type, program)


def redistribute_in(
    program: Program, i: Instruction, values: Values, windows: Sequence[Window] | None
) -> Values:
    """Every rank's part after a redistribution; in a micro-batch if there are ``windows``."""
    moved = None if windows is None else move_in_windows(program, i, values, windows)
    return moved or redistribute(values, program.types[i.inputs[0]], i.type, program)


def cut_by_windows(whole: Tensor, t: TensorType, program: Program, windows: Sequence[Window]) -> Values:
    """Every rank's samples of an input in a micro-batch."""
    ranks, dim = set(program.participants(t)), t.shard.dim
    pieces = [whole.narrow(dim, w.start(t), w.length(t)) for w in windows]
    return [p if rank in ranks else None for rank, p in enumerate(pieces)]


def move_in_windows(
    program: Program, i: Instruction, values: Values, windows: Sequence[Window]
) -> Values | None:
    """The result of a redistribution that only moves samples to another stage, within micro-batches; None for
    any other, which runs as usual."""
    ranks = set(program.participants(i.type))
    if i.result in windows[0].samples.transfers:
        dim = i.type.shard.dim
        sizes = [w.length(i.type) if rank in ranks else 0 for rank, w in enumerate(windows)]
        pieces = torch.cat([v for v in values if v is not None], dim).split(sizes, dim)
        return [p if rank in ranks else None for rank, p in enumerate(pieces)]
    local = [local_move(program, i, rank, window) for rank, window in enumerate(windows)]
    moves = [move for move in local if move is not None]
    if not moves:  # either all ranks have a local move, or none has
        return None
    return [move(v)[0] if rank in ranks else None for rank, (move, v) in enumerate(zip(moves, values))]


def run_everywhere(
    programs: Sequence[Program], n: int, env, device, random, again: Regions, windows=None
) -> None:
    """Runs an operator on every rank; it is instruction ``n`` of their programs."""
    program, i = programs[0], programs[0].instructions[n]
    taking_part = set(program.participants(i.types[0]))
    per_rank: list[tuple[Tensor | None, ...]] = []
    for rank in range(program.world_size):
        if rank not in taking_part:
            per_rank.append((None,) * len(i.results))
            continue
        window = None if windows is None else windows[rank]
        place = random if window is None else window.place
        own = programs[rank]
        run = local_op(own, own.instructions[n], rank, device, place, window)
        values = [env[name][rank] for name in i.inputs]
        number = region_of(i)
        try:
            if number is None:
                per_rank.append(run(*values))
                continue
            region = again.setdefault((number, rank), Region(place))
            per_rank.append(region.run(Step(run, i.inputs, i.results, run), *values))
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            raise failed(i, rank, error) from error  # kernels check more than the types
    for index, name in enumerate(i.results):
        if name is not None:
            env[name] = [results[index] for results in per_rank]


def failed(i: Instruction, rank: int, error: Exception) -> MixmeshError:
    return MixmeshError(
        f"rank {rank}: {i.op} failed: {' '.join(str(error).split())[:300]}",
        where=f"{print_instruction(i)}  {i.location}".rstrip(),
    )


def cut(whole: Tensor, t: TensorType, program: Program) -> Values:
    """Every rank's part of a whole tensor held as R or S."""
    ranks = set(program.participants(t))
    if isinstance(t.placement, Shard):
        sizes = rank_sizes(t, program.ratio(t.ratio))
        pieces: Values = list(torch.split(whole, list(sizes), t.placement.dim))
    else:
        pieces = [whole] * program.world_size
    return [p if rank in ranks else None for rank, p in enumerate(pieces)]


def redistribute(values: Values, src: TensorType, dst: TensorType, program: Program) -> Values:
    """The values of all ranks after ``src -> dst``, as tensor expressions of the values before."""
    held = [(rank, v) for rank, v in enumerate(values) if v is not None]
    takers = program.participants(dst)
    match src.placement, dst.placement:
        case (Replicate(), Partial()):
            first = held[0][0] if held[0][0] in takers else takers[0]
            whole = held[0][1]
            return place({first: whole}, takers, lambda: torch.zeros_like(whole), program.world_size)
        case (Replicate(), Replicate() | Shard()):
            own = dict(held)
            wholes = {rank: own.get(rank, held[0][1]) for rank in takers}
            if isinstance(dst.placement, Replicate):
                return place(wholes, takers, None, program.world_size)
            return [
                cut(wholes[rank], dst, program)[rank] if rank in wholes else None
                for rank in range(program.world_size)
            ]
        case (Partial(), Partial()):
            return fold(dict(held), takers, program.world_size)
        case (Partial(), _):
            whole = sum((v for _, v in held[1:]), held[0][1])
            return cut(whole, dst, program)
        case (Shard(dim), Partial()):
            sizes = list(shard_sizes(src.value.shape[dim], ratio_of(src, program), src.placement.unit))
            whole = torch.cat([v for _, v in held], dim)
            parts = torch.split(whole, sizes, dim)
            padded = {}
            for rank, _ in held:
                pieces = [p if r == rank else torch.zeros_like(p) for r, p in enumerate(parts)]
                padded[rank] = torch.cat(pieces, dim)
            return fold(padded, takers, program.world_size)
        case (Shard(dim), _):
            return cut(torch.cat([v for _, v in held], dim), dst, program)
    raise ValueError(f"{src} -> {dst}")


def fold(addends: dict[int, Tensor], takers: tuple[int, ...], world_size: int) -> Values:
    """Each rank's addend if only ``takers`` hold addends: those of the other ranks are added to the first
    taker's."""
    stays = {rank: v for rank, v in addends.items() if rank in takers}
    for v in [v for rank, v in addends.items() if rank not in takers]:
        stays[takers[0]] = stays[takers[0]] + v if takers[0] in stays else v
    like = next(iter(addends.values()))
    return place(stays, takers, lambda: torch.zeros_like(like), world_size)


def ratio_of(t: TensorType, program: Program) -> Ratio:
    return program.cut_by(t)


def place(known: dict[int, Tensor], takers, default, world_size: int) -> Values:
    out: Values = []
    for rank in range(world_size):
        if rank in known:
            out.append(known[rank])
        else:
            out.append(default() if rank in takers and default is not None else None)
    return out
