"""One rank of ``benchmarks collectives``: times every form of a collective on pieces of given shares."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial

from benchmarks.measure import COLLECTIVE_TIMEOUT_S, print_from_rank_0
from mixmesh.measure.profiler.links import VITAL, Case, measure
from mixmesh.measure.testbed import enter_device
from mixmesh.runtime.comm import Comm, leave

say = partial(print, file=sys.stderr, flush=True)


def main(cases: str, sizes: str, rounds: str) -> None:
    """``cases`` are [collective, algorithm, shares]; prints per case and size the seconds of each round."""
    comm = Comm.of_sets(int(os.environ["WORLD_SIZE"]), (), timeout_s=COLLECTIVE_TIMEOUT_S)
    enter_device()  # so that the threads of the process groups are outside of the quota
    started = time.perf_counter()
    chosen = [Case(name, how, comm.everyone, tuple(shares), VITAL) for name, how, shares in json.loads(cases)]
    found = [[[] for _ in json.loads(sizes)] for _ in chosen]
    for number in range(int(rounds)):
        for case, row in zip(chosen, found):
            say(f"round {number + 1} of {rounds}: {case.collective} {case.algorithm}, skew {case.skew:.2g}")
            for times, size in zip(row, json.loads(sizes)):
                times.append(measure(comm, case, size, started)[0])
    print_from_rank_0(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
