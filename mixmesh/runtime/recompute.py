"""Rematerialises a region in the backward pass: its operators' saved tensors are not kept but made a second
time.

The forward pass builds autograd's graph as usual, so the order of the backward pass, its collectives and the
hooks that sum gradients are the same as without regions. Only the tensors that a region's operators save are
replaced by numbers. The first such number that the backward pass unpacks runs the region again from its kept
inputs; the operators then save the same tensors in the same order (PyTorch's own non-reentrant checkpoints
work like this). A region has computations of one rank only, and its random numbers depend only on the step,
so the second run repeats the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..errors import MixmeshError
from .random import RandomPolicy
from .reshard import Keeper


@dataclass(frozen=True)
class Step:
    """A computation of a region, with the program's names for its inputs and results. ``run`` runs it the
    first time, ``again`` the second time."""

    run: Callable[..., tuple]
    inputs: tuple[str, ...]
    results: tuple[str | None, ...]
    again: Callable[..., tuple]


def at_once(run: Callable[[], None]) -> None:
    run()


class Region:
    """A region in one forward pass of one rank. It lives as long as anything that it saved is needed.

    ``around`` is called with the second run, which it must run.
    """

    def __init__(
        self,
        random: RandomPolicy,
        keep: Keeper | None = None,
        around: Callable[[Callable[[], None]], None] = at_once,
    ) -> None:
        self._random, self._keep, self._around = random, keep or Keeper(), around
        self._place = random.place
        self._steps: list[Step] = []
        self._last = 0  # the last step that saves something, counted from 1: later ones need not run again
        self._inputs: dict[str, tuple[Any, bool]] = {}  # (the keeper's note, whether it takes a gradient)
        self._own: set[str] = set()
        self._num_saved = 0
        self._made: dict[int, Tensor] = {}  # made values by number, until they are used

    def run(self, step: Step, *values: Tensor) -> tuple:
        """Runs a computation in the forward pass."""
        if not torch.is_grad_enabled():
            return step.run(*values)
        for name, value in zip(step.inputs, values):
            if name not in self._own and name not in self._inputs:
                self._inputs[name] = self._keep.note(value), value.requires_grad
        self._own.update(r for r in step.results if r is not None)
        self._steps.append(step)
        with saved_tensors_hooks(self._save, self._load):
            return step.run(*values)

    def _save(self, _: Tensor) -> int:
        self._last = len(self._steps)
        self._num_saved += 1
        return self._num_saved - 1

    def _load(self, number: int) -> Tensor:
        if number not in self._made:
            self._around(self._again)
        return self._made.pop(number)

    def _again(self) -> None:
        saved: list[Tensor] = []
        # an alias that requires a gradient if the value did, so that operators save the same tensors
        values = {
            name: self._keep.take(note).detach().requires_grad_(takes_gradient)
            for name, (note, takes_gradient) in self._inputs.items()
        }
        steps = self._steps[: self._last]
        last_use = {name: n for n, step in enumerate(steps) for name in step.inputs}
        with (
            torch.enable_grad(),
            self._random.at(self._place),
            saved_tensors_hooks(lambda x: saved.append(x.detach()), _never),
        ):
            for n, step in enumerate(steps):
                recomputed = step.again(*(values[name] for name in step.inputs))
                values.update((r, x) for r, x in zip(step.results, recomputed) if r is not None)
                for name in {*step.inputs, *(r for r in step.results if r is not None)}:
                    if last_use.get(name, n) <= n:
                        values.pop(name, None)
        if len(saved) != self._num_saved:
            raise MixmeshError(
                "a region saved other tensors when it was computed again",
                expected=f"{self._num_saved} tensors",
                got=f"{len(saved)} tensors, by {', '.join(filter(None, (s.results[0] for s in steps)))}",
                hint="plan without it: take the attribute recompute off these instructions",
            )
        self._made = dict(enumerate(saved))


def _never(_: Any) -> Tensor:
    raise AssertionError("nothing goes back through the second run of a region")
