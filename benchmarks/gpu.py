"""One GPU: whole models under a plan compared with PyTorch alone, and the predictions for them.

A step's seconds and a process's memory are predicted from the datasheet, from a calibration of the card and
from a profile of the job, and then measured. All variants of a model take turns in one process.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import mixmesh
from mixmesh.cluster import Cluster, Device, Machine
from mixmesh.cost import Profile
from mixmesh.frontend.job import Job
from mixmesh.frontend.job.workloads import make
from mixmesh.frontend.job.workloads.language import LanguageModel
from mixmesh.frontend.job.workloads.layers import Layer
from mixmesh.frontend.trace import Traced, trace
from mixmesh.lang.plan_file import Plan
from mixmesh.measure.calibration import Measured, calibrate
from mixmesh.measure.calibration.samples import Timing
from mixmesh.measure.calibration.timing import tf32_set
from mixmesh.measure.profiler import profile
from mixmesh.planner import make_plan
from mixmesh.runtime.accelerator import (
    begin_peak,
    empty_cache,
    is_accelerator,
    synchronize,
)
from mixmesh.runtime.optimizers import fuse
from mixmesh.runtime.train import peak_memory_bytes

from .revision import revision
from .steps import Step, as_one_process, step_of

EAGER, COMPILED, OURS, OURS_COMPILED = "eager", "torch.compile", "ours", "ours, compile=True"
DATASHEET, CALIBRATED, PROFILED = "datasheet", "calibrated", "profiled"
BF16 = "bf16"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """A job and its numbers: float32, TF32 for float32's products, or bf16 by autocast."""

    name: str
    make: Callable[[], Job]
    numbers: str = "f32"
    compiles: bool = False  # whether compiled variants are measured too

    def numbers_set(self) -> AbstractContextManager[None]:
        return tf32_set(self.numbers == "tf32")

    def autocast(self, device: torch.device) -> AbstractContextManager:
        return torch.autocast(device.type, torch.bfloat16) if self.numbers == BF16 else nullcontext()


def gpt(layers: int, width: int, seq: int, batch: int, words: int = 16_000) -> Job:
    """A decoder with heads of 64, and random words."""
    torch.manual_seed(0)
    blocks = [Layer(width, width // 64, 4 * width) for _ in range(layers)]
    model = LanguageModel(blocks, words=words, seq=seq, width=width)
    tokens = torch.randint(words, (2, batch, seq))
    return Job(model, {"tokens": tokens[0], "targets": tokens[1]}, optimizer=torch.optim.AdamW)


def workload(text: str) -> Job:
    return replace(make(text, "cpu"), optimizer=torch.optim.AdamW)


CASES = (
    Case("gpt f32", lambda: gpt(12, 1024, 512, 16)),
    Case("gpt tf32", lambda: gpt(12, 1024, 512, 16), "tf32"),
    Case("gpt bf16", lambda: gpt(12, 1024, 512, 16), BF16, compiles=True),
    Case("gpt of small kernels", lambda: gpt(24, 512, 128, 8), "tf32"),
    Case("bert-base bf16", lambda: workload("bert-base:64"), BF16),
    Case("vit bf16", lambda: workload("vit:256"), BF16),
    Case("resnet50 tf32", lambda: workload("resnet50:256"), "tf32"),
    Case("vgg19 tf32", lambda: workload("vgg19:512"), "tf32"),
)
SMALL = (
    Case("small f32", lambda: gpt(2, 64, 16, 4)),
    Case("small bf16", lambda: gpt(2, 64, 16, 4), BF16),
    # so small that hardly more than issuing operators counts
    Case("host f32", lambda: gpt(12, 64, 8, 2, 100)),
    Case("host bf16", lambda: gpt(12, 64, 8, 2, 100), BF16),
)


@dataclass(frozen=True)
class Effort:
    calibration_s: float
    profile_s: float
    rounds: int
    steps: int
    compiles: bool = True


FULL, QUICK = Effort(45, 10, 5, 5), Effort(20, 6, 3, 3, compiles=False)


@dataclass(frozen=True)
class Row:
    """``step_s`` has the seconds of a step in each round by variant; predictions are by their basis;
    ``error`` is the largest relative difference of a loss from that of PyTorch alone."""

    name: str
    step_s: dict[str, tuple[float, ...]]
    predicted_step_s: dict[str, float]
    predicted_bytes: dict[str, int]
    measured_bytes: int
    losses: dict[str, tuple[float, ...]]
    error: float

    def median_s(self, name: str) -> float:
        return statistics.median(self.step_s[name])

    def over(self, name: str, other: str) -> float:
        """The median over rounds of a variant's step over another's."""
        return statistics.median(a / b for a, b in zip(self.step_s[name], self.step_s[other]))


def run(
    device: torch.device,
    cases: Sequence[Case],
    effort: Effort,
    say: Say = lambda _: None,
    keep: Path | None = None,
) -> Iterator[Row | Measured]:
    """The calibration of the device, then a row for each case, whose profile is kept in a folder ``keep``."""
    as_one_process()
    # in separate processes: otherwise the card would still hold what one case loaded while the next one runs;
    # this process holds nothing
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        say("calibration")
        calibrated = pool.submit(calibrate, device, seconds=effort.calibration_s).result()
        yield calibrated
        for case in cases:
            say(case.name)
            known = calibrated.plain, calibrated.calibration.device
            yield pool.submit(row_of, case.name, device, known, effort, keep).result()


def row_of(
    name: str, device: torch.device, known: tuple[Device, Device], effort: Effort, keep: Path | None
) -> Row:
    """The row of a case, in a process of its own. The device is ``known`` without and with a calibration."""
    case = next(case for case in (*CASES, *SMALL) if case.name == name)
    with case.numbers_set():
        return measured_row(case, device, known, effort, keep)


def measured_row(
    case: Case, device: torch.device, known: tuple[Device, Device], effort: Effort, keep: Path | None
) -> Row:
    traced = traced_on(case, case.make(), device)
    clusters = dict(zip((DATASHEET, CALIBRATED), map(cluster_of, known)))
    plans = {name: planned(traced, cluster) for name, cluster in clusters.items()}
    cluster = clusters[CALIBRATED]
    measured = profile(
        traced.graph,
        case.make(),
        cluster,
        budget_s=effort.profile_s,
        device=device,
        autocast=traced.autocast,
    )
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        measured.save(keep / f"{case.name.replace(' ', '-')}.profile.json")
    plans[PROFILED] = planned(traced, cluster, measured)
    gc.collect()
    empty_cache(device)
    if is_accelerator(device):
        begin_peak(device)
    steps = {OURS: made_step(case, device, plans[PROFILED])}
    losses = {OURS: [steps[OURS]() for _ in range(3)]}
    synchronize(device)
    measured_bytes = peak_memory_bytes(device)
    steps[EAGER] = made_step(case, device, None)
    if effort.compiles and case.compiles:
        steps[COMPILED] = made_step(case, device, None, compiles=True)
        steps[OURS_COMPILED] = made_step(case, device, plans[PROFILED], compiles=True)
    losses |= {name: [step() for _ in range(3)] for name, step in steps.items() if name != OURS}
    step_s: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(effort.rounds):
        for name, step in steps.items():
            step()
            synchronize(device)
            started = time.perf_counter()
            for _ in range(effort.steps):
                step()
            synchronize(device)
            step_s[name].append((time.perf_counter() - started) / effort.steps)
    seen = {name: tuple(map(float, values)) for name, values in losses.items()}
    return Row(
        case.name,
        {name: tuple(times) for name, times in step_s.items()},
        {name: plan.predicted_step_s for name, plan in plans.items()},
        {name: plan.predicted_peak_memory_bytes[0] for name, plan in plans.items()},
        measured_bytes,
        seen,
        max(abs(a / b - 1) for a, b in zip(seen[OURS], seen[EAGER])),
    )


def traced_on(case: Case, job: Job, device: torch.device) -> Traced:
    """The trace of a model on the device, as in a script that has put it there."""
    numbers = (device.type, "bf16") if case.numbers == BF16 else None
    return trace(job.model.to(device), job.batch, autocast=numbers)


def cluster_of(device: Device) -> Cluster:
    """One machine with this device."""
    return Cluster("this device", (Machine("here", (device,), 1e10, 1e-5, 1e9),), 1e9, 1e-5)


def planned(traced: Traced, cluster: Cluster, measured: Profile | None = None) -> Plan:
    return make_plan(traced, cluster, profile=measured, planner="single")


def made_step(case: Case, device: torch.device, plan: Plan | None, *, compiles: bool = False) -> Step:
    """A function that makes a step and gives its loss: by ``plan``, or by PyTorch alone."""
    job = case.make()
    assert isinstance(job.batch, Mapping) and job.optimizer is not None
    batch = {name: x.to(device) for name, x in job.batch.items()}
    model: Any = job.model.to(device)
    optimizer = job.optimizer(model.parameters())
    if plan is not None:
        model, optimizer = mixmesh.parallelize(model, optimizer, plan, device=device, compile=compiles)
    else:
        fuse(optimizer)
        model = torch.compile(model) if compiles else model

    return step_of(model, optimizer, batch, partial(case.autocast, device))


def report(found: Sequence[Row | Measured], command: str) -> dict:
    rows = [row for row in found if isinstance(row, Row)]
    measured = next((c for c in found if isinstance(c, Measured)), None)
    return {
        "command": command,
        "revision": revision(),
        "device": "" if measured is None else measured.calibration.reported,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "calibration": None if measured is None else measured.calibration.to_toml(),
        "timings": [] if measured is None else [timing_of(t) for t in measured.timings],
        "optimizer_steps": [] if measured is None else measured.optimizer_steps,
        "rows": [asdict(row) for row in rows],
        "predicted_over_measured": {
            name: [row.predicted_step_s[name] / row.median_s(OURS) for row in rows]
            for name in (DATASHEET, CALIBRATED, PROFILED)
        },
    }


def timing_of(timing: Timing) -> dict:
    """A kernel that the calibration measured, in seconds."""
    sample = timing.sample
    shapes = {name: list(size) for name, size in sample.shape.inputs}
    return {
        "kernels": sample.kernels,
        "dtype": sample.dtype,
        "op": sample.shape.op,
        "inputs": shapes,
        "forward_s": timing.forward_s,
        "backward_s": timing.backward_s,
    }
