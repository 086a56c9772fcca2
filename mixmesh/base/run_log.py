"""The log of a training: a file with a JSON object on each line, one for every step and one for every mark.

A step is ``{"step", "loss", "step_s", "samples_per_s", "time_s"}``. A mark is ``{"event", "step", "time_s"}``
with further keys: ``start`` (after ``step`` earlier steps: ``world_size``, ``planner``, ``predicted_step_s``,
``bound_s``), ``plan`` (another plan follows in the same processes: the same keys, and its ``cause``),
``checkpoint``, ``shares`` (they change: ``pause_s``, ``cause``), ``own`` (``own_s``: the seconds of a step in
which each rank waited for nobody), ``fault`` (a ``rank`` was lost: its ``device``, and ``why``; an error of
all ranks has no rank), ``stop`` (by a signal: ``cause``). Later starts append to the same file, in which
steps may then appear several times: a ``start`` undoes all steps beyond its own.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from ..errors import InputError, unreadable
from .files import read_text

RUN_LOG = "run.jsonl"  # its name in a folder of checkpoints
MAX_BYTES = 512 * 2**20
START, PLAN, CHECKPOINT, SHARES, OWN = "start", "plan", "checkpoint", "shares", "own"
FAULT, STOP = "fault", "stop"
_Time = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, pydantic.Field(ge=0)]


class _StepLine(pydantic.BaseModel):
    step: Annotated[int, pydantic.Field(ge=1)]
    loss: float | None
    step_s: _Time
    samples_per_s: float | None
    time_s: float


class _MarkLine(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    event: Literal["start", "plan", "checkpoint", "shares", "own", "fault", "stop"]
    step: _Count
    time_s: float
    world_size: Annotated[int, pydantic.Field(ge=1)] | None = None
    pause_s: _Time | None = None
    own_s: list[_Time] | None = None
    predicted_step_s: _Time | None = None
    bound_s: _Time | None = None
    planner: str | None = None
    rank: _Count | None = None
    device: str | None = None
    why: str | None = None
    cause: str | None = None


_LINE = pydantic.TypeAdapter(_MarkLine | _StepLine)


@dataclass(frozen=True)
class LoggedStep:
    """A step that was made; if it was made several times, its last execution."""

    step: int
    loss: float | None
    step_s: float
    samples_per_s: float | None


@dataclass(frozen=True)
class Mark:
    """An event after ``step`` steps. For a start, ``num_undone`` is the number of steps made before that are
    made again."""

    event: str
    step: int
    num_undone: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunLog:
    """The steps of a training in order, and its marks in the order of time."""

    steps: tuple[LoggedStep, ...]
    marks: tuple[Mark, ...]

    def of(self, event: str) -> tuple[Mark, ...]:
        """The marks of this kind."""
        return tuple(mark for mark in self.marks if mark.event == event)


def mark_line(event: str, step: int, time_s: float, **facts: Any) -> str:
    """A mark as a line of the file."""
    return json.dumps({"event": event, "step": step, **facts, "time_s": time_s}, allow_nan=False) + "\n"


def step_line(step: int, loss: float, step_s: float, samples_per_s: float | None, time_s: float) -> str:
    """A step as a line of the file; a loss that is not finite is null."""
    told = loss if math.isfinite(loss) else None
    row = {"step": step, "loss": told, "step_s": step_s, "samples_per_s": samples_per_s, "time_s": time_s}
    return json.dumps(row, allow_nan=False) + "\n"


def read_log(path: str | Path) -> RunLog:
    """Reads a log. A last line that was cut off is left out. Raises InputError for another file."""
    try:
        text = read_text(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        raise unreadable("the log of a training", path, error) from None
    return parse_log(text, str(path))


def parse_log(text: str, where: str = "<log>") -> RunLog:
    """The log in a text. Raises InputError with the first line that does not belong to a log."""
    *lines, cut_off = text.split("\n")
    if not lines and cut_off:
        lines = [cut_off]
    step_of: dict[int, LoggedStep] = {}
    marks: list[Mark] = []
    for number, line in enumerate(lines, 1):
        try:
            row = _LINE.validate_json(line)
        except ValueError:
            raise InputError(
                "this is not a log of a training",
                where=f"{where}:{number}",
                expected='a line such as {"step": 1, "loss": 2.5, "step_s": 0.2, ...}',
                got=line[:80],
                hint="mixmesh run JOB --log-json FILE",
            ) from None
        if isinstance(row, _StepLine):
            if row.step in step_of:  # a start that left no mark
                marks.append(Mark(START, row.step - 1, _undo(step_of, row.step - 1)))
            step_of[row.step] = LoggedStep(row.step, row.loss, row.step_s, row.samples_per_s)
            continue
        undone = 0
        if row.event == START:
            undone = _undo(step_of, row.step)
            marks = [mark for mark in marks if mark.event != OWN or mark.step <= row.step]
        facts = row.model_dump(exclude={"event", "step", "time_s"}, exclude_none=True)
        mark = Mark(row.event, row.step, undone, facts)
        if mark.event != FAULT or _is_news(mark, marks):
            marks.append(mark)
    return RunLog(tuple(step_of[step] for step in sorted(step_of)), tuple(marks))


def _is_news(fault: Mark, marks: list[Mark]) -> bool:
    """Whether a fault of this start differs from those before it: survivors report a lost rank, and one of
    them may then end with its own error, which names no rank."""
    starts = [n for n, mark in enumerate(marks) if mark.event == START]
    ranks = [m.facts.get("rank") for m in marks[starts[-1] if starts else 0 :] if m.event == FAULT]
    return fault.facts.get("rank") not in ranks if "rank" in fault.facts else not ranks


def _undo(made: dict[int, LoggedStep], step: int) -> int:
    """Drops the steps after ``step``; returns their number."""
    beyond = [n for n in made if n > step]
    for n in beyond:
        del made[n]
    return len(beyond)
