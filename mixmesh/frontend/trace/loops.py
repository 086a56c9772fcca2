"""Export of loops over experts: the number of rows of each expert is data, which a graph cannot hold."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ...base.patch import patched

LOOPS = (None, "eager")  # implementations of ``transformers`` that loop over the chosen experts
GROUPED = "grouped_mm"


def experts_in_groups() -> AbstractContextManager[None]:
    """A context in which experts of ``transformers`` that would loop compute the same results in groups of
    rows."""
    moe = sys.modules.get("transformers.integrations.moe")
    if moe is None:  # there is no model of the library
        return nullcontext()
    original = moe.ExpertsInterface.get_interface

    def get_interface(self: Any, implementation: str | None, default: Any) -> Any:
        return original(self, GROUPED if implementation in LOOPS else implementation, default)

    return patched(moe.ExpertsInterface, "get_interface", get_interface)
