"""Finds the largest micro-batch of a device in each ZeRO stage: predicts it by the memory model, and confirms
it by running it.

A rank's part of a step is *rehearsed*: its very program runs on its own device, with real tensors and
pretended collectives, so that shards, gathered parameters, buckets, accumulated gradients and the optimizer's
state are held as in training. It runs where running out of memory can be survived (``children``).
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...cluster.device import HEADROOM
from ...cost import CostModel
from ...errors import InputError, MixmeshError
from ...lang.ir import Program, even_ratio, make_ratio, samples_of, with_whole_rows
from ...lang.optimizer_states import ADAM, OptimizerStates
from ...lang.plan_devices import planned_devices
from ...lang.plan_file import MicroBatch, Plan, accumulates, schedule
from ...passes.zero import STAGES, with_stage
from ...runtime.accelerator import PRETENDED_BACKEND, begin_peak, empty_cache, peak_held_bytes
from ...runtime.allocator import resident_bytes
from ...runtime.data import shard_batches
from ...runtime.job_data import owned
from ...runtime.parallel import parallelize
from ...runtime.train import default_optimizer, peak_memory_bytes
from ...step.memory import PeakMemory
from .children import Outcome, attempt_on
from .steps import tensors_of

MAX_PASSES = 4  # limit on the passes per stage
ENOUGH = 1.1  # another pass is not worth it if the micro-batch can grow by this factor at most
LACKED = 0.1  # assumed excess of a pass that ran out of memory, as a share of the room
STEPS = 3  # steps in a pass: on a CPU the heap grows during the first ones
PASS_S = 180.0


@dataclass(frozen=True)
class Largest:
    """``samples`` per stage, 0 if not even one was confirmed. ``excess_bytes`` is by how much the last pass
    that fitted exceeded the memory model's count for an idle process and tensors; None if none fitted."""

    samples: tuple[int, ...]
    excess_bytes: float | None
    passes: int
    out_of_memory: int  # the number of passes


def largest_micro_batches(
    job: Any,
    program: Program,
    costs: CostModel,
    rank: int,
    *,
    device: torch.device,
    optimizer_states: OptimizerStates = ADAM,
    largest_share: float = 1.0,
    progress: Callable[[str], None] = lambda _: None,
) -> Largest:
    """The largest micro-batches of ``rank`` on its device, which must be unused otherwise. ``program`` is
    data parallelism with even shares over the cluster of ``costs``; owners' shares are even too. No
    micro-batch is larger than ``largest_share`` of the batch.

    Raises InputError once ``torch.distributed`` is initialised, MixmeshError if a pass fails for another
    reason than memory.
    """
    if dist.is_initialized():
        raise InputError(
            "micro-batches are measured before torch.distributed is initialised",
            expected="a process without process groups",
        )
    memory_bytes = costs.cluster.devices[rank].memory_bytes
    idle = costs.memory_constant_bytes(rank, idle=True)
    search = Search(room_bytes=memory_bytes * (1 - HEADROOM) - idle)
    samples: list[int] = []
    for stage in STAGES:
        plan_of = Plans(program, costs, rank, stage, optimizer_states, largest_share)
        if samples and samples[-1] == plan_of.most:
            samples.append(plan_of.most)  # a higher stage holds no more than this one
            continue

        def run(size: int, plan_of: Plans = plan_of) -> Outcome:
            progress(f"micro-batches: {size} in stage {plan_of.stage}")
            return attempt_on(device, partial(rehearse, job, plan_of(size), rank, device), PASS_S)

        samples.append(search.largest(plan_of.tensor_bytes, plan_of.most, run))
    return Largest(tuple(samples), search.excess_bytes, search.passes, search.out_of_memory)


class Search:
    """The largest size that runs within the room. The model's error in the passes of one stage
    holds for the next."""

    def __init__(self, room_bytes: float) -> None:
        self.room_bytes = room_bytes
        self.passes = self.out_of_memory = 0
        self.excess_bytes: float | None = None  # measured less predicted bytes, in the last pass that fitted

    def largest(self, predicted: Callable[[int], float], most: int, run: Callable[[int], Outcome]) -> int:
        """Searches for the largest size that fits. ``predicted`` gives bytes that rise with the size; ``run``
        measures them.

        The first size tried is the largest predicted to fit. Then predictions are corrected by the
        measurements, and between a size that fits and one that does not memory is assumed to be linear.
        """
        error = self.excess_bytes or 0.0
        fits, fits_bytes = 0, predicted(1) + error
        size = largest_within(predicted, self.room_bytes - error, most)
        exceeds = None
        for number in range(MAX_PASSES):
            if size <= fits * ENOUGH:
                break
            value = self.measured(run, size)
            if value is not None and value <= self.room_bytes:
                fits, fits_bytes = size, value
                self.excess_bytes = error = value - predicted(size)
            else:
                # assumes that a trial killed for memory exceeded it only slightly
                exceeds = size, value or self.room_bytes * (1 + LACKED)
            if exceeds is None:
                size = largest_within(predicted, self.room_bytes - error, most)
            elif number + 2 == MAX_PASSES and not fits:
                size = exceeds[0] // 2
            else:
                size = between((fits, fits_bytes), exceeds, self.room_bytes)
        return fits

    def measured(self, run: Callable[[int], Outcome], size: int) -> float | None:
        """The bytes of a pass; None if it ran out of memory. Raises MixmeshError if it failed otherwise."""
        outcome = run(size)
        self.passes += 1
        if outcome.done:
            return outcome.value
        if not outcome.out_of_memory:
            raise MixmeshError(f"a micro-batch of {size} samples could not be run", got=outcome.error[:500])
        self.out_of_memory += 1
        return None


def between(fits: tuple[int, float], exceeds: tuple[int, float], room_bytes: float) -> int:
    """The size, below the one that exceeds, at which the line through two (size, bytes) reaches
    ``room_bytes``."""
    (low, low_bytes), (high, high_bytes) = fits, exceeds
    part = (room_bytes - low_bytes) / max(high_bytes - low_bytes, 1.0)
    return min(low + int((high - low) * max(part, 0.0)), high - 1)


def largest_within(predicted: Callable[[int], float], room_bytes: float, most: int) -> int:
    """The largest size of at most ``most`` whose prediction is within the room; 0 if there is none."""
    fits, exceeds = 0, most + 1
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        fits, exceeds = (middle, exceeds) if predicted(middle) <= room_bytes else (fits, middle)
    return fits


class Plans:
    """Plans of one stage in which one rank takes micro-batches of a given size: two of them if the batch has
    enough samples, so that gradients are accumulated."""

    def __init__(
        self,
        program: Program,
        costs: CostModel,
        rank: int,
        stage: int,
        optimizer_states: OptimizerStates = ADAM,
        largest_share: float = 1.0,
    ) -> None:
        self.costs, self.rank, self.stage = costs, rank, stage
        world_size = program.world_size
        self.program = with_stage(with_whole_rows(program), stage, even_ratio(world_size))
        self.batch = next(i.types[0].shape[0] for i in program.graph.batch_inputs if i.types[0].shape)
        # if all devices take part
        self.most = min(math.ceil(largest_share * self.batch), self.batch - (world_size - 1))
        self.samples = samples_of(self.program)
        # memory is folded separately for a micro-batch and for a whole step
        self.in_micro_steps = PeakMemory(costs, optimizer_states, self.samples)
        self.at_once = PeakMemory(costs, optimizer_states)

    def __call__(self, size: int) -> Plan:
        """A plan for micro-batches of ``size`` samples. It has a prediction of its memory because the runtime
        gives free memory of its heap back when it comes near that."""
        plan = self._unpredicted(size)
        return replace(plan, predicted_peak_memory_bytes=self._peaks(plan))

    def _unpredicted(self, size: int) -> Plan:
        others = self.program.world_size - 1
        steps = 2 if 2 * size + others <= self.batch else 1
        left = self.batch - steps * size
        counts = [left // others + (n < left % others) for n in range(others)] if others else []
        rows = [MicroBatch(-(-n // steps), steps, n // steps) for n in counts]
        counts.insert(self.rank, steps * size)
        rows.insert(self.rank, MicroBatch(size, steps, size))
        program = self.program.with_shares(make_ratio(counts))
        return Plan(
            program,
            "rehearsal",
            0.0,
            (),
            self.costs.cluster.fingerprint,
            micro_batches=tuple(rows),
            devices=planned_devices(self.costs.cluster),
        )

    def tensor_bytes(self, size: int) -> float:
        """The rank's bytes by the memory model, without constants."""
        plan = self._unpredicted(size)
        memory = self.in_micro_steps if accumulates(plan.micro_batches) else self.at_once
        return self._peaks(plan)[self.rank] - memory.constants(plan.program)[self.rank]

    def _peaks(self, plan: Plan) -> tuple[int, ...]:
        if not accumulates(plan.micro_batches):
            return self.at_once.peaks(plan.program)
        planned = schedule(plan.program, plan.micro_batches, self.samples)
        return self.in_micro_steps.peaks(plan.program, planned)


def rehearse(job: Any, plan: Plan, rank: int, device: torch.device) -> int:
    """Runs this rank's part of a few steps of the plan alone, as if all others were there. Returns the peak
    bytes of its tensors and kernels. ``torch.distributed`` must not be initialised. Outside of a child
    process nothing of ``job`` changes."""
    in_child = device.type == "cpu"
    if in_child:
        before = resident_bytes() - size_bytes(job)
    else:
        empty_cache(device)
        begin_peak(device)
        before = peak_held_bytes(device)
    dist.init_process_group(PRETENDED_BACKEND, rank=rank, world_size=plan.program.world_size)
    try:
        with written_tensors():
            # a copy, because parallelize takes over the model
            train(job if in_child else replace(job, model=copy.deepcopy(job.model)), plan, rank, device)
    finally:
        dist.destroy_process_group()
    return (peak_memory_bytes(device) if in_child else peak_held_bytes(device)) - before


def train(job: Any, plan: Plan, rank: int, device: torch.device) -> None:
    """Makes a few steps in the way of ``runtime.train``."""
    optimizer = (job.optimizer or default_optimizer)(job.model.parameters())
    model, optimizer = parallelize(job.model, optimizer, plan, device=device, check_model=False)
    batch = owned(next(shard_batches([job.batch], plan.program, rank)))
    for _ in range(STEPS):
        forward = model.forward_local
        local, _ = forward(**batch) if isinstance(batch, dict) else forward(*batch)
        local.backward()
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def written_tensors() -> Iterator[None]:
    """A context that fills the results of pretended collectives: memory counts only once it is written to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns that operators are not deterministic
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


def size_bytes(job: Any) -> int:
    """Bytes of the model and the batch."""
    tensors = (*job.model.parameters(), *job.model.buffers(), *tensors_of(job.batch))
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
