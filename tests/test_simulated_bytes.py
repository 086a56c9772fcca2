"""What is simulated is what is executed: every collective of a step between real processes, by name, whole
bytes and ranks, is one that the simulator has, and the other way round."""

from __future__ import annotations

import math
import os
import random
from collections import Counter

import pytest
import torch
from gloo_world import run_world
from pipelines import chain, pipelined
from programs import make_plan
from small_graphs import THREE, cluster
from test_coalesced import Branches
from test_coalesced import packed as with_packed_sums
from test_coalesced import pictures as for_branches
from test_gloo import BATCH, PROGRAMS, TAIL, UNEVEN, Mlp, batch, stored
from torch import nn

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import make_ratio, parse_program
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.lang.plan_file import MicroBatch, Plan
from mixmesh.passes.buckets import with_buckets
from mixmesh.passes.factors import factorable, with_factors
from mixmesh.passes.zero import with_stage
from mixmesh.planner.task import Task
from mixmesh.planner.two_level import TwoLevel
from mixmesh.runtime import collectives, drift, gradients, loss, owned, sfb
from mixmesh.runtime.parallel import parallelize
from mixmesh.search.baselines import data_parallel, fully_sharded
from mixmesh.search.placement import Space, make_grouping
from mixmesh.search.synthesis import Prices, Problem, emit, search
from mixmesh.simulator import simulate

COSTS = CostModel(cluster(THREE))
WORLD = 3


class Attention(nn.Module):
    """Embedding, one layer of attention, and a loss whose denominator depends on the labels."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.tokens = nn.Embedding(12, 16)
        self.query, self.key, self.value = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 12)

    def forward(self, tokens, targets):
        x = self.tokens(tokens)
        q, k, v = (f(x).unflatten(-1, (4, 4)).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        logits = self.head(self.norm(x + mixed))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)


def sentences() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {name: torch.randint(12, (12, 5), generator=g) for name in ("tokens", "targets")}


class Normed(nn.Module):
    """Two layers with batch norm."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5)
        self.second, self.norm2 = nn.Conv2d(5, 6, 3), nn.BatchNorm2d(6)

    def forward(self, images, labels):
        x = self.norm1(self.first(images)).relu()
        x = self.norm2(self.second(x)).relu()
        return nn.functional.cross_entropy(x.mean((2, 3)), labels)


def pictures() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {"images": torch.randn(12, 3, 6, 6, generator=g), "labels": torch.arange(12) % 6}


# models by a parameter that no other one has
MODELS = {
    "tokens.weight": (Attention, sentences),
    "norm2.weight": (Normed, pictures),
    "shortcut.0.weight": (Branches, for_branches),
}


HAND = {
    # the weight goes to a rank that has none, its gradient comes back
    "spread": f"""{UNEVEN} ratio two = [0.5, 0.5, 0] {BATCH}
      {stored("R@two", "R@r0").replace("all_gather", "move")}
      %h = aten.linear(%x, %w1, %b1) : f64[12, 8] S(0)@r0
      %a = aten.gelu(%h) : f64[12, 8] S(0)@r0
      %o = aten.linear(%a, %w2, %b2) : f64[12, 4] S(0)@r0 {TAIL}""",
    # samples change their ranks, twice; the first move is stored and taken again by nobody else
    "borders": f"""{UNEVEN} ratio r1 = [0.2, 0, 0.8] ratio same = [0.2, 0.0, 0.8]
      %x = input("x") : f64[12, 6] S(0)@r0
      %y = input("y") : f64[12, 4] S(0)@r1
      {stored("R@r0", names=("w1", "b1"))} {stored("R@r1", names=("w2", "b2"))}
      %h = aten.linear(%x, %w1, %b1) : f64[12, 8] S(0)@r0
      %a = aten.gelu(%h) : f64[12, 8] S(0)@r0
      %m = move(%a) : f64[12, 8] S(0)@r1
      %n = move(%m) : f64[12, 8] S(0)@same
      %t = all_to_all(%n) : f64[12, 8] S(1)@r1
      %u = all_to_all(%t) : f64[12, 8] S(0)@r1
      %o = aten.linear(%u, %w2, %b2) : f64[12, 4] S(0)@r1
      {TAIL.replace("@r0", "@r1")}""",
    # a bucket of parameters of which one rank uses none, and dtypes that may not mix
    "numbered": f"""ratio r0 = [0.6, 0, 0.4] {BATCH}
      %w1 = param("fc1.weight") {{bucket=7}} : f64[8, 6] R
      %b1 = param("fc1.bias") {{bucket=7}} : f64[8] R@r0
      %w2 = param("fc2.weight") {{bucket=3}} : f64[4, 8] R
      %b2 = param("fc2.bias") : f64[4] R@r0
      %h = aten.linear(%x, %w1, %b1) : f64[12, 8] S(0)@r0
      %a = aten.gelu(%h) : f64[12, 8] S(0)@r0
      %o = aten.linear(%a, %w2, %b2) : f64[12, 4] S(0)@r0 {TAIL}""",
}


STRATEGIES = range(4)  # of op groups, drawn by chance
TWO_LEVELS = (0.3, 8.0, 1e3)  # prices of a sum within a machine


def two_level_programs(graph) -> dict[str, str]:
    """Two machines of two devices and one, slow enough to cut parameters."""
    device = "[[machine]]\nlink_latency_us = 1\ndevices = [{ name = 'slow', tflop_per_s = 3e-6, "
    device += "memory_gib = 2, memory_gbyte_per_s = 0.1, count = COUNT }]\n"
    text = "name = 'two and one'\n[network]\nbandwidth_gbit_per_s = 1\nlatency_us = 1\n"
    text += device.replace("COUNT", "2") + device.replace("COUNT", "1")
    planner = TwoLevel(Task(graph, CostModel(Cluster.parse(text)), ADAM, lambda _: None))
    made = {p: next(planner.dealt(p, [2.0, 1.0])) for p in TWO_LEVELS}
    assert any(program.copies for program in made.values())
    return {f"attention two levels {p:g}": with_buckets(program, 1000) for p, program in made.items()}


def attention_programs() -> dict[str, str]:
    graph = trace(Attention(), sentences()).graph
    ratio = make_ratio([0.5, 0.25, 0.25])
    spread = data_parallel(graph, COSTS, ratio)
    programs = {
        "attention data parallel": spread,
        "attention buckets": with_buckets(spread, 1000),
        "attention fsdp": fully_sharded(spread),
        "attention factors": with_factors(spread, frozenset(factorable(spread))),
    }
    for price in (0.0, 1.0, 30.0):
        problem = Problem(graph, COSTS, ratio, prices=Prices(gradient_sync=price))
        programs[f"attention hap {price:g}"] = emit(problem, search(problem))
    space = Space(spread, COSTS, make_grouping(graph, COSTS, 5))
    for seed in STRATEGIES:
        draw = random.Random(seed)
        choices = [draw.choice(space.actions(k)) for k in range(len(space.groups))]
        programs[f"attention placed {seed}"] = space.lower(choices)
    programs |= two_level_programs(graph)
    return {name: str(program) for name, program in programs.items()}


def normed_program(ratio) -> str:
    return str(data_parallel(trace(Normed(), pictures()).graph, COSTS, make_ratio(ratio)))


NORMED = {"batch norm": [0.5, 0.25, 0.25], "batch norm, a rank of nothing": [0.02, 0.58, 0.4]}


def packed_programs() -> dict[str, str]:
    program = data_parallel(trace(Branches(), for_branches()).graph, COSTS, make_ratio([0.5, 0.3, 0.2]))
    return {name: str(with_packed_sums(program, runs)) for name, runs in PACKED.items()}


PACKED = {"packed sums": 1, "packed sums in two runs": 2}


def all_programs() -> dict[str, str]:
    by_hand = {name: f"program p world={WORLD} {{ {text}" for name, text in (PROGRAMS | HAND).items()}
    normed = {name: normed_program(ratio) for name, ratio in NORMED.items()}
    return by_hand | attention_programs() | normed | packed_programs()


Collective = tuple[str, int, tuple[int, ...]]  # name, whole bytes, ranks


def counted(found: list[Collective], name: str, call):
    def run(channel, x, *args, **kwargs):
        size = x.nbytes
        if name == "all_gather":
            sizes, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
            size = x.element_size() * sum(sizes) * math.prod(n for d, n in enumerate(x.shape) if d != dim)
        elif name == "all_to_all":
            dim, sizes = args[0], args[1]
            size = x.element_size() * sum(sizes) * math.prod(n for d, n in enumerate(x.shape) if d != dim)
        if not channel.alone:
            found.append((name, size, tuple(channel.ranks)))
        return call(channel, x, *args, **kwargs)

    return run


STAGES = {f"attention zero {stage}": (stage, None) for stage in (1, 2)}
COMMON, DIFFERENT = ((2, 3, 2), (2, 3, 0), (1, 3, 0)), ((4, 2, 2), (1, 4, 1), (2, 1, 2))  # 6, 4, 2 samples
ACCUMULATIONS = {
    f"attention zero {stage} in {name} micro-batches": (stage, rows)
    for name, rows in (("common", COMMON), ("different", DIFFERENT))
    for stage in range(4)
    if (stage, name) != (3, "different")
}


PIPELINES = {  # stages and micro-batches
    "attention pipeline of two": (((0.0, 2.0, 1.0), (1.0, 0.0, 0.0)), 4, ()),
    "attention pipeline of two, with owners": (
        ((1.0, 0.0, 0.0), (0.0, 1.0, 1.0)),
        3,
        ("allreduce", "sharded"),
    ),
    "attention pipeline of three": (((0.0, 0.0, 1.0), (1.0, 0.0, 0.0), (0.0, 1.0, 0.0)), 6, ()),
}


def staged_plans() -> dict[str, str]:
    """ZeRO stages and micro-batches, with owners of all, some and no rows; pipelines."""
    graph = trace(Attention(), sentences()).graph
    spread = data_parallel(graph, COSTS, make_ratio([1 / 2, 1 / 3, 1 / 6]))
    out = {}
    for name, (stage, rows) in (STAGES | ACCUMULATIONS).items():
        micro_batches = None if rows is None else tuple(MicroBatch(*row) for row in rows)
        program = with_stage(with_buckets(spread, 1000), stage, (0.3, 0.0, 0.7))
        out[name] = str(make_plan(program, COSTS.cluster, micro_batches=micro_batches))
    for name, (stages, micro_steps, syncs) in PIPELINES.items():
        program = with_buckets(chain(Attention(), sentences(), stages, COSTS, syncs), 1000)
        out[name] = str(pipelined(program, micro_steps, COSTS.cluster))
    return out


class Executed:
    """One step on every rank after another; what it communicated is left in a file. ``text`` is a program
    or a plan."""

    def __init__(self, text: str, folder: str) -> None:
        self.text, self.folder = text, folder

    def __call__(self, _) -> None:
        found_in = (make for name, make in MODELS.items() if name in self.text)
        make, make_inputs = next(found_in, (lambda: Mlp(0), lambda: batch(0)))
        model, inputs = make(), make_inputs()
        plan = Plan.parse(self.text) if self.text.startswith("mixmesh_plan") else parse_program(self.text)
        made, _ = parallelize(model, None, plan, device="cpu", timeout_s=30)
        drift.is_due = lambda _: False  # parameters are compared in some steps alone, which no prediction has
        made(**inputs).backward()  # owners' rows travel at the beginning of the next step
        found: list[Collective] = []
        places = [(collectives, n) for n in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")]
        places += [(collectives, "broadcast"), (collectives, "reduce")]
        places += [(sfb, "all_gather"), (gradients, "all_reduce"), (loss, "all_reduce")]
        places += [(gradients, "reduce_scatter"), (owned, "all_gather")]
        before = [getattr(module, name) for module, name in places]
        for (module, name), call in zip(places, before):
            setattr(module, name, collectives.Collective(counted(found, name, call.start)))
        try:
            local, total = made.forward_local(**inputs)
            local.backward()
            total.wait()
        finally:
            for (module, name), call in zip(places, before):
                setattr(module, name, call)
        with open(os.path.join(self.folder, os.environ["RANK"]), "w") as file:
            file.write(repr(found))


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """By program: its text, and what each rank communicated."""
    texts = all_programs() | staged_plans()
    folders = {name: tmp_path_factory.mktemp("ranks") for name in texts}
    results = run_world(WORLD, {n: Executed(texts[n], str(folders[n])) for n in texts})
    for name, failures in results.items():
        assert not any(failures), (name, failures)
    return {
        name: (text, [eval((folders[name] / str(rank)).read_text()) for rank in range(WORLD)])
        for name, text in texts.items()
    }


def simulated(text: str) -> list[Counter[Collective]]:
    """Per rank, what the simulator has."""
    if text.startswith("mixmesh_plan"):
        plan = Plan.parse(text)
        timeline = simulate(plan.program, COSTS, micro_batches=plan.micro_batches, events=True)
    else:
        timeline = simulate(parse_program(text), COSTS, events=True)
    together: dict[tuple, list[int]] = {}
    for e in timeline.events:
        if e.stream == "communication":
            together.setdefault((e.name, e.op, e.size_bytes, e.start_s, e.end_s), []).append(e.rank)
    out: list[Counter[Collective]] = [Counter() for _ in range(WORLD)]
    for (_, op, size, *_), ranks in together.items():
        for rank in ranks:
            out[rank][op, size, tuple(sorted(ranks))] += 1
    return out


ATTENTION = ("data parallel", "buckets", "fsdp", "hap 0", "hap 1", "hap 30")
ATTENTION += tuple(f"placed {seed}" for seed in STRATEGIES)
ATTENTION += tuple(f"two levels {price:g}" for price in TWO_LEVELS)


@pytest.mark.parametrize(
    "name",
    [
        *PROGRAMS, *HAND, *(f"attention {how}" for how in ATTENTION), *STAGES, *ACCUMULATIONS, *PIPELINES,
        *NORMED, *PACKED,
    ],
)  # fmt: skip
def test_simulated_collectives_are_the_executed(executed, name):
    text, ranks = executed[name]
    assert any(ranks) or name == "two_listen"  # a rank computes all of it
    assert [Counter(found) for found in ranks] == simulated(text)


def test_packed_sums_are_one_in_either_pass(executed):
    """The stem's 4 channels, then 3 + 2 + 2 and the shortcut's 12; as many in the backward pass."""
    _, ranks = executed["packed sums"]
    for found in ranks:
        for channels in (4, 3 + 2 + 2 + 12):
            assert found.count(("all_reduce", 2 * 8 * channels, (0, 1, 2))) == 2


@pytest.mark.parametrize("name", NORMED)
def test_batch_norm_sums_once_per_pass(executed, name):
    """The sums of x and x^2 of each channel, and their gradients."""
    _, ranks = executed[name]
    for found in ranks:
        for channels in (5, 6):
            assert found.count(("all_reduce", 2 * 8 * channels, (0, 1, 2))) == 2
