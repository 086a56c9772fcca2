"""Checks that whole batches, which every rank makes for itself, are the same on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...errors import InputError
from ...runtime.first_rank import everyones
from ...runtime.watch import in_call

HINTS = (
    "seed what the data set draws from alike on all ranks: torch.manual_seed(0), or a generator with a seed",
    "or a data set with __getitem__: then the first rank's order is every rank's, and none loads other rows",
)
END = "the end of the data"


def check_same(batch: Any, *hints: str) -> None:
    """Raises InputError, on all ranks, if their batches differ. Collective."""
    check_digests(everyones(digest(batch)), *hints)


def check_digests(digests: Sequence[str], *hints: str) -> None:
    """Raises InputError if the batches of the ranks have different digests; ``hints`` say what to do."""
    if len(set(digests)) > 1:
        ended = [rank for rank, each in enumerate(digests) if each == END]
        raise InputError(
            "the ranks did not make the same batch",
            expected="the same samples, and the same random numbers where samples are changed at random",
            got=f"{END} on rank {ended[0]}, and not on all"
            if ended
            else f"{len(set(digests))} different batches on {len(digests)} ranks",
            hint=hints,
        )


def digest(batch: Any) -> str:
    """A text that depends on all values of the tensors of a batch."""
    if batch is END:
        return END
    state = hashlib.blake2b(digest_size=8)
    leaves = pytree.tree_flatten_with_path(batch)[0]
    tensors = {pytree.keystr(path): x for path, x in leaves if isinstance(x, torch.Tensor)}
    for name, value in sorted(tensors.items()):
        state.update(name.encode() + repr(tuple(value.shape)).encode())
        state.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def same_on_all(
    batches: Iterable[Any], on_digest: Callable[[str], object] = lambda digest: None
) -> Iterator[Any]:
    """Yields ``batches``, comparing each, and their end, with the other ranks'. ``on_digest`` is called with
    the digest of each batch before it is yielded. Collective."""

    def check(own: str) -> None:
        with in_call("a batch of the data"):
            check_digests(everyones(own), *HINTS)
        on_digest(own)

    yield from digested(batches, check)
    with in_call("a batch of the data"):
        check_same(END, *HINTS)


def digested(batches: Iterable[Any], on_digest: Callable[[str], object]) -> Iterator[Any]:
    """Yields ``batches``; ``on_digest`` is called with each one's digest first."""
    for batch in batches:
        on_digest(digest(batch))
        yield batch
