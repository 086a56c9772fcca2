"""The signals that ask a training to stop at the end of a step: those of schedulers, Ctrl-C, and that of a
terminal which is closed.

The first one is noted. A second one ends the process at once, even if its main thread waits in a collective
and runs no Python: PyTorch's collectives do not return for a signal, so a separate thread reads them.

Processes that are forked meanwhile, such as a loader's workers, have no part in this: a signal to one of them
does not count, and SIGTERM ends it as before.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from ..base.progress import send_nowhere
from ..runtime.failures import limits_named

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# seconds within which a repeated signal counts as the same one: a launcher passes on signals that its
# processes have received too
SAME_S = 2.0
OF_SIGNAL = 128  # added to a signal's number in the exit status of a process ended by it
END = 0  # no signal's number: ends the thread
LISTENING = "listening for signals"


class Signals:
    """A context in which ``number`` is the number of the first signal received, 0 before. Raises ValueError
    outside of the main thread, which alone gets signals, and CollectiveError where the system gives this
    process no more open files or threads."""

    def __init__(self) -> None:
        self.number = 0
        self._came_at = 0.0
        self._thread = threading.Thread(target=self._read, name="mixmesh signals", daemon=True)

    def __enter__(self) -> Signals:
        with limits_named(LISTENING):
            self._from, self._to = os.pipe()
        os.set_blocking(self._to, False)
        self._wakeup = signal.set_wakeup_fd(self._to, warn_on_full_buffer=False)
        with limits_named(LISTENING):  # before signals are ignored: the process could only be killed then
            self._thread.start()
        self._handlers = {number: signal.signal(number, _ignore) for number in SIGNALS if _is_heard(number)}
        _entered.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self not in _entered:  # in a forked process
            return
        _entered.remove(self)
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, self._unless_same(handler) if self.number else handler)
        os.write(self._to, bytes([END]))
        self._thread.join()
        self._close()

    def _close(self) -> None:
        os.close(self._to)
        os.close(self._from)

    def leave_in_fork(self) -> None:
        """Lets SIGTERM end a forked process, which no longer tells its parent of signals. It ignores the
        others, which come to all processes of a terminal or of a job: workers have to give the batches of the
        last step."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, self._handlers[signal.SIGTERM])
        self._close()

    def _unless_same(self, handler: Any) -> Callable[[int, Any], None]:
        """Wraps ``handler`` to ignore repeats of the first signal: they may arrive when all is saved and the
        process is about to end by itself."""

        def handle(number: int, frame: Any) -> None:
            if time.monotonic() - self._came_at <= SAME_S:
                return
            signal.signal(number, handler)
            signal.raise_signal(number)

        return handle

    def _read(self) -> None:
        while (number := os.read(self._from, 1)[0]) != END:
            if number not in SIGNALS:
                continue
            if number == signal.SIGHUP:
                leave_closed_terminal()
            if self.number and time.monotonic() - self._came_at > SAME_S:
                os._exit(OF_SIGNAL + number)
            if not self.number:
                self.number, self._came_at = number, time.monotonic()


def leave_closed_terminal() -> None:
    """Lets what is printed go nowhere if it went to a terminal that was closed: the script's own ``print``
    would raise an error before all is saved."""
    for stream in (1, 2):
        with suppress(OSError):
            try:
                os.get_terminal_size(stream)
            except OSError as error:
                if error.errno == errno.EIO:
                    send_nowhere(stream)


_entered: list[Signals] = []  # the contexts that this process is in


def _leave_in_fork() -> None:
    """Runs in every forked process."""
    while _entered:
        _entered.pop().leave_in_fork()


os.register_at_fork(after_in_child=_leave_in_fork)


def _is_heard(number: signal.Signals) -> bool:
    """Whether a signal may stop the training. ``nohup`` makes a process ignore that of a closed terminal, so
    that it trains on."""
    return number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN


def _ignore(_number: int, _frame: object) -> None:
    """A signal handler that does nothing: Python writes to the wakeup pipe only for signals that have one."""
