"""Export of models that check values: ``if labels.max() >= n: raise ...``

A graph holds one path, so an ``if`` on a tensor's value cannot be traced, unless one of the two paths only
raises an error. Then the ``if`` is a check, and the graph takes the other path. Both paths are tried to find
the one that raises.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any, TypeVar

import torch
from torch.distributions import Distribution
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from ...base.callers import shown_path
from .locate import is_users
from .selected import COUNTED, node_of
from .skipped import Skips, emptiness, is_count, none_skipped

_DISTRIBUTIONS = os.path.dirname(torch.distributions.__file__)
T = TypeVar("T")
Site = tuple[CodeType, int]  # (function, line) of a branch


class Undecided(Exception):
    """A branch on a tensor's value."""

    def __init__(self, site: Site) -> None:
        super().__init__("a branch on a tensor's value")
        self.site = site


@dataclass(frozen=True)
class Asked:
    """A branch that asked whether a mask selects anything: its condition, and the answer that it got."""

    site: Site
    condition: torch.Tensor
    answer: bool

    @property
    def place(self) -> str:
        return f"{shown_path(self.site[0].co_filename)}:{self.site[1]}"


class Paths(TorchFunctionMode):
    """A context, for the forward pass alone, that follows ``branch_of`` at each branch on a value: it leaves
    a branch marked None to PyTorch, and reports an unknown one as Undecided. The first visit of a branch
    ``tried`` follows the other path. Branches that ask whether a mask selects anything go by ``skips``; if
    that is None, they are branches like others."""

    def __init__(self, branch_of: Mapping[Site, bool | None], tried: Site | None = None) -> None:
        super().__init__()
        self.branch_of = branch_of
        self.tried = tried
        self.skips: Skips | None = none_skipped
        self.asked: list[Asked] = []  # branches on whether masks select anything, in order

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        truth = func is torch.Tensor.__bool__
        if func is torch.Tensor.item and self.skips is not None and is_count(node_of(args[0])):
            return args[0]  # for a comparison
        if not truth and not (func is torch.Tensor.item and args[0].dtype == torch.bool):
            return func(*args, **(kwargs or {}))
        site = _site()
        path = self._path(site, args[0])
        if path is not None:
            return path
        try:
            value = func(*args)
        except GuardOnDataDependentSymNode as error:
            if site in self.branch_of:
                raise
            raise Undecided(site) from error
        if isinstance(value, bool) or site in self.branch_of:
            return value
        raise Undecided(site)  # item() returned a number that is known only at run time

    def _path(self, site: Site, condition: torch.Tensor) -> bool | None:
        """The path at a branch, if it is known or the branch asks whether a mask selects anything."""
        path = self.branch_of.get(site)
        if path is not None:
            is_other, self.tried = site == self.tried, None if site == self.tried else self.tried
            return path is not is_other
        if self.skips is None or (asked := emptiness(node_of(condition))) is None:
            return None
        is_any = not self.skips(len(self.asked))
        self.asked.append(Asked(site, condition, asked.if_any is is_any))
        for node in asked.counted if is_any else ():
            node.meta[COUNTED] = node is asked.count or node.meta.get(COUNTED, False)
        return self.asked[-1].answer

    def check_that_raised(self, error: Exception) -> dict[Site, bool | None]:
        """The other path at a branch after which its own function raised ``error``; empty if there is
        none."""
        last = self.asked[-1] if self.asked else None
        if last is None or last.site[0] is not _raised_in(error):
            return {}
        return {last.site: not last.answer}


def _site() -> Site:
    frame = sys._getframe(2)
    while frame.f_back is not None and not _may_check(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


def _may_check(file: str) -> bool:
    """Whether the branches of a file may be checks: the model's, or a distribution's, which checks
    arguments."""
    return is_users(file) or file.startswith(_DISTRIBUTIONS)


@contextmanager
def distributions_unchecked() -> Iterator[None]:
    """A context in which PyTorch's distributions do not check their arguments unless they are told to: not
    all of these checks are branches that only raise."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def past_checks(export: Callable[[Paths], T], checks: Mapping[Site, bool | None]) -> T:
    """Runs ``export``, with the context of the forward pass, along the paths on which no check raises. If
    neither path of a branch raises, PyTorch's own error stands. ``checks`` are the paths already known."""
    branch_of: dict[Site, bool | None] = dict(checks)
    while True:
        try:
            return export(Paths(branch_of))
        except Undecided as undecided:
            branch_of[undecided.site] = _other_than_raising(export, branch_of, undecided.site)


def _other_than_raising(
    export: Callable[[Paths], object], branch_of: Mapping[Site, bool | None], site: Site
) -> bool | None:
    """The other path at ``site`` if one of the two only raises an error; None if neither does. In a loop one
    visit must raise, for an error that comes if all do (``if not losses: raise``) is no check."""
    for path in (True, False):
        try:
            export(Paths({**branch_of, site: not path}, tried=site))
        except Undecided:
            continue
        except Exception as error:
            if _raised_in(error) is site[0]:
                return not path
    return None


def _raised_in(error: BaseException) -> CodeType | None:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code if trace else None


def warnings_of_skipped(places: Sequence[str]) -> tuple[str, ...]:
    """The warning about branches in these lines of the user's files."""
    if not places:
        return ()
    return (
        f"{', '.join(places)}: the branch is taken in every step, with no rows where its mask selects none. "
        "The gradients of parameters that no row uses are then zeros, where one device leaves None: an "
        "optimizer with weight decay or momentum changes them all the same",
    )
