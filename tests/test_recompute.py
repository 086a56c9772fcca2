"""Activation checkpointing: the same losses and gradients, less memory, and plans that fit only so."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import cache

import pytest
import torch
from gloo_world import assert_passed, run_world
from programs import make_plan as plan_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.errors import Infeasible, VerificationError
from mixmesh.frontend.trace import trace
from mixmesh.lang.check import check_program
from mixmesh.lang.ir import (
    Program,
    make_ratio,
    parse_program,
    regions,
    separable,
    with_regions,
    with_wgrads,
)
from mixmesh.lang.optimizer_states import OptimizerStates
from mixmesh.lang.plan_file import MicroBatch, Plan
from mixmesh.measure.verification import verify
from mixmesh.passes.recomputation import divided, recomputed
from mixmesh.passes.zero import with_stage
from mixmesh.planner import hap, make_plan, poplar
from mixmesh.runtime.interpret import interpret
from mixmesh.runtime.parallel import parallelize
from mixmesh.runtime.random import RandomPolicy
from mixmesh.search.baselines import data_parallel
from mixmesh.search.synthesis import Prices, Problem, emit, search
from mixmesh.simulator import simulate
from mixmesh.step.memory import Memory
from mixmesh.step.repeats import repeats
from tests.support.small_devices import free_communicators, memory_gib  # noqa: F401

WORLD, BATCH, TIME, WORDS, WIDTH, LAYERS = 3, 12, 8, 11, 8, 3
UNEVEN, OWNERS = (0.5, 0.333333, 0.166667), (0.2, 0.0, 0.8)  # 6, 4 and 2 samples
CLUSTER = """\
name = "three"
[[machine]]
devices = [{ cpu_share = 0.6 }, { cpu_share = 0.3, count = 2 }]
"""
COMMON, DIFFERENT = ((2, 3, 2), (2, 3, 0), (1, 3, 0)), ((4, 2, 2), (1, 4, 1), (2, 1, 2))


class Layer(nn.Module):
    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.up, self.down, self.p = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), p

    def forward(self, x):
        h = self.norm(x)
        weights = torch.softmax(self.query(h) @ self.key(h).transpose(1, 2), -1)
        x = x + nn.functional.dropout(weights, self.p, self.p > 0) @ self.value(h)
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(x))), self.p, self.p > 0)


class Model(nn.Module):
    """The table is the head's weight too, some labels are ignored."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS, p: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Layer(width, p) for _ in range(layers))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids, labels):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


def model_of(**figures) -> Model:
    torch.manual_seed(0)
    return Model(**figures)


def batch(step: int = 0, time: int = TIME, samples: int = BATCH) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(WORDS, (samples, time), generator=g)
    labels = ids.roll(-1, 1)
    labels[torch.rand(ids.shape, generator=g) < 0.3] = -100
    return {"ids": ids, "labels": labels}


COSTS = CostModel(Cluster.parse(CLUSTER))


@cache
def traced(p: float = 0.0):
    return trace(model_of(p=p), batch())


@cache
def spread(p: float = 0.0) -> Program:
    return data_parallel(traced(p).graph, COSTS, make_ratio(UNEVEN))


def accumulating(program: Program, rows, p: float = 0.0) -> Plan:
    plan = plan_of(program, COSTS.cluster, micro_batches=tuple(MicroBatch(*row) for row in rows))
    return replace(plan, graph_fingerprint=traced(p).graph.fingerprint)


def without(program: Program) -> Program:
    return replace(program, instructions=tuple(replace(i, attrs=()) for i in program.instructions))


# --- what a region is -------------------------------------------------------------------------------------


def test_a_transformer_is_cut_between_its_layers():
    program = spread()
    parts = divided(program)
    ends = [program.instructions[part[-1]] for part in parts[: 2 * LAYERS]]
    assert len(parts) == 2 * LAYERS + 2  # attention and the rest of each layer, the loss and its mean
    assert all(i.types[0].value.shape == (BATCH, TIME, WIDTH) for i in ends)
    assert sorted(n for part in parts for n in part) == [n for part in parts for n in part]


def test_the_text_is_the_program():
    program = recomputed(spread(0.5))
    assert len(regions(program)) == 2 * LAYERS
    assert parse_program(str(program)) == program
    check_program(program)


def test_a_gradient_in_a_region_has_no_time_of_its_own():
    """As a plan may have chosen one before the regions that the user checkpointed are put back."""
    program = spread()
    chosen = separable(program)
    timed = with_wgrads(program, dict.fromkeys(chosen, "first"))
    made = with_regions(timed, dict.fromkeys(chosen[::2], 0))
    check_program(made)
    assert set(made.wgrads) == set(chosen[1::2])


MLP = """program p world=1 {{ ratio r0 = [1.0]
  %x = input("x") : f32[4, 6] S(0)@r0
  %w = param("w") : f32[8, 6] R {extra}
  %h = aten.linear(%x, %w){linear} : f32[4, 8] S(0)@r0
  %a = aten.relu(%h){relu} : f32[4, 8] S(0)@r0
  %l = aten.mean(%a) : f32[] P(sum)
  return %l }}"""


@pytest.mark.parametrize(
    ("where", "attr", "message"),
    [
        ("linear", "{recompute=true}", "has a number"),
        ("linear", "{recompute=-1}", "has a number"),
        ("linear", "{recompute=0, sfb=true}", "gathers factors"),
        ("extra", '%b = buffer("b") {recompute=0} : f32[] R', "only computations"),
    ],
)
def test_what_cannot_run_again_is_refused(where, attr, message):
    parts = {"extra": "", "linear": "", "relu": "", where: f" {attr}"}
    with pytest.raises(VerificationError, match=message):
        check_program(parse_program(MLP.format(**parts)))


def test_a_buffer_that_the_step_updates_is_not_read_again():
    text = MLP.format(
        extra='%b = buffer("b") : f32[8] R %v = aten.view(%b, [8]) : f32[8] R', linear="", relu=""
    )
    text = text.replace(
        "%l =", '%c = aten.add.Tensor(%a, %v) {recompute=0} : f32[4, 8] S(0)@r0 update("b", %v) %l ='
    )
    with pytest.raises(VerificationError, match="updated before the backward pass"):
        check_program(parse_program(text))


# --- equal to the single device ---------------------------------------------------------------------------


def searched() -> Program:
    """With redistributions of activations, and sharded parameters."""
    problem = Problem(traced().graph, COSTS, make_ratio(UNEVEN), prices=Prices(gradient_sync=30.0))
    return emit(problem, search(problem))


PROGRAMS = {
    "data parallel": spread,
    "dropout": lambda: spread(0.5),
    "searched": searched,
    **{f"zero {stage}": lambda stage=stage: with_stage(spread(), stage, OWNERS) for stage in (1, 2, 3)},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_trains_as_the_single_device(name):
    program = recomputed(PROGRAMS[name]())
    assert repeats(program)
    p = 0.5 if name == "dropout" else 0.0
    report = verify(model_of(p=p), batch(), program, steps=2, traced=traced(p))
    assert report.ok and report.max_gradient_error_f64 < 1e-9


@pytest.mark.parametrize("rows", [COMMON, DIFFERENT])
@pytest.mark.parametrize("stage", range(3))
def test_in_micro_steps(stage, rows):
    plan = accumulating(with_stage(recomputed(spread(0.5)), stage, OWNERS), rows, 0.5)
    report = verify(model_of(p=0.5), batch(), plan, traced=traced(0.5))
    assert report.ok and report.max_gradient_error_f64 < 1e-9


def test_a_second_backward_pass_runs_regions_once_more():
    program = recomputed(spread(0.5))
    gradients = []
    for p in (program, without(program)):
        params = {n: t.detach().clone().requires_grad_() for n, t in model_of(p=0.5).named_parameters()}
        random = RandomPolicy(3, exact=True)
        first = interpret(p, params, batch(0), random=random).loss
        random.step += 1  # another forward pass in between draws other numbers
        second = interpret(p, params, batch(1), random=random).loss
        first.backward(retain_graph=True)
        (first + second).backward()
        gradients.append({n: t.grad for n, t in params.items()})
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], gradient, msg=name)


# --- memory -----------------------------------------------------------------------------------------------


class Allocated(TorchDispatchMode):
    """Bytes of the tensors that operators have made and somebody still holds; without the ``given``."""

    def __init__(self, given) -> None:
        super().__init__()
        self.known: dict[int, int] = {t.untyped_storage()._cdata: 0 for t in given}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                key = storage._cdata
                if key not in self.known:
                    self.known[key] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.freed, key)
        self.peak = max(self.peak, self.now)
        return out

    def freed(self, key: int) -> None:
        self.now -= self.known.pop(key)


def allocated(program: Program, model: nn.Module, inputs) -> tuple[int, int]:
    """Bytes held between the forward and the backward pass, and at the peak."""
    params = {n: t.detach().clone().requires_grad_() for n, t in model.named_parameters()}
    with Allocated([*params.values(), *inputs.values()]) as tracked:
        loss = interpret(program, params, inputs).loss
        between = tracked.now
        loss.backward()
    return between, tracked.peak


def walked(program: Program) -> float:
    """The peak of the walk's two passes, without what stays and without what a heap loses."""
    moments = Memory(program, OptimizerStates(0), cuda=True).moments
    stays = sum(next(m for m in moments if "owners" in m.what).held.values())
    others = ("the initial values", "the optimizer")
    return max(sum(m.held.values()) for m in moments if m.what not in others) - stays


def test_memory_drops_and_is_predicted():
    width, layers, samples, time = 64, 8, 4, 64
    model, inputs = model_of(width=width, layers=layers), batch(0, time, samples)
    program = data_parallel(trace(model, inputs).graph, CostModel(only_cpu()), make_ratio([1.0]))
    again = recomputed(program)
    (before, peak), (kept, lower) = (allocated(p, model, inputs) for p in (program, again))
    assert kept < 0.3 * before and lower < 0.5 * peak
    assert walked(program) == pytest.approx(peak, rel=0.02)
    assert walked(again) == pytest.approx(lower, rel=0.02)


def only_cpu() -> Cluster:
    return Cluster.parse('name = "one"\n[[machine]]\ndevices = [{ cpu_share = 1 }]\n')


def test_the_second_run_takes_its_time():
    program = spread()
    times = [simulate(p, COSTS, events=True) for p in (program, recomputed(program))]
    plain, again = times
    forward = {(e.rank, e.name): e.end_s - e.start_s for e in plain.events if e.stream == "compute"}
    second = [e for e in again.events if e.name.endswith(" again")]
    assert {e.name.removesuffix(" again") for e in second} <= {name for _, name in forward}
    for e in second:
        assert e.end_s - e.start_s == pytest.approx(forward[e.rank, e.name.removesuffix(" again")])
    more = [b - a for a, b in zip(plain.compute_s, again.compute_s)]
    took = [sum(e.end_s - e.start_s for e in second if e.rank == r) for r in range(WORLD)]
    assert more == pytest.approx(took) and min(took) > 0


# --- planning ---------------------------------------------------------------------------------------------


def gpus(*rooms_mib: float, gbit_per_s: float = 1) -> Cluster:
    """Devices of one speed with so much memory beside the process, one per machine."""
    machines = [
        f'[[machine]]\nname = "m{n}"\ndevices = [{{ name = "d{room:g}", tflop_per_s = 0.01, '
        f"memory_gbyte_per_s = 1, memory_gib = {memory_gib(room)} }}]\n"
        for n, room in enumerate(rooms_mib)
    ]
    network = f"[network]\nbandwidth_gbit_per_s = {gbit_per_s}\nlatency_us = 20\n"
    return Cluster.parse(f'name = "few"\n{network}' + "".join(machines))


@cache
def long_job():
    """Activations of one sample outweigh the model."""
    model = model_of(width=32, layers=8)
    inputs = batch(0, 256, 4)
    return model, inputs, trace(model, inputs)


def forbid(monkeypatch) -> None:
    for module in (hap, poplar):
        monkeypatch.setattr(module, "recomputed", lambda program: program)


def test_a_plan_that_fits_only_so(monkeypatch):
    model, inputs, known = long_job()
    where = gpus(5, 5)
    plan = make_plan(known, where)
    assert regions(plan.program)
    assert Plan.parse(str(plan)) == plan
    for peak, device in zip(plan.predicted_peak_memory_bytes, where.devices):
        assert peak <= device.memory_bytes * 0.95
    report = verify(model, inputs, plan, steps=2, traced=known)
    assert report.ok and report.max_gradient_error_f64 < 1e-9
    forbid(monkeypatch)
    with pytest.raises(Infeasible):
        make_plan(known, where)


def test_no_more_than_memory_asks_for(monkeypatch):
    """Between the plan without any and that of the least memory: faster than micro-batches."""
    _, _, known = long_job()
    counts = []
    for room_mib in (4, 6, 10, 12, 16):
        where = gpus(room_mib, room_mib, gbit_per_s=0.1)
        plan = make_plan(known, where)
        counts.append(len(regions(plan.program)))
        with monkeypatch.context() as patch:
            forbid(patch)
            try:
                assert plan.predicted_step_s <= make_plan(known, where).predicted_step_s
            except Infeasible:
                assert counts[-1]
    assert counts[0] > counts[2] > counts[3] > 0 and counts[-1] == 0


def test_in_micro_steps_that_fit_only_so():
    model, inputs, known = long_job()
    plan = make_plan(known, gpus(2.5, 2.5), planner="poplar")
    assert regions(plan.program) and any(m.steps > 1 for m in plan.micro_batches)
    report = verify(model, inputs, plan, traced=known)
    assert report.ok and report.max_gradient_error_f64 < 1e-9


# --- between processes ------------------------------------------------------------------------------------


class Training:
    """Three steps of a plan between processes, against the single device's. Pickled."""

    def __init__(self, stage: int, rows=None, p: float = 0.0) -> None:
        self.stage, self.rows, self.p = stage, rows, p

    def __call__(self, _) -> None:
        program = with_stage(in_float64(recomputed(spread(self.p))), self.stage, OWNERS)
        plan = program if self.rows is None else accumulating(program, self.rows)
        mine = model_of(p=self.p).double()
        model, optimizer = parallelize(
            mine, sgd(mine.parameters()), plan, device="cpu", timeout_s=60, seed=3, random_exact=True
        )
        assert "region(keep)" in model.source
        whole = {
            n: t.detach().clone().requires_grad_() for n, t in model_of(p=self.p).double().named_parameters()
        }
        single = sgd(whole.values())
        random = RandomPolicy(3, exact=True)
        for step in range(3):
            random.step += 1
            expected = interpret(in_float64(spread(self.p)), whole, batch(step), random=random).loss
            loss = model(**batch(step))
            torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
            for o, x in ((optimizer, loss), (single, expected)):
                o.zero_grad()
                x.backward()
                o.step()
            for name, value in model.full_state_dict().items():
                if name in whole:
                    torch.testing.assert_close(value, whole[name].detach(), rtol=1e-9, atol=1e-9)
        with torch.no_grad():
            model(**batch(9))


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def in_float64(program: Program) -> Program:
    from mixmesh.measure.verification import in_float64 as widened

    return widened(program)


CHECKS = {
    **{f"stage {stage}": Training(stage) for stage in range(4)},
    "dropout": Training(2, p=0.5),
    **{f"stage {stage} in micro-batches": Training(stage, COMMON, 0.5) for stage in range(4)},
    "stage 1 in different micro-batches": Training(1, DIFFERENT, 0.5),
}


@pytest.fixture(scope="module")
def results():
    return run_world(WORLD, CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_between_processes(results, name):
    assert_passed(results[name])
