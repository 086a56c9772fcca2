"""From a graph and a cluster to a plan: every planner proposes programs, the simulator decides.

    propose     candidates of the requested planner, or of all of them for ``auto``
    finish      the passes on the plans that may become the fastest
    choose      the fastest that fits in every device's memory

``Options`` hold what the caller asks of a plan; a ``Budget`` limits the time for planning.
"""

from .make import make_plan, make_plans
from .options import Options, check_limits, check_planner
from .passes.shares import whole_counts
from .planners import PLANNERS
from .proposal import BASELINES

__all__ = [
    "BASELINES",
    "PLANNERS",
    "Options",
    "check_limits",
    "check_planner",
    "make_plan",
    "make_plans",
    "whole_counts",
]
