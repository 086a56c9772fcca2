"""Finds the user's own file and line, for a node of a graph and for an exception."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from types import FrameType

import torch
from torch.fx import proxy
from torch.fx.proxy import TracerBase

from ...base.callers import shown_path
from ...base.files import PACKAGE, absolute, working_folder
from ...base.patch import patched

Frame = tuple[str, int, str]  # file, line, function
_FRAME = re.compile(r'File "([^"]+)", line (\d+)(?:, in (\S+))?')
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OURS = str(PACKAGE) + os.sep
# our files that replace functions of torch during tracing: their frames lie within the model's
_WITHIN = tuple(
    os.path.join(_OURS, "frontend", "trace", name)
    for name in (
        "asked_gradients.py", "averages.py", "branches.py", "checked_losses.py", "checkpoints.py",
        "counts.py", "covariances.py", "derivatives.py", "detached_data.py", "functions.py",
        "generators.py", "hooks.py", "inner_gradients.py", "instance_norms.py", "moves.py", "reads.py",
        "replaced_functions.py", "row_indices.py", "selected.py", "selected_functions.py",
        "small_constants.py",
    )
)  # fmt: skip
_STDLIB = os.path.abspath(sysconfig.get_paths()["stdlib"]) + os.sep


@dataclass(frozen=True, slots=True)
class Place:
    """A line of code: its printed ``location`` ("model.py:41"), and its text as ``source`` if known."""

    location: str = ""
    source: str = ""
    by_user: bool = False

    def __str__(self) -> str:
        return f"{self.location}, {self.source}" if self.source else self.location


def place_of_stack(text: str | None) -> Place:
    """The innermost frame in a stack trace that belongs to the user, or else to a library, but never to
    torch."""
    return _place_of_stack(text or "", working_folder())


@lru_cache(maxsize=4096)  # a trace with symbols is converted for every shape
def _place_of_stack(text: str, folder: str) -> Place:
    """The place as it is shown from a working directory."""
    return _pick(_frames_in(text))


def _frames_in(text: str) -> list[Frame]:
    return [(file, int(line), function) for file, line, function in _FRAME.findall(text)]


def place_of_error(error: BaseException, within: tuple[str, ...] = ()) -> Place:
    """The place in the user's code where ``error`` was raised, by its traceback or the stack trace in its
    text. ``within`` are more files of ours that run within the model's operators."""
    library = Place()
    for seen in causes_of(error):
        frames = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(seen.__traceback__)]
        place = _pick(_inside_model(frames, within) + _frames_in(str(seen)))
        if place.by_user:
            return place
        library = library if library.location else place
    return library


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yields an error, its cause, and so on to the first one."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def place_of_function(function: object) -> Place:
    """The place where a function of the user is defined: the line with its name, below its decorators."""
    code = getattr(function, "__code__", None)
    if not code:
        return Place()
    line, named = code.co_firstlineno, f"def {code.co_name}("
    below = enumerate(linecache.getlines(code.co_filename)[line - 1 :], line)
    line = next((number for number, text in below if named in text), line)
    return _pick([(code.co_filename, line, code.co_name)])


def place_in_model() -> Place:
    """The line of the model that runs at the moment: of the frames within its ``forward``."""
    return _pick([(f.filename, f.lineno or 0, f.name) for f in _ModelFrames.summary()])


def _inside_model(frames: list[Frame], within: tuple[str, ...] = ()) -> list[Frame]:
    """The frames inside our call of the model, without those of the caller of ``trace``."""
    frames = [f for f in frames if f[0] not in (*_WITHIN, *within)]
    while frames and frames[-1][0].startswith(_OURS):
        frames = frames[:-1]
    ours = [i for i, frame in enumerate(frames) if frame[0].startswith(_OURS)]
    return frames[ours[-1] + 1 :] if ours else frames


def _pick(frames: Iterable[Frame]) -> Place:
    library: Frame | None = None
    for file, line, function in reversed(list(frames)):
        path = absolute(file)
        if file.startswith("<") or path.startswith((_TORCH, _OURS)):
            continue
        if is_users_own(path):
            return _place(path, line)
        # in a library, the forward method of a module is more helpful than a helper that it calls
        better = library is None or (function == "forward" != library[2])
        if better and not path.startswith(_STDLIB):
            library = (path, line, function)
    return _place(*library[:2]) if library else Place()


def is_users_own(file: str) -> bool:
    """Whether it is no file of any library."""
    return _is_users_own(file if file.startswith(os.sep) else absolute(file))


@cache
def _is_users_own(file: str) -> bool:
    """Every trace asks it of the files of all modules."""
    return is_users(path := absolute(file)) and "site-packages" not in path and not path.startswith(_STDLIB)


def is_users(file: str) -> bool:
    """Whether a file belongs neither to torch nor to mixmesh: the model's own file, or one of a library that
    it uses."""
    return not file.startswith(("<", _TORCH, _OURS))


@contextmanager
def whole_stacks() -> Iterator[None]:
    """A context in which traced nodes keep every frame of the model, not only those of ``forward``
    methods."""
    with (
        patched(proxy, "CapturedTraceback", _ModelFrames),
        patched(TracerBase, "_filter_traceback_frames", lambda tracer, frames: frames),
    ):
        yield


class _ModelFrames:
    """Stands for PyTorch's ``CapturedTraceback``, which reads the lines of all frames, some 60 for each node.
    Here only those of the model are read, of which there are a few."""

    @staticmethod
    def extract() -> type[_ModelFrames]:
        return _ModelFrames

    @staticmethod
    def summary() -> traceback.StackSummary:
        """Returns the frames from the outermost ``forward`` on, outermost first, without torch's and ours;
        none outside of a ``forward``."""
        frames = []
        frame: FrameType | None = sys._getframe(1)
        outermost = 0  # number of frames up to the outermost ``forward``
        while frame is not None:
            code = frame.f_code
            frames.append((code.co_filename, frame.f_lineno, code.co_name, None))
            if code.co_name == "forward":
                outermost = len(frames)
            frame = frame.f_back
        inner = [f for f in frames[:outermost] if not f[0].startswith((_TORCH, _OURS))]
        return traceback.StackSummary.from_list(reversed(inner))


def _place(path: str, line: int) -> Place:
    source = linecache.getline(path, line).strip()
    return Place(f"{shown_path(path)}:{line}", source, "site-packages" not in path)
