"""The events of one training step as a value, made once of a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from ..base.lazy import lazy
from ..cost.outline import Outline
from ..cost.sums import Summed, gradient_sums, order_of_sums, with_other_owners
from ..lang.ir import Buckets, Program, weight_points
from .events import Pass
from .order import backward_pass, forward_pass
from .ready import Readiness, completing, ready_points
from .reductions import Reductions, reductions_of
from .repeats import Repeat, repeats

Facts = TypeVar("Facts", bound=Outline)


@dataclass(frozen=True)
class Step(Generic[Facts]):
    """The events of all ranks in a step, for any values of the ratios and the buckets; the participating
    ranks must stay the same.

    ``summed`` are the parameters whose gradients are summed, in the order in which their sums start;
    ``ready`` says where each gradient is complete, and ``completes`` says the same for the value of every
    such parameter, including copies. ``later`` are the computations, by index, whose weight gradient comes
    after their input's, each with the point at which it is computed. ``repeats`` are the regions that run
    again. ``outline`` are the facts of the program, with or without costs, from which the step was made.
    """

    program: Program
    forward: Pass
    backward: Pass
    ready: Readiness
    summed: tuple[Summed, ...]
    completes: Mapping[str, float]
    later: Mapping[int, float]
    repeats: Mapping[int, Repeat]
    outline: Facts = field(compare=False, repr=False)

    def on(self, outline: Facts, ranks: tuple[int, ...]) -> Step[Facts]:
        """The step of the same instructions on other ranks, all of which take part in every collective."""
        program = outline.program
        kinds = {s.kind: s.kind._replace(ranks=ranks) for s in self.summed}
        points = self.ready.points
        if all(some in self.ready.groups for pairs in points.values() for _, some in pairs):
            points = {name: tuple([(n, ranks) for n, _ in pairs]) for name, pairs in points.items()}
        else:  # some ranks have no gradient, because only one of them adds the addend
            points = ready_points(program, outline, self.later)
        return replace(
            self,
            program=program,
            forward=self.forward.on(program, ranks),
            backward=self.backward.on(program, ranks),
            ready=Readiness(points, (ranks,) if self.summed else (), program.world_size),
            summed=tuple([s._replace(kind=kinds[s.kind]) for s in self.summed]),
            outline=outline,
        )

    def with_owners(self, outline: Facts) -> Step[Facts]:
        """The step of the same program with other owners of its parameters; their gradients are complete at
        the same points."""
        program = outline.program
        summed = with_other_owners(program, self.summed)
        forward = self._forward_of_owned.with_owned(program)
        return replace(self, program=program, forward=forward, summed=summed, outline=outline)

    @lazy
    def _forward_of_owned(self) -> Pass:
        """The forward pass as if every parameter had an owner; passes for other sets of owned parameters are
        made from it."""
        return forward_pass(self.outline, frozenset(p.result for p in self.program.params))

    def reductions(self, program: Program, buckets: Buckets, *, scattered: bool = False) -> Reductions:
        """The reductions of gradients under these buckets; if ``scattered``, those made in every micro-batch
        of ZeRO stage 2."""
        sums = gradient_sums(program, order=self.summed, buckets=buckets)
        return reductions_of(tuple(s for s in sums if s.stage == 2 or not scattered), self.ready)


def step_of(outline: Facts, whole: Program | None = None) -> Step[Facts]:
    """The step of a program. If it is a micro-batch's program, ``whole`` is the whole batch's."""
    program = outline.program
    later, regions = weight_points(program), repeats(program)
    points, completes = ready_points(program, outline, later), completing(program, outline, later)
    summed = order_of_sums(whole or program)
    groups = tuple(dict.fromkeys(s.kind.ranks for s in summed))
    ready = {point for pairs in points.values() for point, _ in pairs}
    return Step(
        program,
        forward_pass(outline),
        backward_pass(outline, ready.union(completes.values()), later, regions),
        Readiness(points, groups, program.world_size),
        summed,
        completes,
        later,
        regions,
        outline,
    )
