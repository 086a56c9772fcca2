"""The tokens of program text, read one by one; errors show the line with a caret under the place of the
error."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

from ...errors import ParseError
from . import bounds

T = TypeVar("T")
Place = tuple[int, int]  # (line, column), counted from 1
Token = tuple[str, str, Place]  # (kind, text, place)
SHOWN_BEFORE, SHOWN_AFTER = 150, 50  # characters of a long line that an error shows around the place

_TOKEN = re.compile(
    r"""(?P<skip>[ \t]+|\#[^\n]*)
      | (?P<newline>\n)
      | (?P<value>%[A-Za-z0-9_.]+)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<number>-?(?:inf\b|nan\b|[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?))
      | (?P<name>[A-Za-z_][A-Za-z0-9_.\-]*)
      | (?P<mark>[=(){}\[\]:,@])
    """,
    re.VERBOSE,
)


_LOCATION = re.compile(r"\s*#(?:.*\s)?(\S+:[0-9]+)\s*")


class Tokens:
    """The tokens of a text and a position, ``at``, among them."""

    def __init__(self, text: str, where: str) -> None:
        self.text, self.where = text, where
        self.lines = text.split("\n")
        if len(text) > bounds.MAX_TEXT_BYTES:
            self.fail((1, 1), "the program is too long", f"at most {bounds.MAX_TEXT_BYTES} characters")
        self.tokens = list(self._tokenise())
        self.at = 0

    def _tokenise(self) -> Iterator[Token]:
        line, start, pos = 1, 0, 0
        while pos < len(self.text):
            token = _TOKEN.match(self.text, pos)
            if not token:
                self.fail((line, pos - start + 1), f"unexpected {self.text[pos]!r}")
            kind = token.lastgroup or ""
            if kind == "newline":
                line, start = line + 1, token.end()
            elif kind != "skip":
                yield kind, token.group(), (line, pos - start + 1)
            pos = token.end()
        yield "end", "end of text", (line, pos - start + 1)

    def fail(self, place: Place, message: str, expected: str = "", hint: str = "") -> NoReturn:
        line, column = place
        source = self.lines[line - 1] if line <= len(self.lines) else ""
        first = max(0, column - SHOWN_BEFORE) if len(source) > SHOWN_BEFORE + SHOWN_AFTER else 0
        shown = source[first : first + SHOWN_BEFORE + SHOWN_AFTER]
        caret = f"{shown}\n  {'':<9}{' ' * (column - 1 - first)}^"
        raise ParseError(
            f"{self.where}:{line}:{column}: {message}", expected=expected, where=caret, hint=hint
        )

    def location(self) -> str:
        """The file and line at the end of the comment behind the previous token, or ""."""
        _, text, (line, column) = self.tokens[self.at - 1]
        match = _LOCATION.fullmatch(self.lines[line - 1][column - 1 + len(text) :])
        return match[1] if match else ""

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def take(self, kind: str, text: str | None = None, what: str = "") -> str:
        got_kind, got, place = self.token
        if got_kind != kind or (text is not None and got != text):
            self.fail(place, f"unexpected {got!r}", expected=what or text or kind)
        self.at += 1
        return got

    def sees(self, text: str) -> bool:
        return self.token[1] == text and self.token[0] in ("mark", "name")

    def accept(self, text: str) -> bool:
        if self.sees(text):
            self.at += 1
            return True
        return False

    def separated(self, close: str, item: Callable[[], T]) -> list[T]:
        """Reads items separated by commas, and the ``close`` behind them."""
        items: list[T] = []
        while not self.accept(close):
            if items:
                self.take("mark", ",", what=f"',' or '{close}'")
            items.append(item())
        return items

    def convert(self, text: str, place: Place) -> int | float:
        if text.endswith("nan"):
            return math.nan  # one object for all, so that programs with it compare equal
        if not re.fullmatch(r"-?[0-9]+", text):
            return float(text)
        # checks the length first: Python refuses to convert thousands of digits
        if len(text) > 20 or not -bounds.MAX_INTEGER - 1 <= int(text) <= bounds.MAX_INTEGER:
            self.fail(place, "the number is too large", f"at most {bounds.MAX_INTEGER}")
        return int(text)

    def string(self, text: str, place: Place) -> str:
        try:
            value = json.loads(text)
            value.encode()
        except ValueError:
            self.fail(place, "this string cannot be read", "a string as JSON writes it")
        return value

    def number(self) -> float:
        return float(self.take("number", what="a number"))

    def integer(self, what: str) -> int:
        place = self.token[2]
        text = self.take("number", what=what)
        if not text.isdigit():
            self.fail(place, f"unexpected {text!r}", expected=f"{what}, a whole number")
        return int(self.convert(text, place))
