"""Says once what all ranks of a launch would say: errors in the input of all are the same on every rank."""

from __future__ import annotations

import hashlib
import os
import socket
import sys

STORE_S = 3.0  # within which the launcher's store answers, or every rank speaks for itself
KEY = "mixmesh/told"


def is_first_to_tell(text: str) -> bool:
    """Whether no other process of this start of torchrun has claimed to print ``text`` where this one prints.
    True without torchrun, whose store outlives its processes, or if that cannot be reached."""
    try:
        if int(os.environ["WORLD_SIZE"]) < 2:
            return True
    except (KeyError, ValueError):
        return True
    from ..runtime.launch_store import is_of_launcher, open_store

    if not is_of_launcher():
        return True
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        place = os.fstat(sys.stderr.fileno())  # a log of each rank's own has all that the rank says
        where = f"{socket.gethostname()} {place.st_dev} {place.st_ino}"
        digest = hashlib.sha256(f"{restarts} {where}\n{text}".encode()).hexdigest()[:24]
        return open_store(STORE_S).add(f"{KEY}/{digest}", 1) == 1
    except (RuntimeError, OSError, ValueError, KeyError):  # PyTorch's errors of a store are RuntimeErrors
        return True
