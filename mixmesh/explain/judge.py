"""Seconds of an alternative's step: simulated as the plan runs, in its micro-steps and with its owners."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..cost import CostModel
from ..errors import PlanError
from ..lang.ir import Program, Replicate, Samples, separable, support, wgrad_of, with_wgrads, with_whole_rows
from ..lang.optimizer_states import OptimizerStates
from ..lang.plan_file import MicroBatch, Plan, accumulates, accumulation
from ..passes.recomputation import recomputed
from ..planner.budget import AMPLE
from ..planner.passes.flat import flat
from ..planner.passes.order import ordered
from ..planner.passes.rematerialisation import fewest
from ..planner.proposal import Proposal
from ..planner.task import Task
from ..planner.two_level import recomputed_within
from ..search.placement.split import is_joined


@dataclass(frozen=True)
class Judged:
    """A program as the simulator sees it. ``at_once``: why it takes no micro-steps where the plan does."""

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
    """The simulator for one plan."""

    def __init__(self, plan: Plan, costs: CostModel, optimizer_states: OptimizerStates) -> None:
        self.plan = plan
        self.task = Task(plan.program.graph, costs, optimizer_states, lambda _: None)
        self.task.dtypes = plan.program.dtypes
        # sums are made as in the plan
        self.task.levels, self.task.direct_bytes = plan.program.levels, plan.program.direct_bytes
        self.accumulates = accumulates(plan.micro_batches)

    def planned(self) -> Judged:
        """The plan as it is."""
        simulation = self.task.simulation(self.plan.program, accumulating=self.accumulates)
        rows = self.plan.micro_batches if self.accumulates else None
        return Judged(self.task.judge("plan", self.plan.program, simulation, micro_batches=rows))

    def best(self, program: Program) -> Judged:
        """The program in its best buckets, with owners and weight gradients as in the plan, in as many
        micro-steps if it can run in them; if it does not fit, with regions that are computed again."""
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
        """In the fastest of its orders, as plans are that take the batch at once."""
        if self.accumulates:
            return judged
        return replace(judged, proposal=flat(self.task, ordered(self.task, judged.proposal, AMPLE)))

    def in_micro_steps(self, program: Program) -> Judged:
        refused = ""
        if self.accumulates:
            try:
                program = with_whole_rows(program)
                simulation = self.task.simulation(program, accumulating=True)
                rows = self.micro_batches(program, simulation.samples)
                return Judged(self.task.best_buckets("explain", program, simulation, rows))
            except PlanError as error:
                refused = error.message
        return Judged(self.task.best_buckets("explain", program), refused)

    def micro_batches(self, program: Program, samples: Samples) -> tuple[MicroBatch, ...]:
        """The plan's, or as many equal ones of other shares. Raises PlanError if these are not whole."""
        planned = self.plan.micro_batches
        if samples.counts != tuple(sum(m.sizes) for m in planned):
            steps = max(m.steps for m in planned)
            rows = (n // steps for n in samples.counts)
            planned = tuple(MicroBatch(n, steps, n) if n else MicroBatch(0, 0, 0) for n in rows)
        accumulation(replace(self.plan, program=program, micro_batches=planned))
        return planned


def with_owners_of(plan: Program, made: Program) -> Program:
    """``made`` with those owners of gradients that the plan has, of parameters that are held as there."""
    held = {i.result: i for i in plan.params if i.attr("owned") is not None}
    ratios = dict(made.ratios)
    out = []
    for i in made.instructions:
        like = held.get(i.results[0]) if i.op == "param" else None
        if like is None or not alike(plan, like, made, i):
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
    return replace(made, ratios=tuple(ratios.items()), instructions=tuple(out)) if held else made


def with_wgrads_of(plan: Program, made: Program) -> Program:
    """``made`` with those gradients of weights apart that the plan has apart, where they can be."""
    when = {i.results[0]: wgrad for i in plan.instructions if (wgrad := wgrad_of(i)) is not None}
    named = ((n, made.instructions[n].result) for n in (separable(made) if when else ()))
    return with_wgrads(made, {n: when[name] for n, name in named if name in when})


def alike(plan: Program, one, made: Program, other) -> bool:
    """Whether two programs hold a parameter whole on the same ranks, with gradients that are summed."""
    whole = isinstance(one.type.placement, Replicate) and isinstance(other.type.placement, Replicate)
    owners = support(plan.ratio_of[one.attr("owned")])
    summed = other.result not in made.factored and other.args[0] not in made.copies
    return whole and summed and {*owners} <= {*made.participants(other.type)}
