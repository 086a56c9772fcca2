"""Compares a step of the job's optimizer on every rank with the same step on one device.

Both have the same gradients, so that an optimizer that amplifies rounding (Adam, where a gradient is nothing
but rounding) amplifies it equally on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...lang.ir import Program
from ...runtime import optimizers
from ...runtime.optimizer_check import check_optimizer
from ...runtime.shards import Stored, stored_tensors
from .compare import relative_error

OptimizerOf = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
CPU = torch.device("cpu")
UPDATE_FLOOR = 1e-3  # smallest scale of comparisons, as a share of the largest update


class Optimizers:
    """One device's optimizer, as the job makes it, and those of all ranks, as ``parallelize`` makes them."""

    def __init__(
        self, model: nn.Module, program: Program, params: Mapping[str, Tensor], make: OptimizerOf
    ) -> None:
        trainable = {n: p.requires_grad for n, p in model.named_parameters()}
        self.params = {n: nn.Parameter(t.clone(), trainable[n]) for n, t in params.items()}
        self._single = make(list(self.params.values()))
        stored = stored_tensors(program, model)
        learning = [p.args[0] for p in program.params if p.result in program.requires_grad]
        kept = {n: stored[n] for n in self.params}
        check_optimizer(self._single, kept, [n for n in learning if n in kept], program.world_size)
        self._ranks = [
            _Rank(rank, self.params, {n: stored[n].at(rank) for n in self.params}, make)
            for rank in range(program.world_size)
        ]

    def step(
        self, gradients: Mapping[str, Tensor | None], planned: Mapping[str, Tensor | None]
    ) -> dict[str, float]:
        """Steps all optimizers: one device's by ``gradients``, those of the ranks by the ``planned``
        gradients. Returns the relative errors of the updates by name; ``params`` become those of one device.
        """
        before = {n: p.detach().clone() for n, p in self.params.items()}
        after = [rank.step(gradients, planned) for rank in self._ranks]
        for name, p in self.params.items():
            p.grad = gradients.get(name)
        self._single.step()
        self._single.zero_grad(set_to_none=True)
        updates = {n: p.detach() - before[n] for n, p in self.params.items()}
        floor = UPDATE_FLOOR * max((u.abs().max().item() for u in updates.values() if u.numel()), default=0.0)
        errors = dict.fromkeys(updates, 0.0)
        for rank, pieces in zip(self._ranks, after):
            for name, update in updates.items():
                stored = rank.stored[name]
                mine = pieces[name] - stored.piece(before[name], rank.number, CPU)
                scale = max(floor, update.abs().max().item() if update.numel() else 0.0)
                error = relative_error(mine, stored.piece(update, rank.number, CPU), scale)
                errors[name] = max(errors[name], error)
            rank.put(self.params)
        return errors


class _Rank:
    """The pieces of one rank and its optimizer."""

    def __init__(
        self, number: int, params: Mapping[str, nn.Parameter], stored: dict[str, Stored], make: OptimizerOf
    ) -> None:
        self.number, self.stored = number, stored
        wholes = {n: nn.Parameter(p.detach(), p.requires_grad) for n, p in params.items()}
        self.pieces = {n: nn.Parameter(self._piece(n, p), p.requires_grad) for n, p in wholes.items()}
        self._optimizer = make(list(wholes.values()))
        swapped: dict[Tensor, tuple[Tensor, Stored]] = {
            p: (self.pieces[n], stored[n]) for n, p in wholes.items()
        }
        optimizers.put_on_shards(self._optimizer, swapped, number)

    def step(self, gradients: Mapping[str, Any], planned: Mapping[str, Any]) -> dict[str, Tensor]:
        """Steps, and returns the new pieces."""
        for name, piece in self.pieces.items():
            whole = gradients.get(name)
            if planned.get(name) is None:
                continue
            if whole is None:  # an expert without tokens on one device
                piece.grad = torch.zeros_like(piece)
                continue
            # contiguous, as after a reduction over ranks
            piece.grad = whole if whole.is_sparse else self._piece(name, whole).contiguous()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {n: p.detach() for n, p in self.pieces.items()}

    def put(self, params: Mapping[str, Tensor]) -> None:
        """Copies the parameters of one device."""
        with torch.no_grad():
            for name, piece in self.pieces.items():
                piece.copy_(self._piece(name, params[name]))

    def _piece(self, name: str, whole: Tensor) -> Tensor:
        return self.stored[name].piece(whole, self.number, CPU).clone()
