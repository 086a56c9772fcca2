"""The phases of a preparation: what each one decided, how long it took, and whether its result was kept from
an earlier start."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from ...base.progress import Teller
from ...base.units import flop_rate_text, link_text, plural, seconds_text, size_text
from ...cluster import Cluster
from ...cluster.detection import Cache
from ...cost import Profile
from ...frontend.trace import Traced
from ...lang.plan_file import Plan
from ...runtime.first_rank import from_first_rank

T = TypeVar("T")
SHOWN_OPERATORS = 3


@dataclass(frozen=True)
class Phase:
    """One phase of the preparation: its seconds, whether the result was kept from an earlier start, and the
    decision in words."""

    name: str
    time_s: float
    was_kept: bool
    decided: str = ""

    @property
    def text(self) -> str:
        """The phase as a line for people."""
        source = "kept from an earlier start" if self.was_kept else seconds_text(self.time_s)
        return f"{self.name}: {self.decided} ({source})" if self.decided else f"{self.name}: {source}"


class Phases:
    """Runs phases one after the other and reports each when it is over."""

    def __init__(self, cache: Cache, teller: Teller) -> None:
        self.cache, self.teller = cache, teller
        self.finished: list[Phase] = []

    def new(self, name: str, make: Callable[[], T], words: Callable[[T], str]) -> T:
        """Makes a value that is not kept; ``words`` describes the decision."""
        self.teller(name)
        started = time.perf_counter()
        value = make()
        self._tell(Phase(name, time.perf_counter() - started, was_kept=False, decided=words(value)))
        return value

    def kept(
        self,
        name: str,
        file: str,
        form: tuple[Callable[[Path], T], Callable[[T, Path], object]],
        make: Callable[[], T],
        words: Callable[[T], str],
    ) -> T:
        """The value in a ``file`` of the first rank's cache, or else a new one, which is then written there.
        ``form`` reads and writes it; ``make`` is collective."""
        self.teller(name)
        started = time.perf_counter()
        read, write = form
        value = from_first_rank(lambda: self.cache.load(file, read), what=name)
        was_kept = value is not None
        if value is None:
            value = make()
            if dist.get_rank() == 0:
                self.cache.save(file, lambda path: write(value, path))
        self._tell(Phase(name, time.perf_counter() - started, was_kept, words(value)))
        return value

    def _tell(self, phase: Phase) -> None:
        self.finished.append(phase)
        self.teller.line(f"mixmesh: {phase.text}")


def cluster_words(cluster: Cluster) -> str:
    """``3 devices in 2 machines: 2 x T4 of 8.1 TFLOP/s, 1 x V100 of 15.7 TFLOP/s; 10 Gbit/s between
    machines``."""
    counts = Counter(cluster.devices)
    devices = ", ".join(f"{n} x {d.name} of {flop_rate_text(d.flop_per_s)}" for d, n in counts.items())
    place = f"{plural(cluster.world_size, 'device')} in {plural(len(cluster.machines), 'machine')}"
    if len(cluster.machines) > 1:
        links = f"; {link_text(cluster.bandwidth_bytes_per_s)} between machines"
    elif cluster.world_size > 1:
        links = f"; {link_text(cluster.machines[0].link_bytes_per_s)} between devices"
    else:
        links = ""
    return f"{place}: {devices}{links}"


def trace_words(traced: Traced) -> str:
    """``143 operators with the loss, 47 MiB of parameters``."""
    graph = traced.graph
    operators = sum(not node.is_leaf and not node.is_sink for node in graph.nodes)
    size = size_text(sum(graph.types[p.result].size_bytes for p in graph.params))
    loss = "with the loss" if traced.returned.has_loss else "without a loss"
    return f"{plural(operators, 'operator')} {loss}, {size} of parameters"


def profile_words(profile: Profile) -> str:
    """``25 operators on 2 kinds of device, 14 curves of collectives``, and what was only estimated for lack
    of time."""
    operators = max((len(d.ops) for d in profile.devices.values()), default=0)
    said = profile.provenance.get("skipped")
    skipped = said if isinstance(said, list) else []
    shown = ", ".join(skipped[:SHOWN_OPERATORS]) + (", ..." if len(skipped) > SHOWN_OPERATORS else "")
    estimated = f"; estimated: {shown}" if skipped else ""
    return (
        f"{plural(operators, 'operator')} on {plural(len(profile.devices), 'kind')} of device, "
        f"{plural(len(profile.collectives), 'curve')} of collectives{estimated}"
    )


def plan_words(plan: Plan) -> str:
    """``ddp-tuned, the fastest of 9 that fit``."""
    count = sum(candidate.feasible for candidate in plan.candidates)
    return f"{plan.planner}, the fastest of {count} that fit" if count > 1 else plan.planner
