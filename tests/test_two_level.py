"""Samples dealt out between machines, a program of its own in each: with machines of different numbers of
devices, in one process and between processes."""

from __future__ import annotations

import math
from functools import cache
from itertools import product

import pytest
import test_recompute as long
import torch
from gloo_world import assert_passed, run_world
from hypothesis import given, settings
from hypothesis import strategies as st
from test_verify_models import CLUSTERS, MODELS, traced
from torch import nn

from mixmesh.api import plan_traced
from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.cost.sums import gradient_sums
from mixmesh.errors import Infeasible, InputError, VerificationError
from mixmesh.explain import explain_tensor
from mixmesh.frontend.trace import trace
from mixmesh.lang.check import check_program
from mixmesh.lang.ir import EVERYWHERE, Program, cells, even_ratio, make_ratio, parse_program, piece, regions
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.lang.plan_file import Plan
from mixmesh.measure.verification import TOLERANCE_F64, verify
from mixmesh.planner import two_level
from mixmesh.planner.task import Task
from mixmesh.planner.two_level import TwoLevel, regions_on
from mixmesh.runtime.parallel import parallelize
from mixmesh.search.baselines import TENSOR_PARALLEL, data_parallel
from mixmesh.search.placement.join import join
from mixmesh.search.placement.sets import Member, SetScope, is_joined, members_of, scope_of
from mixmesh.search.placement.split import split
from mixmesh.step.memory import Memory
from tests.support.small_devices import free_communicators, memory_gib  # noqa: F401

DEVICE = '{{ name = "at {0}", tflop_per_s = {0}, memory_gib = 2, memory_gbyte_per_s = 0.1 }}'
CLUSTER = f"""\
name = "two and three"
[network]
bandwidth_gbit_per_s = 1
latency_us = 1
[[machine]]
link_latency_us = 1
devices = [{DEVICE.format(6e-6)}, {DEVICE.format(3e-6)}]
[[machine]]
link_latency_us = 1
devices = [{DEVICE.format(5e-6)}, {DEVICE.format(3e-6)}, {DEVICE.format(3e-6)}]
"""
WORLD, BATCH = 5, 9
# the first machine has nothing to do
PARTIAL = f"""\
name = "one, two and two"
[network]
bandwidth_gbit_per_s = 1
latency_us = 1
[[machine]]
devices = [{DEVICE.format(3e-6)}]
[[machine]]
link_latency_us = 1
devices = [{DEVICE.format(6e-6)}, {DEVICE.format(3e-6)}]
[[machine]]
link_latency_us = 1
devices = [{DEVICE.format(5e-6)}, {DEVICE.format(3e-6)}]
"""
BUSY = (1, 2, 3, 4)


def cut_within_machines(graph, cluster: Cluster, ranks: tuple[int, ...] = ()):
    """The plan that cuts as many parameters within machines as can be, on all ranks or some."""
    task = Task(graph, CostModel(cluster), ADAM, lambda _: None)
    task = task.on(ranks) if ranks else task
    planner = TwoLevel(task)
    speeds = [float(len(ranks)) for ranks in planner.machines]
    return next(planner.dealt(TENSOR_PARALLEL.gradient_sync, speeds))


# --- in one process ------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", CLUSTERS[1:], ids=lambda c: c.name)
@pytest.mark.parametrize("name", MODELS)
def test_equals_single_device(name, devices):
    model, batch, graph = traced(name)
    program = cut_within_machines(graph.graph, devices)
    check_program(program)
    assert parse_program(str(program)) == program
    assert program.copies, "nothing is cut within a machine"
    report = verify(model, batch, program, traced=graph)
    assert report.max_loss_error_f64 <= TOLERANCE_F64, report
    assert report.max_gradient_error_f64 <= TOLERANCE_F64, report


def test_a_machine_without_work_holds_nothing():
    """Its links would carry all gradients once more."""
    graph = trace(model_of(), batch(0))
    made = program(is_partial=True)
    check_program(made)
    assert parse_program(str(made)) == made and made.copies
    assert made.working_ranks == BUSY
    sums = gradient_sums(made)
    assert sums and all({*s.ranks} <= {*BUSY} for s in sums)
    sets, values = split(made)
    assert [s.ranks for s in sets] == [(1, 2), (3, 4)] and join(made.name, sets, values) == made
    report = verify(model_of(), batch(0), made, traced=graph)
    assert report.max_loss_error_f64 <= TOLERANCE_F64, report
    assert report.max_gradient_error_f64 <= TOLERANCE_F64, report


def test_sets_share_no_rank():
    """A program whose ratios have the names of sets, and are none, was not joined."""
    made = program(is_partial=True)
    assert members_of(made) == (Member(0), Member(1)) and is_joined(made)
    everyone, ratios = even_ratio(WORLD), dict(made.ratios)
    for other in ({**ratios, "m1": everyone}, {k: v for k, v in ratios.items() if k != "m1"}):
        assert not is_joined(made.changed(ratios=tuple(other.items())))
    one_set = {k: v for k, v in ratios.items() if scope_of(k) in (None, SetScope(Member(0), None))}
    assert not is_joined(made.changed(ratios=tuple(one_set.items())))


def test_names_of_sets_are_read_as_written():
    for member, own in product((Member(0), Member(1), Member(11)), ("r0", "z", "m2.r0", None)):
        assert scope_of(member.ratio(own)) == SetScope(member, own)
    assert [scope_of(name) for name in ("m", "max", "r0", "m.r0")] == [None] * 4
    one = Member(1)
    assert one.own(one.value("h.m1")) == "h.m1" and one.own("h.m11") == "h.m11"
    numbers = {member.region(own, 3): (member, own) for member in map(Member, range(3)) for own in range(4)}
    assert len(numbers) == 12
    assert all(member.own_region(number, 3) == own for number, (member, own) in numbers.items())


def test_the_planner_of_that_name():
    _, _, graph = traced("bert")
    plan = plan_traced(graph, CLUSTERS[2], planner="two-level")
    assert plan.planner == "two-level" and plan.feasible
    found = explain_tensor(plan, CLUSTERS[2], plan.program.params[0].args[0])
    assert found.step_s == pytest.approx(plan.predicted_step_s)


def test_every_process_makes_the_model_once():
    """Whatever the number of machines that hold a copy of a parameter."""
    graph, cluster = trace(model_of(), batch(0)).graph, Cluster.parse(CLUSTER)
    even = data_parallel(graph, CostModel(cluster), even_ratio(WORLD))
    copied, once = (Memory(p, ADAM).moments[0] for p in (program(), even))
    assert copied.what == once.what == "the initial values"
    assert copied.held[EVERYWHERE] == once.held[EVERYWHERE]


def test_there_are_no_two_levels_in_one_machine():
    _, _, graph = traced("bert")
    with pytest.raises(InputError, match="two-level has no plan") as error:
        plan_traced(graph, CLUSTERS[0], planner="two-level")
    assert "one of them with several devices" in error.value.expected


# --- cells ---------------------------------------------------------------------------------------------


@st.composite
def copied(draw):
    rows, columns = draw(st.integers(2, 9)), draw(st.integers(2, 9))
    text, rank = [], 0
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))
    world = sum(sizes)
    ratios, loads, sums = [], [], []
    for m, size in enumerate(sizes):
        shares = [draw(st.integers(1, 5)) if rank <= r < rank + size else 0 for r in range(world)]
        rank += size
        ratios.append(f"  ratio m{m} = {list(make_ratio(shares))}")
        how = draw(st.sampled_from(("R", "S(0)", "S(1)")))
        loads.append(f'  %w.{m} = param("w") : f32[{rows}, {columns}] {how}@m{m}')
        out = f"P(sum)@m{m}" if how != "R" else f"R@m{m}"
        sums.append(f"  %s.{m} = aten.sum(%w.{m}) : f32[] {out}")
        sums.append(f"  %t.{m} = move(%s.{m}) : f32[] P(sum)")
    last = "t.0"
    for m in range(1, len(sizes)):
        sums.append(f"  %u.{m} = aten.add.Tensor(%{last}, %t.{m}) : f32[] P(sum)")
        last = f"u.{m}"
    text = [f"program p world={world} {{", *ratios, *loads, *sums, f"  return %{last}", "}"]
    return text, last, (rows, columns)


@given(copied())
@settings(max_examples=60, deadline=None)
def test_cells_hold_every_element_between_all_who_have_it(made):
    text, loss, shape = made
    program = parse_program("\n".join(text))
    assert program.loss == loss
    (copies,) = program.copies.values()
    holders = {
        at: sorted(
            rank
            for copy in copies
            for rank in program.participants(copy.type)
            if all(a <= x < a + n for x, (a, n) in zip(at, piece(program, copy, rank)))
        )
        for at in product(*map(range, shape))
    }
    seen = set()
    for cell in cells(program, copies[0]):
        assert cell.keeper in cell.ranks and cell.keeper in program.participants(copies[0].type)
        for box in cell.boxes:
            for at in product(*(range(a, a + n) for a, n in box)):
                assert holders[at] == list(cell.ranks)
                assert at not in seen
                seen.add(at)
        assert cell.num_elements == sum(math.prod(n for _, n in box) for box in cell.boxes)
    assert seen == set(holders)


def test_a_rank_holds_a_parameter_once():
    text = """program p world=2 {
  ratio a = [0.5, 0.5]
  ratio b = [0.0, 1.0]
  %w.0 = param("w") : f32[4] S(0)@a
  %w.1 = param("w") : f32[4] R@b
  %s.0 = aten.sum(%w.0) : f32[] P(sum)@a
  return %s.0
}"""
    with pytest.raises(VerificationError, match="rank 1 holds w twice"):
        check_program(parse_program(text))


# --- between processes ---------------------------------------------------------------------------------


class Model(nn.Module):
    """A table for both ends, a wide layer between them, and statistics of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(6, dtype=torch.float64)
        self.up = nn.Linear(6, 15, dtype=torch.float64)
        self.down = nn.Linear(15, 6, dtype=torch.float64)

    def forward(self, ids, labels):
        x = self.norm(self.table(ids).mean(1))
        x = x + self.down(self.up(x).tanh())
        return nn.functional.cross_entropy(x @ self.table.weight.T, labels)


def batch(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(10, (BATCH, 3), generator=torch.Generator().manual_seed(step))
    return {"ids": ids, "labels": ids[:, 0]}


def model_of() -> Model:
    torch.manual_seed(0)
    return Model()


def program(*, is_partial: bool = False) -> Program:
    graph = trace(model_of(), batch(0)).graph
    if is_partial:
        return cut_within_machines(graph, Cluster.parse(PARTIAL), BUSY)
    return cut_within_machines(graph, Cluster.parse(CLUSTER))


class Training:
    """A class, since closures do not pickle."""

    def __init__(
        self,
        accumulate: int = 1,
        max_norm: float = 0.0,
        again: bool = False,
        is_partial: bool = False,
    ) -> None:
        self.accumulate, self.max_norm, self.again = accumulate, max_norm, again
        self.is_partial = is_partial

    def __call__(self, _) -> None:
        single, mine = model_of(), model_of()
        adam = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (single, mine)]
        made = program(is_partial=self.is_partial)
        made = two_level.recomputed_within(made) if self.again else made
        model, mine_adam = parallelize(mine, adam[1], made, device="cpu", timeout_s=60)
        assert ("region(keep)" in model.source) == self.again
        for step in range(3):
            for n in range(self.accumulate):
                data = batch(10 * step + n)
                expected, loss = single(**data), model(**data)
                torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
                expected.backward()
                loss.backward()
            if self.max_norm:
                norm = nn.utils.clip_grad_norm_(single.parameters(), self.max_norm)
                torch.testing.assert_close(
                    model.clip_grad_norm_(self.max_norm).double(), norm, rtol=1e-6, atol=1e-9
                )
            for optimizer in (adam[0], mine_adam):
                optimizer.step()
                optimizer.zero_grad()
            whole = single.state_dict()
            for name, value in model.full_state_dict().items():
                torch.testing.assert_close(value, whole[name], rtol=1e-7, atol=1e-9, msg=name)


CHECKS = {
    "adam": Training(),
    "accumulated": Training(accumulate=3),
    "clipped": Training(max_norm=0.01),
    "computed again": Training(again=True),
    "a machine without work": Training(is_partial=True),
}


@pytest.fixture(scope="module")
def results():
    return run_world(WORLD, CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_between_processes(results, name):
    assert_passed(results[name])


def test_machines_of_other_sizes_hold_other_pieces():
    """The cells are summed between one rank of each machine."""
    made = program()
    up = next(copies for name, copies in made.copies.items() if name == "up.weight")
    found = cells(made, up[0])
    assert len(found) > 3 and all(len(cell.ranks) == 2 for cell in found)


# --- with activations computed again -----------------------------------------------------------------------

ROOM_MIB = 4.9  # beside the process: for all but the activations of a machine's samples


def thin(room_mib: float) -> Cluster:
    """Two and three devices of one speed with so much memory beside the process, behind thin links."""
    device = (
        f'{{ name = "d", tflop_per_s = 0.1, memory_gbyte_per_s = 10, memory_gib = {memory_gib(room_mib)} }}'
    )
    inside = "link_gbit_per_s = 100\nlink_latency_us = 1\n"
    machines = [f"[[machine]]\n{inside}devices = [{', '.join([device] * count)}]\n" for count in (2, 3)]
    network = "[network]\nbandwidth_gbit_per_s = 0.3\nlatency_us = 20\n"
    return Cluster.parse(f'name = "thin"\n{network}' + "".join(machines))


class Normed(long.Model):
    """With statistics over all samples, which no micro-batch can have."""

    def __init__(self) -> None:
        super().__init__(width=96, layers=4)
        self.norm = nn.BatchNorm1d(96)

    def forward(self, ids, labels):
        x = self.norm(self.table(ids).transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


@cache
def normed():
    torch.manual_seed(0)
    model, data = Normed(), long.batch(0, 128, 5)
    return model, data, trace(model, data)


def test_the_fastest_plan_that_fits_computes_again(monkeypatch):
    model, data, known = normed()
    where = thin(ROOM_MIB)
    plan = plan_traced(known, where)
    assert plan.planner == "two-level" and regions(plan.program)
    check_program(plan.program)
    assert Plan.parse(str(plan)) == plan
    for peak, device in zip(plan.predicted_peak_memory_bytes, where.devices):
        assert peak <= device.memory_bytes * 0.95
    others = [c for c in plan.candidates if c.feasible and c.planner != "two-level"]
    assert all(plan.predicted_step_s < c.predicted_step_s for c in others)
    report = verify(model, data, plan, traced=known)
    assert report.max_loss_error_f64 <= TOLERANCE_F64, report
    assert report.max_gradient_error_f64 <= TOLERANCE_F64, report
    monkeypatch.setattr(two_level, "recomputed", lambda program: program)
    without = plan_traced(known, where)
    assert without.planner != "two-level" or without.predicted_step_s > plan.predicted_step_s
    with pytest.raises(Infeasible):
        plan_traced(known, where, planner="two-level")


@pytest.mark.parametrize("limit, judged", [(two_level.HOPELESS, 1), (math.inf, 2)])
def test_a_program_much_slower_than_the_best_is_not_judged(monkeypatch, limit, judged):
    _, _, known = normed()
    task = Task(known.graph, CostModel(thin(0.1)), ADAM, lambda _: None)
    planner = TwoLevel(task)
    (_, program), *_ = planner.candidates()
    task.best_s = 1.0
    monkeypatch.setattr(TwoLevel, "candidates", lambda _: iter([(1.0, program), (1.5, program)]))
    monkeypatch.setattr(two_level, "HOPELESS", limit)
    monkeypatch.setattr(two_level, "SPARE", ())
    made = list(planner.proposals())
    assert len(made) == judged and not any(p.feasible for p in made)


@pytest.mark.parametrize("room_mib, most", [(0.1, 1), (ROOM_MIB, len(two_level.SPARE))])
def test_where_a_machine_lacks_memory_no_more_is_left_free(monkeypatch, room_mib, most):
    _, _, known = normed()
    tried: dict[float, None] = {}
    fitting = TwoLevel.fitting

    def noted(planner, inner, program, ranks, spare):
        tried[spare] = None
        return fitting(planner, inner, program, ranks, spare)

    monkeypatch.setattr(TwoLevel, "fitting", noted)
    made = list(TwoLevel(Task(known.graph, CostModel(thin(room_mib)), ADAM, lambda _: None)).proposals())
    assert any(p.feasible for p in made) == (room_mib == ROOM_MIB)
    assert [*tried] == [*two_level.SPARE][: len(tried)] and 1 <= len(tried) <= most


def test_regions_are_of_one_machine():
    _, _, known = normed()
    program = plan_traced(known, thin(ROOM_MIB), planner="two-level").program
    machines = [set(range(2)), set(range(2, 5))]
    for members in regions(program).values():
        ranks = {r for n in members for r in program.participants(program.instructions[n].types[0])}
        assert any(ranks <= machine for machine in machines)
    of_machines = [regions_on(program, tuple(machine)) for machine in machines]
    assert all(of_machines) and {n for numbers in of_machines for n in numbers} == regions(program).keys()
    assert not {*of_machines[0]} & {*of_machines[1]}
    sets, wholes = split(program)
    again = join(program.name, sets, wholes)
    assert regions(again).keys() == regions(program).keys()


def test_nothing_is_computed_again_where_there_is_room():
    _, _, known = normed()
    assert not regions(plan_traced(known, thin(50), planner="two-level").program)


def test_a_plan_with_regions_can_be_explained():
    _, _, known = normed()
    where = thin(ROOM_MIB)
    plan = plan_traced(known, where, planner="two-level")
    found = explain_tensor(plan, where, "layers.1.up.weight")
    assert found.own.fits and found.step_s == pytest.approx(plan.predicted_step_s)
    assert any(regions(a.program) for a in found.alternatives if a.program is not None and not a.is_plan)
