"""mixmesh bench NAME: a module per command."""

from . import accuracy, papers
from .common import app

__all__ = ["accuracy", "app", "papers"]
