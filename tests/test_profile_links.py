"""Measured collectives: their curves, the profile that keeps them, the choice of algorithms, the warnings."""

from __future__ import annotations

import json
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gloo_world import assert_passed, run_world
from small_graphs import GRAPHS, graph

from benchmarks import jobs
from mixmesh.base.heap import OWN_PIECE_BYTES
from mixmesh.cluster import Cluster
from mixmesh.cost import (
    ALWAYS_WARM,
    Cold,
    CollectiveFit,
    CostModel,
    DeviceProfile,
    LinkMeasurement,
    Profile,
    device_key,
)
from mixmesh.cost.exchanges import Exchange, exchange_of, sent_between
from mixmesh.cost.gaps import gaps
from mixmesh.cost.sums import gradient_sums
from mixmesh.errors import InputError
from mixmesh.frontend.job import Job
from mixmesh.lang.check import check_program
from mixmesh.lang.ir import even_ratio, parse_program
from mixmesh.measure.profiler import links as measuring
from mixmesh.measure.profiler.joins import SIZES_BYTES, measure_joins
from mixmesh.measure.profiler.limit import Limit
from mixmesh.measure.profiler.links import (
    BUCKET_BYTES,
    SURE_BYTES,
    link_cases,
    link_groups,
    link_sets,
    measure_links,
)
from mixmesh.measure.profiler.meter import Meter
from mixmesh.measure.profiler.overhead import measure_overhead
from mixmesh.measure.profiler.overlap import measure_overlap
from mixmesh.measure.profiler.rest import WATCHED_S, measure_rest, rested
from mixmesh.measure.profiler.within import Found, after_waits, fitted, measure_within, with_cold
from mixmesh.passes.algorithms import with_algorithms
from mixmesh.passes.buckets import numbered
from mixmesh.planner import make_plan
from mixmesh.runtime.comm import Comm
from mixmesh.runtime.redistribute import bind
from mixmesh.search.baselines import data_parallel, fully_sharded
from mixmesh.simulator import Simulation, simulate
from mixmesh.simulator.channels import Channels

CLUSTER = """\
name = "{name}"
[network]
bandwidth_gbit_per_s = {gbit}
latency_us = 10
[[machine]]
devices = [{{ name = "a", cpu_share = 0.6 }}, {{ name = "b", cpu_share = 0.3 }}]
[[machine]]
devices = [{{ name = "b", cpu_share = 0.3 }}]
"""
ALL = (0, 1, 2)
KB, MB = 2.0**10, 2.0**20


def cluster(name: str = "three", gbit: float = 1) -> Cluster:
    return Cluster.parse(CLUSTER.format(name=name, gbit=gbit))


def measured(collective: str, algorithm: str, *ms: float, ranks=ALL, skew: float = 1.0) -> LinkMeasurement:
    """Milliseconds at 4 KB, 1 MB and 16 MB, as far as given."""
    points = tuple(zip((4 * KB, MB, 16 * MB), (m * 1e-3 for m in ms)))
    return LinkMeasurement(collective, algorithm, ranks, points, skew, "made up")


def costs(*links: LinkMeasurement, **provenance) -> CostModel:
    return CostModel(cluster(), Profile({}, links, {"backend": "gloo", **provenance}))


# --- curves ------------------------------------------------------------------------------------------------


def test_the_fastest_algorithm_changes_with_the_size():
    cost = costs(
        measured("all_gather", "all_to_all", 1, 20, 320), measured("all_gather", "broadcasts", 5, 18, 200)
    ).collective("all_gather", ALL)
    assert (cost.algorithm(4 * KB), cost.seconds(4 * KB)) == ("all_to_all", pytest.approx(1e-3))
    assert (cost.algorithm(16 * MB), cost.seconds(16 * MB)) == ("broadcasts", pytest.approx(0.2))
    assert cost.seconds(8.5 * MB) == pytest.approx((18 + 182 / 2) * 1e-3)  # linear in between
    assert cost.covers(16 * MB) and not cost.covers(17 * MB)


def test_small_sizes_say_nothing_of_large_ones():
    """An algorithm that was too slow to be measured further must not look free where others were."""
    short, long = measured("all_gather", "padded", 2), measured("all_gather", "broadcasts", 5, 18, 200)
    assert costs(short, long).collective("all_gather", ALL).algorithm(8 * MB) == "broadcasts"
    alone = costs(short).collective("all_gather", ALL)
    assert alone.seconds(16 * MB) > 16 * MB * 2 / 3 / 125e6  # what the wire takes


def test_unequal_pieces_cost_what_was_measured_of_them():
    links = (
        measured("all_gather", "padded", 2, 10, skew=1.0),
        measured("all_gather", "padded", 2, 20, skew=2.0),
    )
    cost = costs(*links).collective("all_gather", ALL)
    assert cost.seconds(MB, 1.0) == pytest.approx(0.010) and cost.seconds(MB, 2.0) == pytest.approx(0.020)
    assert cost.seconds(MB, 1.5) == pytest.approx(0.015) and cost.seconds(MB, 3.0) == pytest.approx(0.030)
    assert cost.seconds(MB) == cost.seconds(MB, 2.0)
    far = costs(links[0], measured("all_gather", "padded", 2, 20, 320, skew=2.0)).collective(
        "all_gather", ALL
    )
    assert far.seconds(16 * MB, 1.0) == pytest.approx(0.160)  # half, as at the largest size that both have
    # not what small messages, which are mostly latency, save
    small = costs(
        measured("all_gather", "padded", 1, skew=1.0), measured("all_gather", "padded", 2, 20, 320, skew=2.0)
    ).collective("all_gather", ALL)
    assert small.seconds(16 * MB, 1.0) == pytest.approx(0.320)
    large = LinkMeasurement("all_gather", "padded", ALL, ((MB, 0.010),), 1.0, "made up")
    late = costs(large, measured("all_gather", "padded", 2, 20, skew=2.0)).collective("all_gather", ALL)
    assert late.seconds(4 * KB, 1.0) == pytest.approx(0.001)


def test_other_groups_are_estimated_from_the_one_most_alike():
    links = (
        measured("all_reduce", "", 6, 18, 260),
        measured("all_reduce", "", 1, 2, 10, ranks=(0, 1)),
    )
    model = costs(*links)
    inside, across = model.collective("all_reduce", (0, 1)), model.collective("all_reduce", (0, 2))
    assert inside.is_measured and inside.seconds(16 * MB) == pytest.approx(0.010)
    # two ranks move 2 * 1/2 of the bytes where three move 2 * 2/3, in half the hops
    assert not across.is_measured
    assert across.seconds(16 * MB) == pytest.approx((6 / 2 + 254 * 3 / 4) * 1e-3, rel=1e-3)


def test_nothing_measured_is_the_estimate_of_the_links():
    cost = costs(measured("all_reduce", "", 6, 18)).collective("all_gather", ALL)
    assert isinstance(cost, CollectiveFit) and cost.algorithm(MB) is None


def test_what_goes_one_way_is_like_what_one_sends_another():
    """Links that are full both ways are slower here, and nothing comes back from the next stage."""
    both = measured("all_to_all", "", 2, 30, 480)
    one = measured("send", "", 1, 9, 144, ranks=(0, 2))
    model = costs(both, one)
    to_next = Exchange("all_to_all", 4 * 2**20, ALL, sent_between((0.5, 0.5, 0.0), (0.0, 0.0, 1.0)))
    assert to_next.is_one_way  # of 4 MB all cross the NICs
    assert to_next.seconds(model) == pytest.approx((9 + 135 * 3 / 15) * 1e-3)
    back = Exchange("all_to_all", 4 * 2**20, ALL, sent_between((0.0, 0.0, 1.0), (0.5, 0.5, 0.0)))
    assert back.is_one_way and back.seconds(model) == pytest.approx(to_next.seconds(model), rel=0.2)
    turned = Exchange("all_to_all", 2**20, ALL, sent_between((0.4, 0.3, 0.3), (0.2, 0.3, 0.5)))
    assert not turned.is_one_way
    name, ranks, size_bytes = turned.as_measured(model.cluster)
    assert (name, ranks) == ("all_to_all", ALL)
    # 0.2 of it cross the NICs, where an even one has 2/9 there
    assert size_bytes == pytest.approx(2**20 * 0.2 / (2 / 9))


# --- rest ---------------------------------------------------------------------------------------------------


def under_a_quota(share: float, period_s: float, begins_at: float, unit_s: float) -> list[float]:
    """When units are done that take a processor ``unit_s``, from somewhere in a period on, of whose quota
    nothing is used yet."""
    t, left, times = 0.0, share * period_s, []
    over = period_s - begins_at
    while t < WATCHED_S:
        todo = unit_s
        while todo > 1e-12:
            run = min(todo, left, over - t)
            t, todo, left = t + run, todo - run, left - run
            if left <= 1e-12 or over - t <= 1e-12:
                t, left, over = over, share * period_s, over + period_s
        times.append(t)
    return times


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_a_quota_is_seen_as_a_lead(share):
    """Half a period's wait for its quota that the rest saves, and as much from where in a period it is."""
    period_s, unit_s = 0.02, 2e-4
    rounds = [under_a_quota(share, period_s, n / 20 * period_s, unit_s) for n in range(20)]
    lead_s, speed = rested(rounds)
    assert lead_s == pytest.approx((1 - share) * period_s, rel=0.25)
    assert speed == pytest.approx(1 / share, rel=0.15)


def test_a_steady_device_has_no_lead():
    rounds = [[(n + 0.3 * ((n + k) % 3)) * 1e-3 for n in range(1, 170)] for k in range(5)]
    assert rested(rounds) == (0.0, 1.0)


# --- the profile -------------------------------------------------------------------------------------------


def test_a_profile_is_read_as_it_was_written(tmp_path):
    links = measured("all_gather", "padded", 2, 10, skew=1.5), measured("send", "", 1, 9, ranks=(0, 2))
    rest = {"rested_s": 0.01, "rested_speed": 2.5, "beside_s": {"all_reduce": (1e-4, 3e-10)}}
    rest |= {"join_s": ((65536.0, 1e-5), (8388608.0, 0.003)), "cold": Cold(1e-4, 4e-4, 0.012)}
    rest |= {"redistribution_s": 1e-4, "overhead_s": 2e-3}
    made = Profile(
        {"cpu": DeviceProfile({}, 1e-9, 5, 1.1, 0.3, {"all_reduce": (1e-4, 2e-9)}, 3.0, 4, **rest)},
        links,
        {"backend": "gloo"},
    )
    made.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == made


def test_the_computing_thread_is_kept_longer_where_it_computes():
    """A call for each piece costs as much as there are pieces; one for all does not. A collective that was
    not measured costs as much as a sum, or plans with many small broadcasts would seem free of them."""
    known = {"all_gather broadcasts": (0.004, 1e-9), "all_reduce": (0.001, 2e-9)}
    profile = Profile(
        {device_key(d): DeviceProfile({}, 0.0, 0, host_s=known, host_scale=5.0) for d in cluster().devices},
        (
            measured("all_gather", "broadcasts", 2, 10),
            measured("all_gather", "broadcasts", 1, 5, ranks=(0, 1)),
        ),
        {},
    )
    model = CostModel(cluster(), profile)
    assert model.exchange_host_s(0, "all_reduce", ALL, 1e6) == pytest.approx(5 * (0.001 + 2e-9 * 1e6))
    assert model.exchange_alone_s(0, "all_gather", ALL, 1e6) == pytest.approx(0.004 + 1e-3)
    pair = model.exchange_alone_s(0, "all_gather", (0, 1), 1e6)
    assert pair == pytest.approx(0.004 * 2 / cluster().world_size + 1e-3)
    for name in ("broadcast", "reduce"):
        assert model.exchange_host_s(0, name, ALL, 1e6) == model.exchange_host_s(0, "all_reduce", ALL, 1e6)


def test_a_call_after_computing_takes_longer_than_one_of_many():
    """It does so where it is issued within a step: collectives themselves were measured in a loop."""

    def model(cold: Cold) -> CostModel:
        host_s = {"all_reduce": (0.001, 2e-9)}
        device = DeviceProfile({}, 0.0, 0, host_s=host_s, host_scale=5.0, cold=cold)
        links = (measured("all_reduce", "", 6, 18, 260),)
        return CostModel(cluster(), Profile({device_key(d): device for d in cluster().devices}, links))

    assert model(Cold(0.002)).exchange_host_s(0, "all_reduce", ALL, 1e6) == pytest.approx(5 * 0.003)
    assert model(Cold(0.002)).exchange_alone_s(0, "all_reduce", ALL, 1e6) == pytest.approx(0.003)
    program = data_parallel(graph(GRAPHS["mlp"], 64), model(ALWAYS_WARM), even_ratio(3))
    hot, cold = (simulate(program, model(c)).step_s for c in (ALWAYS_WARM, Cold(0.002)))
    # the start of the loss's sum and that of the gradients; nothing is computed before ranks agree on a batch
    assert cold - hot == pytest.approx(2 * 5 * 0.002)


def test_calls_become_cold_with_the_seconds_of_computing_since_the_last_one():
    cold = Cold(0.001, 0.004, 0.01)
    assert cold.extra_s(0.0) == 0.0 and cold.extra_s(1e-9) == pytest.approx(0.001)
    assert cold.extra_s(0.01) == pytest.approx(0.001 + 0.004 * (1 - math.exp(-1)))
    assert cold.extra_s(1.0) == pytest.approx(0.005)
    assert cold.scaled(3).extra_s(0.03) == pytest.approx(3 * cold.extra_s(0.01))
    since_s = np.geomspace(1e-4, 0.1, 60)
    noise = np.random.default_rng(0)
    extra_s = [
        cold.extra_s(s) * noise.normal(1, 0.1) + (0.05 if n % 20 == 7 else 0) for n, s in enumerate(since_s)
    ]
    found = fitted(list(zip(since_s.tolist(), extra_s)))
    for s in (1e-3, 1e-2, 5e-2):  # three calls of sixty were disturbed
        assert found.extra_s(s) == pytest.approx(cold.extra_s(s), rel=0.1)
    assert fitted([(0.01, 0.001)] * 3) == ALWAYS_WARM
    assert not fitted([(s, -0.001) for s in since_s])  # faster than in a loop: not cold


def test_computing_after_a_wait_takes_longer():
    """It does after a collective that is awaited at once, in proportion to that up to a longest wait."""

    def model(waited_s: float, transfer_s: float) -> CostModel:
        host_s = {"all_reduce": (1e-9, 0.0)}
        cold = Cold(0.0, 0.0, 1.0, waited_s)
        device = DeviceProfile({}, 0.0, 0, host_s=host_s, host_scale=2.0, cold=cold)
        links = [
            LinkMeasurement(name, "", ALL, ((1.0, transfer_s), (1e9, transfer_s)))
            for name in ("all_gather", "reduce_scatter", "all_reduce")
        ]
        return CostModel(cluster(), Profile({device_key(d): device for d in cluster().devices}, tuple(links)))

    program = fully_sharded(data_parallel(graph(GRAPHS["mlp"], 64), model(0.0, 0.01), even_ratio(3)))
    for transfer_s, share in ((0.01, 0.5), (0.5, 1.0)):
        before, after = (simulate(program, model(waited_s, transfer_s)) for waited_s in (0.0, 0.003))
        waits = (after.step_s - before.step_s) / (2 * 0.003 * share)
        assert waits == pytest.approx(round(waits)) and round(waits) >= 1, waits


def test_waits_within_passes_are_found_by_their_pairs():
    without, with_waits = [(0.1, 10), (0.2, 20)], [(0.11, 10), (0.22, 20)]
    assert after_waits(Found([], [], without, with_waits)) == pytest.approx(0.001)
    assert after_waits(Found([], [], with_waits, without)) == 0.0 == after_waits(Found())


def test_redistributions_cost_more_than_their_collectives():
    """Autograd's nodes come on top; sums of gradients have none."""
    device = DeviceProfile({}, 0.0, 0, host_scale=2.0, redistribution_s=1e-4)
    model = CostModel(cluster(), Profile({device_key(d): device for d in cluster().devices}, ()))
    network = Channels(model, [(0.0, 1.0)] * 3)
    exchange = Exchange("all_reduce", 2**10, ALL)
    for purpose in ("data", "parameter"):
        assert network.call(exchange, purpose, has_nodes=True).host == (1e-4,) * 3  # in both halves
    assert not network.call(exchange, "gradient").host
    program = fully_sharded(data_parallel(graph(GRAPHS["mlp"], 64), model, even_ratio(3)))
    parts = Simulation(program, model).parts
    assert parts.loss is not None and not parts.loss.host
    assert all(call.host == (1e-4,) * 3 for call in parts.forward.calls) and parts.forward.calls


def test_large_results_come_in_new_pages():
    own = OWN_PIECE_BYTES
    join_s = ((2**16, 1e-5), (own - 2**16, 1e-3), (own, 4e-3), (2 * own, 8e-3))
    device = DeviceProfile({}, 0.0, 0, host_scale=2.0, join_s=join_s)
    model = CostModel(cluster(), Profile({device_key(d): device for d in cluster().devices}, ()))
    assert model.new_pages_s(0, own - 1) == 0.0
    assert model.new_pages_s(0, 2 * own) == pytest.approx(2 * (8e-3 - 2e-3), rel=0.02)
    network = Channels(model, [(0.0, 1.0)] * 3)
    for name, halves in (("all_gather", 3), ("all_reduce", 0)):
        small, large = (network.call(Exchange(name, size, ALL)).host for size in (2**20, own))
        assert not small and sum(large) == pytest.approx(halves * model.new_pages_s(0, own) / 2)


def test_joining_within_a_step_takes_longer_by_a_time_per_byte():
    in_loop = ((1e5, 1e-4), (1e6, 1e-3))
    cold = with_cold(in_loop, [(1e5, 3e-4), (1e6, 3e-3)])
    assert cold == (pytest.approx((1e5, 3e-4)), pytest.approx((1e6, 3e-3)))
    assert with_cold(in_loop, [(1e5, 1e-5)]) == in_loop and with_cold((), [(1e5, 1e-5)]) == ()


def test_ranks_agree_on_every_batch():
    """That takes their computing threads as long as a collective, where one was measured."""

    def step_s(fixed_s: float) -> float:
        device = DeviceProfile({}, 0.0, 0, host_s={"all_gather": (fixed_s, 0.0), "all_reduce": (0.0, 0.0)})
        costs = CostModel(cluster(), Profile({device_key(d): device for d in cluster().devices}, ()))
        return simulate(data_parallel(graph(GRAPHS["mlp"], 64), costs, even_ratio(3)), costs).step_s

    assert step_s(0.001) - step_s(0.0) == pytest.approx(0.001)


def test_the_own_work_of_the_runtime_counts_in_every_step():
    def step_s(**measured: float) -> float:
        host_s = {"all_gather": (0.001, 0.0), "all_reduce": (0.0, 0.0)}
        device = DeviceProfile({}, 0.0, 0, host_s=host_s, host_scale=2.0, **measured)
        costs = CostModel(cluster(), Profile({device_key(d): device for d in cluster().devices}, ()))
        return simulate(data_parallel(graph(GRAPHS["mlp"], 64), costs, even_ratio(3)), costs).step_s

    # the exchange in which ranks agree is a part of it
    assert step_s(overhead_s=0.005) - step_s() == pytest.approx(2 * (0.005 - 0.001))


SIZES_S = ((4 * MB, 0.0005), (8 * MB - 1, 0.001), (8 * MB, 0.004), (32 * MB, 0.016))


def joining(rate: float) -> CostModel:
    """Devices that take ``rate`` times as long as these to join gradients, beside free links."""
    device = DeviceProfile({}, 0.0, 0, join_s=tuple((size, rate * seconds) for size, seconds in SIZES_S))
    links = (LinkMeasurement("all_reduce", "", ALL, ((4 * KB, 1e-6), (32 * MB, 1e-6)), 1.0, "made up"),)
    return CostModel(cluster(), Profile({device_key(d): device for d in cluster().devices}, links))


def test_gradients_that_are_joined_are_copied():
    program = data_parallel(graph(GRAPHS["mlp"], 256), joining(1.0), even_ratio(3))  # of 6, 6 and 1.5 MB

    def seconds(buckets, rate):
        return simulate(numbered(program, buckets), joining(rate)).step_s

    places = range(len(program.params))
    alone, together = tuple(places), (0,) * len(places)
    assert seconds(alone, 1.0) == pytest.approx(seconds(alone, 0.0))
    size = sum(p.type.value.size_bytes for p in program.params)
    joined_s = joining(1.0).join_s(0, size)
    assert joined_s > 0.004
    assert seconds(together, 1.0) - seconds(together, 0.0) == pytest.approx(joined_s, rel=1e-6)


def test_buckets_are_small_where_joining_large_ones_takes_long():
    made = graph(GRAPHS["mlp"], 256)
    largest = []
    for rate in (0.0, 1.0):
        costs = joining(rate)
        plan = make_plan(made, costs.cluster, planner="ddp-even", profile=costs.profile)
        joined = [e for s in gradient_sums(plan.program) if (e := s.exchange).joined]
        largest.append(max((e.size_bytes for e in joined), default=0))
    assert largest[0] >= 8 * MB > largest[1]


def test_even_pieces_cost_what_was_measured_of_even_ones():
    links = (
        measured("all_gather", "padded", 2, 10, 160, skew=1.0),
        measured("all_gather", "padded", 2, 20, 320, skew=1.5),
    )
    even = sharded(256)
    uneven = even.with_shares((0.5, 0.25, 0.25))
    for program, factor in ((even, 1.0), (uneven, 2.0)):
        gather = max(
            (e for i in program.instructions if i.op == "all_gather" and (e := exchange_of(program, i))),
            key=lambda e: e.size_bytes,
        )
        assert gather.size_bytes > MB
        assert gather.seconds(costs(*links)) == pytest.approx(
            factor * costs(links[0]).collective("all_gather", ALL).seconds(gather.size_bytes)
        )


def test_version_1_is_a_line_between_all_ranks(tmp_path):
    old = {"all_reduce": {"latency_s": 0.004, "s_per_byte": 1.2e-8}}
    text = {"mixmesh_profile": 1, "provenance": {}, "devices": {}, "collectives": old}
    (tmp_path / "p.json").write_text(json.dumps(text))
    cost = CostModel(cluster(), Profile.load(tmp_path / "p.json")).collective("all_reduce", ALL)
    for size in (2e4, 1e6, 1e8):
        assert cost.seconds(size) == pytest.approx(0.004 + 1.2e-8 * size)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mixmesh_profile": 3}, "later mixmesh"),
        ({"collectives": [{"collective": "all_reduce", "ranks": [0, 1], "points": []}]}, "points"),
        (
            {"collectives": [{"collective": "gossip", "ranks": [], "points": [[1, 1]]}]},
            "collectives.0.collective",
        ),
        (
            {"collectives": [{"collective": "send", "ranks": [], "points": [[1, -1]]}]},
            "collectives.0.points.0",
        ),
    ],
)
def test_what_is_wrong_with_a_profile_is_named(tmp_path, change, says):
    whole = {"mixmesh_profile": 2, "provenance": {}, "devices": {}, "collectives": []}
    (tmp_path / "p.json").write_text(json.dumps(whole | change))
    with pytest.raises(InputError, match=says):
        Profile.load(tmp_path / "p.json")


def test_the_links_of_another_cluster_are_not_used():
    link = measured("all_reduce", "", 6, 18)
    here, renamed, slower = cluster(), cluster("other name"), cluster(gbit=0.5)
    profile = Profile({}, (link,), {"cluster": here.fingerprint, "cluster_name": "three"})
    for where, used in ((here, True), (renamed, True), (slower, False)):
        cost = CostModel(where, profile).collective("all_reduce", ALL)
        assert (cost.seconds(MB) == pytest.approx(0.018)) is used
    program = data_parallel(graph(GRAPHS["mlp"], 64), CostModel(slower), even_ratio(3))
    assert "another cluster (three)" in next(gaps(program, CostModel(slower, profile)))
    assert not any("another" in text for text in gaps(program, CostModel(renamed, profile)))


# --- programs ----------------------------------------------------------------------------------------------

LINKS = (
    measured("all_gather", "all_to_all", 1, 20, 320),
    measured("all_gather", "broadcasts", 5, 18, 200),
    measured("all_gather", "padded", 1, 10, 100),
    measured("reduce_scatter", "all_to_all", 1, 20, 320),
    measured("reduce_scatter", "reduces", 5, 20, 300),
    measured("all_reduce", "", 6, 18, 260),
)


def sharded(scale: int):
    return fully_sharded(data_parallel(graph(GRAPHS["mlp"], scale), CostModel(cluster()), even_ratio(3)))


def test_programs_name_algorithms_where_others_than_the_usual_are_faster():
    plain = sharded(256)  # weights of 1.5 and 6 MB
    program = with_algorithms(plain, costs(*LINKS))
    gathers = [i for i in program.instructions if i.op == "all_gather"]
    found = {(i.type.value.size_bytes > MB, i.attr("algorithm")) for i in gathers}
    assert found == {(False, None), (True, "padded")}
    back = {i.attr("gradient_algorithm") for i in gathers if i.type.value.size_bytes > 4 * MB}
    assert back == {"reduces"}
    assert all(
        i.attr("gradient_algorithm") is None for i in gathers if i.type.value.size_bytes < 2 * MB
    )  # 2 % faster is noise
    check_program(program)
    assert parse_program(str(program)) == program
    assert with_algorithms(program, costs(*LINKS)) == program
    assert with_algorithms(plain, CostModel(cluster())) == plain


def test_gaps_are_one_line_of_each_kind():
    profile = Profile({device_key(d): DeviceProfile({}, 1e-9, 0) for d in cluster().devices}, LINKS)
    program = sharded(1024)  # weights of 96 MB
    operators, beyond = gaps(program, CostModel(cluster(), profile))
    assert "operators are not measured but estimated" in operators and "aten.linear" in operators
    assert "collectives are beyond the measured range" in beyond and "measured up to 16.8 MB" in beyond
    assert not list(gaps(program, CostModel(cluster())))


# --- measuring ---------------------------------------------------------------------------------------------


def test_groups_tell_links_apart():
    assert link_groups(cluster()) == ((0, 1, 2), (0, 1), (0, 2))
    vital = {
        (c.collective, c.algorithm, c.ranks): c.skew for c in link_cases(cluster(), "gloo") if c.is_vital
    }
    assert ("all_gather", "padded", ALL) not in vital
    assert vital["all_gather", "all_to_all", ALL] == pytest.approx(0.6 * 3 / 1.2)  # pieces by speed
    sent = {c.ranks for c in link_cases(cluster(), "gloo") if c.collective == "send"}
    assert sent == {(0, 1), (0, 2)}
    # between machines it is what stages of a pipeline need
    assert ("send", "", (0, 2)) in vital and ("send", "", (0, 1)) not in vital


def test_a_size_that_something_has_slowed_is_measured_again(monkeypatch):
    runs: Counter = Counter()

    def measure(comm, case, size, *_, is_short=False):
        runs[case, size] += 1
        slowed = 1.4 if size == 2**22 and runs[case, size] == 1 else 1.1
        return 1e-9 * slowed * measuring.whole_bytes(size), 0.0, 3

    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setattr(measuring, "agreed", lambda comm, values: values)
    channel = SimpleNamespace(backend="gloo")
    comm = SimpleNamespace(world_size=3, everyone=ALL, channel=lambda *_: channel)
    found = measure_links(comm, cluster(), 1e3)
    assert {size for m in found for size, _ in m.points} >= {2**20, 2**22, 2**24}
    assert all(seconds == pytest.approx(1.1e-9 * size) for m in found for size, seconds in m.points)
    assert {size for (_, size), count in runs.items() if count > 1} == {2**22}


def make_comm() -> Comm:
    return Comm.of_sets(3, link_sets(cluster()), device="cpu", timeout_s=60)


def check_no_budget_still_measures_what_training_needs(comm: Comm) -> None:
    links = measure_links(comm, cluster(), 0.0)
    vital = {(c.collective, c.algorithm): c.ranks for c in link_cases(cluster(), "gloo") if c.is_vital}
    assert {(m.collective, m.algorithm): m.ranks for m in links} == vital
    for m in links:
        sizes = [size for size, _ in m.points]
        assert sizes == sorted(sizes) and sizes[0] <= 4096 and sizes[-1] == SURE_BYTES
        assert all(seconds > 0 for _, seconds in m.points)
        assert m.ranks == (ALL if m.collective != "send" else (0, 2))
    everyone: list = [None] * 3
    torch.distributed.all_gather_object(everyone, links)
    assert everyone[0] == everyone[1] == everyone[2]


def check_more_budget_measures_groups_and_overlap(comm: Comm) -> None:
    links = measure_links(comm, cluster(), 6.0)
    assert {m.ranks for m in links} == set(link_groups(cluster()))
    assert {"send", "broadcast", "reduce"} <= {m.collective for m in links}
    reduced = next(m for m in links if m.collective == "all_reduce" and m.ranks == ALL)
    assert reduced.points[-1][0] >= BUCKET_BYTES
    overlap = measure_overlap(comm, links)
    host_s = overlap.host_s
    assert 0 <= overlap.redistribution_s < 0.05
    assert 0 < measure_overhead(comm, host_s) < 0.1
    groups = len(torch.distributed.distributed_c10d._world.pg_map)
    torch.set_default_dtype(torch.float64)  # whatever a script has set
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            assert 0 < measure_overhead(comm, host_s) < 0.1
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(torch.distributed.distributed_c10d._world.pg_map) == groups
    assert measure_overhead(comm, {}) == 0.0  # nothing to compare it with
    assert 0 <= overlap.slowdown <= 1
    assert all(0 <= fixed < 0.05 and 0 <= per_byte < 1e-7 for fixed, per_byte in overlap.beside_s.values())
    lead_s, speed = measure_rest(comm.device)
    assert 0 <= lead_s < 1 and speed >= 1
    assert 0 < host_s["all_reduce"][0] < 0.05
    assert list(host_s)[:3] == ["all_reduce", "all_gather all_to_all", "reduce_scatter all_to_all"]
    pieces = {name: fixed for name, (fixed, _) in host_s.items() if name.startswith("all_gather ")}
    assert len(pieces) == 3 and all(0 < fixed < 0.05 for fixed in pieces.values())  # a few calls


def check_joining_is_timed_at_sizes_on_both_sides_of_a_page(comm: Comm) -> None:
    sizes, seconds = zip(*measure_joins(comm.device))
    assert sizes == tuple(sorted(SIZES_BYTES)) and min(sizes) < OWN_PIECE_BYTES < max(sizes)
    assert all(0 < s < 1 for s in seconds)


class Branching(torch.nn.Module):
    """Its second half takes part on some ranks only, so that gradients differ in number."""

    def __init__(self, halves: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(20)])
        self.used = 10 * halves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[: self.used](x).pow(2).mean()


def check_calls_within_a_step_are_the_same_on_ranks_that_differ(comm: Comm) -> None:
    """One rank uses half of the model, and one has no memory for a pass; all end."""
    model = Branching(1 + (comm.rank == 1))
    job = Job(model, {"x": torch.randn(12, 64)}, optimizer=jobs.adamw)
    host_s = {"all_reduce": (1e-9, 0.0), "all_gather all_to_all": (1e-9, 0.0)}
    meter, samples = Meter(comm.device, emulated=False), 0 if comm.rank == 2 else 4
    found = measure_within(comm, job, samples, meter, host_s, ((1e4, 0.0), (1e6, 0.0)), Limit.of(comm, 2.0))
    assert (found.optimizer_s_per_byte is None) == (comm.rank == 2)
    assert bool(found.cold) == (comm.rank != 2)
    assert found.cold.extra_s(1.0) < 0.1
    assert (found.join_s[1][1] > 0) == (comm.rank == 1)  # 10 layers fill no bucket
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def check_without_time_little_is_measured(comm: Comm) -> None:
    """What training needs most by one run each, and nothing of what is estimated else."""
    over = Limit.of(comm, 0.0)
    links = measure_links(comm, cluster(), 0.0, most_s=over.left_s())
    assert links and all(" 1 to 1" in m.source and m.points[-1][0] == SURE_BYTES for m in links)
    overlap = measure_overlap(comm, links, over)
    assert overlap.slowdown == 0.0 and overlap.redistribution_s > 0
    assert list(overlap.host_s) == list(overlap.beside_s) == ["all_reduce"]
    assert overlap.host_s["all_reduce"][0] > 0 and overlap.beside_s["all_reduce"][0] > 0
    assert measure_rest(comm.device, over) == (0.0, 1.0)
    assert measure_joins(comm.device, over) == ()
    # one rank that is late decides for all
    late = Limit(comm, 1e3, over.started - (2e3 if comm.rank == 1 else 0.0))
    assert late.is_past(1.0) and bool(late.left_s()) == (comm.rank != 1)
    # ranks that run a collective another number of times wait for each other for ever
    own = measure_links(comm, cluster(), 0.0, most_s=late.left_s())
    assert all("median of 1 to 1" in m.source for m in own), own


def check_a_named_algorithm_runs(_: Comm) -> None:
    program = with_algorithms(sharded(256), costs(*LINKS))
    comm = Comm.create(program, device="cpu", timeout_s=60)
    (gather, *_) = (i for i in program.instructions if i.op == "all_gather" and i.attr("algorithm"))
    how = bind(program, gather, comm)
    full = torch.arange(gather.type.value.size_bytes // 4, dtype=torch.float32).view(gather.type.value.shape)
    mine = full.narrow(how.src.dim, *how.src.piece(comm.rank)).clone()
    assert how.algorithm == "padded" and torch.equal(how.apply(mine, []), full)


CHECKS = {name[6:]: f for name, f in list(globals().items()) if name.startswith("check_")}
CHECKS.pop("program")


@pytest.fixture(scope="module")
def results():
    return run_world(3, CHECKS, make_comm)


@pytest.mark.parametrize("name", CHECKS)
def test_between_processes(results, name):
    assert_passed(results[name])
