"""One process of ``benchmarks scripts``: runs a script as ``python SCRIPT`` would, for a number of steps.

The script is unchanged: it prints its loss after every step, and is timed from line to line.

``python -m benchmarks.scripts_worker SCRIPT STEPS ARGUMENTS...``
"""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import sys
import time
from contextlib import redirect_stdout

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.vision import find_torchvision
from mixmesh.measure.testbed import enter_device
from mixmesh.runtime.taking_part import current_stretch

LOSS = re.compile(r"loss ([^\s,]+)")


class Enough(BaseException):
    """Ends a script after its last step. Not an Exception, so that no script catches it."""


class Steps(io.StringIO):
    """The output of a script: the losses that it prints, with their times. Raises Enough after ``count``
    losses."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.ends_s: list[float] = []
        self.losses: list[float] = []

    def write(self, text: str) -> int:
        if (found := LOSS.search(text)) is not None:
            self.ends_s.append(time.perf_counter())
            self.losses.append(float(found[1]))
            if len(self.losses) == self.count:
                raise Enough
        return len(text)


def enter_after_step(*_: object) -> None:
    """Enters the device after the first step of the training, which has made all groups: their threads must
    not be throttled. Not every rank prints losses. A preparation tries an optimizer before it makes groups.
    """
    if not current_stretch():
        enter_device()


def run(script: str, count: int, arguments: list[str]) -> dict:
    """The seconds until the first step has ended (``first_s``, with imports, and the plan if there is one),
    those from the end of one step to the end of the next, and the losses of all steps."""
    printed, started = Steps(count), time.perf_counter()
    register_optimizer_step_post_hook(enter_after_step)
    sys.argv = [script, *arguments]
    try:
        with redirect_stdout(printed):
            runpy.run_path(script, run_name="__main__")
    except Enough:
        pass
    times = printed.ends_s
    return {
        "first_s": times[0] - started if times else 0.0,
        "step_s": [end - start for start, end in zip(times, times[1:])],
        "losses": printed.losses,
    }


if __name__ == "__main__":
    find_torchvision()
    measured = run(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(measured), flush=True)
    if dist.is_initialized():
        dist.barrier()  # no rank leaves while another is in its last step
