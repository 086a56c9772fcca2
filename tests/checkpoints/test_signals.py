"""Signals while other processes of the training live: a loader's workers, a pool for a metric."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import pytest

from mixmesh.checkpoint.signals import SIGNALS, Signals
from mixmesh.errors import CollectiveError

LIMIT_S = 20


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    """Ends a test that hangs, and leaves signals as they were."""

    def end(_number: int, _frame: object) -> None:
        raise TimeoutError

    before = {number: signal.getsignal(number) for number in (signal.SIGALRM, *SIGNALS)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that nohup starts would ignore it
    signal.signal(signal.SIGALRM, end)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    for number, handler in before.items():
        signal.signal(number, handler)


def forked() -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3 * LIMIT_S,), daemon=True)
    process.start()
    return process


@pytest.mark.parametrize("number", SIGNALS)
def test_what_a_forked_process_gets_is_not_for_the_training(number):
    with Signals() as signals:
        process = forked()
        time.sleep(0.2)  # for the process to begin
        os.kill(process.pid, number)
        time.sleep(0.2)
        assert signals.number == 0
        process.terminate()
        process.join()
        assert process.exitcode == -signal.SIGTERM
        assert signals.number == 0
        os.kill(os.getpid(), number)
        time.sleep(0.2)
        assert signals.number == number


def test_a_forked_process_that_lives_on_does_not_hold_up_the_end():
    before = signal.getsignal(signal.SIGTERM)
    with Signals():
        process = forked()
    assert signal.getsignal(signal.SIGTERM) is before
    process.kill()
    process.join()


def test_a_forked_process_leaves_the_context_by_itself():
    with Signals() as signals:
        if not (child := os.fork()):
            try:
                signals.__exit__(None, None, None)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0


def test_a_closed_terminal_asks_to_stop_unless_the_process_ignores_that():
    for before, expected in ((signal.SIG_DFL, signal.SIGHUP), (signal.SIG_IGN, 0)):  # the second is nohup's
        signal.signal(signal.SIGHUP, before)
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.2)
            assert signals.number == expected


def test_a_print_to_a_closed_terminal_is_no_error(tmp_path):
    """What goes to a file is still written."""
    path = tmp_path / "output"
    master, terminal = os.openpty()
    file = os.open(path, os.O_CREAT | os.O_WRONLY)
    from_child, to_parent = os.pipe()
    if not (child := os.fork()):
        try:
            os.dup2(terminal, 1)
            os.dup2(file, 2)
            os.close(master)
            with Signals() as signals:
                os.write(to_parent, b"!")
                while not signals.number:  # the parent closes the terminal, and then sends the signal
                    time.sleep(0.01)
                os.write(1, b"step 1")
                os.write(2, b"step 1")
                os._exit(0)
        finally:
            os._exit(1)
    os.read(from_child, 1)  # the child is in its context
    os.close(master)
    os.kill(child, signal.SIGHUP)
    assert os.waitpid(child, 0)[1] == 0
    assert path.read_bytes() == b"step 1"
    for descriptor in (terminal, file, from_child, to_parent):
        os.close(descriptor)


def test_a_limit_of_open_files_or_threads_is_named_and_leaves_signals_as_they_were(monkeypatch):
    """The pipe of a training under ``ulimit -n 32`` ended it with an OSError alone."""
    before = [signal.getsignal(number) for number in SIGNALS]

    def fails(error: Exception):
        def call(*_: object) -> None:
            raise error

        return call

    with monkeypatch.context() as patched:
        patched.setattr(os, "pipe", fails(OSError(errno.EMFILE, "Too many open files")))
        with pytest.raises(CollectiveError, match="listening for signals failed.*ulimit -n"), Signals():
            pass
    monkeypatch.setattr(threading.Thread, "start", fails(RuntimeError("can't start new thread")))
    with pytest.raises(CollectiveError, match="listening for signals failed.*ulimit -u"), Signals():
        pass
    signal.set_wakeup_fd(-1)
    assert [signal.getsignal(number) for number in SIGNALS] == before
