"""Whole samples in proportion to the capacity of each device."""

from __future__ import annotations

from collections.abc import Sequence


def share_out(total: int, room: Sequence[int]) -> list[int]:
    """``total`` in proportion to ``room``, by largest remainder, ties to the lower index; never above the
    room, since ``total <= sum(room)``. Computed in integers, because rounded float shares would give some
    rank a sample too many at two million samples."""
    whole = max(sum(room), 1)
    shares = [total * r // whole for r in room]
    order = sorted(range(len(room)), key=lambda i: (-(total * room[i] % whole), i))
    for i in order[: total - sum(shares)]:
        shares[i] += 1
    return shares
