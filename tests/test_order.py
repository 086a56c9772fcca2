"""Execution order: b-levels, list schedules, and the same order of collectives on every rank."""

from __future__ import annotations

import random
import time
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed, run_world
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import THREE, bodies, cluster, graph
from torch import nn

from mixmesh.cost import CostModel
from mixmesh.lang.ir import even_ratio, parse_program
from mixmesh.measure.verification import verify
from mixmesh.passes.buckets import merged, with_buckets
from mixmesh.passes.order import Orders, in_order, reordered
from mixmesh.runtime.comm import Channel, Comm
from mixmesh.runtime.parallel import parallelize
from mixmesh.search.baselines import data_parallel
from mixmesh.simulator import Simulation

# a product that travels, and beside it one as long that does not
BESIDE = """
program beside world=3 {
  ratio r0 = [0.5, 0.25, 0.25]
  %x = input("x") : f32[1024, 256] S(0)@r0
  %w = param("towards") : f32[256, 256] R
  %h = aten.linear(%x, %w) : f32[1024, 256] S(0)@r0
  %v = param("beside") : f32[1024, 256] R
  %s = aten.linear(%x, %v) : f32[1024, 1024] S(0)@r0
  %t = aten.relu(%s) : f32[1024, 1024] S(0)@r0
  %h.t = all_to_all(%h) : f32[1024, 256] S(1)@r0
  %g = aten.softmax.int(%h.t, 0) : f32[1024, 256] S(1)@r0
  %g.t = all_to_all(%g) : f32[1024, 256] S(0)@r0
  %y = aten.sum.dim_IntList(%t, [1]) : f32[1024] S(0)@r0
  %z = aten.sum.dim_IntList(%g.t, [1]) : f32[1024] S(0)@r0
  %p = aten.mul.Tensor(%y, %z) : f32[1024] S(0)@r0
  %loss = aten.mean(%p) : f32[] P(sum)
  return %loss
}
"""
COSTS = CostModel(cluster(THREE, 13))


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towards, self.beside = (nn.Parameter(torch.randn(rows, 256) / 16) for rows in (256, 1024))

    def forward(self, x):
        h = nn.functional.linear(x, self.towards)
        t = nn.functional.linear(x, self.beside).relu()
        return (t.sum(1) * h.softmax(0).sum(1)).mean()


def test_levels_are_longest_paths():
    program = parse_program(BESIDE)
    graph = Orders(program, Simulation(program, COSTS).step).graph

    def longest(t: int) -> float:
        task = graph.tasks[t]
        return max(task.seconds) + max(map(longest, task.successors), default=0.0)

    assert graph.levels == pytest.approx([longest(t) for t in range(len(graph.tasks))])
    computations = [i for i in program.instructions if not (i.is_leaf or i.is_redistribution)]
    moves = [i for i in program.instructions if i.is_redistribution]
    # each in both passes, the sums of gradients, and the optimizer
    assert len(graph.tasks) == 2 * (len(computations) + len(moves)) + len(program.params) + 1


def test_what_travels_goes_first_and_the_rest_beside_it():
    program = parse_program(BESIDE)
    simulation = Simulation(program, COSTS)
    (best, *_) = reordered(program, simulation.step)
    place = {i.results[0]: n for n, i in enumerate(best.instructions)}
    assert place["h"] < place["h.t"] < place["s"]
    assert Simulation(best, COSTS).step_s(best) < 0.95 * simulation.step_s(program)


@settings(deadline=None, max_examples=25)
@given(bodies())
def test_an_order_computes_the_same(body):
    program = data_parallel(graph(body, 16), COSTS, even_ratio(3))
    orders = Orders(program, Simulation(program, COSTS).step)
    for order in (orders.forward(), orders.backward(), orders.first_come()):
        assert sorted(order) == list(range(len(program.instructions)))
        known: set[str] = set()
        for i in in_order(program, order).instructions:
            assert known.issuperset(i.inputs)
            known.update(r for r in i.results if r is not None)


def test_a_reordered_program_verifies():
    program = parse_program(BESIDE)
    (best, *_) = reordered(program, Simulation(program, COSTS).step)
    report = verify(Beside(), {"x": torch.randn(1024, 256)}, best)
    assert report.ok, report


# --- buckets ----------------------------------------------------------------------------------------------


def ends(program, ready_s) -> float:
    """When the last sum has ended, each begun when its last gradient is there and the one before is over."""
    fit = COSTS.collective("all_reduce", (0, 1, 2))
    buckets = defaultdict(list)
    for p in program.params:
        buckets[p.attr("bucket")].append(p)
    end = 0.0
    for number in sorted(buckets):
        size = sum(p.type.value.size_bytes for p in buckets[number])
        end = max(end, *(ready_s[p.result] for p in buckets[number])) + fit.seconds(size)
    return end


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 400), st.floats(0, 1e-3)), min_size=1, max_size=7))
def test_merged_buckets_end_first(layers):
    """Against every way to cut the parameters into runs."""
    lines = ['%x = input("x") : f[8, 4]'] + [
        f'%w{n} = param("w{n}") : f[{rows}, 4]' for n, (rows, _) in enumerate(layers)
    ]
    lines += [f"%s{n} = aten.sum(%w{n}) : f[]" for n in range(len(layers))]
    total = "s0"
    for n in range(1, len(layers)):
        lines.append(f"%t{n} = aten.add.Tensor(%{total}, %s{n}) : f[]")
        total = f"t{n}"
    lines += ["%m = aten.sum(%x) : f[]", f"%loss = aten.mul.Tensor(%m, %{total}) : f[]", "return %loss"]
    program = data_parallel(graph("\n".join(lines), 4), COSTS, even_ratio(3))
    ready_s = {p.result: layers[int(p.result[1:])][1] for p in program.params}
    by_readiness = sorted(ready_s, key=ready_s.__getitem__)
    least = min(
        ends(numbered(program, by_readiness, cuts), ready_s) for cuts in range(2 ** (len(layers) - 1))
    )
    assert ends(merged(program, COSTS, ready_s), ready_s) == pytest.approx(least)


def numbered(program, names, cuts: int):
    """Buckets in the order of ``names``; a bit of ``cuts`` begins another one."""
    number = {name: (cuts & ((1 << n) - 1)).bit_count() for n, name in enumerate(names)}
    text = str(with_buckets(program, 1.0))
    made = parse_program(text)
    instructions = tuple(
        type(i)(i.results, i.types, i.op, i.args, i.kwargs, (("bucket", number[i.result]),))
        if i.op == "param"
        else i
        for i in made.instructions
    )
    return made.changed(instructions=instructions)


# --- the runtime ------------------------------------------------------------------------------------------


def make_comm() -> Comm:
    return Comm.of_sets(3, [("data", (0, 1)), ("data", (1, 2))], device="cpu", timeout_s=60)


def check_one_order(comm: Comm) -> None:
    """Every rank waits for a random while before whatever it computes or begins."""
    program = parse_program(
        BESIDE.replace('"towards")', '"towards") {bucket=1}').replace('"beside")', '"beside") {bucket=0}')
    )
    program = reordered(program, Simulation(program, COSTS).step)[0]
    delay = random.Random(comm.rank)
    issued: list[str] = []
    start = Channel.start

    def slow_start(self, call, *args, **kwargs):
        time.sleep(delay.random() * 0.02)
        issued.append(f"{self.what} between {self.ranks}")
        return start(self, call, *args, **kwargs)

    Channel.start = slow_start
    try:
        torch.manual_seed(0)
        single = Beside()
        batch = {"x": torch.randn(1024, 256)}
        other = Beside()
        other.load_state_dict(single.state_dict())
        model, optimizer = parallelize(
            other, torch.optim.SGD(other.parameters(), lr=0.1), program, device="cpu", timeout_s=60
        )
        issued.clear()
        losses = []
        for _ in range(3):
            time.sleep(delay.random() * 0.05)
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    finally:
        Channel.start = start
    everyones: list = [None] * 3
    dist.all_gather_object(everyones, issued)
    assert everyones[0] == everyones[1] == everyones[2]
    of_calls = ("of the batch's shapes", "of norms of parameters")
    steps = [name for name in issued if not any(text in str(name) for text in of_calls)]
    assert len(steps) == 3 * (1 + 4 + 2)  # the loss, exchanges there and back, two buckets
    reference = torch.optim.SGD(single.parameters(), lr=0.1)
    for value in losses:
        loss = single(**batch)
        loss.backward()
        assert value == pytest.approx(loss.item(), rel=1e-4)
        reference.step()
        reference.zero_grad()


def check_backward_runs_beside(comm: Comm) -> None:
    """The gradient's exchange begins before what was computed beside the exchange, and ends after it."""
    program = reordered(parse_program(BESIDE), Simulation(parse_program(BESIDE), COSTS).step)[0]
    seen: list[str] = []
    torch.manual_seed(0)
    other = Beside()
    model, _ = parallelize(
        other, torch.optim.SGD(other.parameters(), lr=0.1), program, device="cpu", timeout_s=60
    )
    start, finish = Channel.start, Channel.finish

    def noted(what, call):
        def run(self, *args, **kwargs):
            if "gradient" in self.what and "bucket" not in self.what:
                seen.append(what)
            return call(self, *args, **kwargs)

        return run

    # the program's own tensor: hooks on the model's parameters are refused
    model._runtime.params["beside"].register_hook(lambda g: seen.append("beside"))
    loss = model(x=torch.randn(1024, 256))
    Channel.start, Channel.finish = noted("begins", start), noted("ends", finish)
    try:
        loss.backward()
    finally:
        Channel.start, Channel.finish = start, finish
    assert seen.index("begins") < seen.index("beside") < len(seen) - 1 - seen[::-1].index("ends")


def test_over_gloo():
    checks = {"one order": check_one_order, "beside": check_backward_runs_beside}
    for failures in run_world(3, checks, make_comm).values():
        assert_passed(failures)
