"""A job whose data fails, or ends early, on one rank: every rank ends with that rank's error."""

from __future__ import annotations

import os
import subprocess
import time

import pytest
from warm_python import python

JOB = """
import os, torch, mixmesh
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def forward(self, x):
        return self.layer(x).square().mean()

def batches():
    for number in range(100):
        if number == 3 and os.environ["RANK"] == "1":
            {failure}
        yield {{"x": torch.ones(8, 4)}}

def job():
    data = batches()
    return mixmesh.Job(Model(), next(data), data=data)
"""


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("raise ValueError('no such image')", "no such image"),
        ("return", "rank 1"),
        ("raise SystemExit(3)", "data raised SystemExit: 3"),
    ],
)
def test_every_rank_ends_with_the_error_of_one(tmp_path, failure, words):
    (tmp_path / "job.py").write_text(JOB.format(failure=failure))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MIXMESH_CACHE": str(tmp_path / "cache")}
    command = "-m torch.distributed.run --nproc-per-node 2 -m mixmesh run job.py --profile-seconds 0"
    started = time.monotonic()
    done = subprocess.run(
        [python(), *command.split(), "--steps", "50"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode != 0
    assert time.monotonic() - started < 120  # not the time-out of collectives, 300 s
    assert words in done.stderr and "bug in mixmesh" not in done.stderr, done.stderr
