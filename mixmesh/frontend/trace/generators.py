"""Refuses random numbers that a program could not reproduce. A forward pass may draw only from torch, since a
program would keep the first numbers of any other generator. A loss outside of the model may draw none, since
on one device they come from the script's generator."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...base.patch import patched
from ...errors import TraceError
from ...lang.ir.samples import draws_numbers
from .locate import place_in_model
from .own_generators import OF_PROCESS, generators_in, marks_of, set_states, states_of

NO_DRAWS = "seed", "getstate", "setstate", "get_state", "set_state"


class NoDraws(TorchDispatchMode):
    """A context for a loss that the script computes. Raises TraceError if it draws random numbers: in a
    program they would differ from those of one device, which come from the script's generator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name = str(func)
        if draws_numbers(name):
            raise TraceError(
                "the loss draws random numbers: in a program they would not be those of one device",
                expected="a loss of what the model returns and of the batch",
                got=f"a draw by {name.removeprefix('aten.').partition('.')[0]}",
                hint=(
                    "draw them with the batch: mixmesh.prepare(..., loss=lambda out, y, noise: ..., "
                    "inputs=lambda x, y: (x, y, torch.rand(len(x))))",
                    "or in the model's forward, as dropout does: other numbers, alike in distribution",
                ),
            )
        return func(*args, **(kwargs or {}))


class Draws:
    """The draws of a model's forward pass from the generators of Python and NumPy, whether the process's or
    the script's own. ``warnings`` names those of the process that the pass seeds before it draws."""

    def __init__(self, model: nn.Module) -> None:
        own = [each for each in generators_in(model) if not isinstance(each, torch.Generator)]
        names = [f"a generator of its own ({type(each).__name__})" for each in own]
        self._generators = [*OF_PROCESS, *own]
        self._names = ["random", "numpy.random", *names]
        self._seeded: set[str] = set()
        self._places: dict[str, str] = {}  # the model's line of the first draw, by the generator's name

    @property
    def warnings(self) -> list[str]:
        return [
            f"the forward pass seeds {name}: a program keeps the numbers that it draws then, which are the "
            f"same in every step, but seeds nothing; the script's own draws from {name} differ from those of "
            "one device"
            for name in sorted(self._seeded)
        ]

    @contextmanager
    def by_torch_alone(self) -> Iterator[None]:
        """A context for the forward pass. Raises TraceError afterwards if it has drawn numbers, unless from a
        generator of the process that it had seeded before."""
        states = states_of(OF_PROCESS)
        for generator in OF_PROCESS:
            generator.seed()  # to a random state, so that any state that the pass sets differs from it
        before = self._marks()
        try:
            with self._seeding(random, 0, before), self._seeding(np.random, 1, before):
                with self._placing(random, 0), self._placing(np.random, 1), _none_made():
                    yield
            after = self._marks()
        finally:
            set_states(OF_PROCESS, states)
        for name, was, now in zip(self._names, before, after):
            if was != now and name not in self._seeded:
                raise _refusal(name, self._places.get(name, ""))

    def _marks(self) -> list[str]:
        return [marks_of([each]) for each in self._generators]

    def _seeding(self, module: Any, number: int, before: list[str]) -> AbstractContextManager[None]:
        """A context that notes whether the pass seeds a generator of the process by a number before it draws
        anything from it."""
        seed_generator, name, generator = module.seed, self._names[number], self._generators[number]

        def seed(*args: Any, **kwargs: Any) -> None:
            if not (args or kwargs) or None in (*args, *kwargs.values()):
                self._seeded.discard(name)
            elif marks_of([generator]) == before[number]:
                self._seeded.add(name)
            seed_generator(*args, **kwargs)

        return patched(module, "seed", seed)

    @contextmanager
    def _placing(self, module: Any, number: int) -> Iterator[None]:
        """A context that notes the place of the first draw by one of the functions of ``module``."""
        name, generator = self._names[number], self._generators[number]

        def noted(function: Callable[..., Any]) -> Callable[..., Any]:
            def draw(*args: Any, **kwargs: Any) -> Any:
                self._places.setdefault(name, str(place_in_model()))
                return function(*args, **kwargs)

            return draw

        with ExitStack() as stack:
            for key, function in list(vars(module).items()):
                if getattr(function, "__self__", None) is generator and key not in NO_DRAWS:
                    stack.enter_context(patched(module, key, noted(function)))
            yield


def _none_made() -> AbstractContextManager[None]:
    """A context that refuses new generators of NumPy without a seed, which differ in every pass."""
    make = np.random.default_rng

    def default_rng(seed: Any = None) -> np.random.Generator:
        if seed is None:
            raise _refusal("a new numpy.random.Generator", str(place_in_model()))
        return make(seed)

    return patched(np.random, "default_rng", default_rng)


def _refusal(name: str, where: str) -> TraceError:
    return TraceError(
        f"the forward pass draws from {name}: every step would have the numbers of the first",
        expected="random numbers of torch, which are operators of the program",
        got=f"a draw from {name}",
        where=where,
        hint=(
            "torch.rand(()) < p with torch.where, in place of random.random() < p",
            "numbers that are drawn in the loop, and passed to the model as a tensor of the batch",
            "where that is a library's code, the setting that turns it off: "
            "model.config.apply_spec_augment = False",
        ),
    )
