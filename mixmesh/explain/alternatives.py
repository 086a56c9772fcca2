"""Each placement of one tensor with the cheapest program that has it: searched, bucketed, simulated.

The search is the planner's, at the same prices and under the plan's ratio, with one difference: a value may
only be made, a leaf only be loaded, as it is asked to be. What follows from that for the rest of the program
is the search's to find; later redistributions of the tensor are free to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from ..baselines import DATA_PARALLEL, fully_sharded
from ..buckets import bucketings, numbered
from ..check import check_plan
from ..cluster import Cluster
from ..cost import CostModel, Profile
from ..errors import InputError
from ..factors import best_factors
from ..ir import Instruction, Placement, Program, even_ratio, print_instruction, support
from ..plan_file import Plan
from ..planner.hap import GRADIENT_PRICES, MAX_STATES, WEIGHT
from ..planner.task import HEADROOM, LARGER_BYTES, SMALLER_BYTES, USUAL_BYTES
from ..ratios import usable_bytes
from ..simulator import Simulation, Timeline
from ..synthesis import Choices, NoProgram, Prices, Problem, emit, search
from ..synthesis.choices import P, R, code_of
from .changes import Collective, collectives_between, differing
from .names import find_tensor, in_all_layers
from .reasons import placement_text, why_not
from .summary import summary_of

SIZES_BYTES = (*SMALLER_BYTES, USUAL_BYTES, *LARGER_BYTES)  # of buckets
SAME = 1e-6  # of a step: less is rounding


@dataclass(frozen=True)
class Alternative:
    """One placement of the tensor. Where ``program`` is None there is none, and ``impossible`` says why.

    ``difference_s`` is to the plan's step. ``num_differing``, ``added``, ``removed`` and
    ``memory_difference_bytes`` (per rank, of the peak) are to the program of the plan's own placement.
    """

    placement: str
    is_plan: bool
    impossible: str = ""
    program: Program | None = field(default=None, repr=False)
    step_s: float = float("inf")
    fits: bool = False
    difference_s: float = float("inf")
    num_differing: int = 0
    added: tuple[Collective, ...] = ()
    removed: tuple[Collective, ...] = ()
    memory_difference_bytes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """Where a tensor stands in a plan, and what other placements of it would cost.

    ``tensors``: the tensor asked for, and with it those of the other layers that were forced alike.
    ``made`` and ``used`` are instructions of the plan. ``can_be_improved``: one of
    the programs is faster than the plan's, by more than rounding.
    """

    tensors: tuple[str, ...]
    op: str
    location: str
    placement: str
    made: Instruction
    used: tuple[Instruction, ...]
    step_s: float
    alternatives: tuple[Alternative, ...]
    can_be_improved: bool
    notes: tuple[str, ...]
    summary: str

    @property
    def own(self) -> Alternative:
        return next(a for a in self.alternatives if a.is_plan)

    @property
    def lines(self) -> tuple[str, ...]:
        """The instructions of the plan that make, move and use the tensor."""
        return tuple(map(print_instruction, (self.made, *self.used)))


def explain_tensor(
    plan: Plan,
    cluster: Cluster,
    tensor: str,
    *,
    profile: Profile | None = None,
    all_layers: bool = False,
    optimizer_states: int = 2,
) -> Explanation:
    """What every placement of a tensor of ``plan`` would cost, its own included.

    ``tensor`` is a value of the program, the path of a parameter, or the end of one of them. Forces the
    placement of this tensor alone, or with ``all_layers`` of all that stand in its place in other layers.
    Raises InputError for a tensor that is not there and for a plan of two levels, PlanError for a plan of
    another cluster.
    """
    check_plan(plan, cluster)
    if plan.planner == "two-level" or plan.program.copies:
        raise InputError(
            "alternatives are those of one program for all devices, and this plan has one per machine",
            expected="a plan of one level",
            got=f"a plan by {plan.planner}",
            hint="mixmesh plan JOB --cluster C.toml --planner hap, and explain that",
        )
    name = find_tensor(plan.program, tensor)
    graph = plan.program.graph
    names = in_all_layers(graph, name) if all_layers else (name,)
    question = Question(plan.program, CostModel(cluster, profile), name, names, optimizer_states)
    alternatives = tuple(question.alternatives())
    planned = question.planned
    least_s = min((a.step_s for a in alternatives if a.fits or not planned.fits), default=float("inf"))
    made = plan.program.producers[name]
    return Explanation(
        tensors=(name, *(other for other in names if other != name)),
        op=made.op,
        location=made.location,
        placement=placement_text(question.own),
        made=made,
        used=tuple(_uses(plan.program, name)),
        step_s=planned.timeline.step_s,
        alternatives=alternatives,
        can_be_improved=least_s < planned.timeline.step_s * (1 - SAME),
        notes=tuple(_notes(plan, question, profile)),
        summary=summary_of(alternatives, planned.timeline.step_s, len(names)),
    )


@dataclass(frozen=True)
class Judged:
    """A program as the simulator sees it."""

    program: Program
    timeline: Timeline
    fits: bool

    @property
    def key(self) -> tuple[bool, float]:
        return (not self.fits, self.timeline.step_s)


class Question:
    """One tensor of one program: the search problems with its placement forced, and their best programs."""

    def __init__(
        self, program: Program, costs: CostModel, name: str, names: tuple[str, ...], optimizer_states: int
    ) -> None:
        self.program, self.costs, self.optimizer_states = program, costs, optimizer_states
        self.name, self.names = name, names
        self.ratio = program.ratios[0][1] if program.ratios else even_ratio(program.world_size)
        self.graph = program.graph
        # a value of one layer alone is forced in that layer alone: then no two layers are equal
        self.choices = Choices(self.graph, costs, folded=len(names) > 1)
        self.values = tuple(self.choices.ids[n] for n in names if n in self.choices.ids)
        if name not in self.choices.ids:  # of a layer that is folded: another stands for it
            self.name = self.choices.names[self.values[0]]
        self.own = self._code(program, name)
        self._searched: dict[int, tuple[Program, ...]] = {}

    @cached_property
    def planned(self) -> Judged:
        return self.judge(self.program, Simulation(self.program, self.costs, self.optimizer_states))

    def alternatives(self) -> Iterator[Alternative]:
        """Of every placement: R, S(d) for every dim, P."""
        own = self._own()
        for code in (R, *range(2, 2 + len(self.graph.types[self.name].shape)), P):
            if code == self.own:
                yield self._alternative(code, own, own)
                continue
            found = self.cheapest(code)
            if isinstance(found, str):
                yield Alternative(placement_text(code), False, impossible=found)
            else:
                yield self._alternative(code, found, own)

    def _own(self) -> Judged:
        """The cheapest program with the plan's own placement: the plan's, or what the search finds now."""
        found = self.cheapest(self.own)
        if isinstance(found, Judged) and found.key < self.planned.key:
            if found.timeline.step_s < self.planned.timeline.step_s * (1 - SAME) or not self.planned.fits:
                return found
        return self.planned

    def _alternative(self, code: int, found: Judged, own: Judged) -> Alternative:
        added, removed = collectives_between(own.program, found.program, self.costs)
        peaks = zip(found.timeline.peak_memory_bytes, own.timeline.peak_memory_bytes)
        return Alternative(
            placement=placement_text(code),
            is_plan=code == self.own,
            program=found.program,
            step_s=found.timeline.step_s,
            fits=found.fits,
            difference_s=found.timeline.step_s - self.planned.timeline.step_s,
            num_differing=differing(own.program, found.program),
            added=added,
            removed=removed,
            memory_difference_bytes=tuple(a - b for a, b in peaks),
        )

    def cheapest(self, code: int) -> Judged | str:
        """The cheapest program that holds the tensor as ``code``; why there is none, if there is none."""
        found = [self.best_buckets(p) for p in dict.fromkeys(self.programs(code))]
        if not any(p.fits for p in found):
            # what is not asked about may be stored in shards where memory is short
            rest = {p.result for p in self.graph.params} - set(self.names)
            found += [self.best_buckets(fully_sharded(p.program, rest)) for p in found]
        if not found:
            plain = self.problem(code, GRADIENT_PRICES[0])
            reasons = (why_not(plain, plain.names[value], code) for value in self.values)
            return next(filter(None, reasons), "no program of the whole model has it so")
        best = min(found, key=lambda j: j.key)
        factored = best_factors(best.program, self.costs, lambda p: self.best_buckets(p).key)
        return best if factored is None else min(best, self.best_buckets(factored), key=lambda j: j.key)

    def programs(self, code: int) -> Iterator[Program]:
        """What the search finds, and for a parameter also what gathers it ahead of its use."""
        yield from self.searched(code)
        if code == 2 and self.graph.producers[self.name].op == "param" and len(support(self.ratio)) > 1:
            stored = (fully_sharded(p, self.names) for p in self.searched(R))
            yield from (p for p in stored if self._code(p, self.name) == code)

    def searched(self, code: int) -> tuple[Program, ...]:
        if code not in self._searched:
            self._searched[code] = tuple(self._search(code))
        return self._searched[code]

    def _search(self, code: int) -> Iterator[Program]:
        for price in (None, *GRADIENT_PRICES):
            problem = self.problem(code, price)
            leaves = [value for value in self.values if value in problem.leaves]
            if not all(problem.options) or any(problem.load(value, code) is None for value in leaves):
                continue
            limit = MAX_STATES + 2 * len(problem.steps)
            try:
                yield emit(problem, search(problem, weight=WEIGHT, max_states=limit))
            except NoProgram:
                continue

    def problem(self, code: int, price: float | None) -> Problem:
        """The search problem with the placement forced; without a price that of data parallelism."""
        return Problem(
            self.graph,
            self.costs,
            self.ratio,
            prices=DATA_PARALLEL if price is None else Prices(gradient_sync=price),
            optimizer_states=self.optimizer_states,
            shard_params=price is not None,
            batch_only=price is None,
            choices=self.choices,
            forced=dict.fromkeys(self.values, code),
        )

    def best_buckets(self, program: Program) -> Judged:
        simulation = Simulation(program, self.costs, self.optimizer_states)
        variants = [numbered(program, b) for b in bucketings(program, SIZES_BYTES, simulation.summed)]
        return min((self.judge(p, simulation) for p in variants), key=lambda j: j.key)

    def judge(self, program: Program, simulation: Simulation) -> Judged:
        timeline = simulation.run(program)
        fits = all(
            peak <= usable_bytes(self.costs, rank, HEADROOM)
            for rank, peak in enumerate(timeline.peak_memory_bytes)
        )
        return Judged(program, timeline, fits)

    def _code(self, program: Program, name: str) -> int:
        """How a program makes or loads a tensor of its graph."""
        return code_of(_held(program, self.graph, name))


def _held(program: Program, graph, name: str) -> Placement:
    node = graph.producers[name]
    if not node.is_leaf:
        return program.types[name].placement
    (leaf,) = (i for i in program.instructions if i.op == node.op and i.args == node.args)
    return leaf.type.placement


def _uses(program: Program, name: str) -> Iterable[Instruction]:
    """What moves a tensor and what uses it, in order."""
    names = {name}
    for i in program.instructions:
        if any(used in names for used in i.inputs):
            yield i
            if i.is_redistribution:
                names.update(r for r in i.results if r is not None)


def _notes(plan: Plan, question: Question, profile: Profile | None) -> Iterator[str]:
    planned = question.planned.timeline.step_s
    if abs(planned - plan.predicted_step_s) > 0.01 * plan.predicted_step_s:
        if plan.cost_source.startswith("profile") and profile is None:
            yield "the plan was made with measured costs, these are estimates: add --profile P.json"
        else:
            yield f"the plan's own prediction is another, {plan.predicted_step_s * 1e3:.3g} ms"
    if len(plan.program.ratios) > 1:
        yield f"the alternatives share everything out by {plan.program.ratios[0][0]} alone"
    if any(i.attr("owned") for i in plan.program.params):
        yield "the alternatives have no owners of gradients (ZeRO-1/2), which costs them memory"
    if plan.micro_batches is not None:
        yield "the plan and the alternatives are compared without micro-steps"
