"""A training whose devices change their speed: shares follow in the middle of it, and losses, samples,
checkpoints and a restart are as if nothing had happened."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed, run_world, shared_folder
from idioms.plans import UNEVEN, named
from test_gloo import close
from torch import nn
from torch.utils.data import DataLoader, Dataset

import mixmesh
from mixmesh.checkpoint.manifest import checkpoints_in
from mixmesh.checkpoint.run import Every, RunCheckpoints, Settings
from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import make_ratio
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.lang.plan_file import Plan
from mixmesh.passes.zero import with_stage
from mixmesh.runtime.comm import initialise
from mixmesh.runtime.train import train
from mixmesh.search.baselines import data_parallel
from mixmesh.training.preparation.loading import own_loader
from mixmesh.training.rebalance import RunBalancer, Sensitivity, Solver

WORLD, BATCH, STEPS = 3, 12, 42
ROW_S = (0.002, 0.003, 0.006)  # seconds of a sample on each device: shares of 6, 4 and 2 end together
SLOWED_AT, SLOWED, FACTOR = 8, 0, 3.0
# devices whose products take about that, by what is declared of them
CLUSTER = """
name = "slow ones"
[[machine]]
link_gbit_per_s = 20
devices = [
  { name = "a", tflop_per_s = 4.6e-5, memory_gib = 8, memory_gbyte_per_s = 100 },
  { name = "b", tflop_per_s = 3.1e-5, memory_gib = 8, memory_gbyte_per_s = 100 },
  { name = "c", tflop_per_s = 1.5e-5, memory_gib = 8, memory_gbyte_per_s = 100 },
]
"""
QUICK = Sensitivity(window_s=0.0)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(64, 100), nn.BatchNorm1d(100), nn.ReLU(), nn.Linear(100, 4))
        self.double()

    def forward(self, x, y):
        return (self.body(x) - y).square().mean()


class Rows(Dataset):
    """Samples that are made when they are asked for."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, n: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(n)
        x, y = (torch.randn(size, generator=g, dtype=torch.float64) for size in (64, 4))
        return {"x": x, "y": y}


def batch() -> dict[str, torch.Tensor]:
    rows = [Rows()[n] for n in range(BATCH)]
    return {key: torch.stack([row[key] for row in rows]) for key in ("x", "y")}


def plan_of(stage: int) -> Plan:
    cluster = Cluster.parse(CLUSTER)
    traced = trace(Normed(), batch())
    program = data_parallel(traced.graph, CostModel(cluster), UNEVEN)
    program = with_stage(program, stage, UNEVEN) if stage else program
    return Plan(program, "test", 0.03, (), cluster.fingerprint, graph_fingerprint=traced.graph.fingerprint)


@dataclass
class Devices:
    """Has each rank take ``ROW_S`` for each of its samples, one of them more from a step on.

    The balancer is told these seconds, and not what a rank took on a machine with too much to do.
    """

    balancer: RunBalancer | None = None
    slowed_at: int = SLOWED_AT
    rows: list[int] = field(default_factory=list)
    own_s: float = 0.0  # in the last step
    model: nn.Module | None = None

    def begin(self, model, optimizer, feed) -> None:
        self.model = model
        if self.balancer is not None:
            self.balancer.begin(model, optimizer, feed)

    def after_step(self, num_steps: int, step_s: float, own_s: float) -> None:
        if self.balancer is not None:
            self.balancer.after_step(num_steps, step_s, self.own_s)

    def end(self) -> None:
        if self.balancer is not None:
            self.balancer.end()

    def work(self, *_) -> None:
        rank = dist.get_rank()
        program = self.model.program
        first = next(i for i in program.instructions if i.op == "input")
        self.rows.append(program.local_shape(first.result, rank)[0])
        slow = FACTOR if rank == SLOWED and len(self.rows) > self.slowed_at else 1.0
        self.own_s = ROW_S[rank] * self.rows[-1] * slow
        time.sleep(self.own_s)


def run(plan: Plan, devices: Devices, steps: int, keeper=None, workers: int | None = None) -> tuple:
    """Losses of a run; without ``workers`` of one batch over and over."""

    def optimizer(params):
        made = torch.optim.AdamW(params, lr=0.01)
        made.register_step_pre_hook(devices.work)
        return made

    data = None
    if workers is not None:
        shuffled = torch.Generator().manual_seed(3)
        data = DataLoader(Rows(), BATCH, shuffle=True, num_workers=workers, generator=shuffled)
    job = mixmesh.Job(Normed(), batch(), optimizer=optimizer, data=data)
    return train(job, plan, steps=steps, device="cpu", timeout_s=60, keeper=keeper, balancer=devices).losses


def balancer(said: list[str], steps: int | None) -> RunBalancer:
    return RunBalancer(Solver(Cluster.parse(CLUSTER), None, ADAM), steps, said.append, QUICK)


def has_followed(devices: Devices, said: list[str]) -> None:
    """The slow device has fewer samples, in time, and every rank was told the same."""
    changes = devices.balancer.changes
    assert changes and SLOWED_AT < changes[0]["step"] <= SLOWED_AT + 30, said
    told: list = [None] * WORLD
    dist.all_gather_object(told, (said, [d.terms for d in devices.balancer.decisions], devices.rows))
    assert all(one[:2] == told[0][:2] for one in told)
    assert "applied" in said[0] and "device 0 takes" in said[0], said
    for rows in zip(*(one[2] for one in told)):
        assert sum(rows) == BATCH
    assert told[SLOWED][2][-1] < told[SLOWED][2][0] == 6


def check_losses_are_those_of_an_undisturbed_run(_) -> None:
    plan, said = plan_of(3), []
    expected = run(plan, Devices(), STEPS)
    devices = Devices(balancer(said, 1000))
    close(torch.tensor(run(plan, devices, STEPS)), torch.tensor(expected))
    has_followed(devices, said)


def keeper(folder, plan: Plan, is_fresh: bool = False) -> RunCheckpoints:
    settings = Settings(folder, Every(steps=1000), 2, is_fresh)
    return RunCheckpoints(settings, plan, None, lambda _: None, may_follow=True)


def check_data_checkpoints_and_a_restart(_) -> None:
    """The checkpoint holds the shares of its step, and a restart goes on under those of its own plan."""
    plan, said, folder = plan_of(3), [], shared_folder()
    expected = run(plan, Devices(), STEPS + 5, keeper(shared_folder(), plan), workers=0)
    devices = Devices(balancer(said, 1000))
    kept = keeper(folder, plan)
    got = run(plan, devices, STEPS, kept, workers=0)
    kept.close()
    has_followed(devices, said)
    saved = Plan.load(checkpoints_in(folder)[0] / "run.plan")
    assert saved.program.ratios == devices.balancer._plan.program.ratios != plan.program.ratios
    again = keeper(folder, plan)
    got += run(plan, Devices(), STEPS + 5, again, workers=0)
    again.close()
    close(torch.tensor(got), torch.tensor(expected))


def check_batches_that_are_loading_keep_their_shares(_) -> None:
    plan = plan_of(0)
    loader = own_loader(DataLoader(Rows(), BATCH), plan)
    loader._sampler.ahead = 2  # as with workers that load two batches before they are needed
    ratios = tuple((name, make_ratio(tuple(reversed(ratio)))) for name, ratio in plan.program.ratios)
    batches = iter(loader)
    sizes = [len(next(batches)["x"])]
    loader.follow(replace(plan, program=plan.program.changed(ratios=ratios)))
    sizes += [len(batch["x"]) for batch in batches]
    told: list = [None] * WORLD
    dist.all_gather_object(told, sizes)
    assert told == [[6, 6, 6, 2, 2], [4] * 5, [2, 2, 2, 6, 6]]


CHECKS = named(
    check_batches_that_are_loading_keep_their_shares,
    check_losses_are_those_of_an_undisturbed_run,
    check_data_checkpoints_and_a_restart,
)


def start() -> None:
    """Before anything is collected for a plan."""
    initialise(int(os.environ["WORLD_SIZE"]), torch.device("cpu"), 60)


@pytest.fixture(scope="module")
def results():
    return run_world(WORLD, CHECKS, start)


@pytest.mark.parametrize("name", CHECKS)
def test_shares_follow(name, results):
    assert_passed(results[name])
