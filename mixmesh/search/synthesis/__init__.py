"""Finds the program (HAP): A* over placements, and the program that its path emits."""

from .choices import Choices
from .emit import Builder, emit
from .exact import prove
from .problem import Prices, Problem
from .search import Found, NoProgram, search

__all__ = ["Builder", "Choices", "Found", "NoProgram", "Prices", "Problem", "emit", "prove", "search"]
