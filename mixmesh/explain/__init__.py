"""Why is a tensor placed as it is? Every other placement, with the cheapest program that uses it.

names         which tensor is meant, and what stands in its place in other layers
places        the search with the tensor's placement forced
views         how the question is put to a plan over one ratio, over several, and to one per machine
judge         what the simulator says of a program, in the plan's micro-steps
alternatives  every placement with the best of its programs
reasons       why a placement is in no program at all
changes       what differs between two programs: instructions, collectives
summary       the answer in a sentence
overview      a plan as a whole: who computes what, and what passes between them
"""

from .alternatives import explain_tensor
from .changes import Collective
from .explanation import Alternative, Explanation
from .overview import Overview, Unit, explain_plan

__all__ = ["Alternative", "Collective", "Explanation", "Overview", "Unit", "explain_plan", "explain_tensor"]
