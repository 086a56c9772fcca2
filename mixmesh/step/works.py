"""Looks up the works of a step's computations in a cost table."""

from __future__ import annotations

from collections.abc import Mapping

from ..cost.placed import Sheet
from .events import BACKWARD, FORWARD, PRODUCT, REPEATED, WEIGHT


def works_by_part(sheet: Sheet) -> dict[str, Mapping[int, int]]:
    """The number of a computation's work in the ``sheet``, by part and the index of the instruction."""
    return {
        FORWARD: sheet.work_of,
        BACKWARD: sheet.work_of,
        REPEATED: sheet.again_work_of,
        WEIGHT: sheet.wgrad_work_of,
        PRODUCT: sheet.factor_work_of,
    }
