"""The text of a step: a line for every event, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..base.timeline import LOSS_SUM
from ..cost.exchanges import Exchange
from ..cost.outline import Outline
from ..lang.ir import Program
from .events import LOCAL, Await, Compute, Event, Pass, Ready, Sink, Start, Use
from .reductions import AT_THE_END, Reductions
from .step import step_of


def print_step(program: Program, whole: Program | None = None) -> str:
    """Prints the events of one step of a program: first the optimizer, then both passes, then what ranks
    await before the next step. Collectives have the bytes of the whole tensor, their ranks, and the purpose
    of their process group. If ``program`` is a micro-batch's, ``whole`` is the whole batch's."""
    step = step_of(Outline(program), whole)
    sums = step.reductions(whole or program, (whole or program).buckets)
    lines = [f"step {program.name} world={program.world_size} {{", "  optimizer"]
    lines += [f"  start {_collective(name, exchange, 'gradient')}" for name, exchange in sums.gathers]
    lines.append("  forward")
    lines += [f"    {line}" for line in _lines(step.forward, sums)]
    working = program.working_ranks
    if len(working) > 1:
        lines.append(f"  start {LOSS_SUM} on {_ranks(working)}")
    lines.append("  backward")
    lines += [f"    {line}" for line in _lines(step.backward, sums)]
    lines.append("  end")
    lines += [f"    {line}" for line in _at_the_end(step.backward, sums)]
    return "\n".join([*lines, "}"])


def _lines(order: Pass, sums: Reductions) -> Iterator[str]:
    local = {e.value for e in order.script.events if isinstance(e, Start) and e.number == LOCAL}
    for event in order.script.events:
        if isinstance(event, Ready):
            yield from _reductions(sums, event.point)
        elif not (isinstance(event, Await) and event.name in local):
            line = _line(order, event, sums)
            if line:
                yield line


def _line(order: Pass, event: Event, sums: Reductions) -> str:
    match event:
        case Compute():
            name, op = order.name_of(event)
            return f"compute {name} = {op}"
        case Start() if event.number == LOCAL:
            return f"local {event.name}"
        case Start():
            return f"start {_collective(event.name, *order.exchanges[event.number])}"
        case Await():
            return f"await {event.name}"
        case Sink():
            i = order.program.instructions[event.at]
            return f"{i.op} {i.args[0]}"
    assert isinstance(event, Use)  # complete gradients have lines of their own
    gather = sums.gather_of.get(event.name)
    return "" if gather is None else f"await {sums.gathers[gather][0]}, for {event.name}"


def _reductions(sums: Reductions, point: float, *, late: bool = False) -> Iterator[str]:
    """The reductions that begin at a point, on those ranks whose part is complete there."""
    for number, ranks in sums.issues.get(point, ()):
        if (number in sums.late) != late:
            continue
        exchange = sums.exchanges[number]
        part = "" if ranks == exchange.ranks else f", the part of {_ranks(ranks)}"
        yield f"start {_collective(sums.names[number], exchange, 'gradient')}{part}"


def _at_the_end(backward: Pass, sums: Reductions) -> Iterator[str]:
    yield from _reductions(sums, AT_THE_END)
    for event in backward.script.events:
        if isinstance(event, Start) and not event.value and event.number != LOCAL:
            yield f"await {event.name}"
            if event.product is not None:
                yield f"compute {backward.name_of(event.product)[0]} = aten.mm"
    yield from _reductions(sums, AT_THE_END, late=True)
    yield from (f"await {name}" for name in sums.names)


def _collective(name: str, exchange: Exchange, purpose: str) -> str:
    return f"{name} = {exchange.performed} {exchange.size_bytes} B on {_ranks(exchange.ranks)} ({purpose})"


def _ranks(ranks: Sequence[int]) -> str:
    return " ".join(map(str, ranks))
