"""Placement of op groups on sets of devices (HeteroG, TAG)."""

from .estimate import Estimate, Estimator
from .groups import METHODS, NUM_GROUPS, make_grouping
from .lower import SYNCS, Placed, lower
from .strategy import Action, Edge, Group, Grouping, Space, Value, device_groups, used_ranks

__all__ = [
    "METHODS", "NUM_GROUPS", "SYNCS", "Action", "Edge", "Estimate", "Estimator", "Group", "Grouping",
    "Placed", "Space", "Value", "device_groups", "lower", "make_grouping", "used_ranks",
]  # fmt: skip
