"""Makes faults at random moments of real trainings: each training must continue, and end like an undisturbed
one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from mixmesh.cluster import Cluster
from mixmesh.errors import InputError, TestbedUnavailable
from mixmesh.measure.testbed import Bed, PlainBed, Testbed, probe

from ..revision import revision
from .disturb import STEPS_BESIDE, disturb
from .journal import Line, last_executions
from .judgement import (
    LOSS_TOLERANCE,
    check_losses,
    check_samples,
    check_steps,
    loss_error,
    losses_of,
    unreadable,
)
from .kinds import KIND_NAMES, KINDS, Fault, Kind, kind_of
from .scene import Output, Scene, Setting, Stuck

SHARES = ("0.40", "0.40", "0.25", "0.25")  # shares of a core, one machine each
DISK_BYTES = 64 * 2**20
NOTICED_S = 30.0
SAVED_S = 30.0  # seconds after which torchrun kills processes that SIGTERM has not ended
MOST_STEPS = 8  # most steps between two faults
KEPT_CHECKPOINTS = 2  # checkpoints written before a fault, because one may be damaged
Say = Callable[[str], None]


@dataclass(frozen=True)
class Trained:
    """One training and its findings. ``problems`` concern the training as a whole."""

    losses: dict[int, float]
    problems: tuple[str, ...]
    loss_error: float
    steps_made: int
    faults: tuple[Fault, ...] = ()
    time_s: float = 0.0
    emulation: str = ""
    unreadable: tuple[str, ...] = ()
    report: str = ""

    @property
    def is_good(self) -> bool:
        return not self.problems and not self.unreadable and all(fault.is_survived for fault in self.faults)

    def row(self) -> dict:
        row = {k: v for k, v in asdict(self).items() if k != "losses"}
        return row | {"faults": [asdict(f) | {"survived": f.is_survived} for f in self.faults]}


def cluster_text(num_machines: int) -> str:
    """A cluster file of machines with a device each."""
    lines = ["[network]", "bandwidth_gbit_per_s = 1", "latency_us = 50"]
    for number in range(num_machines):
        share = SHARES[number % len(SHARES)]
        lines += ["[[machine]]", f'name = "machine-{number}"']
        lines.append(f'devices = [{{ name = "cpu-{share[2:]}", cpu_share = {share}, memory_gib = 2 }}]')
    return "\n".join(lines) + "\n"


def choose_kinds(names: Sequence[str], is_plain: bool, say: Say) -> tuple[Kind, ...]:
    """The kinds of these names; without names, all of them. Without a testbed the kinds that need one are
    left out, and ``say`` is called. Raises InputError if none is left."""
    unknown = [name for name in names if name not in KIND_NAMES]
    if unknown:
        raise InputError(
            f"no such kind of fault: {unknown[0]!r}", expected=", ".join(KIND_NAMES), got=unknown[0],
            hint=f"--kind {KIND_NAMES[0]}",
        )  # fmt: skip
    chosen = [kind_of(name) for name in dict.fromkeys(names)] or list(KINDS)
    left_out = [kind.name for kind in chosen if is_plain and kind.needs_testbed]
    why = "; ".join(probe().missing) or "--plain"
    if left_out:
        say(f"left out, as plain processes have no such thing ({why}): {', '.join(left_out)}")
    kept = tuple(kind for kind in chosen if kind.name not in left_out)
    if not kept:
        raise TestbedUnavailable(
            "none of these faults can be made by plain processes",
            expected="Linux, root, ip and tc (iproute2), cgroups with cpu and memory",
            got=why,
        )
    return kept


def draw_kinds(kinds: Sequence[Kind], count: int, rng: random.Random) -> list[Kind]:
    """Each kind as often as the others, in random order."""
    drawn: list[Kind] = []
    while len(drawn) < count:
        drawn += rng.sample(kinds, len(kinds))
    return drawn[:count]


@dataclass
class Chaos:
    """A bench: trainings are disturbed one after the other until all faults were made."""

    kinds: Sequence[Kind]
    num_faults: int
    seed: int
    setting: Setting
    num_machines: int = len(SHARES)
    is_plain: bool = False
    say: Say = lambda text: None

    def run(self) -> Iterator[Trained]:
        """The undisturbed training first, then the others, as soon as each is over."""
        self.say("a training without faults")
        with TemporaryDirectory(prefix="mixmesh-faults-") as name:
            undisturbed = self._train(Path(name) / "undisturbed", [], random.Random(self.seed), {})
            yield undisturbed
            if undisturbed.is_good:
                yield from self.disturb_all(undisturbed.losses, Path(name))

    def disturb_all(self, expected: dict[int, float], folder: Path) -> Iterator[Trained]:
        """Yields trainings until all faults were made. Each should have the ``expected`` losses by step;
        their files go to ``folder``."""
        rng = random.Random(self.seed)
        left, has_made_any = draw_kinds(self.kinds, self.num_faults, rng), True
        while left and has_made_any:
            trained = self._train(folder / f"{len(left)}-left", left, rng, expected)
            has_made_any = bool(trained.faults)
            yield trained

    def _train(
        self, folder: Path, left: list[Kind], rng: random.Random, expected: dict[int, float]
    ) -> Trained:
        """One training, under as many of the faults ``left`` as it has time for."""
        started_s, faults, report = time.monotonic(), [], ""
        with self._scene(folder) as scene:
            damage_seen: list[str] = []
            try:
                while left and self._wait_for_moment(scene, rng):
                    kind, machine = left.pop(0), rng.randrange(self.num_machines)
                    self.say(f"step {scene.step}, machine {machine}: {kind.text}")
                    faults.append(Fault(kind.name, machine, scene.step))
                    disturb(scene, kind, faults[-1], rng)
                    if (faults[-1].noticed_s or 0.0) > NOTICED_S:
                        faults[-1].said = scene.output.last()  # possibly the reason
                    damage_seen += unreadable(scene.checkpoints, scene.damaged)
                scene.wait(lambda: scene.is_over, "the end of the training")
            except Stuck as stuck:
                if faults and faults[-1].again_s is None:
                    faults[-1].problem = str(stuck)
                report = f"{stuck}\n{scene.output.last()}"
            damage_seen += unreadable(scene.checkpoints, scene.damaged)
            scene.journal.read()
            found = self._judge(scene.journal.lines, report.partition("\n")[0], expected)
            return replace(
                found, faults=tuple(faults), time_s=time.monotonic() - started_s,
                emulation=scene.bed.emulation, unreadable=tuple(dict.fromkeys(damage_seen)), report=report,
            )  # fmt: skip

    def _judge(self, lines: Sequence[Line], why_stuck: str, expected: dict[int, float]) -> Trained:
        """Judges a training by its steps; only by its losses if it is stuck."""
        history, training = last_executions(lines), self.setting.training
        losses = losses_of(history)
        whole = [*check_steps(history, training), *check_samples(history, training)]
        problems = [why_stuck] if why_stuck else whole
        return Trained(
            losses=losses,
            problems=(*problems, *(check_losses(losses, expected) if expected else ())),
            loss_error=loss_error(losses, expected),
            steps_made=len({(line.pid, line.step) for line in lines if line.step and not line.rank}),
        )

    @contextmanager
    def _scene(self, folder: Path) -> Iterator[Scene]:
        """A training that has been started, and that is gone afterwards."""
        output = Output()
        cluster = Cluster.parse(cluster_text(self.num_machines), where="bench faults")
        kind = PlainBed if self.is_plain else Testbed
        with ExitStack() as stack:
            bed: Bed = stack.enter_context(kind(cluster, on_output=output.take))
            checkpoints = folder / "checkpoints" if self.is_plain else bed.make_disk(DISK_BYTES)
            yield stack.enter_context(Scene(bed, output, folder, checkpoints, self.setting))

    def _has_time(self, scene: Scene) -> bool:
        """Whether a training has enough steps left for one more fault."""
        needed = MOST_STEPS + STEPS_BESIDE + 2 * self.setting.every
        return scene.step <= self.setting.training.steps - needed

    def _wait_for_moment(self, scene: Scene, rng: random.Random) -> bool:
        """Waits for a random moment while all machines train; False if the training ended before."""
        scene.wait(lambda: scene.is_whole() or scene.is_over, "a step of all machines")
        scene.wait(
            lambda: len(scene.good_checkpoints()) >= KEPT_CHECKPOINTS or scene.is_over,
            "the first checkpoints",
        )
        step = scene.step + rng.randint(1, MOST_STEPS)
        delay_s = rng.uniform(0, 2 * self.setting.step_s)
        scene.wait(lambda: scene.step >= step or scene.is_over, f"step {step}")
        scene.poll(delay_s)
        return self._has_time(scene)


def report(trainings: Sequence[Trained], num_faults: int, command: str, seed: int) -> dict:
    """The object that ``--json`` prints and the file holds."""
    undisturbed, *disturbed = trainings
    faults = [fault for trained in disturbed for fault in trained.faults]
    survived = sum(fault.is_survived for fault in faults)
    noticed = [fault.noticed_s for fault in faults if fault.noticed_s is not None]
    problems = [*undisturbed.problems, *(text for trained in disturbed for text in trained.problems)]
    damaged = [text for trained in trainings for text in trained.unreadable]
    worst = max((trained.loss_error for trained in disturbed), default=0.0)
    targets = {
        f"{survived} of {num_faults} survived": survived == num_faults,
        "every sample once in every epoch, every loss an undisturbed training's": not problems,
        f"{len(damaged)} checkpoints unreadable": not damaged,
        f"noticed within {NOTICED_S:g} s, at most {max(noticed, default=0.0):.1f}": max(noticed, default=0.0)
        <= NOTICED_S,
    }
    saved = [fault.saved_s for fault in faults if fault.saved_s is not None]
    if saved:
        text = f"a checkpoint finished within {SAVED_S:g} s of SIGTERM, at most {max(saved):.1f}"
        targets[text] = max(saved) <= SAVED_S
    return {
        "bench": "faults",
        "command": command,
        "revision": revision(),
        "seed": seed,
        "emulation": sorted({trained.emulation for trained in trainings}),
        "time_s": sum(trained.time_s for trained in trainings),
        "faults": num_faults,
        "survived": survived,
        "loss_error": worst,
        "loss_tolerance": LOSS_TOLERANCE,
        "unreadable": damaged,
        "problems": problems,
        "targets_met": sum(targets.values()),
        "targets": targets,
        "kinds": [kind_row(kind, faults) for kind in KINDS if any(f.kind == kind.name for f in faults)],
        "undisturbed": undisturbed.row(),
        "trainings": [trained.row() for trained in disturbed],
    }


def kind_row(kind: Kind, faults: Sequence[Fault]) -> dict:
    """A summary of the faults of one kind: the longest times in seconds, None if none was taken."""
    own = [fault for fault in faults if fault.kind == kind.name]
    longest = {
        f"longest_{name}": max((t for t in (getattr(f, name) for f in own) if t is not None), default=None)
        for name in ("noticed_s", "saved_s", "again_s", "whole_s")
    }
    return {"kind": kind.name, "made": len(own), "survived": sum(f.is_survived for f in own), **longest}
