"""Chooses how the gradients of each bucket are synchronised: everywhere, by owners, or through a server.

    all_reduce    2 (n - 1) / n of the bytes, all of them before the optimizer
    sharded       a reduce_scatter before the optimizer and an all_gather after it, (n - 1) / n each: as many
                  bytes, but half may hide behind the next forward pass, and each rank steps its own rows
    server        a reduce and a broadcast: one rank, which would wait anyway, steps all rows

The last two are one idea, owners (``zero.with_owners``): a server owns all. HeteroG (CoNEXT'20) and TAG
(TPDS'23) choose per group of operators; here it is per bucket, and the simulator chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice

from ..cost import CostModel
from ..cost.sums import GradientSum, gradient_sums
from ..lang.ir import Program, Ratio, leaders, make_ratio
from .zero import ownable, with_owners

TRIED = 5000  # instructions in all tried programs together, which limits the time

FEWEST = 3  # number of choices that are tried for any program

Choice = tuple[Ratio | None, ...]  # for each bucket, the shares of its owners; None is an all_reduce


def best_sync(
    program: Program, costs: CostModel, step_s: Callable[[Program], float], *, mixed: bool
) -> Program:
    """The program with owners if that lowers ``step_s``. It must have buckets, and no owners. Unless
    ``mixed``, all buckets are synchronised in one way."""
    can, buckets = ownable_buckets(program)
    if not buckets:
        return program

    def made(choice: Choice) -> Program:
        return owned_by(program, can, buckets, choice)

    best: Choice = (None,) * len(buckets)
    least = step_s(program)
    tried = {best}
    most = max(FEWEST, TRIED // len(program.instructions))

    def consider(choice: Choice) -> None:
        nonlocal best, least
        if choice not in tried and len(tried) < most:
            tried.add(choice)
            if (seconds := step_s(made(choice))) < least:
                best, least = choice, seconds

    for choice in alike(program, costs, buckets):
        consider(choice)
    if not mixed:
        return made(best)
    for part in (0.5, 0.25, 0.75):  # buckets that are complete first are used last in the next forward pass
        owners = [list(options(program, costs, s))[1] for s in buckets]
        consider(tuple(o if n < part * len(buckets) else None for n, o in enumerate(owners)))
    for n in sorted(range(len(buckets)), key=lambda n: -buckets[n].size_bytes):
        for shares in options(program, costs, buckets[n]):
            consider((*best[:n], shares, *best[n + 1 :]))
    return made(best)


def best_run(program: Program, costs: CostModel, step_s: Callable[[Program], float], most: int) -> Program:
    """The program with owners for a run of its buckets if that lowers ``step_s``, after at most ``most``
    trials.

    A bucket that the backward pass completes first is used last in the next forward pass, so its gathers hide
    best; the very first one may have the rest of the backward pass to hide its all_reduce. The last bucket is
    used first, so nothing hides it either way. So the best owners are those of a run, with or without the
    first bucket, up to where the forward pass has hidden enough.
    """
    can, buckets = ownable_buckets(program)
    if not buckets:
        return program
    owners = [next(islice(options(program, costs, s), 1, None)) for s in buckets]
    trials: dict[tuple[int, int], tuple[float, Program]] = {}

    def tried(first: int, last: int) -> float:
        if (first, last) not in trials and len(trials) < most:
            choice = tuple(of if first <= n < last else None for n, of in enumerate(owners))
            owned = owned_by(program, can, buckets, choice)
            trials[first, last] = step_s(owned), owned
        return trials.get((first, last), (float("inf"),))[0]

    count = len(buckets)
    for first in (1, 0):
        stride = max(1, count // 4)
        lasts = range(first + stride, count + 1, stride)
        best = min(lasts, key=lambda last: tried(first, last), default=count)
        while stride > 1:
            stride //= 2
            near = (best - stride, best, best + stride)
            best = min((n for n in near if first < n <= count), key=lambda last: tried(first, last))
    least = min(trials.values(), key=lambda found: found[0])
    return least[1] if least[0] < step_s(program) else program


def ownable_buckets(program: Program) -> tuple[set[str], list[GradientSum]]:
    """Parameters that can have owners, by result, and the buckets that contain any of them."""
    can = {i.result for i in ownable(program)}
    return can, [s for s in gradient_sums(program) if any(p.result in can for p in s.params)]


def owned_by(program: Program, can: set[str], buckets: list[GradientSum], choice: Choice) -> Program:
    """The program with these owners for its buckets."""
    chosen = [(s, shares) for s, shares in zip(buckets, choice) if shares is not None]
    return with_owners(
        program, {p.result: shares for s, shares in chosen for p in s.params if p.result in can}
    )


def alike(program: Program, costs: CostModel, buckets: list[GradientSum]) -> Iterator[Choice]:
    """Owners for all buckets; a server for each bucket in turn; one server for all."""
    each = [list(options(program, costs, s)) for s in buckets]
    ways = range(1, max(map(len, each)))
    choices = [tuple(of[min(way, len(of) - 1)] for of in each) for way in ways]
    yield from choices[:2]
    yield tuple(_server(program, s.ranks[n % len(s.ranks)]) for n, s in enumerate(buckets))
    yield from choices[2:]


def options(program: Program, costs: CostModel, s: GradientSum) -> Iterator[Ratio | None]:
    """Yields the possible owners of a bucket: none, the leaders of machines if sums are hierarchical, all
    ranks evenly, all ranks by their shares of the batch, and one device of each kind."""
    yield None
    parts = () if program.levels is None else program.levels.parts(s.ranks, s.size_bytes)
    if parts:
        yield _alike(program.world_size, leaders(parts))
    even = _alike(program.world_size, s.ranks)
    yield even
    batch = program.shares if program.ratios else even  # nothing is cut: all ranks have all samples
    shared = all(batch[r] > 0 for r in s.ranks)
    yield make_ratio([b if r in s.ranks else 0.0 for r, b in enumerate(batch)]) if shared else even
    kinds = {(costs.class_of[r], costs.cluster.machine_index_of(r)): r for r in reversed(s.ranks)}
    yield from (_server(program, r) for r in sorted(kinds.values()))


@lru_cache(maxsize=256)
def _alike(world_size: int, ranks: tuple[int, ...]) -> Ratio:
    inside = frozenset(ranks)
    return make_ratio([1.0 if r in inside else 0.0 for r in range(world_size)])


def _server(program: Program, rank: int) -> Ratio:
    return _alike(program.world_size, (rank,))
