"""Worlds in which something is wrong: ``python watch_worker.py FOLDER SCENARIO ...`` runs all side by side.

Every rank is forked from this process, which has imported everything once. The output of a rank goes to
FOLDER/SCENARIO-RANK.txt; how each ended, and how many seconds after the trouble, to FOLDER/ends.json."""

import atexit
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from fuzz.ports import free_port
from torch import nn

import mixmesh
from mixmesh.errors import MixmeshError
from mixmesh.lang.ir import parse_program
from mixmesh.lang.plan_file import Plan
from mixmesh.runtime import agreement
from mixmesh.runtime.agreement import COMPARED_STEPS
from mixmesh.runtime.first_rank import everyones, wait_for_all
from mixmesh.runtime.parallel import full_optimizer_state_dict, parallelize
from mixmesh.runtime.peers import Peers
from mixmesh.runtime.scaler import GradScaler
from mixmesh.runtime.train import train as run_training
from mixmesh.training.preparation.loading import own_loader

WORLD = 2
LIMIT_S = 150.0  # of all worlds together, on a busy machine
TEXT = """\
program small world=%d {
  ratio r0 = [%s]
  %%x = input("x") : f32[12, 4] S(0)@r0
  %%scale = input("scale") : f32[4] R
  %%piece = param("layer.weight") : f32[12, 4] S(0)@r0
  %%w = all_gather(%%piece) : f32[12, 4] R
  %%h = aten.linear(%%x, %%w) : f32[12, 12] S(0)@r0
  %%k = aten.%s(%%h) : f32[12, 12] S(0)@r0
  %%m = aten.mul.Tensor(%%x, %%scale) : f32[12, 4] S(0)@r0
  %%a = aten.sum(%%k) : f32[] P(sum)
  %%b = aten.sum(%%m) : f32[] P(sum)
  %%loss = aten.add.Tensor(%%a, %%b) : f32[] P(sum)
  return %%loss
}
"""


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 12, bias=False)

    def forward(self, x, scale):
        return torch.relu(self.layer(x)).sum() + (x * scale).sum()


class Changed(Small):
    def forward(self, x, scale):
        return torch.tanh(self.layer(x)).sum() + (x * scale).sum()


Changed.__name__ = Changed.__qualname__ = "Small"


def batch(seed: int) -> dict:
    g = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(12, 4, generator=g), "scale": torch.randn(4, generator=g)}


def train(model, optimizer, steps: int, feed=batch) -> None:
    for step in range(steps):
        model(**feed(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


class Data:
    """Batches that are in trouble before the fifth on the last rank."""

    def __init__(self, trouble) -> None:
        self.trouble = trouble

    def __iter__(self):
        for step in range(7):
            if step == 4:
                print("START", flush=True)
                if self.trouble() == "ends":
                    return
            yield batch(step)


class Rows(torch.utils.data.Dataset):
    """Samples of which one cannot be read on the last rank, by a worker."""

    def __init__(self, is_spoilt: bool) -> None:
        self.is_spoilt = is_spoilt

    def __len__(self) -> int:
        return 7 * 12

    def __getitem__(self, n: int) -> torch.Tensor:
        if self.is_spoilt and n == 50:
            raise ValueError("row 50 is spoilt")
        return torch.full((4,), float(n))


class Collate:
    def __call__(self, rows: list) -> dict:
        return {"x": torch.stack(rows), "scale": torch.ones(4)}


def fail() -> None:
    raise ValueError("no such file")


def run_on_data_in_trouble(scenario: str, rank: int, program) -> None:
    """As ``mixmesh run`` does."""
    last = rank == WORLD - 1
    troubles = {"data raises": fail, "data ends": lambda: "ends", "data ends and begins anew": lambda: "ends"}
    data = Data(troubles.get(scenario, bool) if last else bool)
    if scenario == "a worker raises":
        data = torch.utils.data.DataLoader(Rows(last), 12, collate_fn=Collate(), num_workers=1)
    if scenario == "data in another order":
        # of ``x`` each rank sees rows of its own alone
        data = [{"x": batch(step + last)["x"], "scale": batch(step)["scale"]} for step in range(7)]
    job = mixmesh.Job(Small(), batch(0), data=data, optimizer=lambda p: torch.optim.SGD(p, 0.01))
    steps, epochs = (30, None) if scenario == "data ends and begins anew" else (None, 1)
    run_training(job, program, steps=steps, epochs=epochs, device="cpu", timeout_s=150)


def train_for_epochs(model, optimizer, rank: int) -> None:
    """A loop of a script's own, which the last rank leaves early in the first epoch."""
    data = torch.utils.data.DataLoader(Rows(False), 12, collate_fn=Collate())
    loader = own_loader(data, Plan(model.program, "test", 0.0, (), ""))
    for epoch in range(2):
        for number, given in enumerate(loader):
            if rank == WORLD - 1 and not epoch and number == 2:
                break
            train(model, optimizer, 1, lambda step, given=given: given)


# what the first rank alone asks for between a backward pass and a step
ALONE: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "prints a norm": lambda model, _: model.layer.weight.grad.norm().item(),
    "clips by torch": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "takes a full tensor": lambda model, _: model.layer.weight.full_tensor(),
    "compares a piece": lambda model, _: torch.equal(model.layer.weight, model.layer.weight),
    "unscales": lambda model, optimizer: unscale(optimizer),
    "takes the optimizer's state": full_optimizer_state_dict,
    "saves by one line": lambda model, _: mixmesh.save("never.pt", model=model),
    "waits for all": lambda *_: wait_for_all("a barrier"),
    "asks all": lambda *_: everyones(0),
}


def unscale(optimizer: torch.optim.Optimizer) -> None:
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))  # as of the loss
    scaler.unscale_(optimizer)


def ask_alone(ask: Callable[[nn.Module, torch.optim.Optimizer], object], model, optimizer, rank: int) -> None:
    for step in range(3):
        model(**batch(step)).backward()
        if not rank and step == 1:
            ask(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    print("DONE", flush=True)


def refuse_threads() -> None:
    """Lets this process begin one more thread, and refuses all others as a system does at its limit."""
    begin, begun = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        begun.append(thread)
        if len(begun) > 1:
            raise RuntimeError("can't start new thread")
        begin(thread)

    threading.Thread.start = start  # type: ignore[method-assign]


def refuse_groups() -> None:
    def new_group(*_, **__) -> None:
        raise RuntimeError("gloo/transport/tcp/loop.cc:48] rv != -1. -1 vs -1. pipe: Too many open files")

    torch.distributed.new_group = new_group


LIMITS = {"no threads": refuse_threads, "no files": refuse_groups}


def train_in_trouble(scenario: str, rank: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    last = rank == WORLD - 1
    op = "tanh" if last and scenario == "plan" else "relu"
    kind = Changed if last and scenario == "code" else Small
    shares = ", ".join([str(1 / WORLD)] * WORLD)
    if scenario == "versions" and last:
        agreement.versions_text = lambda: "torch 1.0"
    if scenario in LIMITS and last:
        LIMITS[scenario]()
    if "data " in scenario or "worker" in scenario:
        run_on_data_in_trouble(scenario, rank, parse_program(TEXT % (WORLD, shares, op)))
        return
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    seed = rank if scenario == "seed" else 0
    heartbeat_s = 3.0 if scenario.startswith("stopped") else 30.0
    if scenario == "stopped before a beat":
        Peers.read = lambda peers: None  # as if the others stopped before the first one
    model, optimizer = parallelize(
        model, optimizer, parse_program(TEXT % (WORLD, shares, op)), device="cpu", heartbeat_s=heartbeat_s,
        timeout_s=20 if scenario == "too slow" else 150, seed=seed,
    )  # fmt: skip
    train(model, optimizer, COMPARED_STEPS, lambda step: batch(step + last if scenario == "data" else step))
    print("START", flush=True)
    if scenario == "leaves an epoch":
        train_for_epochs(model, optimizer, rank)
        return
    if scenario in ALONE:
        ask_alone(ALONE[scenario], model, optimizer, rank)
        return
    trouble = {
        "shape": lambda: train(model, optimizer, 1, lambda s: {**batch(s), "x": torch.zeros(5, 4)}),
        "no input": lambda: None,
        "no input, stays": lambda: threading.Event().wait(60),
        "evaluates": lambda: model.eval() and model(**batch(0)),
        "saves": model.full_state_dict,
        "clips": lambda: model.clip_grad_norm_(1.0),
        "raises": lambda: [][0],
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "slow": lambda: time.sleep(14),
        "too slow": lambda: time.sleep(32),
    }
    if scenario in ("stopped first", "stopped before a beat"):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
    elif last and scenario in trouble:
        trouble[scenario]()
        if scenario in ("no input", "no input, stays"):
            return
    train(model, optimizer, 3)
    print("DONE", flush=True)


def fork_rank(scenario: str, rank: int, port: int, folder: Path, run: Callable[[str, int], None]) -> int:
    output = os.open(folder / f"{scenario}-{rank}.txt", os.O_WRONLY | os.O_CREAT, 0o644)
    if pid := os.fork():
        os.close(output)
        return pid
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    status = 0
    try:
        run(scenario, rank)
    except MixmeshError as error:
        print(f"MIXMESH {type(error).__name__}: {error}", flush=True)
        status = 3
    except BaseException:
        traceback.print_exc()
        status = 4
    threading._shutdown()  # as at the end of a script
    atexit._run_exitfuncs()
    os._exit(status)


def main(folder: Path, scenarios: list[str], run: Callable[[str, int], None] = train_in_trouble) -> None:
    ranks = {}
    ports = set()
    while len(ports) < len(scenarios):
        ports.add(free_port())
    for scenario, port in zip(scenarios, ports):
        for rank in range(WORLD):
            ranks[scenario, rank] = fork_rank(scenario, rank, port, folder, run)
    began: dict[str, float] = {}
    ends: dict[tuple[str, int], tuple[int, float]] = {}
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and len(ends) < len(ranks):
        for (scenario, rank), pid in ranks.items():
            text = (folder / f"{scenario}-{rank}.txt").read_text() if scenario not in began else "START"
            if "START" in text:
                began.setdefault(scenario, time.monotonic())
            if (scenario, rank) not in ends:
                over, status = os.waitpid(pid, os.WNOHANG)
                if over:
                    ends[scenario, rank] = os.waitstatus_to_exitcode(status), time.monotonic()
        if all(key in ends or key[0].startswith("stopped") for key in ranks) and all(
            any((s, rank) in ends for rank in range(WORLD)) for s in scenarios
        ):
            break  # what is stopped stays so
        time.sleep(0.1)
    for key, pid in ranks.items():
        if key not in ends:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    told = [[s, rank, status, at - began.get(s, at)] for (s, rank), (status, at) in ends.items()]
    (folder / "ends.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
