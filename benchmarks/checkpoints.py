"""The cost of checkpoints, in the testbed: steps with a checkpoint in every ``EVERY_STEPS``, compared with
steps without.

Blocks of equally many steps take turns in one process: without a checkpoint, with one that is written during
the training, and with one for which the training waits. A block with a checkpoint ends when that is on the
disk.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mixmesh.cluster import Cluster
from mixmesh.cost import Profile
from mixmesh.frontend.trace import trace
from mixmesh.planner import make_plan

from . import jobs
from .measure import DEMO_CLUSTER, call, each_case, named
from .training_results import Speedup, Timing

WORKER = (sys.executable, "-m", "benchmarks.checkpoints_worker")
EVERY_STEPS = 50
NONE, ASYNC, WAITED = "none", "while training", "waited for"
MOST_COST = 0.03  # share of the throughput
CASES = ("vgg19", "bert", "gpt")
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Effort:
    """Each variant has ``rounds`` blocks, after ``profile_s`` of profiling."""

    rounds: int
    profile_s: float = 12.0


FULL, SHORT = Effort(rounds=5), Effort(rounds=2)


@dataclass(frozen=True)
class Result:
    """Blocks of ``case`` by variant: seconds of a block in each round. ``state_bytes`` are those of the whole
    checkpoint; ``staging_s`` are the seconds for which copies held up the training, by round."""

    case: str
    blocks: dict[str, Timing]
    staging_s: tuple[float, ...]
    state_bytes: int
    emulation: str

    def cost(self, variant: str) -> Speedup:
        """The share of throughput that a variant's checkpoints cost, by its median, least and most."""
        gain = Speedup.of(self.blocks[NONE], self.blocks[variant])
        return Speedup(*(1 - 1 / x for x in (gain.median, gain.least, gain.most)))

    @property
    def targets(self) -> dict[str, bool]:
        return {f"at most {MOST_COST:.0%} of throughput": self.cost(ASYNC).median <= MOST_COST}

    def row(self) -> dict:
        return {
            "job": self.case,
            "state_bytes": self.state_bytes,
            "step_s": self.blocks[NONE].median_s / EVERY_STEPS,
            "cost": {name: asdict(self.cost(name)) for name in (ASYNC, WAITED)},
            "staging_s": self.staging_s,
            "rounds_s": {name: block.rounds_s for name, block in self.blocks.items()},
            "targets": self.targets,
        }


def cases(names: Sequence[str]) -> tuple[str, ...]:
    """The jobs of these names; without names, all of them."""
    return named(names, CASES, CASES, lambda case: (case,))


def run(
    chosen: Sequence[str],
    effort: Effort = FULL,
    progress: Progress = lambda _: None,
    keep: Path | None = None,
) -> Iterator[Result]:
    """Yields the result of each job as soon as it is measured. Profiles and plans stay in ``keep``."""
    return each_case(
        chosen, keep, lambda case, folder: measure(case, effort, folder, lambda x: progress(f"{case}: {x}"))
    )


def measure(case: str, effort: Effort, folder: Path, say: Progress) -> Result:
    """Profiles and plans a job for the demo's cluster, and times blocks of its steps there."""
    cluster = Cluster.parse(DEMO_CLUSTER, where="bench checkpoints")
    files = {name: folder.absolute() / name for name in ("cluster.toml", "profile.json", "run.plan")}
    cluster_file, profile_file, plan_file = files.values()
    cluster_file.write_text(DEMO_CLUSTER)
    say("profiling")
    call(WORKER, cluster, "profile", case, str(cluster_file), str(profile_file), str(effort.profile_s))
    made = jobs.make(case)
    make_plan(trace(made.model, made.batch), cluster, profile=Profile.load(profile_file)).save(plan_file)
    words = (case, str(plan_file), str(folder.absolute() / "saved"), str(effort.rounds))
    printed, emulation = call(WORKER, cluster, "times", *words, say=say)
    found = json.loads(printed)
    blocks = {name: Timing(name, "", tuple(rounds)) for name, rounds in found["block_s"].items()}
    return Result(case, blocks, tuple(found["staging_s"]), found["state_bytes"], emulation)
