"""Mechanisms of GPUs that no measurement stands behind: nothing here has run on one.

Plans do not count on them unless they are asked for by name (``mixmesh plan --unmeasured NAME``). A profile
of the cluster replaces the first: what it has measured is used as it is.
"""

from __future__ import annotations

from collections.abc import Collection

from ..errors import InputError

# sums of few bytes by one message between each two ranks (``direct``): a hop in place of the library's many
ONE_SHOT_SUMS = "one-shot-sums"
# a stage of a pipeline computes nothing while it sends, as in systems that were measured; ours is to go on
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
