"""Small sums that are independent of each other travel as one, and nothing else changes."""

from __future__ import annotations

import copy

import pytest
import torch
from gloo_world import assert_passed, run_world
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import THREE, cluster
from torch import nn

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel, DeviceProfile, Profile, device_key
from mixmesh.cost.gaps import gaps
from mixmesh.frontend.trace import trace
from mixmesh.lang.check import check_program
from mixmesh.lang.ir import Program, make_ratio, parse_program
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.measure.verification import verify
from mixmesh.passes.buckets import with_buckets
from mixmesh.passes.order import Orders, coalesced, in_order, in_runs, levels_of_sums, separated
from mixmesh.passes.recomputation import recomputed
from mixmesh.planner import make_plan
from mixmesh.planner.task import Task
from mixmesh.runtime.interpret import interpret
from mixmesh.runtime.parallel import parallelize
from mixmesh.search.baselines import data_parallel, fully_sharded
from mixmesh.simulator import Simulation

COSTS = CostModel(cluster(THREE))
UNEVEN = make_ratio([0.5, 0.3, 0.2])


def unit(before: int, after: int, size: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, size, padding=size // 2, bias=False), nn.BatchNorm2d(after), nn.ReLU()
    )


class Branches(nn.Module):
    """Three branches of one, two and three layers with batch norm, twice, and a shortcut with one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.stem = unit(3, 4, 3)
        self.cells = nn.ModuleList(self.cell(before) for before in (4, 12))
        self.shortcut = unit(4, 12, 1)
        self.head = nn.Linear(12, 5)

    def cell(self, before: int) -> nn.ModuleList:
        return nn.ModuleList(
            [
                unit(before, 3, 1),
                nn.Sequential(unit(before, 2, 1), unit(2, 4, 3)),
                nn.Sequential(unit(before, 2, 1), unit(2, 3, 3), unit(3, 5, 3)),
            ]
        )

    def forward(self, images, labels):
        x = first = self.stem(images)
        for cell in self.cells:
            x = torch.cat([branch(x) for branch in cell], 1)
        x = x + self.shortcut(first)
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)


def pictures(count: int = 10) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {"images": torch.randn(count, 3, 5, 5, generator=g), "labels": torch.arange(count) % 5}


@pytest.fixture(scope="module")
def plain() -> Program:
    return data_parallel(trace(Branches(), pictures()).graph, COSTS, UNEVEN)


def packed(program: Program, runs: int = 1) -> Program:
    return coalesced(program, in_runs(levels_of_sums(program, COSTS), runs))


def num_sums(program: Program) -> int:
    return sum(i.op == "all_reduce" for i in program.instructions)


def test_as_many_sums_remain_as_the_longest_path_has(plain):
    assert num_sums(plain) == 15  # the stem's, 2 x (1 + 2 + 3), the shortcut's; how many labels count
    assert [len(members) for members in levels_of_sums(plain, COSTS)] == [4, 2, 3, 2]
    assert num_sums(packed(plain)) == 8
    assert num_sums(packed(plain, 2)) == 9  # the four in two runs
    assert num_sums(separated(packed(plain, 2))) == 15


def test_no_measurement_is_asked_for_what_packs_sums(plain):
    """The model has a cat of its own, which is asked for."""
    profile = Profile({device_key(d): DeviceProfile({}, 1e-9, 0) for d in COSTS.cluster.devices}, ())
    said = [
        next(gaps(p, CostModel(COSTS.cluster, profile))) for p in (plain, packed(plain), packed(plain, 2))
    ]
    assert "operators are not measured" in said[0] and len({*said}) == 1


@pytest.mark.parametrize("runs", [1, 2])
def test_a_packed_program_trains_as_the_single_device_does(plain, runs):
    """The loss, all gradients and the running statistics, in f64 to 1e-9, and the losses of three steps."""
    program = packed(plain, runs)
    assert parse_program(str(program)) == program
    report = verify(Branches(), pictures(), program, steps=3)
    assert report.ok and report.max_gradient_error_f64 < 1e-9, report


@pytest.mark.parametrize("ratio", [(0.02, 0.58, 0.4), (0.6, 0, 0.4)], ids=["no samples", "no part"])
def test_ranks_without_samples_or_part_in_it(ratio):
    program = packed(data_parallel(trace(Branches(), pictures()).graph, COSTS, make_ratio(ratio)))
    assert num_sums(program) == 8
    report = verify(Branches(), pictures(), program)
    assert report.ok, report


@pytest.mark.parametrize("how", [fully_sharded, recomputed, lambda p: with_buckets(p, 100)])
def test_other_changes_go_on_top(plain, how):
    report = verify(Branches(), pictures(), how(packed(plain)))
    assert report.ok, report


def test_orders_of_it_are_orders_of_the_same(plain):
    program = packed(plain, 2)
    orders = Orders(program, Simulation(program, COSTS).step)
    for order in (orders.forward(), orders.backward()):
        report = verify(Branches(), pictures(), in_order(program, order))
        assert report.ok, report


def test_sums_apart_are_the_program_again(plain):
    for runs in (1, 2):
        apart = separated(packed(plain, runs))
        as_lines = [{str(i) for i in program.instructions} for program in (plain, apart)]
        assert as_lines[0] == as_lines[1]
        check_program(apart)
    assert separated(plain) is plain


# --- what may be packed ------------------------------------------------------------------------------------

HAND = """
program hand world=3 {
  ratio r0 = [0.5, 0.25, 0.25]
  %x = input("x") : f32[8, 4] S(0)@r0
  %a = aten.sum.dim_IntList(%x, [0]) : f32[4] P(sum)@r0
  %b = aten.sum(%x) : f32[] P(sum)@r0
  %c = aten._to_copy(%a, dtype=f64) : f64[4] P(sum)@r0
  %w = param("w") : f32[4] R
  %m = aten.mul.Tensor(%x, %w) : f32[8, 4] S(0)@r0
  %d = aten.sum.dim_IntList(%m, [0]) : f32[4] P(sum)@r0
  %e = aten.sum(%m) : f32[] P(sum)@r0
  %a.r = all_reduce(%a) : f32[4] R@r0
  %b.r = all_reduce(%b) : f32[] R@r0
  %c.r = all_reduce(%c) : f64[4] R@r0
  %d.r = all_reduce(%d) : f32[4] R@r0
  %e.r = all_reduce(%e) : f32[] R@r0
  %c.n = aten._to_copy(%c.r, dtype=f32) : f32[4] R@r0
  %y = aten.add.Tensor(%a.r, %b.r) : f32[4] R@r0
  %z = aten.mul.Tensor(%d.r, %e.r) : f32[4] R@r0
  %u = aten.mul.Tensor(%y, %z) : f32[4] R@r0
  %v = aten.mul.Tensor(%u, %c.n) : f32[4] R@r0
  %s = aten.mul.Tensor(%m, %v) : f32[8, 4] S(0)@r0
  %loss = aten.mean(%s) : f32[] P(sum)@r0
  return %loss
}
"""


class Hand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(4.0) / 4 + 0.1)

    def forward(self, x):
        m = x * self.w
        a, d = x.sum(0), m.sum(0)
        return (m * ((a + x.sum()) * (d * m.sum()) * a.double().float())).mean()


def test_dtypes_and_gradients_are_not_mixed():
    program = parse_program(HAND)
    groups = levels_of_sums(program, COSTS)
    names = [{program.instructions[n].result for n in members} for members in groups]
    assert names == [{"a.r", "b.r"}, {"d.r", "e.r"}]
    made = coalesced(program, groups)
    check_program(made)
    assert num_sums(made) == 3 and "aten.view" in str(made)  # a scalar and a row have no dim in common
    report = verify(Hand(), {"x": torch.randn(8, 4)}, made)
    assert report.ok, report
    again = separated(made)
    check_program(again)
    assert num_sums(again) == 5 and verify(Hand(), {"x": torch.randn(8, 4)}, again).ok


def test_sums_whose_bytes_cost_more_than_their_latency_stay_apart():
    slow = CostModel(cluster(THREE, 1e-4))
    program = data_parallel(trace(Branches(), pictures()).graph, slow, UNEVEN)
    assert not levels_of_sums(program, slow)


def test_random_numbers_are_drawn_in_their_order():
    """A sum behind the second draw is not packed with one before the first, which would turn them round."""
    text = """
    program drawn world=3 {
      ratio r0 = [0.5, 0.25, 0.25]
      %x = input("x") : f32[8, 4] S(0)@r0
      %w = param("w") : f32[4] R
      %m = aten.mul.Tensor(%x, %w) : f32[8, 4] S(0)@r0
      %a = aten.sum.dim_IntList(%m, [0]) : f32[4] P(sum)@r0
      %a.r = all_reduce(%a) : f32[4] R@r0
      %h = aten.mul.Tensor(%m, %a.r) : f32[8, 4] S(0)@r0
      %k = aten.dropout(%h, 0.5, true) : f32[8, 4] S(0)@r0
      %l = aten.dropout(%m, 0.5, true) : f32[8, 4] S(0)@r0
      %b = aten.sum.dim_IntList(%l, [0]) : f32[4] P(sum)@r0
      %b.r = all_reduce(%b) : f32[4] R@r0
      %o = aten.mul.Tensor(%k, %b.r) : f32[8, 4] S(0)@r0
      %loss = aten.mean(%o) : f32[] P(sum)@r0
      return %loss
    }
    """
    assert not levels_of_sums(parse_program(text), COSTS)


# --- random graphs -----------------------------------------------------------------------------------------


@st.composite
def branchy(draw) -> str:
    """A program of cut values, of which some are summed and multiply others again; any of the values before
    may be read."""
    lines = ['%v0 = input("x") : f64[6, 4] S(0)@r0', '%w = param("w") : f64[4] R', ""]
    lines[2] = "%v1 = aten.mul.Tensor(%v0, %w) : f64[6, 4] S(0)@r0"
    for n in range(2, draw(st.integers(3, 10))):
        a, b = (draw(st.integers(0, n - 1)) for _ in range(2))
        match draw(st.sampled_from(["sum", "sum", "add", "tanh", "scalar"])):
            case "add":
                lines.append(f"%v{n} = aten.add.Tensor(%v{a}, %v{b}) : f64[6, 4] S(0)@r0")
            case "tanh":
                lines.append(f"%v{n} = aten.tanh(%v{a}) : f64[6, 4] S(0)@r0")
            case kind:
                op, t = ("sum.dim_IntList", "f64[4]") if kind == "sum" else ("sum", "f64[]")
                args = f"%v{a}, [0]" if kind == "sum" else f"%v{a}"
                lines.append(f"%s{n} = aten.{op}({args}) : {t} P(sum)@r0")
                lines.append(f"%s{n}.r = all_reduce(%s{n}) : {t} R@r0")
                lines.append(f"%t{n} = aten.tanh(%s{n}.r) : {t} R@r0")
                lines.append(f"%v{n} = aten.mul.Tensor(%v{b}, %t{n}) : f64[6, 4] S(0)@r0")
    last = sum(line.startswith("%v") for line in lines) - 1
    lines.append(f"%y = aten.mul.Tensor(%v{last}, %w) : f64[6, 4] S(0)@r0")
    lines += ["%loss = aten.mean(%y) : f64[] P(sum)@r0", "return %loss"]
    return "program random world=3 {\nratio r0 = [0.5, 0.333333, 0.166667]\n" + "\n".join(lines) + "\n}\n"


def outcome(program: Program, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and the gradient of the parameter."""
    w = torch.linspace(0.5, 1.5, 4, dtype=torch.float64, requires_grad=True)
    loss = interpret(program, {"w": w}, {"x": x}).loss
    loss.backward()
    return loss.detach(), w.grad


@settings(deadline=None, max_examples=60)
@given(branchy(), st.integers(1, 3))
def test_random_branches_compute_the_same(text, runs):
    program = parse_program(text)
    made = packed(program, runs)
    check_program(made)
    groups = in_runs(levels_of_sums(program, COSTS), runs)
    assert num_sums(made) == num_sums(program) - sum(len(members) - 1 for members in groups)
    assert parse_program(str(made)) == made
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want = outcome(program, x)
    for form in (made, separated(made)):
        torch.testing.assert_close(outcome(form, x), want, rtol=1e-9, atol=1e-12)


# --- real processes ----------------------------------------------------------------------------------------


class Trained:
    """Three steps on every rank, held against the single device."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, _) -> None:
        inputs = {name: x.double() if x.is_floating_point() else x for name, x in pictures().items()}
        single = Branches().double()
        other = copy.deepcopy(single)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (single, other)]
        made, optimizer = parallelize(
            other, optimizers[1], parse_program(self.text), device="cpu", timeout_s=30
        )
        for _ in range(3):
            losses = [single(**inputs), made(**inputs)]
            torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-9)
            for loss in losses:
                loss.backward()
            for p, q in zip(single.parameters(), made.parameters()):
                torch.testing.assert_close(q.grad, p.grad, rtol=1e-9, atol=1e-9)
            for o in (optimizers[0], optimizer):
                o.step()
                o.zero_grad()
        state = made.full_state_dict()
        for name, value in single.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9)


def test_processes_train_as_one_device_does():
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in pictures().items()}
    program = data_parallel(trace(Branches().double(), inputs).graph, COSTS, UNEVEN)
    texts = {f"in {runs} runs": str(packed(program, runs)) for runs in (1, 2)}
    results = run_world(3, {name: Trained(text) for name, text in texts.items()})
    for failures in results.values():
        assert_passed(failures)


# --- planning ----------------------------------------------------------------------------------------------


DEVICE = """
[[machine]]
devices = [{ name = "NAME", tflop_per_s = RATE, memory_gib = 4, memory_gbyte_per_s = 0.2 }]
"""


def far_apart(latency_us: float) -> Cluster:
    """Three machines of one device."""
    rates = {"a": "2e-3", "b": "15e-4", "c": "14e-4"}
    machines = "".join(DEVICE.replace("NAME", n).replace("RATE", rate) for n, rate in rates.items())
    return Cluster.parse(f"[network]\nbandwidth_gbit_per_s = 10\nlatency_us = {latency_us}\n{machines}")


def test_a_plan_packs_what_it_waits_for():
    traced = trace(Branches(), pictures(300))
    plan = make_plan(traced, far_apart(800), planner="hap")
    assert len(plan.program.participants(plan.program.params[0].type)) > 1
    assert num_sums(plan.program) < 15
    assert verify(Branches(), pictures(300), plan).ok
    baseline = make_plan(traced, far_apart(800), planner="ddp-proportional")
    assert num_sums(baseline.program) == 15
    assert plan.predicted_step_s < baseline.predicted_step_s
    assert type(plan).parse(str(plan)) == plan


def test_a_program_without_such_sums_is_not_looked_at_again():
    """The same object: nothing more is simulated."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x):
            return self.layers(x).square().mean()

    task = Task(trace(Mean(), {"x": torch.randn(12, 4)}).graph, COSTS, ADAM, lambda _: None)
    program = task.data_parallel(UNEVEN)
    assert task.packed(program) is program and not task.timings_s.get("simulate")
