"""The scripts of examples/scripts with ``mixmesh.prepare``, compared with the same under
DistributedDataParallel, in the testbed on the demo's cluster: every step is real.

Both are started in turns, as whole processes, so that anything that slows the machine for a while slows both.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mixmesh.cluster import Cluster
from mixmesh.errors import InputError, JobError

from .measure import DEMO_CLUSTER, TIMEOUT_S, call, each_case, named
from .revision import revision
from .training_results import LOSS_TOLERANCE, Speedup, Timing, loss_error

FOLDER = Path(__file__).parents[1] / "examples" / "scripts"
WORKER = (sys.executable, "-m", "benchmarks.scripts_worker")
DDP, OURS = "ddp", "mixmesh"
MOST_LINES, LEAST_SPEEDUP = 5, 1.5
WARMUP_STEPS = 2  # connections, allocators; DDP rebuilds its buckets after the first step
HEADLINE = "mixmesh: "
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Script:
    """A script, and the arguments that make its model large enough to be worth the cluster."""

    name: str
    batch_size: int
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return self.name

    def path(self, suffix: str = "") -> str:
        return str(FOLDER / f"{self.name}{suffix and '_'}{suffix}.py")

    def words(self, steps: int, out: Path) -> tuple[str, ...]:
        """The arguments for an epoch of more than ``steps`` steps."""
        sizes = {"batch-size": self.batch_size, "samples": (steps + 1) * self.batch_size, "epochs": 1}
        each = (word for name, value in sizes.items() for word in (f"--{name}", str(value)))
        return (*self.arguments, *each, "--out", str(out / "out"))


SCRIPTS = (
    Script("plain", 64, ("--width", "256", "--depth", "4", "--length", "64")),
    Script("timm_recipe", 128, ("--model", "convnext_atto", "--image-size", "64")),
    Script("torchvision_reference", 96, ("--model", "resnet18", "--image-size", "64")),
    Script("lora", 64, ("--width", "256", "--depth", "4", "--length", "64")),
    Script("unet", 64, ("--channels", "64", "128", "--image-size", "16")),
    Script("hf_trainer", 64, ("--width", "256", "--depth", "4", "--length", "64", "--accumulate", "1")),
    Script("accelerate_loop", 2048, ("--width", "2048", "--accumulate", "1")),
    Script("lightning_module", 2048, ("--width", "2048", "--accumulate", "1")),
)


@dataclass(frozen=True)
class Effort:
    """Both variants are started ``rounds`` times and make ``steps`` steps each time, after the warm-up."""

    rounds: int
    steps: int


FULL, SHORT = Effort(rounds=3, steps=8), Effort(rounds=1, steps=4)


@dataclass(frozen=True)
class Result:
    """One script's comparison. ``written`` and ``removed`` are the lines in which a script differs from the
    single-device one, and ``loss_error`` is the largest difference of its losses, relative to that one's.
    ``plan`` describes the plan. ``first_s`` are the seconds until the first step has ended, by variant and
    round: in the first round with a plan that is made, and in later ones with the one that was kept. That
    step is made without the limits of the testbed, under both."""

    case: Script
    written: int
    removed: int
    loss_error: float
    ddp: Timing
    ours: Timing
    first_s: dict[str, tuple[float, ...]]
    plan: str
    emulation: str

    @property
    def ahead_after_steps(self) -> int | None:
        """The steps after which the training is ahead of that under DDP, the start with planning included;
        None for one that never is."""
        late_s = self.first_s[OURS][0] - self.first_s[DDP][0]
        gain_s = self.ddp.median_s - self.ours.median_s
        return 1 + max(0, math.ceil(late_s / gain_s)) if gain_s > 0 else None

    @property
    def speedup(self) -> Speedup:
        return Speedup.of(self.ours, self.ddp)

    @property
    def targets(self) -> dict[str, bool]:
        return {
            f"at most {MOST_LINES} lines": max(self.written, self.removed) <= MOST_LINES,
            "losses": self.loss_error <= LOSS_TOLERANCE,
            f"{LEAST_SPEEDUP:g}x DistributedDataParallel": self.speedup.median >= LEAST_SPEEDUP,
        }

    def row(self) -> dict:
        return {
            "script": self.case.name,
            "arguments": [*self.case.arguments, "--batch-size", str(self.case.batch_size)],
            "lines_written": self.written,
            "lines_removed": self.removed,
            "loss_error": self.loss_error,
            "ddp_step_s": self.ddp.median_s,
            "step_s": self.ours.median_s,
            "speedup": asdict(self.speedup),
            "rounds_s": {DDP: self.ddp.rounds_s, OURS: self.ours.rounds_s},
            "first_s": self.first_s,
            "ahead_after_steps": self.ahead_after_steps,
            "plan": self.plan,
            "targets": self.targets,
        }


def cases(names: Sequence[str]) -> tuple[Script, ...]:
    """The scripts of these names; without names, all of them."""
    return named(names, SCRIPTS, SCRIPTS, lambda case: (case.name,))


def run(
    chosen: Sequence[Script],
    effort: Effort = FULL,
    progress: Progress = lambda _: None,
    keep: Path | None = None,
) -> Iterator[Result]:
    """Yields the result of each script as soon as it is measured. Profiles and plans stay in ``keep``. Raises
    InputError outside of a checkout, which has the scripts."""
    if not FOLDER.is_dir():
        raise InputError(
            "the scripts are not there", expected=str(FOLDER), hint="run it in a checkout of mixmesh"
        )
    return each_case(
        chosen, keep, lambda case, folder: measure(case, effort, folder, lambda x: progress(f"{case}: {x}"))
    )


def measure(case: Script, effort: Effort, folder: Path, say: Progress) -> Result:
    """Runs one script on one device for its losses, and in turns under DDP and under mixmesh."""
    cluster = Cluster.parse(DEMO_CLUSTER, where="bench scripts")
    steps = 1 + WARMUP_STEPS + effort.steps
    words = str(steps), *case.words(steps, folder)
    # by its variable Lightning knows that ranks were started by torchrun, whose others the testbed sets
    environment = {"MIXMESH_CACHE": str(folder.absolute() / "cache"), "TORCHELASTIC_RUN_ID": "bench"}
    rounds_s: dict[str, list[float]] = {DDP: [], OURS: []}
    first_s: dict[str, list[float]] = {DDP: [], OURS: []}
    decided = ""

    def listen(text: str) -> None:
        nonlocal decided
        if text.startswith(HEADLINE):
            decided = text.removeprefix(HEADLINE)

    say("the losses of one device")
    reference = single_device(case, words)
    for number in range(effort.rounds):
        for kind in rounds_s:
            say(f"round {number + 1} of {effort.rounds}, {kind}")
            printed, emulation = call(WORKER, cluster, case.path(kind), *words, say=listen, env=environment)
            found = json.loads(printed)
            rounds_s[kind].append(statistics.median(found["step_s"][WARMUP_STEPS:]))
            first_s[kind].append(found["first_s"])
    removed, written = changed_lines(case.path(), case.path(OURS))
    return Result(
        case,
        len(written),
        len(removed),
        loss_error(found["losses"], reference),
        Timing(DDP, "", tuple(rounds_s[DDP])),
        Timing(OURS, "", tuple(rounds_s[OURS])),
        {kind: tuple(each) for kind, each in first_s.items()},
        decided,
        emulation,
    )


def single_device(case: Script, words: Sequence[str]) -> list[float]:
    """The losses of the unmodified script. Raises JobError if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*WORKER, case.path(), *words], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode:
        raise JobError("the script of one device failed", where=case.path(), got=done.stderr[-500:])
    return json.loads(done.stdout.splitlines()[-1])["losses"]


def changed_lines(before: str | Path, after: str | Path) -> tuple[list[str], list[str]]:
    """The lines removed from a file and the lines added, without empty ones."""
    texts = (Path(path).read_text().splitlines() for path in (before, after))
    lines = list(difflib.unified_diff(*texts, n=0, lineterm=""))[2:]
    removed, written = ([x[1:] for x in lines if x[0] == sign and x[1:].strip()] for sign in "-+")
    return removed, written


def report(results: Sequence[Result], command: str) -> dict:
    """The object that ``--json`` prints and the file holds."""
    targets = [met for result in results for met in result.targets.values()]
    return {
        "bench": "scripts",
        "revision": revision(),
        "command": command,
        "emulation": sorted({result.emulation for result in results}),
        "losses_agree": all(result.loss_error <= LOSS_TOLERANCE for result in results),
        "targets_met": sum(targets),
        "targets": len(targets),
        "cases": [result.row() for result in results],
    }
