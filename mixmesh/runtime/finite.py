"""Decides what a run does about a loss or gradients that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..base.progress import tell_warning
from ..base.units import ranks_text
from ..errors import JobError
from .collectives import Handle, done
from .comm import Comm
from .first_rank import everyones
from .inspection import is_spoilt
from .not_finite import NotFinite, first_not_finite
from .parallel_model import ParallelModel
from .scaler import GradScaler
from .shard_numbers import Off
from .shard_tensor import ShardTensor, plain

T = TypeVar("T")
MOST_IN_A_ROW = 10  # number of consecutive steps that may be left out
LEAST_SCALE = 1.0  # lower limit for the scale of a loss; gradients that overflow even then have another cause
SAID_EVERY = 100  # a message about steps that were left out comes at most once in so many steps


class OnNan(Enum):
    """The reaction to a loss or gradients that are not finite."""

    STOP = "stop"  # raises an error, and the optimizer makes no step
    SKIP = "skip"  # leaves out the batch, on all ranks
    IGNORE = "ignore"  # warns once, about the loss only


class FiniteGuard:
    """Sums the loss of every step, and checks it and the gradients before the optimizer's step.

    In each step, ``backward`` runs a batch, ``may_step`` says whether the optimizer may step, ``step`` makes
    its step, after which ``loss`` is known. All are collective.

    A ``scaler`` of the loss leaves out gradients that overflow and lowers the scale; they are not checked
    until the scale is below one.
    """

    def __init__(self, model: ParallelModel, on_nan: OnNan, scaler: GradScaler | None = None) -> None:
        self._model, self._on_nan, self._scaler = model, on_nan, scaler
        self._updated = {i.args[0] for i in model.program.instructions if i.op == "update"}
        self._params = list(model.parameters())
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._in_a_row = 0
        self._said_at: int | None = None  # the step of the last message
        self._has_warned = False
        self._addend = torch.zeros(())
        self._total: Handle = done(self._addend)  # the loss, and the flags summed with it
        self.num_skipped = 0

    def backward(self, batch: Any) -> None:
        """Runs the forward and backward pass of a batch. If gradients are checked, the loss is summed after
        the backward pass, together with the findings; otherwise it is summed during the backward pass."""
        if self._on_nan is OnNan.IGNORE:
            local, total = call(self._model.forward_local, batch)
            assert total is not None  # the model computes its loss
            self._total = total
        else:
            # the forward pass writes to these (statistics of batch norm)
            written = [plain(b) for name, b in self._model.named_buffers() if name in self._updated]
            self._buffers = [(b, b.clone()) for b in written]
            local = call(self._model.forward_addend, batch)
        (local if self._scaler is None else self._scaler.scale(local)).backward()
        self._addend = local.detach()

    def may_step(self, step: int, batch: Any) -> bool:
        """Whether the optimizer should make step number ``step``; all ranks get the same answer. Raises
        JobError if the run should stop."""
        if self._on_nan is OnNan.IGNORE:
            return True
        gradients = [] if self._leaves_overflows() else gradients_of(self._params)
        self._total = self._sum(may_be_spoilt(gradients))
        loss, num_spoilt = self._total.wait().tolist()
        if math.isfinite(loss):
            # the sums are the same on all ranks, so all agree on whether to look again, and on the findings
            is_finite = not num_spoilt
            if not is_finite:
                spoilt = torch.tensor(float(any(map(is_spoilt, gradients))))
                is_finite = not self._sum(spoilt).wait()[1]
            if is_finite:
                self._in_a_row = 0
                return True
        for buffer, value in self._buffers:
            buffer.copy_(value)
        message = f"the loss is {loss:g} at step {step}"
        if math.isfinite(loss):
            message = f"gradients are not finite at step {step}, whose loss is {loss:.5g}"
        if self._on_nan is OnNan.STOP:
            hints = "--on-nan skip leaves such batches out", "--on-nan ignore trains on"
            raise error_of(message, self._found(batch), *hints)
        self._leave_out(step, message, batch)
        return False

    def _leaves_overflows(self) -> bool:
        return self._scaler is not None and self._scaler.get_scale() >= LEAST_SCALE

    def step(self, optimizer: torch.optim.Optimizer, on_step: Callable[[], object]) -> None:
        """Makes the optimizer step, and calls ``on_step`` after it, unless a scaler has found gradients that
        overflowed."""
        if self._scaler is None:
            optimizer.step()
            on_step()
            return
        self._scaler.unscale_(optimizer)
        overflows = self._scaler.has_overflowed
        self._scaler.step(optimizer)
        self._scaler.update()
        if not overflows:
            on_step()
            return
        self._count_left_out()

    def _count_left_out(self) -> None:
        self.num_skipped += 1
        if self._model.comm.watch is not None:
            self._model.comm.watch.step_is_left_out()

    def _sum(self, flag: Tensor) -> Handle:
        """A handle on the loss and the number of ranks with a flag."""
        flag = flag.to(self._addend.device, torch.promote_types(self._addend.dtype, torch.float32))
        with self._model.comm.call("a look at the gradients"):
            return self._model.sum_of_ranks(torch.stack([self._addend.to(flag.dtype), flag]))

    def loss(self, step: int) -> float:
        """The loss of step number ``step``, after the optimizer's step. Warns once about a loss that is not
        finite if such losses are ignored."""
        loss = float(self._total.wait().flatten()[0].to(self._addend.dtype))
        if self._on_nan is OnNan.IGNORE and not self._has_warned and not math.isfinite(loss):
            self._has_warned = True
            warn_of_loss(self._model.comm, step, loss, self._addend)
        return loss

    def _found(self, batch: Any) -> NotFinite | None:
        return call(partial(first_not_finite, self._model), batch)

    def _leave_out(self, step: int, message: str, batch: Any) -> None:
        self._count_left_out()
        self._in_a_row += 1
        if self._in_a_row == MOST_IN_A_ROW:
            message = f"{message}, the last of {MOST_IN_A_ROW} steps in a row that were left out"
            raise error_of(message, self._found(batch), "--on-nan ignore trains on")
        if self._said_at is not None and step - self._said_at < SAID_EVERY:
            return
        self._said_at = step
        skipped = self._found(batch)
        if not self._model.comm.rank:
            so_far = f"; {self.num_skipped} in all" if self.num_skipped > 1 else ""
            where = "" if skipped is None else f" ({skipped})"
            tell_warning(f"{message}{where}: the step is left out{so_far}")


def call(function: Callable[..., T], batch: Any) -> T:
    """Calls ``function`` with a batch, which is a dict or a sequence of arguments."""
    return function(**batch) if isinstance(batch, Mapping) else function(*batch)


def gradients_of(params: Iterable[Tensor]) -> list[Tensor]:
    """The parts of gradients that this rank holds, as plain tensors with elements."""
    with Off():
        held = [plain(g) if isinstance(g, ShardTensor) else g for p in params if (g := p.grad) is not None]
        values = [g._values() if g.is_sparse else g for g in held]
        return [g for g in values if g.numel()]


def may_be_spoilt(gradients: Iterable[Tensor]) -> Tensor:
    """1 if a gradient has an element that is not finite, or a sum of squares too large for its dtype; else 0.
    Reads each element once."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    signs = [~torch.stack(torch._foreach_norm(each)).isfinite().all() for each in by_dtype.values()]
    return torch.stack(signs).any().float() if signs else torch.zeros(())


def error_of(message: str, found: NotFinite | None, *hints: str) -> JobError:
    """The error that ends a run."""
    again = "the loss and the gradients are finite when the batch is run again"
    return JobError(
        message,
        expected="a finite loss and finite gradients",
        got=again if found is None else found.got,
        where="" if found is None else found.where,
        hint=("a lower learning rate, clipped gradients, or other data", *hints),
    )


def warn_of_loss(comm: Comm, step: int, loss: float, mine: Tensor) -> None:
    """Warns, on the first rank, of a loss that is not finite, with the ranks it comes from. Collective."""
    with comm.call("a loss that is not finite"):
        finite = everyones(bool(mine.isfinite()))
    ranks = [rank for rank, is_finite in enumerate(finite) if not is_finite]
    where = f"{ranks_text(ranks)}: not finite there" if ranks else "finite on every rank, not in their sum"
    if not comm.rank:
        tell_warning(f"the loss is {loss:g} at step {step} ({where})")
