"""Conclusions that follow from the states of all ranks alone: ranks in different calls, late ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..base.units import ranks_text
from ..errors import CollectiveError
from .agreement import by_value
from .peers import Seen

END_OF_DATA = "the end of the data"  # names of calls
START_OF_EPOCH = "the start of an epoch"  # names of calls
AS_MANY = "data of as many batches on every rank"
SAME_END = "leave the loop over a loader after the same batch on every rank"
# ranks that differ in these have left out a part of a step, not asked for something alone
OF_A_STEP = {"train forward", "backward", "the order of the data"}
LEFT_OUT = (
    "let all ranks leave out the same batches: one rank's `continue` or `except` leaves the others waiting",
    "torch.distributed.all_reduce of what decides, and then `if` on every rank",
)
ALONE = "take the call out of `if rank == 0:`, for all ranks to make it"


def different_calls(
    rank: int,
    own_calls: Mapping[int, str],
    own_lines: Mapping[int, str],
    states: Mapping[int, Seen],
    what: str,
) -> CollectiveError | None:
    """The error for the first call whose kind differs between ranks; None if there is none. ``rank`` waits in
    ``what``; ``own_calls`` are its calls by number, and ``own_lines`` the lines of its script."""
    for number, kind in sorted(own_calls.items()):
        kinds = {rank: kind}
        kinds |= {r: s.calls[str(number)] for r, s in states.items() if str(number) in s.calls}
        groups = by_value(kinds)
        if len(groups) > 1:
            (one, first), *others = groups.items()
            rest = "; ".join(f"{ranks_text(ranks)} in {kind}" for kind, ranks in others)
            lines = {rank: own_lines.get(number, "")}
            lines |= {r: s.lines.get(str(number), "") for r, s in states.items()}
            return CollectiveError(
                f"{ranks_text(first)} in {one}, {rest}: call {number} must be the same on all ranks",
                where=what,
                expected="every rank to make the same calls in the same order",
                got="; ".join(_with_line(kind, ranks, lines) for kind, ranks in groups.items()),
                hint=_hints(groups.keys()),
            )
    return None


def _hints(kinds: Collection[str]) -> str | tuple[str, ...]:
    """The hints for ranks whose calls are of different ``kinds``."""
    if END_OF_DATA in kinds:
        return AS_MANY
    others = set(kinds) - {START_OF_EPOCH}
    if not others <= OF_A_STEP:
        return ALONE  # at an epoch's end, too: the others have gone on to the next one
    return LEFT_OUT if others == set(kinds) else (SAME_END, ALONE)


def _with_line(kind: str, ranks: list[int], lines: Mapping[int, str]) -> str:
    """A call of some ranks, with the line of the first one's script if it is known."""
    line = lines.get(ranks[0], "")
    return f"{ranks_text(ranks)}: {kind}" + (f" ({line})" if line else "")


def late_ranks(rank: int, number: int, states: Mapping[int, Seen]) -> dict[int, Seen]:
    """The ranks outside of mixmesh that have not reached call ``number``. Empty if a rank before ``rank``
    waits in that call too, as it then reports them itself."""
    if any(seen.waiting and seen.number == number and other < rank for other, seen in states.items()):
        return {}
    return ranks_outside(number, states)


def ranks_outside(number: int, states: Mapping[int, Seen]) -> dict[int, Seen]:
    """The ranks outside of mixmesh that have not reached call ``number``."""
    return {other: seen for other, seen in states.items() if not seen.doing and seen.number < number}


def stay_text(seen: Seen) -> str:
    """A text that says how long a rank has been outside of mixmesh, and where."""
    at = f", in {seen.at}" if seen.at else ""
    return f"outside of mixmesh for {seen.for_s:.0f} s, after call {seen.number}{at}"
