"""Recognises a file or a folder by its content: a plan, a training, or the results of a bench."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.files import read_text
from ...base.run_log import MAX_BYTES, RUN_LOG, RunLog, parse_log, read_log
from ...errors import InputError
from ...lang.plan_file import Plan

EXPECTED = (
    "a plan (mixmesh plan --out X.plan), a folder of checkpoints (mixmesh run --checkpoint DIR), the log of "
    "a training (--log-json FILE), or the results of a bench (python -m benchmarks NAME --out R.json)"
)
SHOWN = 40  # characters shown of an unrecognised file


@dataclass(frozen=True)
class Run:
    """A training: its log, and the steps of the checkpoints that are in its folder now."""

    name: str
    log: RunLog
    kept_steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Bench:
    """The results of a bench: the object of its file, and the rows in it."""

    name: str
    made: dict[str, Any]
    rows: tuple[dict[str, Any], ...]


def recognise(path: str | Path) -> Plan | Run | Bench:
    """Loads a file or folder of any known kind. Raises InputError for an unknown kind, and for a damaged
    file."""
    path = Path(path)
    if path.is_dir():
        return run_of_folder(path)
    try:
        text = read_text(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        raise unknown(path, getattr(error, "strerror", None) or str(error)) from None
    if text.startswith("mixmesh_plan") or "\nprogram " in f"\n{text}":
        return Plan.parse(text, str(path))
    if (bench := bench_of(text, path.name)) is not None:
        return bench
    first = text.partition("\n")[0]
    if first.startswith("{") and ('"step"' in first or '"event"' in first):
        return Run(path.name, parse_log(text, str(path)))
    raise unknown(path, f"a file that begins with {text[:SHOWN]!r}")


def unknown(path: Path, got: str) -> InputError:
    return InputError(
        "there is no report of this",
        where=str(path),
        expected=EXPECTED,
        got=got,
        hint="mixmesh plan JOB --cluster C.toml --out X.plan",
    )


def run_of_folder(folder: Path) -> Run:
    """The training whose checkpoints are in a folder. Raises InputError if it has no log."""
    from ...checkpoint.manifest import NAME, checkpoints_in

    matches = [NAME.fullmatch(path.name) for path in checkpoints_in(folder)]
    kept = [int(match[2]) for match in matches if match is not None]
    log = folder / RUN_LOG
    if not log.is_file():
        got = f"{len(kept)} checkpoints and no {RUN_LOG}" if kept else "a folder without checkpoints"
        raise unknown(folder, got)
    return Run(folder.name or str(folder), read_log(log), tuple(sorted(kept)))


def bench_of(text: str, name: str) -> Bench | None:
    """The results of a bench in a text; None if it holds something else."""
    if not text.startswith("{"):
        return None
    try:
        results = json.loads(text)
    except ValueError:
        return None
    if not isinstance(results, dict) or not isinstance(results.get("bench"), str):
        return None
    lists = [results.get("rows"), results.get("cases")]
    rows = next((tuple(x) for x in lists if isinstance(x, list) and x), None)
    if rows is None or not all(isinstance(row, dict) for row in rows):
        return None
    return Bench(name, results, rows)
