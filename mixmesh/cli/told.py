"""Says once what all ranks of a launch would say: errors in the input of all are the same on every rank."""

from __future__ import annotations

import hashlib
import os
from datetime import timedelta

STORE_S = 3.0  # within which the launcher's store answers, or every rank speaks for itself
KEY = "mixmesh/told"


def is_first_to_tell(text: str) -> bool:
    """Whether no other process of this start of torchrun has claimed to print ``text``. True without
    torchrun, or if its store cannot be reached."""
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if int(os.environ["WORLD_SIZE"]) < 2:
            return True
    except (KeyError, ValueError):
        return True
    import torch.distributed as dist

    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    digest = hashlib.sha256(f"{restarts}\n{text}".encode()).hexdigest()[:24]
    try:
        timeout = timedelta(seconds=STORE_S)
        store = dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
        return store.add(f"{KEY}/{digest}", 1) == 1
    except (RuntimeError, OSError):  # PyTorch's errors of a store are RuntimeErrors
        return True
