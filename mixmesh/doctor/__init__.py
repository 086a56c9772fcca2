"""``mixmesh doctor``: everything that ranks need of each other, tried before any training.

Reading order: ``meeting`` (how ranks tell each other what they found, also that something failed), ``reach``
(connections between machines), ``checks`` and ``job_checks`` (one function each), ``report`` (all checks in
their order).
"""

from __future__ import annotations

from .ground import Asked, Ground
from .report import Check, Report, examine

__all__ = ["Asked", "Check", "Ground", "Report", "examine"]
