"""The journal that every rank writes: its start, and each of its steps with the samples that it loaded.

A training under faults makes many steps more than once. Its *committed history* has the last execution of
each step: those before it were undone by a start from an older checkpoint.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any

FOLDER_VARIABLE, MACHINE_VARIABLE = "MIXMESH_FAULTS_JOURNAL", "MIXMESH_FAULTS_MACHINE"

drawn: list[int] = []  # ids of the samples that this process has loaded since its last step


@dataclass(frozen=True)
class Line:
    """A rank's line: a start if ``step`` is 0, else a finished step with its ``ids`` and global ``loss``.
    ``time_s`` is read from the system's monotonic clock, the same in all processes."""

    time_s: float
    machine: int
    pid: int
    rank: int
    world_size: int
    step: int = 0
    loss: float = 0.0
    ids: tuple[int, ...] = ()


class Writer:
    """The journal of this process."""

    def __init__(self, folder: Path, machine: int) -> None:
        self._who = {
            "machine": machine,
            "pid": os.getpid(),
            "rank": int(os.environ["RANK"]),
            "world_size": int(os.environ["WORLD_SIZE"]),
        }
        self._file = (folder / f"machine-{machine}-{os.getpid()}.jsonl").open("ab", buffering=0)

    @classmethod
    def of_environment(cls) -> Writer:
        return cls(Path(os.environ[FOLDER_VARIABLE]), int(os.environ[MACHINE_VARIABLE]))

    def write(self, **fields: Any) -> None:
        """Writes a line by one call of the system: a process that is killed leaves whole lines."""
        line = Line(time_s=time.monotonic(), **self._who, **fields)
        self._file.write(json.dumps(asdict(line)).encode() + b"\n")

    def note_steps(self, train: Callable) -> Callable:
        """``train`` of ``runtime.train``, which also writes down every step."""

        @wraps(train)
        def noting(*arguments: Any, **options: Any) -> Any:
            on_start, on_step = options["on_start"], options["on_step"]

            def start() -> None:
                drawn.clear()  # drawn by earlier looks at the data
                on_start()

            def note(number: int, loss: float, step_s: float) -> None:
                on_step(number, loss, step_s)
                self.write(step=number + 1, loss=loss, ids=tuple(drawn))
                drawn.clear()

            return train(*arguments, **{**options, "on_start": start, "on_step": note})

        return noting


class Reader:
    """The lines of all ranks so far; ``read`` adds new ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_bytes: dict[Path, int] = {}
        self.lines: list[Line] = []

    def read(self) -> list[Line]:
        """The lines that are new."""
        new = []
        for path in self._folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read_bytes.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole) + len(newline)
            new += [parse(text) for text in whole.splitlines()]
        new.sort(key=lambda line: line.time_s)
        self.lines += new
        return new


def parse(text: bytes) -> Line:
    """A line as ``Writer`` wrote it."""
    fields = json.loads(text)
    return Line(**{**fields, "ids": tuple(fields["ids"])})


def last_executions(lines: Iterable[Line]) -> dict[int, list[Line]]:
    """The lines of each step's last execution, by step: one for each rank, if all of them have finished
    it."""
    of_step: dict[int, list[Line]] = {}
    for line in lines:
        if line.step:
            of_step.setdefault(line.step, []).append(line)
    for step, found in of_step.items():
        found.sort(key=lambda line: line.time_s)
        of_step[step] = found[-found[-1].world_size :]
    return dict(sorted(of_step.items()))
