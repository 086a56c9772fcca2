"""The timeline of one step on every rank, predicted or measured: its value, its file, and a comparison of
two.

Predicted and measured timelines name their events alike, so that they can be compared:

    h                    the instruction whose result is %h; ``h grad`` its backward; ``h again`` its second
                         run, where its region is rematerialised
    y weight grad        the gradient of a weight, where it is split from the input's (``wgrad``)
    w.whole              a redistribution; ``w.whole grad`` that of its gradient; ``w.whole again`` its repeat
    gradients of w +3    the all-reduce of a bucket of gradients: of w and of three more parameters
    parameters of w +3   the gather of parameters that their shard owners stepped (ZeRO stages 1 and 2)
    y factors            a gather of a factor of a weight's gradient (``sfb``); ``y factors product``
    all_reduce of the loss
    accumulation         adding the gradients of a micro-batch to those of earlier ones (only predicted: a
                         measurement counts it with the backward pass)
    optimizer            the optimizer's step, with which a timeline begins
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import unwritable
from .files import write_text

STREAMS = ("compute", "communication")
OUT, IN, INSIDE, BRIDGE, OWN = "out", "in", "inside", "bridge", "link"


class Link(NamedTuple):  # the key of many tables
    """A link that collectives share: the outgoing (``OUT``) or incoming (``IN``) direction of a machine's
    NIC, the paths ``INSIDE`` the machine, its host ``BRIDGE``, or a separate link of some of its devices
    (``OWN``), which has a ``number``."""

    way: str
    machine: int
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """One piece of work on a rank's stream (``compute`` or ``communication``).

    ``op`` is the operator or collective, ``size_bytes`` the size of the whole tensor, if known.
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
    """One step, predicted or measured.

    ``peak_memory_bytes`` and ``compute_s`` have one entry per rank; ``peak_memory_bytes`` is empty if it was
    enough to know that the step fits. ``communication_s`` counts a collective once. ``link_busy_s`` gives the
    seconds in which each link carries data, for a predicted step with events.
    """

    step_s: float
    peak_memory_bytes: tuple[int, ...]
    compute_s: tuple[float, ...]
    communication_s: float
    events: tuple[Event, ...] = ()
    link_busy_s: tuple[tuple[Link, float], ...] = ()


def gradient_name(result: str) -> str:
    return f"{result} grad"


def repeated_name(result: str) -> str:
    return f"{result} again"


def factors_name(result: str) -> str:
    return f"{result} factors"


def product_name(result: str) -> str:
    """The event name of the product of gathered factors, which is a weight's gradient."""
    return f"{result} factors product"


def wgrad_name(result: str) -> str:
    """The event name of a weight's gradient that is split from the input's."""
    return f"{result} weight grad"


LOSS_SUM = "all_reduce of the loss"
ACCUMULATION = "accumulation"


BUCKET = "gradients of "


def bucket_name(params: Sequence[str], ranks: Sequence[int] = ()) -> str:
    """The event name of the all-reduce of these parameters' gradients; their order does not count. ``ranks``
    are those that hold the common part of several copies."""
    first, *others = sorted(params)
    between = f" between {', '.join(map(str, ranks))}" if ranks else ""
    return f"{BUCKET}{first}" + (f" +{len(others)}" if others else "") + between


PARAMETERS = "parameters of "


def parameters_name(params: Sequence[str]) -> str:
    """The event name of the gather of these parameters from their shard owners; their order does not
    count."""
    return PARAMETERS + bucket_name(params).removeprefix(BUCKET)


def is_gradient_sum(name: str) -> bool:
    """Whether ``name`` was made by ``bucket_name``."""
    return name.startswith(BUCKET)


def is_parameter_gather(name: str) -> bool:
    """Whether ``name`` was made by ``parameters_name``."""
    return name.startswith(PARAMETERS)


# --- the Chrome trace format, which ui.perfetto.dev and chrome://tracing read ---------------------------


def to_chrome_trace(timeline: Timeline, *, name: str, devices: Sequence[str] = ()) -> dict[str, Any]:
    """Converts a timeline to the JSON form of Chrome's Trace Event Format: a process per rank, a thread per
    stream, times in microseconds. ``devices`` names the device of every rank.

    The format allows events of one thread to nest, but not to overlap in part: overlapping collectives are
    spread over several threads that are all called ``communication``.
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


def _metadata(key: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": key, "pid": pid, "tid": tid, "ts": 0, "dur": 0, "args": args}


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
    """Distributes events over as few lanes as their overlaps allow."""
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
    """Writes a trace completely or not at all. Raises InputError if it cannot be written."""
    try:
        write_text(path, json.dumps(trace, allow_nan=False))
    except OSError as error:
        raise unwritable("the timeline", path, error) from None


# --- two timelines compared -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """One quantity in both timelines. ``rank`` is None for a quantity that belongs to no single rank; seconds
    are None for a timeline without such an event."""

    what: str
    rank: int | None
    predicted_s: float | None
    measured_s: float | None

    @property
    def size_s(self) -> float:
        return abs((self.predicted_s or 0.0) - (self.measured_s or 0.0))


@dataclass(frozen=True)
class Comparison:
    """Two timelines compared: the step, the streams (compute of every rank, then communication), and the
    events that differ most, largest first."""

    step: Difference
    streams: tuple[Difference, ...]
    largest: tuple[Difference, ...]


def compare(predicted: Timeline, measured: Timeline, *, largest: int = 10) -> Comparison:
    """Compares a predicted step with a measured one; ``largest`` is the most events to list."""
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
    """Seconds by (name, rank) for computations, and by (name, None) for collectives, which count once.

    A rank that enters a collective early waits inside it, and the last one to enter waits for no other: so a
    collective takes as long as on the rank where it is shortest. A collective also waits for the one issued
    before it on the same process group, so its time begins when that one has ended.
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
        for n in range(max(map(len, by_rank.values()))):  # each time that it ran
            out[name, None] += min(spans[n] for spans in by_rank.values() if n < len(spans))
    return dict(out)


def _process_groups(timeline: Timeline) -> dict[str, tuple]:
    """The process group of each collective: its ranks, and whether it is one of the separate groups for
    gradients and for the parameters that shard owners stepped."""
    ranks: dict[str, set[int]] = defaultdict(set)
    for e in timeline.events:
        if e.stream == "communication":
            ranks[e.name].add(e.rank)
    return {
        name: (is_gradient_sum(name) or is_parameter_gather(name), tuple(sorted(members)))
        for name, members in ranks.items()
    }


def communication_s(seconds_of: Durations) -> float:
    """The seconds of all collectives together."""
    return sum(seconds for (_, rank), seconds in seconds_of.items() if rank is None)
