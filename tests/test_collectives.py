"""Every algorithm of every collective on unequal pieces, and redistributions with their gradients,
between real processes, against the plain result."""

from __future__ import annotations

import itertools
import math
import threading

import pytest
import torch
from gloo_world import assert_passed, run_world

from mixmesh.lang.ir import PARTIAL, REPLICATE, Shard, make_ratio, parse_program, shard_sizes, support
from mixmesh.runtime import collectives as c
from mixmesh.runtime import works
from mixmesh.runtime.comm import Comm
from mixmesh.runtime.layout import Layout, meetings, route
from mixmesh.runtime.redistribute import Redistribution

WORLD = 3
SETS = [("data", ranks) for k in (2, 3) for ranks in itertools.combinations(range(WORLD), k)]
SIZES = [(3, 5, 2), (0, 7, 3), (4, 0, 0), (0, 0, 0)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32]


def make_comm() -> Comm:
    return Comm.of_sets(WORLD, SETS, device="cpu", timeout_s=20)


def whole(shape, dtype=torch.float64, seed=0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=g).to(dtype)  # small integers: sums are exact


def shape_with(dim: int, size: int) -> tuple[int, ...]:
    shape = [4, 3, 2]
    shape[dim] = size
    return tuple(shape)


def check_all_gather(comm: Comm) -> None:
    channel = comm.channel(comm.everyone, "all_gather")
    for algorithm in [None, "grouped", *c.ALL_GATHER]:
        for sizes, dim in itertools.product(SIZES, range(3)):
            for dtype in [*DTYPES, torch.bool]:
                full = whole(shape_with(dim, sum(sizes)), dtype)
                mine = full.split(list(sizes), dim)[comm.rank]
                for gather in (c.all_gather, lambda *a, **k: c.all_gather.start(*a, **k).wait()):
                    out = gather(channel, mine, sizes, dim, algorithm=algorithm)
                    assert torch.equal(out, full), (algorithm, sizes, dim, dtype)
                    assert out.is_contiguous()


def check_reduce_scatter(comm: Comm) -> None:
    channel = comm.channel(comm.everyone, "reduce_scatter")
    for algorithm in [None, "grouped", *c.REDUCE_SCATTER]:
        for sizes, dim, dtype in itertools.product(SIZES, range(3), DTYPES):
            addends = [whole(shape_with(dim, sum(sizes)), dtype, seed) for seed in range(WORLD)]
            mine, before = addends[comm.rank], addends[comm.rank].clone()
            expected = sum(addends).split(list(sizes), dim)[comm.rank]
            out = c.reduce_scatter(channel, mine, sizes, dim, algorithm=algorithm)
            assert torch.equal(out, expected), (algorithm, sizes, dim, dtype)
            assert torch.equal(mine, before)
            handle = c.reduce_scatter.start(channel, mine, sizes, dim, algorithm=algorithm)
            assert torch.equal(handle.wait(), expected)


def check_all_to_all(comm: Comm) -> None:
    channel = comm.channel(comm.everyone, "all_to_all")
    for a, b in itertools.product(SIZES[:3], SIZES[:3]):
        for src_dim, dst_dim in itertools.permutations(range(3), 2):
            shape = list(shape_with(src_dim, sum(a)))
            shape[dst_dim] = sum(b)
            full = whole(tuple(shape))
            mine = full.split(list(a), src_dim)[comm.rank]
            out = c.all_to_all(channel, mine, src_dim, a, dst_dim, b)
            assert torch.equal(out, full.split(list(b), dst_dim)[comm.rank]), (a, b, src_dim, dst_dim)


def check_change_of_ratio(comm: Comm) -> None:
    channel = comm.channel(comm.everyone, "move")
    cuts = [(3, 5, 2), (0, 7, 3), (10, 0, 0), (0, 0, 10), (4, 4, 2)]
    for a, b in itertools.product(cuts, cuts):
        for dim in range(3):
            full = whole(shape_with(dim, 10))
            out = c.all_to_all(channel, full.split(list(a), dim)[comm.rank], dim, a, dim, b)
            assert torch.equal(out, full.split(list(b), dim)[comm.rank]), (a, b, dim)


def check_pairwise(comm: Comm) -> None:
    """The same, however little is sent, by sends and receives of each two."""
    usual, c.PAIRWISE_BYTES = c.PAIRWISE_BYTES, 0
    try:
        for check in (check_all_gather, check_all_to_all, check_change_of_ratio):
            check(comm)
        check_many_at_once(comm)
    finally:
        c.PAIRWISE_BYTES = usual


def check_many_at_once(comm: Comm) -> None:
    """More exchanges than are waited for at once, on several groups, awaited last first."""
    going = []
    for n in range(30):
        for ranks in ((0, 1, 2), (0, 1), (1, 2)):
            if comm.rank in ranks:
                full, sizes = whole((n + 1, 4000 + n), seed=n), (n + 1, *[0] * (len(ranks) - 2), 3999)
                mine = full.split(list(sizes), 1)[ranks.index(comm.rank)]
                channel = comm.channel(ranks, "all_gather")
                handle = c.all_gather.start(channel, mine, sizes, 1, algorithm="all_to_all")
                going.append((handle, full))
    for handle, full in reversed(going):
        assert torch.equal(handle.wait(), full)
        assert handle.is_ready()


def check_threads_of_exchanges_end_before_the_process(comm: Comm) -> None:
    """A thread that still waits when the interpreter ends aborts it; the next exchange starts others."""

    def running() -> list[str]:
        return [
            t.name for t in threading.enumerate() if t.name.startswith(("mixmesh posts", "mixmesh watches"))
        ]

    check_many_at_once(comm)
    assert running()
    works.end_threads()
    assert not running()
    check_many_at_once(comm)
    assert running()


def check_never_awaited(comm: Comm) -> None:
    """A gather that a rank lets go of while it is under way is in nobody's way."""
    channel = comm.channel(comm.everyone, "all_gather")
    full, sizes = whole((3_000_000,)), (1_500_000, 900_000, 600_000)
    mine = full.split(list(sizes))[comm.rank]
    for _ in range(3):
        handle = c.all_gather.start(channel, mine, sizes)
        if comm.rank != 2:
            del handle
        out = c.reduce_scatter(channel, full, sizes)
        assert torch.equal(out, WORLD * mine)


def check_all_reduce(comm: Comm) -> None:
    channel = comm.channel(comm.everyone, "all_reduce")
    for dtype in [*DTYPES, torch.int16]:
        addends = [whole((4, 3), dtype, seed) for seed in range(WORLD)]
        mine, before = addends[comm.rank], addends[comm.rank].clone()
        assert torch.equal(c.all_reduce(channel, mine), sum(addends))
        assert torch.equal(mine, before)
        out = c.all_reduce(channel, mine.T, op="max")
        assert torch.equal(out, torch.stack(addends).amax(0).T)
        expected = sum(addends)
        c.all_reduce(channel, mine, in_place=True)
        assert torch.equal(mine, expected)
    assert c.all_reduce(channel, torch.empty(0, 3)).shape == (0, 3)


def check_all_reduce_directly(comm: Comm) -> None:
    channel = comm.channel(comm.everyone, "all_reduce")
    for dtype in [*DTYPES, torch.int16]:
        addends = [whole((4, 3), dtype, seed) for seed in range(WORLD)]
        mine, before = addends[comm.rank], addends[comm.rank].clone()
        out = c.all_reduce(channel, mine, direct=True)
        assert torch.equal(out, sum(addends)) and out.dtype == dtype
        assert torch.equal(mine, before)
        for op, expected in (("max", torch.stack(addends).amax(0)), ("prod", math.prod(addends))):
            assert torch.equal(c.all_reduce(channel, mine.T, op=op, direct=True), expected.T)
        expected = sum(addends)
        handle = c.all_reduce.start(channel, mine, direct=True, in_place=True)
        assert torch.equal(handle.wait(), expected) and torch.equal(mine, expected)
    large = torch.full((2**15,), comm.rank + 1.0)  # goes by sends and receives of each two
    assert torch.equal(c.all_reduce(channel, large, direct=True), torch.full((2**15,), 6.0))
    assert c.all_reduce(channel, torch.empty(0, 3), direct=True).shape == (0, 3)


RATIOS = [
    make_ratio(shares)
    for shares in ([1, 1, 1], [0.5, 0.2, 0.3], [0, 0.6, 0.4], [1, 0, 0], [0, 0, 1], [0.3, 0.7, 0])
]
PLACEMENTS = [REPLICATE, PARTIAL, Shard(0), Shard(1), Shard(1, 2)]
SHAPE = (7, 6)


def held(placement, ratio) -> Layout:
    if not isinstance(placement, Shard):
        return Layout(placement, support(ratio))
    return Layout(placement, support(ratio), shard_sizes(SHAPE[placement.dim], ratio, placement.unit))


def parts(full: torch.Tensor, at: Layout) -> list[torch.Tensor | None]:
    """What each rank holds of a tensor (addends are different on each rank)."""
    out: list[torch.Tensor | None] = [None] * WORLD
    left = full
    for n, rank in enumerate(at.ranks):
        if isinstance(at.placement, Shard):
            out[rank] = full.narrow(at.dim, *at.piece(rank))
        elif at.placement == PARTIAL and n + 1 < len(at.ranks):
            out[rank] = whole(SHAPE, seed=100 + rank)
            left = left - out[rank]
        else:
            out[rank] = left if at.placement == PARTIAL else full
    return out


def value_of(pieces: list[torch.Tensor | None], at: Layout) -> torch.Tensor:
    mine = [pieces[rank] for rank in at.ranks]
    if isinstance(at.placement, Shard):
        return torch.cat(mine, at.dim)
    if at.placement == PARTIAL:
        return sum(mine)
    assert all(torch.equal(p, mine[0]) for p in mine)
    return mine[0]


def gathered(comm: Comm, x: torch.Tensor | None) -> list[torch.Tensor | None]:
    out = [None] * WORLD
    torch.distributed.all_gather_object(out, x)
    return out


LAYOUT_PAIRS = [
    (held(p, r), held(q, s))
    for p, q in itertools.product(PLACEMENTS, PLACEMENTS)
    for r, s in itertools.product(RATIOS, RATIOS)
]


def check_redistribute(comm: Comm) -> None:
    """Values: what the destination holds is the same tensor. Gradients: the transpose of the forward."""
    full, seed = whole(SHAPE, seed=1), whole(SHAPE, seed=2)
    for src, dst in LAYOUT_PAIRS[::5]:
        how = Redistribution(comm, "redistribute", SHAPE, torch.float64, src, dst)
        x = parts(full, src)[comm.rank]
        x = None if x is None else x.clone().requires_grad_()
        tokens: list[torch.Tensor] = []
        y = how.apply(x, tokens)
        pieces = gathered(comm, None if y is None else y.detach())
        assert [p is not None for p in pieces] == [rank in dst.ranks for rank in range(WORLD)], (src, dst)
        assert torch.equal(value_of(pieces, dst), full), (src, dst)
        g = parts(seed, dst.dual)[comm.rank]
        root = sum(t.sum() for t in tokens) + (0 if y is None else (y * g).sum())
        if isinstance(root, torch.Tensor) and root.requires_grad:
            root.backward()
        mine = None if x is None else torch.zeros_like(x) if x.grad is None else x.grad
        assert torch.equal(value_of(gathered(comm, mine), src.dual), seed), (src, dst, "gradient")


CHECKS = {name[6:]: f for name, f in list(globals().items()) if name.startswith("check_")}


@pytest.fixture(scope="module")
def results():
    return run_world(WORLD, CHECKS, make_comm)


@pytest.mark.parametrize("name", CHECKS)
def test_between_processes(results, name):
    assert_passed(results[name])


def test_a_route_meets_only_the_ranks_it_needs():
    root, everyone = make_ratio([0, 1, 0]), make_ratio([1, 1, 1])
    (gather,) = route(held(Shard(0), root), held(REPLICATE, everyone))
    assert gather.kind == "gather" and gather.src.sizes == (0, 7, 0)  # in effect a broadcast
    (slice_,) = route(held(REPLICATE, everyone), held(Shard(1), RATIOS[1]))
    assert slice_.kind == "slice" and slice_.ranks == ()
    fewer, more = held(REPLICATE, RATIOS[2]), held(REPLICATE, everyone)
    assert route(more, fewer)[0].ranks == ()  # ranks 1 and 2 keep their copies
    assert route(fewer, more)[0].ranks == (0, 1)
    assert route(fewer, fewer) == ()


def test_meetings_of_a_program_come_in_program_order():
    program = parse_program("""
    program p world=3 {
      ratio r0 = [0.5, 0.5, 0]
      %w = param("w") : f32[4, 4] R
      %v = param("v") : f32[4, 4] S(0)@r0
      %g = all_gather(%v) : f32[4, 4] R@r0
      %l = aten.sum(%g) : f32[] P(sum)@r0
      return %l
    }""")
    assert list(meetings(program)) == [("gradient", (0, 1, 2)), ("parameter", (0, 1))]
