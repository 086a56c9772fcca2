"""``mixmesh.checkpoint.load`` and ``latest``: the newest undamaged checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from ..base.progress import tell_warning
from ..errors import InputError, PlanError
from ..frontend.trace.compiled import uncompiled
from .background import finish
from .manifest import SCHEDULER_CLASS, Damaged, Manifest, check_files, checkpoints_at
from .random_state import restore_random_state
from .ranks import FilesFailure, Ranks
from .state import NamedOptimizer, check_model, load_optimizer_room, model_tensors, with_elements
from .storage import Reader, note_newest
from .values import decode


@dataclass(frozen=True)
class Loaded:
    """The loaded checkpoint: its folder, the step after which it was saved, and the ``extra`` given to
    ``save``."""

    path: Path
    step: int
    extra: dict[str, Any]


def latest(folder: str | Path) -> Path | None:
    """The newest undamaged checkpoint in ``folder``, or ``folder`` itself if it is one; None if there is no
    checkpoint.

    All of its files are read. A damaged one is skipped with a warning. Raises InputError for a file, and if
    there are checkpoints and all are damaged. Not collective.
    """
    newest = newest_good(Path(folder), Ranks(0, 1, None))
    return None if newest is None else newest[0]


def load(
    folder: str | Path,
    *,
    model: nn.Module,
    optimizer: optim.Optimizer | None = None,
    scheduler: Any = None,
    loader: Any = None,
    scaler: Any = None,
) -> Loaded | None:
    """Restores the newest undamaged checkpoint in ``folder``, or the one that ``folder`` itself is, such as
    ``run/000007-step-300``; if there is no checkpoint, changes nothing and returns None. Collective.

    It may have been saved under any plan, on any number of ranks, or by a single device. All ranks together
    read the files and compare them with their checksums; a damaged checkpoint is skipped with a warning for
    an older one. Then each rank reads its own pieces, one tensor at a time. Only the given parts are loaded:
    without an optimizer, for instance, only the model. Random numbers are restored; on another number of
    ranks all get the first rank's.

    Raises InputError for a file, and if all checkpoints are damaged; and PlanError, before anything is
    changed, if the newest one is of another model, optimizer or scheduler or lacks the state of a given part.
    """
    model = uncompiled(model)
    ranks = Ranks.of(model)
    finish(model)
    with ranks.meeting("checkpoint.load"):
        newest = newest_good(Path(folder), ranks)
        note_newest(Path(folder) if newest is None else newest[0].parent)
        if newest is None:
            return None
        path, manifest = newest
        parts = {"scheduler": scheduler, "loader": loader, "scaler": scaler}
        states = decoded_states(manifest, parts)
        tensors = model_tensors(model)
        check_model(tensors, manifest)
        named: NamedOptimizer | None = None
        state: dict[str, dict[str, Any]] = {}
        if optimizer is not None:
            if manifest.optimizer is None:
                raise lacks("optimizer")
            named = NamedOptimizer.of(model, optimizer, ranks.rank)
            state, room = load_optimizer_room(named, manifest)
            tensors |= room
        read(path, manifest, ranks, with_elements(tensors))
        if (runtime := getattr(model, "_runtime", None)) is not None:
            runtime.values_changed()
        if named is not None and manifest.optimizer is not None:
            named.load(state, manifest.optimizer)
        for name, part in parts.items():
            if part is not None:
                part.load_state_dict(states[name])
        restore_random_state(model, manifest, ranks.rank, ranks.world_size)
        ranks.set_step(manifest.step)
        return Loaded(path, manifest.step, states.get("extra", {}))


def newest_good(folder: Path, ranks: Ranks) -> tuple[Path, Manifest] | None:
    """The newest undamaged checkpoint of a folder, or the checkpoint that the folder is, with its manifest.
    Collective."""
    reasons: list[str] = []
    for path in ranks.from_first(lambda: checkpoints_at(folder)):
        manifest, reason = checked(path, ranks)
        if manifest is not None:
            return path, manifest
        reasons.append(f"{path.name}: {reason}")
        if not ranks.rank:
            tell_warning(f"the checkpoint {path.name} is skipped: {reason}")
    if reasons:
        raise InputError(
            "no checkpoint can be resumed",
            expected="one that is as it was written",
            got="; ".join(reasons[:3]) + (f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""),
            where=str(folder),
            hint=("mixmesh run --fresh starts over, and keeps them", "or another folder"),
        )
    return None


def checked(path: Path, ranks: Ranks) -> tuple[Manifest | None, str]:
    """The manifest of an undamaged checkpoint, or None and the damage. Each rank reads a part of the files.
    Collective."""
    manifest, reason = None, ""
    try:
        manifest = Manifest.read(path)
        files = manifest.files
        names = sorted(files, key=lambda name: files[name].size_bytes)
        check_files(path, files, names[ranks.rank :: ranks.world_size])
    except Damaged as damage:
        manifest, reason = None, str(damage)
    reason = next(filter(None, ranks.everyones(reason)), "")
    return (None if reason else manifest), reason


def decoded_states(manifest: Manifest, parts: dict[str, Any]) -> dict[str, Any]:
    """The plain states of a checkpoint. Raises PlanError if it lacks the state of one of ``parts`` that is to
    be loaded, or has that of a scheduler of another class."""
    for name, part in parts.items():
        if part is not None and name not in manifest.values:
            raise lacks(name)
    states = {name: decode(value) for name, value in manifest.values.items()}
    if parts["scheduler"] is not None:
        own = type(parts["scheduler"]).__name__
        check_scheduler(own, saved=states.get(SCHEDULER_CLASS, own))
    return states


def check_scheduler(own: str, saved: str) -> None:
    """Raises PlanError unless both classes are the same: schedulers of PyTorch take over the state of any
    other one, of which some fields then count and others do not."""
    if own != saved:
        raise PlanError(
            "the checkpoint is of another scheduler",
            expected=f"{saved}, as in the checkpoint",
            got=own,
            hint=(
                "a scheduler of this class",
                "load(...) without scheduler, and the new one made after it",
                "mixmesh run --fresh",
            ),
        )


def lacks(what: str) -> PlanError:
    """The error for a checkpoint that has no state of a part that is to be loaded."""
    return PlanError(
        f"the checkpoint has no {what}",
        expected=f"one that was saved with a {what}",
        got=f"a {what} to continue, and none in the checkpoint",
        hint=f"load(...) without {what} to begin with a new one, or mixmesh run --fresh",
    )


def read(path: Path, manifest: Manifest, ranks: Ranks, tensors: dict[str, Any]) -> None:
    """Reads this rank's pieces of ``tensors`` in place. Collective."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = Reader(path, manifest)
    try:
        ranks.run(lambda **group: dcp.load(tensors, storage_reader=reader, planner=planner, **group))
    except FilesFailure as failure:
        raise InputError(
            "the checkpoint could not be read", got=str(failure), where=str(path), hint="start again"
        ) from None
