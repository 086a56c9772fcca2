"""One training under ``torchrun``: an agent for every machine, each of which may die and come back."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from mixmesh.checkpoint.manifest import checkpoints_in
from mixmesh.measure.testbed import Bed
from mixmesh.measure.testbed.system import start_time

from . import job
from .journal import FOLDER_VARIABLE, MACHINE_VARIABLE, Line, Reader
from .judgement import Training
from .worker import BENCH_VARIABLE

POLL_S = 0.05
AGAIN_S = 1.0  # seconds after which an agent that has failed is started again, as by systemd or Kubernetes
MOST_AGENTS = 40  # agents started in one training: more than this cannot be accidents
STORE_PORT = 29400
LAST_LINES = 15  # lines per machine in the report about a training that hangs
TOKEN_VARIABLE = "MIXMESH_FAULTS_TOKEN"  # marks ranks, so that they can be found after their agent was killed
RENDEZVOUS = "is_host=0,last_call_timeout=5,keep_alive_interval=2"


class Stuck(Exception):
    """A training that does not continue; the text names the event that was awaited."""


@dataclass(frozen=True)
class Setting:
    """The way in which a training is started."""

    training: Training
    every: int = 5  # steps from checkpoint to checkpoint
    step_s: float = 0.1  # shortest seconds of a step
    planner: str = "ddp-proportional"
    heartbeat_s: float = 20.0
    limit_s: float = 240.0  # limit of a single wait

    def words(self, checkpoints: Path, cache: Path) -> list[str]:
        """The arguments of the ranks: a plain ``mixmesh run``."""
        options = {
            "epochs": self.training.epochs, "checkpoint": checkpoints, "every": self.every,
            "planner": self.planner, "heartbeat": self.heartbeat_s, "profile-seconds": 0, "cache": cache,
        }  # fmt: skip
        each = (word for name, value in options.items() for word in (f"--{name}", str(value)))
        return ["run", f"{job.__file__}:job", *each]


@dataclass
class Agent:
    """The agent of a machine: the number of its process in the bed, and when it may be started again."""

    number: int
    starts_at_s: float | None = None
    is_done: bool = False


@dataclass(frozen=True)
class Said:
    """A line of output."""

    time_s: float
    machine: int | None
    text: str


@dataclass
class Output:
    """All lines that agents and ranks have written."""

    lines: list[Said] = field(default_factory=list)
    machine_of: dict[int, int] = field(default_factory=dict)  # by the number in the bed

    def take(self, number: int, _: str, text: str) -> None:
        """Takes a line from a bed, as its ``on_output``."""
        self.lines.append(Said(time.monotonic(), self.machine_of.get(number), text.rstrip()))

    def first_with(self, text: str, since_s: float) -> float | None:
        """The time of the first line with ``text`` after ``since_s``."""
        return next((s.time_s for s in self.lines if s.time_s >= since_s and text in s.text), None)

    def last(self) -> str:
        """The last lines of each machine."""
        machines = sorted({said.machine for said in self.lines if said.machine is not None})
        each = ([s for s in self.lines if s.machine == machine][-LAST_LINES:] for machine in machines)
        return "\n".join(f"  [machine {said.machine}] {said.text}" for lines in each for said in lines)


class Scene:
    """A running training, to be entered within its bed. Afterwards everything that it started is gone,
    including leftovers of an agent that was killed."""

    def __init__(self, bed: Bed, output: Output, folder: Path, checkpoints: Path, setting: Setting) -> None:
        self.bed, self.output, self.setting = bed, output, setting
        self.checkpoints, self.num_machines = checkpoints, len(bed.cluster.machines)
        (folder / "journal").mkdir(parents=True)
        self.journal = Reader(folder / "journal")
        self._folder, self._token = folder, secrets.token_hex(16)
        self._port = free_port() if bed.emulation == "none" else STORE_PORT
        self._agents: dict[int, Agent] = {}
        self._num_started = 0
        self.damaged: set[str] = set()  # checkpoints that were damaged on purpose

    def __enter__(self) -> Self:
        store = (sys.executable, "-m", "benchmarks.faults.store", self.bed.address(None), str(self._port))
        self.bed.start(None, store, env=self._environment(None))
        for machine in range(self.num_machines):
            self._start(machine)
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self._agents.values():
            if self.bed.returncode(agent.number) is None:
                os.kill(self.bed.pid(agent.number), signal.SIGKILL)
        end_marked(self._token)

    def _environment(self, machine: int | None) -> dict[str, str]:
        environment = {
            TOKEN_VARIABLE: self._token,
            # else agents keep the address of a first rank that is gone, in the store that it had
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            BENCH_VARIABLE: f"{os.getpid()} {start_time(os.getpid())}",
            FOLDER_VARIABLE: str(self._folder / "journal"),
            job.STEP_VARIABLE: str(self.setting.step_s),
        }
        return environment if machine is None else environment | {MACHINE_VARIABLE: str(machine)}

    def _start(self, machine: int) -> None:
        options = {
            "nnodes": f"1:{self.num_machines}", "nproc-per-node": 1, "max-restarts": 1000,
            "rdzv-backend": "c10d", "rdzv-endpoint": f"{self.bed.address(None)}:{self._port}",
            "rdzv-id": "faults", "rdzv-conf": RENDEZVOUS, "local-addr": self.bed.address(machine),
        }  # fmt: skip
        argv = [sys.executable, "-m", "torch.distributed.run"]
        argv += [word for name, value in options.items() for word in (f"--{name}", str(value))]
        argv += ["-m", "benchmarks.faults.worker"]
        argv += self.setting.words(self.checkpoints, self._folder / "cache")
        self._num_started += 1
        if self._num_started > MOST_AGENTS:
            raise Stuck(f"agents have failed {MOST_AGENTS - self.num_machines} times")
        number = self.bed.start(machine, argv, env=self._environment(machine))
        self.output.machine_of[number] = machine
        self._agents[machine] = Agent(number)

    # --- what is going on -----------------------------------------------------------------------------

    def poll(self, time_s: float = POLL_S) -> None:
        """Waits for ``time_s``, then restarts agents that have failed."""
        self.bed.poll(time_s)
        self.journal.read()
        now_s = time.monotonic()
        for machine, agent in self._agents.items():
            status = self.bed.returncode(agent.number)
            if status is None or agent.is_done:
                continue
            agent.is_done = status == 0
            if agent.starts_at_s is None:
                agent.starts_at_s = now_s + AGAIN_S
            # processes left of a training that is over wait for no one
            elif now_s >= agent.starts_at_s and not any(a.is_done for a in self._agents.values()):
                self._start(machine)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for a condition. Raises Stuck if it takes too long."""
        deadline_s = time.monotonic() + self.setting.limit_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise Stuck(f"{what}: not within {self.setting.limit_s:g} s")
            self.poll()

    @property
    def is_over(self) -> bool:
        """Whether every agent has ended, at least one of them successfully."""
        ended = [self.bed.returncode(agent.number) is not None for agent in self._agents.values()]
        return all(ended) and any(agent.is_done for agent in self._agents.values())

    @property
    def step(self) -> int:
        """The last step that was made, which may have been made before."""
        return next((line.step for line in reversed(self.journal.lines) if line.step), 0)

    def starts(self) -> dict[int, Line]:
        """The last start of a rank on each machine."""
        return {line.machine: line for line in self.journal.lines if not line.step}

    def running(self) -> dict[int, Line]:
        """The last starts whose processes are still there."""
        return {m: line for m, line in self.starts().items() if is_there(line.pid)}

    def first_step_since(self, time_s: float) -> Line | None:
        """The first step of a rank that was started after a time."""
        pids = {line.pid for line in self.journal.lines if not line.step and line.time_s > time_s}
        return next((line for line in self.journal.lines if line.step and line.pid in pids), None)

    def is_whole(self) -> bool:
        """Whether the last step was made by all machines, with all of their ranks."""
        last = next((line for line in reversed(self.journal.lines) if line.step), None)
        is_of_all = last is not None and last.world_size == self.num_machines
        return is_of_all and len(self.running()) == self.num_machines

    def good_checkpoints(self) -> list[Path]:
        """The checkpoints that were not damaged on purpose, the newest first."""
        return [path for path in checkpoints_in(self.checkpoints) if path.name not in self.damaged]

    def kill_agent(self, machine: int) -> None:
        os.kill(self.bed.pid(self._agents[machine].number), signal.SIGKILL)


def is_there(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def marked(token: str) -> Iterator[int]:
    """The processes that were started with a token in their environment, except this one."""
    mark = f"{TOKEN_VARIABLE}={token}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def end_marked(token: str) -> None:
    """Kills all processes that were started with a token, until none is left."""
    while found := [pid for pid in marked(token) if is_there(pid)]:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
