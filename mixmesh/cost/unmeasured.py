"""Mechanisms of GPUs without any measurement: nothing here has run on one.

Plans count on them only if they are named (``mixmesh plan --unmeasured NAME``). For the first a profile of
the cluster suffices: its measurement is used.
"""

from __future__ import annotations

from collections.abc import Collection

from ..errors import InputError

# small sums by one message between each two ranks (``direct``): one hop instead of the library's many
ONE_SHOT_SUMS = "one-shot-sums"
# a pipeline's stage computes nothing while it sends, as in measured systems; ours should be able to
BLOCKING_SENDS = "blocking-sends"
UNMEASURED = (ONE_SHOT_SUMS, BLOCKING_SENDS)


def check_unmeasured(names: Collection[str]) -> frozenset[str]:
    """The names as a set. Raises InputError for one that is not of ``UNMEASURED``."""
    for name in names:
        if name not in UNMEASURED:
            raise InputError(
                f"there is no unmeasured mechanism {name!r}", expected=", ".join(UNMEASURED), got=name
            )
    return frozenset(names)
