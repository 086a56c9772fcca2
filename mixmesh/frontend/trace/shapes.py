"""Passes for a planned model that is traced again, for another shape of its batch."""

from __future__ import annotations

from collections.abc import Callable

from ...lang.ir import Graph, Node, Program, Ref
from . import PASSES
from .build import Builder, Rule, rewrite
from .simplify import IDENTITY_RULES, drop_identities


def passes_for(planned: Program) -> tuple[Callable[[Graph], Graph], ...]:
    """The usual passes, except that they keep the operators of the planned program that do nothing for this
    shape, such as an ``expand`` of one row to one: so both have the same operators."""
    planned_names = planned.types.keys()

    def kept(rule: Rule) -> Rule:
        def apply(build: Builder, node: Node) -> tuple[Ref | None, ...] | None:
            return None if planned_names & {*node.results} else rule(build, node)

        return apply

    rules = {op: kept(rule) for op, rule in IDENTITY_RULES.items()}

    def drop_other_identities(graph: Graph) -> Graph:
        return rewrite(graph, rules)

    return tuple(drop_other_identities if step is drop_identities else step for step in PASSES)
