"""The process that holds the store is stopped for longer than a rank may be silent, and goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from warm_python import python

from mixmesh.runtime import start
from mixmesh.runtime.awake import AwakeClock
from mixmesh.runtime.peers import Peers, Seen
from mixmesh.runtime.watch import Watch

SERVER = Path(__file__).parent / "store_server.py"
HEARTBEAT_S = 1.0
LIMIT_S = 30.0  # on a busy machine


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    """The port of a store, and the id of the process that holds it."""
    with subprocess.Popen([python(), str(SERVER)], stdout=subprocess.PIPE, text=True) as started:
        port, pid = (int(word) for word in started.stdout.readline().split())
        yield port, pid
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def store(server) -> dist.Store:
    return dist.TCPStore("127.0.0.1", server[0], is_master=False)


def becomes_true(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_so()


def test_ranks_hear_of_each_other_when_it_goes_on(server, store):
    first, second = (Watch(store, rank, 2, HEARTBEAT_S) for rank in range(2))
    try:
        assert becomes_true(lambda: 1 in first._peers.states())
        os.kill(server[1], signal.SIGSTOP)
        assert becomes_true(lambda: first._peers.store_is_silent and second._peers.store_is_silent)
        beat = first._peers.states()[1].beat
        os.kill(server[1], signal.SIGCONT)
        assert becomes_true(lambda: first._peers.states()[1].beat > beat + 1)
        assert becomes_true(lambda: not first._peers.store_is_silent)
        assert first._verdict is second._verdict is None
    finally:
        first.close()
        second.close()


def test_a_rank_is_known_after_the_first_comparison_even_if_the_store_was_silent(store, monkeypatch):
    """The thread that reads the store may hang when the other rank is stopped."""
    monkeypatch.setattr(Peers, "read", lambda _: None)  # it hangs
    second = Watch(store, 1, 2, HEARTBEAT_S)
    first = Watch(store, 0, 2, HEARTBEAT_S)
    monkeypatch.setattr(start, "running_watch", lambda: first)
    start.compare_first(torch.nn.Linear(1, 1))
    assert 1 in first._peers.states()
    first.close()
    second.close()


def test_the_silence_of_ranks_begins_anew_when_it_goes_on():
    """None of them was able to write."""
    clock = AwakeClock()
    peers = Peers(dist.HashStore(), 0, 2, HEARTBEAT_S, clock)
    Peers(peers._store, 1, 2, HEARTBEAT_S).write(Seen(1, "elsewhere", 1, 0, "", 0.0, ""))
    peers.read()
    clock.now_s = 3 * HEARTBEAT_S
    assert "has not been heard of" in peers.why_silent(1, HEARTBEAT_S)
    peers.note_silence(is_silent=True)
    assert not peers.why_silent(1, HEARTBEAT_S)
    peers.note_silence(is_silent=False)
    assert not peers.why_silent(1, HEARTBEAT_S)
    clock.now_s += HEARTBEAT_S
    assert "has not been heard of" in peers.why_silent(1, HEARTBEAT_S)
