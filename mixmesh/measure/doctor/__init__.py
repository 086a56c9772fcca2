"""``mixmesh doctor``: tries, before any training, everything that ranks need from each other.

Reading order: ``meeting`` (how ranks exchange findings and failures), ``ground`` (the findings that checks
share), ``reach`` (connections between machines), ``cards`` (the figures of ``nvidia-smi``), then the checks,
one function each: ``checks``, ``versions``, ``file_checks``, ``job_checks``, ``card_checks``, ``uneven``,
``link_checks``, ``ladder``; ``report`` (all of them in order).
"""

from __future__ import annotations

from .ground import Asked, Ground
from .report import Check, Report, examine

__all__ = ["Asked", "Check", "Ground", "Report", "examine"]
