"""Operators between collectives by ``torch.compile``: the same numbers, and gradients that travel in time."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from gloo_world import assert_passed, run_world
from torch import nn
from torch.nn import functional as F

import mixmesh.runtime.executor
from mixmesh.base.patch import patched
from mixmesh.cluster import Cluster
from mixmesh.errors import InputError
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import with_regions
from mixmesh.passes.buckets import with_buckets
from mixmesh.planner import make_plan
from mixmesh.runtime import passes, segments
from mixmesh.runtime.parallel import parallelize

CLUSTER = """\
[network]
bandwidth_gbit_per_s = 1
latency_us = 20
[[machine]]
devices = [{ cpu_share = 0.6 }, { cpu_share = 0.4 }]
"""
WIDTH, ROWS = 24, 10


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.LayerNorm(4 * WIDTH)
        self.second, self.head = nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, 7)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x, y):
        x = self.dropout(F.gelu(self.norm(self.first(x))))
        return F.cross_entropy(self.head(torch.tanh(self.second(x))), y)


def batches(count: int) -> list[dict]:
    torch.manual_seed(1)
    return [
        {"x": torch.randn(ROWS, WIDTH, dtype=torch.float64), "y": torch.randint(7, (ROWS,))}
        for _ in range(count)
    ]


def planned(planner: str, change=lambda program: program):
    torch.manual_seed(0)
    model = Model().double()
    return change(make_plan(trace(model, batches(1)[0]), Cluster.parse(CLUSTER), planner=planner).program)


def train(
    program, *, compiles: bool, backend: str = "aot_eager", dropout: float = 0.0, module: type = Model
) -> tuple:
    """Losses of three steps of Adam, whole parameters after them, and the segments of this rank."""
    mixmesh.runtime.executor.compiled = partial(torch.compile, dynamic=False, backend=backend)
    torch.manual_seed(0)
    model = module(dropout).double()
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    model, adam = parallelize(model, adam, program, device="cpu", timeout_s=60, compile=compiles)
    losses = []
    for batch in batches(3):
        loss = model(**batch)
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.detach())
    (made,) = model._runtime.compiled.values()
    return torch.stack(losses), model.full_state_dict(), made.source.count("segment")


def check_trains_alike(comm, program, *, least: int, most: int) -> None:
    losses, state, none = train(program, compiles=False)
    found, found_state, count = train(program, compiles=True)
    assert none == 0 and least <= count <= most, count
    torch.testing.assert_close(found, losses, rtol=1e-9, atol=1e-9)
    for name, value in state.items():
        torch.testing.assert_close(found_state[name], value, rtol=1e-9, atol=1e-9, msg=name)


def region(program) -> dict[int, int]:
    return {n: 0 for n, i in enumerate(program.instructions) if i.op in ("aten.gelu", "aten.layer_norm")}


CASES = {
    # one before the number of labels is summed, and one after that has come
    "one bucket": (planned("ddp-proportional"), 3, 3),
    # gradients of early segments travel while later ones compute
    "a bucket for each layer": (planned("ddp-proportional", lambda p: with_buckets(p, 1e3)), 5, 5),
    "tensor parallelism": (planned("tensor-parallel"), 1, 6),
    # what is kept for the backward pass is chosen there tensor by tensor
    "parameters gathered again": (planned("fsdp-even"), 0, 0),
    "a region computed again": (planned("ddp-even", lambda p: with_regions(p, region(p))), 1, 3),
}


@pytest.fixture(scope="module")
def ends():
    checks = {
        name: partial(check_trains_alike, program=program, least=least, most=most)
        for name, (program, least, most) in CASES.items()
    }
    return run_world(2, checks)


@pytest.mark.parametrize("case", CASES)
def test_trains_as_without(ends, case):
    assert_passed(ends[case])


def test_with_inductor_on_one_device(monkeypatch):
    monkeypatch.setattr(mixmesh.runtime.executor, "compiled", mixmesh.runtime.executor.compiled)
    (found,) = run_world(1, {"inductor": check_inductor}).values()
    assert_passed(found)


def planned_alone(model: nn.Module):
    one = Cluster.parse(CLUSTER.replace(", { cpu_share = 0.4 }", ""))
    return make_plan(trace(model.double(), batches(1)[0]), one, planner="single").program


def check_inductor(comm) -> None:
    torch.manual_seed(0)
    program = planned_alone(Model())
    losses, _, _ = train(program, compiles=False)
    found, _, count = train(program, compiles=True, backend="inductor")
    assert count == 1
    torch.testing.assert_close(found, losses, rtol=1e-9, atol=1e-9)
    # random numbers are those of the whole batch, so that dropout stays between two segments
    dropping = planned_alone(copy.deepcopy(Model(0.5)))
    losses, _, _ = train(dropping, compiles=False, dropout=0.5)
    found, _, count = train(dropping, compiles=True, dropout=0.5)
    assert count == 2
    torch.testing.assert_close(found, losses, rtol=1e-9, atol=1e-9)


class Experts(Model):
    """Rows for each of three experts, whose numbers are data."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, y):
        chosen, out = self.head(x)[:, :3].argmax(-1), torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            out[chosen == n] = expert(x[chosen == n])
        return F.cross_entropy(self.head(torch.tanh(out)), y)


def test_experts_are_not_compiled_for_each_number_of_rows(monkeypatch):
    monkeypatch.setattr(mixmesh.runtime.executor, "compiled", mixmesh.runtime.executor.compiled)
    (ends,) = run_world(1, {"experts": check_experts}).values()
    assert_passed(ends)


def check_experts(comm) -> None:
    torch.manual_seed(0)
    program = planned_alone(Experts())
    losses, _, _ = train(program, compiles=False, module=Experts)
    torch._dynamo.utils.counters.clear()
    of_compiled, _, _ = train(program, compiles=True, module=Experts)
    torch.testing.assert_close(of_compiled, losses, rtol=1e-9, atol=1e-9)
    assert not torch._dynamo.utils.counters["graph_break"]


def test_other_shapes_are_compiled_where_they_come_often(monkeypatch):
    monkeypatch.setattr(mixmesh.runtime.executor, "compiled", mixmesh.runtime.executor.compiled)
    (ends,) = run_world(1, {"shapes": check_shapes}).values()
    assert_passed(ends)


def check_shapes(comm) -> None:
    """A smaller last batch runs one operator after the other, unless it has come three times."""
    mixmesh.runtime.executor.compiled = partial(torch.compile, dynamic=False, backend="aot_eager")
    torch.manual_seed(0)
    single = Model().double()
    model, _ = parallelize(copy.deepcopy(single), None, planned_alone(Model()), device="cpu", compile=True)
    (batch,) = batches(1)
    for size, times, is_compiled in ((ROWS, 1, True), (4, 2, False), (5, 1, False), (4, 2, True)):
        part = {name: x[:size] for name, x in batch.items()}
        with patched(passes, "OFTEN", 2):
            for _ in range(times):
                torch.testing.assert_close(model(**part), single(**part), rtol=1e-9, atol=1e-9)
        code = list(model._runtime.compiled.values())[-1]
        assert ("segment" in code.source) == is_compiled, (size, times)


def test_without_a_compiler_it_is_refused(monkeypatch):
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: 1 / 0)
    with pytest.raises(InputError, match="no C\\+\\+ compiler"):
        segments.check_can_compile(torch.device("cpu"))
    segments.check_can_compile(torch.device("cuda"))
