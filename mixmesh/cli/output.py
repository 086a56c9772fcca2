"""The output of commands: text and a line of JSON to stdout, progress and errors to stderr."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from errno import EISDIR, ENOENT
from pathlib import Path
from typing import Annotated, Any

import typer

from ..base.units import seconds_text, size_text
from ..errors import MixmeshError, unwritable

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]


# keyword arguments of mixmesh.plan and mixmesh.prepare, in errors, that are options of commands
ARGUMENT = re.compile(r'\b(planner|batch_norm|cluster)="([^"]+)"')


def with_options(hint: str) -> str:
    """Replaces keyword arguments in a hint by the options of a command."""
    return ARGUMENT.sub(lambda match: f"--{match[1].replace('_', '-')} {match[2]}", hint)


def error_text(error: MixmeshError) -> str:
    """Formats an error as commands print it."""
    hint = tuple(map(with_options, error.hint))
    shown = MixmeshError(error.message, expected=error.expected, got=error.got, where=error.where, hint=hint)
    return f"{type(error).__name__}: {shown}"


def check_folder_of(path: Path | None, what: str, kind: type[MixmeshError] | None = None) -> None:
    """Raises the error of a file that cannot be written, ahead of work that takes long, where its folder is
    not there, or it is one itself."""
    if path is None:
        return
    number = EISDIR if path.is_dir() else 0 if path.parent.is_dir() else ENOENT
    if number:
        raise unwritable(what, path, OSError(number, os.strerror(number)), kind)


def error_object(error: MixmeshError) -> dict[str, Any]:
    return {
        "error": {
            "type": type(error).__name__,
            "message": error.message,
            "expected": error.expected,
            "got": error.got,
            "where": error.where,
            "hint": list(map(with_options, error.hint)),
        }
    }


def print_json(value: dict[str, Any]) -> None:
    """Prints one line of JSON."""
    print(json_line(value), flush=True)


def json_line(value: dict[str, Any]) -> str:
    """Formats one line of JSON. Numbers that JSON does not have (a step without an end) are null."""
    return json.dumps(_plain(value), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Shows a spinner on stderr, if that is a terminal; gives a function that changes its text."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status(text) as status:
        yield status.update


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Formats columns, with numbers aligned to the right."""
    rows = [list(map(str, row)) for row in rows]
    widths = [max(len(row[n]) for row in [list(header), *rows]) for n in range(len(header))]
    right = [
        bool(rows) and all(row[n][:1].isdigit() or row[n] in ("-", "") for row in rows)
        for n in range(len(header))
    ]

    def line(cells: Sequence[str]) -> str:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right))
        return "  " + "  ".join(padded).rstrip()

    return "\n".join(map(line, [header, *rows]))


seconds, size = seconds_text, size_text
