"""A rank is stopped while the others are in some phase: ``python phases_worker.py FOLDER PHASE ...`` runs all
side by side, as ``watch_worker`` does. What the others do then takes longer than they may last."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from watch_worker import TEXT, WORLD, Small, batch, main, train

import mixmesh
from mixmesh import checkpoint
from mixmesh.checkpoint import background
from mixmesh.checkpoint.run import Every, RunCheckpoints, Settings
from mixmesh.lang.ir import parse_program
from mixmesh.lang.plan_file import Plan
from mixmesh.runtime.agreement import COMPARED_STEPS
from mixmesh.runtime.parallel import parallelize
from mixmesh.runtime.train import train as run_training
from mixmesh.runtime.watch import BEAT_S
from mixmesh.training.preparation import start

HEARTBEAT_S = 2.0
LONG_S = 100.0
FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
OPTIONS = dict(device="cpu", heartbeat_s=HEARTBEAT_S, timeout_s=150)


def hang(rank: int, time_s: float = LONG_S) -> None:
    """Stops the last rank, and keeps the others where they are."""
    print("START", flush=True)
    if rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(time_s)


def stop(rank: int) -> None:
    """Stops the last rank; the others go on."""
    print("START", flush=True)
    if rank:
        os.kill(os.getpid(), signal.SIGSTOP)


def program():
    return parse_program(TEXT % (WORLD, ", ".join([str(1 / WORLD)] * WORLD), "relu"))


def parallel():
    torch.manual_seed(0)
    model = Small()
    model, optimizer = parallelize(model, torch.optim.SGD(model.parameters(), 0.01), program(), **OPTIONS)
    train(model, optimizer, COMPARED_STEPS)
    return model, optimizer


# --- own loops -----------------------------------


def in_a_collective(rank: int) -> None:
    model, optimizer = parallel()
    stop(rank)
    train(model, optimizer, 1)


def in_a_call_that_computes(rank: int) -> None:
    model, _ = parallel()
    with model.comm.call("training forward"):
        hang(rank)


def in_evaluation(rank: int) -> None:
    model, _ = parallel()
    stop(rank)
    model.eval()(**batch(0))


def in_export(rank: int) -> None:
    model, _ = parallel()
    stop(rank)
    model.full_state_dict()


def while_groups_are_made(rank: int) -> None:
    made = dist.new_group
    dist.new_group = lambda *args, **kwargs: (hang(rank), made(*args, **kwargs))
    parallel()


def while_a_disk_is_stuck(rank: int) -> None:
    """The thread that writes the checkpoint is held up when the script is over."""
    model, optimizer = parallel()
    reached = threading.Event()
    os.fsync = lambda number: (reached.set(), time.sleep(LONG_S))
    checkpoint.save_async(FOLDER / "stuck", step=1, model=model)
    reached.wait()
    stop(rank)
    train(model, optimizer, 1)


# --- ``mixmesh run`` -----------------------------


class SlowOptimizer(torch.optim.SGD):
    rank, num_steps, time_s = 0, 0, LONG_S

    def step(self, closure=None):
        self.num_steps += 1
        if self.num_steps == 5:
            hang(self.rank, self.time_s)
        return super().step(closure)


class SlowData:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self):
        for step in range(7):
            if step == 4:
                hang(self.rank)
            yield batch(step)


def plan() -> Plan:
    return Plan(program(), "test", 0.0, (), "")


def run_job(job: mixmesh.Job, **options) -> None:
    torch.manual_seed(0)
    run_training(job, plan(), steps=7, **OPTIONS, **options)


def in_the_optimizer(rank: int) -> None:
    SlowOptimizer.rank = rank
    run_job(mixmesh.Job(Small(), batch(0), optimizer=lambda p: SlowOptimizer(p, 0.01)))


def in_the_data(rank: int) -> None:
    run_job(mixmesh.Job(Small(), batch(0), data=SlowData(rank)))


def run_and_save(name: str, optimizer: Callable) -> None:
    settings = Settings(FOLDER / name, Every(steps=4), keep=2)
    keeper = RunCheckpoints(settings, plan(), None, print)
    keeper._check_room = lambda: True
    run_job(mixmesh.Job(Small(), batch(0), optimizer=lambda p: optimizer(p, 0.01)), keeper=keeper)


def while_a_checkpoint_is_staged(rank: int) -> None:
    background.staged = lambda tensors, buffers: hang(rank)
    run_and_save("staged", torch.optim.SGD)


def while_a_checkpoint_waits(rank: int) -> None:
    """The rank that was lost is found while this one computes, and its next call raises that; the thread that
    writes the checkpoint is still in a collective then."""
    if rank:
        background.Saving._run = lambda saving: None  # its thread never comes
    SlowOptimizer.rank, SlowOptimizer.time_s = rank, HEARTBEAT_S + 2 * BEAT_S
    run_and_save("waits", SlowOptimizer)


# --- the preparation -----------------------------


def prepare(rank: int, phase: str, trouble) -> None:
    """Has ``trouble`` begin with a phase."""
    begin = start.Phases.kept

    def kept(phases, name, *rest):
        if name == phase:
            trouble(rank)
        return begin(phases, name, *rest)

    start.Phases.kept = kept
    os.environ["LOCAL_WORLD_SIZE"] = str(WORLD)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    loader = DataLoader(TensorDataset(torch.randn(24, 4), torch.randint(2, (24,))), 12)
    mixmesh.prepare(
        model, torch.optim.SGD(model.parameters(), 0.01), loader, loss=torch.nn.functional.cross_entropy,
        profile_s=1, cache=FOLDER / f"cache of {phase}", heartbeat_s=HEARTBEAT_S,
    )  # fmt: skip


def while_links_are_measured(rank: int) -> None:
    prepare(rank, "devices and links", stop)


def while_operators_are_measured(rank: int) -> None:
    prepare(rank, "profile", stop)


def while_the_first_rank_plans(rank: int) -> None:
    prepare(rank, "plan", hang)


PHASES = {
    function.__name__: function
    for function in (
        in_a_collective, in_a_call_that_computes, in_evaluation, in_export, while_groups_are_made,
        while_a_checkpoint_waits, while_a_disk_is_stuck, in_the_optimizer, in_the_data,
        while_a_checkpoint_is_staged, while_links_are_measured, while_operators_are_measured,
        while_the_first_rank_plans,
    )
}  # fmt: skip


def run(phase: str, rank: int) -> None:
    torch.set_num_threads(1)
    PHASES[phase.partition(" ")[2]](rank)


if __name__ == "__main__":
    main(FOLDER, sys.argv[2:], run)
