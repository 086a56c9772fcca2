"""The parts of a training that look after it between its steps, and those that leave it as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, Protocol

import torch

from ..lang.ir import Program
from ..lang.plan_file import Plan
from .data import Feed
from .job_data import ComparesFirst, own_batches
from .parallel_model import ParallelModel
from .scaler import GradScaler


class Trained(NamedTuple):
    """The parts of a training that its steps change. ``scheduler`` and ``scaler`` may be None."""

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: GradScaler | None


class Keeper(Protocol):
    """Keeps the state of a training, so that another start can continue it. All calls are collective."""

    def begin(self, trained: Trained, job: Any) -> tuple[Feed, int]:
        """This rank's batches, and the number of steps made before this start."""

    def after_step(self, num_steps: int) -> bool:
        """Called after ``num_steps`` steps in all; returns whether the training should stop."""

    def save_now(self, num_steps: int) -> bool:
        """Keeps the state after ``num_steps`` steps; returns whether that was possible."""

    def end(self, num_steps: int) -> None:
        """Called after the last step."""


class Balancer(Protocol):
    """Adapts the shares of a training to the speeds of its devices. All calls are collective."""

    def begin(self, model: ParallelModel, optimizer: torch.optim.Optimizer, feed: Feed) -> None:
        """Called before the first step of this start."""

    def after_step(self, num_steps: int, step_s: float, own_s: float) -> bool:
        """Called after ``num_steps`` steps in all. The last took ``step_s`` seconds without loading its
        batch, of which this rank spent ``own_s`` not waiting for others. Returns True if the training should
        stop here and continue from its kept state under another plan."""

    def stay(self) -> None:
        """Called if the training cannot stop, because its state could not be kept."""

    def end(self) -> None:
        """Called after the last step."""


@dataclass(frozen=True)
class KeepsNothing:
    """The keeper of a training that nothing can continue."""

    plan: Plan | Program
    epochs: int | None
    initial: Callable[[ParallelModel], object]
    _: KW_ONLY
    may_follow: bool

    def begin(self, trained: Trained, job: Any) -> tuple[Feed, int]:
        model = trained.model
        self.initial(model)
        look, rank = ComparesFirst(model), model.comm.rank
        batches = own_batches(
            job, self.plan, rank, self.epochs, look, on_end=look.meet, may_follow=self.may_follow
        )
        return batches, 0

    def after_step(self, num_steps: int) -> bool:
        return False

    def save_now(self, num_steps: int) -> bool:
        return False

    def end(self, num_steps: int) -> None:
        pass


class ChangesNothing:
    """The balancer of a training whose shares stay."""

    def begin(self, model: ParallelModel, optimizer: torch.optim.Optimizer, feed: Feed) -> None:
        pass

    def after_step(self, num_steps: int, step_s: float, own_s: float) -> bool:
        return False

    def stay(self) -> None:
        pass

    def end(self) -> None:
        pass
