"""The store through which ranks compare what they were given: it is there until all have read, and its
loss is told as one."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from mixmesh.errors import CollectiveError
from mixmesh.runtime.agreement import Round


def tell(store: dist.Store, rank: int, fact: str) -> list[dict[str, str]]:
    return Round(store, "start", rank, 2, "the start", 20).exchange({"plan": fact})


def test_rank_0_stays_until_a_rank_that_differs_has_read():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first = threading.Thread(target=tell, args=(server, 0, "one"))
    other = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    other.set("start/1", '{"plan": "other"}')  # as a rank that has told, and has not looked again yet
    first.start()
    first.join(0.5)
    assert first.is_alive()
    assert tell(other, 1, "other") == [{"plan": "one"}, {"plan": "other"}]
    first.join(5)
    assert not first.is_alive()


def test_a_store_whose_process_has_ended_is_told_as_such():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=5))
    del server
    with pytest.raises(CollectiveError, match="rank 1 has lost the store of the launch in the start"):
        tell(other, 1, "other")
