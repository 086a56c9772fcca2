"""Judges a training that was disturbed: every step was made, every sample was seen once in an epoch, and the
losses are those of the undisturbed training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from mixmesh.checkpoint.manifest import Damaged, Manifest, check_files, checkpoints_in

from .journal import Line

LOSS_TOLERANCE = 1e-6
SHOWN = 5  # samples or steps that a message names


@dataclass(frozen=True)
class Training:
    """The size of a training: samples in an epoch, samples in a batch, and the number of epochs."""

    samples: int
    batch_size: int
    epochs: int

    @property
    def steps_per_epoch(self) -> int:
        return self.samples // self.batch_size

    @property
    def steps(self) -> int:
        return self.steps_per_epoch * self.epochs


def check_steps(history: Mapping[int, Sequence[Line]], training: Training) -> list[str]:
    """Steps that are missing, that not all ranks have finished, or whose ranks differ in the loss."""
    found = []
    missing = [step for step in range(1, training.steps + 1) if step not in history]
    if missing:
        found.append(f"{len(missing)} steps were not made: {named(missing)}")
    for step, lines in history.items():
        if sorted(line.rank for line in lines) != list(range(lines[-1].world_size)):
            ranks = ", ".join(str(line.rank) for line in lines)
            found.append(f"step {step}: of {lines[-1].world_size} ranks only these made it last: {ranks}")
        elif len({line.loss for line in lines}) > 1:
            found.append(f"step {step}: ranks differ in its loss")
    return found


def samples_of(lines: Sequence[Line], batch_size: int) -> list[int]:
    """The samples of one step. A rank that has loaded the whole batch cuts it, so its line does not show the
    parts; if all ranks have, they must have loaded the same batch."""
    parts = [line.ids for line in lines if len(line.ids) < batch_size]
    if parts:
        return list(chain.from_iterable(parts))
    batches = {tuple(sorted(line.ids)) for line in lines}
    return sorted(chain.from_iterable(batches))


def check_samples(history: Mapping[int, Sequence[Line]], training: Training) -> list[str]:
    """Samples that an epoch of the committed history has lost, or seen more than once."""
    found = []
    for epoch in range(training.epochs):
        first = epoch * training.steps_per_epoch + 1
        steps = range(first, first + training.steps_per_epoch)
        seen = Counter(
            chain.from_iterable(samples_of(history.get(step, ()), training.batch_size) for step in steps)
        )
        lost = [number for number in range(training.samples) if not seen[number]]
        doubled = [number for number, count in sorted(seen.items()) if count > 1]
        if lost:
            found.append(f"epoch {epoch}: {len(lost)} samples lost: {named(lost)}")
        if doubled:
            found.append(f"epoch {epoch}: {len(doubled)} samples seen more than once: {named(doubled)}")
    return found


def losses_of(history: Mapping[int, Sequence[Line]]) -> dict[int, float]:
    """The loss of each step, from its first line."""
    return {step: lines[0].loss for step, lines in history.items() if lines}


def loss_error(losses: Mapping[int, float], expected: Mapping[int, float]) -> float:
    """The largest relative difference of any step that both have made."""
    return max((abs(losses[s] / expected[s] - 1) for s in losses.keys() & expected.keys()), default=0.0)


def check_losses(losses: Mapping[int, float], expected: Mapping[int, float]) -> list[str]:
    """Steps whose loss differs from the undisturbed training's."""
    # not >, so that nan counts as different
    off = [s for s in sorted(losses) if not abs(losses[s] / expected[s] - 1) <= LOSS_TOLERANCE]
    if not off:
        return []
    return [
        f"{len(off)} losses differ from the undisturbed ones, at first step {off[0]}: "
        f"{losses[off[0]]!r} in place of {expected[off[0]]!r}"
    ]


def unreadable(folder: Path, damaged: set[str]) -> list[str]:
    """The damaged checkpoints, except those that were ``damaged`` on purpose. Checkpoints may be written and
    removed at the same time."""
    found = []
    for path in checkpoints_in(folder):
        if path.name in damaged:
            continue
        try:
            files = Manifest.read(path).files
            check_files(path, files, files)
        except Damaged as damage:
            if path.is_dir():  # it was not removed meanwhile
                found.append(f"{path.name}: {damage}")
    return found


def named(numbers: Sequence[int]) -> str:
    """The first of some numbers."""
    text = ", ".join(map(str, numbers[:SHOWN]))
    return text + (", ..." if len(numbers) > SHOWN else "")
