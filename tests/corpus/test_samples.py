"""Micro-batches of models that hold rows, indices or ranges as long as the batch, or its size in arguments:
they train as the single device does, or are refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from corpus import CLUSTERS, check_planners
from gloo_world import assert_passed, run_world
from pipelines import COSTS, FOUR_STAGES, THREE_STAGES, WORLD, cut_into, pipelined
from programs import make_plan
from torch import nn
from torch.nn import functional as F

from mixmesh.errors import PlanError
from mixmesh.frontend.trace import trace
from mixmesh.lang.check import check_program
from mixmesh.lang.ir import Graph, Program, even_ratio, make_ratio, samples_of, with_whole_rows
from mixmesh.lang.plan_file import MicroBatch, Plan
from mixmesh.measure.verification import verify
from mixmesh.passes.zero import with_stage
from mixmesh.runtime.parallel import parallelize
from mixmesh.search.baselines import data_parallel
from mixmesh.search.ratios import with_ratio

BATCH, WIDTH, CLASSES = 12, 8, 5
F64 = torch.float64


class Model(nn.Module):
    """Linear layers around ``inner(model, h)``."""

    def __init__(self, inner) -> None:
        super().__init__()
        self.inner = inner
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, dtype=F64) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES, dtype=F64)
        self.rows = nn.Parameter(torch.randn(BATCH, WIDTH, dtype=F64))
        self.square = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=F64))
        self.register_buffer("index", torch.randint(0, WIDTH, (BATCH, WIDTH)))
        self.register_buffer("order", torch.randperm(BATCH))
        self.register_buffer("mask", torch.rand(BATCH, WIDTH) > 0.5)
        self.register_buffer("three", torch.randn(3, BATCH, WIDTH, dtype=F64))

    def forward(self, x, y):
        h = self.inner(self, F.gelu(self.first(x)))
        return F.cross_entropy(self.head(self.second(h)), y)


MODELS = {
    "gather": lambda m, h: h.gather(1, m.index) + h,
    "gather of a range": lambda m, h: h.gather(1, torch.arange(WIDTH).flip(0).expand(BATCH, WIDTH)) + h,
    "scatter": lambda m, h: torch.zeros_like(h).scatter(1, m.index, h) + h,
    "scatter rows of a parameter": lambda m, h: h.scatter(1, m.index[:, :4], m.rows[:, :4]),
    "rows of a parameter": lambda m, h: h + m.rows,
    "mask": lambda m, h: h.masked_fill(m.mask, 0.5),
    "batch in the middle": lambda m, h: (h * m.three).sum(0),
    "products of rows": lambda m, h: torch.bmm(m.three.transpose(0, 1), h.unsqueeze(2)).sum(1) + h,
    "range": lambda m, h: h + torch.arange(BATCH, dtype=F64).unsqueeze(1) * 0.1,
    "constant": lambda m, h: h + torch.full((BATCH, WIDTH), 0.1, dtype=F64),
    "look-up of a buffer": lambda m, h: h + F.embedding(m.order % WIDTH, m.square),
    "one-hot": lambda m, h: h + F.one_hot(m.order % WIDTH, WIDTH).to(F64),
    "triangle": lambda m, h: h + torch.tril(torch.ones(BATCH, WIDTH, dtype=F64)),
    "views": lambda m, h: h.view(BATCH * 2, 4).reshape(BATCH, 2, 4).transpose(1, 2).reshape(BATCH, WIDTH),
    "expanded": lambda m, h: (h.unsqueeze(1).expand(BATCH, 3, WIDTH) * m.square[:3]).sum(1),
    "split": lambda m, h: torch.cat(h.unsqueeze(1).split([0, 1], 1)[1].squeeze(1).split([3, 5], 1)[::-1], 1),
    "slices of all": lambda m, h: h + h[:BATCH].roll(1, 1) + h[-BATCH:],
    "turned": lambda m, h: (h.t() * torch.arange(BATCH, dtype=F64) * 0.1).t() + h,
    "rows that are indexed": lambda m, h: h[m.order] + h,
    "split of the batch": lambda m, h: torch.cat(h.split([5, 7], 0)[::-1], 0) + h,
    "mean of the batch": lambda m, h: h - h.mean(0),
}
REFUSED = ("rows that are indexed", "split of the batch", "mean of the batch")


def model_of(name: str) -> Model:
    torch.manual_seed(0)
    return Model(MODELS[name])


def batch(step: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return {"x": torch.randn(BATCH, WIDTH, dtype=F64, generator=g), "y": torch.arange(BATCH) % CLASSES}


def zero_plan(graph: Graph, stage: int) -> Plan:
    """Ranks of 6, 3, 2 and 1 samples, in two micro-batches each."""
    plain = data_parallel(graph, COSTS, even_ratio(WORLD))
    uneven = with_ratio(plain, plain.ratios[0][0], make_ratio([6, 3, 2, 1]))
    program = with_stage(with_whole_rows(uneven), stage, make_ratio([1, 1, 0, 2]))
    samples_of(program)  # raises PlanError for one that cannot run in micro-batches
    rows = [(3, 2, 3), (2, 2, 1), (1, 2, 1), (1, 2, 0)]
    return make_plan(program, COSTS.cluster, micro_batches=tuple(MicroBatch(*row) for row in rows))


def pipeline_plan(graph: Graph, stages, micro_steps: int) -> Plan:
    return pipelined(with_whole_rows(cut_into(graph, stages, COSTS, ())), micro_steps)


PLANS = {
    "stage 1 of ZeRO": partial(zero_plan, stage=1),
    "stage 3 of ZeRO": partial(zero_plan, stage=3),
    "three stages": partial(pipeline_plan, stages=THREE_STAGES, micro_steps=2),
    "four stages": partial(pipeline_plan, stages=FOUR_STAGES, micro_steps=12),
}


def plans(graph: Graph) -> Iterator[Plan]:
    """Those that can run in micro-batches."""
    for make in PLANS.values():
        try:
            yield replace(make(graph), graph_fingerprint=graph.fingerprint)
        except PlanError:
            continue


@pytest.mark.parametrize("name", MODELS)
def test_equals_single_device(name):
    model, inputs = model_of(name), batch()
    traced = trace(model, inputs)
    made = list(plans(traced.graph))
    assert len(made) == 0 if name in REFUSED else len(made) >= 3
    for plan in made:
        check_program(plan.program)
        report = verify(model, inputs, plan, traced=traced)
        assert report.ok and report.max_gradient_error <= 1e-9, (plan.program, report)


def test_planners():
    model = model_of("rows of a parameter")
    plans = check_planners(model, batch(), ("pipeline", "model-parallel", "poplar"), CLUSTERS[1:])
    assert any(plan.order for plan in plans)


@pytest.mark.parametrize("name", ("gather", "rows of a parameter"))
def test_rows_that_are_no_samples_are_refused_in_micro_steps(name):
    graph = trace(model_of(name), batch()).graph
    program = cut_into(graph, THREE_STAGES, COSTS, ())
    with pytest.raises(PlanError, match="is cut between samples, and is none"):
        samples_of(program)
    whole = with_whole_rows(program)
    assert with_whole_rows(whole) is whole
    assert whole.graph.fingerprint == program.graph.fingerprint


# --- between processes -------------------------------------------------------------------------------------

FOLDER = "SAMPLES"  # where processes find the plans, which they need not make
BETWEEN = [
    ("gather", "stage 3 of ZeRO"),
    ("gather", "three stages"),
    ("rows of a parameter", "three stages"),
    ("range", "four stages"),
]


@cache
def saved(name: str, kind: str) -> Plan:
    return Plan.load(Path(os.environ[FOLDER], f"{name}, {kind}"))


def check_trains(_, name: str, kind: str) -> None:
    single = model_of(name)
    model, _ = parallelize(model_of(name), None, saved(name, kind), device="cpu", timeout_s=60)
    for step in range(2):
        expected, loss = single(**batch(step)), model(**batch(step))
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
        expected.backward()
        loss.backward()
        for key, p in model.named_parameters():
            mine = torch.zeros_like(p) if p.grad is None else p.grad
            whole, like = model._runtime.by_param[p].whole(mine, model.comm), single.get_parameter(key)
            wanted = torch.zeros_like(like) if like.grad is None else like.grad
            torch.testing.assert_close(
                whole, wanted, rtol=1e-9, atol=1e-9, msg=lambda m, key=key: f"{key}: {m}"
            )


CHECKS = {f"{name}, {kind}": partial(check_trains, name=name, kind=kind) for name, kind in BETWEEN}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    for name, kind in BETWEEN:
        PLANS[kind](trace(model_of(name), batch()).graph).save(folder / f"{name}, {kind}")
    os.environ[FOLDER] = str(folder)
    try:
        return run_world(WORLD, CHECKS)
    finally:
        del os.environ[FOLDER]


@pytest.mark.parametrize("name", CHECKS)
def test_between_processes(results, name):
    assert_passed(results[name])


# --- owners ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ("sharded", "allreduce"))
def test_a_parameter_that_is_cut_has_no_owners(sync):
    """Its gradient is where its rows are, and summed with nobody's."""
    model = model_of("rows of a parameter")
    traced = trace(model, batch())
    shares = (2.0, 1.0, 1.0, 2.0)
    program: Program = cut_into(traced.graph, (shares, shares), COSTS, (sync, sync))
    check_program(program)
    (rows,) = (i for i in program.params if i.args[0] == "rows")
    owners = {i.args[0] for i in program.params if i.attr("owned") is not None}
    assert rows.attr("owned") is None and ("first.weight" in owners) == (sync == "sharded")
    assert str(rows.type.placement) == "S(0)"
    assert verify(model, batch(), program, traced=traced).ok
