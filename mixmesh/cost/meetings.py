"""The communicators of a plan: every set of ranks that exchanges tensors in a step, once for each purpose.

PyTorch makes a group's communicator at its first collective, so a group that is never used takes no memory.
The runtime also makes groups for gradients that are never summed; these are left out here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..lang.ir import Instruction, Parts, Program, Samples, leaders
from .communicators import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    BETWEEN,
    DATA,
    DOWN,
    GRADIENT,
    LOSS_TOLD,
    UP,
    Communicator,
)
from .exchanges import exchange_of
from .outline import is_factored, purpose_of
from .sums import GradientSum, Summed, gradient_sums

PAIRWISE = ("all_to_all",)  # collectives in which every rank sends to every other rank


def communicators(
    program: Program, samples: Samples | None = None, summed: tuple[Summed, ...] | None = None
) -> tuple[Communicator, ...]:
    """The communicators of a program's step, in micro-batches of ``samples`` if there are any. Initial values
    and the loss go through a communicator of all ranks. ``summed`` are the program's ``order_of_sums``, if
    known."""
    pairwise_by_key: dict[tuple[str, tuple[int, ...]], bool] = {}
    for purpose, ranks, is_pairwise in _meetings(program, samples, gradient_sums(program, order=summed)):
        if len(ranks) > 1:
            pairwise_by_key[purpose, ranks] = pairwise_by_key.get((purpose, ranks), False) or is_pairwise
    return tuple(Communicator(*key, is_pairwise) for key, is_pairwise in pairwise_by_key.items())


_Meeting = tuple[str, tuple[int, ...], bool]


def _meetings(program: Program, samples: Samples | None, sums: Iterable[GradientSum]) -> Iterator[_Meeting]:
    yield DATA, tuple(range(program.world_size)), False
    transfers = frozenset[str]() if samples is None else samples.transfers
    for i in program.instructions:
        if i.is_redistribution and i.result in transfers:
            yield from _transfer(program, i)
        elif i.is_redistribution:
            yield from _redistribution(program, i)
        elif is_factored(i):
            yield DATA, program.participants(i.type), False
    for s in sums:
        if s.parts:
            yield from _levels(s.parts)
        else:
            yield GRADIENT, s.ranks, False
    working = program.working_ranks
    idle = [rank for rank in range(program.world_size) if rank not in set(working)]
    yield DATA, working, False
    if idle:  # the first computing rank sends the loss to the idle ones
        yield LOSS_TOLD, tuple(sorted((working[0], *idle))), False


def _redistribution(program: Program, i: Instruction) -> Iterator[_Meeting]:
    """The communicators of a change of placement and of its gradient."""
    purpose = purpose_of(program, i)
    passes = ((False, "algorithm"), (True, "gradient_algorithm"))
    for is_backward, attribute in passes[: 1 + (i.result in program.requires_grad)]:
        exchange = exchange_of(program, i, backward=is_backward)
        if exchange is not None:
            is_pairwise = exchange.name in PAIRWISE or exchange.direct or i.attr(attribute, None) in PAIRWISE
            yield purpose, exchange.ranks, is_pairwise


def _transfer(program: Program, i: Instruction) -> Iterator[_Meeting]:
    """The communicators of a value that goes to the next stage, and of its gradient that comes back."""
    ranks = tuple(sorted({*program.participants(program.types[i.inputs[0]]), *program.participants(i.type)}))
    yield ACTIVATIONS, ranks, True
    if i.result in program.requires_grad:
        yield ACTIVATION_GRADIENTS, ranks, True


def _levels(parts: Parts) -> Iterator[_Meeting]:
    """The communicators of a hierarchical sum: within machines, between them, and back."""
    for part in parts:
        yield UP, part, False
        yield DOWN, part, False
    yield BETWEEN, leaders(parts), False
