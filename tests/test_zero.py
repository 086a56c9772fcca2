"""The allocation of a batch: brute force on small cases, and never behind the obvious allocations."""

from __future__ import annotations

import itertools
import math
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixmesh.cost import Curve
from mixmesh.errors import InputError
from mixmesh.passes.zero import Allocation, allocate, step_seconds

# Seconds of forward and backward, shaped after published throughput of the cards; not measured here.
# A causal model of 0.5 billion parameters, sequences of 2048: near its peak from a few sequences on.
LLAMA_05B = {
    "A100-80GB": (
        [1, 2, 3, 4, 6, 8, 12, 16, 24, 32],
        [0.068, 0.104, 0.149, 0.188, 0.276, 0.361, 0.535, 0.706, 1.055, 1.402],
    ),
    "A100-40GB": ([1, 2, 3, 4, 6, 8, 12], [0.069, 0.107, 0.153, 0.193, 0.283, 0.371, 0.550]),
    "V100-32GB": ([1, 2, 3, 4, 6, 8], [0.165, 0.295, 0.434, 0.563, 0.843, 1.118]),
    "V100-16GB": ([1, 2, 3], [0.168, 0.297, 0.437]),
    "T4-16GB": ([1, 2, 3], [0.410, 0.770, 1.165]),  # the last one throttled
    "RTX3090-24GB": ([1, 2, 3, 4, 5], [0.170, 0.310, 0.455, 0.597, 0.745]),
    "RTX4090-24GB": ([1, 2, 3, 4, 5], [0.083, 0.146, 0.212, 0.276, 0.345]),
}
# A 1.1 billion parameter encoder, sequences of 128: small matrices, so time rises by whole waves of tiles,
# and one size was measured faster than the one before it.
BERT_11B = {
    "A100-80GB": (
        [1, 4, 8, 9, 16, 17, 32, 33, 48, 64, 65, 96],
        [0.041, 0.043, 0.046, 0.058, 0.059, 0.072, 0.104, 0.118, 0.153, 0.196, 0.212, 0.290],
    ),
    "V100-16GB": ([1, 4, 5, 8, 9, 12], [0.062, 0.071, 0.094, 0.096, 0.121, 0.120]),
    "T4-16GB": ([1, 2, 3, 4, 5, 8], [0.150, 0.172, 0.231, 0.240, 0.330, 0.452]),
}
PEAK_TFLOP_PER_S = {
    "A100-80GB": 312, "A100-40GB": 312, "V100-32GB": 125, "V100-16GB": 125, "T4-16GB": 65,
    "RTX3090-24GB": 71, "RTX4090-24GB": 165,
}  # fmt: skip
CLUSTERS = {
    "poplar A": (LLAMA_05B, ["A100-80GB"] * 4 + ["A100-40GB"] * 4),
    "poplar B": (LLAMA_05B, ["V100-16GB"] * 2 + ["T4-16GB"] * 2),
    "cards of a lab": (LLAMA_05B, ["RTX4090-24GB", "RTX3090-24GB", "RTX3090-24GB", "V100-32GB"]),
    "waves of tiles": (BERT_11B, ["A100-80GB"] * 4 + ["V100-16GB"] * 2 + ["T4-16GB"] * 4),
}


def samples_at(curve, size: int) -> float:
    return Curve(tuple(zip(*curve))).at(size)


@st.composite
def curves_of(draw, largest: int):
    """Any shape: falling, flat, with steps, bent either way; sizes may start above 1."""
    sizes = sorted(draw(st.sets(st.integers(1, largest), min_size=1, max_size=largest)))
    free = st.floats(0.01, 5, allow_nan=False)
    kind = draw(st.sampled_from(["free", "steps", "line", "whole"]))
    if kind == "free":
        seconds = [draw(free) for _ in sizes]
    elif kind == "steps":
        tile = draw(st.integers(1, 3))
        seconds = [math.ceil(s / tile) * 0.25 for s in sizes]
    elif kind == "line":
        fixed, slope = draw(st.sampled_from([0.0, 0.1, 1.0])), draw(st.sampled_from([0.1, 0.3]))
        seconds = [fixed + slope * s for s in sizes]
    else:  # many ties
        seconds = [float(draw(st.integers(1, 4))) for _ in sizes]
    slowdown = draw(st.sampled_from([1, 1, 3, 20]))
    return sizes, [s * slowdown for s in seconds]


def fastest_alone(curve, num_samples: int) -> float:
    """A device's time for its own samples: every split there is."""
    best = math.inf if num_samples else 0.0
    for micro in range(1, min(curve[0][-1], num_samples) + 1):
        for last in range(1, micro + 1):
            full, left = divmod(num_samples - last, micro)
            if not left:
                best = min(best, full * samples_at(curve, micro) + samples_at(curve, last))
    return best


def brute_separate(curves, batch: int) -> float:
    alone = [[fastest_alone(c, n) for n in range(batch + 1)] for c in curves]
    shares = itertools.product(range(batch + 1), repeat=len(curves))
    return min(max(t[n] for t, n in zip(alone, ns)) for ns in shares if sum(ns) == batch)


def brute_together(curves, batch: int, collective_s: float) -> float:
    times = [[samples_at(c, n) for n in range(c[0][-1] + 1)] for c in curves]
    best = math.inf
    for micro in itertools.product(*(range(len(t)) for t in times)):
        for last in itertools.product(*(range(m + 1) for m in micro)):
            if not sum(last) or (batch - sum(last)) % sum(micro):
                continue
            full = (batch - sum(last)) // sum(micro)
            slowest = [max(t[n] for t, n in zip(times, ns)) for ns in (micro, last)]
            best = min(best, full * slowest[0] + slowest[1] + (full + 1) * collective_s)
    return best


def check_fields(curves, batch: int, stage: int, found: Allocation) -> None:
    assert sum(found.samples) == batch
    rows = list(zip(found.micro_batch, found.accumulation_steps, found.last_micro_batch))
    for (sizes, _), (micro, steps, last) in zip(curves, rows):
        assert micro <= sizes[-1] and 0 <= last <= micro and (micro > 0) == (steps > 0)
        assert stage > 1 or last > 0 or micro == 0
    assert stage < 2 or len({steps for _, steps, _ in rows if steps}) == 1


@settings(max_examples=150, deadline=None)
@given(st.lists(curves_of(5), min_size=1, max_size=3), st.integers(1, 12), st.sampled_from([0, 1]))
def test_own_counts_equal_brute_force(curves, batch, stage):
    found = allocate(curves, batch, stage=stage, collective_s=0.5)
    check_fields(curves, batch, stage, found)
    assert found.step_s == pytest.approx(brute_separate(curves, batch) + 0.5, rel=1e-11)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(curves_of(4), min_size=1, max_size=3),
    st.integers(1, 25),
    st.sampled_from([2, 3]),
    st.sampled_from([0.0, 0.07, 1.0, 30.0]),
)
def test_a_common_count_equals_brute_force(curves, batch, stage, collective_s):
    found = allocate(curves, batch, stage=stage, collective_s=collective_s)
    check_fields(curves, batch, stage, found)
    assert found.step_s == pytest.approx(brute_together(curves, batch, collective_s), rel=1e-11)


@settings(max_examples=25, deadline=None)
@given(st.lists(curves_of(30), min_size=1, max_size=4), st.integers(30, 300))
def test_own_counts_of_larger_batches(curves, batch):
    # a device's time never falls with its samples, so the step is the batch-th smallest of all those times
    times = []
    for curve in curves:
        t = np.array([samples_at(curve, n) for n in range(curve[0][-1] + 1)])
        m, n = np.arange(1, len(t))[:, None], np.arange(1, batch + 1)
        steps = -(-n // m)
        times += list(((steps - 1) * t[m] + t[n - (steps - 1) * m]).min(axis=0))
    found = allocate(curves, batch, stage=0)
    assert found.step_s == pytest.approx(sorted(times)[batch - 1], rel=1e-11)


def obvious(curves, batch: int, flops: list[float], stage: int) -> dict[str, Allocation]:
    """What one would do without curves: equal, by datasheet, and the faster half alone."""
    fast = [f if f >= sorted(flops)[len(flops) // 2] else 0.0 for f in flops]
    weights = {"equal": [1.0] * len(curves), "by FLOPS": flops, "fast devices only": fast}
    limits = [sizes[-1] for sizes, _ in curves]
    deal = at_own_pace if stage < 2 else in_step
    return {name: deal(limits, batch, w) for name, w in weights.items()}


def at_own_pace(limits: list[int], batch: int, weights: list[float]) -> Allocation:
    edges = [round(batch * w / sum(weights)) for w in itertools.accumulate(weights)]
    samples = [b - a for a, b in zip([0, *edges], edges)]
    steps = [math.ceil(n / limit) for n, limit in zip(samples, limits)]
    micro = [math.ceil(n / k) if k else 0 for n, k in zip(samples, steps)]
    last = [n - (k - 1) * m if k else 0 for n, k, m in zip(samples, steps, micro)]
    return Allocation(tuple(micro), tuple(steps), tuple(last), step_s=0.0)


def in_step(limits: list[int], batch: int, weights: list[float]) -> Allocation:
    """The largest micro-batches of these weights that all can hold; the last ones smaller alike."""
    scale = min(limit / w for limit, w in zip(limits, weights) if w)
    micro = [int(scale * w + 1e-9) for w in weights]
    steps = math.ceil(batch / sum(micro))
    left, room, last = batch - (steps - 1) * sum(micro), sum(micro), []
    for m in micro:
        last.append(math.ceil(left * m / room) if m else 0)
        left, room = left - last[-1], room - m
    return Allocation(tuple(micro), tuple(steps if m else 0 for m in micro), tuple(last), step_s=0.0)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(curves_of(12), st.floats(1, 400)), min_size=1, max_size=6),
    st.integers(1, 500),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.2]),
)
def test_never_behind_the_obvious(devices, batch, stage, collective_s):
    curves, flops = zip(*devices)
    best = allocate(curves, batch, stage=stage, collective_s=collective_s).step_s
    for name, other in obvious(curves, batch, list(flops), stage).items():
        check_fields(curves, batch, stage, other)
        assert best <= step_seconds(curves, other, stage, collective_s) * (1 + 1e-11), name


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_gpus_gain_by_their_curves(cluster, stage):
    table, names = CLUSTERS[cluster]
    curves = [table[name] for name in names]
    best = allocate(curves, 1000, stage=stage, collective_s=0.05)
    check_fields(curves, 1000, stage, best)
    flops = [float(PEAK_TFLOP_PER_S[name]) for name in names]
    for name, other in obvious(curves, 1000, flops, stage).items():
        gain = step_seconds(curves, other, stage, 0.05) / best.step_s
        # two V100 and two T4 that hold three sequences each: FLOPS happen to be right, step by step
        lucky = (cluster, name) == ("poplar B", "by FLOPS") and stage > 1
        assert gain == 1 if lucky else gain > 1.001, (name, gain)
    assert best.step_s == step_seconds(curves, best, stage, 0.05)


def test_a_slow_device_takes_no_part_where_it_would_hold_up_the_others():
    curves = [BERT_11B["A100-80GB"]] * 4 + [BERT_11B["T4-16GB"]] * 4
    assert all(n > 0 for n in allocate(curves, 1280, stage=1).samples)
    common = allocate(curves, 128, stage=2)  # a T4 needs longer for one than an A100 for its 32
    assert common.micro_batch == common.last_micro_batch == (32, 32, 32, 32, 0, 0, 0, 0)
    assert common.accumulation_steps == (1, 1, 1, 1, 0, 0, 0, 0)


def test_a_device_twenty_times_slower_gets_the_rest():
    curves = [([1, 8], [0.1, 0.8]), ([1, 8], [2.0, 16.0])]
    assert allocate(curves, 21, stage=0).samples == (20, 1)
    assert allocate(curves, 19, stage=0).samples == (19, 0)


def test_expensive_collectives_call_for_fewer_steps():
    curve = ([1, 4, 5, 8], [1.0, 1.3, 3.0, 3.3])  # best rate at 4
    assert allocate([curve] * 2, 16, stage=3).accumulation_steps == (2, 2)
    assert allocate([curve] * 2, 16, stage=3, collective_s=2.0).accumulation_steps == (1, 1)


@pytest.mark.parametrize("stage", range(4))
def test_of_equally_fast_choices_the_fewest_and_most_even_steps(stage):
    line = ([1, 4], [0.1, 0.4])
    found = allocate([line, line], 18, stage=stage)
    assert found.samples == (9, 9)
    assert found.micro_batch == (3, 3) and found.accumulation_steps == (3, 3)


def test_equal_devices_differ_by_one_sample_at_most():
    flat = ([1, 64], [1.0, 1.0])
    for stage in range(4):
        found = allocate([flat] * 5, 123, stage=stage)
        assert max(found.samples) - min(found.samples) == 1 and found.step_s == 1.0


@pytest.mark.parametrize("stage", range(4))
def test_fewer_samples_than_devices(stage):
    found = allocate([([1], [1.0])] * 6 + [([1], [0.5])], 3, stage=stage, collective_s=0.25)
    # alone, the fast device would need 1.5 s and three rounds of collectives
    assert sum(found.samples) == 3 and max(found.samples) == 1 and found.step_s == 1.25


@pytest.mark.parametrize("stage", range(4))
def test_the_order_of_devices_does_not_matter(stage):
    curves = [BERT_11B[name] for name in CLUSTERS["waves of tiles"][1]]
    first = allocate(curves, 777, stage=stage, collective_s=0.01)
    again = allocate(tuple(curves), 777, stage=stage, collective_s=0.01)
    turned = allocate(curves[::-1], 777, stage=stage, collective_s=0.01)
    assert first == again and turned.step_s == pytest.approx(first.step_s, rel=1e-11)


@given(curves_of(9))
def test_times_are_those_of_the_cost_models_curve(curve):
    for size in range(1, curve[0][-1] + 1):
        one = Allocation((size,), (1,), (size,), step_s=0.0)
        assert step_seconds([curve], one, 0) == pytest.approx(samples_at(curve, size), rel=1e-12)


@pytest.mark.parametrize("limit", [48, 1024, 65536])
@pytest.mark.parametrize("stage", [1, 3])
def test_two_million_samples_on_64_devices(limit, stage):
    draw = random.Random(limit)
    curves = []
    for _ in range(64):  # all different
        sizes = sorted({1, limit, *(draw.randint(1, limit) for _ in range(20))})
        fixed, rate = draw.uniform(0.01, 0.05), draw.uniform(1, 20)
        curves.append((sizes, [(fixed + s / limit / rate) * draw.uniform(0.97, 1.03) for s in sizes]))
    start = time.process_time()
    found = allocate(curves, 2_000_000, stage=stage, collective_s=0.003)
    assert time.process_time() - start < 3  # well under one on an idle core
    assert sum(found.samples) == 2_000_000
    # no device beats its best rate; with many micro-batches each, all come near it
    bound = 2_000_000 / sum(max(s / samples_at(c, s) for s in c[0]) for c in curves)
    assert bound <= found.step_s
    assert found.step_s < 1.01 * bound or limit > 48 or stage > 1


GOOD = ([1, 2], [1.0, 2.0])


@pytest.mark.parametrize(
    ("curve", "says"),
    [
        (([], []), "empty"),
        (([1, 2], [1.0]), "2 sizes and 1 times"),
        (([1], [-1.0]), "-1.0 at micro-batch 1"),
        (([1, 4], [1.0, 0.0]), "0.0 at micro-batch 4"),
        (([1], [math.nan]), "nan"),
        (([1], [math.inf]), "inf"),
        (([1], ["1"]), "'1' at micro-batch 1"),
        (([0, 1], [1.0, 1.0]), "got      0"),
        (([1.5], [1.0]), "1.5"),
        (([True], [1.0]), "True"),
        (([2, 1], [1.0, 1.0]), "1 after 2"),
        (([2, 2], [1.0, 1.0]), "2 after 2"),
        (3, "pair"),
        (([1], [1.0], [1.0]), "pair"),
    ],
)
def test_a_bad_curve_is_named(curve, says):
    with pytest.raises(InputError) as raised:
        allocate([GOOD, curve], 4, stage=0)
    assert "device 1" in str(raised.value) and says in str(raised.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"stage": 4}, "stage=4"),
        ({"stage": True}, "stage=True"),
        ({"stage": "1"}, "stage='1'"),
        ({"global_batch": 0}, "global_batch=0"),
        ({"global_batch": 2.0}, "global_batch=2.0"),
        ({"collective_s": -1.0}, "collective_s=-1.0"),
        ({"collective_s": math.nan}, "collective_s=nan"),
        ({"curves": []}, "no curves"),
        ({"curves": None}, "None"),
        ({"curves": [([1, 10**9], [1.0, 2.0])], "global_batch": 10**9}, "not tokens"),
    ],
)
def test_bad_arguments(change, says):
    arguments = {"curves": [GOOD], "global_batch": 4, "stage": 0} | change
    with pytest.raises(InputError) as raised:
        allocate(arguments.pop("curves"), arguments.pop("global_batch"), **arguments)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("stage", "fields", "says"),
    [
        (0, ((3, 1), (1, 1), (3, 1)), "device 0 cannot hold"),
        (0, ((1, 2), (2, 2), (1, 0)), "device 1"),
        (2, ((1, 1), (2, 3), (1, 1)), "2, 3"),
        (1, ((1,), (1,), (1,)), "other devices"),
        (1, ((0, 0), (0, 0), (0, 0)), "does nothing"),
        (3, ((1, 1), (1, 1), (1, 2)), "device 1"),
    ],
)
def test_an_allocation_that_does_not_fit(stage, fields, says):
    with pytest.raises(InputError, match=says):
        step_seconds([GOOD, GOOD], Allocation(*fields, step_s=0.0), stage)
