"""Gradient synchronisation, measured: where all_reduce, owners' shards and a parameter server are each the
fastest.

Data parallelism in proportion to speed, with gradients in buckets of 1 MB: all synchronised in one way, with
``levels`` too if machines have several devices; in the way that the simulator chooses (``ours``); and mixed
as it would choose per bucket (``mixmesh.passes.sync``). The clusters differ in what decides: the number of
ranks, the rate of the link, and the time between the ranks' readiness (``late``: even shares of the batch on
unequal devices). Values of a few kilobytes, in a network with batch norm, are summed by the library's
collective, as in plans for CPUs (``ours``), or by one message between each two ranks (``direct``).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from mixmesh.cost import CostModel
from mixmesh.cost.direct import best_direct_bytes
from mixmesh.cost.levels import machine_sizes
from mixmesh.cost.sums import gradient_sums
from mixmesh.lang.ir import Graph, Levels, Program, even_ratio
from mixmesh.passes.buckets import with_buckets
from mixmesh.passes.sync import best_sync, options
from mixmesh.passes.zero import ownable, with_owners
from mixmesh.search.baselines import data_parallel, proportional_ratio
from mixmesh.simulator import simulate

from .contest import OURS, Contest
from .measure import cluster_text
from .training_cases import AS_FAST

BUCKET_BYTES = 1e6
ALL_REDUCE, LEVELS, SHARDED, SERVER, MIXED = "all_reduce", "levels", "sharded", "server", "mixed"
DIRECT = "direct"
DIRECT_BYTES = 2**14
ABOUT_AS_FAST = 0.95  # where both are expected to be equal, on a machine that others use too


def ways(even: bool, graph: Graph, costs: CostModel) -> Mapping[str, Program]:
    ratio = even_ratio(costs.cluster.world_size) if even else proportional_ratio(graph, costs)
    program = with_buckets(data_parallel(graph, costs, ratio), BUCKET_BYTES)

    def step_s(p: Program) -> float:
        return simulate(p, costs).step_s

    can = [i.result for i in ownable(program)]
    _, *shares = dict.fromkeys(options(program, costs, gradient_sums(program)[0]))
    owned = [with_owners(program, dict.fromkeys(can, s)) for s in shares]
    rooted = [max(s) == 1 for s in shares]
    forms = {ALL_REDUCE: program}
    if (sizes := machine_sizes(costs.cluster)) != (1,) * len(sizes):
        forms[LEVELS] = program.changed(levels=Levels(sizes))
    return {
        **forms,
        SHARDED: min((p for p, one in zip(owned, rooted) if not one), key=step_s),
        SERVER: min((p for p, one in zip(owned, rooted) if one), key=step_s),
        MIXED: best_sync(program, costs, step_s, mixed=True),
        OURS: min((best_sync(form, costs, step_s, mixed=False) for form in forms.values()), key=step_s),
    }


def _contest(name: str, gbit_per_s: str, *machines: tuple[str, ...], late: bool = False) -> Contest:
    levels = (LEVELS,) if any(len(machine) > 1 for machine in machines) else ()
    targets = tuple((way, AS_FAST) for way in (ALL_REDUCE, *levels, SHARDED, SERVER))
    return Contest(name, "bert", cluster_text(gbit_per_s, *machines), partial(ways, late), targets)


def small_sums(graph: Graph, costs: CostModel) -> Mapping[str, Program]:
    program = with_buckets(data_parallel(graph, costs, proportional_ratio(graph, costs)), BUCKET_BYTES)
    return {
        DIRECT: program.changed(direct_bytes=DIRECT_BYTES),
        OURS: program.changed(direct_bytes=best_direct_bytes(costs)),
    }


FOUR = ("0.30", "0.30"), ("0.20", "0.20")
CASES = (
    _contest("pair", "0.5", ("0.50",), ("0.40",)),
    _contest("thin-pair", "0.1", ("0.50",), ("0.40",)),
    _contest("late-pair", "0.5", ("0.60",), ("0.20",), late=True),
    _contest("four", "0.5", *FOUR),
    _contest("thin-four", "0.1", *FOUR),
    Contest("small-sums", "resnet", cluster_text("0.5", *FOUR), small_sums, ((DIRECT, ABOUT_AS_FAST),)),
)
QUICK = CASES[1:2]
