"""The store in which agents of torchrun meet, in a separate process, so that any of them may die."""

from __future__ import annotations

import sys
import time

from torch.distributed import TCPStore


def main(host: str, port: int) -> None:
    store = TCPStore(host, port, is_master=True, wait_for_workers=False)
    while store is not None:  # runs as long as the bench
        time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
