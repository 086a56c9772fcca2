"""``mixmesh.checkpoint.save``: all that a training needs to go on, written by all ranks together."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ..base.files import absolute
from ..base.progress import tell_warning
from ..base.units import ranks_text
from ..errors import InputError
from ..frontend.trace.compiled import uncompiled
from ..runtime.agreement import by_value
from ..runtime.parallel_model import ParallelModel
from ..runtime.versions import versions_text
from ..training.preparation.saving import check_has_state
from . import background
from .manifest import REMOVED, SCHEDULER_CLASS, Manifest, checkpoints_in, number_of
from .pretrained import PRETRAINED, pretrained_files
from .random_state import random_state
from .ranks import FilesFailure, Ranks, text_of
from .state import NamedOptimizer, entries_of_empty, model_tensors, own_model_tensors
from .storage import RankPart, Writer
from .values import encode


@dataclass(frozen=True)
class Content:
    """The part of a checkpoint that one rank puts into it: its tensors by name, the manifest's part that all
    ranks share, this rank's own, and the plan."""

    tensors: dict[str, Tensor]
    manifest: Manifest
    part: RankPart
    plan: str


def save(
    folder: str | Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: optim.Optimizer | None = None,
    scheduler: Any = None,
    loader: Any = None,
    scaler: Any = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path | None:
    """Writes a checkpoint into ``folder``, which all ranks share, and returns the checkpoint's own folder.
    Collective.

    ``model`` is a parallel model or one on a single device, between two steps. Random numbers are always
    saved, and so are the ``state_dict``s of ``scheduler``, ``loader`` and ``scaler``. ``extra`` holds plain
    values of your own; the first rank's are saved. ``keep`` is the number of checkpoints that stay; older
    ones are removed (None: all stay).

    Each rank writes its own pieces, one tensor at a time. The checkpoint gets its name when all of it is on
    the disk. If it cannot be written, for instance because the disk is full, the first rank warns, all ranks
    get None, and existing files are unchanged. Raises InputError on all ranks for a folder that cannot be
    written to or has a checkpoint newer than the last ``save`` or ``load`` of this training, a value that
    cannot be saved (``values.encode``), or ranks that save different steps or parts.
    """
    parts = {"scheduler": scheduler, "loader": loader, "scaler": scaler}
    with _begun("checkpoint.save", model, optimizer, step, parts, extra, keep) as begun:
        return write(Path(folder), begun.ranks, begun.content, keep)


def save_async(
    folder: str | Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: optim.Optimizer | None = None,
    scheduler: Any = None,
    loader: Any = None,
    scaler: Any = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> background.Saving:
    """Does the same as ``save``, in a separate thread during the training. This call takes as long as copying
    this rank's tensors into host memory, which must have room for them. Collective.

    The ``result()`` of the returned object returns or raises what ``save`` does. One checkpoint is written at
    a time: the next call, and ``load``, wait for the one before. Wait for the last one before process groups
    are destroyed.
    """
    parts = {"scheduler": scheduler, "loader": loader, "scaler": scaler}
    with _begun("checkpoint.save_async", model, optimizer, step, parts, extra, keep) as begun:
        copies = background.staged(begun.content.tensors, begun.buffers)
        begun.ranks.group()  # a group is made by the thread that trains
    content = replace(begun.content, tensors=copies)
    write_it = partial(write, Path(absolute(str(folder))), begun.ranks.unwatched, content, keep)
    return background.begin(uncompiled(model), begun.ranks, copies, write_it)


@dataclass(frozen=True)
class _Begun:
    """A checkpoint ready to be written. ``buffers`` are those of the one before, for reuse."""

    ranks: Ranks
    content: Content
    buffers: Mapping[str, Tensor]


@contextmanager
def _begun(
    what: str,
    model: nn.Module,
    optimizer: optim.Optimizer | None,
    step: int,
    parts: Mapping[str, Any],
    extra: Mapping[str, Any] | None,
    keep: int | None,
) -> Iterator[_Begun]:
    """A context in which all ranks meet for ``what``, after waiting for the checkpoint before. Collective."""
    model = uncompiled(model)
    ranks = Ranks.of(model)
    buffers = background.finish(model)
    with ranks.meeting(what):
        check_alike(ranks, step, {"optimizer": optimizer, **parts})
        yield _Begun(ranks, content_of(ranks, step, model, optimizer, parts, extra, keep), buffers)


def check_alike(ranks: Ranks, step: int, parts: Mapping[str, Any]) -> None:
    """Raises InputError on all ranks unless they save the same step and the same parts. Collective."""
    given = ", ".join((f"step {step}", "model", *(name for name, part in parts.items() if part is not None)))
    by_given = by_value(dict(enumerate(ranks.everyones(given))))
    if len(by_given) > 1:
        raise InputError(
            "the ranks save different checkpoints",
            expected="the same step and the same parts on every rank: each writes its own pieces",
            got="; ".join(f"{what} on {ranks_text(those)}" for what, those in by_given.items()),
            hint="mixmesh.checkpoint.save(...) outside of `if rank == 0:`, with the same arguments",
        )


def check_numbers(step: int, keep: int | None) -> None:
    """Raises InputError unless the step and the number of checkpoints are valid."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise InputError("a checkpoint is of a step", expected="a whole number, 0 or more", got=repr(step))
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise InputError(
            "so many checkpoints cannot be kept", expected="1 or more, None for all", got=repr(keep)
        )


def content_of(
    ranks: Ranks,
    step: int,
    model: nn.Module,
    optimizer: optim.Optimizer | None,
    parts: Mapping[str, Any],
    extra: Mapping[str, Any] | None,
    keep: int | None,
) -> Content:
    """Everything that this rank has to write. Its tensors are the model's own, not copies. Raises InputError
    for values that cannot be saved."""
    check_numbers(step, keep)
    if isinstance(model, ParallelModel):
        model._runtime.check_values()
        model.check_replicas()
    tensors, described = own_model_tensors(model, ranks.rank), None
    optimizer_values: dict[str, Any] = {}
    if optimizer is not None:
        named = NamedOptimizer.of(model, optimizer, ranks.rank)
        state, optimizer_values = named.state()
        tensors |= state
        described = named.description()
    values = {}
    for name, part in parts.items():
        if part is not None:
            check_has_state(name, part)
            if not hasattr(part, "state_dict"):
                got = f"a {type(part).__name__}"
                raise InputError(f"{name} has no state", expected="an object with state_dict", got=got)
            values[name] = encode(part.state_dict(), name)
    if parts.get("scheduler") is not None:
        values[SCHEDULER_CLASS] = encode(type(parts["scheduler"]).__name__, "the scheduler's class")
    if extra is not None:
        values["extra"] = encode(dict(extra), "extra")
    if pretrained := pretrained_files(model):
        values[PRETRAINED] = encode(pretrained, "the model's config")
    plan = model._runtime.forms.plan if isinstance(model, ParallelModel) else None
    manifest = Manifest(
        step=step,
        world_size=ranks.world_size,
        versions=versions_text(),
        cluster_fingerprint=plan.cluster_fingerprint if plan is not None else "",
        tensors=entries_of_empty(model_tensors(model)),
        values=values,
        optimizer=described,
    )
    part = RankPart(ranks.rank, None, random_state(model), optimizer_values)
    return Content(tensors, manifest, part, str(plan) if plan is not None and not ranks.rank else "")


def write(folder: Path, ranks: Ranks, content: Content, keep: int | None) -> Path | None:
    """Writes ``content`` and removes all checkpoints but the newest ``keep``. Collective."""
    writer = Writer(folder, content.manifest, content.part, content.plan)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        ranks.run(lambda **group: dcp.save(content.tensors, storage_writer=writer, planner=planner, **group))
    except FilesFailure as failure:
        if not ranks.rank:
            newest = next((path.name for path in checkpoints_in(folder)), "")
            stays = f"{newest} stays the newest one" if newest else "none was written before"
            step = content.manifest.step
            tell_warning(f"the checkpoint of step {step} could not be written ({failure}); {stays}")
        return None
    finally:
        if writer.unfinished is not None:  # has been renamed by now, or is of no use
            shutil.rmtree(writer.unfinished, ignore_errors=True)
    if keep is not None and not ranks.rank:
        remove_old(folder, writer.name, keep)
    return folder / writer.name


def remove_old(folder: Path, newest: str, keep: int) -> None:
    """Removes all checkpoints up to ``newest`` except the last ``keep`` of them. Newer ones belong to another
    training and do not count. Each is renamed first, so that no folder ever looks like a checkpoint while it
    is being removed."""
    own = [path for path in checkpoints_in(folder) if number_of(path) <= number_of(folder / newest)]
    for path in own[keep:]:
        removed = path.with_name(f"{REMOVED}{path.name}-{secrets.token_hex(4)}")
        try:
            path.rename(removed)
            shutil.rmtree(removed)
        except OSError as error:
            tell_warning(f"the old checkpoint {path.name} could not be removed: {text_of(error)}")
