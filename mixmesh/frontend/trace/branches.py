"""Checks of values while a model is exported: ``if labels.max() >= n: raise ...``

A traced graph holds one path, so an ``if`` on a tensor's value cannot be traced, with one exception: where
one of the two paths does nothing but raise, it is a check, and the other is the path. Which one that is, is
found by taking both.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from types import CodeType
from typing import TypeVar

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from .locate import is_users

_DISTRIBUTIONS = os.path.dirname(torch.distributions.__file__)
T = TypeVar("T")
Site = tuple[CodeType, int]  # the function and the line of a branch


class Undecided(Exception):
    """A branch on a tensor's value."""

    def __init__(self, site: Site) -> None:
        super().__init__("a branch on a tensor's value")
        self.site = site


class _Paths(TorchFunctionMode):
    """Takes the branches that were decided on, leaves those with None to PyTorch, reports the others."""

    def __init__(self, taken: Mapping[Site, bool | None]) -> None:
        super().__init__()
        self.taken = taken

    def __torch_function__(self, func, types, args=(), kwargs=None):
        truth = func is torch.Tensor.__bool__
        if not truth and not (func is torch.Tensor.item and args[0].dtype == torch.bool):
            return func(*args, **(kwargs or {}))
        site = _site()
        path = self.taken.get(site)
        if path is not None:
            return path
        try:
            value = func(*args)
        except GuardOnDataDependentSymNode as error:
            if site in self.taken:
                raise
            raise Undecided(site) from error
        if isinstance(value, bool) or site in self.taken:
            return value
        raise Undecided(site)  # by item(): a number known only at run time


def _site() -> Site:
    frame = sys._getframe(2)
    while frame.f_back is not None and not _may_check(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


def _may_check(file: str) -> bool:
    """A file whose branches are looked at: the model's, or a distribution's, which checks what it gets."""
    return is_users(file) or file.startswith(_DISTRIBUTIONS)


def past_checks(export: Callable[[], T]) -> T:
    """``export()``, along the paths on which no check raises. Raises what ``export`` raises, which is
    PyTorch's own error for a branch of which both paths go on."""
    branch_of: dict[Site, bool | None] = {}
    while True:
        try:
            with _Paths(branch_of):
                return export()
        except Undecided as undecided:
            branch_of[undecided.site] = _other_than_raising(export, branch_of, undecided.site)


def _other_than_raising(
    export: Callable[[], object], taken: Mapping[Site, bool | None], site: Site
) -> bool | None:
    for path in (True, False):
        try:
            with _Paths({**taken, site: path}):
                export()
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
