"""The plans that ``benchmarks poplar`` compares, per ZeRO stage: ours, equal parts as in DeepSpeed, parts by
FLOPS as in Whale, and ours on the fast half alone.

All are judged by the same simulator. Equal and proportional parts are cut into as many micro-batches as
memory requires. Taken at once, as by someone who knows only the large device, they are a separate variant if
that differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel, Profile
from mixmesh.lang.ir import (
    Graph,
    Program,
    Ratio,
    Shard,
    even_ratio,
    make_ratio,
    owned_type,
    stage_of,
    without_needless_names,
)
from mixmesh.lang.optimizer_states import OptimizerStates
from mixmesh.lang.plan_file import MicroBatch, Plan
from mixmesh.passes.algorithms import with_algorithms
from mixmesh.passes.zero import with_stage
from mixmesh.passes.zero.shares import share_out
from mixmesh.planner import whole_counts
from mixmesh.planner.poplar import poplar
from mixmesh.planner.proposal import Proposal
from mixmesh.planner.task import Task
from mixmesh.search.ratios import with_ratio

from .poplar_results import AT_ONCE, EQUAL, HALF, OURS, PROPORTIONAL, Variant


@dataclass(frozen=True)
class Planned:
    """A variant with its plan; PyTorch's own have none."""

    variant: Variant
    plan: Plan | None


def plans(
    graph: Graph,
    cluster: Cluster,
    profile: Profile | None,
    stages: Sequence[int],
    optimizer_states: OptimizerStates,
    *,
    at_once: bool = False,
) -> list[Planned]:
    """The plans of all variants; with ``at_once`` also those predicted not to fit in memory."""

    def task_on(some: Cluster) -> Task:
        return Task(graph, CostModel(some, profile), optimizer_states, lambda _: None)

    task, half = task_on(cluster), task_on(fast_half(cluster))
    flops = make_ratio([d.flop_per_s for d in cluster.devices])
    found = [planned(task, OURS, p) for p in best_of_stages(poplar(task)) if stage_in(p.program) in stages]
    for name, ratio in ((EQUAL, even_ratio(cluster.world_size)), (PROPORTIONAL, flops)):
        if name == PROPORTIONAL and len(set(flops)) == 1:
            continue  # these are equal parts
        for stage in stages:
            owners = even_ratio(cluster.world_size)
            parts = Parts(task, name, with_stage(task.data_parallel(ratio), stage, owners), ratio)
            whole, cut = parts.judged(1), parts.fewest_steps()
            if cut is not None:
                found.append(planned(task, name, cut))
            if at_once and not whole.feasible:
                found.append(planned(task, name, whole, AT_ONCE))
    best = min(poplar(half), key=lambda p: p.key)
    found.append(planned(half, HALF, best))
    return found


def fast_half(cluster: Cluster) -> Cluster:
    """The cluster of only the first machine."""
    return replace(cluster, name=f"{cluster.name}, the first machine", machines=cluster.machines[:1])


def best_of_stages(proposals: Iterator[Proposal]) -> list[Proposal]:
    best: dict[int, Proposal] = {}
    for p in proposals:
        stage = stage_in(p.program)
        if stage not in best or p.key < best[stage].key:
            best[stage] = p
    return [best[stage] for stage in sorted(best)]


def stage_in(program: Program) -> int:
    """The stage of ZeRO that a program's parameters are in."""
    stored = any(isinstance(i.type.placement, Shard) for i in program.params)
    owned = [stage_of(i) for i in program.params if owned_type(program, i) is not None]
    return 3 if stored else max(owned, default=0)


@dataclass(frozen=True)
class Parts:
    """Micro-batches in proportion to ``ratio``, equally many on every device."""

    task: Task
    name: str
    program: Program
    ratio: Ratio

    def fewest_steps(self) -> Proposal | None:
        """The proposal in the fewest micro-batches that fit; None if not even single samples do."""
        too_few, enough = 0, self.task.batch
        best = self.judged(enough)
        if not best.feasible:
            return None
        while enough - too_few > 1:
            steps = (too_few + enough) // 2
            made = self.judged(steps)
            if made.feasible:
                enough, best = steps, made
            else:
                too_few = steps
        return best

    def judged(self, steps: int) -> Proposal:
        rows = split(self.ratio, self.task.batch, steps)
        program = with_ratio(self.program, "r0", make_ratio([sum(row.sizes) for row in rows]))
        several = rows[0].steps > 1
        simulation = self.task.simulation(self.program, accumulating=several)
        return self.task.best_buckets(self.name, program, simulation, rows if several else None)


def split(ratio: Ratio, batch: int, steps: int) -> tuple[MicroBatch, ...]:
    """Splits a batch into at most ``steps`` micro-batches, each divided by the ratio; the last takes the
    rest."""
    sizes = [max(1, round(share * batch / steps)) for share in ratio]
    steps = math.ceil(batch / sum(sizes))
    last = share_out(batch - (steps - 1) * sum(sizes), sizes)
    return tuple(MicroBatch(size, steps, rest) for size, rest in zip(sizes, last))


def planned(task: Task, name: str, proposal: Proposal, setting: str = "") -> Planned:
    ratio, cluster = proposal.program.ratios[0][1], task.costs.cluster
    counts = whole_counts(ratio, task.batch)
    rows = proposal.micro_batches or tuple(MicroBatch(n, int(n > 0), n) for n in counts)
    timeline = proposal.timeline
    variant = Variant(
        name,
        stage_in(proposal.program),
        setting,
        rows,
        timeline.step_s,
        timeline.peak_memory_bytes,
        proposal.feasible,
    )
    plan = Plan(
        with_algorithms(without_needless_names(proposal.program), task.costs),
        name,
        timeline.step_s,
        timeline.peak_memory_bytes,
        cluster.fingerprint,
        cluster.name,
        graph_fingerprint=task.graph.fingerprint,
        micro_batches=proposal.micro_batches,
    )
    return Planned(variant, plan)
