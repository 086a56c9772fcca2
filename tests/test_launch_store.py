"""torchrun's store outlives the processes of a start: another start must not read what was written there."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from fuzz.ports import free_port
from torch.distributed.rendezvous import _env_rendezvous_handler, _rendezvous_handlers, rendezvous
from warm_python import python

from mixmesh.errors import CollectiveError, InputError
from mixmesh.runtime import launch_store
from mixmesh.runtime.launch_store import connect_store, keep_starts_apart, store_of_start, wait_for_address
from mixmesh.runtime.lost import Lost, Position, Waiting, error_of, fields_of
from mixmesh.runtime.peers import Peers, Seen
from mixmesh.runtime.processes import LAUNCHER_VARIABLE, is_stopped, process_place
from mixmesh.runtime.watch import Watch

JOB = """import torch, mixmesh
class Model(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()
def job():
    return mixmesh.Job(Model(8, 2), (torch.randn(16, 8),))
"""


def meet(server: dist.TCPStore, late: dict[int, float], world_size: int) -> list[dist.Store]:
    """The stores of the ranks of one start; some come ``late``, by so many seconds."""

    def come(rank: int) -> dist.Store:
        time.sleep(late.get(rank, 0.0))
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        return store_of_start(store, rank, world_size, timeout_s=20)

    with ThreadPoolExecutor(world_size) as ranks:
        return list(ranks.map(come, range(world_size)))


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("late", [{}, {1: 0.3}, {0: 0.3}, {2: 0.3}], ids=str)
def test_a_start_reads_nothing_of_an_earlier_one(server, late):
    earlier = meet(server, {}, 3)
    earlier[1].set("address", "of a process that is gone")
    for world_size in (3, 2, 3):
        stores = meet(server, {rank: s for rank, s in late.items() if rank < world_size}, world_size)
        assert not any(store.check(["address"]) for store in stores)
        stores[-1].set("address", f"{world_size}")
        assert {store.get("address") for store in stores} == {str(world_size).encode()}


@pytest.mark.parametrize("asked", [(), (0, 1)], ids=["by the environment", "by number, as accelerate does"])
def test_groups_that_a_library_makes_read_nothing_of_an_earlier_start(server, monkeypatch, asked):
    """As the arguments of a Hugging Face Trainer do after ``torchrun --max-restarts`` has started again."""
    of_start = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port}
    of_start |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": 3}
    for name, value in of_start.items():
        monkeypatch.setenv(name, str(value))
    server.set("address", "of a process that is gone")
    monkeypatch.setitem(_rendezvous_handlers, "env", _env_rendezvous_handler)
    keep_starts_apart()
    store, rank, world_size = next(rendezvous("env://", *asked))
    assert (rank, world_size) == (0, 1) and not store.check(["address"])


def test_a_rank_that_does_not_come_is_named(server, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    meet(server, {}, 2)  # what rank 1 wrote then is still there
    with pytest.raises(CollectiveError) as raised:
        store_of_start(server, 0, 2, timeout_s=0.5)
    assert raised.value.got == "nothing from rank 1"
    assert any("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in line for line in raised.value.hint)


def test_a_rank_that_has_come_is_not_called_missing(server, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    def come(rank: int) -> str:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        with pytest.raises(CollectiveError) as raised:
            store_of_start(store, rank, 3, timeout_s=1.0)
        return raised.value.got

    with ThreadPoolExecutor(2) as ranks:
        assert set(ranks.map(come, (0, 1))) == {"nothing from rank 2"}


@pytest.fixture
def by_hand(monkeypatch):
    """A function that sets the variables of a rank that no launcher has started."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    def become(rank: int, address: str, port: int) -> None:
        of_start = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": address, "MASTER_PORT": port}
        for name, value in of_start.items():
            monkeypatch.setenv(name, str(value))

    return become


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_whose_name_has_no_address_is_told_of_at_once(by_hand, monkeypatch, capsys, rank):
    by_hand(rank, "host.invalid", 29500)
    monkeypatch.setattr(launch_store, "TOLD_S", 0.0)
    with pytest.raises(CollectiveError, match="has not reached the store") as raised:
        connect_store(0.5)
    assert "MASTER_ADDR=host.invalid" in raised.value.expected and raised.value.got
    assert f"rank {rank} does not reach MASTER_ADDR=host.invalid" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["", "tcp", "29500/tcp", "0", "70000"])
def test_a_port_that_is_no_number_of_one_is_named(by_hand, monkeypatch, port):
    by_hand(0, "127.0.0.1", 1)
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(InputError, match="at which port the ranks meet") as raised:
        connect_store(timeout_s=2)
    assert raised.value.got == f"MASTER_PORT={port}"


def test_a_start_waits_as_long_as_it_is_told_to(by_hand, tmp_path):
    """Without a plan too, whose preparation is the first to meet the other ranks."""
    by_hand(1, "127.0.0.1", free_port())
    (tmp_path / "train.py").write_text(JOB)
    command = [python(), "-m", "mixmesh", "run", str(tmp_path / "train.py"), "--timeout", "70"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as waiting:
        told = waiting.stderr.readline()
        waiting.kill()
    assert told.startswith("mixmesh: rank 1 does not reach") and told.endswith("waiting up to 70 s\n")


def test_a_name_that_gets_its_address_late_is_waited_for(by_hand, monkeypatch):
    by_hand(0, "host.invalid", 29500)
    tried = []

    def look_up(*_: object) -> None:
        tried.append(0)
        if len(tried) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    wait_for_address(0, 10.0, listens=False)
    assert len(tried) == 3


def test_a_port_that_another_program_has_taken_ends_the_start(by_hand, monkeypatch):
    """PyTorch waits without end for its answer."""
    monkeypatch.setattr(launch_store, "TRY_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        by_hand(0, "127.0.0.1", port)
        with pytest.raises(InputError, match=f"MASTER_PORT={port}: another program listens"):
            connect_store(0.5)
        by_hand(1, "127.0.0.1", port)
        with pytest.raises(CollectiveError, match="is no store of a launch"):
            connect_store(0.5)


def test_every_survivor_names_what_it_was_waiting_for_itself():
    position = Position(31, ('T4 of machine "a"', 'V100 of machine "b"'))
    lost = Lost(1, "has failed", "MemoryError")
    first = position.error(lost, Waiting("gradient of aten.linear", 0.0, "%h = aten.linear(%x, %w)"), 3)
    told, again = error_of(fields_of(first, lost))
    assert (str(told), again) == (str(first), lost)
    own = position.error(again, Waiting("all_gather", 0.0), 3)
    assert own.message == (
        'rank 1 (V100 of machine "b") has failed, and the others wait for it in all_gather, at step 31'
    )
    assert (first.where, own.where) == ("%h = aten.linear(%x, %w)", "all_gather")


def test_a_rank_of_another_machine_whose_connection_is_closed_is_named(server):
    elsewhere = Seen(1, "another machine", 1, 1, "", 0.0, "")
    Peers(server, 1, 2, 30.0).write(elsewhere)
    watch = Watch(server, 0, 2, heartbeat_s=30.0)
    try:
        watch.waiting = Waiting.now("all_gather")
        error = watch.explain()
        assert error is not None and error.message.startswith("rank 1 has not been heard of for 3 s")
    finally:
        watch.close()


def test_the_end_of_a_data_worker_does_not_hide_why_a_collective_failed(server):
    """As PyTorch's handler of SIGCHLD does, which raises in whatever the main thread runs."""

    def tell_of_worker(number: int, frame: object) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.")

    Peers(server, 1, 2, 30.0).write(Seen(1, "another machine", 1, 1, "", 0.0, ""))
    watch = Watch(server, 0, 2, heartbeat_s=30.0)
    before = signal.signal(signal.SIGALRM, tell_of_worker)
    try:
        watch.waiting = Waiting.now("all_gather")
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        error = watch.explain()
        assert error is not None and error.message.startswith("rank 1 has not been heard of")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        watch.close()


@pytest.mark.parametrize("is_launched", [True, False])
def test_a_stopped_process_is_killed_where_a_launcher_would(server, monkeypatch, is_launched):
    monkeypatch.delenv(LAUNCHER_VARIABLE, raising=False)
    if is_launched:
        monkeypatch.setenv(LAUNCHER_VARIABLE, "run")
    other = subprocess.Popen(["sleep", "60"])
    try:
        seen = Seen(1, process_place(), other.pid, 1, "", 0.0, "")
        Peers(server, 1, 2, 30.0).write(seen)
        peers = Peers(server, 0, 2, 30.0)
        peers.read()
        peers.end_stopped(1)
        assert other.poll() is None  # it runs
        os.kill(other.pid, signal.SIGSTOP)
        while not is_stopped(other.pid):
            time.sleep(0.01)
        peers.end_stopped(1)
        if is_launched:
            assert other.wait(20) == -signal.SIGKILL
        else:
            time.sleep(0.1)
            assert other.poll() is None and is_stopped(other.pid)
    finally:
        other.kill()
        other.wait()
