"""Sequence parallelism: the rewrite as text, what it computes, the memory that it saves, plans with it."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import pytest
import torch
from gloo_world import assert_passed, assert_trains_alike, run_world
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mixmesh.cluster import Cluster
from mixmesh.cluster.device import HEADROOM
from mixmesh.cost import CostModel
from mixmesh.errors import Infeasible
from mixmesh.frontend.trace import trace
from mixmesh.lang.check import check_program
from mixmesh.lang.ir import Program, Ratio, even_ratio, make_ratio, parse_program
from mixmesh.lang.optimizer_states import ADAM, OptimizerStates
from mixmesh.measure.verification import verify
from mixmesh.passes.sequence import sequence_parallel
from mixmesh.planner import make_plan
from mixmesh.planner.budget import AMPLE
from mixmesh.planner.passes import PASSES, SEQUENCE, results_of
from mixmesh.planner.proposal import Proposal
from mixmesh.planner.task import Task
from mixmesh.runtime.parallel import parallelize
from mixmesh.search.synthesis import Choices, Prices, Problem, emit, search
from mixmesh.step.memory import Memory

WIDTH, HEADS, WORDS, TIME, SAMPLES = 20, 5, 13, 11, 2
RATIOS = (make_ratio([0.6, 0.4]), make_ratio([0.5, 0.3, 0.2]))
R, P, S2 = 0, 1, 4  # as the search codes R, P(sum) and S(2)


def cluster_of(count: int, link_gbit_per_s: float = 100, memory_gib: float = 8) -> Cluster:
    """So many equal GPUs in one machine."""
    device = f'name = "d", tflop_per_s = 10, memory_gib = {memory_gib}, memory_gbyte_per_s = 300'
    return Cluster.parse(f"""name = "machine"
[[machine]]
link_gbit_per_s = {link_gbit_per_s}
devices = [{{ {device}, count = {count} }}]
""")


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A layer of GPT, which normalises before its products, or of BERT, which does so after them."""

    def __init__(self, width: int, heads: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.attention = Attention(width, heads, causal=kind == "gpt")
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        if self.kind == "gpt":
            x = x + self.dropout(self.attention(self.norm1(x)))
            return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        x = self.norm1(x + self.dropout(self.attention(x)))
        return self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))


class Model(nn.Module):
    def __init__(
        self, kind: str = "gpt", width: int = WIDTH, layers: int = 2, time: int = TIME, heads: int = HEADS
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(time, width)
        self.layers = nn.ModuleList(Layer(width, heads, kind) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, ids, labels):
        x = self.words(ids) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten(), ignore_index=0)


def model_of(kind: str = "gpt", **figures: int) -> Model:
    torch.manual_seed(0)
    return Model(kind, **figures).double()


def batch_of(seed: int = 0, samples: int = SAMPLES, time: int = TIME) -> dict:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randint(WORDS, (samples, time), generator=draw) for name in ("ids", "labels")}


def megatron(graph, costs: CostModel, ratio: Ratio) -> Program:
    """Tensor parallelism as Megatron-LM writes it: the first products of a pair are cut by columns, the
    second by rows, and every rank has all that is in between."""
    choices = Choices(graph, costs)
    forced: dict[int, int] = {}
    for node in choices.steps:
        weight = node.inputs[1] if node.op == "aten.linear" else ""
        if weight.endswith((".q.weight", ".k.weight", ".v.weight", ".up.weight")):
            forced[choices.ids[node.result]] = S2
        elif weight.endswith((".out.weight", ".down.weight")):
            forced[choices.ids[node.result]] = P
        elif node.op in ("aten.layer_norm", "aten.add.Tensor", "aten.native_dropout", "aten.embedding"):
            forced[choices.ids[node.results[0]]] = R
    prices = Prices(gradient_sync=1e3)
    problem = Problem(graph, costs, ratio, prices=prices, choices=choices, forced=forced)
    return emit(problem, search(problem))


def collectives(program: Program) -> Counter[str]:
    """Those of activations, by name."""
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    return Counter(i.op for i in program.instructions if i.op in names and len(i.type.value.shape) > 2)


# --- the text ---------------------------------------------------------------------------------------------

BEFORE = """\
program block world=2 {
  ratio r0 = [0.75, 0.25]
  %x = input("x") : f32[2, 8, 6] R
  %up = param("up") : f32[12, 6] S(0)@r0
  %down = param("down") : f32[6, 12] S(1)@r0
  %gain = param("gain") : f32[6] R
  %shift = param("shift") : f32[6] R
  %h = aten.linear(%x, %up) : f32[2, 8, 12] S(2)@r0
  %y = aten.linear(%h, %down) : f32[2, 8, 6] P(sum)
  %y.r = all_reduce(%y) : f32[2, 8, 6] R
  %z = aten.add.Tensor(%x, %y.r) : f32[2, 8, 6] R
  %n = aten.layer_norm(%z, [6], %gain, %shift) : f32[2, 8, 6] R
  %head = param("head") : f32[4, 6] S(0)@r0
  %o = aten.linear(%n, %head) : f32[2, 8, 4] S(2)@r0
  %loss = aten.mean(%o) : f32[] P(sum)
  return %loss
}
"""
AFTER = """\
program block world=2 {
  ratio r0 = [0.75, 0.25]
  %x = input("x") : f32[2, 8, 6] R
  %up = param("up") : f32[12, 6] S(0)@r0
  %down = param("down") : f32[6, 12] S(1)@r0
  %gain = param("gain") : f32[6] R
  %shift = param("shift") : f32[6] R
  %h = aten.linear(%x, %up) : f32[2, 8, 12] S(2)@r0
  %y = aten.linear(%h, %down) : f32[2, 8, 6] P(sum)
  %y.s1 = reduce_scatter(%y) : f32[2, 8, 6] S(1)@r0
  %x.s1 = local_slice(%x) : f32[2, 8, 6] S(1)@r0
  %z = aten.add.Tensor(%x.s1, %y.s1) : f32[2, 8, 6] S(1)@r0
  %n = aten.layer_norm(%z, [6], %gain, %shift) : f32[2, 8, 6] S(1)@r0
  %n.r = all_gather(%n) : f32[2, 8, 6] R
  %head = param("head") : f32[4, 6] S(0)@r0
  %o = aten.linear(%n.r, %head) : f32[2, 8, 4] S(2)@r0
  %loss = aten.mean(%o) : f32[] P(sum)
  return %loss
}
"""


def test_an_all_reduce_becomes_a_reduce_scatter_and_an_all_gather():
    program = sequence_parallel(parse_program(BEFORE))
    assert str(program) == AFTER
    check_program(program)
    assert sequence_parallel(program) is program


def test_who_takes_the_sum_whole_gathers_it():
    """Another product takes what was all-reduced as it is, and somebody takes a slice of the norm."""
    slice_of_norm = "%n.s1 = local_slice(%n) : f32[2, 8, 6] S(1)@r0\n  "
    text = BEFORE.replace("%o = aten.linear(%n,", f"{slice_of_norm}%o = aten.linear(%y.r,")
    text = text.replace("%loss =", "%part = aten.mean(%n.s1) : f32[] P(sum)\n  %other =")
    text = text.replace("return", "%loss = aten.add.Tensor(%other, %part) : f32[] P(sum)\n  return")
    program = sequence_parallel(parse_program(text))
    check_program(program)
    ops = [(i.op, i.results, i.inputs) for i in program.instructions]
    assert ("all_gather", ("y.r",), ("y.s1",)) in ops  # for the product
    assert ("aten.mean", ("part",), ("n",)) in ops  # which is cut so already


def test_pieces_go_from_rank_to_rank():
    """A slice along another dim of what is cut now is an all-to-all, and a whole that only an addition takes,
    gathered from another cut, comes in rows at once."""
    cut = "%n.s0 = local_slice(%n) : f32[2, 8, 6] S(0)@r0\n  "
    cut += "%o = aten.mul.Tensor(%n.s0, 2.0) : f32[2, 8, 6] S(0)@r0"
    text = BEFORE.replace("%o = aten.linear(%n, %head) : f32[2, 8, 4] S(2)@r0", cut)
    program = sequence_parallel(parse_program(text))
    check_program(program)
    assert ("all_to_all", ("n.s0",), ("n",)) in [(i.op, i.results, i.inputs) for i in program.instructions]
    wide = '%e = param("e") : f32[6, 6] S(0)@r0\n  %w = aten.linear(%x, %e) : f32[2, 8, 6] S(2)@r0\n  '
    wide += "%w.r = all_gather(%w) : f32[2, 8, 6] R\n  %z = aten.add.Tensor(%w.r"
    program = sequence_parallel(parse_program(BEFORE.replace("%z = aten.add.Tensor(%x", wide)))
    check_program(program)
    assert ("all_to_all", ("w.s1",), ("w",)) in [(i.op, i.results, i.inputs) for i in program.instructions]


SPREAD = "%y.r = aten.relu(%x) : f32[2, 8, 6] R"


@pytest.mark.parametrize(
    "text",
    (
        BEFORE.replace("%y.r = all_reduce(%y) : f32[2, 8, 6] R", SPREAD),  # nothing is reduced
        BEFORE.replace("[2, 8, ", "[2, 1, "),  # more ranks than rows
        BEFORE.replace("aten.add.Tensor(%x, %y.r)", "aten.add.Tensor(%x, %x)"),  # nobody takes the sum
    ),
    ids=("nothing reduced", "too few rows", "not used"),
)
def test_what_is_left_as_it_is(text):
    program = parse_program(text)
    assert sequence_parallel(program) is program


def test_what_grows_is_gathered_before():
    """Rows are gathered before an operator makes more of them."""
    more = '%c = aten.cat([%z, %z, %z], 2) : f32[2, 8, 18] R\n  %head = param("head") : f32[4, 18] S(0)@r0'
    text = BEFORE.replace("%n = aten.layer_norm(%z, [6], %gain, %shift) : f32[2, 8, 6] R\n  ", "")
    text = text.replace('%head = param("head") : f32[4, 6] S(0)@r0', more).replace(
        "(%n, %head)", "(%c, %head)"
    )
    program = sequence_parallel(parse_program(text))
    check_program(program)
    types = {i.result: str(i.type.placement) for i in program.instructions}
    assert (types["z"], types["c"], types["z.r"]) == ("S(1)", "R", "R")


# --- what it computes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", RATIOS, ids=("two", "three"))
@pytest.mark.parametrize("kind", ("gpt", "bert"))
def test_trains_as_the_single_device(kind, ratio):
    model, batch = model_of(kind), batch_of()
    traced = trace(model, batch)
    plain = megatron(traced.graph, CostModel(cluster_of(len(ratio))), ratio)
    program = sequence_parallel(plain)
    check_program(program)
    before, after = collectives(plain), collectives(program)
    assert before["all_reduce"] == 4 and after["all_reduce"] == 0 and after["reduce_scatter"] == 4
    report = verify(model, batch, program, steps=2, traced=traced)
    assert report.ok and report.max_gradient_error_f64 < 1e-9 and report.max_update_error < 1e-9


class Allocated(TorchDispatchMode):
    """The most bytes of tensors that operators have made and somebody still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and (key := t.untyped_storage()._cdata) not in self.known:
                self.known[key] = t.untyped_storage().nbytes()
                self.now += self.known[key]
                weakref.finalize(t.untyped_storage(), self.freed, key)
        self.peak = max(self.peak, self.now)
        return out

    def freed(self, key: int) -> None:
        self.now -= self.known.pop(key)


LONG = {"width": 40, "layers": 4, "time": 128}


def long_programs() -> tuple[Program, Program]:
    """Those of a model whose activations outweigh its parameters, without and with the rewrite."""
    graph = trace(model_of(**LONG), batch_of(time=LONG["time"])).graph
    plain = megatron(graph, CostModel(cluster_of(2)), RATIOS[0])
    return plain, sequence_parallel(plain)


@dataclass
class Trains:
    kind: str

    def __call__(self, _) -> None:
        single = model_of(self.kind)
        for dropout in (m for m in single.modules() if isinstance(m, nn.Dropout)):
            dropout.p = 0.0  # draws of one device differ from those of several
        graph = trace(single, batch_of()).graph
        program = sequence_parallel(megatron(graph, CostModel(cluster_of(2)), RATIOS[0]))
        assert collectives(program)["reduce_scatter"] == 4
        assert_trains_alike(single, copy.deepcopy(single), program, map(batch_of, range(3)))


def kept_bytes(program: Program, rank: int) -> float:
    """What a rank holds between the passes, by prediction, without what an allocator loses."""
    memory = Memory(program, OptimizerStates(0))
    first = next(n for n, m in enumerate(memory.moments) if "grad" in m.what)
    held = memory.moments[first - 1].held
    return sum(held.get(cut, 0) * share[rank] for cut, share in zip(memory.cuts, memory.shares(program)))


@dataclass
class Saves:
    """A rank keeps less by what is predicted, and its peak is lower too: there pieces that are on their way
    take a part of what is saved."""

    def __call__(self, comm) -> None:
        kept, peaks, predicted = [], [], []
        for program in long_programs():
            twin = model_of(**LONG)
            sgd = torch.optim.SGD(twin.parameters(), lr=0.1)
            model, _ = parallelize(twin, sgd, program, device="cpu", timeout_s=60)
            batch = batch_of(time=LONG["time"])
            model(**batch).backward()
            with Allocated() as tracked:
                loss = model(**batch)
                kept.append(tracked.now)
                loss.backward()
            peaks.append(tracked.peak)
            predicted.append(kept_bytes(program, torch.distributed.get_rank()))
        saved, expected = kept[0] - kept[1], predicted[0] - predicted[1]
        assert saved > 0.05 * kept[0] and peaks[1] < peaks[0], (kept, peaks)
        assert abs(saved - expected) < 0.1 * expected, (kept, predicted)


CHECKS = {"trains": Trains("gpt"), "saves": Saves()}


@pytest.fixture(scope="module")
def world():
    return run_world(2, CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_between_processes(world, name):
    assert_passed(world[name])


# --- plans ------------------------------------------------------------------------------------------------


def large_graph():
    """Enough to compute that a GPU is not held up by its host."""
    with torch.device("meta"):
        model = Model(width=1000, layers=4, time=2048)
        return trace(
            model, {name: torch.zeros(1, 2048, dtype=torch.long) for name in ("ids", "labels")}
        ).graph


def proposal_of(graph, cluster: Cluster) -> tuple[Task, Proposal]:
    """Megatron's plan for equal devices, as a planner may come to it."""
    task = Task(graph, CostModel(cluster), ADAM, lambda _: None)
    ratio = even_ratio(cluster.world_size)
    return task, task.best_buckets("hap", megatron(graph, task.costs, ratio))


def test_a_plan_has_it_where_it_is_faster():
    """Three GPUs compute a third of what is between the products; it is a row of the list of passes."""
    task, proposal = proposal_of(large_graph(), cluster_of(3, 1000))
    improved = SEQUENCE(task, proposal, AMPLE)
    assert improved.timeline.step_s < 0.95 * proposal.timeline.step_s
    assert not collectives(improved.program)["all_reduce"] and SEQUENCE in PASSES
    (gained,) = [seconds for name, seconds in improved.gained_s if name == "sequence"]
    assert gained == pytest.approx(proposal.timeline.step_s - improved.timeline.step_s)
    assert [row.gained_s for row in results_of(task, improved) if row.name == "sequence"] == [gained]
    before, after = (p.simulation.peak_memory_bytes(p.program) for p in (proposal, improved))
    assert all(a > b for a, b in zip(before, after))


def test_a_plan_has_it_where_it_fits_only_so():
    """On a link that is so slow that every collective counts, a small model is no faster so."""
    graph = trace(model_of(width=200, layers=4, time=256), batch_of(samples=1, time=256)).graph
    task, proposal = proposal_of(graph, cluster_of(2, 1))
    assert proposal.feasible and SEQUENCE(task, proposal, AMPLE) is proposal
    program = sequence_parallel(proposal.program)
    sizes = [task.simulation(p).peak_memory_bytes(p) for p in (proposal.program, program)]
    between_gib = sum(map(max, sizes)) / 2 / (1 - HEADROOM) / 2**30
    task, proposal = proposal_of(graph, cluster_of(2, 1, between_gib))
    improved = SEQUENCE(task, proposal, AMPLE)
    assert not proposal.feasible and improved.feasible and improved.program.graph == proposal.program.graph


def test_auto_asks_for_tensor_parallelism_in_need():
    """Where nothing else fits; a search of programs finds it by itself where it is fastest."""
    graph = trace(model_of(), batch_of()).graph
    for memory_gib, asked in ((8, False), (1.2, True)):
        said: list[str] = []
        with suppress(Infeasible):
            make_plan(graph, cluster_of(2, memory_gib=memory_gib), progress=said.append)
        assert ("planning: tensor-parallel" in said) == asked
