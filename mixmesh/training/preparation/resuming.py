"""Records how far a loader has come, and resumes from there with the remaining batches.

A state holds the random numbers from which the order of its epoch was drawn, the number of batches already
given, and a digest of them. To resume, the order is drawn again from the same numbers and those batches are
skipped; if they do not match the digest, the start is refused.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch

from ...errors import InputError

T = TypeVar("T")
END = object()
LOOK = 1  # number of batches after which leaving an iteration counts as a look at the data, not as an epoch


@dataclass(frozen=True)
class Numbers:
    """States of random numbers: the process's (None if they do not matter), and those of the loader's own
    generators, by place."""

    of_process: dict[str, Any] | None
    generators: dict[str, torch.Tensor]

    @classmethod
    def of(cls, loader: Any, *, with_process: bool = True) -> Numbers:
        """The current states of a loader's random numbers."""
        generators = {place: g.get_state() for place, g in generators_of(loader).items()}
        return cls(numbers_of_process() if with_process else None, generators)

    def restore(self, loader: Any) -> None:
        """Restores all of these numbers."""
        if self.of_process is not None:
            set_numbers_of_process(self.of_process)
        for place, generator in generators_of(loader).items():
            if place in self.generators:
                generator.set_state(self.generators[place])


def generators_of(loader: Any) -> dict[str, torch.Generator]:
    """The generators that a loader and its samplers draw from."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = {
        "loader": loader,
        "sampler": getattr(loader, "sampler", None),
        "batch_sampler": batch_sampler,
        "batch_sampler.sampler": getattr(batch_sampler, "sampler", None),
    }
    generators = {place: getattr(holder, "generator", None) for place, holder in holders.items()}
    return {place: g for place, g in generators.items() if isinstance(g, torch.Generator)}


def numbers_of_process() -> dict[str, Any]:
    """The states of torch, random and numpy.random, in a form that ``torch.load(weights_only=True)`` can
    read."""
    state = np.random.get_state()
    assert isinstance(state, tuple)  # the state of MT19937, the usual generator
    name, keys, *rest = state
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(keys.astype(np.int64)), *rest),
    }


def set_numbers_of_process(states: dict[str, Any]) -> None:
    """Restores the result of ``numbers_of_process``."""
    torch.set_rng_state(states["torch"])
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))


def fingerprint(states: dict[str, Any]) -> str:
    """A text that changes when any number is drawn."""
    return repr((states["torch"].tolist(), states["python"], states["numpy"][1].tolist(), states["numpy"][2]))


@dataclass
class Progress:
    """The position of a loader: in epoch ``epoch`` it has given ``num_yielded`` batches of
    ``samples_yielded`` samples, counting the rows of all ranks. Between epochs it is at the start of the next
    one."""

    epoch: int = 0
    # last argument of set_epoch: it decides the order of this epoch and those after it
    sampler_epoch: int | None = None
    num_yielded: int = 0
    samples_yielded: int = 0
    digest: str = ""  # a checksum over all batches given so far
    # the random numbers from which the epoch's order is drawn
    numbers: Numbers | None = field(default=None, repr=False)
    is_open: bool = False  # whether an epoch has begun and not ended

    def begin(self, resumed: Progress | None) -> None:
        """Begins an epoch or resumes one; an epoch that was left in the middle counts as over. After a mere
        look at the data the same epoch begins again; so does an epoch that was set, whose order the sampler
        draws until another is set."""
        if resumed is not None:
            self.__dict__.update(vars(resumed))
        elif self.is_open:
            begins_again = self.num_yielded <= LOOK or self.sampler_epoch is not None
            self.start_at(self.epoch if begins_again else self.epoch + 1)
            self.numbers = None
        self.is_open = True

    def add(self, num_samples: int, digest: str) -> None:
        """Counts a batch."""
        self.num_yielded += 1
        self.samples_yielded += num_samples
        self.digest = joined(self.digest, digest)

    def end(self, numbers: Numbers | None) -> None:
        """Moves to the start of the next epoch; ``numbers`` are those at the end of this one."""
        if self.is_open:
            self.start_at(self.epoch + 1)
            self.numbers = numbers

    def start_at(self, epoch: int) -> None:
        """Moves to the start of ``epoch``."""
        self.epoch, self.num_yielded, self.samples_yielded, self.digest = epoch, 0, 0, ""
        self.is_open = False

    def state_dict(self) -> dict[str, Any]:
        """Everything as plain values and tensors of bytes."""
        numbers = None if self.numbers is None else dict(vars(self.numbers))
        return {**vars(self), "numbers": numbers}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> Progress:
        """The progress that ``state_dict`` has described. Raises InputError for another dict."""
        names = set(cls.__dataclass_fields__)
        if not isinstance(state, dict) or set(state) != names:
            raise InputError(
                "this is not the state of a loader of mixmesh.prepare",
                expected=f"what loader.state_dict() gave: {', '.join(sorted(names))}",
                got=", ".join(map(str, state)) if isinstance(state, dict) else type(state).__name__,
            )
        numbers = state["numbers"]
        return cls(**{**state, "numbers": None if numbers is None else Numbers(**numbers)})


def joined(so_far: str, digest: str) -> str:
    """The digest of all batches so far and one more batch."""
    return hashlib.blake2b(f"{so_far} {digest}".encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Resume:
    """The point at which an iteration resumed in the middle of an epoch, and whether an earlier iteration was
    left there."""

    state: Progress
    follows_look: bool = False

    def was_left_at(self, progress: Progress) -> bool:
        """Whether the iteration, now at ``progress``, was left after a mere look at the data, so that the
        rest of the epoch is still to be given."""
        num_given = progress.num_yielded - self.state.num_yielded
        return bool(self.state.num_yielded and progress.is_open and num_given <= LOOK)

    def after_look(self) -> Resume:
        """The point at which the next iteration resumes. A second look raises InputError: the script may take
        one batch of every iteration, and would be given the same batch forever."""
        if self.follows_look:
            raise InputError(
                "two iterations that went on in the middle of an epoch were left after their first batch",
                expected="one look at the data at most after load_state_dict, and then the rest of the epoch",
                got="a third iteration, which would give the same batch again",
                hint=(
                    "look at the data before loader.load_state_dict(state)",
                    "for one batch at a time make the iterator once: batches = iter(loader); next(batches)",
                ),
            )
        return replace(self, follows_look=True)


@dataclass(frozen=True)
class Skipped:
    """The remaining batches, after those in a state were skipped. ``reason`` says why they cannot be used;
    empty if they can."""

    remaining: Iterator[Any]
    reason: str


def check_skipped(reasons: Iterable[str]) -> None:
    """Raises InputError if one of the ``reasons`` is not empty."""
    for reason in filter(None, reasons):
        raise InputError(
            f"the loader cannot resume in the middle of an epoch: {reason}",
            expected="the batches of the start that saved the state, in their order",
            hint=(
                "a generator of its own: DataLoader(..., generator=torch.Generator().manual_seed(0))",
                "or go on from a state that was saved between two epochs",
            ),
        )


def skip(
    begin: Callable[[], Iterator[T]], digest: Callable[[T], str], state: Progress, loader: Any
) -> Skipped:
    """Draws an epoch's order again, and skips the batches that were given. The process's random numbers,
    which a script may have restored, are the same afterwards. An order that draws from those sample by sample
    depends on everything else that draws from them, and is refused."""
    of_script = numbers_of_process()
    assert state.numbers is not None  # an epoch has begun
    state.numbers.restore(loader)
    batches = begin()
    so_far, after_first, reason = "", "", ""
    for number in range(state.num_yielded):
        try:
            batch = next(batches)
        except StopIteration:
            reason = f"it has {number} batches, and {state.num_yielded} were given"
            break
        so_far = joined(so_far, digest(batch))
        if number == 0:
            after_first = fingerprint(numbers_of_process())
    following = next(batches, END)
    if not reason and so_far != state.digest:
        reason = "it gives other batches, or another order"
    if not reason and state.num_yielded and fingerprint(numbers_of_process()) != after_first:
        reason = "it draws from the process's random numbers as it goes"
    set_numbers_of_process(of_script)
    return Skipped(batches if following is END else chain([following], batches), reason)
