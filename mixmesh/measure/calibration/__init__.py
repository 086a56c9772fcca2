"""Measures one device of a kind, without a user's job, and fits the cost model's constants to it.

Reading order: ``samples`` (the kernels measured), ``timing`` (the measurement), ``fit`` (constants from
timings).
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...base.units import GIB, plural, seconds_text, si_bytes, size_text
from ...cluster import Device
from ...cluster.catalogue import CATALOGUE
from ...cluster.detection.inventory import FoundDevice, read_device
from ...cluster.detection.speed import GPU_SIZES, measure_speed, product, run_s
from ...cluster.device import catalogue_device
from ...cluster.device_file import Calibration
from ...errors import InputError
from ...runtime.accelerator import computes_tf32, is_accelerator
from ...runtime.allocator import steady_heap
from ..profiler.constants import own_card_memory, own_process_memory
from .fit import fit_device, fit_optimizer, fits_of
from .samples import Group, Timing, groups
from .timing import Bench, measure_group, measure_optimizer, tf32_set

__all__ = ["Measured", "Steps", "calibrate"]

MEASURING = 0.92  # share of the time after which measuring ends and fitting begins
HEATING = 0.08  # share of the time for which a GPU computes first, so that its clocks are as under load
OPTIMIZER_SHARE = 0.1
LEAST_S = 1.0  # least seconds for the first group
PROCESS_S = 20.0  # least seconds for a separate process that measures memory on a CPU
HALF_ON_CPU_S = 60.0  # least seconds for half precision, which many CPUs compute slowly
MOST_CONTEXT_BYTES = 3 * 2**30  # a larger context must include other processes on the card
MEMORY, HEAT, OPTIMIZER = "memory of a process", "computing, for clocks as under load", "optimizer"


@dataclass(frozen=True)
class Steps:
    """The callbacks of a calibration: ``begin(name, num)`` before a group of ``num`` samples, ``step(number,
    text)`` before each of them, ``end(number, text)`` with the group's result after ``number`` samples."""

    begin: Callable[[str, int], object] = lambda name, num: None
    step: Callable[[int, str], object] = lambda number, text: None
    end: Callable[[int, str], object] = lambda number, text: None


@dataclass(frozen=True)
class Measured:
    """A calibration with its measurements: the timings of kernels and the (bytes of parameters, seconds) of
    optimizer steps. ``plain`` is the device without a calibration."""

    calibration: Calibration
    plain: Device
    timings: tuple[Timing, ...]
    optimizer_steps: tuple[tuple[float, float], ...]


def calibrate(
    device: torch.device, *, seconds: float = 120.0, name: str | None = None, steps: Steps | None = None
) -> Measured:
    """Measures a device for about ``seconds``, without a process group. ``name`` is the device's, by default
    the catalogue's or PyTorch's. A class of kernels for which the time does not suffice keeps the costs of
    the datasheet. Raises InputError if there was no time for any."""
    steps = steps or Steps()
    started = time.perf_counter()
    steady_heap()  # as in training
    facts = read_device(device)
    context = measure_memory(device, seconds, steps)  # first, before anything else is loaded
    plain = plain_device(device, facts, name)
    if is_accelerator(device):
        heat(device, started + HEATING * seconds + 2.0, steps)
    bench = Bench.of(device, plain)
    has_half = is_accelerator(device) or seconds >= HALF_ON_CPU_S
    timings = measure_groups(
        bench, groups(plain, has_half=has_half), started + (MEASURING - OPTIMIZER_SHARE) * seconds, steps
    )
    steps.begin(OPTIMIZER, 1)
    optimizer = measure_optimizer(bench, started + MEASURING * seconds)
    steps.end(1, f"AdamW over {plural(len(optimizer), 'size')} of parameters")
    if not timings:
        raise InputError(
            "there was no time to measure anything",
            expected="some seconds, more on a slow device",
            got=f"--seconds {seconds:g}",
            hint="mixmesh calibrate --seconds 120",
        )
    fitted, of_optimizer = fit_optimizer(fit_device(plain, timings), optimizer)
    now = datetime.datetime.now(datetime.UTC)
    calibration = Calibration(
        replace(fitted, **context, calibrated=now.date().isoformat()),
        now.date().isoformat(),
        reported_name(facts),
        torch.__version__,
        round(time.perf_counter() - started, 1),
        (*fits_of(fitted, plain, timings), *of_optimizer),
    )
    return Measured(calibration, plain, tuple(timings), tuple(optimizer))


def measure_groups(bench: Bench, every: Sequence[Group], until: float, steps: Steps) -> list[Timing]:
    """Timings of all groups; each gets its share of the time that is left, and leaves the rest to others."""
    timings: list[Timing] = []
    for number, group in enumerate(every):
        left_s = max(until - time.perf_counter(), 0.0)
        share = group.share / sum(g.share for g in every[number:])
        steps.begin(group.name, len(group.samples))
        began = time.perf_counter()
        own = measure_group(
            bench,
            group,
            began + max(share * left_s, LEAST_S if not number else 0.0),
            lambda n, sample: steps.step(n, sample.kernels),
        )
        timings += own
        rows = len({t.sample.row for t in own})
        took = seconds_text(time.perf_counter() - began)
        steps.end(len(own), f"{plural(len(own), 'kernel')} of {rows} of {len(group.rows)} classes in {took}")
    return timings


def plain_device(device: torch.device, found: FoundDevice, name: str | None) -> Device:
    """The device without a calibration: from the catalogue, or from its own fastest product and copy."""
    if found.row is not None:
        card = catalogue_device(found.row.name)
        return replace(card, name=name or card.name)
    check_name(name)
    speed = measure_speed(device)
    memory_bytes = si_bytes(max(found.memory_bytes * 10 // GIB, 1) / 10)
    return Device(
        name or ("cpu" if found.kind == "cpu" else found.name),
        speed.flop_per_s,
        memory_bytes,
        speed.memory_bytes_per_s,
        kind=found.kind,
        half_flop_per_s=speed.half_flop_per_s,
        supports_bf16=found.supports_bf16,
        tf32_flop_per_s=tf32_flop_per_s(device),
    )


def check_name(name: str | None) -> None:
    """Raises InputError for a name in the catalogue if the device is not that card."""
    if name in CATALOGUE:
        raise InputError(
            "this device is not the card of that name", expected="a name of its own", got=f"--name {name}"
        )


def tf32_flop_per_s(device: torch.device) -> float:
    """The rate of float32 products in TF32; 0 if the device has none."""
    if not computes_tf32(device):
        return 0.0
    size = GPU_SIZES["products"]
    with tf32_set(True):
        return 2 * size**3 / run_s(product(device, torch.float32, size), device)


def heat(device: torch.device, until: float, steps: Steps) -> None:
    """Keeps a GPU computing until that time, because its initial speed may be higher than its sustained
    speed."""
    steps.begin(HEAT, 1)
    work = product(device, torch.float32, GPU_SIZES["products"])
    while time.perf_counter() < until:
        run_s(work, device)
    steps.end(1, "products for as long as the clocks need")


def measure_memory(device: torch.device, seconds: float, steps: Steps) -> dict[str, Any]:
    """The device's fields for memory: bytes of a process without tensors, and those added by computing. Empty
    if they could not be measured."""
    steps.begin(MEMORY, 1)
    if is_accelerator(device):
        memory = own_card_memory(device)
        if memory.idle > MOST_CONTEXT_BYTES:
            steps.end(1, f"{size_text(memory.idle)} of the card are in use, by others too: estimated")
            return {}
    else:
        process = own_process_memory(seconds / 4) if seconds / 4 >= PROCESS_S else None
        if process is None:
            steps.end(1, f"no time for it below {4 * PROCESS_S:g} seconds: estimated")
            return {}
        memory = process
    kernel_bytes = max(memory.working - memory.idle, 0)
    steps.end(1, f"{size_text(memory.idle)} before it computes, {size_text(kernel_bytes)} with it")
    return {"context_bytes": memory.idle, "kernel_bytes": kernel_bytes}


def reported_name(found: FoundDevice) -> str:
    """PyTorch's or the system's name for the device; for a CPU with the number of threads."""
    return found.name if found.kind == "gpu" else f"{found.name}, {plural(found.num_threads, 'thread')}"
