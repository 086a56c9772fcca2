"""The events of a pass, in the order in which every rank that takes part in them issues them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ..base.lazy import lazy
from ..base.timeline import gradient_name, product_name, repeated_name, wgrad_name
from ..cost.exchanges import Exchange
from ..lang.ir import Program

# the parts of an instruction that a step computes, and functions that name their events after the result
FORWARD, BACKWARD, REPEATED, WEIGHT, PRODUCT = "forward", "backward", "repeated", "weight", "product"
NAMES: dict[str, Callable[[str], str]] = {
    FORWARD: str,
    BACKWARD: gradient_name,
    REPEATED: repeated_name,
    WEIGHT: wgrad_name,
    PRODUCT: product_name,
}


LOCAL = -1  # in place of a collective's number


class Compute(NamedTuple):  # made by the thousand, in a third of a frozen dataclass's time
    """A ``part`` of the instruction ``at`` this index: its forward, the gradients of its inputs, its second
    run, its weight gradient alone, or that gradient from gathered factors."""

    part: str
    at: int


@lru_cache(maxsize=64)
def computes_of(part: str, count: int) -> tuple[Compute, ...]:
    """This part of each of ``count`` instructions: the same values for all programs, as planning goes through
    thousands of one size."""
    return tuple(Compute(part, n) for n in range(count))


class Start(NamedTuple):
    """The start of a redistribution, of its gradient (``BACKWARD``) or second gather (``REPEATED``), or of
    the gather of a factor (``PRODUCT``): a ``part`` of the instruction ``at`` this index. ``number`` is that
    of its collective in the pass, ``LOCAL`` if each rank already has all that it needs. ``value`` is the name
    under which it is awaited later. Without one it is awaited at the end of the pass, after which
    ``product``, if given, is computed from it."""

    name: str
    number: int
    part: str
    at: int
    value: str = ""
    product: Compute | None = None


class Await(NamedTuple):
    """Waits for a value, the result of the start with this ``value``."""

    name: str
    part: str
    at: int


class Ready(NamedTuple):
    """Marks gradients that are complete at this ``point``: on some ranks only (``Step.ready``)."""

    point: float


class Use(NamedTuple):
    """Marks that a parameter stepped by its owner is used from here on, and so has to be up to date."""

    name: str


class Sink(NamedTuple):
    """The instruction ``at`` this index takes a value out of the step: it shows an output, or updates a
    buffer."""

    at: int


End = Start | Await | Ready | Use
Event = Compute | End | Sink


class Segment(NamedTuple):
    """Computations that nothing interrupts, and the event after them."""

    computes: tuple[Compute, ...]
    end: End | None


@dataclass(frozen=True)
class Script:
    """Events in order, without naming ranks."""

    events: tuple[Event, ...]

    @lazy
    def segments(self) -> tuple[Segment, ...]:
        """The events that take time, with consecutive computations joined into one."""
        out: list[Segment] = []
        computes: list[Compute] = []
        add = computes.append
        local: set[str] = set()  # values for which ranks need not wait
        for event in self.events:
            if isinstance(event, Compute):
                add(event)
            elif isinstance(event, Start) and event.number == LOCAL:
                local.add(event.value)
            elif not (isinstance(event, Sink) or (isinstance(event, Await) and event.name in local)):
                out.append(Segment(tuple(computes), event))
                computes.clear()
        if computes:
            out.append(Segment(tuple(computes), None))
        return tuple(out)

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs of events by index, where the second follows the first: consecutive events of each rank's
        computing thread, and each wait after the start that it waits for."""
        begun = {e.value: n for n, e in enumerate(self.events) if isinstance(e, Start) and e.value}
        waits = [(begun[e.name], n) for n, e in enumerate(self.events) if isinstance(e, Await)]
        return (*((n, n + 1) for n in range(len(self.events) - 1)), *waits)


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass of ``program``: its events, and their collectives by number, each with the
    purpose of its process group."""

    program: Program
    script: Script
    exchanges: tuple[tuple[Exchange, str], ...]

    def on(self, program: Program, ranks: tuple[int, ...]) -> Pass:
        """The same pass on other ranks, all of which take part in every collective."""
        moved = tuple((replace(exchange, ranks=ranks), purpose) for exchange, purpose in self.exchanges)
        return Pass(program, self.script, moved)

    def with_owned(self, program: Program) -> Pass:
        """The forward pass of ``program``, which has other owners, made from this one, in which every
        parameter has an owner."""
        owned = program.owned
        events = tuple([e for e in self.script.events if type(e) is not Use or e.name in owned])
        return Pass(program, Script(events), self.exchanges)

    def name_of(self, compute: Compute) -> tuple[str, str]:
        """The name that a computation has in a timeline, and its operator."""
        i = self.program.instructions[compute.at]
        result = next((r for r in i.results if r is not None), i.op)
        return NAMES[compute.part](result), i.op
