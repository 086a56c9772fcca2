"""Work on one operator after the other in a forked process, which wrong guesses of a call may end."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch

fork = multiprocessing.get_context("fork")


class InChild:
    """A function of an operator's name that is called in another process, forked at the first call. If a call
    ends the process, it fails, and the next one has a new process."""

    def __init__(self, work: Callable[[str], Any]) -> None:
        self.work = work
        self._pipe: Connection | None = None

    def __call__(self, op: str) -> Any:
        if self._pipe is None:
            self._pipe, theirs = Pipe()
            fork.Process(target=self._serve, args=(self._pipe, theirs), daemon=True).start()
            theirs.close()
        self._pipe.send(op)
        try:
            result, error = self._pipe.recv()
        except EOFError:
            self._pipe = None
            raise AssertionError(
                "the search ended its process: is the operator one of rule_proof.UNCHECKED?"
            ) from None
        assert not error, error
        return result

    def _serve(self, parents: Connection, pipe: Connection) -> None:
        parents.close()  # with the last copy of it this process ends
        torch.set_num_threads(1)
        while True:
            try:
                op = pipe.recv()
            except EOFError:
                return
            try:
                answer = self.work(op), ""
            except Exception:
                answer = None, traceback.format_exc()
            pipe.send(answer)
