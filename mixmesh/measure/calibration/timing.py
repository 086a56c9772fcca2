"""Measures the seconds of samples on one device, as many as the time allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ...cluster import Device
from ...cluster.classes import TF32
from ...runtime.accelerator import empty_cache, is_accelerator
from ...runtime.local import local_op
from ...runtime.optimizers import fuse
from ...runtime.random import RandomPolicy
from ..profiler.meter import Meter
from ..profiler.operators import example, time_op
from .fit import costs_of
from .samples import SMALL, SMALL_SHAPES, Group, Row, Sample, Timing

CHAIN = 32  # number of kernels in a row, whose mean is taken
TOLD = 3.0  # kernels longer than this many times the call of the backward pass are timed by the clock
RUNS = 5  # runs of a sample in each direction, including the first one
FLOOR_S = 0.02  # least seconds to measure a sample, however short its kernel
COPIES = 5  # copies of its inputs and outputs that a sample needs
MEMORY_SHARE = 0.4  # largest share of the device's memory for a sample
# limit on the bytes of a sample on a CPU: larger tensors are new pages each time, which are zeroed first
CPU_MOST_BYTES = 2**26
OPTIMIZER_BYTES = (2**20, 2**23, 2**25, 2**27, 2**29)
PARAMETERS = 8  # number of tensors that an optimizer steps
OPTIMIZER_COPIES = 6  # parameter, gradient, two moments and temporaries


@contextmanager
def tf32_set(is_on: bool) -> Iterator[None]:
    """A context in which float32 products and convolutions run in TF32 or not, if the device has it."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    try:
        products.allow_tf32 = convolutions.allow_tf32 = is_on
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


@dataclass
class Bench:
    """A device and its meter. ``plain`` has its figures without a calibration, from which the number of
    samples that the time allows is predicted; ``call_s`` is the cost of one call of the backward pass without
    its kernels."""

    device: torch.device
    plain: Device
    meter: Meter
    call_s: float = 0.0
    pace: dict[Row, float] = field(default_factory=dict)  # real over predicted seconds of the last sample

    @classmethod
    def of(cls, device: torch.device, plain: Device) -> Bench:
        # the CPU time of a single thread is the same on a busy machine as on an idle one
        is_one_thread = device.type == "cpu" and torch.get_num_threads() == 1
        bench = cls(device, plain, Meter(device, emulated=is_one_thread))
        smallest = Sample(SMALL, "any", "f32", SMALL_SHAPES[0])
        bench.call_s = time_op(smallest.program, bench.meter, device)[1]
        return bench

    def plain_s(self, sample: Sample) -> float:
        """Seconds for both directions of a sample, from the figures of ``plain``."""
        costs = costs_of(self.plain, tf32=sample.dtype == TF32)
        op = costs.op(sample.call, sample.num_gradients, 0)
        return op.forward.at(1.0) + op.backward.at(1.0)

    def predicted_s(self, sample: Sample) -> float:
        """Seconds for both directions of a sample, corrected by its row's pace so far."""
        return self.plain_s(sample) * self.pace.get(sample.row, 1.0)

    def needed_s(self, sample: Sample) -> float:
        """Seconds that it takes to measure a sample."""
        return FLOOR_S + RUNS * self.predicted_s(sample) * (CHAIN if sample.chained else 1)

    def has_room(self, sample: Sample) -> bool:
        if self.plain.kind == "cpu" and sample.size_bytes > CPU_MOST_BYTES:
            return False
        return COPIES * sample.size_bytes <= MEMORY_SHARE * self.plain.memory_bytes

    def measure(self, sample: Sample) -> Timing | None:
        """The timing of a sample; None if the device cannot run it."""
        predicted_s = self.plain_s(sample)
        started = time.perf_counter()
        try:
            with tf32_set(sample.dtype == TF32):
                timing = self._chained(sample) if sample.chained else self._alone(sample)
        except (RuntimeError, NotImplementedError):  # out of memory, or no such kernel
            empty_cache(self.device)
            return None
        took_s = timing.forward_s + (timing.backward_s or 0.0)
        # on a busy machine the wall-clock time says more than the thread's own time
        run_s = (time.perf_counter() - started - FLOOR_S) / RUNS / (CHAIN if sample.chained else 1)
        self.pace[sample.row] = max(took_s / predicted_s, run_s / predicted_s)
        return timing

    def _alone(self, sample: Sample) -> Timing:
        forward_s, backward_s = time_op(sample.program, self.meter, self.device)
        if backward_s < TOLD * self.call_s:
            return Timing(sample, forward_s, None)
        if not is_accelerator(self.device):  # a CPU computes while the call runs
            backward_s -= self.call_s
        return Timing(sample, forward_s, backward_s)

    def _chained(self, sample: Sample) -> Timing:
        """Measures one kernel among many in a row, which share the call of the backward pass."""
        body = sample.program.instructions[-1]
        run = local_op(sample.program, body, 0, self.device, RandomPolicy())
        first, *others = ((i.type.value.dtype, i.type.value.shape) for i in sample.program.instructions[:-1])
        x = example(*first, 2, self.device)
        weights = [[example(*kind, 2, self.device) for kind in others] for _ in range(CHAIN)]

        def forward() -> torch.Tensor:
            y = x
            for own in weights:
                result = run(y, *own)[0]
                assert result is not None  # a single rank has the whole result
                y = result
            return y

        forward_s = self.meter.best(forward) / CHAIN
        y = forward()
        leaves = [x, *(w for own in weights for w in own)]
        grad = torch.ones_like(y)
        backward_s = self.meter.best(lambda: torch.autograd.grad(y, leaves, grad, retain_graph=True)) / CHAIN
        return Timing(sample, forward_s, backward_s)


def measure_group(
    bench: Bench, group: Group, until: float, progress: Callable[[int, Sample], object]
) -> list[Timing]:
    """Timings of a group's samples, measured until the time ``until`` of ``time.perf_counter``. Rows take
    turns: each starts with its smallest sample, which gives the row's pace, then takes the largest for which
    there is time, then those in between. ``progress`` is called with the number of samples measured and the
    next one."""
    timings: list[Timing] = []
    rows = group.rows
    left = {row: [s for s in samples if bench.has_room(s)] for row, samples in rows.items()}
    number = 0
    while any(left.values()):
        for row, samples in left.items():
            share_s = (until - time.perf_counter()) / max(sum(map(bool, left.values())), 1)
            sample = choose(bench, samples, share_s, is_first=len(samples) == len(rows[row]))
            if sample is None:
                samples.clear()
                continue
            samples.remove(sample)
            progress(number, sample)
            number += 1
            timing = bench.measure(sample)
            if timing is not None:
                timings.append(timing)
    return timings


def choose(bench: Bench, samples: Sequence[Sample], share_s: float, *, is_first: bool) -> Sample | None:
    """The next sample of a row that can be measured in ``share_s``; None if there is none."""
    possible = [s for s in samples if bench.needed_s(s) <= share_s]
    if not possible:
        return None
    if is_first:
        return possible[0]
    return possible[-1] if len(samples) % 2 else possible[len(possible) // 2]


def measure_optimizer(bench: Bench, until: float) -> list[tuple[float, float]]:
    """Bytes of parameters and seconds of a step of AdamW over them, as training runs it, until that time."""
    steps: list[tuple[float, float]] = []
    for size_bytes in OPTIMIZER_BYTES:
        expected_s = size_bytes * (steps[-1][1] / steps[-1][0] if steps else 1e-9)
        has_room = OPTIMIZER_COPIES * size_bytes <= MEMORY_SHARE * bench.plain.memory_bytes
        if not has_room or time.perf_counter() + FLOOR_S + (RUNS + 2) * expected_s > until:
            break
        try:
            steps.append((size_bytes, optimizer_step_s(bench, size_bytes)))
        except RuntimeError:
            empty_cache(bench.device)
            break
    return steps


def optimizer_step_s(bench: Bench, size_bytes: int) -> float:
    """Seconds of a step over as many bytes of parameters in float32."""
    numbers = size_bytes // 4 // PARAMETERS
    params = [torch.nn.Parameter(torch.zeros(numbers, device=bench.device)) for _ in range(PARAMETERS)]
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer = torch.optim.AdamW(params)
    fuse(optimizer)
    optimizer.step()  # creates the states
    return bench.meter.best(optimizer.step)
