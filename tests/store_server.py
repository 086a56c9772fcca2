"""A process that holds a store: ``python store_server.py`` writes the store's port and the id of the process,
and serves until it is killed."""

from __future__ import annotations

import os
import signal

import torch.distributed as dist

if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(store.port, os.getpid(), flush=True)
    signal.pause()
