"""Reads back a timeline that ``mixmesh run --trace`` or ``mixmesh simulate --trace`` has written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pydantic

from ...base.files import first_problem, read_text
from ...base.timeline import STREAMS, Event, Timeline
from ...errors import InputError, unreadable

MAX_BYTES = 256 * 2**20
MICRO = 1e-6
EXPECTED = "the file that `mixmesh run --trace T.json` writes"
HINT = "mixmesh run JOB --plan X.plan --trace T.json"
_Time = Annotated[float, pydantic.Field(ge=0, le=1e12, allow_inf_nan=False)]


class _Arguments(pydantic.BaseModel):
    op: str = ""
    size_bytes: int | None = None


class _Complete(pydantic.BaseModel):
    ph: Literal["X"]
    name: str
    cat: Literal["compute", "communication"]
    pid: Annotated[int, pydantic.Field(ge=0, lt=4096)]
    ts: _Time
    dur: _Time
    args: _Arguments = _Arguments()


class _Other(pydantic.BaseModel):
    ph: str


class _Trace(pydantic.BaseModel):
    traceEvents: list[_Complete | _Other]


def read_trace(path: str | Path, world_size: int) -> Timeline:
    """The timeline in a trace of ``world_size`` ranks. Raises InputError for any other file, or for other
    ranks."""
    try:
        recorded = _Trace.model_validate_json(read_text(path, MAX_BYTES))
    except OSError as error:
        raise unreadable("the timeline", path, error, expected=EXPECTED, hint=HINT) from None
    except ValueError as error:
        where, got = str(path), str(error)
        if isinstance(error, pydantic.ValidationError):
            where, got = first_problem(path, error)
        raise InputError(
            "this is not a timeline of mixmesh",
            where=where,
            expected=EXPECTED,
            got=got,
            hint=HINT,
        ) from None
    rows = [row for row in recorded.traceEvents if isinstance(row, _Complete)]
    ranks = {row.pid for row in rows}
    if not ranks or max(ranks) >= world_size:
        raise InputError(
            "the timeline is of other devices than the plan",
            where=str(path),
            expected=f"ranks 0 to {world_size - 1}",
            got=f"ranks {', '.join(map(str, sorted(ranks)))}" if ranks else "no events",
        )
    events = tuple(
        Event(r.pid, r.cat, r.name, MICRO * r.ts, MICRO * (r.ts + r.dur), r.args.op, r.args.size_bytes)
        for r in rows
    )
    computing, talking = STREAMS
    compute_s = [0.0] * world_size
    for event in events:
        if event.stream == computing:
            compute_s[event.rank] += event.end_s - event.start_s
    communication_s = sum(e.end_s - e.start_s for e in events if e.stream == talking) / max(len(ranks), 1)
    return Timeline(max(e.end_s for e in events), (), tuple(compute_s), communication_s, events)
