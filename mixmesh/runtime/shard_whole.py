"""The tensor that a shard is a piece of, and the checks that all functions on shards make against it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base.callers import is_called_by
from ..errors import InputError
from ..frontend.trace.compiled import is_within_compiled
from .comm import Comm
from .exporting import EXPORT, exported
from .shards import Stored


@dataclass(frozen=True, eq=False)
class Whole:
    """The tensor that a shard is a piece of. ``written`` is called when a piece was changed in place."""

    stored: Stored
    comm: Comm
    written: Callable[[], object] | None = None

    def __deepcopy__(self, _memo):
        return self

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.stored.shape)

    @property
    def spokesman(self) -> int:
        """The rank whose number stands for this rank's piece: the first of all replicas."""
        held = self.stored.counted
        return self.comm.rank if held.sizes or not held.ranks else held.ranks[0]

    def is_like(self, other: Whole) -> bool:
        return self.stored.held == other.stored.held and self.stored.shape == other.stored.shape

    @property
    def text(self) -> str:
        stored, rank = self.stored, self.comm.rank
        if stored.held.sizes:
            start, size = stored.held.piece(rank)
            where = f"{start} to {start + size} of dim {stored.held.dim}"
        else:
            where = "whole" if rank in stored.held.ranks else "nothing"
        return f"{stored.name} {list(stored.shape)}, rank {rank} holds {where}"


PRUNED = (
    'prune.identity(module, "weight") before planning; later, on every rank, '
    "module.weight_mask.copy_(mask) with a mask made of module.weight_orig.full_tensor()"
)
# functions, also those in place, that draw a random number for each element
DRAWS = frozenset(
    "bernoulli cauchy dropout exponential geometric log_normal normal poisson rand_like randint_like "
    "randn_like random uniform".split()
)


class ShardBase(torch.Tensor):
    """A rank's piece of ``whole``; its one subclass is ``ShardTensor``, which answers for the whole."""

    whole: Whole


def check_alike(name: str, first: ShardBase, tensors: Iterable[Tensor]) -> None:
    """Raises InputError if one of ``tensors``, arguments of ``name``, is cut differently from ``first``."""
    for x in tensors:
        if isinstance(x, ShardBase):
            if x.whole is not first.whole and not x.whole.is_like(first.whole):
                raise refusal(name, first.whole, f"beside {x.whole.text}, which is cut otherwise")
        elif x.ndim and x.shape != first.shape:
            raise refusal(name, first.whole, f"beside a plain tensor of shape {list(x.shape)}")


def check_no_gradient(name: str, first: ShardBase, tensors: Iterable[Tensor]) -> None:
    """Raises InputError if one of ``tensors`` has a gradient and is no shard: from a function on pieces, such
    as ``p / p.norm()``, each rank would get only its piece's part of it, where one device has their sum."""
    for x in tensors if torch.is_grad_enabled() else ():
        if x.requires_grad and not isinstance(x, ShardBase):
            raise InputError(
                f"beside {first.whole.stored.name}, {name} would give a tensor one rank's part of a gradient",
                expected="constants, and parameters cut alike, beside a parameter that is cut",
                got=f"{name} of {first.whole.text}, beside a tensor of shape {list(x.shape)} with a gradient",
                hint=(
                    "compute it in the model's forward, or in a module with parameters as loss= of prepare",
                    "x.detach(), if no gradient should go back from here",
                    'a plan that keeps parameters whole: planner="ddp-proportional"',
                ),
            )


def refusal(name: str, whole: Whole, beside: str = "") -> InputError:
    """The error for a function that needs elements of other ranks."""
    if name.removesuffix("_") in DRAWS:
        return _refused_draw(name, whole)
    if is_called_by("torch.export"):
        return exported(EXPORT)
    by_dynamo = ("a training step without torch.compile around it",) if is_within_compiled() else ()
    by_pruning = (PRUNED,) if is_called_by("torch.nn.utils.prune") else ()
    return InputError(
        f"{name} of {whole.stored.name} needs elements that other ranks hold",
        expected="functions element by element, and norm, sum, mean, max, min, any, all of the whole",
        got=f"{name} of {whole.text} {beside}".rstrip(),
        hint=by_pruning
        or (
            "p.full_tensor() is the whole, p.to_local() this rank's piece",
            'a plan that keeps parameters whole: planner="ddp-proportional"',
            *by_dynamo,
        ),
    )


def _refused_draw(name: str, whole: Whole) -> InputError:
    """The error for random numbers drawn for the elements of a piece."""
    return InputError(
        f"{name} of {whole.stored.name} would draw numbers for a piece, and other ones than on one device",
        expected="numbers drawn for the whole tensor, the same ones on every rank",
        got=f"{name} of {whole.text}",
        hint=(
            "g = torch.Generator().manual_seed(0), alike on every rank, and p.grad.add_(torch.randn(p.shape, "
            "generator=g)): a rank takes those for its piece",
            'a plan that keeps parameters whole, and the same seed on every rank: planner="ddp-proportional"',
        ),
    )
