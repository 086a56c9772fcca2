"""Real gloo processes that stay alive: cases are fed to them, so that a case costs no start of processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext

import torch

from mixmesh.errors import CollectiveError, MixmeshError
from mixmesh.lang.ir import Program
from mixmesh.lang.plan_file import Plan
from mixmesh.runtime.parallel import parallelize

from .optimizers import OPTIMIZERS
from .ports import free_port
from .source import build
from .steps import Steps

START_S = 300.0
PRELOADED = (
    "torch", "torch._dynamo", "pytest", "mixmesh.planner", "mixmesh.runtime.parallel",
    "mixmesh.training.preparation.start", "torch.distributed.checkpoint", "transformers", "tests.warm",
)  # fmt: skip
STARTS = 3  # that are tried: a machine with much else to do is no reason to end an hour of cases
COLLECTIVE_S = 30.0  # what a collective may take; a case that takes longer than twice that hangs
LATER_S = 5.0  # after a rank failed, what others get to say why they did


def forking() -> BaseContext:
    """Processes are forked from a server that has imported what all of them need: each would take seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    return context


@dataclass(frozen=True)
class Job:
    """What every rank runs: the text of a model's file, a plan or program, an optimizer's name."""

    text: str
    plan: Plan | Program
    optimizer: str
    num_steps: int


@dataclass(frozen=True)
class Answer:
    """``steps`` of rank 0, or what each rank that failed said; ``refused`` if that was a MixmeshError on
    every rank, before anything ran."""

    steps: Steps | None = None
    errors: tuple[str, ...] = ()
    refused: bool = False


class World:
    """So many processes. A failure ends them, and the next case starts new ones."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.processes: list = []
        self.pipes: list[Connection] = []

    def start(self) -> None:
        """Raises RuntimeError if processes do not start, however often."""
        for _ in range(STARTS):
            if self._started():
                return
            self.close()
        raise RuntimeError(f"{self.world_size} processes do not start within {START_S:g} s")

    def _started(self) -> bool:
        context = forking()
        port = free_port()
        for rank in range(self.world_size):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, self.world_size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(mine)
        for pipe in self.pipes:
            if not pipe.poll(START_S):
                return False
            pipe.recv_bytes()
        return True

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes, self.pipes = [], []

    def run(self, job: Job) -> Answer:
        if not self.processes:
            self.start()
        sent = pickle.dumps(job)
        for pipe in self.pipes:
            pipe.send_bytes(sent)
        answers = self._answers()
        errors = [f"rank {rank}: {a}" for rank, a in sorted(answers.items()) if isinstance(a, str)]
        if len(answers) < self.world_size and not errors:
            errors = [f"rank {r}: HANG" for r in range(self.world_size) if r not in answers]
        if errors:
            refused = len(errors) == self.world_size and all("refused" in text for text in errors)
            if not refused:  # others may wait for what never comes
                self.close()
            first = sorted(errors, key=lambda text: "CollectiveError" in text)
            return Answer(errors=tuple(first), refused=refused)
        losses = {a.losses for a in answers.values()}
        if len(losses) > 1:
            return Answer(errors=(f"ranks differ in their losses: {sorted(losses)}",))
        return Answer(answers[0])

    def _answers(self) -> dict[int, Steps | str]:
        answers: dict[int, Steps | str] = {}
        until = time.monotonic() + 2 * COLLECTIVE_S
        while len(answers) < self.world_size and (left := until - time.monotonic()) > 0:
            waiting = [p for rank, p in enumerate(self.pipes) if rank not in answers]
            for pipe in wait(waiting, left):
                rank = self.pipes.index(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    answers[rank] = "the process ended"
                if isinstance(answers[rank], str) and "refused" not in answers[rank]:
                    until = min(until, time.monotonic() + LATER_S)
        return answers


def serve(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    """Runs jobs until the pipe ends."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    pipe.send_bytes(b"ready")
    while True:
        try:
            job = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            return
        answer: Steps | str
        try:
            answer = train(job)
        except MixmeshError as error:
            kind = "failed" if isinstance(error, CollectiveError) else "refused"
            answer = f"{kind}: {type(error).__name__}: {' '.join(str(error).split())[:600]}"
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            said = " ".join(str(error).split())[:300]
            answer = f"{type(error).__name__}: {said} ({place.filename}:{place.lineno})"
        pipe.send_bytes(pickle.dumps(answer))


def train(job: Job) -> Steps:
    """This rank's training; the parameters and buffers after each step on rank 0, none elsewhere."""
    model, batch = build(job.text)
    optimizer = OPTIMIZERS[job.optimizer](list(model.parameters()))
    names = [n for n, _ in model.named_parameters()], [n for n, _ in model.named_buffers()]
    parallel, optimizer = parallelize(
        model, optimizer, job.plan, device="cpu", timeout_s=COLLECTIVE_S, random_exact=True
    )
    losses, parameters, buffers = [], [], []
    for _ in range(job.num_steps):
        loss = parallel(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        state = parallel.full_state_dict(rank0_only=True)
        parameters.append({n: state[n] for n in names[0] if n in state})
        buffers.append({n: state[n] for n in names[1] if n in state})
    del loss
    parallel.comm.close()
    return Steps(tuple(losses), tuple(parameters), tuple(buffers))
