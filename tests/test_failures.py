"""Errors of PyTorch and of the system, in words of our own."""

from __future__ import annotations

import errno
import faulthandler
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from mixmesh.checkpoint.background import Saving
from mixmesh.checkpoint.ranks import Ranks
from mixmesh.errors import CollectiveError
from mixmesh.runtime import interfaces
from mixmesh.runtime.allocator import resident_bytes
from mixmesh.runtime.failures import collective_error, limit_error, start_error
from mixmesh.runtime.first_rank import everyones, from_first_rank
from mixmesh.runtime.processes import show_crashes


@pytest.mark.parametrize(
    "text, option",
    [
        ("pipe: Too many open files", "ulimit -n"),
        ("can't start new thread", "ulimit -u"),
        ("Resource temporarily unavailable", "ulimit -u"),
    ],
)
def test_a_limit_of_the_system_is_named_with_what_to_type(text, option):
    error = limit_error(1, "making process groups", RuntimeError(text))
    assert error is not None and error.ranks == (1,)
    assert option in error.message and text in error.got and option in error.hint[0]


def test_other_errors_are_no_limit():
    assert limit_error(1, "making process groups", RuntimeError("Connection closed by peer")) is None
    assert start_error(1, RuntimeError("Connection closed by peer")) is None


def test_a_network_interface_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    error = start_error(1, RuntimeError("ifa != nullptr. Unable to find address for: nope0"))
    assert error is not None and error.got == "nope0"
    assert "lo" in error.expected and error.hint[0] == "unset GLOO_SOCKET_IFNAME"


def test_an_address_that_other_ranks_do_not_reach_is_told_with_what_to_type():
    text = "Gloo connectFullMesh failed with pair.cc: timed out connecting: remote=[127.0.1.1]:31152"
    error = start_error(1, RuntimeError(text))
    assert error is not None and "127.0.1.1" in error.got and "GLOO_SOCKET_IFNAME" in error.hint[0]
    full = start_error(1, RuntimeError("Gloo connectFullMesh failed with socket: Too many open files"))
    assert full is not None and "ulimit -n" in full.hint[0]


def test_a_connection_that_fails_is_no_timeout_of_the_collective():
    """gloo gives up connecting within seconds, whatever the limit of the collective."""
    error = RuntimeError("Gloo connectFullMesh failed with pair.cc: timed out connecting: Connection refused")
    said = str(collective_error(1, "making process groups", error, ranks="0 and 1", timeout_s=300))
    assert "could not connect to a peer" in said and "300" not in said and "ended early" in said
    slow = collective_error(1, "all_gather", RuntimeError("Timed out"), ranks="0 and 1", timeout_s=300)
    assert "timed out after 300 s" in str(slow)


@pytest.mark.parametrize(
    "of_name, towards_store, given, wanted",
    [
        ("127.0.1.1", "10.0.0.5", None, "eth7"),
        ("127.0.1.1", "10.0.0.5", "eth0", "eth0"),  # the user's own choice
        ("127.0.1.1", "127.0.0.1", None, None),  # all ranks on one machine
        ("10.0.0.5", "10.0.0.5", None, None),
        ("127.0.1.1", "10.0.0.6", None, None),  # an address of no interface
    ],
)
def test_gloo_listens_where_other_machines_reach_it(monkeypatch, of_name, towards_store, given, wanted):
    """Not at 127.0.1.1, to which ``/etc/hosts`` of Debian maps the name of the machine."""
    monkeypatch.setattr(interfaces, "host_of_name", lambda: of_name)
    monkeypatch.setattr(interfaces, "host_towards_store", lambda: towards_store)
    monkeypatch.setattr(
        psutil, "net_if_addrs", lambda: {"lo": [], "eth7": [SimpleNamespace(address="10.0.0.5")]}
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", given or "")
    interfaces.choose_interface()
    assert (os.environ["GLOO_SOCKET_IFNAME"] or None) == wanted


@pytest.mark.parametrize("ask", [lambda: everyones(0), lambda: from_first_rank(int)])
def test_a_rank_that_is_gone_before_there_is_a_watch_is_told_in_a_few_lines(monkeypatch, ask):
    """PyTorch's own error would be a traceback through its functions and ours."""

    def closed(*_, **__) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:39591")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "all_gather_object", closed)
    monkeypatch.setattr(dist, "broadcast_object_list", closed)
    with pytest.raises(CollectiveError, match="lost a peer") as caught:
        ask()
    assert "its own output says why" in caught.value.hint[0]


def test_a_checkpoint_that_gets_no_thread_of_its_own_says_which_limit(monkeypatch):
    def start(_) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(CollectiveError, match="ulimit -u"):
        Saving(Ranks(0, 1, None), {}, lambda: None)


def test_a_training_goes_on_where_its_memory_cannot_be_read(monkeypatch):
    """Between two steps only the heap needs the number: a script that has left too many files open was ended
    by it."""

    def read_text(path: Path) -> str:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    monkeypatch.setattr(Path, "read_text", read_text)
    assert resident_bytes() > 2**20


def test_a_rank_that_crashes_says_where(tmp_path):
    """A segmentation fault ended it without a word, and the others refer to its own output."""
    told = os.open(tmp_path / "stderr", os.O_WRONLY | os.O_CREAT)
    if not (pid := os.fork()):
        os.dup2(told, 2)
        faulthandler.disable()  # the tests' own
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        show_crashes()
        os.kill(os.getpid(), signal.SIGSEGV)
        os._exit(0)
    os.close(told)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV
    text = (tmp_path / "stderr").read_text()
    assert "Segmentation fault" in text and "in test_a_rank_that_crashes_says_where" in text
