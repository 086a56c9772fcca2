"""The Accelerator of Accelerate. Needs accelerate, which mixmesh itself does not.

Reading order: ``refusals`` (arguments that are not supported), ``one_process`` (N ranks look like one
process), ``model`` (trains by the plan, evaluates like the script's own model), ``accelerator``.
"""

from __future__ import annotations

from ..extras import require

require("mixmesh.accelerate", ("accelerate",), "accelerate installed", "'mixmesh[accelerate]'")

from .accelerator import Accelerator  # noqa: E402

__all__ = ["Accelerator"]
