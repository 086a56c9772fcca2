"""A rank: ``mixmesh run``, as ``python -m mixmesh run`` is it, that writes its steps down and ends with the
bench."""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
from collections.abc import Sequence

from mixmesh.measure.testbed import join_device
from mixmesh.measure.testbed.system import start_time
from mixmesh.runtime import train

from .journal import Writer

BENCH_VARIABLE = "MIXMESH_FAULTS_BENCH"  # the process that everything here ends with, and when it started


def end_with_bench() -> None:
    """Ends this process when the bench is gone, even if its agent was killed first."""
    pid, started = os.environ[BENCH_VARIABLE].split()

    def watch() -> None:
        while start_time(int(pid)) == started:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(words: Sequence[str]) -> None:
    end_with_bench()
    join_device()
    journal = Writer.of_environment()
    journal.write()
    train.train = journal.note_steps(train.train)  # mixmesh run looks it up there
    sys.argv[1:] = words
    runpy.run_module("mixmesh", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
