"""Replaces attributes, for a while or for good."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def put_on(owner: Any, name: str, value: Any) -> None:
    """Permanently sets an attribute on another library's object or class: one that its type does not declare,
    or a replacement for a method."""
    setattr(owner, name, value)


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A context in which ``value`` is the attribute ``name`` of an object, a class or a module."""
    is_own = name in vars(owner)  # rather than inherited from its class
    original = vars(owner).get(name)  # in a class: the method itself, not a bound one
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
