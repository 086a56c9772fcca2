"""Damaged folders of checkpoints: a file cut short, with other bits, missing or of another checkpoint,
another version of the format, and what cut-off writes leave.

The newest checkpoint that is as it was written must be loaded, to the last bit, and each newer one named in a
warning. Where none is left the load is refused with an InputError.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mixmesh import checkpoint
from mixmesh.checkpoint.manifest import MANIFEST, digest_of
from mixmesh.errors import InputError

from .report import Failure, Progress, Report, case_seeds, silent

KIND = "damage"
STEPS = (1, 2, 3)
Files = dict[str, dict[str, bytes]]  # by checkpoint and name


@dataclass(frozen=True)
class Made:
    """Three checkpoints, and what was trained when each was saved."""

    files: Files
    states: dict[int, dict[str, Any]]


class Training:
    """A small training on one device."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 2, 2])
        self.step()  # so that there is a state that is not the saved one

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 5)).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def state(self) -> dict[str, Any]:
        """Copies of all values."""
        tensors = {name: value.clone() for name, value in self.model.state_dict().items()}
        for number, entries in self.optimizer.state_dict()["state"].items():
            tensors |= {f"{key} of {number}": value.clone() for key, value in entries.items()}
        settings = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        texts = {"settings": repr(settings), "scheduler": repr(sorted(self.scheduler.state_dict().items()))}
        return {**tensors, **texts, "numbers": torch.get_rng_state()}


@cache
def made() -> Made:
    """Made once in a process."""
    training, states = Training(), {}
    with tempfile.TemporaryDirectory() as folder:
        for step in STEPS:
            training.step()
            checkpoint.save(folder, step=step, **training.parts(), extra={"step": step})
            states[step] = training.state()
        files = {p.name: {f.name: f.read_bytes() for f in p.iterdir()} for p in Path(folder).iterdir()}
    return Made(files, states)


# --- damage ----------------------------------------------------------------------------------------------


def change_bytes(path: Path, rng: random.Random) -> None:
    """Cuts a file short, flips a bit, writes zeros, or puts bytes in or at the end."""
    data = path.read_bytes()
    at = rng.randrange(len(data))
    match rng.randrange(5):
        case 0:
            data = data[:at]
        case 1:
            data = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        case 2:
            data = data[:at] + bytes(min(rng.choice([1, 64, 4096]), len(data) - at)) + data[at + 64 :]
        case 3:
            data = data[:at] + rng.randbytes(rng.choice([1, 8, 200])) + data[at:]
        case _:
            data += rng.randbytes(rng.choice([1, 4096]))
    path.write_bytes(data)


def remove_or_replace(path: Path, rng: random.Random) -> None:
    """Removes a file, empties it, or has a folder or another checkpoint's file in its place."""
    others = [p / path.name for p in path.parent.parent.iterdir() if p != path.parent]
    others = [p for p in others if p.is_file()]
    path.unlink()
    match rng.randrange(4):
        case 0:
            path.write_bytes(b"")
        case 1:
            path.mkdir()
        case 2 if others:
            shutil.copy(rng.choice(others), path)


def change_version(path: Path, rng: random.Random) -> None:
    """Writes a manifest of another format, or without a part, with the right checksum."""
    manifest = path.parent / MANIFEST
    content = json.loads(manifest.read_text())["content"]
    if rng.random() < 0.5:
        content["format"] = rng.choice([0, 2, 99, "1", None, 1.5, [1]])
    else:
        del content[rng.choice([k for k in content if k not in ("cluster_fingerprint", "optimizer")])]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    manifest.write_text(json.dumps({"content": content, "digest": digest_of(text.encode())}))


def remove_all(path: Path, rng: random.Random) -> None:
    """Removes a checkpoint, leaves its folder empty, or has a file in its place."""
    folder = path.parent
    shutil.rmtree(folder)
    match rng.randrange(3):
        case 0:
            folder.mkdir()
        case 1:
            folder.write_bytes(rng.randbytes(10))


def leave_unfinished(path: Path, rng: random.Random) -> None:
    """Moves a checkpoint to where one is that was cut off."""
    path.parent.rename(path.parent.with_name(rng.choice([".unfinished-", ".removed-"]) + path.parent.name))


WAYS: dict[Callable[[Path, random.Random], None], int] = {
    change_bytes: 12,
    remove_or_replace: 4,
    change_version: 3,
    remove_all: 2,
    leave_unfinished: 1,
}


def damage(folder: Path, rng: random.Random) -> list[str]:
    """Damages one file or two, and says how."""
    told = []
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        files = sorted(f for p in folder.glob("0*") if p.is_dir() for f in p.iterdir() if f.is_file())
        files = [f for f in files if f.stat().st_size]
        if not files:
            break
        # mostly of the newest
        path = files[-1 - min(rng.randrange(len(files)), rng.randrange(len(files)))]
        way = rng.choices(list(WAYS), list(WAYS.values()))[0]
        if way is change_version and _manifest_is_spoilt(path.parent):
            way = change_bytes
        way(path, rng)
        told.append(f"{way.__name__} of {path.parent.name}/{path.name}")
    return told


def _manifest_is_spoilt(folder: Path) -> bool:
    path = folder / MANIFEST
    return not path.is_file() or path.read_bytes() != made().files[folder.name][MANIFEST]


# --- what must come of it --------------------------------------------------------------------------------


class Wrong(AssertionError):
    """A load that is not of the newest checkpoint that is whole."""


def run_case(case_seed: int) -> str:
    """The outcome of one case in a word. Raises Wrong, or what else is not to happen."""
    rng = random.Random(case_seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for checkpoint_name, files in made().files.items():
            (folder / checkpoint_name).mkdir()
            for file, data in files.items():
                (folder / checkpoint_name / file).write_bytes(data)
        told = "; ".join(damage(folder, rng))
        whole = [step for step in STEPS if _is_whole(folder, step)]
        training, warned = Training(), io.StringIO()
        before = training.state()
        has_any = any(folder.glob("0*"))
        with contextlib.redirect_stderr(warned):
            try:
                found = checkpoint.load(folder, **training.parts())
            except InputError as error:
                found = None
                if whole or not has_any or "no checkpoint can be resumed" not in str(error):
                    raise Wrong(f"refused after {told}: {error}") from None
        if found is None:
            if whole or not same(before, training.state()):
                raise Wrong(f"nothing was loaded, or something in part, after {told}")
            return "refused" if has_any else "none is there"
        if found.step < max(whole, default=0) or found.extra != {"step": found.step}:
            raise Wrong(f"step {found.step} was loaded after {told}")
        if not same(made().states[found.step], training.state()):
            raise Wrong(f"other values than those of step {found.step} were loaded after {told}")
        newer = [p.name for p in folder.glob("0*") if p.name > found.path.name]
        if missing := [n for n in newer if n not in warned.getvalue()]:
            raise Wrong(f"no warning of {missing[0]} after {told}")
        return "an older one" if newer else "the newest one"


def _is_whole(folder: Path, step: int) -> bool:
    name = next(name for name in made().files if name.endswith(f"-step-{step}"))
    paths = {folder / name / file: data for file, data in made().files[name].items()}
    return all(path.is_file() and path.read_bytes() == data for path, data in paths.items())


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether all values are equal to the last bit."""
    return a.keys() == b.keys() and all(
        torch.equal(a[k], b[k]) if isinstance(a[k], Tensor) else a[k] == b[k] for k in a
    )


def try_case(case_seed: int, report: Report) -> None:
    """Adds the outcome of one case."""
    try:
        report.add(run_case(case_seed))
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        text = f"python -m tests.fuzz --kind {KIND} --case {case_seed}\n{what}\n"
        report.add("FAILED", Failure(KIND, case_seed, what, text, ".txt"))


def replay(case_seed: int) -> Report:
    """One case again."""
    report = Report(KIND)
    try_case(case_seed, report)
    return report


def run_cases(seed: int, until_time_s: float, told: Progress = silent) -> Report:
    """Tries cases until ``time.monotonic()`` is ``until_time_s``."""
    report = Report(KIND, num_seeds=1)
    for case_seed in case_seeds(seed):
        if time.monotonic() >= until_time_s:
            break
        try_case(case_seed, report)
        told(f"{report.num_cases} cases, {len(report.failures)} failures")
    return report
