"""Runs the ranks as child processes: passes on their output and waits for their ends, without a thread."""

from __future__ import annotations

import codecs
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...errors import InputError, TestbedUnavailable
from .system import die_with

OnOutput = Callable[[int, str, str], None]  # rank, "stdout" or "stderr", text


def print_output(rank: int, stream: str, text: str) -> None:
    """Passes rank 0's stdout on unchanged, and all other lines to stderr with their rank."""
    if rank == 0 and stream == "stdout":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        sys.stderr.write(f"[rank {rank}] {text}")
        sys.stderr.flush()


@dataclass
class Rank:
    """One child process. ``returncode`` is None while it runs."""

    process: subprocess.Popen[bytes]
    returncode: int | None = None
    end_time_s: float = 0.0
    cpu_s: float = 0.0
    memory_peak_bytes: int = 0
    ended_by_launcher: bool = False


@dataclass
class _Stream:
    rank: int
    name: str
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("backslashreplace")
    )
    rest: str = ""


class Processes:
    def __init__(self, on_output: OnOutput | None) -> None:
        self.ranks: dict[int, Rank] = {}
        self._emit = on_output or print_output
        self._selector = selectors.DefaultSelector()

    def start(self, rank: int, argv: Sequence[str], env: dict[str, str], enter: Callable[[], None]) -> None:
        """Runs argv in a child process, which calls ``enter`` first."""
        parent = os.getpid()

        def before_program() -> None:
            die_with(parent)
            enter()

        try:
            process = subprocess.Popen(
                argv,
                env=env,
                preexec_fn=before_program,
                start_new_session=True,  # Ctrl-C reaches the launcher, which ends the ranks
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except (FileNotFoundError, PermissionError) as error:
            raise InputError(
                f"cannot run {argv[0]}: {error.strerror}", hint="name a program on PATH"
            ) from None
        except subprocess.SubprocessError:
            raise TestbedUnavailable(f"cannot put rank {rank} into its machine and device") from None
        self.ranks[rank] = Rank(process)
        for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, _Stream(rank, name))

    @property
    def running(self) -> list[int]:
        return [number for number, rank in self.ranks.items() if rank.returncode is None]

    def poll(self, timeout_s: float) -> None:
        """Passes on output for up to ``timeout_s``, and reaps ranks that have ended."""
        if self._selector.get_map():
            self._pump(timeout_s)
        else:
            time.sleep(timeout_s)
        for rank in self.ranks.values():
            if rank.returncode is None:
                self._reap(rank)

    def drain(self, limit_s: float = 1.0) -> None:
        """Passes on the last output of ranks that have ended, even if children of theirs still run."""
        deadline = time.monotonic() + limit_s
        while self._selector.get_map() and time.monotonic() < deadline and self._pump(0.05):
            pass
        for key in list(self._selector.get_map().values()):
            self._close(key)

    def end(self, number: signal.Signals) -> None:
        """Signals the ranks that still run, and their children."""
        for rank in (self.ranks[r] for r in self.running):
            rank.ended_by_launcher = True
            try:
                os.killpg(rank.process.pid, number)
            except ProcessLookupError:
                pass

    def close(self) -> None:
        self.end(signal.SIGKILL)
        while self.running:
            self.poll(0.01)
        self.drain(0.1)
        self._selector.close()

    def _pump(self, timeout_s: float) -> bool:
        events = self._selector.select(timeout_s)
        for key, _ in events:
            try:
                data = os.read(key.fd, 65536)
            except BlockingIOError:
                continue
            if data:
                self._pass_on(key.data, key.data.decoder.decode(data))
            else:
                self._close(key)
        return bool(events)

    def _pass_on(self, stream: _Stream, text: str) -> None:
        if stream.rank == 0 and stream.name == "stdout":
            self._emit(0, "stdout", text)
            return
        *lines, stream.rest = (stream.rest + text).split("\n")
        for line in lines:
            self._emit(stream.rank, stream.name, line + "\n")

    def _close(self, key: selectors.SelectorKey) -> None:
        stream: _Stream = key.data
        tail = stream.decoder.decode(b"", final=True)
        if stream.rest + tail:
            self._pass_on(stream, tail if stream.rank == 0 and stream.name == "stdout" else tail + "\n")
        self._selector.unregister(key.fileobj)
        key.fileobj.close()  # type: ignore[union-attr]

    @staticmethod
    def _reap(rank: Rank) -> None:
        # wait4 rather than Popen.poll, because it also returns the process's use of resources
        pid, status, usage = os.wait4(rank.process.pid, os.WNOHANG)
        if pid:
            rank.returncode = rank.process.returncode = os.waitstatus_to_exitcode(status)
            rank.end_time_s = time.monotonic()
            rank.cpu_s = usage.ru_utime + usage.ru_stime
            rank.memory_peak_bytes = usage.ru_maxrss * 1024
