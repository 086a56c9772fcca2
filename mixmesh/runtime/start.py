"""The start of all ranks: they compare their plans, models and settings, and begin to watch each other."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base.progress import tell
from ..errors import InputError
from ..lang.ir import Program
from ..lang.plan_devices import PlannedDevice
from .accelerator import indexed
from .agreement import Facts, check_facts, disagreement, facts_of_model, facts_of_start
from .comm import LEAST_S, RANK_VARIABLES, default_device, initialise
from .devices import FoundDevice, device_mismatch, find_device
from .first_rank import everyones
from .versions import versions_text
from .watch import Watch, running_watch, watch_of_process

DEVICE = "device"  # the key of a fact that ranks exchange but that may differ


def start_together(
    model: nn.Module,
    plan: Any,
    *,
    seed: int,
    device: torch.device | str | None,
    timeout_s: float,
    heartbeat_s: float,
) -> Watch | None:
    """Starts this process's watch and compares the ranks. Returns None for a single process, or with
    ``heartbeat_s`` 0. Collective.

    Raises PlanError on all ranks if they were given different plans, models, code, seeds or versions, or if a
    rank's GPU is not the planned one or has less memory than the plan needs.
    """
    if not dist.is_initialized() and not all(name in os.environ for name in RANK_VARIABLES):
        return None
    program = plan if isinstance(plan, Program) else plan.program
    micro_batches = None if isinstance(plan, Program) else plan.micro_batches
    where = indexed(device) if device is not None else default_device()
    initialise(program.world_size, where, timeout_s)
    watch = watch_of_process(heartbeat_s, max(timeout_s, LEAST_S)) if heartbeat_s else None
    if watch is None:
        return None
    planned = Planned((), ()) if isinstance(plan, Program) else Planned.of(plan)
    facts = facts_of_start(model, program, repr((micro_batches, planned)), seed)
    with watch.call("parallelize"):
        compare_start(watch, facts, planned, find_device(where), max(timeout_s, LEAST_S))
    names = tuple(f'{d.device} of machine "{d.machine}"' for d in planned.devices or ())
    watch.position = replace(watch.position, devices=names)
    return watch


@dataclass(frozen=True)
class Planned:
    """The devices and the bytes of memory in a plan, by rank; devices are None if its file does not name
    them. A bare program has neither."""

    devices: tuple[PlannedDevice, ...] | None
    peaks_bytes: tuple[int, ...]

    @classmethod
    def of(cls, plan: Any) -> Planned:
        return cls(plan.devices, tuple(plan.predicted_peak_memory_bytes))


def compare_first(model: nn.Module) -> None:
    """Raises PlanError on all ranks if their versions or models differ: takes one small message, before
    anything is measured or planned. Collective."""
    told = everyones({"versions": versions_text(), **facts_of_model(model)})
    if (watch := running_watch()) is not None:
        watch.meet_peers()
    check_facts(list(told))


def compare_start(watch: Watch, facts: Facts, planned: Planned, found: FoundDevice, timeout_s: float) -> None:
    """Exchanges every rank's facts and device. Collective. Raises PlanError on all ranks if their facts
    differ, or if one of them is not on its planned device."""
    told = watch.exchange({**facts, DEVICE: json.dumps(asdict(found))}, "parallelize", timeout_s)
    devices = [FoundDevice(**json.loads(one.pop(DEVICE))) for one in told]
    error = disagreement(told) or device_mismatch(planned.devices, planned.peaks_bytes, devices)
    if error is not None:
        raise error
    if planned.devices is None and watch.rank == 0 and found.kind == "gpu":
        text = "the plan does not say which devices it was made for, so they are not compared: plan again"
        tell(f"mixmesh: {text}")


def check_values(model: nn.Module) -> None:
    """Raises InputError for a model whose tensors have no values to train from."""
    check_no_meta([*model.named_parameters(), *model.named_buffers()])


def check_can_follow(model: nn.Module) -> None:
    """Raises InputError for a tensor without values that no file of weights can fill. Tensors on the device
    meta are read into each rank's part later, by their names in ``state_dict``."""
    kept = {id(x) for x in model.state_dict(keep_vars=True).values() if isinstance(x, Tensor)}
    tensors = (*model.named_parameters(), *model.named_buffers())
    lost = [name for name, x in tensors if x.is_meta and id(x) not in kept]
    if lost:
        raise InputError(
            "a buffer has no values, and is not in the model's state_dict: no file can give it any",
            expected="buffers that are not persistent to be made with values",
            got=f"{len(lost)} on the device meta, the first is {lost[0]}",
            hint="model.to_empty(device='cpu') and give all values, or register_buffer(..., persistent=True)",
        )


def stand_in_for_meta(model: nn.Module) -> list[str]:
    """Replaces each tensor on the device meta by one zero in memory, expanded to its shape, so that a rank's
    piece takes memory and the whole does not. Returns their names; they need values before use."""
    names = []
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.is_meta:
            names.append(name)
            zero = torch.zeros((), dtype=x.dtype).expand(x.shape)
            is_parameter = isinstance(x, nn.Parameter)
            other = nn.Parameter(zero, requires_grad=x.requires_grad) if is_parameter else zero
            torch.utils.swap_tensors(x, other)  # the same object, because optimizers hold it
    return names


def no_values(names: Sequence[str], num_tensors: int) -> InputError:
    """The error for using a model before its tensors of these ``names`` have values."""
    return InputError(
        "the model has no values: it was made on the device meta",
        expected="weights that are read before the first call, or tensors with values on all ranks",
        got=f"{len(names)} of {num_tensors} tensors without values, the first is {names[0]}",
        hint=("mixmesh run --weights FROM", "checkpoint.load_weights(model, FROM), or make it on the CPU"),
    )


def check_no_meta(tensors: Sequence[tuple[str, Tensor]], what: str = "model") -> None:
    """Raises InputError if one of these tensors, by name, is on the device ``meta``."""
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty:
        raise InputError(
            f"the {what} has no values: it was made on the device meta",
            expected="tensors with values, on all ranks; only planning needs none",
            got=f"{len(empty)} of {len(tensors)} tensors on meta, the first is {empty[0]}",
            hint=f"make the {what} on the CPU"
            + (", or model.to_empty(device='cpu') and load its weights first" if what == "model" else ""),
        )


def meets(kind: str, unless: Callable[[Any], bool] = lambda model: False) -> Callable:
    """Decorates a method of a parallel model in which all ranks take part, so that the watch knows of the
    call."""

    def decorate(method: Callable) -> Callable:
        @functools.wraps(method)
        def run(self, *args, **kwargs):
            if unless(self):
                return method(self, *args, **kwargs)
            with self.comm.call(kind):
                return method(self, *args, **kwargs)

        return run

    return decorate
