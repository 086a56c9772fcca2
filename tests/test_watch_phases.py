"""A rank is stopped: the others end within a stated time whatever they are doing, and say who was lost."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from phases_worker import HEARTBEAT_S, LONG_S, PHASES
from warm_python import python

from mixmesh.runtime.awake import AwakeClock
from mixmesh.runtime.watch import BEAT_S, GRACE_S

WORKER = Path(__file__).parent / "phases_worker.py"
# one beat to be missed, one to be noticed, one for the grace to be over; the rest is for a busy machine
BOUND_S = HEARTBEAT_S + GRACE_S + 3 * BEAT_S + 15.0


@pytest.fixture(scope="module")
def ends(tmp_path_factory) -> dict[str, tuple[str, float | None]]:
    """By phase the output of the rank that was not stopped, and its seconds from the stop to its end."""
    folder = tmp_path_factory.mktemp("phases")
    paths = os.pathsep.join([str(WORKER.parent.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    scenarios = [f"stopped {phase}" for phase in PHASES]
    subprocess.run([python(), str(WORKER), str(folder), *scenarios], env=env, check=True)
    told = json.loads((folder / "ends.json").read_text())
    after_s = {scenario: at for scenario, rank, status, at in told if rank == 0 and status}
    return {s: ((folder / f"{s}-0.txt").read_text(), after_s.get(s)) for s in scenarios}


def test_the_default_is_within_30_s():
    assert 20.0 + GRACE_S + 3 * BEAT_S <= 30.0 < LONG_S


@pytest.mark.parametrize("phase", PHASES)
def test_the_others_end_in_time(ends, phase):
    text, after_s = ends[f"stopped {phase}"]
    assert "rank 1 is stopped (by a signal)" in text, text
    assert after_s is not None and after_s < BOUND_S, (after_s, text)


def test_a_clock_stands_while_nobody_ticks():
    clock = AwakeClock()
    clock._ticked_at -= 100.0  # as if the process had been stopped
    clock.tick(most_s=3.0)
    assert clock.now_s == 3.0
    clock.tick(most_s=3.0)
    assert clock.now_s < 3.5
