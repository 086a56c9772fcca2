"""mixmesh bench NAME: a module per command."""

from . import accuracy, coverage, order, papers, placement, planning, sfb, training
from .common import app

__all__ = ["accuracy", "app", "coverage", "order", "papers", "placement", "planning", "sfb", "training"]
