"""Runs all kinds of generators for so many minutes in all; failures go to out/fuzz/."""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mixmesh.runtime.processes import end_with_parent

from .report import Report

KINDS = ("models", "programs", "files", "damage")  # one module each, with run_cases and replay
FOLDER = Path("out/fuzz")


def run_kind(kind: str, until_time_s: float, told, seed: int) -> Report:
    """Runs one kind in this process; ``told`` is a queue for its progress."""
    module = importlib.import_module(f".{kind}", __package__)
    return module.run_cases(seed, until_time_s, lambda text: told.put((kind, seed, text)))


def run_all(
    kinds: Sequence[str], minutes: float, seed: int, jobs: int, console: Console
) -> dict[str, Report]:
    """Runs the kinds, each for its part of the time, in ``jobs`` processes with seeds of their own."""
    reports = {kind: Report(kind) for kind in kinds}
    context = multiprocessing.get_context("spawn")
    each_s = minutes * 60 / len(kinds)
    columns = (
        TextColumn("{task.fields[kind]:10}"),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        ProcessPoolExecutor(jobs, mp_context=context, initializer=end_with_parent) as pool,
        context.Manager() as manager,
    ):
        for kind in kinds:
            task = progress.add_task("starting", kind=kind, total=each_s)
            told, started = manager.Queue(), time.monotonic()
            run = partial(run_kind, kind, started + each_s, told)
            running = [pool.submit(run, seed * jobs + n) for n in range(jobs)]
            said: dict[int, str] = {}
            while not all(f.done() for f in running):
                while not told.empty():
                    _, source, said[source] = told.get()
                progress.update(
                    task, completed=time.monotonic() - started, description="; ".join(said.values())
                )
                time.sleep(0.2)
            for done in running:
                reports[kind].join(done.result())
            progress.update(task, completed=each_s)
    return reports


def summary(reports: dict[str, Report]) -> Table:
    table = Table("kind", "cases", "outcomes", "failures")
    for report in reports.values():
        outcomes = ", ".join(f"{name} {count}" for name, count in sorted(report.outcomes.items()))
        table.add_row(report.kind, str(report.num_cases), outcomes, str(len(report.failures)))
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all kinds together")
    parser.add_argument(
        "--kind", action="append", choices=KINDS, help="may be given several times; default: all"
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="default: the time, so that every run tries others"
    )
    parser.add_argument(
        "--case", type=int, default=None, help="runs this one case of --kind and prints its failures"
    )
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument(
        "--json", action="store_true", help="prints a line of JSON per kind in place of the table"
    )
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    kinds = tuple(options.kind or KINDS)
    seed = int(time.time()) % 1_000_000 if options.seed is None else options.seed
    if options.case is not None:
        module = importlib.import_module(f".{kinds[0]}", __package__)
        reports = {kinds[0]: module.replay(options.case)}
    else:
        console.print(f"seed {seed}, {options.minutes:g} minutes of {', '.join(kinds)}")
        reports = run_all(kinds, options.minutes, seed, options.jobs, console)
    for report in reports.values():
        for path, failure in zip(report.write(FOLDER), report.failures):
            console.print(f"{path}: {failure.what}", markup=False, highlight=False)
    if options.json:
        for report in reports.values():
            print(json.dumps(json.loads(report.as_json()) | {"seed": seed}))
    else:
        Console().print(summary(reports))
    return 1 if any(report.failures for report in reports.values()) else 0
