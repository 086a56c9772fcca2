"""Checks that a plan belongs to this cluster and to this model."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from ...cluster import Cluster
from ...errors import PlanError
from ..ir import Graph, ValueType
from ..plan_file import Plan, accumulation
from ..plan_header import AGAIN

SHOWN = 4


def check_plan(
    plan: Plan, cluster: Cluster | None = None, graph: Graph | None = None, where: str = ""
) -> None:
    """Raises PlanError if the plan was made for another cluster or another model (with the differences), or
    if its micro-batches do not fit its program."""
    try:
        accumulation(plan)
    except PlanError as error:
        error.where = error.where or where
        raise
    if cluster is not None:
        _check_cluster(plan, cluster, where)
    if graph is not None:
        _check_graph(plan, graph, where)


def _check_cluster(plan: Plan, cluster: Cluster, where: str) -> None:
    if plan.cluster_fingerprint == cluster.fingerprint:
        return
    planned, cluster_size = plan.program.world_size, cluster.world_size
    differs = ["other figures of a device or a link"]
    if planned != cluster_size:
        differs = [f"{planned} devices, not {cluster_size}"]
    raise PlanError(
        "the plan was made for another cluster",
        expected=f'"{plan.cluster_name}" ({plan.cluster_fingerprint}), {planned} devices',
        got=f'"{cluster.name}" ({cluster.fingerprint}), {cluster_size} devices: the plan has {differs[0]}',
        where=where,
        hint=(AGAIN, *_calibration_hint(cluster)),
    )


def _calibration_hint(cluster: Cluster) -> tuple[str, ...]:
    calibrated = dict.fromkeys(d.name for d in cluster.devices if d.calibrated)
    if not calibrated:
        return ()
    return (f"MIXMESH_DEVICES=none, if it was made before the calibration of {', '.join(calibrated)}",)


def _check_graph(plan: Plan, graph: Graph, where: str) -> None:
    if plan.graph_fingerprint and plan.graph_fingerprint == graph.fingerprint:
        _check_leaves(plan, graph, where)  # an edit may have changed the leaves nevertheless
        return
    differences = list(_differences(plan.program.graph, graph))
    if not differences:
        return
    shown, more = differences[:SHOWN], len(differences) - SHOWN
    raise PlanError(
        "the plan was made for another model or batch",
        expected="; ".join(e for e, _ in shown) + (f"; and {more} more" if more > 0 else ""),
        got="; ".join(g for _, g in shown),
        where=where,
        hint=f"plan again with this job: {AGAIN}",
    )


def _check_leaves(plan: Plan, graph: Graph, where: str) -> None:
    names_by_op = {op: [n.args[0] for n in graph.nodes if n.op == op] for op in ("param", "buffer", "input")}
    for i in plan.program.instructions:
        if i.op in names_by_op and i.args[0] not in names_by_op[i.op]:
            near = difflib.get_close_matches(str(i.args[0]), names_by_op[i.op], 2)
            raise PlanError(
                f'the plan loads {i.op}("{i.args[0]}"), which this job does not have',
                expected=" or ".join(near) or f"one of {len(names_by_op[i.op])} names of the job",
                got=str(i.args[0]),
                where=f"{where}:{i.line}" if where and i.line else where,
                hint=f"undo the edit, or plan again: {AGAIN}",
            )


def _differences(planned: Graph, actual: Graph) -> Iterator[tuple[str, str]]:
    """Yields pairs of texts, planned and actual: all leaves that differ, or else the first operator that
    does."""
    differs = False
    for op, label in (("param", "parameter"), ("buffer", "buffer"), ("input", "input")):
        ours = {n.args[0]: n.types[0] for n in planned.nodes if n.op == op}
        theirs = {n.args[0]: n.types[0] for n in actual.nodes if n.op == op}
        for name in {**ours, **theirs}:
            if ours.get(name) != theirs.get(name):
                differs = True
                yield _shown(label, name, ours.get(name)), _shown(label, name, theirs.get(name))
    if differs:
        return
    own_operators, other_operators = _operators(planned), _operators(actual)
    for mine, other in zip(own_operators, other_operators):
        if mine != other:
            yield _line(mine), _line(other)
            return
    if len(own_operators) != len(other_operators):
        yield f"{len(own_operators)} operators", f"{len(other_operators)} operators"


def _shown(label: str, name: str, value: ValueType | None) -> str:
    return f"{label} {name} {value}" if value is not None else f"no {label} {name}"


def _operators(graph: Graph) -> list[tuple]:
    return [(n.op, n.types) for n in graph.nodes if not n.is_leaf]


def _line(operator: tuple) -> str:
    op, types = operator
    return f"{op} : {', '.join(map(str, types))}" if types else op
