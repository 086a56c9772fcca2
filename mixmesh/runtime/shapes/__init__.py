"""A plan serves a family of shapes: the last, smaller batch of an epoch, padded lengths, evaluation.

Reading order: ``agree`` (which batch was passed, alike on all ranks), ``carry`` (the planned program for
other shapes), ``lower`` (a program of operators that were not planned), ``room`` (does it fit), ``forms``
(made once per shape and kept).
"""

from __future__ import annotations

from .forms import Form, Forms

__all__ = ["Form", "Forms"]
