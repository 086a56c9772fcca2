"""Lists of strings in a batch, such as file names: a model may take them as arguments, but must not read
them."""

from __future__ import annotations

from typing import Any, NoReturn

from ...errors import TraceError

WORDS = "words"  # a plan's description of such an argument


def is_words(value: Any) -> bool:
    """Whether a value is a list or tuple of strings alone, such as the file names of a batch."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(x, str) for x in value)


class Unread:
    """A stand-in for such a list while a model is traced. Reading it raises TraceError: the program would use
    the strings of the traced batch in every step."""

    def __init__(self, name: str) -> None:
        self.__dict__["of"] = name

    def _refuse(self, *_: Any) -> NoReturn:
        raise TraceError(
            "the model reads strings of the batch, which are no part of a program",
            expected="tensors for all that the model computes with",
            got=f"a list of strings, {self.__dict__['of']}",
            hint=(
                "make tensors of them in collate_fn, by a tokenizer for instance",
                "or leave them out of the call: mixmesh.prepare(..., inputs=lambda ...: (...))",
            ),
        )

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()

    __iter__ = __getitem__ = __len__ = __bool__ = __contains__ = __add__ = __str__ = __eq__ = _refuse
    __hash__ = object.__hash__
