"""N ranks that look like one process to Trainer and Accelerate.

Both would otherwise wrap the model in DistributedDataParallel, cut the data once more, and divide or multiply
by the number of processes. Which rank writes files and prints stays as it is: only the first one.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.state import AcceleratorState, DistributedType
from transformers import TrainingArguments

from ...runtime.comm import release_last_tensors


def is_launched() -> bool:
    """Whether torchrun, or another launcher, started this process as one of several."""
    return "RANK" in os.environ


def look_like_one_process(args: TrainingArguments) -> None:
    """Makes ``args``, and every Accelerator that is made after it, those of a single process."""
    _ = args.device  # Accelerate joins the other processes here, if it has not done so yet
    AcceleratorState._reset_state()
    state = args.distributed_state
    state.distributed_type, state.num_processes = DistributedType.NO, 1
    args.average_tokens_across_devices = False  # as in a single process: every rank sees all tokens
    atexit.register(release_last_tensors)


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
