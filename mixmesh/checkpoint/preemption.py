"""``mixmesh.checkpoint.Preemption``: if any rank is asked to stop, the loop stops on all ranks."""

from __future__ import annotations

from types import TracebackType

from torch import nn

from ..frontend.trace.compiled import uncompiled
from .ranks import Ranks
from .signals import OF_SIGNAL, Signals
from .vote import Vote


class Preemption:
    """A context in which SIGTERM, SIGUSR1, Ctrl-C and the end of the terminal (SIGHUP, unless the process
    ignores it, as under ``nohup``) no longer end the process: ``is_requested`` tells whether one came, and a
    second one, more than two seconds later, ends the process at once. For the main thread; every rank of
    ``model`` enters it."""

    def __init__(self, model: nn.Module) -> None:
        self._ranks = Ranks.of(uncompiled(model))
        self._signals = Signals()
        self._number = 0

    def __enter__(self) -> Preemption:
        with self._ranks.meeting("checkpoint.Preemption"):
            self._vote = Vote(self._ranks)
        self._ranks.ends_when_told(self._signals)
        self._signals.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.__exit__(kind, error, trace)
        if kind is None:
            self._vote.finish()

    def is_requested(self) -> bool:
        """True if a signal has come on any rank; the same on all ranks. The answer is one step late, as
        nobody waits for the message of this step. Collective; call it once after every step."""
        self._number = self._number or self._vote.cast(0, self._signals.number)[1]
        return bool(self._number)

    @property
    def status(self) -> int:
        """The exit status: 128 plus the number of the signal, or 0 if none came."""
        return OF_SIGNAL + self._number if self._number else 0
