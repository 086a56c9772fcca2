"""The event simulator: predicts the timeline of a program's step on every rank.

Every rank has a computing thread, every process group a channel on which its collectives run one after
another, and every machine a NIC out, a NIC in and a link inside, which all channels that cross them share.
Gradient reductions have channels of their own, as in the runtime.

In the forward pass a redistribution starts at its place in the program and is awaited at its first use. In
the backward pass it starts after that use and is awaited at its place. The gradients of stored parameters,
and the reductions of buckets, overlap with computing and are awaited at the end of the pass, before the
optimizer. Nothing else makes ranks wait for each other. So the step is a steady-state period that begins with
the optimizer: from the end of one such wait to the end of the next. Where ranks do not all wait for the same
last collective, the prediction is at least that period.

A second of computing takes ``1 + slowdown`` seconds while a collective of the rank is under way. A collective
also keeps the computing thread busy for some time, half of it at its start and half where it is awaited.

Every time is a composition of sums, maxima and minima that grows with each duration, so that no faster device
or link can make the predicted step longer. This decides the approximations:

- Channels share a link fairly: a collective is delayed by the time that the others occupy the link meanwhile.
  Those that stand earlier in the program are not delayed in turn. In exchange, the gradient reductions that
  follow end only when the link has carried all earlier traffic, and so does the pass. A link that served in
  order of arrival would have anomalies.
- By the same rule, a collective that stands earlier in the program but starts later delays the other one.
  This at most doubles the time of the other, once per channel, and holds up only gradient reductions.
- A gradient reduction that some rank joins only at the end of its pass slows no computing until then.
- Gradients that arrive during the pass are accepted at its end, and those from gathered factors computed
  then.
- A rank of a pipeline completes a pass before it sends results to other stages (``pipeline``).
- The all-reduce of the loss is awaited with the gradients, although the runtime waits for it after the
  optimizer. Ranks that compute nothing receive the loss from another rank, which takes no time here.
"""

from ..base.timeline import Timeline
from .simulation import Simulation, simulate
from .values import MicroBatches

__all__ = ["MicroBatches", "Simulation", "Timeline", "simulate"]
