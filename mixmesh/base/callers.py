"""The line of a script that a call of mixmesh comes from, and warnings that name it."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
import warnings
from functools import lru_cache
from types import FrameType
from typing import Any

from .files import PACKAGE, absolute, working_folder

_LIBRARIES = (str(PACKAGE) + os.sep, os.path.abspath(sysconfig.get_paths()["stdlib"]) + os.sep, "<")
_INSTALLED = ("site-packages", "dist-packages")


def line_of_script(thread: int | None = None) -> str:
    """The script's current line on this thread or on another, such as ``train.py:31``: that of the innermost
    frame outside mixmesh and installed packages. Empty if there is none."""
    frame = _frame_of_script(None if thread is None else sys._current_frames().get(thread))
    if frame is None:
        return ""
    return f"{shown_path(frame.f_code.co_filename)}:{frame.f_lineno}"


def line_of_error(error: BaseException) -> str:
    """The script's line that an error comes from, the innermost one; empty if there is none."""
    frames = [(f.f_code.co_filename, n) for f, n in traceback.walk_tb(error.__traceback__)]
    return next((f"{shown_path(file)}:{n}" for file, n in reversed(frames) if is_script(file)), "")


def shown_path(file: str) -> str:
    """The path of a file from the current folder if it is in there and not installed, else its name alone."""
    path, here = absolute(file), working_folder()
    is_own = here and path.startswith(here) and not any(part in path for part in _INSTALLED)
    return path[len(here) :] if is_own else os.path.basename(path)


def warn(text: str) -> None:
    """Issues a warning that names the script's current line."""
    frame = _frame_of_script()
    if frame is None:
        warnings.warn(text, stacklevel=2)
        return
    module = frame.f_globals.get("__name__", "__main__")
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno, module, registry)


def variables_of_script() -> list[Any]:
    """The values of all variables that the script's current line may refer to: local ones, attributes of its
    ``self``, and globals of its file."""
    frame = _frame_of_script()
    if frame is None:
        return []
    own = frame.f_locals
    holder = own.get("self")
    return [*own.values(), *getattr(holder, "__dict__", {}).values(), *frame.f_globals.values()]


def is_called_by(module: str) -> bool:
    """Whether a function of ``module``, or of one within it, waits for the caller's answer."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == module or name.startswith(f"{module}."):
            return True
        frame = frame.f_back
    return False


def _frame_of_script(innermost: FrameType | None = None) -> FrameType | None:
    frame: FrameType | None = innermost or sys._getframe(1)
    while frame is not None and not is_script(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


@lru_cache(maxsize=4096)
def is_script(file: str) -> bool:
    """Whether a file is the user's own, rather than part of mixmesh, Python or an installed package."""
    path = file if file.startswith("<") else absolute(file)
    return not path.startswith(_LIBRARIES) and not any(part in path for part in _INSTALLED)
