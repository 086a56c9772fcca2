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
from ...frontend.trace.capture import loss_of
from ...lang.ir import Graph
from ...lang.rules import call_of
from ...runtime.allocator import give_back
from ...runtime.messages import meet
from ...runtime.optimizers import fuse
from ...runtime.segments import compiled
from .children import Outcome, attempt_on
from .limit import STEPS, Limit
from .meter import Meter

FACTORS = (1.0, 0.6)  # factors on the device's likely share
TRIAL_S = 60.0  # limit on the seconds of a first step
LEAST_STEPS, FEW_STEPS = 6, 2


@dataclass(frozen=True)
class Steps:
    """Real seconds of a local step over the sum of its operators' in the costs, under a quota real seconds
    over CPU seconds, the number of samples of the last step, 0 if none fits, and real seconds for a sample of
    all that were timed, 0 without steps."""

    scale: float = 1.0
    host_scale: float = 1.0
    samples: int = 0
    sample_s: float = 0.0


@dataclass(frozen=True)
class StepTimes:
    """The number of samples of a batch, mean seconds of a step on it by the clock and by the CPU time of the
    thread, and the sum of its operators' in the costs."""

    samples: int
    real_s: float
    cpu_s: float
    predicted_s: float


def measure_steps(
    graph: Graph,
    job: Any,
    share: float,
    costs: CostModel,
    device_class: int,
    meter: Meter,
    budget_s: float,
    compiles: bool = False,
    limit: Limit | None = None,
    autocast: Autocast | None = None,
) -> Steps:
    """Times local steps, if the device has the memory for steps of the whole model, and the model has values;
    without them, no rank ever holds all of it.

    Collective: all ranks run steps for equally long at the same time, as in training, so that a fast device
    is measured while the slow ones are busy too. Every batch is tried first in a way that survives running
    out of memory, and halved if memory runs out. After ``limit`` only one batch is run a few times. With
    ``compiles`` the compiled model is measured with one batch, outside of any limit, as it is compiled for
    each size of a batch.
    """
    # the same on all ranks, which have compared their models
    if any(p.is_meta for p in job.model.parameters()):
        return Steps()
    device = meter.device
    give_back()  # frees memory that measuring operators left in the heap
    model = job.model.to(device)
    optimizer = optimizer_of(job)
    rows = rows_of(job.batch)
    timed = compiled(model) if compiles else model
    factors = FACTORS[:1] if compiles else FACTORS

    def backward(batch: Any, model: Callable[..., Any] = timed) -> None:
        both_passes(model, batch, device, autocast)

    def step(batch: Any) -> None:
        backward(batch)
        optimizer.zero_grad()

    def optimize() -> None:
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        optimizer.step()

    def part(count: int) -> Any:
        return cut_batch(job.batch, rows, count, device)

    def both(count: int) -> None:
        optimize()
        # not compiled, because a compiler's own processes do not survive in a child
        backward(part(count), model)
        optimizer.zero_grad()

    timed_steps: list[StepTimes] = []
    samples = 0
    for number, factor in enumerate(factors):
        if number and limit is not None and limit.is_past(STEPS):
            break
        count = fitting_count(
            lambda count: attempt_on(device, partial(both, count), TRIAL_S),
            max(1, round(rows * share * factor)),
            rows,
        )
        if not count:
            meet()  # at the same time as the ranks that measure
            continue
        batch, samples = part(count), count
        step(batch)
        meet()
        until = math.inf if limit is None or compiles else time.perf_counter() + limit.left_s(STEPS)
        real_s, cpu_s = mean_s(meter, partial(step, batch), budget_s / len(factors), until)
        predicted_s = predicted_step_s(graph, costs, device_class, count / rows)
        if predicted_s > 0 and cpu_s > 0:
            timed_steps.append(StepTimes(count, real_s, cpu_s, predicted_s))
    if not timed_steps:
        return Steps(samples=samples)
    scale, host_scale = scales_of(timed_steps, by_cpu=meter.emulated)
    sample_s = sum(t.real_s for t in timed_steps) / sum(t.samples for t in timed_steps)
    return Steps(scale, host_scale, samples, sample_s)


def scales_of(times: Sequence[StepTimes], *, by_cpu: bool) -> tuple[float, float]:
    """``Steps.scale`` and ``Steps.host_scale``. ``by_cpu``: a few steps meet more or fewer of a quota's
    pauses, while their CPU time is nearly the same."""
    if not by_cpu:
        return statistics.mean(t.real_s / t.predicted_s for t in times), 1.0
    host_scale = sum(t.real_s for t in times) / sum(t.cpu_s for t in times)
    return host_scale * statistics.mean(t.cpu_s / t.predicted_s for t in times), host_scale


def optimizer_of(job: Any) -> torch.optim.Optimizer:
    """A new optimizer of the job's kind, as in training."""
    make = job.optimizer or (lambda params: torch.optim.AdamW(params, lr=0.0))
    optimizer = make(job.model.parameters())
    fuse(optimizer)
    return optimizer


def both_passes(
    model: Callable[..., Any], batch: Any, device: torch.device, autocast: Autocast | None
) -> None:
    """Runs a forward and a backward pass as in training."""
    with under(autocast and (device.type, autocast[1])):
        out = model(**batch) if isinstance(batch, dict) else model(*batch)
    loss_of(out).backward()


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
    def cut(t):
        if not isinstance(t, torch.Tensor):
            return t
        return (t[:count] if t.dim() and t.shape[0] == rows else t).to(device)

    return torch.utils._pytree.tree_map(cut, batch)
