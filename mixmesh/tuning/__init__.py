"""Plans tried on the cluster itself: what a prediction leaves open, a few steps of each finalist decide.

propose     the fastest plans of different kinds, by the profile
trial       each trains some steps, in turns, so that the comparison holds while speeds drift
correct     devices that computed longer than predicted count as slower, and the job is planned again
choose      the fastest one measured
"""

from .correct import corrected, device_factors
from .loop import Tuned, tune
from .trials import Trial, compete, kind_text, same

__all__ = ["Trial", "Tuned", "compete", "corrected", "device_factors", "kind_text", "same", "tune"]
