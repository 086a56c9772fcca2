"""The order of execution, by list scheduling of a step's joint forward and backward graph."""

from .graph import StepGraph, StepTask, step_graph
from .schedule import play, ready_seconds, reordered

__all__ = ["StepGraph", "StepTask", "play", "ready_seconds", "reordered", "step_graph"]
