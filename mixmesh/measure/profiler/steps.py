"""Measures whole local steps, which relate the operators' times to real seconds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ...cost import CostModel
from ...frontend.trace.autocast import Autocast, under
from ...frontend.trace.outputs import named_tensors
from ...frontend.trace.returned_loss import is_loss, loss_of
from ...frontend.trace.rows import first_samples
from ...lang.ir import Graph
from ...lang.rules import call_of
from ...runtime.allocator import HeapLimit, give_back, resident_bytes
from ...runtime.messages import meet
from ...runtime.optimizers import fuse
from ...runtime.segments import compiled
from .children import Outcome, attempt_on
from .limit import STEPS, Limit
from .meter import Meter

FACTORS = (1.0, 0.6, 1.0)  # each window's, on the device's likely share
STEPS_SHARE = 0.14  # share of the budget of all windows
TRIAL_S = 60.0  # limit on the seconds of a first step
LEAST_STEPS, FEW_STEPS = 4, 2
SCARCE = 0.5  # share of a device's memory: a process that holds more has no room for what is free in its heap


@dataclass(frozen=True)
class Steps:
    """Real seconds of a local step over the sum of its operators' in the costs, under a quota real seconds
    over CPU seconds, and real seconds for a sample of all that were timed, 0 without steps."""

    scale: float = 1.0
    host_scale: float = 1.0
    sample_s: float = 0.0


@dataclass(frozen=True)
class Window:
    """The number of samples of a batch, and mean seconds of a step on it by the clock and by the CPU time of
    the thread."""

    samples: int
    real_s: float
    cpu_s: float


class LocalSteps:
    """Whole steps of a job on one device, timed in windows of a profile, a batch in each. What else a machine
    does changes its pace within seconds: two steps at one moment are off by 7 %, two in each of three moments
    by 4 %.

    If the model has no values, no rank ever holds all of it, and nothing is timed. With ``compiles`` the
    compiled model is timed, in the first window only, as it is compiled for each size of a batch.
    """

    def __init__(
        self,
        job: Any,
        share: float,
        meter: Meter,
        memory_bytes: float = math.inf,
        *,
        heap: HeapLimit | None = None,
        compiles: bool = False,
        autocast: Autocast | None = None,
    ) -> None:
        self.job, self.share, self.meter, self.autocast = job, share, meter, autocast
        self.memory_bytes, self.heap, self.compiles = memory_bytes, heap or HeapLimit(0), compiles
        self.rows = rows_of(job.batch)
        self.windows: list[Window] = []
        self.samples = 0  # the last window's; 0 before it, and if none fits
        self._counts: dict[int, int] = {}  # those that fit, by those asked for
        # the same on all ranks, which have compared their models
        self.has_values = not any(p.is_meta for p in job.model.parameters())

    def window(self, number: int, budget_s: float, limit: Limit | None = None, end: float = STEPS) -> None:
        """Times steps for about ``budget_s`` seconds, if the device has the memory for steps of the whole
        model; a few, if the ``end`` of their part of ``limit`` is over.

        Collective: all ranks run steps for equally long at the same time, as in training, so that a fast
        device is measured while the slow ones are busy too. A batch that is larger than all before is tried
        first in a way that survives running out of memory, and halved if memory runs out.
        """
        if not self.has_values or (self.compiles and number):
            return
        if not self.heap.keeps_everything() and resident_bytes() > SCARCE * self.memory_bytes:
            # steps on new pages of a heap are up to a tenth slower than those of a training are
            give_back()
        self.samples = count = self._fitting_count(max(1, round(self.rows * self.share * FACTORS[number])))
        if not count:
            meet()  # at the same time as the ranks that measure
            return
        step = self._step(count)
        if not self.windows:
            step()
        meet()
        until = math.inf if limit is None or self.compiles else time.perf_counter() + limit.left_s(end)
        window = self._window(count, step, budget_s, until)
        self.samples = window.samples
        if window.cpu_s > 0:
            self.windows.append(window)

    def _window(self, count: int, step: Callable[[], None], budget_s: float, until: float) -> Window:
        """A window of steps on ``count`` samples. If the model fails on fewer than before (batch norm on one
        row, an odd number of halves), it is timed on as many as before."""
        before = min((w.samples for w in self.windows), default=0)
        try:
            return Window(count, *mean_s(self.meter, step, budget_s, until))
        except Exception:  # whatever the model raises
            if count >= before:
                raise
        return Window(before, *mean_s(self.meter, self._step(before), budget_s, until))

    def found(self, graph: Graph, costs: CostModel, device_class: int) -> Steps:
        """The scales of these costs that the windows give."""
        predicted = {
            count: predicted_step_s(graph, costs, device_class, count / self.rows)
            for count in {w.samples for w in self.windows}
        }
        known = [(w, predicted[w.samples]) for w in self.windows if predicted[w.samples] > 0]
        if not known:
            return Steps()
        scale, host_scale = scales_of(known, by_cpu=self.meter.emulated)
        sample_s = sum(w.real_s for w in self.windows) / sum(w.samples for w in self.windows)
        return Steps(scale, host_scale, sample_s)

    def _fitting_count(self, count: int) -> int:
        if count not in self._counts:
            is_whole = any(fitting > asked for asked, fitting in self._counts.items())
            if is_whole or count > max(self._counts.values(), default=0):
                self._counts[count] = self._tried(count)
            else:
                self._counts[count] = count
        return self._counts[count]

    def _tried(self, count: int) -> int:
        device = self.meter.device
        self.job.model.to(device)
        return fitting_count(
            lambda count: attempt_on(device, partial(self._try, count), TRIAL_S), count, self.rows
        )

    def _try(self, count: int) -> None:
        """A step with the optimizer's."""
        model, optimizer = self.job.model, optimizer_of(self.job)
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        optimizer.step()
        # not compiled, because a compiler's own processes do not survive in a child
        both_passes(model, self._part(count), self.meter.device, self.autocast)
        optimizer.zero_grad()

    def _step(self, count: int) -> Callable[[], None]:
        """A step without the optimizer's, of the compiled model if the job ``compiles``."""
        model, batch = self.job.model, self._part(count)
        timed = compiled(model) if self.compiles else model

        def step() -> None:
            both_passes(timed, batch, self.meter.device, self.autocast)
            model.zero_grad()

        return step

    def _part(self, count: int) -> Any:
        return cut_batch(self.job.batch, self.rows, count, self.meter.device)


def scales_of(windows: Sequence[tuple[Window, float]], *, by_cpu: bool) -> tuple[float, float]:
    """``Steps.scale`` and ``Steps.host_scale``, from windows with the seconds of a step's operators in the
    costs. ``by_cpu``: a few steps meet more or fewer of a quota's pauses, while their CPU time is nearly the
    same."""
    if not by_cpu:
        return statistics.median(w.real_s / predicted_s for w, predicted_s in windows), 1.0
    host_scale = sum(w.real_s for w, _ in windows) / sum(w.cpu_s for w, _ in windows)
    return host_scale * statistics.median(w.cpu_s / predicted_s for w, predicted_s in windows), host_scale


def optimizer_of(job: Any) -> torch.optim.Optimizer:
    """A new optimizer of the job's kind, as in training."""
    make = job.optimizer or (lambda params: torch.optim.AdamW(params, lr=0.0))
    optimizer = make(job.model.parameters())
    fuse(optimizer)
    return optimizer


def both_passes(
    model: Callable[..., Any], batch: Any, device: torch.device, autocast: Autocast | None
) -> None:
    """Runs a forward and a backward pass as in training. Without a loss the backward pass begins at all
    outputs that have a gradient."""
    with under(autocast and (device.type, autocast[1])):
        out = model(**batch) if isinstance(batch, dict) else model(*batch)
    loss = loss_of(out)
    roots = [loss] if is_loss(loss) else [x for _, x in named_tensors(out) if x.requires_grad]
    torch.autograd.backward(roots, [torch.ones_like(x) for x in roots])


@contextmanager
def kept_state(model: nn.Module) -> Iterator[None]:
    """A context after which a model has the values that it had before, if it has any."""
    state = {name: v.detach().clone() for name, v in model.state_dict().items() if not v.is_meta}
    try:
        yield
    finally:
        model.load_state_dict(state, strict=False)


def fitting_count(tried: Callable[[int], Outcome], count: int, rows: int) -> int:
    """Returns the number of rows to time a step on: ``count``, or fewer if the device has no memory for
    them, down to 0. If the model fails on a part of its batch, whose first dim need not be samples, it is
    ``rows``. ``tried`` runs a step on a number of rows."""
    while count and (outcome := tried(count)).out_of_memory:
        count //= 2
    if count and count < rows and not outcome.done:
        return 0 if tried(rows).out_of_memory else rows
    return count


def mean_s(
    meter: Meter, step: Callable[[], object], budget_s: float, until: float = math.inf
) -> tuple[float, float]:
    """Mean seconds of a step by the clock and by the CPU time of the thread, from about ``budget_s`` seconds
    and at least ``LEAST_STEPS`` steps, or ``FEW_STEPS`` after the moment ``until``. The first step does not
    count, as the device has rested before it. Steps begin anywhere in a quota's periods, so their mean is
    right, while a median of a few steps can only be one of two or three values; without a quota, the fastest
    and the slowest of several do not count."""
    step()
    clock = Meter(meter.device, emulated=False)
    started, cpu_started = time.perf_counter(), time.thread_time()
    times: list[float] = []
    while len(times) < LEAST_STEPS or time.perf_counter() - started < budget_s:
        if len(times) >= FEW_STEPS and time.perf_counter() > until:
            break
        times.append(clock.once(step))
    cpu_s = (time.thread_time() - cpu_started) / len(times)
    counted = times if meter.emulated else sorted(times)[1:-1] or times
    return statistics.mean(counted), cpu_s


def predicted_step_s(graph: Graph, costs: CostModel, device_class: int, share: float) -> float:
    """The sum of a step's operators; unmeasured ones are estimated from others of their class."""
    total = 0.0
    for node in graph.nodes:
        if node.is_leaf or node.is_sink:
            continue
        grads = sum(1 for name in dict.fromkeys(node.inputs) if name in graph.requires_grad)
        time = costs.op(call_of(node, graph.types), grads, device_class)
        total += time.forward.at(share) + time.backward.at(share)
    return total


def rows_of(batch: Any) -> int:
    """The number of rows of a batch: the size of the largest first dim among its tensors."""
    return max((t.shape[0] for t in tensors_of(batch) if t.dim()), default=1)


def tensors_of(batch: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(batch) if isinstance(t, torch.Tensor)]


def cut_batch(batch: Any, rows: int, count: int, device: torch.device) -> Any:
    fewer = first_samples(batch, rows, count)
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), fewer)
