"""The common part of the measured benches: clusters as text, a worker on every device, profiles, steps
against the clock.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.errors import InputError
from mixmesh.frontend.job import batch_size
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import even_ratio
from mixmesh.lang.plan_file import Plan
from mixmesh.measure import testbed
from mixmesh.measure.profiler import likely_share, profile
from mixmesh.measure.profiler.steps import cut_batch
from mixmesh.measure.testbed import PlainBed, enter_device, leave_device
from mixmesh.runtime.comm import default_device
from mixmesh.runtime.data import shard_batches
from mixmesh.runtime.first_rank import everyones
from mixmesh.runtime.job_data import endless
from mixmesh.runtime.parallel import parallelize
from mixmesh.search.baselines import data_parallel

from . import jobs

TIMEOUT_S = 600.0  # for a worker
COLLECTIVE_TIMEOUT_S = 120.0
LOCAL_STEPS = 6
LAST_LINES = 12  # lines shown of a failed rank's output


def cluster_text(gbit_per_s: str, *machines: tuple[str, ...]) -> str:
    """A cluster file of emulated devices: per machine the CPU shares of its devices, as ``"0.50"``."""
    lines = ["[network]", f"bandwidth_gbit_per_s = {Decimal(gbit_per_s)}", "latency_us = 50"]
    for name, shares in zip("abcde", machines):
        devices = ", ".join(f'{{ name = "cpu-{share[2:]}", cpu_share = {share} }}' for share in shares)
        lines += ["[[machine]]", f'name = "{name}"', f"devices = [{devices}]"]
    return "\n".join(lines) + "\n"


DEMO_CLUSTER = cluster_text("1", ("0.70", "0.35"), ("0.35", "0.18"))  # as `python -m benchmarks.demo` has it


@contextmanager
def case_folder(keep: Path | None, case: str) -> Iterator[Path]:
    """A context with the folder for a case's files: one with its name under ``keep``, or a temporary one."""
    with TemporaryDirectory(prefix="mixmesh-bench-") as temporary:
        folder = Path(temporary) if keep is None else keep / case
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


C = TypeVar("C")
R = TypeVar("R")


def each_case(chosen: Sequence[C], keep: Path | None, run: Callable[[C, Path], R]) -> Iterator[R]:
    """Yields the result of each case as soon as it is there."""
    for case in chosen:
        with case_folder(keep, str(case)) as folder:
            yield run(case, folder)


def named(
    names: Sequence[str], among: Sequence[C], every: Sequence[C], words: Callable[[C], Sequence[str]]
) -> tuple[C, ...]:
    """The cases among ``every`` one that have these names; without a name, those in ``among``. Raises
    InputError."""
    if not names:
        return tuple(among)
    out: list[C] = []
    for name in names:
        found = [case for case in every if name in words(case)]
        if not found:
            raise InputError(
                f"no such case: {name!r}",
                expected=", ".join(map(str, every)),
                got=name,
                hint=f"--only {words(every[0])[0]}",
            )
        out += found
    return tuple(dict.fromkeys(out))


def call(
    worker: Sequence[str],
    cluster: Cluster,
    *words: str,
    plain: bool = False,
    say: Callable[[str], None] = lambda _: None,
    env: Mapping[str, str] | None = None,
) -> tuple[str, str]:
    """The last line printed by rank 0 of the worker, and how the cluster was emulated. The stderr of rank 0
    goes to ``say``; ``env`` is added to this process's environment. Raises DeviceLost."""
    lines: list[str] = []
    errors: dict[int, deque[str]] = {}

    def on_output(rank: int, stream: str, text: str) -> None:
        if stream == "stdout" and rank == 0:
            lines.append(text)
        else:
            errors.setdefault(rank, deque(maxlen=LAST_LINES)).append(text)
        if stream == "stderr" and rank == 0:
            say(text.strip())

    if plain:
        with PlainBed(cluster, on_output=on_output) as bed:
            bed.spawn([*worker, *words], env=env)
            result = bed.wait(timeout_s=TIMEOUT_S, check=False)
    else:
        result = testbed.run(
            cluster, [*worker, *words], env=env, on_output=on_output, timeout_s=TIMEOUT_S, check=False
        )
    if result.lost is not None:
        for rank, last in sorted(errors.items()):
            sys.stderr.write("".join(f"[rank {rank}] {text.rstrip()}\n" for text in last))
        result.check()
    time.sleep(0.2)
    return "".join(lines).strip().splitlines()[-1] if lines else "", result.emulation


def measure_profile(job: str, cluster: str, out: str, budget_s: str, what: str = "") -> None:
    """Profiles a job of ``benchmarks/jobs.py`` on this cluster file, and saves the profile to ``out``;
    ``what`` may be ``micro-batches``, to confirm the largest ones as well. Collective."""
    made, described = jobs.make(job), Cluster.load(cluster)
    graph = trace(made.model, made.batch).graph
    leave_device()  # so that threads of new process groups are not throttled
    even = even_ratio(described.world_size)
    program = data_parallel(graph, CostModel(described), even) if what == "micro-batches" else None
    found = profile(graph, made, described, budget_s=float(budget_s), program=program, on_start=enter_device)
    if dist.get_rank() == 0:
        found.save(out)


def local_step(job: str, cluster: Cluster) -> Callable[[], None]:
    """Forward and backward pass over about the number of samples that this rank will get, alone: its time
    shows how fast the machine is at the moment."""
    made = jobs.make(job)
    rows = batch_size(made.batch)
    count = max(1, round(rows * likely_share(cluster, dist.get_rank())))
    batch = cut_batch(made.batch, rows, count, default_device())
    model = made.model.to(default_device())

    def step() -> None:
        made.model(**batch).backward()
        model.zero_grad()

    return step


def everyones_local_s(step: Callable[[], None], count: int) -> tuple[float, ...]:
    """Per rank, seconds of a local step while all ranks make theirs. The first step does not count.
    Collective."""
    dist.barrier()
    step()
    started = time.perf_counter()
    for _ in range(count):
        step()
    return everyones((time.perf_counter() - started) / count)


def plan_step(job: str, plan: Plan) -> Callable[[], Callable[[], float]]:
    """Steps as in ``mixmesh run``; each returns a function for its global loss.

    Several plans share the process, so its memory must not be compared with this plan's prediction.
    """
    made = jobs.make(job)
    model, optimizer = parallelize(
        made.model,
        made.optimizer(made.model.parameters()),
        replace(plan, predicted_peak_memory_bytes=()),
        timeout_s=COLLECTIVE_TIMEOUT_S,
        check_model=False,
    )
    batches = shard_batches(endless(made.data, made.batch), plan, dist.get_rank())

    def step() -> Callable[[], float]:
        local, loss = model.forward_local(**next(batches))
        local.backward()
        optimizer.step()
        optimizer.zero_grad()
        return lambda: float(loss.wait())

    return step


def slowest(step: Callable[[], Any], count: int) -> tuple[float, list[Any]]:
    """Returns (seconds of a step on the slowest rank, as the mean of ``count`` in a row; the steps'
    results)."""
    results = []
    started = time.perf_counter()
    for _ in range(count):
        results.append(step())
    seconds = torch.tensor((time.perf_counter() - started) / count, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item(), results


def print_from_rank_0(value: Any) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(value), flush=True)
