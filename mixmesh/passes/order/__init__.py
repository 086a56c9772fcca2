"""The order of execution, by list scheduling of a step's joint forward and backward graph, and small sums
that travel as one."""

from .coalesced import coalesced, in_runs, levels_of_sums, most_saved_s, separated
from .graph import StepGraph, StepTask, step_graph
from .schedule import GAIN, Orders, in_order, ready_seconds, reordered

__all__ = [
    "GAIN", "Orders", "StepGraph", "StepTask", "coalesced", "in_order", "in_runs", "levels_of_sums",
    "most_saved_s", "ready_seconds", "reordered", "separated", "step_graph",
]  # fmt: skip
