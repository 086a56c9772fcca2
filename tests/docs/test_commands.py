"""The commands on the pages: the reference is that of the command line, all parse, and cheap ones run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from torch.distributed.run import get_args_parser

from benchmarks.commands import app as benchmarks
from mixmesh.__main__ import app, execute
from tools.site.commands import PAGE, page

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:mixmesh|python -m benchmarks) [a-z][^`]*)`")
RUN = re.compile(r"<!-- run -->\n```sh\n(.*?)```", re.DOTALL)
COMMANDS = typer.main.get_command(app).commands
BENCHMARKS = typer.main.get_group(benchmarks).commands
STOPS = {"#", "|", ">", "2>", "&&", "&"}


def test_the_reference_is_that_of_the_command_line(request):
    if request.config.getoption("--update-golden"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page(), "run: python -m tools.site.commands"


def words_of(line: str) -> list[str]:
    """A line of a shell as words, up to a comment, a pipe or another command."""
    words = shlex.split(line, comments=True)
    ends = [n for n, word in enumerate(words) if word in STOPS or word.endswith(";")]
    return words[: min(ends, default=len(words))]


def commands_of(path: Path) -> list[str]:
    """All lines of a page that call mixmesh, by name or by torchrun; inline ones with their options."""
    text = path.read_text().replace("\\\n", " ")
    found = []
    for kind, body in FENCE.findall(text):
        if kind == "sh":
            found += body.splitlines()
        elif kind in ("", "text", "console"):
            found += [line[2:] for line in body.splitlines() if line.startswith("$ ")]
    prose = FENCE.sub("", text)
    found += [
        line for line in INLINE.findall(prose) if " --" in line and "..." not in line and "|" not in line
    ]
    return [
        line.strip()
        for line in found
        if re.match(r"\s*(mixmesh|python -m benchmarks|torchrun\b.* -m mixmesh)\b", line)
    ]


def commands_after(words: list[str]) -> tuple[dict, list[str]]:
    """The commands that a line's program has, and the words behind the program."""
    return (BENCHMARKS, words[3:]) if words[0] == "python" else (COMMANDS, words[1:])


def check(words: list[str]) -> str | None:
    """What is wrong with a command, which is parsed and not run."""
    if words[0] == "torchrun":
        launch = get_args_parser().parse_args(words[1:])
        words = ["mixmesh", *launch.training_script_args]
    commands, words = commands_after(words)
    if words and words[0] in ("--debug", "--version"):
        words = words[1:]
    if not words or words == ["..."]:
        return None
    name, *arguments = words
    command = commands.get(name)
    if command is None:
        return f"no command {name}"
    options = {o: p for p in command.params for o in (*p.opts, *p.secondary_opts)}
    unknown = [
        w for w in arguments if w.startswith("--") and w != "--" and w.partition("=")[0] not in options
    ]
    inner = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    if inner:
        outer = arguments[: arguments.index("--")]
        unknown = [w for w in outer if w.startswith("--") and w.partition("=")[0] not in options]
        return check(inner) if not unknown and inner[0] in ("mixmesh", "torchrun") else unknown or None
    if unknown:
        return f"{name} has no {', '.join(unknown)}"
    return None


def complete(words: list[str]) -> bool:
    """Whether a command in a block of a shell has all that it needs."""
    try:
        commands, (name, *arguments) = commands_after(words)
        commands[name].make_context(name, list(arguments))
    except typer.BadParameter.__mro__[1]:
        return False
    return True


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_parse(path):
    wrong = [(line, problem) for line in commands_of(path) if (problem := check(words_of(line)))]
    assert not wrong, wrong
    whole = path.read_text().replace("\\\n", " ")
    lines = [line for kind, body in FENCE.findall(whole) if kind == "sh" for line in body.splitlines()]
    blocks = [line for line in lines if line.startswith(("mixmesh ", "python -m benchmarks "))]
    lacking = [line for line in blocks if not complete(words_of(line))]
    assert not lacking, lacking


def test_a_wrong_option_is_seen():
    assert check(words_of("mixmesh plan x.py --clusters c.toml # note")) == "plan has no --clusters"
    assert check(words_of("mixmesh testbed --cluster c.toml -- mixmesh run x.py --stepss 3"))
    assert check(words_of("torchrun --nproc-per-node 2 -m mixmesh runn x.py")) == "no command runn"
    assert not complete(words_of("mixmesh plan x.py"))


@pytest.mark.parametrize(
    "path", [p for p in PAGES if RUN.search(p.read_text())], ids=lambda p: str(p.relative_to(ROOT))
)
def test_cheap_commands_run(path, tmp_path, monkeypatch, capsys):
    """Those behind ``<!-- run -->``, page by page in one folder, one after the other."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for block in RUN.findall(path.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            assert execute(words_of(line)[1:]) == 0, (line, capsys.readouterr().err)


def test_explain_prints_what_its_page_shows(tmp_path, monkeypatch, capsys):
    """Sentences on the page end where its lines do, and ``...`` stands for lines that it leaves out."""
    page = (ROOT / "docs/guide/explain.md").read_text()
    monkeypatch.chdir(ROOT)

    def run(line: str) -> None:
        capsys.readouterr()
        words = [str(tmp_path / word) if word.endswith(".plan") else word for word in line.split()]
        assert execute(words[1:]) == 0

    run("mixmesh plan examples/gpt.py --cluster examples/two-boxes.toml --out gpt.plan")
    run(re.search(r"`(mixmesh plan [^`]*)`", page)[1] + " --out mixed.plan")
    shown = [body[2:].splitlines() for _, body in FENCE.findall(page) if body.startswith("$ mixmesh explain")]
    assert len(shown) == 2
    for command, *lines in shown:
        run(command)
        printed = " ".join(capsys.readouterr().out.split())
        for line in lines:
            assert line.strip() == "..." or " ".join(line.split()) in printed, line


def test_python_on_pages_is_python():
    wrong = []
    for path in PAGES:
        for kind, body in FENCE.findall(path.read_text()):
            if kind == "python":
                try:
                    compile(body, str(path), "exec")
                except SyntaxError as error:
                    wrong.append(f"{path.relative_to(ROOT)}: {error}")
    assert not wrong, wrong
