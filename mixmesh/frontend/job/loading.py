"""Loads a job: imports the user's file and calls a function in it.

A job is named ``path/to/file.py:function``; the default function is ``job``. It takes no arguments and
returns a ``Job``. ``workload:NAME:SAMPLES`` is one of the package's own (``workloads``).
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ...base.files import working_folder
from ...errors import JobError, MixmeshError
from .checks import DEFAULT_FUNCTION, EXAMPLE, check_job
from .job import WORKLOAD, Job

# by suffix, where a file belongs that was given in place of a job
HINTS = {
    ".plan": "the job's file in its place; to look at a plan: mixmesh show {path}",
    ".toml": "the job's file in its place, and --cluster {path}",
    ".json": "the job's file in its place, and --profile {path}",
}


def load_job(text: str, *, weights: bool = True) -> Job:
    """Loads the job named by ``path/to/file.py:function`` or ``workload:NAME:SAMPLES``. Raises JobError for
    all failures. Without ``weights``, a workload has shapes only, which is enough to plan it."""
    if text.startswith(WORKLOAD):
        from .workloads import make

        return make(text.removeprefix(WORKLOAD), "cpu" if weights else "meta")
    path, function_name = split_name(text)
    with _importing_beside(path):
        module = _import(path)
        function = _function(module, path, function_name)
        where = _place(function, path)
        try:
            job = function()
        except MixmeshError:
            raise
        except (Exception, SystemExit) as error:
            raise JobError(
                f"{function_name}() failed: {_reason(error)}", where=_place_in(error, path) or where
            ) from None
    check_job(job, function_name, where)
    return job


def split_name(text: str) -> tuple[Path, str]:
    """Splits ``gpt.py:small`` into path and function. Raises JobError if there is no such file."""
    file, _, function = text.rpartition(":")
    if not file or (not function.isidentifier() and Path(text).exists()):
        file, function = (text, "") if not file else (text, "")
    path, function = Path(file), function or DEFAULT_FUNCTION
    if not function.isidentifier():
        raise JobError(
            f"{function!r} is no name of a function",
            expected="path/to/file.py:function",
            got=text,
            hint=f"{file}:{DEFAULT_FUNCTION}",
        )
    if path.is_dir():
        raise JobError(
            f"{path} is a folder", expected="path/to/file.py:function", got=text, hint=_files_in(path)
        )
    if not path.is_file():
        raise JobError(
            f"there is no file {path}",
            expected="path/to/file.py:function",
            got=text,
            hint=_similar_files(path),
        )
    return path, function


def _files_in(folder: Path) -> tuple[str, ...]:
    return tuple(str(p) for p in sorted(folder.glob("*.py"))[:3])


def _similar_files(path: Path) -> tuple[str, ...]:
    folder = path.parent
    if not folder.is_dir():
        return ()
    names = [p.name for p in folder.iterdir() if p.suffix == ".py"]
    return tuple(str(folder / name) for name in difflib.get_close_matches(path.name, names, 2))


def _import(path: Path) -> ModuleType:
    # the name contains the path, so that two files called job.py are two modules
    name = f"mixmesh_job_{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:12]}"
    # an explicit loader also reads files whose names do not end in .py
    loader = importlib.machinery.SourceFileLoader(name, str(path.resolve()))
    spec = importlib.util.spec_from_file_location(name, path.resolve(), loader=loader)
    assert spec is not None  # a file with a loader has one in its spec
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up there
    try:
        loader.exec_module(module)
    except SyntaxError as error:
        if error.lineno is None:  # null bytes, since Python 3.11.4
            raise JobError(
                f"{path} is not Python: it is not text",
                where=str(path),
                hint=HINTS.get(path.suffix, "").format(path=path),
            ) from None
        line = (error.text or "").strip()
        raise JobError(
            f"{path} is not Python: {error.msg}",
            where=f"{_short(error.filename)}:{error.lineno}",
            got=line,
            hint=HINTS.get(path.suffix, "").format(path=path),
        ) from None
    except MixmeshError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ValueError) and "null bytes" in str(error) or isinstance(error, UnicodeError):
            raise JobError(f"{path} is not Python: it is not text", where=str(path)) from None
        raise JobError(
            f"{path} cannot be imported: {_reason(error)}", where=_place_in(error, path) or str(path)
        ) from None
    return module


@contextmanager
def _importing_beside(path: Path) -> Iterator[None]:
    """A context in which the job may import files in its own folder."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _function(module: ModuleType, path: Path, name: str) -> Callable[[], Any]:
    functions = [
        n
        for n, f in vars(module).items()
        if inspect.isfunction(f) and f.__module__ == module.__name__ and not n.startswith("_")
    ]
    function = vars(module).get(name)
    if function is None:
        near = difflib.get_close_matches(name, functions, 2) or functions[:2]
        raise JobError(
            f"{path} has no function {name}",
            expected=f"def {name}(): ... {EXAMPLE}",
            got=", ".join(functions) or "no function at all",
            where=str(path),
            hint=tuple(f"{path}:{n}" for n in near),
        )
    if not callable(function):
        raise JobError(
            f"{name} in {path} is not a function",
            expected=f"def {name}(): ... {EXAMPLE}",
            got=type(function).__name__,
            where=str(path),
            hint=tuple(f"{path}:{n}" for n in functions[:2]),
        )
    if isinstance(function, type) or _needs_arguments(function):
        raise JobError(
            f"{name} cannot be called without arguments",
            expected=f"def {name}(): ... {EXAMPLE}",
            got=f"{name}{_signature(function)}",
            where=_place(function, path),
        )
    return function


def _needs_arguments(function: Callable) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # it has no known signature
        return False
    return False


def _signature(function: Callable) -> str:
    try:
        return str(inspect.signature(function))
    except ValueError:
        return "(...)"


def _reason(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    kind = type(error).__name__
    return f"{kind}: {text[0]}" if text else kind


def _place(function: Callable, path: Path) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{_short(code.co_filename)}:{code.co_firstlineno}" if code else str(path)


def _place_in(error: BaseException, path: Path) -> str:
    """The last line of the error's traceback that is in the user's folder, with its text."""
    folder = str(path.resolve().parent) + os.sep
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(folder) and "site-packages" not in frame.filename:
            return f"{_short(frame.filename)}:{frame.lineno}" + (f", {frame.line}" if frame.line else "")
    return ""


def _short(filename: str | None) -> str:
    return (filename or "").removeprefix(working_folder())
