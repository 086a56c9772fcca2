"""mixmesh bench NAME: a module per command."""

from . import (
    accuracy,
    checkpoints,
    collectives,
    coverage,
    drift,
    faults,
    order,
    papers,
    pipeline,
    placement,
    planning,
    poplar,
    scripts,
    sfb,
    subsets,
    sync,
    training,
)
from .common import app

__all__ = [
    "accuracy",
    "app",
    "checkpoints",
    "collectives",
    "coverage",
    "drift",
    "faults",
    "order",
    "papers",
    "pipeline",
    "placement",
    "planning",
    "poplar",
    "scripts",
    "sfb",
    "subsets",
    "sync",
    "training",
]
