"""Passes for a model that is traced once more, for another shape of its batch than it was planned with."""

from __future__ import annotations

from collections.abc import Callable

from ...lang.ir import Graph, Program
from . import PASSES
from .build import rewrite
from .simplify import IDENTITY_RULES, drop_identities


def passes_for(planned: Program) -> tuple[Callable[[Graph], Graph], ...]:
    """The usual passes, but what the planned program computes stays though it does nothing for this shape (an
    ``expand`` of one row to one): so that both have the same operators."""
    planned_names = planned.types.keys()

    def kept(rule):
        return lambda build, node: None if planned_names & {*node.results} else rule(build, node)

    rules = {op: kept(rule) for op, rule in IDENTITY_RULES.items()}

    def drop_other_identities(graph: Graph) -> Graph:
        return rewrite(graph, rules)

    return tuple(drop_other_identities if step is drop_identities else step for step in PASSES)
