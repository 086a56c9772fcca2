"""The fastest plan for the unchanged cluster and after each change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...cluster import Cluster
from ...cost import Profile
from ...errors import Infeasible
from ...lang.plan_file import Plan
from .changes import Change

WORTH = 0.02  # share of the time of a sample: smaller gains and losses are not reported
LEAST_TOLD = 0.01  # share of a price: smaller differences are not reported
HOUR_S = 3600.0
LEFT_OUT = ("machine", "device")
Planned = Callable[[Any, Cluster, Profile | None], Plan]


@dataclass(frozen=True)
class Answer:
    """The effect of a change. ``step_s`` is infinite if nothing fits. ``price_per_hour`` is that of all
    machines, None if unknown. ``samples`` are those of one step, ``epoch_samples`` of an epoch, None if the
    job's data has no known length. ``lacks`` says why, if nothing fits."""

    change: Change
    step_s: float
    samples: int
    planner: str
    price_per_hour: float | None
    epoch_samples: int | None = None
    lacks: str = ""

    @property
    def sample_s(self) -> float:
        return self.step_s / self.samples

    @property
    def sample_price(self) -> float | None:
        """The price of one sample, in the currency of the cluster file."""
        if self.price_per_hour is None or not math.isfinite(self.step_s):
            return None
        return self.price_per_hour * self.sample_s / HOUR_S

    @property
    def epoch_price(self) -> float | None:
        """The price of one epoch of the job's data, in the currency of the cluster file."""
        if self.sample_price is None or self.epoch_samples is None:
            return None
        return self.epoch_samples * self.sample_price

    def speedup(self, now: Answer) -> float:
        """The number of samples per second relative to ``now``; 0 if nothing fits."""
        return now.sample_s / self.sample_s if math.isfinite(self.step_s) else 0.0


def answers(
    now: Change,
    asked: Sequence[Change],
    traced: Callable[[int], Any],
    samples: int,
    planned: Planned,
    profile: Profile | None = None,
    progress: Callable[[str], None] = lambda _: None,
    epoch_samples: int | None = None,
) -> Iterator[Answer]:
    """Yields the answer for the cluster as it is, then for each change in order.

    ``traced(n)`` is the model traced with ``n`` times the batch, which has ``samples``. ``planned`` makes a
    plan. Only the device times of ``profile`` count; links are taken from the cluster file, because changed
    ones were not measured. ``epoch_samples`` are those of an epoch, for its price.
    """
    devices_only = None if profile is None else profile.without_links()
    for change in (now, *asked):
        progress(change.text)
        step_s, planner, lacks = math.inf, "nothing fits", ""
        try:
            plan = planned(traced(change.batches), change.cluster, devices_only)
            step_s, planner = plan.predicted_step_s, plan.planner
        except Infeasible as error:
            lacks = f"expected {error.expected}; got {error.got}"
        price = None if change.adds_price else price_of(change.cluster)
        yield Answer(change, step_s, samples * change.batches, planner, price, epoch_samples, lacks)


def price_of(cluster: Cluster) -> float | None:
    """The price of an hour of all machines; None unless every one has its price."""
    machines = cluster.machines
    prices = [m.price_per_hour for m in machines if m.price_per_hour is not None]
    return sum(prices) if len(prices) == len(machines) else None


def ranked(found: Sequence[Answer]) -> list[Answer]:
    """The answers after the first, which is for the unchanged cluster, sorted by the time of a sample."""
    return sorted(found[1:], key=lambda answer: answer.sample_s)


def advice(found: Sequence[Answer]) -> list[str]:
    """The conclusions in a few sentences: the largest gain, machines and devices that do not help, and the
    cheapest answer."""
    now, *rest = found
    if not math.isfinite(now.step_s):
        fitting = [a for a in ranked(found) if math.isfinite(a.step_s)]
        if fitting:
            return [f"nothing fits; it would with: {fitting[0].change.text}"]
        return ["nothing fits, with none of these changes"] + ([now.lacks] * bool(now.lacks))
    lines = []
    best = max(rest, key=lambda a: a.speedup(now), default=now)
    if best.speedup(now) > 1 + WORTH:
        lines.append(f"the largest gain: {best.change.text}, {best.speedup(now):.2f}x the samples per second")
    else:
        lines.append(f"none of these changes brings more than {WORTH:.0%}")
    useless = [a for a in rest if a.change.kind in LEFT_OUT and a.speedup(now) >= 1 - WORTH]
    machines = [a for a in useless if a.change.kind == "machine"]
    # devices of a machine that does not help need not be listed
    lines += [f"training is as fast {answer.change.text}" for answer in machines or useless]
    priced = [(a.sample_price, a) for a in (now, *rest) if a.sample_price is not None]
    if len(priced) > 1 and now.sample_price is not None:
        price, cheapest = min(priced, key=lambda pair: pair[0])
        if cheapest is not now and price < (1 - WORTH) * now.sample_price:
            share = price / now.sample_price
            told = f"{share:.0%}" if share >= LEAST_TOLD else f"less than {LEAST_TOLD:.0%}"
            lines.append(f"the cheapest per sample: {cheapest.change.text}, {told} of the price now")
    return lines
