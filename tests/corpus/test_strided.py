"""Collectives of tensors that lie in memory in any way: gradients are often expanded, strided or turned."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from gloo_world import assert_passed, run_world
from torch import Tensor

from mixmesh.lang.ir import PARTIAL, REPLICATE, Placement, Shard, make_ratio, shard_sizes
from mixmesh.runtime import collectives as c
from mixmesh.runtime.comm import Comm
from mixmesh.runtime.layout import Layout
from mixmesh.runtime.levels import BETWEEN, DOWN, UP, ByLevels
from mixmesh.runtime.redistribute import Redistribution

WORLD = 3
PARTS = ((0, 1), (2,))
SETS = [("data", (0, 1, 2)), (UP, (0, 1)), (DOWN, (0, 1)), (BETWEEN, (0, 2))]
SHAPES = ((10,), (10, 1), (1, 10), (10, 4), (4, 10), (2, 10, 3))
SIZES = ((3, 5, 2), (0, 10, 0))


def make_comm() -> Comm:
    return Comm.of_sets(WORLD, SETS, device="cpu", timeout_s=20)


def forms(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same numbers in memory as autograd leaves them, each without what follows it."""
    yield "every second", torch.stack([x, x + 1], -1)[..., 0]
    yield "turned", x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    yield (
        "in a larger one",
        torch.nn.functional.pad(x, (1, 1) * x.dim())[tuple(slice(1, -1) for _ in x.shape)],
    )


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).double()


def cases() -> Iterator[tuple[list[Tensor], list[Tensor], int, tuple[int, ...]]]:
    """What every rank holds, plain and in another form, the dim of 10 elements and how ranks cut it."""
    for shape, sizes in itertools.product(SHAPES, SIZES):
        plain = [numbers(shape, seed) for seed in range(WORLD)]
        for row in zip(*(forms(x) for x in plain)):
            yield plain, [x for _, x in row], shape.index(10), sizes
        alike = [torch.full(shape, rank + 1.0, dtype=torch.float64) for rank in range(WORLD)]
        yield alike, [torch.tensor(x.flatten()[0]).expand(shape) for x in alike], shape.index(10), sizes


def check_reduce_scatter(comm: Comm) -> None:
    channel = comm.channel(comm.everyone, "reduce_scatter")
    for plain, strided, dim, sizes in cases():
        expected = sum(plain).split(list(sizes), dim)[comm.rank]
        for algorithm in (None, *c.REDUCE_SCATTER):
            out = c.reduce_scatter(channel, strided[comm.rank], sizes, dim, algorithm=algorithm)
            assert torch.equal(out, expected), (algorithm, plain[0].shape, sizes)
            assert torch.equal(strided[comm.rank], plain[comm.rank])
            out = c.reduce_scatter(
                channel, strided[comm.rank].clone(memory_format=torch.preserve_format), sizes, dim,
                algorithm=algorithm, in_place=True,
            )  # fmt: skip
            assert torch.equal(out, expected), (algorithm, plain[0].shape, sizes, "in place")


def check_by_levels(comm: Comm) -> None:
    channel, levels = comm.channel(comm.everyone, "levels"), ByLevels(comm, PARTS)
    for plain, strided, dim, _ in cases():
        mine, sizes = strided[comm.rank], (6, 0, 4)  # leaders alone have pieces
        out = c.reduce_scatter(channel, mine, sizes, dim, levels=levels)
        assert torch.equal(out, sum(plain).split(list(sizes), dim)[comm.rank])
        assert torch.equal(c.all_reduce(channel, mine, levels=levels), sum(plain))
        piece = mine.split(list(sizes), dim)[comm.rank]
        whole = torch.cat([x.split(list(sizes), dim)[r] for r, x in enumerate(plain)], dim)
        assert torch.equal(c.all_gather(channel, piece, sizes, dim, levels=levels), whole)


def check_the_others(comm: Comm) -> None:
    channel = comm.channel(comm.everyone, "others")
    for plain, strided, dim, sizes in cases():
        mine = strided[comm.rank]
        for direct in (False, True):
            assert torch.equal(c.all_reduce(channel, mine, direct=direct), sum(plain))
        root = 1
        there = mine if comm.rank == root else torch.zeros_like(plain[0])
        assert torch.equal(c.broadcast(channel, there, root), plain[root])
        total = c.reduce(channel, mine, 2)
        assert comm.rank != 2 or torch.equal(total, sum(plain))
        piece = mine.split(list(sizes), dim)[comm.rank]
        whole = torch.cat([x.split(list(sizes), dim)[r] for r, x in enumerate(plain)], dim)
        for algorithm in (None, *c.ALL_GATHER):
            assert torch.equal(c.all_gather(channel, piece, sizes, dim, algorithm=algorithm), whole)
        moved = c.all_to_all(channel, piece, dim, sizes, dim, (4, 0, 6))
        assert torch.equal(moved, whole.split([4, 0, 6], dim)[comm.rank])


def held(placement: Placement, shape: tuple[int, ...], shares) -> Layout:
    ratio, everyone = make_ratio(shares), tuple(range(WORLD))
    if not isinstance(placement, Shard):
        return Layout(placement, everyone)
    return Layout(placement, everyone, shard_sizes(shape[placement.dim], ratio))


def check_gradients(comm: Comm) -> None:
    """The gradient of every redistribution, where what comes back is expanded or strided."""
    shape = (6, 5)
    whole = numbers(shape, 7)
    for src, dst in itertools.product([REPLICATE, PARTIAL, Shard(0), Shard(1)], repeat=2):
        if src == dst:
            continue
        a, b = held(src, shape, (0.5, 0.2, 0.3)), held(dst, shape, (0.5, 0.2, 0.3))
        how = Redistribution(comm, "gradients", shape, torch.float64, a, b)
        mine = whole.narrow(a.dim, *a.piece(comm.rank)) if isinstance(src, Shard) else whole
        for n, stride in itertools.product(range(2), (0, 2)):
            x = mine.clone().requires_grad_()
            tokens: list[Tensor] = []
            y = how.apply(x, tokens)
            coming = torch.ones(()).double().expand(y.shape)
            if stride:
                coming = numbers((*y.shape, stride), n)[..., 0]
            roots = [(y, coming), *((t, torch.zeros_like(t)) for t in tokens)]
            plain = how.backward(coming.contiguous()).wait()
            roots = [(t, g) for t, g in roots if t.requires_grad]
            if roots:  # none on a rank whose addend is zero
                torch.autograd.backward([t for t, _ in roots], [g for _, g in roots])
            assert torch.equal(torch.zeros_like(x) if x.grad is None else x.grad, plain), (src, dst, stride)


CHECKS = {name[6:]: f for name, f in list(globals().items()) if name.startswith("check_")}


@pytest.fixture(scope="module")
def results():
    return run_world(WORLD, CHECKS, make_comm)


@pytest.mark.parametrize("name", CHECKS)
def test_between_processes(results, name):
    assert_passed(results[name])
