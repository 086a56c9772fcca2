"""The order of execution, by list scheduling of a step's joint forward and backward graph."""

from .graph import StepGraph, StepTask, step_graph
from .schedule import GAIN, Orders, in_order, ready_seconds, reordered

__all__ = ["GAIN", "Orders", "StepGraph", "StepTask", "in_order", "ready_seconds", "reordered", "step_graph"]
