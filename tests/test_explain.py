"""mixmesh explain: alternatives are programs that hold the tensor as they say, at the simulator's prices."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from jobs import GOOD, write_job
from programs import TWO_DEVICES
from small_graphs import GRAPHS, THREE, TWO, cluster, graph
from torch import nn

from mixmesh.__main__ import execute
from mixmesh.api import plan_traced
from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.errors import InputError
from mixmesh.explain import explain_tensor
from mixmesh.explain.changes import collectives, collectives_between, num_differing
from mixmesh.explain.names import find_tensor, in_all_layers
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import make_ratio
from mixmesh.measure.verification import verify
from mixmesh.planner import make_plan
from mixmesh.search.synthesis import Choices, Problem, search
from mixmesh.search.synthesis.choices import code_of
from mixmesh.simulator import simulate


class Attention(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        samples, time, width = x.shape
        shape = (samples, time, self.heads, width // self.heads)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(samples, time, width)).square().mean()


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()


class Deep(nn.Module):
    def __init__(self, depth: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x).square().mean()


MODELS = {
    "mlp": (MLP, (12, 8)),
    "attention": (Attention, (6, 4, 16)),
    "deep": (Deep, (12, 8)),
}


@cache
def traced(name: str):
    torch.manual_seed(0)
    kind, shape = MODELS[name]
    model, batch = kind(), {"x": torch.randn(shape)}
    return model, batch, trace(model, batch)


@cache
def planned(name: str, planner: str):
    """The plan of a model on two unequal devices."""
    return plan_traced(traced(name)[2], Cluster.parse(TWO_DEVICES), planner=planner)


def explain(name: str, planner: str, tensor: str, **options):
    return explain_tensor(planned(name, planner), Cluster.parse(TWO_DEVICES), tensor, **options)


def placement_of(program, path_or_value: str) -> int:
    """How a program first holds a tensor."""
    for i in program.instructions:
        if path_or_value in i.results and not i.is_leaf and not i.is_redistribution:
            return code_of(i.types[i.results.index(path_or_value)].placement)
        if i.is_leaf and i.args[0] == path_or_value:
            return code_of(i.type.placement)
    raise AssertionError(path_or_value)


CODES = {"R": 0, "P(sum)": 1, "S(0)": 2, "S(1)": 3, "S(2)": 4, "S(3)": 5}
ASKED = [("mlp", "up.weight"), ("mlp", "linear"), ("attention", "qkv.weight"),
         ("attention", "scaled_dot_product_attention"), ("attention", "linear_1")]  # fmt: skip


@pytest.mark.parametrize("name, tensor", ASKED)
def test_every_alternative_equals_the_single_device(name, tensor):
    model, batch, graph = traced(name)
    found = explain(name, "ddp-even", tensor)
    possible = [a for a in found.alternatives if a.program is not None]
    assert len(possible) >= 2
    for a in possible:
        assert placement_of(a.program, tensor) == CODES[a.placement]
        assert verify(model, batch, a.program, traced=graph).ok, a
    for a in found.alternatives:
        assert bool(a.impossible) == (a.program is None)


@pytest.mark.parametrize("planner", ["hap", "ddp-even", "fsdp-even", "single"])
@pytest.mark.parametrize("name", MODELS)
def test_the_plans_own_placement_costs_the_plans_step_or_less(name, planner):
    plan = planned(name, planner)
    for tensor in list(plan.program.graph.types)[:: {"mlp": 1, "attention": 5, "deep": 30}[name]]:
        found = explain(name, planner, tensor)
        assert found.step_s == pytest.approx(plan.predicted_step_s)
        assert [a.is_plan for a in found.alternatives].count(True) == 1
        assert found.own.step_s <= plan.predicted_step_s
        faster = [a for a in found.alternatives if a.fits and a.step_s < found.step_s * (1 - 1e-6)]
        assert found.can_be_improved == bool(faster) == ("can be improved" in found.summary)
        if found.own.step_s == found.step_s:
            assert (found.own.added, found.own.removed, found.own.num_differing) == ((), (), 0)


def test_the_figures_are_those_of_the_simulator():
    costs = CostModel(Cluster.parse(TWO_DEVICES))
    found = explain("attention", "hap", "qkv.weight")
    for a in found.alternatives:
        if a.program is not None:
            assert a.step_s == simulate(a.program, costs).step_s
            assert a.difference_s == a.step_s - found.step_s


@pytest.mark.parametrize("planner", ["hap", "ddp-even", "fsdp-even", "tensor-parallel"])
def test_collectives_take_as_long_as_in_the_simulator(planner):
    costs, program = CostModel(Cluster.parse(TWO_DEVICES)), planned("attention", planner).program
    working = program.working_ranks
    loss = costs.collective("all_reduce", working).seconds(4) if len(working) > 1 else 0.0
    total = sum(c.time_s for c in collectives(program, costs))
    assert total + loss == pytest.approx(simulate(program, costs).communication_s)


def test_changes_between_two_programs():
    costs = CostModel(Cluster.parse(TWO_DEVICES))
    one, two = planned("mlp", "ddp-even").program, planned("mlp", "fsdp-even").program
    added, removed = collectives_between(one, two, costs)
    assert {(c.name, c.phase) for c in removed} == {("all_reduce", "gradient")}
    assert {c.value for c in removed} == {"up.weight", "up.bias", "down.weight", "down.bias"}
    assert {(c.name, c.phase) for c in added} == {
        ("all_gather", "forward"), ("all_gather", "again"), ("reduce_scatter", "backward")
    }  # fmt: skip
    assert collectives_between(two, one, costs) == (removed, added)
    assert num_differing(one, two) == num_differing(two, one) == 8  # four parameters, and a gather for each
    assert num_differing(one, one) == 0


@pytest.mark.parametrize("text", [TWO, THREE], ids=["two", "three"])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_least_forced_cost_is_the_least_cost(name, text):
    """Every program makes a value in some way, so the cheapest of the forced ones is the cheapest."""
    g, devices = graph(GRAPHS[name], 16), cluster(text)
    costs = CostModel(devices)
    ratio = make_ratio([0.6, *[0.4 / (devices.world_size - 1)] * (devices.world_size - 1)])
    choices = Choices(g, costs)
    free = search(Problem(g, costs, ratio, choices=choices)).cost_s
    for value, type_ in enumerate(choices.types):
        forced = [
            Problem(g, costs, ratio, choices=choices, forced={value: code})
            for code in range(2 + len(type_.shape))
        ]
        if value in choices.leaves:
            # a parameter may be stored in pieces and gathered only if it is forced to; an input that is used
            # twice is loaded in two ways only if it is not
            if choices.leaves[value].op == "param":
                problems = [p for code, p in enumerate(forced) if p.load(value, code) is not None]
                assert min(search(p).cost_s for p in problems) <= free + 1e-12
        else:
            problems = [p for p in forced if all(p.options)]
            assert min(search(p).cost_s for p in problems) == pytest.approx(free)


def test_all_layers():
    program = planned("deep", "ddp-even").program
    alike = in_all_layers(program.graph, "blocks.2.weight")
    assert alike == tuple(f"blocks.{n}.weight" for n in range(16))
    relu = find_tensor(program, "relu")
    assert len(in_all_layers(program.graph, relu)) == 16
    assert in_all_layers(program.graph, "head.weight") == ("head.weight",)
    model, batch, graph = traced("deep")
    for tensor, names in (("blocks.2.weight", alike), (relu, in_all_layers(program.graph, relu))):
        found = explain("deep", "ddp-even", tensor, all_layers=True)
        assert set(found.tensors) == set(names) and "in all 16 places" in found.summary
        for a in found.alternatives:
            if a.program is not None:
                assert {placement_of(a.program, name) for name in names} == {CODES[a.placement]}
                assert verify(model, batch, a.program, traced=graph).ok, a


def reason(name: str, tensor: str, placement: str, planner: str = "ddp-even") -> str:
    found = explain(name, planner, tensor)
    return next(a.impossible for a in found.alternatives if a.placement == placement)


def test_why_a_placement_is_impossible():
    assert "'... -> ...', and it is not linear" in reason("mlp", "relu", "P(sum)")
    assert reason("mlp", "up.weight", "P(sum)") == "a parameter is held whole or cut, never as addends"
    assert "there is nothing to share out" in reason("mlp", "up.weight", "S(0)", "single")
    assert "aten.split.Tensor gives S(2): its rule is" in reason("attention", "split.0", "S(2)")
    text = "%s = aten.softmax.int(%h, -1) : f[8, 6]\n%loss = aten.mean(%s) : f[]\nreturn %loss"
    lines = '%x = input("x") : f[8, 1]\n%w = param("w") : f[6, 1]\n%h = aten.linear(%x, %w) : f[8, 6]\n'
    devices = cluster(TWO)
    plan = make_plan(graph(lines + text), devices, planner="ddp-even")
    softmax = {a.placement: a.impossible for a in explain_tensor(plan, devices, "s").alternatives}
    assert "no strategy of aten.softmax.int gives S(1): its rule is" in softmax["S(1)"]
    x = {a.placement: a.impossible for a in explain_tensor(plan, devices, "x").alternatives}
    assert x["S(1)"] == "dim 1 has 1 element"


TWO_VIEWS = """\
%x = input("x") : f[8, 6]
%w = param("w") : f[12, 6]
%h = aten.linear(%x, %w) : f[8, 12]
%a = aten.view(%h, [8, 3, 4]) : f[8, 3, 4]
%b = aten.view(%h, [8, 2, 6]) : f[8, 2, 6]
%s = aten.sum(%a) : f[]
%t = aten.sum(%b) : f[]
%loss = aten.add.Tensor(%s, %t) : f[]
return %loss
"""


def test_why_a_dim_cannot_be_cut():
    """One view cuts in fours, the other in sixes: of twelve that leaves one piece."""
    devices = cluster(TWO)
    plan = make_plan(graph(TWO_VIEWS), devices, planner="ddp-even")
    h = {a.placement: a.impossible for a in explain_tensor(plan, devices, "h").alternatives}
    assert h["S(1)"] == (
        "dim 1, of 12, is cut in units of 12 as the operators around it need it: that is one piece"
    )
    a = {a.placement: a.impossible for a in explain_tensor(plan, devices, "a").alternatives}
    assert "dim 1" in a["S(1)"]


def test_names():
    program = planned("mlp", "fsdp-even").program
    whole = find_tensor(program, "up.weight")
    assert program.producers[whole].op == "param"  # a gather's result names what it gathers
    assert find_tensor(program, "%relu") == "relu"
    deep = planned("deep", "ddp-even").program
    assert find_tensor(deep, "3.weight") == "blocks.3.weight"
    with pytest.raises(InputError) as error:
        find_tensor(deep, "weight")
    assert "17 tensors end in" in str(error.value) and "blocks.0.weight" in error.value.expected
    with pytest.raises(InputError) as error:
        find_tensor(deep, "blocks.3.wieght")
    assert error.value.hint[0] == "--tensor blocks.3.weight"
    with pytest.raises(InputError):
        find_tensor(deep, "%")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("explain")
    write_job(path, GOOD)
    (path / "two.toml").write_text(TWO_DEVICES)
    for cluster_file, out in ((path / "two.toml", "two.plan"), ("poplar-a", "preset.plan")):
        arguments = [f"{path / 'job.py'}:job", "--cluster", str(cluster_file), "--planner", "ddp-even"]
        assert execute(["plan", *arguments, "--out", str(path / out)]) == 0
    return path


def test_command(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    capsys.readouterr()
    command = ["explain", "two.plan", "--tensor", "up.weight"]
    assert execute([*command, "--cluster", "two.toml"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("%up.weight, param, is R in the plan (job.py:13)\n")
    assert '%up.weight = param("up.weight")' in out and "against the plan" in out
    assert "P(sum): impossible, a parameter" in out
    assert execute([*command, "--cluster", "two.toml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["placement"] == "R" and found["location"] == "job.py:13"
    assert [a["placement"] for a in found["alternatives"]] == ["R", "S(0)", "S(1)", "P(sum)"]
    assert found["alternatives"][3]["predicted_step_s"] is None
    assert found["summary"] in out


def test_the_cluster_must_be_found(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    capsys.readouterr()
    assert execute(["explain", "two.plan", "--tensor", "up.weight"]) == 2
    assert "mixmesh explain two.plan --tensor up.weight --cluster C.toml" in capsys.readouterr().err
    assert execute(["explain", "preset.plan", "--tensor", "up.weight"]) == 0  # known by its fingerprint
    assert execute(["explain", "preset.plan", "--tensor", "up.weight", "--cluster", "two.toml"]) == 2
    assert "another cluster" in capsys.readouterr().err
