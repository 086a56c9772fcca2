"""One rank of ``python -m benchmarks checkpoints``."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from benchmarks import jobs
from benchmarks.checkpoints import ASYNC, EVERY_STEPS, NONE, WAITED
from benchmarks.measure import COLLECTIVE_TIMEOUT_S, measure_profile, print_from_rank_0, slowest
from mixmesh.checkpoint import save, save_async
from mixmesh.lang.plan_file import Plan
from mixmesh.measure.testbed import enter_device
from mixmesh.runtime.comm import default_device, initialise, leave
from mixmesh.runtime.data import shard_batches
from mixmesh.runtime.job_data import endless
from mixmesh.runtime.parallel import parallelize

WARMUP_STEPS = 3


def measure_times(job: str, plan_file: str, folder: str, rounds: str) -> None:
    """Times blocks of steps of all variants in turns, with checkpoints into ``folder``."""
    initialise(int(os.environ["WORLD_SIZE"]), default_device(), COLLECTIVE_TIMEOUT_S)
    plan, made = Plan.load(plan_file), jobs.make(job)
    model, optimizer = parallelize(
        made.model,
        made.optimizer(made.model.parameters()),
        replace(plan, predicted_peak_memory_bytes=()),  # memory is not measured here
        timeout_s=COLLECTIVE_TIMEOUT_S,
        check_model=False,
    )
    batches = shard_batches(endless(made.data, made.batch), plan, dist.get_rank())

    def steps() -> None:
        for _ in range(EVERY_STEPS):
            step()

    def step() -> None:
        local, loss = model.forward_local(**next(batches))
        local.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.wait()

    parts = {"folder": folder, "step": 1, "model": model, "optimizer": optimizer, "keep": 1}
    staging_s = []

    def saved_beside() -> None:
        started = time.perf_counter()
        saving = save_async(**parts)
        staging_s.append(time.perf_counter() - started)
        steps()
        saving.result()

    def saved_before() -> None:
        save(**parts)
        steps()

    variants = {NONE: steps, ASYNC: saved_beside, WAITED: saved_before}
    enter_device()  # all process groups exist by now, with their threads outside of the quota
    for _ in range(WARMUP_STEPS):
        step()
    save_async(**parts).result()  # makes process groups, and memory for the copies
    block_s: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(int(rounds)):
        for name, block in variants.items():
            say(f"round {number + 1} of {rounds}: {name}")
            dist.barrier()
            block_s[name].append(slowest(block, 1)[0])
    state_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))
    print_from_rank_0({"block_s": block_s, "staging_s": staging_s, "state_bytes": state_bytes})


say = partial(print, file=sys.stderr, flush=True)


if __name__ == "__main__":
    {"profile": measure_profile, "times": measure_times}[sys.argv[1]](*sys.argv[2:])
    leave()
