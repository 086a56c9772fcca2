"""Export of models that check values: ``if labels.max() >= n: raise ...``

A graph holds one path, so an ``if`` on a tensor's value cannot be traced, unless one of the two paths only
raises an error. Then the ``if`` is a check, and the graph takes the other path. Both paths are tried to find
the one that raises.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any, TypeVar

import torch
from torch.distributions import Distribution
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from .locate import is_users

_DISTRIBUTIONS = os.path.dirname(torch.distributions.__file__)
T = TypeVar("T")
Site = tuple[CodeType, int]  # (function, line) of a branch


class Undecided(Exception):
    """A branch on a tensor's value."""

    def __init__(self, site: Site) -> None:
        super().__init__("a branch on a tensor's value")
        self.site = site


class Paths(TorchFunctionMode):
    """A context, for the forward pass alone, that follows ``branch_of`` at each branch on a value: it leaves
    a branch marked None to PyTorch, and reports an unknown one as Undecided."""

    def __init__(self, branch_of: Mapping[Site, bool | None]) -> None:
        super().__init__()
        self.branch_of = branch_of

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        truth = func is torch.Tensor.__bool__
        if not truth and not (func is torch.Tensor.item and args[0].dtype == torch.bool):
            return func(*args, **(kwargs or {}))
        site = _site()
        path = self.branch_of.get(site)
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


def past_checks(export: Callable[[Paths], T]) -> T:
    """Runs ``export``, with the context of the forward pass, along the paths on which no check raises. If
    neither path of a branch raises, PyTorch's own error stands."""
    branch_of: dict[Site, bool | None] = {}
    while True:
        try:
            return export(Paths(branch_of))
        except Undecided as undecided:
            branch_of[undecided.site] = _other_than_raising(export, branch_of, undecided.site)


def _other_than_raising(
    export: Callable[[Paths], object], branch_of: Mapping[Site, bool | None], site: Site
) -> bool | None:
    """The other path at ``site`` if one of the two only raises an error; None if neither does."""
    for path in (True, False):
        try:
            export(Paths({**branch_of, site: path}))
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
