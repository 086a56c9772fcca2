"""The reference of the command line, out of the command line itself: ``python -m tools.site.commands``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from benchmarks.commands import app as benchmarks
from mixmesh.__main__ import app

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "commands.md"
HEAD = """# Commands

<!-- made by `python -m tools.site.commands`; a test compares -->

This page is made from the commands themselves: `mixmesh COMMAND --help` says the same. [Jobs and
clusters](jobs.md) says what may stand for `JOB` and `C.toml`; the fields of `--json` are in [JSON](json.md).
`mixmesh --debug COMMAND ...` shows the traceback of an error, `mixmesh --version` the version.
"""


def page() -> str:
    """The whole page as Markdown."""
    root = typer.main.get_command(app)
    bench = typer.main.get_group(benchmarks)
    parts = [section("mixmesh", name, c) for name, c in root.commands.items()]
    benches = [section("python -m benchmarks", name, c, level=3) for name, c in bench.commands.items()]
    return "\n".join([HEAD, *parts, f"## python -m benchmarks\n\n{paragraphs(bench.help)}\n", *benches])


def section(prefix: str, name: str, command: Any, level: int = 2) -> str:
    """One command: how it is called, its help, its options."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    words = [placeholder(p) for p in arguments if not is_behind_dashes(p)]
    needed = [f"{p.opts[0]} {p.metavar or p.name.upper()}" for p in options if p.required]
    rest = ["[options]"] if len(options) > len(needed) else []
    behind = [placeholder(p) for p in arguments if is_behind_dashes(p)]  # all options stand before the dashes
    usage = " ".join([f"{prefix} {name}", *words, *needed, *rest, *behind])
    lines = [f"{'#' * level} {prefix} {name}", "", f"```text\n{usage}\n```", "", paragraphs(command.help), ""]
    lines += table([*arguments, *options])
    return "\n".join(lines)


def placeholder(argument: Any) -> str:
    shown = (argument.metavar or argument.name.upper()).removesuffix("...")
    shown = shown[1:-1] if shown.startswith("[") and shown.endswith("]") else shown
    shown += "..." if argument.nargs == -1 else ""
    return shown if argument.required else f"[{shown}]"


def is_behind_dashes(argument: Any) -> bool:
    """Whether an argument is a command line of its own, behind ``--``."""
    return (argument.metavar or "").startswith("-- ")


def table(params: list[Any]) -> list[str]:
    rows = [f"| {spelling(p)} | {cell(p.help or '')}{default(p)} |" for p in params if not p.hidden]
    return ["| option | |", "|---|---|", *rows, ""] if rows else []


def spelling(param: Any) -> str:
    """``--planner TEXT``, with every other spelling."""
    if param.param_type_name == "argument":
        return f"`{placeholder(param)}`"
    value = "" if param.is_flag else f" {param.metavar or param.name.upper()}"
    return ", ".join(f"`{name}{value}`" for name in [*param.opts, *param.secondary_opts])


def default(param: Any) -> str:
    value = param.default
    if callable(value) or value in (None, False, True, ()) or param.required or not str(value):
        return ""
    return f" Default: `{value}`."


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def paragraphs(text: str | None) -> str:
    blocks = (text or "").replace("\b", "").split("\n\n")
    return "\n\n".join(
        " ".join(b.split()).replace("*", "\\*").replace("<", "&lt;") for b in blocks if b.strip()
    )


if __name__ == "__main__":
    PAGE.write_text(page())
