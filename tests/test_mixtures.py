"""Mixtures of experts: found in models as they are written, cut by tokens or by experts, as on one device."""

from __future__ import annotations

import copy
import gc
from functools import partial

import pytest
import torch
from gloo_world import assert_passed, assert_trains_alike, run_world
from mixture_models import FAMILIES, cut_program, mixture, tokens
from torch import nn

from benchmarks.coverage import CLUSTER
from mixmesh.api import plan_traced
from mixmesh.cluster import Cluster
from mixmesh.frontend.trace import PASSES, trace
from mixmesh.lang.ir import PARTIAL, REPLICATE, Program, Shard, parse_program, print_program
from mixmesh.lang.operators import experts
from mixmesh.lang.rules import EXPERTS, call_of
from mixmesh.measure.verification import verify
from mixmesh.step.kept import extra_bytes, kept

pytest.importorskip("transformers")

THREE = Cluster.parse(CLUSTER)
EXACT = 1e-9


def mixtures_in(graph_or_program) -> list:
    nodes = graph_or_program.instructions if isinstance(graph_or_program, Program) else graph_or_program.nodes
    return [n for n in nodes if n.op == EXPERTS]


def cuts(program: Program) -> set[tuple]:
    """Of every mixture: how its tokens, its experts and its result are held."""
    held = set()
    for i in mixtures_in(program):
        first_table = 1 + len(i.args[1]) + len(i.args[2])
        names = (i.inputs[1], i.inputs[first_table])
        held.add(tuple(type(program.types[n].placement).__name__ for n in (*names, i.results[0])))
    return held


@pytest.fixture(scope="module")
def mixtral():
    model = mixture("mixtral")
    return model, trace(model, tokens())


# --- recognition ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "implementation"),
    [*((name, "grouped_mm") for name in FAMILIES), ("gpt-oss", "batched_mm"), ("qwen3", "eager")],
)
def test_every_family_is_recognised_and_trains_in_data_parallelism(family, implementation):
    model, batch = mixture(family, implementation), tokens()
    traced = trace(model, batch)
    assert len(mixtures_in(traced.graph)) == FAMILIES[family][2]
    left = {n.op for n in traced.graph.nodes} & {"aten.sort", "aten.bmm", "aten.histc", "aten.index_put"}
    assert not left
    plan = plan_traced(traced, THREE, planner="ddp-proportional")
    assert cuts(plan.program) == {("Shard", "Replicate", "Shard")}
    assert not plan.warnings
    report = verify(model, batch, plan, traced=traced)
    assert report.ok, report
    assert max(report.max_loss_error_f64, report.max_gradient_error_f64) < EXACT


def test_the_loss_that_balances_experts_is_that_of_the_whole_batch():
    model, batch = mixture("mixtral", output_router_logits=True, router_aux_loss_coef=0.5), tokens()
    assert abs(model(**batch).item() - mixture("mixtral")(**batch).item()) > 0.1
    traced = trace(model, batch)
    assert len(mixtures_in(traced.graph)) == 2
    report = verify(model, batch, plan_traced(traced, THREE, planner="ddp-proportional"), traced=traced)
    assert report.ok
    assert max(report.max_loss_error_f64, report.max_gradient_error_f64) < EXACT


class Sorted(nn.Module):
    """A mixture written by hand that adds rows back at their tokens; ``looks`` into its sorted rows."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.looks = looks
        self.gate = nn.Linear(8, 4)
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape) / 3) for shape in ((8, 12), (12, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.gate(x).softmax(-1).topk(2)
        ids, order = chosen.flatten().sort(stable=True)
        ends = torch.histc(ids.float(), 4, 0, 3).cumsum(0).int()
        grouped_mm = torch.ops.transformers.grouped_mm_fallback
        hidden = grouped_mm(x[order // 2], self.up, ends)
        rows = grouped_mm(hidden.relu(), self.down, ends) * scores.flatten()[order].unsqueeze(-1)
        out = torch.zeros_like(x).index_add(0, order // 2, rows)
        return (x + out).square().mean() + (hidden[:3].square().mean() if self.looks else 0.0)


@pytest.mark.parametrize("looks", [False, True])
def test_what_others_look_into_stays_as_it_is(looks):
    import transformers.integrations.moe  # noqa: F401  registers the product in groups

    torch.manual_seed(0)
    model, batch = Sorted(looks), {"x": torch.randn(11, 8)}
    traced = trace(model, batch)
    assert len(mixtures_in(traced.graph)) == (0 if looks else 1)
    plan = plan_traced(traced, THREE, planner="ddp-proportional")
    warned = [w for w in plan.warnings if "cannot be cut between samples" in w]
    assert bool(warned) == looks
    if looks:  # the operator and the line
        (line,) = [w for w in warned if "grouped_mm_fallback" in w]
        assert "test_mixtures.py" in line and "self.up, ends" in line
    assert verify(model, batch, plan, traced=traced).ok


def test_the_body_of_an_expert_may_cast_and_share_weights():
    class Cast(Sorted):
        def __init__(self) -> None:
            super().__init__(False)
            self.norm = nn.LayerNorm(12)

        def forward(self, x):
            scores, chosen = self.gate(x).softmax(-1).topk(2)
            ids = chosen.flatten()
            rows = x.repeat_interleave(2, 0).unsqueeze(1)
            hidden = self.norm(torch.bmm(rows, self.up[ids]).squeeze(1)).double().relu().to(x.dtype)
            rows = torch.bmm(hidden.unsqueeze(1), self.down[ids]).squeeze(1) * scores.flatten().unsqueeze(-1)
            return (x + rows.view(-1, 2, 8).sum(1)).square().mean()

    torch.manual_seed(0)
    model, batch = Cast(), {"x": torch.randn(11, 8)}
    traced = trace(model, batch)
    (node,) = mixtures_in(traced.graph)
    assert len(node.args[4]) == 2 and len(node.args[5]) == 2  # the norm's, and both dtypes
    for placement in (Shard(0), PARTIAL):
        program = cut_program(traced.graph, THREE, EXPERTS, placement)
        report = verify(model, batch, program, traced=traced)
        assert report.ok and report.max_gradient_error_f64 < EXACT


# --- cutting -------------------------------------------------------------------------------------------


def test_experts_may_be_cut_unevenly(mixtral):
    model, traced = mixtral
    program = cut_program(traced.graph, THREE, EXPERTS, PARTIAL)
    assert cuts(program) == {("Replicate", "Shard", "Partial")}
    assert parse_program(print_program(program)) == program
    report = verify(model, tokens(), program, traced=traced)
    assert report.ok
    assert max(report.max_loss_error_f64, report.max_gradient_error_f64) < EXACT


def test_experts_are_cut_where_their_gradients_cost_more_than_tokens():
    speeds = {"big": 0.002, "middle": 0.0015, "small": 0.001}
    machine = (
        '[[machine]]\ndevices = [{{ name = "{}", tflop_per_s = {}, memory_gib = 8, memory_gbyte_per_s = 2 }}]'
    )
    lines = ['name = "far"', "[network]", "bandwidth_gbit_per_s = 0.2", "latency_us = 1"]
    cluster = Cluster.parse("\n".join([*lines, *(machine.format(*device) for device in speeds.items())]))
    traced = trace(mixture("mixtral", intermediate_size=384, num_local_experts=9), tokens(samples=24))
    plan = plan_traced(traced, cluster, planner="hap")
    assert cuts(plan.program) == {("Replicate", "Shard", "Partial")}
    spread = plan_traced(traced, cluster, planner="ddp-proportional")
    assert plan.predicted_step_s < spread.predicted_step_s / 2


def by_hand() -> Sorted:
    """A mixture that stays in float64 throughout, as those of the library do not."""
    import transformers.integrations.moe  # noqa: F401  registers the product in groups

    torch.manual_seed(0)
    return Sorted(False).double()


def between_processes(text: str, _) -> None:
    model = by_hand()
    batches = [{"x": torch.randn(11, 8, dtype=torch.float64)} for _ in range(3)]
    assert_trains_alike(copy.deepcopy(model), model, parse_program(text), batches)


def test_training_between_processes():
    graph = trace(by_hand(), {"x": torch.randn(11, 8, dtype=torch.float64)}).graph
    programs = {
        "tokens": cut_program(graph, THREE, EXPERTS, Shard(0), shard_params=False),
        "experts": cut_program(graph, THREE, EXPERTS, PARTIAL),
    }
    assert cuts(programs["experts"]) == {("Replicate", "Shard", "Partial")}
    checks = {name: partial(between_processes, print_program(p)) for name, p in programs.items()}
    results = run_world(3, checks)
    for name in checks:
        assert_passed(results[name])


# --- the operator --------------------------------------------------------------------------------------


def test_a_choice_of_no_expert_is_an_error():
    x, table = torch.randn(3, 4), torch.randn(2, 4, 5)
    for wrong in (2, -1):
        ids = torch.tensor([0, 1, wrong])
        with pytest.raises(IndexError, match="none of 2"):
            experts(ids, [x], [], [table], [], [], "y = x0 @ t0", 0)


@pytest.mark.parametrize(
    "num_biases, body, wrong",
    [
        (1, "h = x0 @ t0; b = t1[e]; y = add.Tensor(h, b)", "different numbers of experts"),
        (3, "h = x0 @ t1; y = h @ t0", "different numbers of experts"),
        (2, "h = x0 @ t0; g, u = split.Tensor(h, 5, -1); y = mul.Tensor(g, u)", "makes 1 results, not g, u"),
        (2, "h = x0 @ t0; y = mul.Tensor(h, u)", "no value for u"),
    ],
)
def test_what_does_not_fit_together_is_an_error(num_biases, body, wrong):
    x, ids, table = torch.randn(3, 4), torch.tensor([0, 1, 1]), torch.randn(2, 4, 5)
    with pytest.raises(RuntimeError, match=wrong):
        experts(ids, [x], [], [table, torch.randn(num_biases, 5)], [], [], body, 0)


def test_nothing_of_a_step_waits_for_the_collector_of_cycles():
    x, ids = torch.randn(6, 4, requires_grad=True), torch.tensor([0, 1, 1, 0, 2, 2])
    tables = [torch.randn(3, 4, 5, requires_grad=True), torch.randn(3, 5)]
    body = "h = x0 @ t0; b = t1[e]; z = add.Tensor(h, b); y = silu(z)"
    gc.collect()
    gc.disable()
    try:
        before = {id(o) for o in gc.get_objects() if isinstance(o, torch.Tensor)}
        for _ in range(3):
            experts(ids, [x], [], tables, [], [], body, 0).sum().backward()
        x.grad = tables[0].grad = None
        left = [o.shape for o in gc.get_objects() if isinstance(o, torch.Tensor) and id(o) not in before]
    finally:
        gc.enable()
    assert left == []


def test_memory_counts_what_an_expert_keeps(mixtral):
    graph = mixtral[1].graph
    node = mixtures_in(graph)[0]
    call = call_of(node, graph.types)
    kept_inputs = {position for _, position in kept(call, (True,) * len(call.inputs))}
    assert kept_inputs == {3, 4}  # the tables; tokens are kept sorted
    width, hidden, choices = 16, 24, 7 * 6 * 2
    # tokens, both halves of the first product, what follows of them, their product and the second product
    least = choices * 4 * (width + 2 * hidden + 2 * hidden + width)
    assert least <= extra_bytes(call) <= 1.3 * least


# --- what runs whole -----------------------------------------------------------------------------------


def test_without_recognition_the_plan_says_what_every_device_computes():
    model, batch = mixture("mixtral"), tokens()
    passes = [p for p in PASSES if p.__name__ != "mixtures_as_operators"]
    traced = trace(model, batch, passes=passes)
    plan = plan_traced(traced, THREE, planner="ddp-proportional")
    assert any("grouped_mm_fallback (" in w and "mixture_models.py" in w for w in plan.warnings)
    assert verify(model, batch, plan, traced=traced).ok
    alone = plan_traced(traced, THREE, planner="single")
    assert not any("cannot be cut" in w for w in alone.warnings)


class Whole(nn.Module):
    """What mixes samples in the middle, under a rule or without one."""

    def __init__(self, mix) -> None:
        super().__init__()
        self.inner, self.outer, self.mix = nn.Linear(8, 8), nn.Linear(8, 1), mix

    def forward(self, x):
        return self.outer(self.mix(self.inner(x))).square().mean()


@pytest.mark.parametrize(
    ("mix", "operator"),
    [
        (lambda h: torch.flip(h, [0]), "aten.flip"),
        (lambda h: h.sort(0).values, "aten.sort"),
        (lambda h: torch.cumprod(h, 0), "aten.cumprod"),
    ],
)
def test_a_rule_that_cannot_cut_samples_warns(mix, operator):
    traced = trace(Whole(mix), {"x": torch.randn(12, 8)})
    plan = plan_traced(traced, THREE, planner="ddp-proportional")
    (line,) = [w for w in plan.warnings if w.startswith(f"{operator} (")]
    assert "test_mixtures.py" in line and "self.mix(self.inner(x))" not in line
    made = next(i for i in plan.program.instructions if i.op == operator)
    assert made.types[0].placement == REPLICATE


def test_rules_that_cut_samples_do_not_warn():
    traced = trace(Whole(lambda h: h.softmax(-1)), {"x": torch.randn(12, 8)})
    assert not plan_traced(traced, THREE, planner="ddp-proportional").warnings
