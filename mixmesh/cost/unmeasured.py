"""Mechanisms of GPUs without any measurement: nothing here has run on one.

Plans count on them only if they are named (``mixmesh plan --unmeasured NAME``). The first is also used if a
profile of the cluster has measured it.
"""

from __future__ import annotations

from collections.abc import Collection

from ..errors import InputError

# one-shot sums of small values (``direct``): every rank sends to every other one, a single hop instead of the
# library's many
ONE_SHOT_SUMS = "one-shot-sums"
# a pipeline stage computes nothing while it sends, as in measured systems; our own stages should be able to
BLOCKING_SENDS = "blocking-sends"
UNMEASURED = (ONE_SHOT_SUMS, BLOCKING_SENDS)


def check_unmeasured(names: Collection[str]) -> frozenset[str]:
    """The names as a set. Raises InputError for a name that is not in ``UNMEASURED``."""
    for name in names:
        if name not in UNMEASURED:
            raise InputError(
                f"there is no unmeasured mechanism {name!r}", expected=", ".join(UNMEASURED), got=name
            )
    return frozenset(names)
