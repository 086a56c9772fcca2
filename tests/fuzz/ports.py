"""Ports for the processes that tests start."""

from __future__ import annotations

import os
import random
import socket
from contextlib import suppress
from itertools import count

FIRST_PORT = 16_000  # systems give none below 32768 to outgoing connections
PORTS_PER_WORKER = 1_000
WORKERS = 16  # of pytest-xdist
_offsets = count(random.SystemRandom().randrange(PORTS_PER_WORKER))


def free_port() -> int:
    """A port that is free and stays so until it is used: no other worker of the suite draws from its range,
    and no system gives it to an outgoing connection."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
    for offset in _offsets:
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", FIRST_PORT + PORTS_PER_WORKER * worker + offset % PORTS_PER_WORKER))
            return tried.getsockname()[1]
    raise AssertionError("there is always a next offset")
