"""A compact form of a timeline: a pipeline of 24 layers on 8 devices has 33 thousand events.

Events are listed lane by lane (a stream of a rank), in the order of their starts. Attributes that many of
them share (name, operator, bytes, kind) are a row of a table. An event is three integers: twice its row, plus
one if it is on the critical path; nanoseconds since the end of the event before it in the lane; its duration
in nanoseconds. Integers are written in LEB128, as in WebAssembly, seven bits a byte, possibly negative ones
zigzagged as in protocol buffers, and all bytes in base64: seven letters an event, where JSON takes 37.
"""

from __future__ import annotations

import base64
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ...base.timeline import STREAMS, Event, Timeline
from .parts import KINDS, KindOf

SHORTEST_S = 1e-9  # the shortest event that is drawn
NS = 1e9
LOW, MORE = 0x7F, 0x80  # bits of a byte: part of a number, and the mark that another byte follows


def packed_timeline(timeline: Timeline, critical: Sequence[int], kind_of: KindOf) -> dict[str, Any]:
    """A timeline as lists: ``names`` of events and operators; ``rows`` with the number of a name, that of an
    operator's name, bytes (-1 if unknown) and a kind; ``lanes`` with a rank, a stream and a number of events;
    ``events``."""
    on_path = set(critical)
    by_lane: dict[tuple[int, int], list[tuple[Event, bool]]] = defaultdict(list)
    for index, event in enumerate(timeline.events):
        if math.isfinite(event.end_s) and event.end_s - event.start_s >= SHORTEST_S:
            by_lane[event.rank, STREAMS.index(event.stream)].append((event, index in on_path))
    names: dict[str, int] = {}
    rows: dict[tuple[int, int, int, int], int] = {}
    numbers = bytearray()
    for lane in sorted(by_lane):
        end_ns = 0
        for event, is_critical in sorted(by_lane[lane], key=lambda pair: (pair[0].start_s, pair[0].end_s)):
            name, op = (names.setdefault(text, len(names)) for text in (event.name, event.op))
            size_bytes = -1 if event.size_bytes is None else event.size_bytes
            row = name, op, size_bytes, KINDS.index(kind_of(event))
            start_ns, until_ns = round(event.start_s * NS), round(event.end_s * NS)
            numbers += leb128(2 * rows.setdefault(row, len(rows)) + is_critical)
            numbers += leb128(zigzag(start_ns - end_ns))
            numbers += leb128(until_ns - start_ns)
            end_ns = until_ns
    return {
        "step_s": timeline.step_s,
        "names": list(names),
        "rows": list(rows),
        "lanes": [[*lane, len(by_lane[lane])] for lane in sorted(by_lane)],
        "events": base64.b64encode(numbers).decode(),
    }


def zigzag(number: int) -> int:
    """Encodes 0, -1, 1, -2, 2 as 0, 1, 2, 3, 4."""
    return 2 * number if number >= 0 else -2 * number - 1


def leb128(number: int) -> bytes:
    """Encodes a number of 0 or more, seven bits a byte, the low ones first."""
    out = bytearray()
    while number > LOW:
        out.append(number & LOW | MORE)
        number >>= 7
    out.append(number)
    return bytes(out)
