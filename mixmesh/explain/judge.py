"""Judges alternatives by the simulator, with the micro-batches and the shard owners of the plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..cost import CostModel
from ..errors import PlanError
from ..lang.ir import (
    Instruction,
    Program,
    Replicate,
    Samples,
    separable,
    support,
    wgrad_of,
    with_wgrads,
    with_whole_rows,
)
from ..lang.plan_file import MicroBatch, Plan, accumulates, accumulation
from ..passes.recomputation import recomputed
from ..planner.budget import AMPLE
from ..planner.passes.flat import flat
from ..planner.passes.order import ordered
from ..planner.passes.rematerialisation import fewest
from ..planner.proposal import Proposal
from ..planner.task import Task
from ..planner.two_level import recomputed_within
from ..search.placement.sets import is_joined


@dataclass(frozen=True)
class Judged:
    """A program with the simulator's result. ``at_once`` is the reason why it takes no micro-batches although
    the plan does."""

    proposal: Proposal
    at_once: str = ""

    @property
    def program(self) -> Program:
        return self.proposal.program

    @property
    def step_s(self) -> float:
        return self.proposal.timeline.step_s

    @property
    def fits(self) -> bool:
        return self.proposal.feasible

    @property
    def key(self) -> tuple[bool, float]:
        return self.proposal.key


class Judge:
    """Simulates other programs instead of a plan's own."""

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        self.plan = plan
        self.task = Task(plan.program.graph, costs, plan.optimizer_states, lambda _: None)
        self.task.dtypes = plan.program.dtypes
        # gradients are reduced by the plan's algorithms
        self.task.levels, self.task.direct_bytes = plan.program.levels, plan.program.direct_bytes
        self.accumulates = accumulates(plan.micro_batches)

    def planned(self) -> Judged:
        """The plan itself, judged."""
        simulation = self.task.simulation(self.plan.program, accumulating=self.accumulates)
        rows = self.plan.micro_batches if self.accumulates else None
        return Judged(self.task.judge("plan", self.plan.program, simulation, micro_batches=rows))

    def best(self, program: Program) -> Judged:
        """Judges a program with its best buckets, and with those of the plan's shard owners, split weight
        gradients and micro-batches that it supports; if it does not fit in memory, regions are
        rematerialised."""
        candidate = self.in_micro_steps(self.as_planned(replace(program, dtypes=self.plan.program.dtypes)))
        if not candidate.fits:
            recompute = recomputed_within if is_joined(program) else recomputed
            again = self.in_micro_steps(self.as_planned(recompute(candidate.program)))
            if again.fits:
                return replace(again, proposal=fewest(self.task, again.proposal))
        return candidate

    def as_planned(self, program: Program) -> Program:
        return with_wgrads_of(self.plan.program, with_owners_of(self.plan.program, program))

    def ordered(self, judged: Judged) -> Judged:
        """Puts the program into its fastest order, as planning does to plans without micro-batches."""
        if self.accumulates:
            return judged
        return replace(judged, proposal=flat(self.task, ordered(self.task, judged.proposal, AMPLE)))

    def in_micro_steps(self, program: Program) -> Judged:
        refused = ""
        if self.accumulates:
            try:
                program = with_whole_rows(program)
                simulation = self.task.simulation(program, accumulating=True)
                assert simulation.samples is not None  # the plan accumulates
                rows = self.micro_batches(program, simulation.samples)
                return Judged(self.task.best_buckets("explain", program, simulation, rows))
            except PlanError as error:
                refused = error.message
        return Judged(self.task.best_buckets("explain", program), refused)

    def micro_batches(self, program: Program, samples: Samples) -> tuple[MicroBatch, ...]:
        """The plan's micro-batches, or the same number of equal ones for other shares. Raises PlanError if
        these shares cannot be divided."""
        planned = self.plan.micro_batches or ()
        if samples.counts != tuple(sum(m.sizes) for m in planned):
            steps = max(m.steps for m in planned)
            rows = (n // steps for n in samples.counts)
            planned = tuple(MicroBatch(n, steps, n) if n else MicroBatch(0, 0, 0) for n in rows)
        accumulation(replace(self.plan, program=program, micro_batches=planned))
        return planned


def with_owners_of(plan: Program, program: Program) -> Program:
    """``program`` with the plan's shard owners, for parameters that both hold alike."""
    held = {i.result: i for i in plan.params if i.attr("owned") is not None}
    ratios = dict(program.ratios)
    out = []
    for i in program.instructions:
        like = held.get(i.result) if i.op == "param" else None
        if like is None or not can_have_owners(plan, like, program, i):
            out.append(i)
            continue
        shares = plan.ratio_of[like.attr("owned")]
        name = next((n for n, r in ratios.items() if r == shares), None)
        if name is None:
            fresh = (like.attr("owned"), *(f"z{k}" for k in range(len(ratios) + 1)))
            name = next(n for n in fresh if n not in ratios)
            ratios[name] = shares
        attrs = tuple((k, v) for k, v in i.attrs if k not in ("owned", "stage"))
        attrs += (("owned", name), ("stage", like.attr("stage")))
        out.append(replace(i, attrs=attrs))
    return replace(program, ratios=tuple(ratios.items()), instructions=tuple(out)) if held else program


def with_wgrads_of(plan: Program, program: Program) -> Program:
    """``program`` with those of the plan's split weight gradients that it can split."""
    when = {i.results[0]: wgrad for i in plan.instructions if (wgrad := wgrad_of(i)) is not None}
    named = ((n, program.instructions[n].result) for n in (separable(program) if when else ()))
    return with_wgrads(program, {n: when[name] for n, name in named if name in when})


def can_have_owners(plan: Program, owned: Instruction, program: Program, param: Instruction) -> bool:
    """Whether ``param`` of a program can have the shard owners of ``owned``, the same parameter in the plan:
    both programs hold it whole, the owners hold it, and its gradient is reduced."""
    whole = isinstance(owned.type.placement, Replicate) and isinstance(param.type.placement, Replicate)
    owners = support(plan.ratio_of[owned.attr("owned")])
    is_reduced = param.result not in program.factored and param.args[0] not in program.copies
    return whole and is_reduced and {*owners} <= {*program.participants(param.type)}
