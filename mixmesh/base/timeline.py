"""A step as it unfolds on every rank, predicted or measured: the value, its file, and two of them compared.

Both kinds use the same names, so that they can be laid side by side:

    h                    the instruction whose result is %h; ``h grad`` its backward; ``h again`` its second
                         run, where it is in a region that is computed again
    y weight grad        the gradient of a weight, where it is computed apart (``wgrad``)
    w.whole              a redistribution; ``w.whole grad`` its gradient's; ``w.whole again`` when repeated
    gradients of w +3    the sum over ranks of a bucket of parameters' gradients
    parameters of w +3   the gather of what their owners have stepped (ZeRO stages 1 and 2)
    y factors            a gather of a factor of a weight's gradient (``sfb``); ``y factors product``
    all_reduce of the loss
    accumulation         adding the gradients of a micro-step to earlier ones (predicted; where it is measured
                         it is a part of what made them)
    optimizer            the optimizer's step, with which a timeline begins
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError

STREAMS = ("compute", "communication")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a rank's stream (``compute`` or ``communication``) does.

    ``op`` is the operator or collective, ``size_bytes`` the whole tensor's, where they are known.
    """

    rank: int
    stream: str
    name: str
    start_s: float
    end_s: float
    op: str = ""
    size_bytes: int | None = None


@dataclass(frozen=True)
class Timeline:
    """One step, predicted or measured. ``peak_memory_bytes`` and ``compute_s`` have one entry per rank (peaks
    none, where it was enough to know that they fit); ``communication_s`` counts a collective once.
    ``link_busy_s``, of a predicted step with events: for how long each link carries something, by its way
    ("out", "in", "inside", "bridge" or "link N") and the number of its machine."""

    step_s: float
    peak_memory_bytes: tuple[int, ...]
    compute_s: tuple[float, ...]
    communication_s: float
    events: tuple[Event, ...] = ()
    link_busy_s: tuple[tuple[str, int, float], ...] = ()


def gradient_name(result: str) -> str:
    return f"{result} grad"


def repeated_name(result: str) -> str:
    return f"{result} again"


def factors_name(result: str) -> str:
    return f"{result} factors"


def product_name(result: str) -> str:
    """The weight's gradient out of its gathered factors."""
    return f"{result} factors product"


def wgrad_name(result: str) -> str:
    """The gradient of a weight, where it is computed apart."""
    return f"{result} weight grad"


LOSS_SUM = "all_reduce of the loss"
ACCUMULATION = "accumulation"


BUCKET = "gradients of "


def bucket_name(params: Sequence[str], ranks: Sequence[int] = ()) -> str:
    """The name of the sum of these parameters' gradients, in whatever order they come; of what several copies
    have in common, between these ``ranks``."""
    first, *others = sorted(params)
    between = f" between {', '.join(map(str, ranks))}" if ranks else ""
    return f"{BUCKET}{first}" + (f" +{len(others)}" if others else "") + between


PARAMETERS = "parameters of "


def parameters_name(params: Sequence[str]) -> str:
    """The name of the gather of these parameters from their owners, in whatever order they come."""
    return PARAMETERS + bucket_name(params).removeprefix(BUCKET)


# --- the Chrome trace format, which ui.perfetto.dev and chrome://tracing read ---------------------------


def to_chrome_trace(timeline: Timeline, *, name: str, devices: Sequence[str] = ()) -> dict[str, Any]:
    """The timeline in the JSON form of Chrome's Trace Event Format: a process per rank, a thread per
    stream, times in microseconds. ``devices`` names the device of every rank.

    Events of one thread may nest but not overlap in part: collectives that do so, on different groups or
    behind each other on one, get further threads of the name ``communication``.
    """
    rows: list[dict[str, Any]] = []
    for rank in sorted({*range(len(timeline.compute_s)), *(e.rank for e in timeline.events)}):
        device = f" ({devices[rank]})" if rank < len(devices) else ""
        rows += [
            _metadata("process_name", rank, 0, name=f"rank {rank}{device}"),
            _metadata("process_labels", rank, 0, labels=name),
            _metadata("process_sort_index", rank, 0, sort_index=rank),
        ]
        tid = 0
        for stream in STREAMS:
            mine = [e for e in timeline.events if (e.rank, e.stream) == (rank, stream)]
            for lane in _lanes(mine) or [[]]:
                tid += 1
                rows.append(_metadata("thread_name", rank, tid, name=stream))
                rows.append(_metadata("thread_sort_index", rank, tid, sort_index=tid))
                rows += [_complete(e, tid) for e in lane]
    return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": {"name": name}}


def _metadata(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "dur": 0, "args": args}


def _complete(e: Event, tid: int) -> dict[str, Any]:
    args: dict[str, Any] = {"op": e.op} if e.op else {}
    if e.size_bytes is not None:
        args["size_bytes"] = e.size_bytes
    return {
        "ph": "X",
        "name": e.name,
        "cat": e.stream,
        "pid": e.rank,
        "tid": tid,
        "ts": e.start_s * 1e6,
        "dur": (e.end_s - e.start_s) * 1e6,
        "args": args,
    }


def _lanes(events: list[Event]) -> list[list[Event]]:
    """The events in as few rows as their overlaps allow."""
    lanes: list[list[Event]] = []
    for e in sorted(events, key=lambda e: (e.start_s, e.end_s)):
        if not math.isfinite(e.end_s):
            continue  # a link without bandwidth
        free = next((lane for lane in lanes if lane[-1].end_s <= e.start_s), None)
        if free is None:
            lanes.append([e])
        else:
            free.append(e)
    return lanes


def save_trace(trace: dict[str, Any], path: str | Path) -> None:
    """Writes a trace; the file is either whole or not there. Raises InputError."""
    path = Path(path)
    partial = path.with_name(f"{path.name}.partial{os.getpid()}")
    try:
        partial.write_text(json.dumps(trace, allow_nan=False))
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"cannot write the timeline: {error.strerror}", where=str(path)) from None


# --- two timelines compared -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """One quantity in both timelines. ``rank`` is None where it belongs to no single one; None seconds say
    that a timeline has no such event."""

    what: str
    rank: int | None
    predicted_s: float | None
    measured_s: float | None

    @property
    def size_s(self) -> float:
        return abs((self.predicted_s or 0.0) - (self.measured_s or 0.0))


@dataclass(frozen=True)
class Comparison:
    """``step``; ``streams``: compute of every rank, then communication; ``largest``: the events that differ
    most, first the largest."""

    step: Difference
    streams: tuple[Difference, ...]
    largest: tuple[Difference, ...]


def compare(predicted: Timeline, measured: Timeline, *, largest: int = 10) -> Comparison:
    """Compares a predicted step with a measured one: the step, each stream, and the largest differences."""
    one, two = durations(predicted), durations(measured)
    streams = [
        Difference("compute", rank, p, m)
        for rank, (p, m) in enumerate(zip(predicted.compute_s, measured.compute_s))
    ]
    streams.append(Difference("communication", None, communication_s(one), communication_s(two)))
    events = [Difference(name, rank, one.get((name, rank)), two.get((name, rank)))
              for name, rank in dict.fromkeys([*one, *two])]  # fmt: skip
    events.sort(key=lambda d: -d.size_s)
    step = Difference("step", None, predicted.step_s, measured.step_s)
    return Comparison(step, tuple(streams), tuple(events[:largest]))


Durations = dict[tuple[str, int | None], float]


def durations(timeline: Timeline) -> Durations:
    """Seconds by (name, rank) of what is computed, by (name, None) of a collective, which counts once.

    A rank that comes to a collective early waits inside it, and the last to come waits for nobody: it
    takes as long as on the rank where it is shortest. One that is issued behind another of its process
    group waits for that, so its time begins when the one before has ended.
    """
    out: Durations = defaultdict(float)
    met: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    group = _process_groups(timeline)
    free: dict[tuple, float] = defaultdict(lambda: -math.inf)  # when the last one ended, by rank and group
    for e in sorted(timeline.events, key=lambda e: e.end_s):
        if e.stream == "compute":
            out[e.name, e.rank] += e.end_s - e.start_s
        else:
            met[e.name][e.rank].append(e.end_s - max(e.start_s, free[e.rank, group[e.name]]))
            free[e.rank, group[e.name]] = e.end_s
    for name, by_rank in met.items():
        times = max(map(len, by_rank.values()))  # how often it was held
        for n in range(times):
            out[name, None] += min(spans[n] for spans in by_rank.values() if n < len(spans))
    return dict(out)


def _process_groups(timeline: Timeline) -> dict[str, tuple]:
    """By collective: who meets, and whether for sums of gradients and what their owners made of them, which
    have groups of their own."""
    ranks: dict[str, set[int]] = defaultdict(set)
    for e in timeline.events:
        if e.stream == "communication":
            ranks[e.name].add(e.rank)
    return {name: (name.startswith((BUCKET, PARAMETERS)), tuple(sorted(who))) for name, who in ranks.items()}


def communication_s(found: Durations) -> float:
    """Seconds of all collectives."""
    return sum(seconds for (_, rank), seconds in found.items() if rank is None)
