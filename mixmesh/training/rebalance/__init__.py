"""Shares that follow the speeds of devices while a training goes on.

observe     every rank's own seconds of a step, as medians of some steps; a device that drifts from the others
            for long enough
solve       the shares by the LP under corrected speeds, whether they fit, and what a step takes then
decide      whether that pays for the rest of the run; one line that says so
balancer    does these three between steps, and has model, optimizer and data go on with new shares
replan      a plan of another form, which goes on from a checkpoint
own_loop    the same in a loop of a script's own

What is observed is the same on all ranks, the first one solves, and all change shares before the same step.
"""

from .balancer import RunBalancer
from .decide import Decision, Terms, decide
from .observe import Observed, Sensitivity, window_steps
from .own_loop import LoopBalancer
from .replan import OtherPlan, Replanner
from .solve import Solved, Solver, corrected_costs

__all__ = [
    "Decision", "LoopBalancer", "Observed", "OtherPlan", "Replanner",
    "RunBalancer", "Sensitivity", "Solved", "Solver", "Terms", "corrected_costs",
    "decide", "window_steps",
]  # fmt: skip
