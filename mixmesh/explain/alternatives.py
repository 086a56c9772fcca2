"""Finds the cheapest program for each placement of one tensor: searches, chooses buckets, simulates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..base.units import seconds_text
from ..cluster import Cluster
from ..cost import CostModel, Profile
from ..lang.check import check_plan
from ..lang.ir import Instruction, Program
from ..lang.plan_file import Plan, uses_profile
from ..passes.factors import best_factors
from .changes import collectives_between, num_differing
from .explanation import SAME, Alternative, Explanation
from .judge import Judge, Judged
from .summary import summary_of
from .views import Flat, Joined, Lowered, View, view_of


def explain_tensor(
    plan: Plan,
    cluster: Cluster,
    tensor: str,
    *,
    profile: Profile | None = None,
    all_layers: bool = False,
) -> Explanation:
    """Returns the cost of every placement of a tensor of ``plan``, its own included.

    ``tensor`` is a value of the program, the path of a parameter, or the end of one of them. In a plan of two
    levels it is a value of one machine (``h.m0``), or a path or value without a machine, for all of them. The
    placement of this tensor alone is forced, or with ``all_layers`` also that of its counterparts in other
    layers. Raises InputError for a tensor that is not there, PlanError for a plan of another cluster.
    """
    check_plan(plan, cluster)
    costs = CostModel(cluster, profile, tf32=plan.tf32)
    view = view_of(plan.program, costs, tensor, all_layers, plan.optimizer_states)
    question = Question(plan, view, costs)
    alternatives = tuple(question.alternatives())
    planned = question.planned
    least_s = min((a.step_s for a in alternatives if a.fits or not planned.fits), default=float("inf"))
    maker, *others = (plan.program.producers[name] for name in dict.fromkeys(view.values))
    used = [i for name in view.values for i in _uses(plan.program, name)]
    return Explanation(
        tensors=view.tensors,
        op=maker.op,
        location=maker.location,
        placement=view.text(view.own),
        maker=maker,
        used=tuple(dict.fromkeys((*others, *used))),
        step_s=planned.step_s,
        alternatives=alternatives,
        can_be_improved=least_s < planned.step_s * (1 - SAME),
        notes=tuple(_notes(plan, question, profile)),
        summary=summary_of(alternatives, planned.step_s, len(view.tensors)),
    )


class Question:
    """Compares the placements of a tensor of a plan, each with the best of its programs."""

    def __init__(self, plan: Plan, view: View, costs: CostModel) -> None:
        self.view, self.costs = view, costs
        self.judge = Judge(plan, costs)
        self.planned = self.judge.planned()
        # for each placement, the reason why its program takes no micro-batches
        self.at_once: dict[str, str] = {}

    def alternatives(self) -> Iterator[Alternative]:
        """Yields an alternative for every placement on the tensor's ranks (R, S(d) for every dim, P), then
        for other ranks."""
        view, own = self.view, self._own()
        rows: list[Alternative] = []
        for one in view.places[0].placements:
            reason = view.impossible(one) if one not in view.own else ""
            if reason:
                rows.append(Alternative(view.text((one,) * len(view.own)), False, impossible=reason))
                continue
            placements = view.forced(one) if len(view.own) > 1 else (one,)
            if placements == view.own:
                if not any(a.is_plan for a in rows):
                    rows.append(self._alternative(view.text(placements), own, own, is_plan=True))
                continue
            candidate = self.cheapest(view.programs(placements))
            if candidate is None:
                rows.append(Alternative(view.text(placements), False, impossible=view.nothing))
            else:
                rows.append(self._alternative(view.text(placements), candidate, own))
        if not any(a.is_plan for a in rows):  # machines hold the tensor with different placements
            rows.insert(0, self._alternative(view.text(view.own), own, own, is_plan=True))
        yield from rows
        elsewhere: dict[str, list[Program]] = {}
        for text, program in view.elsewhere():
            elsewhere.setdefault(text, []).append(program)
        for text, programs in elsewhere.items():
            if (candidate := self.cheapest(programs)) is not None:
                yield self._alternative(text, candidate, own)

    def _own(self) -> Judged:
        """The cheapest program with the plan's own placement: the plan's, or the search's result."""
        searched, planned = self.cheapest(self.view.programs(self.view.own)), self.planned
        if searched is not None and searched.key < planned.key:
            if searched.step_s < planned.step_s * (1 - SAME) or not planned.fits:
                return searched
        return planned

    def _alternative(self, text: str, candidate: Judged, own: Judged, is_plan: bool = False) -> Alternative:
        added, removed = collectives_between(own.program, candidate.program, self.costs)
        peaks = (j.proposal.peak_memory_bytes for j in (candidate, own))
        if candidate.at_once:
            self.at_once[text] = candidate.at_once
        return Alternative(
            placement=text,
            is_plan=is_plan,
            program=candidate.program,
            step_s=candidate.step_s,
            fits=candidate.fits,
            difference_s=candidate.step_s - self.planned.step_s,
            num_differing=num_differing(own.program, candidate.program),
            added=added,
            removed=removed,
            memory_difference_bytes=tuple(a - b for a, b in zip(*peaks)),
        )

    def cheapest(self, programs: Iterable[Program]) -> Judged | None:
        """The best of ``programs``: the fastest as simulated, of those that fit in memory if any does. None
        without programs."""
        judged = [self.judge.best(p) for p in dict.fromkeys(programs)]
        if judged and not any(j.fits for j in judged):
            # if none fits in memory, tries storing the other parameters in shards
            stored = (self.view.in_shards(j.program) for j in tuple(judged))
            judged += [self.judge.best(p) for p in stored if p is not None]
        best = min(judged, key=lambda j: j.key, default=None)
        if best is None:
            return None
        # programs with micro-batches or several ratios use no gathered factors
        if isinstance(self.view, Flat) and not self.judge.accumulates:
            factored = best_factors(best.program, self.costs, lambda p: self.judge.best(p).key)
            if factored is not None:
                best = min(best, self.judge.best(factored), key=lambda j: j.key)
        return self.judge.ordered(best)


def _uses(program: Program, name: str) -> Iterable[Instruction]:
    """The instructions that move a tensor or use it, in order."""
    names = {name}
    for i in program.instructions:
        if any(used in names for used in i.inputs):
            yield i
            if i.is_redistribution:
                names.update(r for r in i.results if r is not None)


def _notes(plan: Plan, question: Question, profile: Profile | None) -> Iterator[str]:
    planned, view = question.planned.step_s, question.view
    if abs(planned - plan.predicted_step_s) > 0.01 * plan.predicted_step_s:
        if uses_profile(plan.cost_source) and profile is None:
            yield "the plan was made with measured costs, these are estimates: add --profile P.json"
        else:
            yield f"the plan's own prediction is another, {seconds_text(plan.predicted_step_s)}"
    if isinstance(view, Lowered):
        yield f"what does not run under {view.name_of(view.ratio)} is left as it is"
    if isinstance(view, Joined):
        yield "how samples are dealt out between machines is left as it is"
    if question.judge.accumulates:
        yield "collectives are listed as of a step that takes the batch at once"
    for text, reason in question.at_once.items():
        yield f"{text} takes the batch at once: {reason}"
