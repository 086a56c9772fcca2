"""Errors that a part of the job raises, with the user's line."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from ..base.files import PACKAGE
from ..errors import JobError, MixmeshError

# PyTorch's error for a worker begins like this, and contains its traceback
OF_WORKER = "in DataLoader worker process"
FRAME = re.compile(r'File "([^"]+)", line ([0-9]+), in .*\n\s*(.*)')


@contextmanager
def failures_of(part: str, *, expected: str = "") -> Iterator[None]:
    """A context in which an error raised by a ``part`` of the job becomes a JobError with the user's line."""
    try:
        yield
    except MixmeshError:
        raise
    except (Exception, SystemExit) as error:
        raise JobError(
            f"{part} raised {named_line(error)}",
            expected=expected,
            where=place_of(error),
            hint="mixmesh --debug run ... shows the traceback",
        ) from error


def place_of(error: BaseException) -> str:
    """The file and line where an error was raised: the last one outside of libraries if there is one."""
    frames = [(f.filename, f.lineno, f.line) for f in traceback.extract_tb(error.__traceback__)]
    if OF_WORKER in str(error):
        frames = FRAME.findall(str(error)) or frames
    own = [f for f in frames if "site-packages" not in f[0] and not f[0].startswith(str(PACKAGE))]
    file, number, line = (own or frames)[-1]
    return f"{file}:{number}, {line}"


def named_line(error: BaseException) -> str:
    """The class and the first line of an error. For an error of a DataLoader's worker it is the last line,
    which has both."""
    if OF_WORKER in str(error):
        return str(error).strip().splitlines()[-1][:300]
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]
