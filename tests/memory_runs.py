"""Predicted and measured peak memory of real runs: ``python tests/memory_runs.py [--roomy] [CASE ...]``.

A case is a job of ``memory_jobs``, a kind of plan and the shares of the ranks. Every rank is a plain
process of its own, as under ``mixmesh run``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import memory_jobs
import torch
from fuzz.ports import free_port
from pipelines import cut_into

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.frontend.job import load_job, optimizer_states
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import Program, make_ratio, samples_of
from mixmesh.lang.optimizer_states import OptimizerStates
from mixmesh.lang.plan_file import MicroBatch, Plan
from mixmesh.measure.profiler.constants import process_memory
from mixmesh.passes.buckets import with_buckets
from mixmesh.passes.recomputation import recomputed
from mixmesh.passes.zero import with_stage
from mixmesh.search.baselines import data_parallel, fully_sharded
from mixmesh.search.synthesis import Prices, Problem, emit, search
from mixmesh.simulator import MicroBatches, simulate

STEPS = 3
ROOM_BYTES = 16 * 2**30  # to use, with --roomy
CLUSTER = """
name = "cpus"
[network]
bandwidth_gbit_per_s = 10
latency_us = 30
[[machine]]
name = "a"
link_gbit_per_s = 20
devices = [{devices}]
"""
DEVICE = '{ name = "cpu", tflop_per_s = 0.1, memory_gib = 16, memory_gbyte_per_s = 10, cpu_share = 1 }'

CASES = {
    f"{job}-{kind}-{'-'.join(map(str, shares))}": (job, kind, shares)
    for job, kind, shares in (
        ("mlp", "ddp", (50, 50)),
        ("mlp", "fsdp", (70, 30)),
        ("mlp", "tensor", (60, 40)),
        ("wide", "ddp", (50, 50)),
        ("wide_one_by_one", "ddp", (50, 50)),
        ("mlp_sgd", "ddp", (80, 20)),
        ("mlp_sgd", "fsdp", (60, 40)),
        ("gpt", "ddp", (75, 25)),
        ("gpt", "fsdp", (50, 50)),
        ("gpt", "tensor", (60, 40)),
        ("gpt", "hap", (85, 15)),
        ("gpt_long", "ddp", (60, 40)),
        ("gpt_long", "fsdp", (90, 10)),
        ("bert_dropout", "ddp", (60, 40)),
        ("bert_dropout", "tensor", (60, 40)),
        ("moe", "ddp", (60, 40)),
        ("moe", "hap", (60, 40)),
        ("vgg", "ddp", (65, 35)),
        ("vgg", "fsdp", (50, 50)),
        ("vgg", "hap", (95, 5)),
        ("resnet", "ddp", (70, 30)),
        ("resnet", "fsdp", (50, 50)),
        ("gpt", "fsdp", (60, 38, 2)),
        # ZeRO stages and micro-batches; the first of two ranks owns three quarters
        ("gpt", "zero1", (60, 40)),
        ("gpt", "zero2", (60, 40)),
        ("gpt_long", "zero0x4", (60, 40)),
        ("gpt_long", "zero1x4", (60, 40)),
        ("gpt_long", "zero2x4", (60, 40)),
        ("gpt_long", "zero3x4", (60, 40)),
        ("gpt_long", "zero3", (60, 40)),
        ("mlp", "zero1", (50, 50)),
        # with activations that are computed again
        ("gpt_long", "ddp again", (60, 40)),
        ("gpt_long", "zero3 again", (60, 40)),
        ("gpt_long", "zero3x4 again", (60, 40)),
        ("bert_dropout", "ddp again", (60, 40)),
        # a stage per rank, of as many operators each
        ("gpt_long", "pipelinex4", (50, 50)),
        ("gpt_long", "pipelinex4", (40, 30, 30)),
    )
}
OWNERS = (0.75, 0.25)


def cpus(count: int) -> Cluster:
    return Cluster.parse(CLUSTER.replace("{devices}", ", ".join([DEVICE] * count)))


def planned(job: str, kind: str, shares: tuple[int, ...]) -> tuple[Program, MicroBatches, OptimizerStates]:
    """The program of a case, its micro-batches, and the states of its optimizer."""
    with torch.device("meta"):
        made = getattr(memory_jobs, job)()
    graph = trace(made.model, made.batch).graph
    costs, ratio = CostModel(cpus(len(shares))), make_ratio([float(s) for s in shares])
    micro_batches = None
    kind, _, again = kind.partition(" ")
    again = recomputed if again else lambda program: program
    if kind.startswith("pipeline"):
        stages = [[float(r == stage) for r in range(len(shares))] for stage in range(len(shares))]
        program = cut_into(graph, stages, costs)
        micro_batches = in_micro_steps(program, int(kind.removeprefix("pipelinex")))
    elif kind.startswith("zero"):
        stage, _, steps = kind.removeprefix("zero").partition("x")
        program = with_stage(again(data_parallel(graph, costs, ratio)), int(stage), OWNERS)
        micro_batches = in_micro_steps(program, int(steps)) if steps else None
    elif kind in ("ddp", "fsdp"):
        program = again(data_parallel(graph, costs, ratio))
        program = fully_sharded(program) if kind == "fsdp" else with_buckets(program, 16e6)
    else:
        # a high price of gradients makes parameters be sharded and stay so
        prices = Prices(gradient_sync=20.0) if kind == "tensor" else Prices()
        problem = Problem(graph, costs, ratio, prices=prices)
        program = emit(problem, search(problem, weight=1.05, max_states=2_000))
    return replace(program, name=job), micro_batches, optimizer_states(made.optimizer, made.model)


def in_micro_steps(program: Program, steps: int) -> MicroBatches:
    """So many of every rank, the last not the largest."""
    sizes = [(-(-n // steps), n) for n in samples_of(program).counts]
    return tuple(MicroBatch(m, steps, n - (steps - 1) * m) for m, n in sizes)


def measured(job: str, plan: Plan) -> list[int]:
    """Bytes per rank of a run of a few steps."""
    world_size, port = plan.program.world_size, free_port()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "case.plan")
        plan.save(path)
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", job, str(path)],
                env={
                    **os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                },
                stdout=subprocess.PIPE if rank == 0 else None,
                text=True,
            )
            for rank in range(world_size)
        ]  # fmt: skip
        out, _ = workers[0].communicate()
        assert not any([w.wait() for w in workers]), "a rank failed"
    return json.loads(out.splitlines()[-1])


def worker(job: str, path: str) -> None:
    from mixmesh.runtime.train import train

    torch.set_num_threads(1)
    plan = Plan.load(path)
    torch.manual_seed(0)  # one batch on all ranks
    report = train(load_job(f"{Path(__file__).with_name('memory_jobs.py')}:{job}"), plan, steps=STEPS)
    if os.environ["RANK"] == "0":
        print(json.dumps(report.peak_memory_bytes), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@cache
def constant_bytes() -> int:
    """What a process without tensors holds, measured once: it is no case's own."""
    return process_memory().working


def compared(name: str, *, usable_bytes: int = 0) -> list[tuple[int, int]]:
    """Per rank, predicted and measured bytes, with the constant that is measured here, on devices with
    ``usable_bytes``."""
    job, kind, shares = CASES[name]
    program, micro_batches, states = planned(job, kind, shares)
    constant = constant_bytes()
    costs = CostModel(cpus(len(shares)))
    usable = (usable_bytes,) * len(shares) if usable_bytes else ()
    timeline = simulate(
        program, costs, optimizer_states=states, micro_batches=micro_batches, usable_bytes=usable
    )
    held = zip(timeline.peak_memory_bytes, map(costs.memory_constant_bytes, range(len(shares))))
    peaks = tuple(constant + peak - usual for peak, usual in held)
    fingerprint = costs.cluster.fingerprint
    plan = Plan(
        program,
        kind,
        1.0,
        peaks,
        cluster_fingerprint=fingerprint,
        micro_batches=micro_batches,
        usable_bytes=usable,
    )
    return list(zip(peaks, measured(job, plan)))


def main(names: list[str], usable_bytes: int) -> None:
    for name in names or CASES:
        for rank, (p, m) in enumerate(compared(name, usable_bytes=usable_bytes)):
            print(
                f"{name:28} {rank}  {p / 1e6:7.0f} {m / 1e6:7.0f} MB  {100 * (p / m - 1):+6.1f} %", flush=True
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        names = [name for name in sys.argv[1:] if name != "--roomy"]
        main(names, ROOM_BYTES if "--roomy" in sys.argv else 0)
