"""The text of an error that nobody catches.

Python prints every frame of an error and of its causes. For a model that cannot be traced these are some 250
lines of PyTorch's own code on each rank, before the four that the script's author needs.
"""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType

from ..errors import MixmeshError
from .callers import is_script
from .progress import tell

ALL_FRAMES = "MIXMESH_DEBUG"  # an environment variable: Python's own text is printed if it is set
LEFT_OUT = f"  (without the frames of libraries; {ALL_FRAMES}=1 shows them)"


def shorten() -> None:
    """Makes errors of mixmesh that nobody catches print the script's own frames alone. All other errors are
    printed as before."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = None if os.environ.get(ALL_FRAMES) else text_of(error, trace)
        if text is None:
            before(kind, error, trace)
        else:
            tell(text)

    sys.excepthook = hook


def text_of(error: BaseException, trace: TracebackType | None) -> str | None:
    """The short text of an error of mixmesh; None for another error, and where no frame is the script's."""
    if not isinstance(error, MixmeshError):
        return None
    frames = traceback.StackSummary.extract(traceback.walk_tb(trace), lookup_lines=False)
    own = [frame for frame in frames if is_script(frame.filename)]
    if not own:
        return None
    kind = type(error)
    lines = [
        "Traceback (most recent call last):",
        *(line.rstrip("\n") for line in traceback.format_list(own)),
        f"{kind.__module__}.{kind.__qualname__}: {error}",
        LEFT_OUT,
    ]
    return "\n".join(lines)
