"""Tries plans on the cluster itself, so that measured steps decide between those with similar predictions.

propose   the fastest plans of different kinds, by the profile
trial     each trains some steps, in turns, so that the comparison holds while speeds drift
correct   devices that computed longer than predicted count as slower, and the job is planned again
choose    the fastest by measurement, of those that remain after some rounds
"""

from .correct import corrected, device_factors
from .loop import Tuned, tune
from .trials import Trial, kind_text, one_round, same

__all__ = ["Trial", "Tuned", "corrected", "device_factors", "kind_text", "one_round", "same", "tune"]
