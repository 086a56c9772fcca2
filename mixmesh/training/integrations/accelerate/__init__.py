"""The Accelerator of Accelerate. Needs accelerate, which mixmesh itself does not.

Reading order: ``refusals`` (which arguments cannot be kept), ``one_process`` (N ranks look like one process),
``model`` (trains by the plan, evaluates as the script's own), ``accelerator``.
"""

from __future__ import annotations

from ....errors import InputError

try:
    import accelerate  # noqa: F401
except ImportError as error:
    raise InputError(
        "mixmesh.accelerate needs accelerate",
        expected="accelerate installed",
        got=str(error),
        hint="pip install 'mixmesh[accelerate]'",
    ) from error

from .accelerator import Accelerator

__all__ = ["Accelerator"]
