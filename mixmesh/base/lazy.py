"""Values that are computed on first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class lazy(Generic[T]):  # noqa: N801 - a decorator
    """``functools.cached_property`` without its lock, which Python 3.12 has dropped too: the lock is most of
    the cost of a small value, and planning computes tens of thousands of them. Two threads may both compute
    the value, so both must get the same one."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> lazy[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> lazy[T] | T:
        if instance is None:
            return self
        return self.give(instance, self.compute(instance))

    def give(self, instance: object, value: T) -> T:
        """Sets the value of an instance to an already known object, instead of computing an equal one."""
        instance.__dict__[self.name] = value
        return value
