"""Makes N ranks look like one process to Accelerate.

Otherwise Accelerate would wrap the model in DistributedDataParallel, cut the data once more, and divide or
multiply by the number of processes. Still, only the first rank writes files and prints.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher
from accelerate.state import AcceleratorState, DistributedType, PartialState

from ....errors import InputError
from ....runtime.accelerator import is_accelerator
from ....runtime.comm import default_device, release_last_tensors
from ....runtime.first_rank import wait_for_all


def look_like_one_process(state: PartialState) -> None:
    """Makes ``state``, and every Accelerator created later, look like a single process. Raises InputError if
    they use another device than the plan's."""
    device, planned = state.device, default_device()
    if device.type != planned.type or (is_accelerator(device) and device.index != planned.index):
        raise InputError(
            "Accelerate and the plan would run on different devices",
            expected=f"{planned}, as this process has it",
            got=f"{device} in the arguments",
            hint="leave use_cpu and cpu out; to train on CPUs: CUDA_VISIBLE_DEVICES= torchrun ...",
        )
    state.distributed_type, state.num_processes = DistributedType.NO, 1
    # without GPUs Accelerate counts processes only if it is told to use CPUs
    state.process_index = int(os.environ["RANK"])
    state.local_process_index = int(os.environ.get("LOCAL_RANK", "0"))
    earlier = AcceleratorState._shared_state  # the state of an earlier Accelerator
    if (earlier.get("num_processes"), earlier.get("process_index")) != (1, state.process_index):
        AcceleratorState._reset_state()
    reads = SimpleNamespace(process_index=0, num_processes=1, device=state.device)
    # a loader of data without indices: every rank reads all of them, as a single process does
    DataLoaderDispatcher.state = property(lambda self: reads, lambda self, _: None)
    atexit.register(release_last_tensors)


def keep_to_first_rank(state: PartialState) -> None:
    """Makes ``state`` wait for all ranks, and run what is decorated with ``on_main_process`` and the like on
    the first rank only, which the state of a single process would not do. All objects that Accelerate derives
    from its state share this."""
    state.wait_for_everyone = partial(wait_for_all, "wait_for_everyone")
    on_first = partial(_only_where, state.is_main_process)
    state.on_main_process = state.on_last_process = state.on_process = on_first
    on_first_of_machine = partial(_only_where, state.is_local_main_process)
    state.on_local_main_process = state.on_local_process = on_first_of_machine


def _only_where(is_here: bool, function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
    return function if is_here else lambda *args, **kwargs: None


@contextmanager
def as_first_process(state: PartialState) -> Iterator[None]:
    """A context in which Accelerate considers this process the first one, so that anything that depends on
    the rank is the same on all ranks."""
    before = state.process_index
    state.process_index = 0
    try:
        yield
    finally:
        state.process_index = before
