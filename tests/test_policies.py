"""Search over placements: tree search, TAG's policy, HeteroG's policy, and the planners that use them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn
from torch_geometric.data import Batch

from benchmarks.placement import Row, cases, summary
from benchmarks.placement_calls import Race, better_after, level_after, level_of, median, race
from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.errors import InputError
from mixmesh.frontend.job import Job
from mixmesh.frontend.job.workloads.images import Classifier
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import even_ratio
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.measure.verification import verify
from mixmesh.planner import make_plan
from mixmesh.search.baselines import data_parallel
from mixmesh.search.evaluate import Evaluator, Fidelity, Outcome, measure_with, placed_of
from mixmesh.search.learned.choices import Tables
from mixmesh.search.learned.features import Facts
from mixmesh.search.learned.heterog import Training
from mixmesh.search.learned.improve import Improvement, of_one_ratio
from mixmesh.search.learned.mcts import OUT_OF_MEMORY, Tree, order_of_groups, reward
from mixmesh.search.learned.moves import Moves
from mixmesh.search.learned.seeds import best_alike, everywhere, judged_seeds
from mixmesh.search.learned.seeds import data_parallel as all_devices
from mixmesh.search.learned.tag import WEIGHTS, Policy, TagPriors, load
from mixmesh.search.placement import SYNCS, Estimator, Group, Grouping, Space, make_grouping
from tools.tag.teacher import CLOSE, lessons
from tools.tag.train import Taught, labelled, learn, losses, states, visited

HEADROOM = 0.05
FAST = '{ name = "fast", tflop_per_s = 10, memory_gib = 8, memory_gbyte_per_s = 500, issue_us = 10 }'
SLOW = '{ name = "slow", tflop_per_s = 3, memory_gib = 4, memory_gbyte_per_s = 200, issue_us = 10 }'
NETWORK = "[network]\nbandwidth_gbit_per_s = 10\nlatency_us = 30\n"


def cluster(*machines: str) -> Cluster:
    text = "".join(f"[[machine]]\ndevices = [{devices}]\nlink_gbit_per_s = 80\n" for devices in machines)
    return Cluster.parse(NETWORK + text)


# so slow that small models are worth sharing
SLOW_DEVICES = """
[network]
bandwidth_gbit_per_s = 10
latency_us = 1
[[machine]]
devices = [{ name = "a", tflop_per_s = 1e-3, memory_gib = 8, memory_gbyte_per_s = 0.1 }]
[[machine]]
devices = [{ name = "b", tflop_per_s = 5e-4, memory_gib = 8, memory_gbyte_per_s = 0.1, count = 2 }]
"""
SMALL = (FAST, f"{SLOW}, {SLOW}")


def heavy_head(batch: int = 24, width: int = 64, hidden: int = 512) -> Job:
    """Cheap convolutions, and most parameters in dense layers."""
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten())
    head = nn.Sequential(
        nn.Linear(8 * 16, width), nn.ReLU(), nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 4)
    )
    batch_of = {"images": torch.randn(batch, 3, 16, 16), "labels": torch.randint(4, (batch,))}
    return Job(Classifier(features, head), batch_of)


@cache
def graph():
    job = heavy_head(width=1024, hidden=4096)
    return trace(job.model, job.batch).graph


def space(machines: tuple[str, ...] = SMALL, count: int = 4) -> Space:
    costs = CostModel(cluster(*machines))
    program = data_parallel(graph(), costs, even_ratio(costs.cluster.world_size))
    return Space(program, costs, make_grouping(graph(), costs, count))


def searched(s: Space, **budget) -> tuple[Evaluator, float]:
    evaluate = Evaluator(s, measure_with(s, ADAM, HEADROOM), **budget)
    return evaluate, judged_seeds(evaluate)[1]


# --- tree search ------------------------------------------------------------------------------------------


def test_the_search_finds_the_optimum_of_a_space_small_enough_to_enumerate():
    s = space((FAST, SLOW), count=3)
    evaluate, base_s = searched(s)
    every = list(itertools.product(*(s.actions(k) for k in range(len(s.groups)))))
    judge = measure_with(s, ADAM, HEADROOM)
    best = min(judge(tuple(a.placed for a in actions)).key for actions in every)
    Tree(evaluate, base_s).run(2 * len(every))
    assert evaluate.outcome.key == best


def test_the_search_keeps_its_budget_and_never_returns_less_than_its_seeds():
    s = space()
    evaluate, base_s = searched(s)
    evaluate.max_calls = evaluate.calls + 25
    Tree(evaluate, base_s).run()
    assert evaluate.calls <= evaluate.max_calls
    assert evaluate.outcome.step_s <= base_s
    assert [o.key for _, o in evaluate.improved] == sorted(
        (o.key for _, o in evaluate.improved), reverse=True
    )
    assert evaluate(evaluate.ranked()[0]) == evaluate.outcome


def test_the_same_seed_makes_the_same_search():
    found = []
    for _ in range(2):
        evaluate, base_s = searched(space())
        Tree(evaluate, base_s, seed=3).run(60)
        found.append((evaluate.calls, evaluate.best))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "step_s, memory, expected",
    [(1.0, 0.5, 0.0), (0.8, 1.0, 0.25), (4.0, 0.1, -0.75), (0.01, 1.1, OUT_OF_MEMORY)],
)
def test_rewards(step_s, memory, expected):
    assert reward(Outcome(step_s, (memory, 0.0), (1.0, 1.0)), 1.0) == pytest.approx(expected)


def test_what_oversteps_memory_is_worse_than_anything_that_fits():
    fits, not_quite, not_at_all = (Outcome(s, (m,), (1.0,)) for s, m in ((9.0, 1.0), (1.0, 1.1), (0.5, 3.0)))
    assert fits.key < not_quite.key < not_at_all.key


def test_the_estimate_and_the_simulator_agree_on_what_fits():
    s = space()
    by_groups, by_program = (
        measure_with(s, ADAM, HEADROOM),
        measure_with(s, ADAM, HEADROOM, Fidelity.SIMULATED),
    )
    for strategy in itertools.islice(all_devices(s), 3):
        placed = tuple(a.placed for a in strategy)
        guess, truth = by_groups(placed), by_program(placed)
        assert guess.fits == truth.fits
        assert guess.memory == pytest.approx(truth.memory, rel=0.25)


# --- features and TAG's policy ----------------------------------------------------------------------------


def features_of(s: Space):
    evaluate, _ = searched(s)
    order = order_of_groups(s)
    copies = everywhere(s, s.actions(order[0])[0])
    return Facts(s, ADAM, HEADROOM).at({order[0]}, copies, order[0], evaluate(copies))


def scaled(s: Space, time: float, size: float) -> Space:
    """The same in units of time and of size that are so many times smaller."""

    def group(g: Group) -> Group:
        lines = {w: tuple((a * time, b * time) for a, b in getattr(g, w)) for w in ("forward", "backward")}
        kept = round(g.kept_bytes * size)
        return replace(g, **lines, kept_bytes=kept, param_bytes=round(g.param_bytes * size))

    rate = size / time
    c = s.costs.cluster
    machines = tuple(
        replace(
            m,
            devices=tuple(
                replace(
                    d,
                    memory_bytes=round(d.memory_bytes * size),
                    memory_bytes_per_s=d.memory_bytes_per_s * rate,
                )
                for d in m.devices
            ),
            link_bytes_per_s=m.link_bytes_per_s * rate,
            nic_bytes_per_s=m.nic_bytes_per_s * rate,
            link_latency_s=m.link_latency_s * time,
        )
        for m in c.machines
    )
    made = replace(c, machines=machines, bandwidth_bytes_per_s=c.bandwidth_bytes_per_s * rate,
                   latency_s=c.latency_s * time)  # fmt: skip
    values = tuple(replace(v, size_bytes=round(v.size_bytes * size)) for v in s.grouping.values)
    return Space(s.program, CostModel(made), Grouping(tuple(map(group, s.groups)), values))


@pytest.mark.parametrize("time, size", [(1000.0, 1.0), (1.0, 64.0), (0.001, 8.0)])
def test_features_have_no_units(time, size, monkeypatch):
    monkeypatch.setattr(CostModel, "memory_constant_bytes", lambda *_, **__: 0)
    monkeypatch.setattr(
        "mixmesh.search.learned.features.usable_bytes",
        lambda costs, r, _: costs.cluster.devices[r].memory_bytes,
    )
    s = space()
    first = order_of_groups(s)[0]
    of = []
    for x, step_s in ((s, 1.0), (scaled(s, time, size), time)):
        current = list(everywhere(x, x.actions(first)[0]))
        current[-1] = x.actions(len(current) - 1)[-1]
        outcome = Outcome(step_s, (0.5,) * 3, (0.25,) * 3)
        of.append(Facts(x, ADAM, HEADROOM).at((), current, first, outcome))
    for name, value in vars(of[0]).items():
        # seconds of collectives are lines through two sizes, which are not scaled
        atol = 0.02 if name == "pairs" else 1e-6
        np.testing.assert_allclose(value, getattr(of[1], name), rtol=1e-4, atol=atol, err_msg=name)


def test_tables_say_what_the_estimate_says():
    s = space((FAST, f"{SLOW}, {SLOW}"), count=4)
    tables, estimate = Tables(s, ADAM, HEADROOM), Estimator(s, ADAM)
    rng = random.Random(0)
    bare = [estimate.constant[r] for r in range(3)]
    for _ in range(20):
        actions = [rng.choice(s.actions(k)) for k in range(len(s.groups))]
        kinds, each = tables.numbers(actions), np.arange(len(actions))
        held = np.add(bare, (tables.memory[each, kinds] * tables.usable).sum(0))
        stays = [
            sum(
                size
                for k, a in enumerate(actions)
                for rank, size, _ in estimate.held_bytes(k, a.placed)
                if rank == r
            )
            for r in range(3)
        ]
        np.testing.assert_allclose(held - bare, stays, rtol=1e-6)
        passes = tables.compute_s[each, tables.ratio_of[kinds]].sum(0)
        stepping = np.subtract(estimate(actions).compute_s, passes)  # the optimizer's seconds, in no table
        assert (stepping >= -1e-9).all() and (stepping <= 0.5 * estimate(actions).step_s).all()


def test_what_is_placed_alike_moves_nothing_and_what_is_not_does():
    s = space()
    tables = Tables(s, ADAM, HEADROOM)
    kinds = tables.numbers(everywhere(s, s.actions(order_of_groups(s)[0])[0]))
    moves, here = tables.move_s(kinds), tables.ratio_of[kinds[0]]
    assert (moves[:, here] == 0).all()
    assert (np.delete(moves, here, 1) > 0).all()


def test_edges_have_their_sizes():
    assert (features_of(space()).edge_sizes > 0).all()


def scores(policy: Policy, s: Space) -> dict:
    """By what the choice is, its probability for the most expensive group."""
    evaluate, _ = searched(s)
    order = order_of_groups(s)
    priors = TagPriors(policy, Facts(s, ADAM, HEADROOM))
    start = next(all_devices(s))
    found = priors(0, start, evaluate(start))[order[0]]
    names = [
        (
            tuple(sorted(s.costs.cluster.devices[r].name for r, share in enumerate(a.placed.ratio) if share)),
            a.shares,
            a.placed.sync,
        )
        for a in s.actions(order[0])
    ]
    return dict(zip(names, found))


def test_scores_do_not_depend_on_the_order_of_machines():
    torch.manual_seed(1)
    policy = Policy().eval()
    here, there = (scores(policy, space(machines)) for machines in (SMALL, SMALL[::-1]))
    for name, p in here.items():
        if name[2] != "ps":  # which rank is the server depends on the order
            assert there[name] == pytest.approx(p, rel=1e-3)


def test_the_shipped_weights_run_on_clusters_of_any_size_and_prefer_something():
    policy = load()
    assert WEIGHTS.stat().st_size < 2e6
    for machines in (SMALL, (FAST,) * 3, (f"{FAST}, {SLOW}", SLOW, SLOW, FAST, FAST)):
        s = space(machines)
        found = np.array(list(scores(policy, s).values()))
        assert found.max() > 2 * found.mean()


def test_weights_that_are_none_are_refused(tmp_path):
    (tmp_path / "x.pt").write_bytes(b"nothing")
    for name in ("x.pt", "missing.pt"):
        with pytest.raises(InputError, match="weights"):
            load(tmp_path / name)


def test_the_network_is_asked_so_often_and_no_more(monkeypatch):
    monkeypatch.setattr("mixmesh.search.learned.tag.MOST_ASKED", 2)
    evaluate, base_s = searched(s := space())
    priors = TagPriors(Policy().eval(), Facts(s, ADAM, HEADROOM))
    Tree(evaluate, base_s, priors).run(60)
    assert priors.asked == 2


@pytest.mark.parametrize("advice_is_good", [True, False])
def test_groups_that_are_not_decided_are_as_advised_where_that_proved_better(advice_is_good):
    s = space((FAST, SLOW), count=4)
    order = order_of_groups(s)
    advised = tuple(s.actions(k)[-1] for k in range(len(s.groups)))  # everything on the last device

    def judge(strategy) -> Outcome:
        like_it = sum(p == a.placed for p, a in zip(strategy, advised))
        return Outcome(10.0 + (-like_it if advice_is_good else like_it), (0.5,) * 2, (1.0,) * 2)

    def advice(decided, current, outcome):
        return tuple(np.eye(len(s.actions(k)))[-1] for k in range(len(s.groups)))

    tree = Tree(Evaluator(s, judge), 10.0, advice)
    tree.run(60)
    below = [node for child in tree.root.children.values() for node in child.children.values()]
    assert len(below) > 1
    for node in below:
        others = advised if advice_is_good else everywhere(s, node.decided[0])
        expected = dict(zip(order, node.decided))
        made = [expected.get(k, other) for k, other in enumerate(others)]
        assert placed_of(node.strategy) == placed_of(made)


def test_what_a_policy_advises_is_judged_first_and_where_it_is_good_nothing_else_is_needed():
    s = space(count=4)
    rng = random.Random(1)  # several ratios, the likeliest of which for all groups is no seed
    wanted = tuple(rng.choice(s.actions(k)) for k in range(len(s.groups)))

    def judge(strategy) -> Outcome:
        wrong = sum(p != a.placed for p, a in zip(strategy, wanted))
        return Outcome(1.0 + wrong, (0.5,) * 3, (1.0,) * 3)

    def advice(decided, current, outcome):
        numbers = (s.actions(k).index(a) for k, a in enumerate(wanted))
        return tuple(np.eye(len(s.actions(k)))[n] for k, n in enumerate(numbers))

    evaluate = Evaluator(s, judge)
    judged_seeds(evaluate)
    seeded = evaluate.calls
    Tree(evaluate, 2.0, advice)
    found = [(n - seeded, o.step_s) for n, o in evaluate.improved if n > seeded]
    assert found[-1] == (2, 1.0)  # after that of one ratio for all groups


def test_the_ratio_that_is_likeliest_for_all_groups_is_judged_before_what_is_likeliest_for_each():
    s = space(count=4)
    judged: list = []
    every = [s.actions(k) for k in range(len(s.groups))]
    common = min(every, key=len)[-1]  # a choice that all groups have
    ratios = list(dict.fromkeys(a.placed.ratio for a in every[0]))
    others = [next(n for n, a in enumerate(mine) if a.placed.ratio == r) for mine, r in zip(every, ratios)]

    def advice(current, outcome):
        """For each group a choice of another ratio has 0.4, and one that is the same for all 0.35."""
        out = [np.full(len(actions), 0.01) for actions in every]
        for k, p in enumerate(out):
            p[others[k]], p[every[k].index(common)] = 0.4, 0.35
        return tuple(out)

    def judge(strategy) -> Outcome:
        judged.append(strategy)
        return Outcome(1.0, (0.5,) * 3, (1.0,) * 3)

    start = everywhere(s, s.actions(0)[3])
    Improvement(s, judge, advice, start, seed=0).advised()
    each = tuple(actions[n] for actions, n in zip(every, others))
    assert len({a.placed.ratio for a in each}) == len(every)
    assert judged == [start, (common,) * len(every), each]


def test_seconds_and_ways_to_synchronise_count_for_the_ratio_of_all_groups():
    s = space(count=4)
    heavy = max(range(len(s.groups)), key=lambda k: max(s.groups[k].seconds))
    wanted = s.actions(heavy)[0].placed.ratio
    same = [[n for n, a in enumerate(s.actions(k)) if a.placed.ratio == wanted] for k in range(len(s.groups))]
    out = [np.eye(len(s.actions(k)))[-1] for k in range(len(s.groups))]  # the last, but for the heavy one
    out[heavy] = np.zeros(len(s.actions(heavy)))
    chances = np.arange(1, 1 + len(same[heavy]))
    out[heavy][same[heavy]] = chances / chances.sum()
    made = of_one_ratio(s, out)
    seconds = [max(g.seconds) for g in s.groups]
    assert 2 * seconds[heavy] > sum(seconds) and len(seconds) > 2
    assert {a.placed.ratio for a in made} == {wanted}
    assert made[heavy] == s.actions(heavy)[same[heavy][-1]]


def test_groups_that_must_all_synchronise_in_another_way_are_tried_together():
    s = space(count=8)
    start = next(all_devices(s))
    owns = [k for k, g in enumerate(s.groups) if g.param_bytes]
    assert len(owns) > 3 and {start[k].placed.sync for k in owns} == {"allreduce"}

    def judge(strategy) -> Outcome:
        """Best where all are sharded, and the worse the more are where some are not."""
        changed = sum(strategy[k].placed.sync == "sharded" for k in owns)
        moved = sum(a.placed.ratio != b.placed.ratio for a, b in zip(strategy, start))
        return Outcome(0.5 + moved if changed == len(owns) else 1.0 + changed + moved, (0.5,) * 3, (1.0,) * 3)

    def sure(current, outcome):
        return tuple(np.eye(len(s.actions(k)))[s.actions(k).index(a)] for k, a in enumerate(start))

    improvement = Improvement(s, judge, sure, start, seed=0)
    assert improvement.advised() is None  # nothing new
    for _ in SYNCS:
        improvement.step()
    assert improvement.outcome.step_s == 0.5
    assert [a.placed.ratio for a in improvement.best] == [a.placed.ratio for a in start]


def test_a_policy_that_is_sure_and_wrong_keeps_the_search_from_no_devices():
    s = space(count=4)
    order = order_of_groups(s)
    evaluate, base_s = searched(s)

    def advice(decided, current, outcome):
        return tuple(np.eye(len(s.actions(k)))[0] for k in range(len(s.groups)))

    tree = Tree(evaluate, base_s, advice)
    ways = {(a.device_groups, a.shares) for a in s.actions(order[0])}
    tree.run(len(ways))
    tried = {tree.root.choices[n] for n in tree.root.children}
    assert {(a.device_groups, a.shares) for a in tried} == ways


def test_changes_alone_find_what_no_tree_has_told_them():
    s = space(count=4)
    wanted = everywhere(s, s.actions(0)[-1])[:2] + everywhere(s, s.actions(0)[0])[2:]

    def judge(strategy) -> Outcome:
        wrong = sum(p.ratio != a.placed.ratio for p, a in zip(strategy, wanted))
        return Outcome(1.0 + wrong, (0.5,) * 3, (1.0,) * 3)

    evaluate = Evaluator(s, judge)
    improvement = Improvement(s, evaluate, lambda *_: None, everywhere(s, s.actions(0)[3]), seed=0)
    before = improvement.outcome.step_s
    for _ in range(300):
        improvement.step()
        assert improvement.outcome == evaluate(improvement.best)
        assert improvement.outcome.step_s <= before
        before = improvement.outcome.step_s
    assert before == 1.0
    slower = everywhere(s, s.actions(0)[3])
    improvement.offer(slower, evaluate(slower))
    assert improvement.outcome.step_s == 1.0


def test_changes_keep_the_ratio_of_the_first_group_and_touch_no_others_than_those_together():
    s = space(count=8)
    first, rng = order_of_groups(s)[0], random.Random(0)
    moves = Moves(s, rng, first)
    strategy, other = (everywhere(s, s.actions(first)[n]) for n in (0, -1))
    seen = set()
    for _ in range(300):
        k = rng.randrange(len(s.groups))
        which = moves.together(k)
        assert k in which
        made = moves.to(strategy, which, other[first])
        assert all(a == b for n, (a, b) in enumerate(zip(made, strategy)) if n not in which or n == first)
        changed = moves.drawn(strategy, [other])
        assert changed[first].placed.ratio == strategy[first].placed.ratio
        assert all(a in s.actions(n) for n, a in enumerate(changed))
        seen |= {n for n, (a, b) in enumerate(zip(changed, strategy)) if a != b}
    assert seen == {*range(len(s.groups))} - ({first} if not s.groups[first].param_bytes else set())


def test_without_advice_groups_that_are_not_decided_copy_the_first():
    evaluate, base_s = searched(s := space((FAST, SLOW), count=4))
    tree = Tree(evaluate, base_s)
    tree.run(60)
    for node in tree.root.children.values():
        assert placed_of(node.strategy) == placed_of(everywhere(s, node.decided[0]))


def test_lessons_keep_the_first_choice_and_get_no_worse_than_its_copies():
    evaluate, _ = searched(s := space())
    first = order_of_groups(s)[0]
    found = lessons(evaluate, random.Random(0), rounds=((6, 20), (3, 60)), free=60)
    assert [x.outcome.key for x in found] == sorted(x.outcome.key for x in found)
    for lesson in found:
        assert lesson.outcome.key <= evaluate(everywhere(s, lesson.first)).key
        for strategy, outcome in lesson.best:
            assert strategy[first] == lesson.first
            assert outcome == evaluate(strategy)
            assert outcome.step_s <= lesson.outcome.step_s * CLOSE


def test_states_that_a_policy_leads_to_are_its_own_decisions():
    evaluate, _ = searched(s := space())
    made = Taught(s, lessons(evaluate, random.Random(0), rounds=((4, 20), (2, 40)), free=40))
    torch.manual_seed(3)
    policy = Policy().eval()
    found = list(visited(policy, made))
    start = best_alike(made.evaluate)
    advice = TagPriors(policy, made.facts)(0, start, made.evaluate(start))
    decided = tuple(s.actions(k)[int(p.argmax())] for k, p in enumerate(advice))
    assert decided != start
    own = labelled(made, 0, decided, made.wanted)
    assert torch.equal(found[0]["group"].x, own["group"].x)
    assert {int((~x["group"].asked).sum()) for x in found} == {0, 1}
    for x in found:
        may = x["group", "may", "choice"]
        sums = torch.zeros(len(s.groups)).index_add(0, may.edge_index[0], may.wanted)
        assert torch.allclose(sums, torch.ones(len(s.groups)), atol=1e-5)


def test_a_network_learns_what_is_best():
    evaluate, _ = searched(s := space())
    found = lessons(evaluate, random.Random(0), rounds=((2, 80),), free=80)
    samples = list(states(random.Random(0), Taught(s, found)))
    torch.manual_seed(0)
    policy = Policy()
    loader = [Batch.from_data_list(samples)]
    before = losses(policy, loader[0])[0].mean().item()
    learn(policy, samples, Console(quiet=True), epochs=30)
    cross, right = losses(policy, loader[0])
    assert cross.mean().item() < 0.7 * before
    assert right.mean().item() > 0.5


# --- HeteroG's policy and the planners --------------------------------------------------------------------


def test_training_moves_probability_to_what_is_rewarded():
    s = space((FAST, SLOW), count=3)
    wanted = s.actions(0)[-1].placed  # everything on the last device

    def judge(strategy) -> Outcome:
        wrong = sum(p.ratio != wanted.ratio for p in strategy)
        return Outcome(1.0 + wrong, (0.5,) * 2, (1.0,) * 2)

    evaluate = Evaluator(s, judge)
    training = Training(evaluate, Facts(s, ADAM, HEADROOM))
    training.start.zero_()  # it would begin with what is best here
    for step in range(40):
        training.step(with_elite=step % 3 == 2)
    assert evaluate.outcome.step_s == 1.0
    p = torch.softmax(training.policy(training.x, training.edges, training.sizes) + training.start, 1)
    mine = [n for n, a in enumerate(training.choices) if a.placed.ratio == wanted.ratio]
    assert p[:, mine].sum(1).min() > 0.8


def trained(steps: int) -> Training:
    """After so many steps, where each group is best on another device than the one before: no strategy that a
    search begins with has that."""
    s = space((FAST, SLOW), count=3)
    singles = [[a.placed for a in s.actions(k) if a.shares == "single"] for k in range(len(s.groups))]

    def judge(strategy) -> Outcome:
        wrong = sum(p.ratio != of[k % len(of)].ratio for k, (p, of) in enumerate(zip(strategy, singles)))
        return Outcome(1.0 + 4.0 * wrong, (0.5,) * 2, (1.0,) * 2)

    training = Training(Evaluator(s, judge), Facts(s, ADAM, HEADROOM))
    for step in range(steps):
        training.step(with_elite=step % 3 == 2)
    return training


def scores_of(training: Training, edges=None, sizes=None) -> torch.Tensor:
    edges = training.edges if edges is None else edges
    return training.policy(training.x, edges, training.sizes if sizes is None else sizes)


def test_scores_depend_on_what_groups_give_each_other():
    """The network over the graph, which the one over the sequence does not stand for."""
    training = trained(8)
    scores = scores_of(training)
    without = scores_of(training, training.edges[:, :0], training.sizes[:0])
    larger = scores_of(training, sizes=training.sizes + 1)
    for other in (without, larger):
        assert (scores - other).abs().max() > 1e-3 * scores.abs().max()


@pytest.mark.parametrize("planner", ["tag", "heterog"])
def test_a_plan_equals_the_single_device(planner):
    job = heavy_head(batch=12, width=24, hidden=40)
    traced = trace(job.model, job.batch)
    plan = make_plan(traced, Cluster.parse(SLOW_DEVICES), planner=planner, search_s=0.5)
    assert plan.planner == planner
    assert len([share for _, ratio in plan.program.ratios for share in ratio if share]) > 1
    assert verify(job.model, job.batch, plan, traced=traced).ok


# --- python -m benchmarks placement -----------------------------------------------------------------------


def row(method: str, step_s: float, level_after: int | None, **others) -> Row:
    known = dict(workload="w", cluster="c", links="preset", global_batch=8, role="heterog",
                 data_parallel_s=2.0, baseline_s=1.5, weakest_s=3.0, calls=100, better_calls=(5,),
                 cpu_s=0.0, bound_s=0.05)  # fmt: skip
    return Row(**{**known, **others}, method=method, step_s=step_s, level_calls=(level_after,))


@pytest.mark.parametrize("planner", ["tag", "heterog"])
def test_one_device_leaves_nothing_to_place(planner):
    traced = trace(nn.Sequential(nn.Linear(4, 4), Summed()), (torch.randn(8, 4),))
    alone = cluster(FAST)
    with pytest.raises(InputError, match="has no plan for this job") as caught:
        make_plan(traced, alone, planner=planner, search_s=1)
    assert "several devices" in caught.value.expected
    assert make_plan(traced, alone, search_s=1).planner


class Summed(nn.Module):
    def forward(self, x):
        return x.sum()


def test_the_summary_takes_the_best_placement_of_every_case():
    rows = [row("uniform", 1.0, 80), row("tag", 0.5, 40), row("hap", 0.1, None),
            row("uniform", 2.0, 10, workload="v"), row("tag", 4.0, None, workload="v")]  # fmt: skip
    made = summary(rows)
    assert made["heterog_speedup"]["preset"]["best placement"] == pytest.approx(2.0)  # of 4 and 1
    assert made["heterog_speedup"]["preset"]["hap"] == pytest.approx(20.0)
    assert made["heterog_speedup"]["preset"]["most possible"] == pytest.approx(40.0)
    assert made["heterog_speedup_by_cluster"]["preset"]["c"] == made["heterog_speedup"]["preset"]
    calls = made["tag_calls_over_uniform"]["level"]
    assert (calls["cases"], calls["halved"]) == (2, 1)
    assert calls["ratio"] == pytest.approx((40 / 80 * 100 / 10) ** 0.5)  # never: the whole budget
    assert (made["tag_best_case"]["over_weakest"], made["tag_best_case"]["over_baseline"]) == (6.0, 3.0)


def test_the_summary_says_where_pipelines_are_faster():
    rows = [row("tag", 1.0, 1), row("pipeline", 0.5, None), row("tag", 0.5, 1, workload="v"),
            row("pipeline", 1.0, None, workload="v"), row("tag", 0.5, 1, workload="no micro-batches"),
            row("tag", None, 1, workload="u"), row("pipeline", 1.0, None, workload="u")]  # fmt: skip
    made = summary(rows)["pipelines"]
    assert set(made) == {"tag"}
    # of three cases with both in one, and in one where nothing else fits
    assert (made["tag"]["cases"], made["tag"]["faster"]) == (3, 2)
    assert made["tag"]["alone"] == pytest.approx(8**0.5) and made["tag"]["together"] == pytest.approx(4.0)


def test_calls_are_counted_over_seeds():
    traces = [((3, 0.9), (20, 0.5)), ((7, 0.6),), ()]
    assert better_after(traces, 1.0) == (3, 7, None)
    assert median((3, 7, None), 100) == 7
    assert median((3, None, None), 100) is None
    assert level_of(traces, 1.0) == 0.6  # of 0.5, 0.6, and 1.0 for the seed that found nothing
    assert level_of(traces, 0.6) is None
    assert level_after(traces, 0.6) == (20, 7, None)
    assert race([(5, 10, 100), (None, 50, 100), (None, None, 100)]) == Race(2, 1.0, 1)


def test_cases_by_name():
    assert {c.links for c in cases(["nasnet@heterog-12"])} == {"preset", "released"}
    with pytest.raises(InputError, match="no case"):
        cases(["nasnet@nowhere"])


@pytest.mark.parametrize("planner", ["heterog", "tag"])
def test_a_policy_computes_as_ever_whatever_pytorch_is_set_to(planner):
    cluster = Cluster.parse(SLOW_DEVICES)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            plan = make_plan(graph(), cluster, planner=planner, search_s=0.1)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(before)
    assert plan.planner in (planner, "pipeline")
