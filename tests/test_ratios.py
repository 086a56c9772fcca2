"""The linear program, held to its certificate: feasible, dual feasible, complementary, no gap."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import GRAPHS, THREE, TWO, bodies, cluster, graph

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel, Curve, DeviceProfile, OpMeasurement, Profile, device_key, op_key
from mixmesh.cost.calls import is_computation
from mixmesh.errors import Infeasible
from mixmesh.lang.ir import even_ratio, make_ratio, ratio_of_speeds, support
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.lang.rules import call_of
from mixmesh.search.baselines import data_parallel, fully_sharded
from mixmesh.search.ratios import (
    LinearProgram,
    optimal_ratio,
    phases,
    ratio_program,
    solve,
    usable_bytes,
    with_ratio,
)
from mixmesh.search.synthesis import Prices, Problem, emit, search
from mixmesh.step.memory import peak_memory_bytes


def assert_certificate(lp: LinearProgram) -> None:
    """Recomputed from the rows alone. HiGHS' sign: a row at its lower limit has a dual >= 0, at its upper
    limit one <= 0; a reduced cost c - A'y is >= 0 for a variable at 0."""
    found = solve(lp)
    x, y = found.x, found.row_dual
    scale = max(1.0, float(np.abs(lp.A).max()))
    tight = 1e-6 * scale
    activity = lp.A @ x
    # primal: rows and bounds
    assert np.all(activity >= lp.lower - tight) and np.all(activity <= lp.upper + tight)
    assert np.all(x >= -tight)
    # dual: signs, and reduced costs that are what the rows say
    reduced = lp.c - lp.A.T @ y
    assert np.allclose(reduced, found.reduced_cost, atol=tight)
    assert np.all(reduced >= -tight)
    lower_only = np.isinf(lp.upper)
    upper_only = np.isinf(lp.lower)
    assert np.all(y[lower_only] >= -tight) and np.all(y[upper_only] <= tight)
    # complementary slackness
    assert np.all(np.abs(reduced * x) <= tight * max(1.0, lp.c @ x))
    for row, dual in enumerate(y):
        limit = lp.lower[row] if dual > 0 else lp.upper[row]
        if abs(dual) > tight:
            assert activity[row] == pytest.approx(limit, rel=1e-5, abs=1e-5 * scale)
    # zero gap
    limits = np.where(y > 0, lp.lower, lp.upper)
    dual_value = sum(d * limit for d, limit in zip(y, limits) if abs(d) > 1e-12)
    assert dual_value == pytest.approx(lp.c @ x, rel=1e-6, abs=1e-12)


def searched(body: str, text: str, ratio, price: float, link: float, scale: int):
    costs = CostModel(cluster(text, link))
    problem = Problem(graph(body, scale), costs, make_ratio(ratio), prices=Prices(gradient_sync=price))
    return emit(problem, search(problem)), costs


@settings(deadline=None, max_examples=40)
@given(
    bodies(),
    st.sampled_from([(TWO, (0.6, 0.4)), (THREE, (0.5, 0.2, 0.3))]),
    st.sampled_from([1.0, 0.0]),
    st.sampled_from([1, 100, 10000]),
    st.sampled_from([16, 128]),
)
def test_certificate_on_generated_programs(body, where, price, link, scale):
    program, costs = searched(body, *where, price, link, scale)
    ranks = tuple(range(program.world_size))
    assert_certificate(ratio_program(program, costs, ranks, optimizer_states=ADAM, headroom=0.05))


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_certificate_on_generated_phases(data):
    """Rows of any size: microseconds to minutes, with memory rows that bind."""
    n, s = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    cost = st.floats(0, 60) if data.draw(st.booleans()) else st.floats(0, 1e-3)
    rows = []
    for k in range(s):
        for j in range(n):
            row = np.zeros(n + s)
            row[n + k], row[j] = 1.0, -data.draw(cost)
            rows.append((row, data.draw(cost), np.inf))
    for j in range(n):
        row = np.zeros(n + s)
        row[j] = 1.0
        rows.append((row, -np.inf, data.draw(st.floats(1 / n, 1))))  # always feasible: even shares
    total = np.zeros(n + s)
    total[:n] = 1.0
    rows.append((total, 1.0, 1.0))
    matrix, lower, upper = zip(*rows)
    c = np.concatenate([np.zeros(n), np.ones(s)])
    assert_certificate(
        LinearProgram(c, np.array(matrix), np.array(lower), np.array(upper), ("",) * len(rows))
    )


def slow_pair(
    memory_gib: tuple[float, float] = (4, 4), tflop: tuple[float, float] = (1e-5, 2.5e-6)
) -> Cluster:
    a, b = [
        f'{{ name = "{n}", tflop_per_s = {t:.8f}, memory_gib = {m}, memory_gbyte_per_s = 100 }}'
        for n, m, t in zip("ab", memory_gib, tflop)
    ]
    return Cluster.parse(f'name = "pair"\n[[machine]]\ndevices = [{a}, {b}]\n')


def test_shares_follow_speed_where_compute_is_all():
    """One phase, no memory limit: both finish together, 4 to 1. And it lasts minutes: nothing caps it."""
    costs = CostModel(slow_pair())
    program = data_parallel(graph(GRAPHS["mlp"], 128), costs, even_ratio(2))
    ratio = optimal_ratio(program, costs, (0, 1))
    assert ratio == pytest.approx((0.8, 0.2), abs=0.01)
    lp = ratio_program(program, costs, (0, 1), optimizer_states=ADAM, headroom=0.05)
    assert lp.c @ solve(lp).x > 10 and len(phases(program, costs, (0, 1))) == 1


def test_the_slowest_device_keeps_a_share():
    """A ratio of a set of devices names all of them: one without a share makes it the ratio of another
    set."""
    assert support(ratio_of_speeds([1e-6, 1e3, 1e-6, 1e-6], (0, 1, 3))) == (0, 1, 3)
    assert ratio_of_speeds([1.0, 3.0, 2.0], (0, 1)) == (0.75, 0.25, 0.0)


def test_phases_end_where_ranks_wait():
    """A collective that a gradient passes ends a phase in both passes; a hidden one ends none."""
    costs = CostModel(cluster(THREE))
    program = data_parallel(graph(GRAPHS["residual"], 16), costs, even_ratio(3))
    assert len(phases(program, costs, (0, 1, 2))) == 1
    # each of two gathered weights ends one phase forward, and one backward where it is gathered again
    assert len(phases(fully_sharded(program), costs, (0, 1, 2))) > 1


def test_constant_terms_are_kept():
    """Where launches are all that is left, the shares do not matter to the time but must still sum to 1."""
    program, costs = searched(GRAPHS["mlp"], TWO, (0.5, 0.5), 0.0, 1000, 1)
    (phase,) = phases(program, costs, (0, 1))[:1]
    assert phase.fixed.min() > 0
    assert sum(optimal_ratio(program, costs, (0, 1))) == pytest.approx(1)


WIDE = """
%x = input("x") : f[512, 4]
%w = param("w") : f[4, 4]
%y = aten.linear(%x, %w) : f[512, 4]
%z = aten.relu(%y) : f[512, 4]
%loss = aten.mean(%z) : f[]
return %loss
"""


def test_memory_binds():
    """The fast device is small: it gets what fits and no more."""
    costs = CostModel(slow_pair((1.69, 4.8)))
    program = data_parallel(graph(WIDE, 128), costs, even_ratio(2))
    free = optimal_ratio(program, CostModel(slow_pair((64, 64))), (0, 1))
    bound = optimal_ratio(program, costs, (0, 1))
    assert free[0] == pytest.approx(0.8, abs=0.01) and bound[0] < 0.7
    peak = peak_memory_bytes(with_ratio(program, "r0", bound), costs)
    assert peak[0] == pytest.approx(usable_bytes(costs, 0, 0.05), rel=0.01)
    lp = ratio_program(program, costs, (0, 1), optimizer_states=ADAM, headroom=0.05)
    duals = [y for y, name in zip(solve(lp).row_dual, lp.rows) if name.startswith("memory rank 0")]
    assert min(duals) < 0  # a byte more there would make the step shorter
    assert_certificate(lp)


def test_shares_on_curves_that_bend():
    """Rank 1 is slow on small shares and fast on large ones: the shares are those at which both are done
    together on the curves themselves, not on a line through all of them."""
    where = slow_pair((64, 64))
    bending = Curve(((0.1, 2.0), (0.3, 3.0), (0.5, 3.5), (1.0, 4.0)))
    straight = Curve(((0.1, 0.5), (0.5, 2.5), (1.0, 5.0)))
    program = data_parallel(graph(WIDE, 128), CostModel(where), even_ratio(2))
    ops = {op_key(call_of(i, program.types)) for i in program.instructions if is_computation(i)}
    devices = {
        device_key(d): DeviceProfile({op: OpMeasurement(c, c, 0, 0) for op in ops}, 0.0, 0)
        for d, c in zip(where.devices, (straight, bending))
    }
    found = optimal_ratio(program, CostModel(where, Profile(devices, ())), (0, 1))
    assert straight.at(found[0]) == pytest.approx(bending.at(found[1]), rel=0.02)


def test_infeasible_memory():
    costs = CostModel(slow_pair((0.62, 0.62)))
    program = data_parallel(graph(GRAPHS["mlp"], 2048), costs, even_ratio(2))
    with pytest.raises(Infeasible, match="memory"):
        optimal_ratio(program, costs, (0, 1))


def test_a_rank_left_out_has_no_share():
    costs = CostModel(cluster(THREE))
    program = data_parallel(graph(GRAPHS["mlp"], 64), costs, make_ratio([0.5, 0, 0.5]))
    ratio = optimal_ratio(program, costs, (0, 2))
    assert ratio[1] == 0 and ratio[0] > 0 and ratio[2] > 0


def test_with_ratio_changes_one_ratio():
    costs = CostModel(cluster(THREE))
    program = data_parallel(graph(GRAPHS["mlp"]), costs, even_ratio(3))
    changed = with_ratio(program, "r0", make_ratio([1, 2, 1]))
    assert changed.ratio_of["r0"] == (0.25, 0.5, 0.25) and changed.instructions == program.instructions
