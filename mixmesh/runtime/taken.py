"""Takes the tensors of a model into a parallel one: as pieces of the original's tensors, or as tensors that a
parallel model already holds and whose pieces have moved to other ranks (``reshare``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..lang.ir import REPLICATE, Program, owned_type, stage_of
from .comm import Comm
from .layout import Layout
from .original import TakenOver
from .owned import Owned, WholeParams
from .shard_numbers import Off
from .shard_tensor import ShardTensor, plain, shard
from .shard_whole import Whole
from .shards import Stored


@dataclass(frozen=True)
class Before:
    """The state of a shown tensor before its pieces moved: the ``piece`` that it holds now, and the tensor
    that its program ran on, which for an owned parameter was a working copy."""

    piece: Tensor
    used: Tensor


@dataclass
class Taken:
    """The tensors of a model on their way into the parallel one: ``shown`` by the original's tensor,
    ``inner`` by the shown parameter, ``params`` and ``buffers`` the shown ones by every name. ``before``, by
    shown tensor, is given for a parallel model that shows these tensors already: the objects stay the same
    and get other pieces."""

    comm: Comm
    stored: Mapping[str, Stored]
    owners: Mapping[Tensor, tuple[Layout, int]]
    before: Mapping[Tensor, Before] | None = None

    def __post_init__(self) -> None:
        self.shown: dict[Tensor, Tensor] = {}
        self.swapped: dict[Tensor, tuple[Tensor, Stored]] = {}
        self.inner: dict[nn.Parameter, nn.Parameter] = {}
        self.wholes: WholeParams | None = None
        self._owned: dict[nn.Parameter, Owned] = {}
        self.params: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}

    def param(self, name: str, whole: nn.Parameter) -> nn.Parameter:
        if whole in self.shown:
            return _parameter(self.shown[whole])
        stored, comm = self.stored[name], self.comm
        used_as, stage = self.owners.get(whole, (stored.held, 0))
        if self.before is not None:
            shown = _parameter(_heir(whole))
            mine = self._again(name, shown, self.before[shown], stored, used_as, stage)
        elif isinstance(whole, TakenOver):
            shown = _parameter(_shared(whole, stored, comm, is_owned=bool(stage)))
            mine = nn.Parameter(plain(shown).detach(), requires_grad=whole.requires_grad)
        else:
            # a rank that does not use it holds neither rows nor elements of it
            held = replace(stored, held=used_as) if comm.rank in used_as.ranks else stored
            piece = held.piece(whole, comm.rank, comm.device)
            mine = nn.Parameter(piece, requires_grad=whole.requires_grad)
            written = None
            if stage and comm.rank in used_as.ranks:
                owned = Owned.of(name, mine, stored.held, used_as.ranks, comm.rank, stage)
                mine = owned.piece
            if stage:
                written = self._written
            shown = _show(mine, stored, comm, written)
            if stage and comm.rank in used_as.ranks:
                self._owned[shown] = owned
        self.shown[whole] = shown
        self.swapped[whole] = (shown, stored)
        self.inner[shown] = mine
        return shown

    def _again(
        self, name: str, shown: nn.Parameter, before: Before, stored: Stored, used_as: Layout, stage: int
    ) -> nn.Parameter:
        """Gives a shown parameter its new piece. Returns the tensor on which the program runs: a new one,
        because the old one has the hooks that sum gradients."""
        rank = self.comm.rank
        if stage and rank in used_as.ranks:
            working = nn.Parameter(before.used.detach(), requires_grad=before.used.requires_grad)
            self._owned[shown] = owned = Owned.of(name, working, stored.held, used_as.ranks, rank, stage)
            mine = owned.piece
        else:
            mine = nn.Parameter(before.piece, requires_grad=before.used.requires_grad)
        self._put(shown, mine.detach(), stored, self._written if stage else None)
        return mine

    def _put(
        self, shown: Tensor, piece: Tensor, stored: Stored, written: Callable[[], object] | None = None
    ) -> None:
        """Replaces the piece of a shown tensor. While a loss of an earlier step lives, PyTorch expects
        gradients of the old piece's shape; it forgets that where the dtype changes."""
        with Off():
            if piece.shape != shown.shape:
                other = torch.float64 if piece.dtype == torch.float32 else torch.float32
                shown.data = piece.new_empty(0, dtype=other)
            shown.data = piece
        if isinstance(shown, ShardTensor):
            shown.whole = Whole(stored, self.comm, written)

    def buffer(self, name: str, whole: Tensor) -> Tensor:
        if whole not in self.shown:
            stored, comm = self.stored[name], self.comm
            if self.before is not None:
                self.shown[whole] = shown = _heir(whole)
                self._put(shown, self.before[shown].piece, stored)
            elif isinstance(whole, TakenOver):
                self.shown[whole] = _shared(whole, stored, comm, is_owned=False)
            else:
                piece = stored.piece(whole, comm.rank, comm.device)
                self.shown[whole] = piece if is_whole(stored, comm) else shard(piece, Whole(stored, comm))
        return self.shown[whole]

    def owned_by_name(self, params: Mapping[str, nn.Parameter]) -> dict[str, Owned]:
        return {name: self._owned[p] for name, p in params.items() if p in self._owned}

    def _written(self) -> None:
        assert self.wholes is not None  # before anything is written
        self.wholes.changed()


def _parameter(x: Tensor) -> nn.Parameter:
    """A shown tensor that is a parameter: an ``nn.Parameter``, or a shard that passes for one."""
    assert isinstance(x, nn.Parameter)
    return x


def _heir(whole: Tensor) -> Tensor:
    """The tensor that the parallel model shows in place of one of its original's; the parallel model must
    exist."""
    assert isinstance(whole, TakenOver)
    heir = whole.heir()
    assert heir is not None
    return heir


def is_whole(stored: Stored, comm: Comm) -> bool:
    """Whether every rank holds the whole tensor."""
    return not (stored.held.sizes or stored.copies) and len(stored.held.ranks) == comm.world_size


def _show(mine: nn.Parameter, stored: Stored, comm: Comm, written) -> nn.Parameter:
    if is_whole(stored, comm):
        return nn.Parameter(mine.detach(), requires_grad=mine.requires_grad)
    whole = Whole(stored, comm, written)
    return _parameter(shard(mine, whole, is_parameter=True, requires_grad=mine.requires_grad))


def _shared(whole: TakenOver, stored: Stored, comm: Comm, *, is_owned: bool) -> Tensor:
    """The tensor that another parallel model shows for the same original. Raises InputError if this model
    would hold it differently, because there would then be two tensors, trained separately."""
    shown = whole.heir()
    if isinstance(shown, ShardTensor):
        alike = shown.whole.stored.held == stored.held and shown.whole.written is None
    else:
        alike = shown is not None and is_whole(stored, comm)
    if shown is None or not alike or is_owned:
        raise InputError(
            "two parallel models share a parameter or buffer, and their plans hold it differently"
            if shown is not None
            else "the model was taken over by parallelize before, and that parallel model is gone",
            expected=f"{stored.name} whole on every rank in both plans, or cut alike",
            got="" if shown is None else f"{stored.name}: another layout in this plan",
            hint=(
                'plan both with planner="ddp-proportional"',
                "one model whose forward returns the sum of both losses",
                "model.load_state_dict(parallel.full_state_dict()) makes the original whole again",
            ),
        )
    return shown


def owners_of(program: Program, model: nn.Module) -> dict[Tensor, tuple[Layout, int]]:
    """For each parameter with shard owners, the layout in which it is used, and the ZeRO stage."""
    params = dict(model.named_parameters(remove_duplicate=False))
    return {
        params[i.args[0]]: (Layout(REPLICATE, program.participants(i.type)), stage_of(i))
        for i in program.params
        if owned_type(program, i) is not None
    }
