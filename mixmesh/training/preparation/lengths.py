"""The lengths of data sets, samplers and loaders: some have none, because PyTorch's base classes declare no
``__len__``."""

from __future__ import annotations

from collections.abc import Sized


def length(x: object) -> int:
    """``len(x)``. Raises TypeError, as ``len`` does, for an object without a length."""
    if not isinstance(x, Sized):
        raise TypeError(f"object of type {type(x).__name__!r} has no len()")
    return len(x)
