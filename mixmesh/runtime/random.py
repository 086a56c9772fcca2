"""Defines the random numbers of a program.

A replicated tensor draws the same numbers on all ranks. A sharded one draws its own: the generator of rank
j's shard is seeded with the shard's position, so no two ranks repeat each other. In ``exact`` mode a shard
instead draws the numbers of the whole tensor and keeps its piece, which makes a sharded run equal to the
single device number for number, at the cost of drawing everything everywhere.

Micro-batches draw like smaller shards: each from a generator of its own, or in exact mode its piece of the
numbers of the whole step. Replicated values are the same in all micro-batches of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

Place = tuple[int, int, int]  # (step, micro-batch, its first sample)


class RandomPolicy:
    """Seeds for the random operators of one program: a function of (seed, step, operator, shard) and of the
    micro-batch, which begins at ``first_sample`` of the batch.

    With ``by_shape`` numbers depend only on the kind and shape of the draw, not on step or operator, so that
    two programs that draw in different orders can be compared.
    """

    def __init__(self, seed: int = 0, *, exact: bool = False, by_shape: bool = False) -> None:
        self.seed = seed
        self.exact = exact
        self.by_shape = by_shape
        self.step = self.first_step = 0  # the current step, and the one at which this process began
        self.micro_step = 0
        self.first_sample = 0

    def go_on(self, step: int) -> None:
        """Continues after the ``step`` steps of an earlier process."""
        self.step = self.first_step = step

    @property
    def place(self) -> Place:
        return self.step, self.micro_step, self.first_sample

    @contextmanager
    def at(self, place: Place) -> Iterator[None]:
        """A context in which the numbers of another place are drawn, for a forward pass that runs again."""
        before = self.place
        self.step, self.micro_step, self.first_sample = place
        try:
            yield
        finally:
            self.step, self.micro_step, self.first_sample = before

    def generator(self, operator: int, shard: int, device: torch.device) -> torch.Generator:
        """The generator of the ``operator``-th random op at this step; ``shard`` is 0 if replicated."""
        if self.by_shape:
            return torch.Generator(device).manual_seed(self.seed)
        mixed = self.seed
        # the first micro-batch draws the same numbers as a step that has only one
        later = (self.micro_step,) if shard and self.micro_step else ()
        for part in (self.step, operator, shard, *later):
            # splitmix64's finaliser: neighbouring counters give unrelated seeds
            mixed = (mixed ^ part) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
            mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
            mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
            mixed ^= mixed >> 31
        return torch.Generator(device).manual_seed(mixed & 0x7FFFFFFFFFFFFFFF)
