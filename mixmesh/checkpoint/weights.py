"""``mixmesh.checkpoint.load_weights``: initial weights, read by each rank straight into its own part.

``weight_files`` finds each tensor in the files, ``matching`` assigns it to a tensor of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..errors import InputError, MixmeshError, PlanError
from ..frontend.trace.compiled import uncompiled
from ..frontend.trace.dtypes import TORCH_DTYPE
from ..runtime.shard_tensor import ShardTensor
from .background import finish
from .manifest import digest_of
from .matching import Match, match
from .ranks import Ranks, text_of
from .tensor_files import bytes_of, copy_box
from .weight_files import Held, held_tensors

T = TypeVar("T")


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Gives ``model`` the weights of a safetensors file, of several with an index, or of a folder made by
    ``save_pretrained``. Collective.

    Each rank reads its own pieces, some rows at a time; all machines must see the same files. Names and
    shapes must be those of ``model.state_dict()`` on a single device, except that a tied weight may have any
    of its names, and that all names of the files, or of the model, may have one prefix. Values of another
    dtype are accepted if the model's dtype holds each of them exactly, as float32 holds bfloat16. Optimizers
    and everything else stay unchanged.

    Raises InputError on all ranks for files that cannot be read, and PlanError, before anything is changed,
    for weights of another model.
    """
    model, place = uncompiled(model), Path(path)
    ranks = Ranks.of(model)
    finish(model)
    with ranks.meeting("checkpoint.load_weights"):
        held = together(ranks, lambda: held_tensors(place))
        check_same_files(ranks, held, place)
        matches = together(ranks, lambda: match(model, held, place))
        together(ranks, lambda: check_ties(matches, place))
        together(ranks, lambda: read_all(matches))
        if (runtime := getattr(model, "_runtime", None)) is not None:
            runtime.values_changed()


def together(ranks: Ranks, make: Callable[[], T]) -> T:
    """Runs ``make()`` and returns its value; if it fails on any rank, all raise the error of the first such
    rank. Collective."""
    results: list[T] = []
    error: MixmeshError | None = None
    try:
        results.append(make())
    except MixmeshError as failure:
        error = failure
    except OSError as failure:
        error = InputError(
            "the weights could not be read",
            got=text_of(failure),
            where=str(failure.filename or ""),
            hint="start again: some of the model's weights may be new ones, and others not",
        )
    if first := next(filter(None, ranks.everyones(error)), None):
        raise first
    (result,) = results
    return result


def check_same_files(ranks: Ranks, held: dict[str, Held], place: Path) -> None:
    """Raises InputError on all ranks if they do not see the same files. Collective."""
    told = sorted(f"{h.part} {h.path.name} {h.first_byte}" for h in held.values())
    digests = ranks.everyones(digest_of("\n".join(told).encode()))
    other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if other:
        raise InputError(
            "the ranks see different weights",
            expected="the same files on all machines",
            got=f"others on rank {other[0]} than on rank 0",
            where=str(place),
            hint="a folder that all machines share",
        )


def own_box(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]] | None:
    """The part of a tensor that this rank holds, in its own memory, and where it begins in the whole; None if
    the rank holds no part of it."""
    if not isinstance(tensor, ShardTensor):
        return tensor, (0,) * tensor.ndim
    local, whole = tensor.to_local(), tensor.whole
    return (local, whole.stored.origin(whole.comm.rank)) if local.numel() else None


def check_ties(matches: Sequence[Match], place: Path) -> None:
    """Raises PlanError if files have a tied weight under several of its names with different values. Each
    rank compares its own part."""
    for matched in matches:
        first, *others = matched.held
        box = own_box(matched.own.tensor) if others else None
        if box is None:
            continue
        expected = _copy_of(first, *box)
        for other in others:
            if other.part.dtype != first.part.dtype or bytes_of(_copy_of(other, *box)) != bytes_of(expected):
                raise PlanError(
                    "a weight that is tied in the model is there twice",
                    expected=f"{first.part.name} and {other.part.name} with equal values",
                    got="different ones",
                    where=str(place),
                    hint="a model whose weights are not tied, or files without one of the two",
                )


def _copy_of(held: Held, local: Tensor, offsets: tuple[int, ...]) -> Tensor:
    """The values of ``local`` in a file, in host memory."""
    copy = torch.empty(local.shape, dtype=TORCH_DTYPE[held.part.dtype])
    read_into(copy, held, offsets)
    return copy


@torch.no_grad()
def read_all(matches: Sequence[Match]) -> None:
    """Reads this rank's part of every tensor into its place."""
    for matched in matches:
        if (box := own_box(matched.own.tensor)) is not None:
            read_into(box[0], matched.held[0], box[1])


def read_into(local: Tensor, held: Held, offsets: tuple[int, ...]) -> None:
    """Reads the box of the shape of ``local`` that begins at ``offsets``. Raises OSError."""
    part = held.part
    copy_box(local, held.path, held.first_byte, part.shape, TORCH_DTYPE[part.dtype], offsets)
