"""The micro-batches of a pipeline that are between their passes while another one runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...lang.ir import Cut, Program, Samples, in_flight, support
from ...lang.plan_file import Schedule
from .moments import Moment, Sizes


@dataclass(frozen=True, slots=True)
class Flight:
    """The micro-batches in flight in a pipeline: for each stage, by the name of its ratio, the number of
    ``others`` that are between their passes while one runs. ``moved`` are the values that come from earlier
    stages."""

    others: tuple[tuple[str | None, int], ...] = ()
    moved: frozenset[str] = frozenset()

    def over(self, program: Program, before: Moment, kept: Moment, moments: list[Moment]) -> list[Moment]:
        """Adds to the moments what the other micro-batches keep. A transfer counts once as requested ahead
        and once as under way, and so does its gradient. Its senders wait for no send: those of all
        micro-batches between their passes may still be under way, each with a copy of its values."""
        others = dict(self.others)
        held: Sizes = {}
        for cut, size in kept.held.items():
            count = others.get(cut.ratio, 0)
            held[cut] = count * max(size - before.held.get(cut, 0.0), 0.0)
        small = {
            cut: others.get(cut.ratio, 0) * max(size - before.small.get(cut, 0.0), 0.0)
            for cut, size in kept.small.items()
        }
        for name in self.moved:
            i = program.producers.get(name)
            if i is None:
                continue  # moved once per step, before its micro-batches
            sent, received = program.types[i.inputs[0]], i.type
            for t, copies in ((sent, 2.0 + others.get(sent.ratio, 0)), (received, 2.0)):
                held[t.cut] = held.get(t.cut, 0.0) + copies * t.value.size_bytes
        return [m._replace(held=_sum(m.held, held), small=_sum(m.small, small)) for m in moments]


NO_FLIGHT = Flight()


def _sum(a: Mapping[Cut, float], b: Mapping[Cut, float]) -> Sizes:
    return {cut: a.get(cut, 0.0) + b.get(cut, 0.0) for cut in dict.fromkeys((*a, *b))}


def flight_of(program: Program, samples: Samples, planned: Schedule) -> Flight:
    """The micro-batches in flight in every stage, besides the running one."""
    if not samples.stages:
        return NO_FLIGHT
    others: dict[str | None, int] = {}
    count, micro_steps = len(samples.stages), max(map(len, planned.sizes))
    for name, ratio in program.ratios:
        stages = (samples.stage_of(rank) for rank in support(ratio))
        first = min((stage for stage in stages if stage is not None), default=count)
        others[name] = max(in_flight(first, count, micro_steps) - 1, 0)
    return Flight(tuple(others.items()), samples.transfers)
