"""The plan of a whole cluster compared with the plans of its parts, and with every planner alone.

A plan for some of the machines is also a plan for all of them in which the others are idle, and a planner
alone proposes nothing that ``auto`` could not. So ``auto`` should never be slower than either, in simulation.
Jobs and clusters are drawn at random: two to four machines of one to four devices, joined at 0.5 to 100
Gbit/s; the papers' models, those of ``benchmarks.jobs``, and small random ones.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import combinations, repeat
from multiprocessing import get_context

import torch
from torch import nn

from mixmesh.cluster import Cluster
from mixmesh.errors import Infeasible, InputError
from mixmesh.frontend.job import Job
from mixmesh.frontend.job.workloads import make as workload
from mixmesh.frontend.job.workloads.language import LanguageModel
from mixmesh.frontend.job.workloads.layers import Layer, MoeLayer
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import Graph
from mixmesh.planner import PLANNERS, make_plan

from . import jobs

PAIRS = 60
TOLERANCE = 0.01  # share of a step by which ``auto`` may be slower
SEARCHING = ("placed", "heterog", "tag")  # asked only in a search, in which ``auto`` gets as much time
LIKELY_TO_FIT = 16  # samples a device: of the papers' models
PAPERS = ("bert-base", "vit", "vgg19", "bert-moe", "transformer", "resnet50", "mobilenet-v2")
OWN = ("gpt", "moe", "vgg", "vgg19", "bert", "resnet")
DEVICES = ("A100-40GB", "V100-16GB", "T4-16GB", "P100-16GB", "RTX3090-24GB")


@dataclass(frozen=True)
class Pair:
    """A job by name, and a cluster."""

    job: str
    cluster: Cluster


@dataclass(frozen=True)
class Row:
    """Seconds of ``auto``'s predicted step on all machines, and of the alternatives that it must not be
    slower than: ``auto`` on a part of them, or a planner alone; None if nothing fits. ``planning_s`` is the
    time that ``auto`` took."""

    job: str
    cluster: str
    network_gbit_per_s: float
    planner: str | None
    auto_s: float | None
    others_s: dict[str, float]
    planning_s: float

    @property
    def fastest_other(self) -> str | None:
        return min(self.others_s, key=self.others_s.__getitem__, default=None)

    @property
    def times(self) -> float:
        """The step of ``auto`` relative to that of the fastest other planner; infinite if only that one
        fits."""
        other = self.fastest_other
        if other is None:
            return 1.0
        return float("inf") if self.auto_s is None else self.auto_s / self.others_s[other]

    @property
    def met(self) -> bool:
        """Whether ``auto`` is not slower by more than the tolerance."""
        if self.auto_s is None:
            return not self.others_s
        least_s = min(self.others_s.values(), default=self.auto_s)
        return self.auto_s <= least_s * (1 + TOLERANCE)


def draw_pairs(count: int, seed: int = 0, *, small: bool = False) -> list[Pair]:
    """Pairs drawn at random, the same for a ``seed``; of ``small`` ones the jobs are small."""
    return [_draw_pair(random.Random(f"{seed} {n}"), n, small) for n in range(count)]


def run(
    pairs: Sequence[Pair],
    *,
    search_s: float | None = None,
    processes: int = 1,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Row]:
    """Yields a row per pair, with ``processes`` pairs compared at once. With ``search_s`` the open-ended
    planners are asked too, each for that many seconds, and ``auto`` for that many for each of them."""
    if processes == 1:
        for pair in pairs:
            progress(f"{pair.job} on {pair.cluster.name}")
            yield compare(pair, search_s)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for pair, row in zip(pairs, pool.map(compare, pairs, repeat(search_s))):
            progress(f"{pair.job} on {pair.cluster.name}")
            yield row


def compare(pair: Pair, search_s: float | None = None) -> Row:
    """Compares ``auto`` on all machines with ``auto`` on parts of them and with single planners."""
    graph, cluster = graph_of(pair.job), pair.cluster
    whole_s = None if search_s is None else len(SEARCHING) * search_s
    started = time.perf_counter()
    auto_s, planner = _step(graph, cluster, "auto", whole_s)
    planning_s = time.perf_counter() - started
    others = {}
    for part in parts(cluster):
        others[f"auto on {part.name}"], _ = _step(graph, part, "auto", whole_s)
    for name in PLANNERS:
        if name != "auto" and (name not in SEARCHING or search_s is not None):
            others[name], _ = _step(graph, cluster, name, search_s)
    return Row(
        job=pair.job,
        cluster=cluster.name,
        network_gbit_per_s=cluster.bandwidth_bytes_per_s * 8e-9,
        planner=planner,
        auto_s=auto_s,
        others_s={name: step_s for name, step_s in others.items() if step_s is not None},
        planning_s=planning_s,
    )


def parts(cluster: Cluster) -> list[Cluster]:
    """Clusters of fewer machines, and of one device, without duplicates."""
    machines = range(len(cluster.machines))
    found: dict[str, Cluster] = {}
    for count in range(1, len(cluster.machines)):
        for chosen in combinations(machines, count):
            name = "machines " + " ".join(cluster.machines[m].name for m in chosen)
            part = replace(cluster, name=name, machines=tuple(cluster.machines[m] for m in chosen))
            found.setdefault(part.fingerprint, part)
    for machine in cluster.machines:
        for device in machine.devices:
            alone = replace(machine, devices=(device,), links=())
            part = replace(cluster, name=f"one {device.name}", machines=(alone,))
            found.setdefault(f"one {device.name}", part)
    return list(found.values())


@cache
def graph_of(job: str) -> Graph:
    """The graph of a job by its name, traced once. Raises InputError for an unknown name."""
    kind, _, what = job.partition("/")
    makers = {"papers": workload, "own": jobs.make, "random": random_job}
    if kind not in makers:
        raise InputError(f"there is no job {job!r}", expected=", ".join(makers) + "/NAME", got=job)
    made = makers[kind](what)
    return trace(made.model, made.batch).graph


def random_job(seed: str) -> Job:
    """A language model or a perceptron of random sizes, on the meta device."""
    draw = random.Random(seed)
    batch = draw.choice((24, 32, 48, 64, 96))
    with torch.device("meta"):
        if draw.random() < 0.5:
            widths = [draw.choice((64, 256, 1024, 4096)) for _ in range(draw.randint(2, 6))]
            return Job(Perceptron(widths), {"x": torch.empty(batch, widths[0])})
        width, seq = 64 * draw.choice((2, 4, 8, 12)), draw.choice((32, 64, 128))
        words = draw.choice((512, 4096, 16384))
        layers = [_random_layer(draw, width, seq) for _ in range(draw.randint(1, 4))]
        tokens = torch.zeros(2, batch, seq, dtype=torch.long)
        model = LanguageModel(layers, words=words, seq=seq, width=width)
        return Job(model, {"tokens": tokens[0], "targets": tokens[1]})


class Perceptron(nn.Module):
    """Dense layers between ``widths``."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        pairs = zip(widths, widths[1:])
        self.layers = nn.Sequential(*(m for a, b in pairs for m in (nn.Linear(a, b), nn.ReLU())))

    def forward(self, x):
        return self.layers(x).square().mean()


def _random_layer(draw: random.Random, width: int, seq: int) -> nn.Module:
    if draw.random() < 0.25:
        return MoeLayer(width, 4, 2 * width, experts=draw.choice((4, 6)), seq=seq)
    return Layer(width, 4, draw.choice((2, 4)) * width)


def _draw_pair(draw: random.Random, number: int, small: bool) -> Pair:
    cluster = _draw_cluster(draw, number)
    kind = "random" if small else draw.choice(("papers", "own", "random"))
    if kind == "papers":
        samples = LIKELY_TO_FIT * cluster.world_size
        return Pair(f"papers/{draw.choice(PAPERS)}:{samples}", cluster)
    return Pair(f"own/{draw.choice(OWN)}" if kind == "own" else f"random/{draw.randrange(100)}", cluster)


def _draw_cluster(draw: random.Random, number: int) -> Cluster:
    lines = [f'name = "drawn {number}"', "[network]", f"latency_us = {draw.randint(5, 50)}"]
    lines.append(f"bandwidth_gbit_per_s = {0.5 * 200 ** draw.random():.2f}")
    types = draw.sample(DEVICES, draw.randint(1, 3))
    for n in range(draw.randint(2, 4)):
        devices = f'{{ device = "{draw.choice(types)}", count = {draw.randint(1, 4)} }}'
        lines += ["[[machine]]", f'name = "{"abcd"[n]}"', f"devices = [{devices}]"]
        lines.append(f"link_gbit_per_s = {10 * 60 ** draw.random():.1f}")
    return Cluster.parse("\n".join(lines) + "\n")


def _step(
    graph: Graph, cluster: Cluster, planner: str, search_s: float | None
) -> tuple[float | None, str | None]:
    try:
        plan = make_plan(graph, cluster, planner=planner, search_s=search_s)
    except (Infeasible, InputError):  # nothing fits, or the planner is for other clusters
        return None, None
    return plan.predicted_step_s, plan.planner


def report(rows: Sequence[Row], command: str) -> dict:
    """The object that ``--json`` prints and the file holds."""
    made = [
        {**asdict(r), "fastest_other": r.fastest_other, "times": r.times if r.auto_s else None, "met": r.met}
        for r in rows
    ]
    return {"bench": "subsets", "command": command, "tolerance": TOLERANCE, "rows": made}
