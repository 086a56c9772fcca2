"""Operator groups of a task, and the strategies that they allow."""

from __future__ import annotations

from ..search.placement import Space, make_grouping
from ..search.placement.groups import NUM_GROUPS
from .task import Task


def space_of(task: Task, method: str = "partition", count: int = NUM_GROUPS) -> Space:
    """The strategies of a task: operators in about ``count`` groups by ``method``, each cut in the way of
    data parallelism."""
    with task.timed("groups"):
        grouping = make_grouping(task.graph, task.costs, count, method, task.choices.fold.runs)
        return Space(task.data_parallel(task.proportional), task.costs, grouping)
