"""The events of a page read back, as its script reads them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

NS = 1e-9
Row = tuple[int, int, str, str, float, float, int, int, bool]


def numbers(data: bytes) -> Iterator[int]:
    """Whole numbers of seven bits a byte, the low ones first."""
    value = shift = 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield value
            value = shift = 0


def unpacked(timeline: dict[str, Any]) -> list[Row]:
    """Rank, stream, name, operator, start and end, bytes, kind, and whether it is on the critical path."""
    read = numbers(base64.b64decode(timeline["events"]))
    names, events = timeline["names"], []
    for rank, stream, count in timeline["lanes"]:
        end_ns = 0
        for _ in range(count):
            code, gap = next(read), next(read)
            name, op, size, kind = timeline["rows"][code // 2]
            start_ns = end_ns + (-(gap + 1) // 2 if gap % 2 else gap // 2)
            end_ns = start_ns + next(read)
            times_s = (start_ns * NS, end_ns * NS)
            events.append((rank, stream, names[name], names[op], *times_s, size, kind, code % 2 == 1))
    assert next(read, None) is None
    return events
