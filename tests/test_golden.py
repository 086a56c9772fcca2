"""Printed programs of a few small jobs: what a change of rules, costs or search does to plans, as text.

``make golden`` rewrites them; read the difference before committing it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from programs import THREE_DEVICES

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.lang.check import check_program
from mixmesh.lang.ir import even_ratio, make_ratio, parse_program
from mixmesh.lang.rules import RULES, shard_units
from mixmesh.search.baselines import data_parallel, fully_sharded
from mixmesh.search.synthesis import Problem, emit, search

torch = pytest.importorskip("torch")

FOLDER = Path(__file__).parent / "golden"
CLUSTER = Cluster.parse(THREE_DEVICES)
RATIO = make_ratio([0.5, 0.25, 0.25])


class MLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(self.down(self.up(x).relu()), y)


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.qkv = torch.nn.Embedding(30, 16), torch.nn.Linear(16, 48)
        self.out = torch.nn.Linear(16, 16, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens)
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (x + self.out(y.transpose(1, 2).flatten(2))).square().mean()


def graph(name: str):
    from mixmesh.frontend.trace import trace

    if name == "mlp":
        return trace(MLP(), {"x": torch.zeros(8, 8), "y": torch.zeros(8, dtype=torch.long)}).graph
    return trace(Attention(), {"tokens": torch.zeros(8, 6, dtype=torch.long)}).graph


def even(graph, costs):
    return data_parallel(graph, costs, even_ratio(3), shard_units(graph, RULES))


def sharded(graph, costs):
    return fully_sharded(even(graph, costs))


def searched(graph, costs):
    problem = Problem(graph, costs, RATIO)
    return emit(problem, search(problem))


def without_places(program):
    """Lines of this file move; what is planned for them does not."""
    return replace(program, instructions=tuple(replace(i, location="") for i in program.instructions))


@pytest.mark.parametrize("planner", [even, sharded, searched], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_programs(name, planner, request):
    program = without_places(planner(graph(name), CostModel(CLUSTER)))
    check_program(program)
    path = FOLDER / f"{name}-{planner.__name__}.txt"
    if request.config.getoption("--update-golden"):
        path.write_text(str(program))
    assert str(program) == path.read_text()
    assert parse_program(path.read_text()) == program
