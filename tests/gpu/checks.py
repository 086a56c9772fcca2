"""What is checked on a GPU, as functions of a device: the same run on a CPU, small, where there is no GPU.

Each gives a row of figures; nothing is asserted here.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from gloo_world import run_world
from launches import TORCHRUN
from torch import nn

from benchmarks.steps import Step, step_of
from mixmesh.checkpoint.background import staged
from mixmesh.cluster import Cluster, Device, Machine
from mixmesh.cluster.device_file import Calibration
from mixmesh.cost import CostModel, Profile
from mixmesh.cost.gpu_memory import POOL_BYTES, allocator_loss, workspace_bytes
from mixmesh.frontend.job import Job
from mixmesh.frontend.job.workloads.language import LanguageModel
from mixmesh.frontend.job.workloads.layers import Layer
from mixmesh.frontend.trace import trace
from mixmesh.lang.plan_file import Plan
from mixmesh.lang.rules import RULES, strategies
from mixmesh.measure.profiler import profile
from mixmesh.planner import make_plan
from mixmesh.runtime.accelerator import (
    HOST_BACKEND,
    begin_peak,
    empty_cache,
    peak_bytes,
    peak_held_bytes,
    synchronize,
)
from mixmesh.runtime.comm import Comm, backend_for
from mixmesh.runtime.first_rank import everyones, from_first_rank, largest, wait_for_all
from mixmesh.runtime.messages import message_group
from mixmesh.runtime.parallel import parallelize
from mixmesh.step.memory import PeakMemory
from tests.rules.rule_proof import RATIOS, make_case, prove, units_of
from tests.support.rule_samples import SAMPLES

WARM_UP = 3


@dataclass(frozen=True)
class Size:
    """A language model of ``num_layers`` decoder blocks, and its batch."""

    num_layers: int
    width: int
    num_heads: int
    words: int
    seq: int
    batch: int

    def job(self, dtype: torch.dtype = torch.float32) -> Job:
        """The model with weights that are the same each time, and a batch of random words."""
        torch.manual_seed(0)
        layers = [Layer(self.width, self.num_heads, 4 * self.width) for _ in range(self.num_layers)]
        model = LanguageModel(layers, words=self.words, seq=self.seq, width=self.width).to(dtype)
        tokens = torch.randint(self.words, (2, self.batch, self.seq))
        return Job(model, {"tokens": tokens[0], "targets": tokens[1]}, optimizer=adamw)


SMALL = Size(num_layers=2, width=32, num_heads=2, words=100, seq=16, batch=4)
LARGE = Size(num_layers=12, width=1024, num_heads=16, words=16_000, seq=512, batch=16)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def refuted(device: torch.device, names: Iterable[str]) -> list[str]:
    """Operators and strategies of which an execution on ``device`` differs from the whole operator there."""
    wrong = []
    with device:
        for name in names:
            try:
                case = make_case(name, SAMPLES[name][0])
            except RuntimeError as error:
                if "derivative for" not in str(error):  # which this PyTorch lacks
                    wrong.append(f"{name}: {error}")
                continue
            for strategy in strategies(RULES[name], case.call):
                if RULES[name].own and strategy.factor == "n":
                    continue  # each rank's own by definition
                ratio = RATIOS[0]
                try:
                    prove(case, strategy, ratio, units_of(RULES[name], case.call, strategy))
                except Exception as error:
                    wrong.append(f"{name}, {strategy.factor}: {error}")
    return wrong


def cluster_of(device: torch.device) -> Cluster:
    """One machine with this device, its speed unknown: it is measured."""
    is_cpu = device.type == "cpu"
    memory_bytes = 8 * 2**30 if is_cpu else torch.accelerator.memory.get_memory_info(device)[1]
    name = "cpu" if is_cpu else torch.cuda.get_device_name(device)
    one = Device(name, 1e13, memory_bytes, 1e12, kind="cpu" if is_cpu else "gpu", supports_bf16=True)
    return Cluster("this device", (Machine("here", (one,), 1e10, 1e-5, 1e9),), 1e9, 1e-5)


def planned(job: Job, cluster: Cluster, measured: Profile | None = None) -> Plan:
    return make_plan(trace(job.model, job.batch), cluster, profile=measured)


def stepped(job: Job, device: torch.device, plan: Plan | None, compiled: bool = False) -> Step:
    """A function that makes a step and gives its loss: by ``plan``, or of the plain model."""
    batch = {name: value.to(device) for name, value in job.batch.items()}
    if plan is not None:
        model, optimizer = parallelize(job.model, job.optimizer(job.model.parameters()), plan, device=device)
    else:
        model = job.model.to(device)
        optimizer = job.optimizer(model.parameters())
        model = torch.compile(model) if compiled else model

    return step_of(model, optimizer, batch)


def losses(step: Step, count: int) -> list[float]:
    return [float(step()) for _ in range(count)]


def median_s(step: Callable[[], object], device: torch.device, count: int) -> float:
    """The median of ``count`` steps after a few more, each awaited."""
    times = []
    for _ in range(WARM_UP + count):
        synchronize(device)
        started = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[WARM_UP:])


def agreement(device: torch.device, size: Size, dtype: torch.dtype, steps: int = 4) -> dict:
    """Losses of a training by a plan beside those of the plain model."""
    plan = planned(size.job(dtype), cluster_of(device))
    ours = losses(stepped(size.job(dtype), device, plan), steps)
    plain = losses(stepped(size.job(dtype), device, None), steps)
    return {"ours": ours, "plain": plain, "error": max(abs(a / b - 1) for a, b in zip(ours, plain))}


def predicted_bytes(plan: Plan, cluster: Cluster) -> int:
    """Bytes of tensors at the peak that a plan of one GPU predicts: less what the process holds, and what the
    allocator is taken to lose."""
    process = PeakMemory(CostModel(cluster)).constants(plan.program)[0]
    return round((plan.predicted_peak_memory_bytes[0] - process - POOL_BYTES) / (1 + allocator_loss()))


def memory(device: torch.device, size: Size) -> dict:
    """Bytes of tensors and workspaces at the peak of a step, predicted and as the allocator counted them; and
    all that the process held of the card."""
    job, cluster = size.job(), cluster_of(device)
    plan = planned(job, cluster)
    predicted = predicted_bytes(plan, cluster) + workspace_bytes(cluster.devices[0].name)
    before = torch.accelerator.memory.memory_allocated(device)
    step = stepped(job, device, plan)
    empty_cache(device)
    begin_peak(device)
    losses(step, WARM_UP)
    measured = peak_bytes(device) - before
    return {
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "ratio": predicted / measured,
        "of_process_ratio": plan.predicted_peak_memory_bytes[0] / peak_held_bytes(device),
    }


def prediction(device: torch.device, size: Size, budget_s: float, steps: int) -> dict:
    """Seconds of a step of a profiled job, predicted and measured."""
    job, cluster = size.job(), cluster_of(device)
    measured = profile(trace(job.model, job.batch).graph, job, cluster, budget_s=budget_s, device=device)
    plan = planned(size.job(), cluster, measured)
    took_s = median_s(stepped(size.job(), device, plan), device, steps)
    return {
        "predicted_s": plan.predicted_step_s,
        "measured_s": took_s,
        "ratio": plan.predicted_step_s / took_s,
    }


def overhead(device: torch.device, size: Size, steps: int, *, compiles: bool) -> dict:
    """Seconds of a step by a plan, of the plain model, and of the plain model compiled."""
    plan = planned(size.job(), cluster_of(device))
    ours_s = median_s(stepped(size.job(), device, plan), device, steps)
    plain_s = median_s(stepped(size.job(), device, None), device, steps)
    row = {"ours_s": ours_s, "plain_s": plain_s, "over_plain": ours_s / plain_s}
    if compiles:
        compiled_s = median_s(stepped(size.job(), device, None, compiled=True), device, steps)
        row |= {"compiled_s": compiled_s, "over_compiled": ours_s / compiled_s}
    return row


def shared(device: torch.device, world_size: int) -> list[str | None]:
    """Failures by rank of a training by a plan of unequal shares, on processes that share the device."""
    job = SMALL.job()
    plan = make_plan(trace(job.model, job.batch), unequal(device, world_size), planner="ddp-proportional")
    return run_world(world_size, {"train": partial(_train_beside_others, str(device), plan)})["train"]


def unequal(device: torch.device, world_size: int) -> Cluster:
    """Devices of which each is half as fast as the one before."""
    kind = "cpu" if device.type == "cpu" else "gpu"
    devices = tuple(Device(f"d{n}", 1e13 / 2**n, 8 * 2**30, 1e12, kind=kind) for n in range(world_size))
    return Cluster("unequal", (Machine("here", devices, 1e10, 1e-5, 1e9),), 1e9, 1e-5)


def _train_beside_others(device: str, plan: Plan, _: None) -> None:
    ours = losses(stepped(SMALL.job(), torch.device(device), plan), WARM_UP)
    plain = losses(stepped(SMALL.job(), torch.device(device), None), WARM_UP)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=0.0)


def meeting(device: torch.device, world_size: int) -> list[str | None]:
    """Failures by rank of a sum and of messages, in the backend that trainings take on the device."""
    return run_world(world_size, {"meet": partial(_meet, str(device))})["meet"]


def _meet(device: str, _: None) -> None:
    comm = Comm.of_sets(int(os.environ["WORLD_SIZE"]), (), device=device, timeout_s=60)
    x = torch.full((3,), comm.rank + 1.0, device=comm.device)
    dist.all_reduce(x)
    assert x.tolist() == [sum(range(1, comm.world_size + 1))] * 3
    wait_for_all("a test")
    assert everyones(comm.rank) == comm.everyone
    assert largest(x, "a test").device == x.device
    assert from_first_rank(lambda: "a message") == "a message"
    own = backend_for(comm.device)
    assert dist.get_backend() == own
    assert (message_group() is None) == (own == HOST_BACKEND)  # small things are told by way of the host


def staging(device: torch.device) -> dict:
    """Copies that a checkpoint is written from, and whether they are in pinned memory."""
    tensors = {"a": torch.arange(5.0, device=device), "b": torch.ones(2, 3, device=device).bfloat16()}
    first = staged(tensors, {})
    again = staged({name: x + 1 for name, x in tensors.items()}, first)
    equal = all(torch.equal(again[name], x.cpu() + 1) for name, x in tensors.items())
    reused = all(again[name].data_ptr() == first[name].data_ptr() for name in tensors)
    return {"equal": equal, "reused": reused, "pinned": all(x.is_pinned() for x in again.values())}


def doctor(world_size: int, timeout_s: float) -> dict:
    """The report of ``mixmesh doctor`` on so many processes of this machine, which share its GPUs."""
    launcher = [sys.executable, *TORCHRUN, str(world_size)]
    done = subprocess.run(
        [*launcher, "-m", "mixmesh", "doctor", "--json"],
        capture_output=True, text=True, timeout=timeout_s, env=dict(os.environ, OMP_NUM_THREADS="1"),
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    report = json.loads(lines[-1]) if lines else {"ok": False, "checks": [], "error": done.stderr[-2000:]}
    wrong = [check for check in report["checks"] if check["status"] == "wrong"]
    return {"ok": report["ok"], "wrong": wrong, "error": report.get("error", ""), "code": done.returncode}


def calibration(device: torch.device, seconds: float, folder: Path) -> dict:
    """The errors of ``mixmesh calibrate`` in a process of its own, whose memory is measured too."""
    command = ["calibrate", "--device", device.type, "--seconds", str(seconds), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "mixmesh", *command],
        capture_output=True, text=True, timeout=3 * seconds + 120,
        env=dict(os.environ, MIXMESH_DEVICES=str(folder)),
    )  # fmt: skip
    if done.returncode:
        return {"code": done.returncode, "error": done.stderr[-2000:]}
    made = Calibration.load(json.loads(done.stdout.splitlines()[-1])["out"])
    fits = [fit for fit in made.fits if fit.kernels != "small kernels"]
    return {
        "code": 0,
        "classes": len({(fit.kernels, fit.dtype) for fit in fits}),
        "error": statistics.fmean(fit.mean_error for fit in fits),
        "datasheet_error": statistics.fmean(fit.datasheet_error for fit in fits),
        "issue_s": made.device.issue_s,
        "context_bytes": made.device.context_bytes,
    }


def write(rows: dict[str, dict], device: torch.device, path: Path) -> str:
    """Keeps the rows as JSON, and gives them as a table in Markdown."""
    name = "a CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    made = {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made, indent=1))
    lines = [f"{name}, PyTorch {torch.__version__}", "", "| check | figures |", "|---|---|"]
    for check, row in rows.items():
        figures = ", ".join(f"{key} {text(value)}" for key, value in row.items())
        lines.append(f"| {check} | {figures} |")
    return "\n".join(lines)


def text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def batch_norms(device: torch.device, steps: int = 3) -> dict:
    """The largest relative differences of losses, parameters and running statistics of a small network with
    batch norm, in float64 and in channels_last too, trained by a plan and by PyTorch alone."""
    rows = {}
    for layout in (torch.contiguous_format, torch.channels_last):
        plain, mine = (convolutional().to(device, memory_format=layout) for _ in range(2))
        batch = {
            "images": torch.randn(8, 3, 16, 16, dtype=torch.float64, device=device).to(memory_format=layout)
        }
        batch["labels"] = torch.arange(8, device=device) % 4
        plan = planned(Job(mine, batch), cluster_of(device))
        model, own = parallelize(mine, torch.optim.SGD(mine.parameters(), lr=0.1), plan, device=device)
        other = torch.optim.SGD(plain.parameters(), lr=0.1)
        losses = []
        for _ in range(steps):
            pair = model(**batch), plain(**batch)
            losses.append(float(pair[0].detach() / pair[1].detach() - 1))
            for loss, optimizer in zip(pair, (own, other)):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        whole, state = model.full_state_dict(), plain.state_dict()
        differences = [float((whole[n].double() - x.cpu().double()).abs().max()) for n, x in state.items()]
        rows[str(layout).partition(".")[2]] = max(*map(abs, losses), *differences)
    return rows


class Convolutional(nn.Module):
    """Two convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8),
            nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
        )  # fmt: skip

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(images), labels)


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return Convolutional().double()
