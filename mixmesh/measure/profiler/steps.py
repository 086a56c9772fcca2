"""Measures whole local steps, which relate the operators' times to real seconds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

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
from .meter import REPEATS, Meter

FACTORS = (1.0, 0.6)  # factors on the device's likely share
TRIAL_S = 60.0  # limit on the seconds of a first step
LEAST_STEPS, FEW_STEPS = 6, 2


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
) -> tuple[float, float] | None:
    """Real seconds of a local step over the sum of its operators' in ``costs``, and optimizer seconds per
    byte. None if the device lacks the memory for steps of the whole model, or if the model has no values, so
    that no rank ever holds all of it.

    Collective: all ranks run steps for equally long at the same time, as in training, so that a fast device
    is measured while the slow ones are busy too. Every batch is tried first in a way that survives running
    out of memory, and halved if memory runs out. After ``limit`` only one batch is run a few times. With
    ``compiles`` the compiled model is measured with one batch, outside of any limit, as it is compiled for
    each size of a batch.

    Under a quota an optimizer's step of some milliseconds falls within a burst or meets a pause of many times
    its length. Its CPU seconds do not, and are converted to real ones as those of operators are.
    """
    # the same on all ranks, which have compared their models
    if any(p.is_meta for p in job.model.parameters()):
        return None
    device = meter.device
    clock = Meter(device, emulated=False)
    give_back()  # frees memory that measuring operators left in the heap
    model = job.model.to(device)
    make = job.optimizer or (lambda params: torch.optim.AdamW(params, lr=0.0))
    optimizer = make(model.parameters())
    fuse(optimizer)  # as in training
    size_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    tensors = [t for t in tensors_of(job.batch) if t.dim()]
    rows = max((t.shape[0] for t in tensors), default=1)
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}

    timed = compiled(model) if compiles else model
    factors = FACTORS[:1] if compiles else FACTORS

    def backward(batch: Any, model: Callable[..., Any] = timed) -> None:
        with under(autocast and (device.type, autocast[1])):
            out = model(**batch) if isinstance(batch, dict) else model(*batch)
        loss_of(out).backward()

    def step(batch: Any) -> None:
        backward(batch)
        optimizer.zero_grad()

    def optimizer_step_s(batch: Any) -> float:
        backward(batch)  # as in training: in new memory, which is zeroed first, the step takes twice as long
        took_s = meter.once(optimizer.step)
        optimizer.zero_grad()
        return took_s

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

    scales, optimizer_s = [], []
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
        batch = part(count)
        step(batch)
        meet()
        until = math.inf if limit is None or compiles else time.perf_counter() + limit.left_s()
        measured = mean_s(clock, partial(step, batch), budget_s / len(factors), until)
        predicted = predicted_step_s(graph, costs, device_class, count / rows)
        if predicted > 0:
            scales.append(measured / predicted)
        optimizer_step_s(batch)
        has_time = limit is None or compiles or limit.left_s() > 0
        optimizer_s += [optimizer_step_s(batch) for _ in range(REPEATS if has_time else 1)]
    model.load_state_dict(state)
    if not optimizer_s:
        return None
    scale = statistics.mean(scales) if scales else 1.0
    real = scale if meter.emulated else 1.0
    return scale, real * statistics.median(optimizer_s) / max(size_bytes, 1)


def fitting_count(tried: Callable[[int], Outcome], count: int, rows: int) -> int:
    """Returns the number of rows to time a step on: ``count``, or fewer if the device has no memory for
    them, down to 0. If the model fails on a part of its batch, whose first dim need not be samples, it is
    ``rows``. ``tried`` runs a step on a number of rows."""
    while count and (outcome := tried(count)).out_of_memory:
        count //= 2
    if count and count < rows and not outcome.done:
        return 0 if tried(rows).out_of_memory else rows
    return count


def mean_s(clock: Meter, step: Callable[[], object], budget_s: float, until: float = math.inf) -> float:
    """Mean seconds of a step, from about ``budget_s`` seconds and at least ``LEAST_STEPS`` steps, or
    ``FEW_STEPS`` after the moment ``until``. The first step does not count, as the device has rested before
    it; nor do the fastest and the slowest of several. Steps begin anywhere in a quota's periods, so their
    mean is right, while a median of a few steps can only be one of two or three values."""
    step()
    started = time.perf_counter()
    times: list[float] = []
    while len(times) < LEAST_STEPS or time.perf_counter() - started < budget_s:
        if len(times) >= FEW_STEPS and time.perf_counter() > until:
            break
        times.append(clock.once(step))
    return statistics.mean(sorted(times)[1:-1] or times)


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


def tensors_of(batch: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(batch) if isinstance(t, torch.Tensor)]


def cut_batch(batch: Any, rows: int, count: int, device: torch.device) -> Any:
    def cut(t):
        if not isinstance(t, torch.Tensor):
            return t
        return (t[:count] if t.dim() and t.shape[0] == rows else t).to(device)

    return torch.utils._pytree.tree_map(cut, batch)
