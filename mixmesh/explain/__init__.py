"""Why is a tensor placed as it is? Every other placement, with the cheapest program that uses it.

names         which tensor is meant, and what stands in its place in other layers
alternatives  the search with the tensor's placement forced, and what the simulator says of its programs
reasons       why a placement is in no program at all
changes       what differs between two programs: instructions, collectives
summary       the answer in a sentence
"""

from .alternatives import Alternative, Explanation, explain_tensor
from .changes import Collective

__all__ = ["Alternative", "Collective", "Explanation", "explain_tensor"]
