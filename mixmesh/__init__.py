"""mixmesh trains one ordinary PyTorch model across a cluster whose devices differ.

Names are looked up when they are first used, so that ``import mixmesh`` costs nothing.
"""

from __future__ import annotations

import importlib

from .base import uncaught

__version__ = "0.1.0"

# exported name -> module. No exported name is also the name of a module: importing a submodule binds
# its name here, and would hide the function (tests/test_exports.py).
_EXPORTS = {
    "Cluster": "cluster",
    "GradScaler": "runtime.scaler",
    "Job": "frontend.job",
    "Plan": "lang.plan_file",
    "Profile": "cost",
    "Program": "lang.ir",
    "Timeline": "base.timeline",
    "VerifyReport": "measure.verification",
    "first_not_finite": "runtime.not_finite",
    "full_optimizer_state_dict": "runtime.parallel",
    "load_job": "frontend.job",
    "parallelize": "runtime.parallel",
    "parse_program": "lang.ir",
    "plan": "api",
    "prepare": "training.preparation.script",
    "save": "training.preparation.saving",
    "shard_batches": "runtime.data",
    "simulate": "api",
    "verify": "measure.verification",
    "whole": "runtime.whole_model",
    "MixmeshError": "errors",
    "InputError": "errors",
    "ClusterError": "errors",
    "JobError": "errors",
    "PlanError": "errors",
    "ParseError": "errors",
    "TraceError": "errors",
    "UnsupportedOp": "errors",
    "Infeasible": "errors",
    "VerificationError": "errors",
    "CollectiveError": "errors",
    "DeviceLost": "errors",
    "TestbedUnavailable": "errors",
}

# available as ``mixmesh.zero.allocate`` and ``mixmesh.checkpoint.save`` without a separate import
_MODULES = {"checkpoint": "checkpoint", "zero": "passes.zero"}

__all__ = ["__version__", *sorted(_EXPORTS)]  # noqa: PLE0604


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f".{_MODULES[name]}", __name__)
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__) | set(_MODULES))


uncaught.shorten()
