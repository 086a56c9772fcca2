"""Keeps the regions that the user checkpointed (``torch.utils.checkpoint``) during export.

Export itself forgets them. Here every such call runs its function within a frame whose file name has the
number of the region, so that all nodes of the region carry the number in their stack traces, through every
later decomposition.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint as checkpoints

_NUMBER = re.compile(r'File "<checkpoint (\d+)>"')
_DISABLED = "__dynamo_disable"  # torch runs this in place of a function that it does not compile


def region_of_stack(text: str | None) -> int | None:
    """The number of the outermost region of a node's stack trace, or None."""
    match = _NUMBER.search(text or "")
    return int(match[1]) if match else None


@contextmanager
def regions_kept() -> Iterator[None]:
    """A context in which checkpointed functions (reentrant or not) run once, as regions with numbers from
    0."""
    numbers = itertools.count()

    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kwargs = {k: v for k, v in kwargs.items() if k not in OPTIONS}
        code = compile("def run(function, args, kwargs): return function(*args, **kwargs)",
                       f"<checkpoint {next(numbers)}>", "exec")  # fmt: skip
        names: dict[str, Any] = {}
        exec(code, names)
        return names["run"](function, args, kwargs)

    # models hold references to the function itself, so the one that it calls is replaced
    original = vars(checkpoints.checkpoint)["__wrapped__"]
    before = getattr(original, _DISABLED, None)
    setattr(original, _DISABLED, checkpoint)
    try:
        yield
    finally:
        setattr(original, _DISABLED, before)


OPTIONS = ("use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state")
