"""Placement of op groups on sets of devices (HeteroG, TAG)."""

from .groups import METHODS, NUM_GROUPS, make_grouping
from .lower import SYNCS, Placed, lower
from .strategy import Action, Edge, Group, Grouping, Space, device_groups, used_ranks

__all__ = [
    "METHODS", "NUM_GROUPS", "SYNCS", "Action", "Edge", "Group", "Grouping", "Placed", "Space",
    "device_groups", "lower", "make_grouping", "used_ranks",
]  # fmt: skip
