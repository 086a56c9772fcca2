"""Prints a message once that all ranks of a launch would print: an error in the common input is the same on
every rank."""

from __future__ import annotations

import hashlib
import os
import socket
import sys

STORE_S = 3.0  # seconds to wait for the launcher's store, after which every rank prints for itself
KEY = "mixmesh/told"


def is_first_to_tell(text: str) -> bool:
    """Whether this process should print ``text``, because no other process of this start of torchrun that
    prints to the same place has claimed it. True without torchrun, or if its store cannot be reached."""
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
        place = os.fstat(sys.stderr.fileno())  # every log file should have all that its rank prints
        where = f"{socket.gethostname()} {place.st_dev} {place.st_ino}"
        digest = hashlib.sha256(f"{restarts} {where}\n{text}".encode()).hexdigest()[:24]
        return open_store(STORE_S).add(f"{KEY}/{digest}", 1) == 1
    except (RuntimeError, OSError, ValueError, KeyError):  # PyTorch's errors of a store are RuntimeErrors
        return True
