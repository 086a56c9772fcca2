"""Sharding rules: the strategies by which each operator may be sharded."""

from .aten import RULES
from .mixtures import EXPERTS, count_experts
from .pattern import Bound, PatternMismatch, parse_pattern
from .rule import (
    MEANS,
    Call,
    LocalCall,
    Rule,
    Strategy,
    call_key,
    call_of,
    fill_in_units,
    find_strategy,
    mean_share,
    multiply_adds,
    strategies,
)
from .selected import SELECTED, count_whole, selected_share
from .units import Units, shard_units

__all__ = [
    "EXPERTS", "MEANS", "RULES", "SELECTED", "Bound", "Call", "LocalCall", "PatternMismatch", "Rule",
    "Strategy", "Units", "call_key", "call_of", "count_experts", "count_whole", "fill_in_units",
    "find_strategy", "mean_share", "multiply_adds", "parse_pattern", "selected_share", "shard_units",
    "strategies",
]  # fmt: skip
