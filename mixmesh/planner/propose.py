"""Collects proposals: from the planners that are asked, on all devices and on sets of machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from ..lang.ir import regions
from .budget import AMPLE, AUTO, EACH, SEARCH_S, Budget
from .device_sets import machine_sets
from .hap import DDP_TUNED
from .learned import has_torch_geometric
from .near import REDUCED_AT_ONCE, reduced_near
from .options import Options
from .pipelines import MOST_DEVICES
from .planners import BY_NAME, PIPELINE, ROWS, OnSets, Planner, Propose, When
from .proposal import Proposal
from .task import Task
from .two_level import machines_of

# relative to the fastest step that lacks only memory: slower plans that fit are not enough, and the planners
# that save memory are asked too
CRAMPED = 1.5
SEARCHED = frozenset({DDP_TUNED, "hap"})  # the planners whose programs tell whether memory is short
LEADING = 4  # factor on the budget for sets of machines if the planner leads on all machines


@dataclass(frozen=True)
class Asked:
    """The planners to ask; those to ask only ``in_need``, when nothing of the others fits, or only something
    much slower than what does not; and the budget. ``is_auto``: the user named no planner."""

    rows: tuple[Planner, ...]
    in_need: tuple[Planner, ...]
    budget: Budget
    is_auto: bool

    def is_searched(self, waiting: Sequence[Planner]) -> bool:
        """Whether ``auto`` has asked those whose programs tell if memory is short."""
        return self.is_auto and SEARCHED.isdisjoint(row.name for row in waiting)

    def propose(self, row: Planner, task: Task) -> Propose:
        """The proposals of a planner; only the most hopeful ones if the budget is short, or after a search
        that has proposed something that fits."""
        follows = not self.is_auto and self.rows[0].is_open_ended and row is not self.rows[0]
        is_brief = not self.budget.is_ample or (follows and task.best_s < float("inf"))
        return row.briefly if is_brief and row.briefly is not None else row.propose


def asked_by(options: Options) -> Asked:
    """The planners that ``options`` ask for."""
    search_s = SEARCH_S if options.search_s is None else options.search_s
    if options.planner != "auto":
        row = BY_NAME[options.planner]
        rows = (row, PIPELINE) if row.is_open_ended else (row,)
        return Asked(rows, (), Budget(AMPLE.visits, search_s), is_auto=False)
    usual = tuple(row for row in ROWS if row.asked is When.ALWAYS)
    in_need = tuple(row for row in ROWS if row.asked is When.IN_NEED)
    if options.search_s is None:
        return Asked(usual, in_need, AUTO, is_auto=True)
    searching = tuple(row for row in ROWS if row.asked is When.IN_A_SEARCH)
    able = tuple(row for row in searching if not row.is_learned or has_torch_geometric())
    each_s = search_s / sum(row.is_open_ended for row in able)
    return Asked((*usual, *in_need, *able), (), Budget(AMPLE.visits, each_s), is_auto=True)


def proposals_of(task: Task, asked: Asked) -> list[Proposal]:
    """Proposals of the planners that are asked. The best of each is in ``task.proposed``."""
    best = task.proposed
    every: list[Proposal] = []
    to_reduce: list[Proposal] = []
    waiting, is_short = [*asked.rows, *asked.in_need], False
    while waiting:
        if not (is_short and is_small(task)):  # where there is the time, once for all
            is_short = asked.is_searched(waiting) and lacks_memory(task, every)
        row, propose = next_of(waiting, task, asked, is_short=is_short)
        waiting.remove(row)
        if row in asked.in_need and not is_short:
            continue
        task.progress(f"planning: {row.name}")
        proposals = list(propose(task))
        if asked.is_auto and row.on_sets is not None:
            leads = any(p.feasible and p.timeline.step_s <= task.best_s for p in proposals)
            proposals += on_machine_sets(task, row.briefly or row.propose, row.on_sets, leads=leads)
        every += proposals
        if proposals:
            best[row.name] = min(proposals, key=lambda p: p.key)
        if row.name in REDUCED_AT_ONCE:
            to_reduce += proposals
            # a search must not compete with reductions before its own programs have had theirs
            if to_reduce and not (row.name == DDP_TUNED and BY_NAME["hap"] in asked.rows):
                reduced = reduced_near(task, to_reduce)
                every += reduced
                task.record(reduced)
    return every


def next_of(
    waiting: Sequence[Planner], task: Task, asked: Asked, *, is_short: bool
) -> tuple[Planner, Propose]:
    """The planner to ask next, and how. Usually it is the first.

    Where memory is short after the search, all pipelines are tried at once: they save memory without much
    communication, and a fast step that fits spares the planners after them most of their work. On a large
    cluster there are many, and ZeRO comes first.
    """
    row = waiting[0]
    if is_short and PIPELINE in waiting:
        if is_small(task) or BY_NAME["poplar"] not in waiting:
            return PIPELINE, PIPELINE.propose
        row = next(row for row in waiting if row is not PIPELINE)
    return row, asked.propose(row, task)


def is_small(task: Task) -> bool:
    """Whether there is the time for all pipelines on these devices."""
    return len(task.ranks) <= MOST_DEVICES


def lacks_memory(task: Task, every: Sequence[Proposal]) -> bool:
    """Whether nothing fits well: everything that fits rematerialises activations, and so may be far from the
    best that fits, or takes much longer than the fastest that only lacks memory."""
    fitting = [p.timeline.step_s for p in task.proposed.values() if p.feasible and not regions(p.program)]
    cramped = [p.timeline.step_s for p in every if not task.has_room(p.timeline)]
    return not fitting or min(fitting) > CRAMPED * min(cramped, default=inf)


def on_machine_sets(task: Task, propose: Propose, on_sets: OnSets, *, leads: bool) -> Iterator[Proposal]:
    """Proposals for sets of machines that may be faster than all of them, by the lower bound of their steps,
    for as many sets as the budget pays for. ``leads``: the planner's plan for all machines is the fastest so
    far; sets of most of them then come first, and otherwise those with the lowest bounds. With equal bounds,
    sets with the fastest links inside machines come first."""
    visits = EACH.part(on_sets.share * (LEADING if leads else 1)).visits
    views = {ranks: task.on(ranks) for ranks in machine_sets(task) if ranks != task.ranks}
    least_s = {ranks: on_sets.least_s(view) for ranks, view in views.items()}
    worth = {ranks: seconds for ranks, seconds in least_s.items() if seconds is not None}
    machines = {ranks: len(machines_of(views[ranks])) for ranks in worth}
    cluster = task.costs.cluster

    def slowest_link(ranks: tuple[int, ...]) -> float:
        return min(cluster.machines[m].link_bytes_per_s for m in {*map(cluster.machine_index_of, ranks)})

    def turn(ranks: tuple[int, ...]) -> tuple[float, ...]:
        return -machines[ranks] if leads else 0, worth[ranks], -slowest_link(ranks)

    for ranks in sorted(worth, key=turn):
        needed = len(task.graph.nodes) * machines[ranks]
        if worth[ranks] < task.best_s and needed <= visits:
            visits -= needed
            yield from propose(views[ranks])
