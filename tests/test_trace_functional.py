"""The functional form of a program, written one operator at a time, is the one that PyTorch writes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

from benchmarks.architectures import ARCHITECTURES, build
from mixmesh.frontend.trace import decompositions, trace
from mixmesh.frontend.trace.functional import functional_form
from mixmesh.lang.ir import Graph

DETACH, HSTACK = torch.ops.aten.detach.default, torch.ops.aten.hstack.default
BATCH = {"x": torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0))}


def text_of(graph: Graph) -> str:
    """The text of a graph with its values numbered in their order."""
    numbers = {name: f"v{n}" for n, name in enumerate(r for node in graph.nodes for r in node.results if r)}
    return re.sub(r"%?[A-Za-z_][\w.]*", lambda m: numbers.get(m[0].lstrip("%"), m[0]), str(graph))


def both_ways(model, batch, monkeypatch, **options) -> tuple[Graph, Graph, list[bool]]:
    """The graph of a trace, that of one whose programs PyTorch rewrites, and for each program of the first
    whether it was left to PyTorch."""
    left: list[bool] = []

    def noted(program, table):
        form = functional_form(program, table)
        left.append(form is None)
        return form

    monkeypatch.setattr(decompositions, "functional_form", noted)
    graph = trace(model, batch, **options).graph
    monkeypatch.setattr(decompositions, "functional_form", lambda program, table: None)
    return graph, trace(model, batch, **options).graph, left


@pytest.mark.parametrize(
    "name",
    ["BERT", "GPT-2", "Llama", "T5", "BART", "BEiT", "ConvBERT", "Swin", "Mixtral", "ResNet", "Wav2Vec2"],
)
def test_architectures(name, monkeypatch):
    model, batch = build(next(a for a in ARCHITECTURES if a.name == name))
    graph, by_pytorch, left = both_ways(model, batch, monkeypatch)
    assert text_of(graph) == text_of(by_pytorch)
    assert left and not any(left)


def without_places(graph: Graph) -> Graph:
    return replace(graph, nodes=tuple(replace(node, location="", source="") for node in graph.nodes))


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "Llama", "T5", "BART", "Gemma 3", "DiffLlama", "Swin"])
def test_architectures_under_autocast(name, monkeypatch):
    """Casts are those of PyTorch, which forgets the lines of the user's file within an autocast block."""
    model, batch = build(next(a for a in ARCHITECTURES if a.name == name))
    graph, by_pytorch, left = both_ways(model, batch, monkeypatch, autocast=("cpu", "bf16"))
    assert text_of(without_places(graph)) == text_of(without_places(by_pytorch))
    assert left and not any(left)
    cast = [node for node in graph.nodes if node.op == "aten.linear" or node.op == "aten.addmm"]
    assert cast and all(node.types[0].dtype == "bf16" and node.location for node in cast)


def casts_and_writes(m, h):
    """An operator that looks at arguments of two dtypes, one of several others, and writes beside them."""
    low = m.layer(h) @ h.transpose(1, 2)
    both = torch.cat([low, h @ h.transpose(1, 2).float()], 1)
    made = torch.zeros_like(h)
    made[:, 1] = h[:, 0]
    return torch.einsum("bij,bkj->bik", both, both).sum((1, 2), keepdim=True) + made.relu()


def a_block_of_the_model(m, h):
    with torch.autocast("cpu", torch.bfloat16):
        return m.layer(h)


def writes_what_is_cast(m, h):
    made = h * 2
    made[0] = h[1]
    with torch.autocast("cpu", torch.bfloat16):
        return m.layer(made)


def blocks_of_several_kinds(m, h):
    """Blocks within blocks: one that casts nothing, one that stops gradients, one of another dtype."""
    low = m.layer(h)
    with torch.autocast("cpu", enabled=False):
        exact = m.layer(h.float()) @ low.float().transpose(1, 2)
        with torch.no_grad():
            scale = (exact @ exact).mean()
        with torch.autocast("cpu", dtype=torch.float16):
            half = m.layer(h)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        again = m.layer(low)
    return exact.mean() * low + scale + half + again


@pytest.mark.parametrize("autocast", [None, ("cpu", "bf16")])
@pytest.mark.parametrize(
    "function", [casts_and_writes, a_block_of_the_model, writes_what_is_cast, blocks_of_several_kinds]
)
def test_blocks_of_autocast(function, autocast, monkeypatch):
    graph, by_pytorch, left = both_ways(Model(function), BATCH, monkeypatch, autocast=autocast)
    assert text_of(without_places(graph)) == text_of(without_places(by_pytorch))
    assert left and not any(left)


def test_casts_within_a_composite():
    """PyTorch's own way keeps ``einsum`` whole, and without the casts that it has on one device."""

    def function(m, h):
        return torch.einsum("bij,kj->bik", m.layer(h), m.layer.weight)

    graph = trace(Model(function), BATCH, autocast=("cpu", "bf16")).graph
    assert {node.types[0].dtype for node in graph.nodes if node.op == "aten.bmm"} == {"bf16"}
    with torch.autocast("cpu", torch.bfloat16):
        h = function(Model(function), BATCH["x"])
    assert h.dtype == torch.bfloat16


def test_the_program_is_not_run_again(monkeypatch):
    def refuse(*_):
        raise AssertionError("the whole program runs again")

    monkeypatch.setattr(ExportedProgram, "run_decompositions", refuse)
    model, batch = build(next(a for a in ARCHITECTURES if a.name == "T5"))
    assert trace(model, batch).graph.nodes


class Model(nn.Module):
    """A linear layer, followed by a ``function`` of the module and the layer's results ``[6, 4, 3]``."""

    def __init__(self, function) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(4)
        self.function = function
        self.register_buffer("held", torch.zeros(4, 3, dtype=torch.float64))

    def forward(self, x):
        return self.function(self, self.layer(x)).square().sum()


def writes_through_views(m, h):
    made = h * 2
    row, column = made[0], made[:, 1]
    row.add_(h[1])
    before = made.sum(0)
    column.copy_(h[:, 2]).mul_(2)
    made.view(-1, 3)[3:5].fill_(1.0)
    return made + before + row * column.sum()


def stops_a_gradient_after_a_write(m, h):
    made = torch.zeros_like(h)
    made[0] = h[1]
    return made.detach() * h


def stops_in_a_block(m, h):
    with torch.no_grad():
        scale = h.reshape(6, 12)
        scale = torch.stack(torch.broadcast_tensors(scale, h.flatten(1))).amax(0)
    return h.flatten(1) * scale


def reads_with_and_without_a_gradient(m, h):
    with torch.no_grad():
        stopped = h * 1
        a, b = torch.broadcast_tensors(h, stopped)
    c, d = torch.broadcast_tensors(h, h.detach())
    return a * c + b * d


def updates_buffers(m, h):
    h = m.norm(h)
    m.held.copy_(h.detach().mean(0))
    m.held.mul_(0.5)[0].add_(1.0)
    return h + m.held.float()


def picks_and_writes(m, h):
    values, places = h.topk(2, -1)
    values.div_(values.sum(-1, keepdim=True))
    return h.scatter_add(-1, places, values).softmax(-1)


def views_of_other_strides(m, h):
    h = nn.functional.scaled_dot_product_attention(h[None], h[None], h[None])[0]
    return h.transpose(0, 1).reshape(4, 18).contiguous().view(2, 36).chunk(3, -1)[1]


FUNCTIONS = [
    writes_through_views, stops_a_gradient_after_a_write, stops_in_a_block, reads_with_and_without_a_gradient,
    updates_buffers, picks_and_writes, views_of_other_strides,
]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_writes_views_and_stopped_gradients(function, monkeypatch):
    graph, by_pytorch, left = both_ways(Model(function), BATCH, monkeypatch)
    assert text_of(graph) == text_of(by_pytorch)
    assert left and not any(left)


def writes_conjugates(m, h):
    return torch.view_as_real(torch.complex(h, h).conj() * torch.complex(h, -h)).sum(-1)


def repeats_as_told(m, h):
    return h.repeat_interleave(torch.tensor([1, 0, 2, 3]), 1)


ONLY_BY_PYTORCH = [writes_conjugates, repeats_as_told]


@pytest.mark.parametrize("function", ONLY_BY_PYTORCH, ids=lambda f: f.__name__)
def test_what_is_left_to_pytorch(function, monkeypatch):
    graph, by_pytorch, left = both_ways(Model(function), BATCH, monkeypatch)
    assert any(left) and text_of(graph) == text_of(by_pytorch)


def beside_itself(m, h):
    return torch.hstack([h, h.detach()])


def test_a_detached_value_with_the_example_of_its_source():
    """Inlining a block without gradients makes such a node."""
    program = torch.export.export(Model(beside_itself), (BATCH["x"],), strict=False)
    (detached,) = program.graph.find_nodes(op="call_function", target=DETACH)
    detached.meta["val"] = detached.all_input_nodes[0].meta["val"]
    form = functional_form(program, {HSTACK: HSTACK.decompose})
    assert form is not None
    (both,) = form.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    given, stopped = both.args[0]
    assert stopped.target is DETACH and stopped.args == (given,)
