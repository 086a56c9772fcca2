"""The event simulator: a program's step as it unfolds on every rank.

Per rank a computing thread; per process group a channel on which collectives follow each other; per machine
a NIC out and in and a link inside, which the channels that cross them share. Gradient sums have channels of
their own, as in the runtime.

Forward, a redistribution starts at its place and is awaited at its first use. In the backward pass it starts
after that use and is awaited at its place; the gradients of stored parameters, and the sums of buckets, go on
beside the computing and are awaited when the pass ends, before the optimizer. Nothing else makes ranks wait
for each other, so the step is a steady-state period: from one end of the waiting to the next, beginning with
the optimizer. Where ranks do not all wait for the same last collective, that is no shorter than the period.

A second of computing takes ``1 + slowdown`` while a collective that the rank has issued is under way, and a
collective keeps the computing thread busy for some time, half where it starts and half where it is awaited.

Every time is a composition of sums, maxima and minima that grows with each duration, so that no device or
link that gets faster can make the predicted step longer. That decides what is approximated:

- Channels share a link fairly: a collective takes as much longer as the others, while they are busy there,
  take of it. Those that stand earlier in the program are not slowed by it. Their loss is made up for by
  the gradient sums that follow, which end when the link has carried all that it was given before, and by the
  end of the pass. A link that served by time of arrival would have anomalies.
- By the same rule a collective that stands earlier in the program but starts later is taken to be in the
  way: at the most this doubles the time of the other, once per channel; only a gradient sum is held up by it.
- A gradient sum that some rank joins only at the end of its pass slows nobody's computing meanwhile.
- Gradients that arrive during the pass are taken in at its end, those out of gathered factors computed then.
- A rank of a pipeline computes a pass whole before it sends what other stages need of it (``pipeline``).
- The sum of the loss is awaited with the gradients; the runtime waits for it after the optimizer. Ranks that
  compute nothing are told it by one of the others, which waits for none of them: that takes no time here.
"""

from ..base.timeline import Timeline
from .simulation import Simulation, simulate
from .values import MicroBatches

__all__ = ["MicroBatches", "Simulation", "Timeline", "simulate"]
