"""mixmesh bench NAME: a module per command."""

from . import accuracy, coverage, order, papers, planning, training
from .common import app

__all__ = ["accuracy", "app", "coverage", "order", "papers", "planning", "training"]
