"""Makes shares follow the speeds of devices during a training.

    observe   every rank's own seconds of a step, as medians of some steps; notices a device that drifts from
              the others for long enough
    solve     the shares by the LP under corrected speeds, whether they fit, and the seconds of a step then
    decide    whether that pays for the rest of the run; one line that says so
    balancer  runs these three between steps, and gives model, optimizer and data their new shares
    replan    a plan of another form, which continues from a checkpoint
    own_loop  the same in a script's own loop

Observations are the same on all ranks, the first one solves, and all change shares before the same step.
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
