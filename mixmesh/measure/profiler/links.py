"""Measures collectives on the real links: every algorithm, between all ranks and between the groups that
distinguish links, at sizes from kilobytes to tens of megabytes.

Cheap cases are measured first, and those that training needs most count as cheap, so that a lack of time
costs the large sizes of rare groups. All ranks make the same decisions, because they decide by times on which
they have agreed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ...cluster import Cluster
from ...cost import DIRECT, FLAT, LEVELLED, LinkMeasurement, default_algorithm, ring_fit
from ...cost.collectives import on_gpus
from ...cost.levels import machine_sizes
from ...cost.links import TELLING_BYTES
from ...lang.ir import Levels, Parts, make_ratio, shard_sizes
from ...runtime import collectives
from ...runtime.comm import Channel, Comm
from ...runtime.layout import level_groups
from ...runtime.levels import ByLevels
from ...runtime.messages import meet
from .limit import agreed
from .meter import Meter

SIZES_BYTES = (2**12, 2**16, 2**18, 2**20, 2**22, 2**24, 2**25)
RARE_SIZES_BYTES = (2**12, 2**18, 2**20, 2**22, 2**24)
EVEN_SIZES_BYTES = tuple(size for size in RARE_SIZES_BYTES if size >= TELLING_BYTES)
DIRECT_SIZES_BYTES = (2**10, 2**12, 2**14, 2**16, 2**18)  # for sums that are fast only while small
SURE_BYTES = 2**20  # sizes up to this are measured with any budget for the cases that training needs most
BUCKET_BYTES = 2**22  # sizes up to this come before all others, while most of the budget is left
BUCKET_SHARE = 0.7
WIDTH = 64  # floats per row of the tensors that are moved
MEMORY_SHARE = 1 / 32  # share of the smallest device's memory for a tensor: some algorithms hold several
QUICK_S, LONG_S, SLOW_S = 0.02, 0.3, 1.0  # the shorter a run, the more often it is repeated
# factor on the seconds expected from the size before: above it something else has slowed the runs
OUT_OF_LINE = 1.15
ALGORITHMS = {
    "all_gather": tuple(collectives.ALL_GATHER),
    "reduce_scatter": tuple(collectives.REDUCE_SCATTER),
}
BY_SKEW = ("all_gather", "reduce_scatter")  # some algorithms for these cost more if pieces are unequal


@dataclass(frozen=True)
class Need:
    """How much training needs a curve: the ``weight`` of its seconds when the cheapest is chosen, the sizes
    to measure, and whether short runs are repeated ``often``."""

    weight: float
    sizes_bytes: tuple[int, ...]
    often: bool = False


# training's own collectives come far ahead
VITAL = Need(1.0, SIZES_BYTES, often=True)
VITAL_DIRECT = Need(1.0, DIRECT_SIZES_BYTES, often=True)
USUAL_EVEN = Need(2.0, EVEN_SIZES_BYTES, often=True)
OTHER = Need(8.0, SIZES_BYTES, often=True)
EVEN = Need(12.0, EVEN_SIZES_BYTES)
PAIR = Need(20.0, RARE_SIZES_BYTES)
MACHINE = Need(40.0, RARE_SIZES_BYTES)


@dataclass(frozen=True)
class Case:
    """One curve to measure. ``shares`` are the sizes of the pieces, one per rank of the group."""

    collective: str
    algorithm: str
    ranks: tuple[int, ...]
    shares: tuple[float, ...]
    need: Need

    @property
    def is_vital(self) -> bool:
        return self.need in (VITAL, VITAL_DIRECT)

    @property
    def skew(self) -> float:
        return max(self.shares) * len(self.shares) / sum(self.shares)


@dataclass
class _Progress:
    """The progress of a case."""

    case: Case
    points: list[tuple[float, float]] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)

    @property
    def next_bytes(self) -> int:
        return self.case.need.sizes_bytes[len(self.points)]

    def expected_s(self, cluster: Cluster) -> float:
        """Expected seconds of one run at the next size: those of the last size, plus the time that the links
        need for the additional bytes."""
        fit = ring_fit(cluster, self.case.collective, self.case.ranks)
        if not self.points:
            return fit.seconds(self.next_bytes)
        size, seconds = self.points[-1]
        if size < SURE_BYTES:
            return seconds + fit.s_per_byte * (self.next_bytes - size)
        return seconds * self.next_bytes / size

    def is_out_of_line(self, seconds: float, cluster: Cluster) -> bool:
        """Whether the next size takes much longer than expected from the size before, if that is large."""
        follows_large = bool(self.points) and self.points[-1][0] >= SURE_BYTES
        return follows_large and seconds > OUT_OF_LINE * self.expected_s(cluster)


def link_groups(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """All ranks, those of each machine, and for each two kinds of NIC one pair of ranks across machines."""
    groups = [tuple(range(cluster.world_size))]
    groups += [cluster.ranks_of(m) for m in range(len(cluster.machines))]
    seen = set()
    for a, one in enumerate(cluster.machines):
        for b, other in list(enumerate(cluster.machines))[a + 1 :]:
            kind = tuple(sorted((one.nic_bytes_per_s, other.nic_bytes_per_s)))
            if kind not in seen:
                seen.add(kind)
                groups.append((cluster.ranks_of(a)[0], cluster.ranks_of(b)[0]))
    return tuple(dict.fromkeys(g for g in groups if len(g) > 1))


def link_sets(cluster: Cluster) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The process groups that ``measure_links`` needs, for ``Comm.of_sets``."""
    parts = level_parts(cluster)
    groups = tuple(("data", group) for group in link_groups(cluster))
    return (*groups, *level_groups(parts)) if parts else groups


def level_parts(cluster: Cluster) -> Parts:
    """All ranks by machine; none without two levels."""
    return Levels(machine_sizes(cluster)).parts(tuple(range(cluster.world_size)), 0)


def link_cases(cluster: Cluster, backend: str) -> list[Case]:
    """Every curve to measure, starting with those that training needs most."""
    cases = []
    for ranks in link_groups(cluster):
        everyone = len(ranks) == cluster.world_size
        across = len({cluster.machine_index_of(r) for r in ranks}) > 1
        declared = tuple(cluster.devices[r].flop_per_s for r in ranks)
        cases += _cases_of(ranks, declared, OTHER if everyone else PAIR if across else MACHINE, backend)
        if everyone and on_gpus(cluster, ranks):
            cases.append(Case(DIRECT, "", ranks, declared, VITAL_DIRECT))
        if everyone and level_parts(cluster):
            cases.append(Case(LEVELLED["all_reduce"], "", ranks, declared, VITAL))
        if len(ranks) == 2 or not across:
            # pipeline stages between machines use it
            cases.append(Case("send", "", ranks[:2], declared[:2], VITAL if across else MACHINE))
    return cases


def _cases_of(ranks: tuple[int, ...], declared: tuple[float, ...], rest: Need, backend: str) -> list[Case]:
    """The collectives among some ranks, needed like the ``rest`` except for those that training needs
    most."""
    everyone = rest == OTHER
    cases = []
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"):
        default = default_algorithm(collective, backend)
        rooted = collective in ("broadcast", "reduce")
        for algorithm in ALGORITHMS.get(collective, ("",)):
            vital = everyone and algorithm == default and not rooted
            cases.append(Case(collective, algorithm, ranks, declared, VITAL if vital else rest))
            if everyone and collective in BY_SKEW and len(set(declared)) > 1:
                need = USUAL_EVEN if algorithm == default else EVEN
                cases.append(Case(collective, algorithm, ranks, (1.0,) * len(ranks), need))
    return cases


def measure_links(
    comm: Comm,
    cluster: Cluster,
    budget_s: float,
    *,
    most_s: float = math.inf,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[LinkMeasurement, ...]:
    """The curves of ``link_cases`` as far as ``budget_s`` allows. Those that training needs most are measured
    in any case, but with a single run each after ``most_s``. Collective; ``comm`` has ``link_sets``."""
    if comm.world_size < 2:
        return ()
    # each rank has its own clock, but all must run each collective equally often: the slowest one decides
    most_s = -agreed(comm, [-most_s])[0]
    backend = comm.channel(comm.everyone, "profile").backend
    largest = min(d.memory_bytes for d in cluster.devices) * MEMORY_SHARE
    going = [_Progress(case) for case in link_cases(cluster, backend)]
    finished: list[_Progress] = []
    started, elapsed, parts = time.perf_counter(), 0.0, level_parts(cluster)
    while going:
        early = elapsed < budget_s * BUCKET_SHARE
        chosen = min(going, key=lambda p: (urgency(p, early), p.expected_s(cluster) * p.case.need.weight))
        size = chosen.next_bytes
        affordable = is_sure(chosen) or elapsed + chosen.expected_s(cluster) * 2 <= budget_s
        if affordable and size <= largest:
            progress(f"links: {chosen.case.collective} {chosen.case.algorithm} {size >> 10} KB")
            short = elapsed >= most_s
            seconds, elapsed, count = measure(comm, chosen.case, size, started, parts, is_short=short)
            if not short and chosen.is_out_of_line(seconds, cluster):
                again_s, elapsed, count = measure(comm, chosen.case, size, started, parts)
                seconds = min(seconds, again_s)
            chosen.points.append((whole_bytes(size), seconds))
            chosen.runs.append(count)
            if len(chosen.points) < len(chosen.case.need.sizes_bytes):
                continue
        going.remove(chosen)
        finished.append(chosen)
    return tuple(measured(p, backend) for p in finished if p.points)


def urgency(p: _Progress, early: bool) -> int:
    """The urgency of a case, the most urgent first: cases that are measured in any case, cases for buckets of
    gradients, the rest."""
    if is_sure(p):
        return 0
    return 1 if early and p.case.is_vital and p.next_bytes <= BUCKET_BYTES else 2


def is_sure(p: _Progress) -> bool:
    return p.case.is_vital and p.next_bytes <= SURE_BYTES


def measured(p: _Progress, backend: str) -> LinkMeasurement:
    case = p.case
    source = f"{backend}, slowest rank, median of {min(p.runs)} to {max(p.runs)}"
    return LinkMeasurement(case.collective, case.algorithm, case.ranks, tuple(p.points), case.skew, source)


def whole_bytes(size_bytes: int) -> int:
    return rows_of(size_bytes) * WIDTH * 4


def rows_of(size_bytes: int) -> int:
    return max(1, size_bytes // (WIDTH * 4))


def measure(
    comm: Comm,
    case: Case,
    size_bytes: int,
    started: float,
    parts: Parts = (),
    *,
    is_short: bool = False,
) -> tuple[float, float, int]:
    """(seconds of the slowest rank, seconds since ``started``, number of runs), the same on all ranks. If
    ``is_short`` there is one run. ``parts`` are the ranks by machine, for hierarchical sums."""
    run = None
    if comm.rank in case.ranks:
        group = comm.everyone if len(case.ranks) == comm.world_size else case.ranks
        if case.collective == "send":
            group = next(r for p, r in comm.groups if p == "data" and set(case.ranks) <= set(r))
        channel = comm.channel(group, f"profile of {case.collective}")
        run = prepared(comm, channel, case, rows_of(size_bytes), parts)
    (first,) = agreed(comm, [timed(comm, run)])
    often = first < QUICK_S and case.need.often
    repeats = 5 if often else 3 if first < LONG_S else 1 if first < SLOW_S else 0
    repeats = 0 if is_short else repeats
    times = [timed(comm, run) for _ in range(repeats)]
    *times, elapsed = agreed(comm, [*times, time.perf_counter() - started])
    if repeats < 3:  # too long for an extra run that is thrown away
        times.append(first)
    return statistics.median(times), elapsed, len(times)


def timed(comm: Comm, run: Callable[[], object] | None) -> float:
    meet()
    if run is None:
        return 0.0
    return Meter.wall(run) if comm.device.type == "cpu" else Meter(comm.device, emulated=False).once(run)


def prepared(comm: Comm, channel: Channel, case: Case, rows: int, parts: Parts = ()) -> Callable[[], object]:
    """This rank's part of the collective, on a tensor of ``rows`` rows."""
    me, name = case.ranks.index(comm.rank), case.algorithm or None
    sizes = shard_sizes(rows, make_ratio(case.shares))
    straight = case.collective == "send" and channel.staged  # gloo cannot send a GPU's tensor
    whole = torch.zeros(rows, WIDTH, device="cpu" if straight else comm.device)
    piece = whole[: sizes[me]].clone()
    match case.collective:
        case "direct_all_reduce":
            return lambda: collectives.all_reduce(channel, whole, direct=True)
        case "all_reduce" | "levelled_all_reduce":
            levels = ByLevels(comm, parts) if case.collective in FLAT else None
            return lambda: collectives.all_reduce(channel, whole, levels=levels, in_place=True)
        case "all_gather":
            return lambda: collectives.all_gather(channel, piece, sizes, algorithm=name)
        case "reduce_scatter":
            return lambda: collectives.reduce_scatter(channel, whole, sizes, algorithm=name)
        case "all_to_all":
            columns = shard_sizes(WIDTH, make_ratio(case.shares))
            return lambda: collectives.all_to_all(channel, piece, 0, sizes, 1, columns)
        case "broadcast":
            return lambda: collectives.broadcast(channel, whole, case.ranks[0])
        case "reduce":
            return lambda: collectives.reduce(channel, whole, case.ranks[0])
        case "send" if me == 0:
            return lambda: dist.send(whole, case.ranks[1], group=channel.group)
        case "send":
            return lambda: dist.recv(whole, case.ranks[0], group=channel.group)
    raise ValueError(case.collective)
