"""Weight gradients that are computed while a collective of the backward pass travels."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from gloo_world import assert_passed, run_world
from programs import make_plan
from torch import nn
from torch.nn import functional as F

from mixmesh.base.timeline import gradient_name, wgrad_name
from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.cost.sums import gradient_sums
from mixmesh.explain import explain_plan
from mixmesh.frontend.trace import trace
from mixmesh.lang.check import check_plan, check_program
from mixmesh.lang.ir import beside_points, make_ratio, parse_program, separable, wgrad_of, with_wgrads
from mixmesh.lang.optimizer_states import OptimizerStates
from mixmesh.lang.plan_file import Plan
from mixmesh.measure.verification import verify
from mixmesh.passes.buckets import with_buckets
from mixmesh.passes.zero import with_stage
from mixmesh.planner import make_plan as plan_of
from mixmesh.runtime.parallel import parallelize
from mixmesh.runtime.recording import Recorder
from mixmesh.search.baselines import data_parallel, tensor_parallel
from mixmesh.simulator import simulate
from mixmesh.step.memory import PeakMemory, peak_memory_bytes

WORLD, BATCH, LENGTH, WIDTH = 3, 12, 4, 8
CLUSTER = """\
name = "three"
[network]
bandwidth_gbit_per_s = 0.2
latency_us = 20
[[machine]]
devices = [{ cpu_share = 0.6 }]
[[machine]]
devices = [{ cpu_share = 0.3, count = 2 }]
"""
UNEVEN = (0.5, 0.333333, 0.166667)
NOTHING_ON_ONE = (0.666667, 0.333333, 0.0)


class Normed(nn.Module):
    """Convolutions with batch norm one after the other and side by side, whose statistics are sums of all
    ranks in either pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.left, self.norm2 = nn.Conv2d(6, 6, 3, padding=1, groups=3), nn.BatchNorm2d(6)
        self.right, self.norm3 = nn.Conv2d(6, 6, 1, bias=False), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x, y):
        x = self.norm1(self.first(x)).relu()
        x = self.norm2(self.left(x)) + self.norm3(self.right(x))
        return F.cross_entropy(self.head(x.relu().mean((2, 3))), y)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Megatron(nn.Module):
    """Blocks whose products tensor parallelism cuts in pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(3))), nn.Linear(WIDTH, 4)

    def forward(self, x, y):
        return F.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), y)


MODELS = {"normed": Normed, "megatron": Megatron}


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def batch(name: str, step: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    shape = (BATCH, 3, 6, 6) if name == "normed" else (BATCH, LENGTH, WIDTH)
    labels = BATCH if name == "normed" else BATCH * LENGTH
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    return {"x": x, "y": torch.randint(4, (labels,), generator=g)}


def cluster() -> Cluster:
    return Cluster.parse(CLUSTER)


def costs() -> CostModel:
    return CostModel(cluster())


@cache
def plain(name: str, ratio=UNEVEN):
    """Batch norm with samples cut, blocks with their products cut."""
    graph = trace(model_of(name), batch(name, 0)).graph
    make = data_parallel if name == "normed" else tensor_parallel
    return with_buckets(make(graph, costs(), make_ratio(ratio)), 600.0)


def marked(program, marks=("beside",)):
    able = separable(program)
    return with_wgrads(program, {n: m for n, m in zip(able, itertools.cycle(marks)) if m})


def weights(program, indices) -> set[str]:
    return {program.producers[program.instructions[n].inputs[1]].args[0] for n in indices}


class PlanOf:
    """A plan, made where it is used: a class, as closures do not pickle."""

    def __init__(self, name, marks=("beside",), ratio=UNEVEN, stage=0) -> None:
        self.name, self.marks, self.ratio, self.stage = name, marks, ratio, stage

    def __call__(self):
        program = marked(plain(self.name, self.ratio), self.marks)
        if self.stage:
            program = with_stage(program, self.stage, (0.2, 0.0, 0.8))
        check_program(program)
        return make_plan(program, cluster())


class Training:
    def __init__(self, plan_of: PlanOf) -> None:
        self.plan_of = plan_of

    def __call__(self, _) -> None:
        name = self.plan_of.name
        single, mine = model_of(name), model_of(name)
        optimizer = torch.optim.Adam(single.parameters(), lr=0.05)
        model, sharded = parallelize(
            mine, torch.optim.Adam(mine.parameters(), lr=0.05), self.plan_of(), device="cpu", timeout_s=60
        )
        for step in range(3):
            expected, loss = single(**batch(name, step)), model(**batch(name, step))
            torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
            expected.backward()
            loss.backward()
            for key, p in model.named_parameters():
                held = torch.zeros_like(p) if p.grad is None else p.grad
                whole = model._runtime.by_param[p].whole(held, model.comm)
                torch.testing.assert_close(whole, single.get_parameter(key).grad, rtol=1e-8, atol=1e-9)
            for o in (optimizer, sharded):
                o.step()
                o.zero_grad()
        for key, value in model.full_state_dict().items():
            torch.testing.assert_close(value, single.state_dict()[key], rtol=1e-7, atol=1e-8)


def accumulates(_) -> None:
    """Several backward passes before a step of the optimizer."""
    single, mine = model_of("megatron"), model_of("megatron")
    model, _ = parallelize(
        mine, torch.optim.SGD(mine.parameters()), PlanOf("megatron")(), device="cpu", timeout_s=60
    )
    for step in range(2):
        single(**batch("megatron", step)).backward()
        model(**batch("megatron", step)).backward()
    for m in (single, model):  # and two losses in one
        (m(**batch("megatron", 2)) + m(**batch("megatron", 3))).backward()
    for key, p in model.named_parameters():
        whole = model._runtime.by_param[p].whole(p.grad, model.comm)
        torch.testing.assert_close(whole, single.get_parameter(key).grad, rtol=1e-9, atol=1e-9)


class Recorded:
    """The events of a recorded step are those of the simulated one, and in the same order."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, _) -> None:
        plan = PlanOf(self.name)()
        mine = model_of(self.name)
        model, _ = parallelize(mine, torch.optim.SGD(mine.parameters()), plan, device="cpu", timeout_s=60)
        recorder = Recorder(model.comm)
        with model.recorded(recorder):
            model(**batch(self.name, 0)).backward()
        recorded = recorder.events(0.0)
        simulated = simulate(plan.program, costs(), events=True).events
        mine = [e for e in simulated if e.rank == model.comm.rank]
        wanted = {e.name for e in mine if e.name.endswith("weight grad")}
        assert wanted and wanted <= {e.name for e in recorded}
        is_beside(plan.program, recorded, issued=True)
        is_beside(plan.program, mine)


def is_beside(program, events, *, issued: bool = False) -> None:
    """A weight's gradient is computed after its input's and before what waits for the collective; after that
    is ``issued``, where events begin then (a simulated one begins when its group is through with others)."""
    named = {e.name: e for e in events}
    points = beside_points(program)
    assert points
    for n, at in points.items():
        product, result = named[wgrad_name(program.instructions[n].result)], program.instructions[n].result
        collective = named[gradient_name(at.collective)]
        (source,) = program.producers[at.collective].inputs
        waiting = named[gradient_name(program.producers[source].results[0])]
        assert named[gradient_name(result)].end_s <= product.start_s + 1e-9
        assert not issued or collective.start_s <= product.start_s, (product, collective)
        assert product.end_s <= waiting.start_s + 1e-9, (product, waiting)


CHECKS = {
    "batch norm": Training(PlanOf("normed")),
    "tensor parallel": Training(PlanOf("megatron")),
    "mixed": Training(PlanOf("normed", ("beside", "last", "first", "beside", None))),
    "mixed tensor parallel": Training(PlanOf("megatron", ("first", "beside", "last"))),
    "an idle rank": Training(PlanOf("normed", ratio=NOTHING_ON_ONE)),
    "a rank of no products": Training(PlanOf("megatron", ratio=NOTHING_ON_ONE)),
    "owners of the whole gradient": Training(PlanOf("normed", stage=1)),
    "owners": Training(PlanOf("normed", stage=2)),
    "accumulates": accumulates,
    "recorded batch norm": Recorded("normed"),
    "recorded tensor parallel": Recorded("megatron"),
}


@pytest.fixture(scope="module")
def world():
    return run_world(WORLD, CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_trains_as_one_device_does(world, name):
    assert_passed(world[name])


@pytest.mark.parametrize("name", MODELS)
def test_all_ranks_in_one_process(name):
    model, inputs = model_of(name), batch(name, 0)
    report = verify(model, inputs, marked(plain(name)), traced=trace(model, inputs), steps=2)
    assert report.ok and report.max_gradient_error_f64 < 1e-9


# --- where ---------------------------------------------------------------------------------------------


def test_batch_norm_has_a_collective_for_all_but_the_last_products():
    """The sum of the layer that comes next in the backward pass."""
    program = marked(plain("normed"))
    points = beside_points(program)
    layer = {at.collective: program.producers[at.collective].inputs[0] for at in points.values()}
    order = [i.results[0] for i in program.instructions if i.op == "mixmesh.moments"]
    found = {w: order.index(layer[points[n].collective]) for n in points for w in weights(program, [n])}
    assert found == {"head.weight": 2, "right.weight": 1, "left.weight": 0}


def test_all_that_waits_is_computed_there():
    """In the order of the pass, between what comes before and behind."""
    text = """program p world=2 {
      ratio r = [0.5, 0.5]
      %x = input("x") : f32[6, 4] S(0)@r
      %v = param("v") : f32[4, 4] R
      %e = aten.linear(%x, %v) : f32[6, 4] S(0)@r
      %m = all_to_all(%e) : f32[6, 4] S(1)@r
      %n = all_to_all(%m) : f32[6, 4] S(0)@r
      %w = param("w") : f32[4, 4] R
      %u = param("u") : f32[4, 4] R
      %h = aten.linear(%n, %w) {wgrad="beside"} : f32[6, 4] S(0)@r
      %o = aten.linear(%h, %u) {wgrad="beside"} : f32[6, 4] S(0)@r
      %loss = aten.sum(%o) : f32[] P(sum)@r
      return %loss }"""
    program = parse_program(text)
    h, o = (n for n, i in enumerate(program.instructions) if wgrad_of(i))
    points = beside_points(program)
    assert points[h].collective == points[o].collective == "n"
    assert h > points[o].point > points[h].point > h - 1


def test_tensor_parallelism_has_one_for_every_block_but_the_first():
    program = marked(plain("megatron"))
    found = weights(program, beside_points(program))
    assert {"blocks.1.up.weight", "blocks.1.down.weight", "blocks.2.up.weight"} <= found
    assert "blocks.0.up.weight" not in found  # nothing travels below it: first


WHOLE = "%e.r = all_gather(%e) : f32[6, 4] R@{a}"


@pytest.mark.parametrize(
    "ranks, moves, found",
    [
        ("b", f"{WHOLE} %c = local_slice(%e.r) : f32[6, 4] S(0)@b", {"e.r"}),
        ("b", "%c = all_to_all(%e) : f32[6, 4] S(1)@b", {"c"}),
        (
            "a",
            f"{WHOLE} %c = move(%e.r) : f32[6, 4] S(0)@b",
            set(),
        ),  # not all ranks of the product wait for it
        ("a", "%c = move(%e) : f32[6, 4] S(0)@b", set()),  # borders, which may stay where they are
        ("b", "%c = aten.relu(%e) : f32[6, 4] S(0)@b", set()),  # a parameter's, which nobody waits for
    ],
)
def test_what_it_can_be_beside(ranks, moves, found):
    text = f"""program p world=3 {{
      ratio a = [0.5, 0.5, 0]
      ratio b = [0.5, 0.3, 0.2]
      %x = input("x") : f32[6, 4] S(0)@{ranks}
      %v = param("v") : f32[4, 4] S(0)@{ranks}
      %v.r = all_gather(%v) : f32[4, 4] R@{ranks}
      %e = aten.linear(%x, %v.r) : f32[6, 4] S(0)@{ranks}
      {moves.replace("{a}", ranks)}
      %w = param("w") : f32[4, 4] R@b
      %o = aten.linear(%c, %w) {{wgrad="beside"}} : f32[6, 4] S(0)@b
      %loss = aten.sum(%o) : f32[] P(sum)@b
      return %loss }}"""
    points = beside_points(parse_program(text))
    assert {at.collective for at in points.values()} == found


def test_text_and_plans_have_it():
    program = marked(plain("normed"))
    assert 'wgrad="beside"' in str(program) and parse_program(str(program)) == program
    plan = PlanOf("normed")()
    assert Plan.parse(str(plan)) == plan
    check_plan(plan)


# --- order, sums and memory ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_simulated_order(name):
    usual = simulate(plain(name), costs())
    made = simulate(marked(plain(name)), costs(), events=True)
    for rank in range(WORLD):
        is_beside(marked(plain(name)), [e for e in made.events if e.rank == rank])
    assert made.compute_s == pytest.approx(usual.compute_s)
    assert made.communication_s == pytest.approx(usual.communication_s)


def test_sums_begin_when_the_gradient_is_there():
    """What is computed beside a collective is complete after what was complete when that was sent."""
    forms = [with_buckets(form, 1.0) for form in (plain("normed"), marked(plain("normed")))]
    usual, beside = ([p.args[0] for s in gradient_sums(form) for p in s.params] for form in forms)
    assert usual.index("left.weight") < usual.index("norm1.weight")
    assert beside.index("norm1.weight") < beside.index("left.weight") < beside.index("first.weight")
    form = forms[1]
    named = {e.name: e for e in simulate(form, costs(), events=True).events if e.rank == 0}
    for n in beside_points(form):
        i = form.instructions[n]
        bucket = named[f"gradients of {i.inputs[1]}"]
        assert bucket.start_s >= named[wgrad_name(i.result)].end_s - 1e-12


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "marks", [("beside",), ("beside", "last"), ("last", "first", "beside")], ids="-".join
)
def test_memory_is_bounded(name, marks):
    program = marked(plain(name), marks)
    memory = PeakMemory(costs())
    bound, peak = memory.at_most(program), memory.peaks(program)
    assert bound is not None and all(a <= b for a, b in zip(peak, bound))


@pytest.mark.parametrize("every, held", [(3, 0.0), (12, 1.0)], ids=["many", "one"])
def test_what_waits_is_held_until_its_collective(every, held):
    """Of a chain the gradients of a few products, where all of them with last: that many more tensors at the
    end of the pass than without. With one collective, below all products, it is as with last."""
    samples, width, products = 24576, 256, 12

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Linear(width, width), nn.BatchNorm1d(width)]
            for n in range(1, products + 1):
                layers.append(nn.Linear(width, width, bias=False))
                if n % every == 0 and n < products:
                    layers.append(nn.BatchNorm1d(width))
            self.layers = nn.Sequential(*layers)

        def forward(self, x):
            return (self.layers(x) ** 2).mean()

    program = data_parallel(trace(Chain(), {"x": torch.zeros(samples, width)}).graph, costs(), UNEVEN)
    usual, beside, last = (
        peak_memory_bytes(marked(program, (mark,)), costs(), OptimizerStates(0, 0))[0]
        for mark in (None, "beside", "last")
    )
    tensor_bytes = samples * UNEVEN[0] * width * 4
    assert last - usual > (products / 2) * tensor_bytes
    assert (beside - usual) / (last - usual) == pytest.approx(held, abs=0.15)


# --- planning --------------------------------------------------------------------------------------------

FAR = """\
name = "far"
[network]
bandwidth_gbit_per_s = 100
latency_us = 60
[[machine]]
name = "a"
devices = [{ device = "V100-16GB" }]
[[machine]]
name = "b"
devices = [{ device = "V100-16GB" }]
"""


def test_the_planner_takes_it_where_it_is_faster():
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = ((nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)) for _ in range(8))
            self.layers = nn.Sequential(*itertools.chain(*layers))

        def forward(self, x):
            return (self.layers(x) ** 2).mean()

    graph = trace(Deep(), {"x": torch.zeros(64, 64, 28, 28)}).graph
    far = Cluster.parse(FAR)
    plan = plan_of(graph, far, planner="hap")
    marks = [wgrad_of(i) for i in plan.program.instructions if i.op == "aten.conv2d"]
    assert marks.count("beside") == 7
    without = simulate(with_wgrads(plan.program, {}), CostModel(far))
    assert plan.predicted_step_s < 0.97 * without.step_s
    told = "\n".join(explain_plan(plan, far).sentences)
    assert "7 weight gradients are computed while 7 collectives travel back" in told
