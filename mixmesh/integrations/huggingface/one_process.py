"""N ranks that look like one process to Trainer and Accelerate.

Both would otherwise wrap the model in DistributedDataParallel, cut the data once more, and divide or multiply
by the number of processes. Which rank writes files and prints stays as it is: only the first one.
"""

from __future__ import annotations

import atexit
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, DistributedType
from transformers import TrainingArguments

from ...errors import InputError
from ...runtime.comm import default_device, release_last_tensors


def is_launched() -> bool:
    """Whether torchrun, or another launcher, started this process as one of several."""
    return "RANK" in os.environ


def look_like_one_process(args: TrainingArguments) -> None:
    """Makes ``args``, and every Accelerator that is made after it, those of a single process. Raises
    InputError if they are for another device than the plan's."""
    device, planned = args.device, default_device()  # Accelerate joins the other processes here
    if device.type != planned.type or (device.type == "cuda" and device.index != planned.index):
        raise InputError(
            "the Trainer and the plan would run on different devices",
            expected=f"{planned}, as this process has it",
            got=f"{device} in the arguments",
            hint="leave use_cpu out; to train on CPUs: CUDA_VISIBLE_DEVICES= torchrun ...",
        )
    AcceleratorState._reset_state()
    state = args.distributed_state
    state.distributed_type, state.num_processes = DistributedType.NO, 1
    # without GPUs Accelerate counts processes only where use_cpu is set
    state.process_index = int(os.environ["RANK"])
    state.local_process_index = int(os.environ.get("LOCAL_RANK", "0"))
    args.average_tokens_across_devices = False  # as in a single process: every rank sees all tokens
    atexit.register(release_last_tensors)


def check_alike(batch: Mapping[str, Any]) -> None:
    """Raises InputError, on all ranks, if they did not make the same batch. Collective."""
    digest = hashlib.blake2b(digest_size=8)
    for name, value in sorted(batch.items()):
        if isinstance(value, torch.Tensor):
            digest.update(name.encode() + repr(tuple(value.shape)).encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.digest())
    if len(set(digests)) > 1:
        raise InputError(
            "the ranks did not make the same batch",
            expected="the same samples, and the same random numbers where samples are changed at random",
            got=f"{len(set(digests))} different batches on {len(digests)} ranks",
            hint=(
                "draw by torch or random, which Trainer seeds alike, not from a generator without a seed",
                "the same data set, in the same order, on every rank",
            ),
        )


@contextmanager
def as_first_process(args: TrainingArguments) -> Iterator[None]:
    """Within it this process is the first one for Accelerate: what is seeded by the rank is alike on all."""
    state = args.distributed_state
    before = state.process_index
    state.process_index = 0
    try:
        yield
    finally:
        state.process_index = before
