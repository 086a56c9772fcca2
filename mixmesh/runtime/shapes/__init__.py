"""Programs for other shapes than the planned one: the last, smaller batch of an epoch, padded lengths,
evaluation.

Reading order: ``agree`` (ranks agree on the batch's shapes), ``carry`` (the planned program for other
shapes), ``lower`` (a program of operators that were not planned), ``room`` (whether it fits in memory),
``forms`` (the programs, made once per shape and kept).
"""

from __future__ import annotations

from .forms import Form, Forms

__all__ = ["Form", "Forms"]
