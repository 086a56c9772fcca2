"""One training step as a value: its events, in order, on each rank.

The order is that of the runtime, in which autograd runs the backward pass. The simulator times these events;
making them needs no costs.
"""

from .alike import Alike, membership
from .events import Await, Compute, Event, Pass, Ready, Segment, Start, Use
from .reductions import AT_THE_END, Reductions
from .step import Step, step_of
from .text import print_step

__all__ = [
    "AT_THE_END",
    "Alike",
    "Await",
    "Compute",
    "Event",
    "Pass",
    "Ready",
    "Reductions",
    "Segment",
    "Start",
    "Step",
    "Use",
    "membership",
    "print_step",
    "step_of",
]
