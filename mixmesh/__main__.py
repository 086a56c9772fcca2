"""The command line: ``mixmesh COMMAND ...``

Exit status: 0 success, 1 a clear failure (nothing fits, results differ), 2 wrong usage or bad input,
130 interrupted.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from errno import ENOSPC
from typing import Annotated, Any

import typer
import typer.core

from .base.progress import has_lost_lines, say, send_nowhere, tell
from .cli.output import error_object, error_text, json_line
from .cli.told import is_first_to_tell
from .errors import InputError, MixmeshError

INTERRUPTED = 130

# click's own, which versions of typer import from different places
UsageError: type[Any] = typer.BadParameter.__mro__[1]

# command -> module of ``mixmesh.cli``, which has a function of that name
COMMANDS = {
    "plan": "plan",
    "show": "show",
    "explain": "explain",
    "diff": "show",
    "simulate": "simulate",
    "report": "report",
    "what-if": "what_if",
    "verify": "verify",
    "doctor": "doctor",
    "detect": "detect",
    "calibrate": "calibrate",
    "profile": "profile",
    "tune": "tune",
    "run": "run",
    "export": "export",
    "testbed": "testbed",
    "bench": "bench",
}


class Commands(Mapping):
    """The commands by name. Each is imported only when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        module = importlib.import_module(f".cli.{COMMANDS[name]}", __package__)
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        settings = getattr(module, "SETTINGS", None)
        alone.command(name, context_settings=settings)(getattr(module, name.replace("-", "_")))
        return typer.main.get_command(alone)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class Group(typer.core.TyperGroup):
    """The group of all commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "commands": Commands()})


app = typer.Typer(
    name="mixmesh",
    cls=Group,
    help="Train one ordinary PyTorch model across a cluster whose devices differ.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass


def run(arguments: Sequence[str]) -> int:
    """Runs a command line, and raises its errors."""
    try:
        return app(args=list(arguments), prog_name="mixmesh", standalone_mode=False) or 0
    except SystemExit as end:  # typer ends the process where the reader of a pipe is gone
        if isinstance(end.__context__, BrokenPipeError):
            raise end.__context__ from None
        raise


def execute(arguments: Sequence[str], run: Callable[[Sequence[str]], int] = run) -> int:
    """Runs a command line and returns its exit status; prints errors instead of raising them."""
    own = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    as_json, debug = "--json" in own, own[:1] == ["--debug"]
    if own[:1] == ["--version"]:
        say(f"mixmesh {_version()}")
        return 0
    try:
        status = run(arguments)
        if sys.stdout is not None and not has_lost_lines(sys.stdout):
            sys.stdout.flush()  # shows a pipe without a reader, or a full disk, before the end
        # typer turns the interrupt into the status
        return _interrupted(as_json) if status == INTERRUPTED else status
    except UsageError as error:
        usage = io.StringIO()
        error.show(file=usage)
        tell(usage.getvalue().rstrip("\n"))
        command = error.ctx.command_path if error.ctx is not None else "mixmesh"
        return _fail(InputError(error.format_message(), hint=f"{command} --help"), as_json)
    except MixmeshError as error:
        if debug:
            traceback.print_exc()
        text = error_text(error)
        if not is_first_to_tell(text):
            text = f"rank {os.environ.get('RANK', '?')}: the same {type(error).__name__}"
        tell(text)
        return _fail(error, as_json)
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted(as_json)
    except BrokenPipeError:  # the reader of the pipe, such as head, has closed it
        send_nowhere(sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            traceback.print_exc()
        text = bug_text(error)
        # the full disk may be that of stdout, or of a file of PyTorch
        if isinstance(error, OSError) and error.errno == ENOSPC:
            text = f"a file, or what the command prints, cannot be written: {error}"
        tell(text)
        return _fail(MixmeshError(text), as_json)


def bug_text(error: Exception) -> str:
    """Formats the error in one line, and writes the traceback to a file."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="mixmesh-", suffix="-traceback.txt", delete=False
        ) as file:
            file.write(f"mixmesh {_version()}: {sys.argv}\n")
            traceback.print_exception(error, file=file)
        place = f"traceback in {file.name}"
    except OSError:
        place = "mixmesh --debug ... shows the traceback"
    reason = " ".join(str(error).split())[:200]
    return f"this is a bug in mixmesh, not in your input: {type(error).__name__}: {reason} ({place})"


def _fail(error: MixmeshError, as_json: bool) -> int:
    if as_json:
        say(json_line(error_object(error)))
    return error.exit_status


def _interrupted(as_json: bool) -> int:
    tell("interrupted")
    _fail(MixmeshError("interrupted"), as_json)
    return INTERRUPTED


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("mixmesh")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"


def main() -> None:
    """The console entry point."""
    if sys.stderr is None:  # closed by the shell: what is for stderr must not go to stdout
        sys.stderr = open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name from a file may have letters that a terminal lacks
            stream.reconfigure(errors="backslashreplace")
    sys.exit(execute(sys.argv[1:]))


if __name__ == "__main__":
    main()
