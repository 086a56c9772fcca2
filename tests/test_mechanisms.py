"""Every mechanism wins somewhere: a case each in which the plan is slower, in simulation, without it.

A mechanism is switched off at the place where the planner asks for it. Were it lost, plans with and without
it would be alike, and its case would fail.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import le
from pathlib import Path

import pytest
import torch
from mutations import MUTATIONS
from small_graphs import graph

import mixmesh
from mixmesh.cluster import Cluster
from mixmesh.frontend.job.workloads.language import LanguageModel
from mixmesh.frontend.job.workloads.layers import MoeLayer
from mixmesh.frontend.trace import trace
from mixmesh.lang.check import check_program
from mixmesh.lang.ir import Graph, Program, owned_type
from mixmesh.lang.plan_file import Plan
from mixmesh.planner import make_plan
from mixmesh.planner.device_sets import device_sets
from mixmesh.planner.planners import ROWS, Planner

# --- models and clusters -------------------------------------------------------------------------------


def layers(rows: int, widths: Sequence[int], inner: str = "") -> Graph:
    """Linear layers of these widths, each with a relu; ``inner`` is a dim of each row, such as "2048, "."""
    lines, last = [f'%x = input("x") : f[{rows}, {inner}{widths[0]}]'], "x"
    for n, (before, after) in enumerate(zip(widths, widths[1:])):
        shape = f"f[{rows}, {inner}{after}]"
        lines += [
            f'%w{n} = param("w{n}") : f[{after}, {before}]',
            f"%h{n} = aten.linear(%{last}, %w{n}) : {shape}",
            f"%r{n} = aten.relu(%h{n}) : {shape}",
        ]
        last = f"r{n}"
    return graph("\n".join([*lines, f"%loss = aten.mean(%{last}) : f[]", "return %loss"]))


def towers(rows: int, wide: int, deep: int, count: int) -> Graph:
    """One wide layer first, whose gradient comes last in the model's own order, and ``count`` deep ones."""
    shape = f"f[{rows}, {deep}]"
    lines = [
        f'%x = input("x") : f[{rows}, {wide}]',
        f'%v = param("v") : f[{deep}, {wide}]',
        f"%a = aten.linear(%x, %v) : {shape}",
        f'%y = input("y") : {shape}',
    ]
    last = "y"
    for n in range(count):
        lines += [
            f'%u{n} = param("u{n}") : f[{deep}, {deep}]',
            f"%g{n} = aten.linear(%{last}, %u{n}) : {shape}",
            f"%s{n} = aten.relu(%g{n}) : {shape}",
        ]
        last = f"s{n}"
    end = [f"%q = aten.mul.Tensor(%a, %{last}) : {shape}", "%loss = aten.mean(%q) : f[]", "return %loss"]
    return graph("\n".join(lines + end))


def elementwise_then_products(rows: int, width: int, first: int, then: int) -> Graph:
    """What memory bounds, and then what multiplying bounds."""
    shape = f"f[{rows}, {width}]"
    lines, last = [f'%x = input("x") : {shape}'], "x"
    for n in range(first):
        lines += [
            f"%e{n} = aten.mul.Tensor(%{last}, %{last}) : {shape}",
            f"%t{n} = aten.tanh(%e{n}) : {shape}",
        ]
        last = f"t{n}"
    for n in range(then):
        lines += [
            f'%w{n} = param("w{n}") : f[{width}, {width}]',
            f"%h{n} = aten.linear(%{last}, %w{n}) : {shape}",
        ]
        last = f"h{n}"
    return graph("\n".join([*lines, f"%loss = aten.mean(%{last}) : f[]", "return %loss"]))


def mixture() -> Graph:
    """A language model of one layer, whose feed-forward is a mixture of experts."""
    with torch.device("meta"):
        layer = MoeLayer(768, 12, 3072, experts=8, seq=128)
        model = LanguageModel([layer], words=1000, seq=128, width=768)
        tokens, targets = torch.randint(1000, (2, 128, 128))
    return trace(model, {"tokens": tokens, "targets": targets}).graph


Speeds = tuple[float, float]  # TFLOP/s and gigabytes of memory per second


def gpus(gbit_per_s: float, *machines: Sequence[float | Speeds], link_gbit_per_s: float = 100) -> Cluster:
    """Machines of GPUs by their TFLOP/s, with 500 GB/s of memory unless a second figure says otherwise."""
    text = f"[network]\nbandwidth_gbit_per_s = {gbit_per_s}\nlatency_us = 20\n"
    for number, devices in enumerate(machines):
        rows = []
        for device in devices:
            tflop, gbyte = device if isinstance(device, tuple) else (device, 500)
            rows.append(
                f'{{ name = "d{tflop:g}-{gbyte:g}", tflop_per_s = {tflop}, memory_gib = 16, '
                f"memory_gbyte_per_s = {gbyte} }}"
            )
        text += f'[[machine]]\nname = "m{number}"\nlink_gbit_per_s = {link_gbit_per_s}\n'
        text += f"devices = [{', '.join(rows)}]\n"
    return Cluster.parse(text, where="test")


# --- mechanisms ----------------------------------------------------------------------------------------

Off = dict[str, object]  # what stands in the place of a mechanism, by where the planner finds it


def same(_, proposal, *__):
    """The proposal as it is."""
    return proposal


def largest_first(synthesis) -> list[tuple[int, ...]]:
    return sorted(device_sets(synthesis.task), key=lambda ranks: (-len(ranks), ranks))


WITHOUT_PIPELINES = tuple(row for row in ROWS if row.name not in ("pipeline", "two-level"))


def not_on_sets(name: str) -> tuple[Planner, ...]:
    """The planners, of which one is not asked for sets of machines."""
    return tuple(replace(row, on_sets=None) if row.name == name else row for row in ROWS)


def factors(program: Program) -> bool:
    return bool(program.factored)


def owners(program: Program) -> bool:
    return any(owned_type(program, i) is not None for i in program.params)


@dataclass(frozen=True)
class Case:
    """Without the mechanism the plan takes ``gain`` times as long at least. ``shows`` says of a program that
    it has the mechanism, where its text tells."""

    graph: Callable[[], Graph]
    cluster: Cluster
    off: Off
    gain: float
    planner: str = "hap"
    whole_parameters: bool = False
    shows: Callable[[Program], bool] | None = None
    options: dict = field(default_factory=dict)

    def plan(self) -> Plan:
        return make_plan(
            self.graph(),
            self.cluster,
            planner=self.planner,
            whole_parameters=self.whole_parameters,
            **self.options,
        )


TWO_BY_TWO = gpus(8, [2, 2], [2, 2])
ALONE = gpus(20, [4], [4], [2], [2])  # one in each machine
THREE_AND_A_WEAK_ONE = Cluster.parse("""
name = "three and a weak one"
[network]
bandwidth_gbit_per_s = 60
latency_us = 20
[[machine]]
link_gbit_per_s = 15
devices = [{ name = "slow", tflop_per_s = 5, memory_gib = 16, memory_gbyte_per_s = 400, count = 3 }]
[[machine]]
link_gbit_per_s = 500
devices = [{ name = "slow", tflop_per_s = 5, memory_gib = 16, memory_gbyte_per_s = 400, count = 2 }]
[[machine]]
link_gbit_per_s = 200
devices = [{ name = "slow", tflop_per_s = 5, memory_gib = 16, memory_gbyte_per_s = 400, count = 3 }]
[[machine]]
link_gbit_per_s = 100
devices = [{ name = "weak", tflop_per_s = 1, memory_gib = 16, memory_gbyte_per_s = 200 }]
""")
CASES = {
    # an optimizer of whole parameters: nothing can be cut, and sums are long
    "gradients from gathered factors": Case(
        lambda: layers(64, [4096] * 3), TWO_BY_TWO, {"passes.factors.best_factors": lambda *_: None}, 1.3,
        whole_parameters=True, shows=factors,
    ),
    "order of execution": Case(
        lambda: towers(2048, 8192, 512, 6), ALONE, {"passes.order.ordered": same}, 1.1
    ),
    "sums within machines first": Case(
        lambda: layers(4096, [512] * 13), TWO_BY_TWO, {"task.best_levels": lambda *_: None}, 1.15,
        shows=lambda program: program.levels is not None,
    ),
    "owners of gradients": Case(
        lambda: layers(4096, [512] * 13), TWO_BY_TWO,
        {"passes.reductions.owned_runs": lambda *_, **__: [],
         "passes.weight_gradients.owned_runs": lambda *_, **__: []}, 1.08,
        shows=owners,
    ),
    "weight gradients apart": Case(
        lambda: layers(64, [4096] * 3), ALONE, {"passes.weight_gradients.apart": same}, 1.05,
        shows=lambda program: bool(program.wgrads),
    ),
    "buckets of several sizes": Case(
        lambda: layers(4096, [512] * 13), TWO_BY_TWO,
        {"task.SMALLER_BYTES": (), "task.LARGER_BYTES": ()}, 1.01,
        whole_parameters=True,
    ),
    "shares by linear programming": Case(
        lambda: layers(64, [2048] * 5), gpus(40, [4], [1], [0.5]),
        {"task.optimal_ratio": lambda program, *_, **__: program.ratio_of["r0"]}, 1.02,
    ),
    "single samples moved": Case(
        lambda: layers(13, [1024] * 5, "2048, "), gpus(100, [3], [2], [1.2]),
        {"passes.shares.polish": same}, 1.03,
        whole_parameters=True,
    ),
    "some of the devices": Case(
        lambda: layers(512, [1024] * 5), gpus(1, [4, 4], [0.3]),
        {"hap.device_sets": lambda task: [task.ranks]}, 1.3, whole_parameters=True,
    ),
    "several sets of devices within the budget": Case(
        lambda: layers(64, [1024] * 13), gpus(10, [4, 4], [4, 4], [1, 1]),
        {"hap.Synthesis.most_sets": lambda *_: 1}, 1.1, planner="auto",
    ),
    "the most hopeful sets first": Case(
        lambda: layers(64, [1024] * 150), gpus(1, [8, 8, 8], [4, 4], [2], [1], link_gbit_per_s=200),
        {"hap.Synthesis.sets": largest_first}, 1.1, planner="auto",
    ),
    "several programs finished": Case(
        lambda: towers(2048, 4096, 2048, 2), gpus(20, [0.5, 0.5, 8], [1, 4, 2]),
        {"finished.FEW": 1}, 1.2, planner="auto",
    ),
    "small programs finished in a quick plan": Case(
        lambda: towers(1024, 2048, 512, 2), gpus(50, [0.5, 8, 0.25], [4], link_gbit_per_s=5),
        {"finished.SHARE": 0.0}, 1.2, planner="auto",
    ),
    "shares of their own for segments": Case(
        lambda: elementwise_then_products(16384, 256, 12, 24),
        gpus(100, [(10, 100)], [(2, 1000)]), {"segments.MAX_SEGMENTS": 1}, 1.08, planner="segments",
        shows=lambda program: len(program.ratios) > 1,
    ),
    "pipelines": Case(
        lambda: layers(4096, [4096] * 7), gpus(5, [2, 2], [2, 2], link_gbit_per_s=800),
        {"propose.ROWS": WITHOUT_PIPELINES}, 1.2, planner="auto",
    ),
    "two levels on some of the machines": Case(
        mixture, THREE_AND_A_WEAK_ONE,
        {"propose.ROWS": not_on_sets("two-level")},
        1.05, planner="auto",
    ),
    "pipelines on some of the machines": Case(
        lambda: layers(2048, [2048] * 11), gpus(8, [0.5] * 4, [8], [1] * 4, [8] * 4, link_gbit_per_s=50),
        {"propose.ROWS": not_on_sets("pipeline")},
        1.02, planner="auto",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_slower_without(name, monkeypatch):
    case = CASES[name]
    plan = case.plan()
    check_program(plan.program)
    assert Plan.parse(str(plan)) == plan
    if case.shows is not None:
        assert case.shows(plan.program)
    for place, other in case.off.items():
        monkeypatch.setattr(f"mixmesh.planner.{place}", other)
    without = case.plan()
    if case.shows is not None:
        assert not case.shows(without.program)
    assert without.predicted_step_s > case.gain * plan.predicted_step_s


def test_all_devices_are_searched_where_the_most_hopeful_are_too_small():
    """There is time to search three sets. Data parallelism leaves most to hope for on the fewest devices,
    which have no memory for the model, in whatever form; all of them cut it and hold it."""
    plan = make_plan(layers(64, [6144] * 150), gpus(1, [8, 8], [8, 8], [4, 4], [4, 4], link_gbit_per_s=200))
    check_program(plan.program)
    assert plan.planner == "hap" and all(map(le, plan.predicted_peak_memory_bytes, plan.usable_bytes))
    assert plan.program.working_ranks == tuple(range(8))


def test_no_pipeline_for_an_optimizer_of_whole_parameters():
    """Its stages hold some of them alone, which such an optimizer refuses at the start of the training."""
    pipelines = CASES["pipelines"]
    assert "pipeline" in pipelines.plan().planner
    whole = replace(pipelines, whole_parameters=True)
    assert "pipeline" not in whole.plan().planner
    with pytest.raises(mixmesh.Infeasible, match="spreads parameters over ranks, and the job's optimizer"):
        replace(whole, planner="pipeline").plan()


def test_owners_that_save_less_than_a_hundredth_are_left_out(monkeypatch):
    """They keep optimizers to those that work by element."""

    def plan() -> Plan:
        return make_plan(
            layers(4096, [512] * 3, "32, "), gpus(5, [4, 4], [2], link_gbit_per_s=50), planner="hap"
        )

    usual = plan()
    assert not owners(usual.program)
    monkeypatch.setattr("mixmesh.planner.passes.reductions.MARGIN", 0.0)
    other = plan()
    assert owners(other.program)
    assert 0.99 * usual.predicted_step_s < other.predicted_step_s < usual.predicted_step_s


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_change_what_is_there(name):
    """``python -m tests.mutations`` turns off what still exists."""
    mutation = MUTATIONS[name]
    text = (Path(mixmesh.__file__).parent / mutation.module).read_text()
    assert re.search(rf"\b{mutation.name}\b", text)
    assert all(
        (Path(__file__).parent.parent / word).exists() for word in mutation.tests.split() if "/" in word
    )
