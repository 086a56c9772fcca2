"""The liveness of a step: a fold over its events that keeps account of what every rank holds.

References are counted as PyTorch counts them: a value is freed after its last use, unless it is kept for the
backward pass or a view of it lives on. In the backward pass a gradient is freed after the operator that made
its value has used it, together with everything that operator had kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..events import BACKWARD, REPEATED, WEIGHT, Await, Compute, Event, Ready, Sink, Start, Use
from .before import set_up, stored
from .collectives import (
    arrive,
    come_back,
    fetch,
    gather_again,
    land_parameter,
    move,
    move_back,
    scatter_complete,
)
from .forward import compute_forward
from .gradients import compute_backward, compute_weight
from .moments import BUCKET, Moment
from .optimizer import optimizer
from .regions import compute_again, end_of_backward
from .state import Setting, State


@dataclass(frozen=True)
class Liveness:
    """The moments of a step, and those at which the backward pass ``complete``s parameters' gradients. The
    moments include buckets of gradients only if these have owners."""

    moments: tuple[Moment, ...]
    complete: Mapping[float, Moment]


def liveness(setting: Setting) -> Liveness:
    """The moments of one step, or of one micro-batch."""
    state = State.of(setting)
    set_up(state)
    stored(state)
    ledger = state.ledger
    before, at = ledger.now("what is stored"), len(ledger.moments)
    fetch(state)
    for event in setting.step.forward.script.events:
        forward(state, event)
    kept = ledger.now("the values that the forward pass left")
    completed = Completed(setting)
    for event in setting.step.backward.script.events:
        completed.before(state, event)
        backward(state, event)
    completed.note(state)
    if setting.flight.others:
        moments = ledger.moments
        moments[at:] = setting.flight.over(setting.program, before, kept, moments[at:])
    optimizer(state)
    return Liveness(tuple(ledger.moments), state.complete)


def forward(state: State, event: Event) -> None:
    """Handles one event of the forward pass, and then frees values that are not used again."""
    setting = state.setting
    if isinstance(event, Await):
        if event.name in state.unordered and event.name in setting.step.outline.uses:
            arrive(state, event.name)
    elif isinstance(event, Use):
        land_parameter(state, event.name)
    elif isinstance(event, Compute | Start | Sink):
        i = setting.program.instructions[event.at]
        if isinstance(event, Compute):
            compute_forward(state, event.at)
        elif isinstance(event, Start):
            move(state, i)
        state.forget(event.at, (*setting.inputs[event.at], *i.results), setting.last)


def backward(state: State, event: Event) -> None:
    """Handles one event of the backward pass."""
    instructions = state.setting.program.instructions
    match event:
        case Compute(part=part, at=n) if part == BACKWARD:
            compute_backward(state, n)
            end_of_backward(state, n)
        case Compute(part=part, at=n) if part == WEIGHT:
            compute_weight(state, n)
        case Compute(part=part, at=n) if part == REPEATED:
            compute_again(state, n)
        case Start(part=part, at=n) if part == REPEATED:
            gather_again(state, instructions[n])
        case Start(part=part, at=n) if part == BACKWARD:
            move_back(state, instructions[n])
        case Await(part=part, at=n) if part == BACKWARD:
            come_back(state, instructions[n])
            end_of_backward(state, n)


class Completed:
    """The points of the backward pass, reached so far, at which gradients of parameters are complete. The
    held bytes are noted there after everything at the point has been sent."""

    def __init__(self, setting: Setting) -> None:
        self.reached: list[float] = []
        self.outline = setting.step.outline
        self.names: dict[float, set[str]] = {}
        for name, point in setting.step.completes.items():
            self.names.setdefault(point, set()).add(name)

    def before(self, state: State, event: Event) -> None:
        """Notes the points that are over before this event."""
        if isinstance(event, Ready):
            if event.point in self.names:
                self.reached.append(event.point)
        elif self.reached and not self._belongs(event):
            self.note(state)

    def _belongs(self, event: Event) -> bool:
        """Whether an event belongs to the point reached last. Such events are: gradients sent after the first
        use of their values, and input gradients of a product whose weight gradient came first."""
        point = self.reached[-1]
        if isinstance(event, Start) and event.part == BACKWARD:
            result = self.outline.program.instructions[event.at].result
            return self.outline.uses.get(result, (event.at,))[0] == point
        return isinstance(event, Compute) and event == (BACKWARD, point)

    def note(self, state: State) -> None:
        for point in self.reached:
            state.complete[point] = state.ledger.now(BUCKET)
            scatter_complete(state, self.names[point])
        self.reached.clear()
