"""Loops over experts, which cannot be exported: how many rows an expert has is data."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

LOOPS = (None, "eager")  # implementations of ``transformers`` that loop over the experts which are chosen
GROUPED = "grouped_mm"


@contextmanager
def experts_in_groups() -> Iterator[None]:
    """Has experts of ``transformers`` that would loop compute the same in groups of rows while a model is
    traced. A model that is trained with the loop is none the worse: the program stands for its results."""
    moe = sys.modules.get("transformers.integrations.moe")
    if moe is None:  # then no model of the library is there
        yield
        return
    original = moe.ExpertsInterface.get_interface

    def get_interface(self, implementation, default):
        return original(self, GROUPED if implementation in LOOPS else implementation, default)

    moe.ExpertsInterface.get_interface = get_interface
    try:
        yield
    finally:
        moe.ExpertsInterface.get_interface = original
