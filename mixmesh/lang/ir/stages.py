"""Pipeline stages: parts of a program on disjoint sets of ranks, between which samples move.

With micro-batches, such a chain of stages runs as a pipeline in 1F1B order: a stage first runs as many
forward passes as there are stages from it to the last, then alternates one backward and one forward pass. So
it never keeps the activations of more micro-batches than that.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import PlanError
from .instruction import Instruction
from .placement import Shard
from .printing import print_instruction
from .program import Program
from .types import TensorType

Ranks = tuple[int, ...]


def transfers_of(program: Program) -> Iterator[Instruction]:
    """Yields the instructions that move shards between disjoint sets of ranks."""
    for i in program.instructions:
        if i.op == "move" and len(i.inputs) == len(i.types) == 1:  # checks refuse other moves
            source = program.types[i.inputs[0]]
            if _is_cut(source) and _is_cut(i.type):
                if not {*program.participants(source)} & {*program.participants(i.type)}:
                    yield i


def _is_cut(t: TensorType) -> bool:
    return isinstance(t.placement, Shard)


def stages_of(program: Program) -> tuple[Ranks, ...]:
    """The ranks of every stage, in the order in which samples pass through them; empty without transfers.

    Raises PlanError where stages share a rank, or samples return to an earlier stage.
    """
    after: dict[Ranks, dict[Ranks, Instruction]] = {}
    for i in transfers_of(program):
        source = program.participants(program.types[i.inputs[0]])
        target = program.participants(i.type)
        after.setdefault(source, {}).setdefault(target, i)
        after.setdefault(target, {})
    for stage, moves in after.items():
        for other in after:
            if other != stage and {*stage} & {*other}:
                move = next(iter({**moves, **after[other]}.values()), None)
                raise _refusal(move, f"stages on ranks {_text(stage)} and {_text(other)} share a rank")
    ordered: list[Ranks] = []
    left = dict(after)
    while left:
        entered = {target for moves in left.values() for target in moves}
        first = next((stage for stage in left if stage not in entered), None)
        if first is None:
            stage, moves = next((s, m) for s, m in left.items() if m)
            target, i = next(iter(moves.items()))
            raise _refusal(i, f"samples go from ranks {_text(stage)} to {_text(target)} and come back")
        ordered.append(first)
        del left[first]
    return tuple(ordered)


def passes_of(stage: int, stages: int, micro_steps: int) -> tuple[tuple[bool, int], ...]:
    """The passes of one of ``stages``, in order, as pairs of (whether it is a backward pass, micro-batch)."""
    warm = min(stages - stage, micro_steps)
    out = [(False, k) for k in range(warm)]
    for k in range(micro_steps):
        out.append((True, k))
        if warm + k < micro_steps:
            out.append((False, warm + k))
    return tuple(out)


def in_flight(stage: int, stages: int, micro_steps: int) -> int:
    """The largest number of micro-batches whose activations a stage keeps at a time."""
    return min(stages - stage, micro_steps)


def _text(ranks: Ranks) -> str:
    return ", ".join(map(str, ranks))


def _refusal(i: Instruction | None, why: str) -> PlanError:
    return PlanError(
        f"micro-batches cannot run this program: {why}",
        where="" if i is None else f"{print_instruction(i)}  {i.location}".rstrip(),
        expected="data parallelism, or a chain of stages with ranks of their own and no way back",
        hint="plan without accumulation",
    )
