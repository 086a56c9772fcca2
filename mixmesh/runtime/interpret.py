"""All ranks of a program in one process, lock step: what a program means.

Redistributions are written as plain differentiable tensor expressions over the list of all ranks'
values, so their gradients come from autograd and not from a table: this is the yardstick that the
multi-process runtime is held against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ir import Instruction, Partial, Program, Ratio, Replicate, Shard, TensorType, shard_sizes
from ..trace.dtypes import TORCH_DTYPE
from .local import local_op
from .random import RandomPolicy

Values = list[Tensor | None]  # one per rank; None where the rank takes no part


@dataclass(frozen=True)
class Outcome:
    """``loss`` is the global loss with its graph; ``buffers`` the new values of updated buffers."""

    loss: Tensor
    buffers: dict[str, Tensor]


def interpret(
    program: Program,
    tensors: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    *,
    random: RandomPolicy | None = None,
) -> Outcome:
    """Runs a program. ``tensors`` holds whole parameters and buffers by name, ``batch`` whole inputs.

    ``loss.backward()`` then leaves whole gradients in the parameters, for any placement of them.
    """
    random = random or RandomPolicy(exact=True)
    env: dict[str, Values] = {}
    buffers: dict[str, Tensor] = {}
    device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
    last_use = {name: n for n, i in enumerate(program.instructions) for name in i.inputs}
    for n, i in enumerate(program.instructions):
        if i.op == "update":
            values = env[i.inputs[0]]
            buffers[i.args[0]] = next(v for v in values if v is not None).detach()
        elif i.is_leaf:
            whole = leaf_value(i, tensors, batch, device)
            env[i.result] = cut(whole, i.type, program)
        elif i.is_redistribution:
            env[i.result] = redistribute(env[i.inputs[0]], program.types[i.inputs[0]], i.type, program)
        else:
            run_everywhere(program, i, env, device, random)
        for name in i.inputs:
            if last_use[name] == n and name != program.loss:
                env.pop(name, None)
    held = [v for v in env[program.loss] if v is not None]
    partial = isinstance(program.types[program.loss].placement, Partial)
    return Outcome(sum(held[1:], held[0]) if partial else held[0], buffers)


def leaf_value(i: Instruction, tensors, batch, device) -> Tensor:
    if i.op == "const":
        t = i.type.value
        return torch.tensor(i.args[0], dtype=TORCH_DTYPE[t.dtype], device=device).reshape(t.shape)
    return (batch if i.op == "input" else tensors)[i.args[0]]


def run_everywhere(program: Program, i: Instruction, env, device, random) -> None:
    taking_part = set(program.participants(i.types[0]))
    per_rank = []
    for rank in range(program.world_size):
        if rank not in taking_part:
            per_rank.append((None,) * len(i.results))
            continue
        run = local_op(program, i, rank, device, random)
        per_rank.append(run(*(env[name][rank] for name in i.inputs)))
    for index, name in enumerate(i.results):
        if name is not None:
            env[name] = [results[index] for results in per_rank]


def cut(whole: Tensor, t: TensorType, program: Program) -> Values:
    """Every rank's part of a whole tensor held as R or S."""
    ranks = set(program.participants(t))
    if isinstance(t.placement, Shard):
        sizes = shard_sizes(t.value.shape[t.placement.dim], program.ratio_of[t.ratio], t.placement.unit)
        pieces: Values = list(torch.split(whole, list(sizes), t.placement.dim))
    else:
        pieces = [whole] * program.world_size
    return [p if rank in ranks else None for rank, p in enumerate(pieces)]


def redistribute(values: Values, src: TensorType, dst: TensorType, program: Program) -> Values:
    """What every rank holds after ``src -> dst``, as tensor expressions over what all held before."""
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
            raise ValueError("P -> P is not a redistribution")
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
            return place(padded, takers, lambda: torch.zeros_like(whole), program.world_size)
        case (Shard(dim), _):
            return cut(torch.cat([v for _, v in held], dim), dst, program)
    raise ValueError(f"{src} -> {dst}")


def ratio_of(t: TensorType, program: Program) -> Ratio:
    return program.ratio_of[t.ratio]


def place(known: dict[int, Tensor], takers, default, world_size: int) -> Values:
    out: Values = []
    for rank in range(world_size):
        if rank in known:
            out.append(known[rank])
        else:
            out.append(default() if rank in takers and default is not None else None)
    return out
