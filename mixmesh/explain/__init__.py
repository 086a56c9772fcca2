"""Explains why a tensor is placed as it is, by comparing every other placement and the cheapest program that
uses it.

names         the tensor that a user means, and its counterparts in other layers
places        the search with the tensor's placement forced
views         the question for a plan over one ratio, over several, or with a program per machine
judge         the simulator's result for a program, with the plan's micro-batches
alternatives  every placement with the best of its programs
reasons       the reason why no program has a placement
changes       the differences between two programs: instructions, collectives
summary       the answer in a sentence
overview      a plan as a whole: the work of each rank, and the communication between ranks
"""

from .alternatives import explain_tensor
from .changes import Collective
from .explanation import Alternative, Explanation
from .overview import Overview, Unit, explain_plan

__all__ = ["Alternative", "Collective", "Explanation", "Overview", "Unit", "explain_plan", "explain_tensor"]
