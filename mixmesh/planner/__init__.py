"""From a graph and a cluster to a plan: every planner proposes programs, the simulator disposes.

propose     candidates of the asked planner, or of all of them for ``auto``
bucket      gradient buckets of several sizes for each
polish      shares moved by whole samples while the simulated step gets shorter
choose      the fastest that fits in every device's memory
"""

from .make import BASELINES, PLANNERS, check_planner, make_plan, make_plans
from .passes.shares import whole_counts
from .proved import check_limit

__all__ = ["BASELINES", "PLANNERS", "check_limit", "check_planner", "make_plan", "make_plans", "whole_counts"]
