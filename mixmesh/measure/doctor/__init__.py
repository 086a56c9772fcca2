"""``mixmesh doctor``: everything that ranks need of each other, tried before any training.

Reading order: ``meeting`` (how ranks tell each other what they found, also that something failed),
``ground`` (the findings that checks share), ``reach`` (connections between machines), ``cards`` (the
figures of ``nvidia-smi``), then the checks, one function each: ``checks``, ``versions``, ``file_checks``,
``job_checks``, ``card_checks``, ``uneven``, ``link_checks``, ``ladder``; ``report`` (all of them in order).
"""

from __future__ import annotations

from .ground import Asked, Ground
from .report import Check, Report, examine

__all__ = ["Asked", "Check", "Ground", "Report", "examine"]
