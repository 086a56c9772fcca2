"""Weight gradients that are computed before their input's, or after the rest of the backward pass."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from gloo_world import assert_passed, run_world
from programs import make_plan
from torch import nn

from mixmesh.base.timeline import gradient_name, wgrad_name
from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.cost.sums import gradient_sums
from mixmesh.errors import VerificationError
from mixmesh.explain import explain_plan
from mixmesh.explain.judge import with_wgrads_of
from mixmesh.frontend.trace import trace
from mixmesh.lang.check import check_program
from mixmesh.lang.ir import parse_program, separable, wgrad_of, with_wgrads
from mixmesh.lang.ir.wgrad import PRODUCTS
from mixmesh.lang.optimizer_states import OptimizerStates
from mixmesh.lang.plan_file import MicroBatch
from mixmesh.passes.buckets import with_buckets
from mixmesh.passes.zero import with_stage
from mixmesh.planner import make_plan as plan_of
from mixmesh.runtime.interpret import interpret
from mixmesh.runtime.parallel import parallelize
from mixmesh.runtime.recording import Recorder
from mixmesh.search.baselines import data_parallel
from mixmesh.simulator import simulate
from mixmesh.step.memory import peak_memory_bytes

WORLD, BATCH, LENGTH, VOCABULARY, WIDTH = 3, 12, 10, 13, 8
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
SGD = OptimizerStates(0)
NOTHING_ON_ONE = (0.666667, 0.333333, 0.0)


class Mixed(nn.Module):
    """Words, convolutions of one and two dims with strides, padding and groups, products with and without a
    bias, and a tied one that is not apart."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.conv = nn.Conv1d(WIDTH, 2 * WIDTH, 3, stride=2, padding=1, groups=2)
        self.square = nn.Conv2d(1, 3, (3, 2), dilation=(2, 1), padding=(2, 0), bias=False)
        self.up = nn.Linear(3 * 4, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids, labels):
        h = self.conv(self.table(ids).transpose(1, 2)).relu()
        h = self.square(h.unsqueeze(1))
        h = self.down(nn.functional.gelu(self.up(h.transpose(1, 2).flatten(2))))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def model_of() -> Mixed:
    torch.manual_seed(0)
    return Mixed().double()


def batch(step: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return {
        "ids": torch.randint(VOCABULARY, (BATCH, LENGTH), generator=g),
        "labels": torch.randint(VOCABULARY, (BATCH, 2 * WIDTH), generator=g),
    }


@cache
def plain(ratio=UNEVEN):
    graph = trace(model_of(), batch(0)).graph
    return with_buckets(data_parallel(graph, CostModel(Cluster.parse(CLUSTER)), ratio), 600.0)


class PlanOf:
    """A plan, made where it is used: a class, as closures do not pickle. ``marks`` are first, last or
    nothing for each product in turn."""

    def __init__(self, marks, ratio=UNEVEN, stage=0, micro_batches=None) -> None:
        self.marks, self.ratio, self.stage, self.micro_batches = marks, ratio, stage, micro_batches

    def __call__(self):
        program = marked(plain(self.ratio), self.marks)
        if self.stage:
            program = with_stage(program, self.stage, (0.2, 0.0, 0.8))
        check_program(program)
        return make_plan(program, Cluster.parse(CLUSTER), micro_batches=self.micro_batches)


def marked(program, marks):
    able = separable(program)
    return with_wgrads(program, {n: m for n, m in zip(able, itertools.cycle(marks)) if m})


class Training:
    def __init__(self, plan_of) -> None:
        self.plan_of = plan_of

    def __call__(self, _) -> None:
        single, mine = model_of(), model_of()
        optimizer = torch.optim.Adam(single.parameters(), lr=0.05)
        model, sharded = parallelize(
            mine, torch.optim.Adam(mine.parameters(), lr=0.05), self.plan_of(), device="cpu", timeout_s=60
        )
        for step in range(3):
            expected, loss = single(**batch(step)), model(**batch(step))
            torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
            expected.backward()
            loss.backward()
            for name, p in model.named_parameters():
                held = torch.zeros_like(p) if p.grad is None else p.grad
                whole = model._runtime.by_param[p].whole(held, model.comm)
                torch.testing.assert_close(whole, single.get_parameter(name).grad, rtol=1e-9, atol=1e-9)
            for o in (optimizer, sharded):
                o.step()
                o.zero_grad()
        for name, value in model.full_state_dict().items():
            torch.testing.assert_close(value, single.state_dict()[name], rtol=1e-9, atol=1e-9)


def accumulates(_) -> None:
    """Two backward passes before a step of the optimizer."""
    single, mine = model_of(), model_of()
    model, _ = parallelize(
        mine, torch.optim.SGD(mine.parameters()), PlanOf(("last", "first"))(), device="cpu", timeout_s=60
    )
    for step in range(2):
        single(**batch(step)).backward()
        model(**batch(step)).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, single.get_parameter(name).grad, rtol=1e-9, atol=1e-9)


class TwoLosses:
    """In one backward pass, after a forward pass that nothing goes back through, and then one alone."""

    def __init__(self, marks) -> None:
        self.marks = marks

    def __call__(self, _) -> None:
        single, mine = model_of(), model_of()
        optimizer = torch.optim.SGD(mine.parameters())
        model, _ = parallelize(mine, optimizer, PlanOf(self.marks)(), device="cpu", timeout_s=60)
        model(**batch(2))
        for steps in ((0, 1), (2,)):
            for m in (single, model):
                sum(m(**batch(step)) for step in steps).backward()
            for name, p in model.named_parameters():
                torch.testing.assert_close(p.grad, single.get_parameter(name).grad, rtol=1e-9, atol=1e-9)
        assert not any(model._runtime.reducer._uses.values())


def frozen(_) -> None:
    """A parameter that takes no gradient after planning."""
    single, mine = model_of(), model_of()
    plan = PlanOf(("last",))()
    model, _ = parallelize(mine, torch.optim.SGD(mine.parameters()), plan, device="cpu", timeout_s=60)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch(0)), single(**batch(0)), rtol=1e-9, atol=1e-9)


def costs() -> CostModel:
    return CostModel(Cluster.parse(CLUSTER))


class Recorded:
    """The names of a recorded step are those of the simulated one."""

    def __init__(self, marks) -> None:
        self.marks = marks

    def __call__(self, _) -> None:
        plan = PlanOf(self.marks)()
        mine = model_of()
        model, sharded = parallelize(
            mine, torch.optim.SGD(mine.parameters()), plan, device="cpu", timeout_s=60
        )
        recorder = Recorder(model.comm)
        with model.recorded(recorder):
            model(**batch(0)).backward()
        rank = model.comm.rank
        timeline = simulate(plan.program, costs(), events=True)
        wanted = {e.name for e in timeline.events if e.rank == rank and e.name.endswith("weight grad")}
        computed = sorted((e for e in recorder.events(0.0) if e.stream == "compute"), key=lambda e: e.start_s)
        assert len(wanted) == 4 and wanted <= {e.name for e in computed}
        for one, two in itertools.pairwise(computed):
            assert one.end_s <= two.start_s + 1e-6, f"{one} overlaps {two}"


TWO_EACH = (MicroBatch(4, 2, 2), MicroBatch(2, 2, 2), MicroBatch(1, 2, 1))
CHECKS = {
    "first": Training(PlanOf(("first",))),
    "last": Training(PlanOf(("last",))),
    "mixed": Training(PlanOf(("last", None, "first", "last"))),
    "an idle rank": Training(PlanOf(("last", "first"), NOTHING_ON_ONE)),
    "owners of the whole gradient": Training(PlanOf(("last", "first"), stage=1)),
    "owners": Training(PlanOf(("first", "last", "last"), stage=2)),
    "micro-batches": Training(PlanOf(("last", "first"), micro_batches=TWO_EACH)),
    "owners in micro-batches": Training(PlanOf(("last", "first"), stage=2, micro_batches=TWO_EACH)),
    "accumulates": accumulates,
    "two losses, first": TwoLosses(("first",)),
    "two losses, last": TwoLosses(("last",)),
    "without gradients": frozen,
    "recorded first": Recorded(("first",)),
    "recorded last": Recorded(("last",)),
}


@pytest.fixture(scope="module")
def world():
    return run_world(WORLD, CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_trains_as_one_device_does(world, name):
    assert_passed(world[name])


def test_products_of_own_parameters_are_separable():
    program = plain()
    weights = {program.producers[program.instructions[n].inputs[1]].args[0] for n in separable(program)}
    assert weights == {"conv.weight", "square.weight", "up.weight", "down.weight"}  # not the tied head


class Unbatched(nn.Module):
    """Products of one sample without a batch dim, beside one of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.row = nn.Parameter(torch.randn(2, 6, 5)), nn.Parameter(torch.randn(8))
        self.conv, self.linear = nn.Conv2d(2, 3, 3, stride=2), nn.Linear(8, 4)
        self.first, self.second = nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3)

    def forward(self, x):
        found = self.second(self.first(x)), self.conv(self.image), self.linear(self.row)
        return sum(y.square().mean() for y in found)


def test_products_without_a_batch_are_not():
    graph = trace(Unbatched(), {"x": torch.randn(BATCH, 2, 6, 5)}).graph
    program = data_parallel(graph, costs(), UNEVEN)
    products = [n for n, i in enumerate(program.instructions) if i.op in PRODUCTS]
    assert len(products) == 4
    weights = {program.producers[program.instructions[n].inputs[1]].args[0] for n in separable(program)}
    assert weights == {"second.weight"}
    for n in set(products) - {*separable(program)}:
        with pytest.raises(VerificationError, match="cannot be computed apart"):
            check_program(with_wgrads(program, {n: "last"}))


def test_text_has_it():
    program = marked(plain(), ("first", "last"))
    assert 'wgrad="first"' in str(program) and 'wgrad="last"' in str(program)
    assert parse_program(str(program)) == program


def test_all_ranks_in_one_process_ignore_it():
    model = model_of()
    tensors = dict(model.named_parameters(remove_duplicate=False))
    interpret(marked(plain(), ("last",)), tensors, batch(0)).loss.backward()
    single = model_of()
    single(**batch(0)).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, single.get_parameter(name).grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("aten.gelu(", "aten.gelu(", "cannot be computed apart"),
        ("aten.linear(", "aten.linear(", "first, last or beside"),
    ],
)
def test_what_cannot_be_apart_is_refused(old, new, message):
    when = "soon" if "first" in message else "last"
    program = plain()
    n = next(n for n, i in enumerate(program.instructions) if i.op == old.rstrip("("))
    with pytest.raises(VerificationError, match=message):
        check_program(with_wgrads(program, {n: when}))


def completed(program, marks) -> list[str]:
    """The parameters in the order in which their sums are started."""
    made = with_buckets(marked(program, marks), 1.0)
    return [p.args[0] for s in gradient_sums(made) for p in s.params]


def test_what_is_last_is_summed_last():
    usual, late = completed(plain(), (None,)), completed(plain(), ("last", None, None, None))
    assert usual.index("conv.weight") < usual.index("table.weight")
    assert late.index("conv.weight") == len(late) - 1
    assert [name for name in late if name != "conv.weight"] == [n for n in usual if n != "conv.weight"]


def events(marks):
    timeline = simulate(marked(plain(), marks), costs(), events=True)
    return timeline, {e.name: e for e in timeline.events if e.rank == 0}


def test_simulated_order():
    program = plain()
    conv, square, up, _ = (program.instructions[n].result for n in separable(program))
    usual, named = events((None,))
    assert wgrad_name(up) not in named
    first, named = events(("first",))
    assert named[wgrad_name(up)].end_s <= named[gradient_name(up)].start_s
    last, named = events(("last",))
    assert named[wgrad_name(up)].start_s >= named[gradient_name(conv)].end_s
    assert named[wgrad_name(up)].end_s <= named[wgrad_name(square)].start_s  # in the usual order
    for timeline in (first, last):
        assert timeline.compute_s == pytest.approx(usual.compute_s)
        assert timeline.communication_s == pytest.approx(usual.communication_s)


def test_what_is_last_is_held_until_then():
    """In the middle of the backward pass of a chain, of every product its input and its result's gradient."""
    width, samples, layers = 512, 4096, 6
    chain = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chain = chain

        def forward(self, x):
            return (self.chain(x) ** 2).mean()

    graph = trace(Loss(), {"x": torch.zeros(samples, width)}).graph
    program = data_parallel(graph, costs(), UNEVEN)
    usual, late = (
        peak_memory_bytes(marked(program, marks), costs(), SGD)[0] for marks in ((None,), ("last",))
    )
    tensor_bytes = samples * UNEVEN[0] * width * 4
    # all inputs are held when the pass begins, and as it goes on one gradient more for each that stays
    assert late - usual == pytest.approx((layers - 2) * tensor_bytes, rel=0.3)


THIN = """\
name = "thin"
[network]
bandwidth_gbit_per_s = 30
latency_us = 20
[[machine]]
name = "a"
devices = [{ device = "V100-16GB" }]
[[machine]]
name = "b"
devices = [{ device = "V100-16GB" }]
"""


def test_the_planner_takes_it_where_it_is_faster():
    """A table is complete last and summed for as long as some products take; those can come after it."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8192, 2048)
            self.layers = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(12)))

        def forward(self, ids):
            return (self.layers(self.table(ids)) ** 2).mean()

    graph = trace(Words(), {"ids": torch.zeros(128, 128, dtype=torch.long)}).graph
    thin = Cluster.parse(THIN)
    plan = plan_of(graph, thin, planner="hap")
    marks = [wgrad_of(i) for i in plan.program.instructions if i.op == "aten.linear"]
    assert marks[0] == "last" and marks[-1] == "first"
    without = simulate(with_wgrads(plan.program, {}), CostModel(thin))
    assert plan.predicted_step_s < 0.97 * without.step_s
    told = "\n".join(explain_plan(plan, thin).sentences)
    assert f"{marks.count('first')} weight gradients are computed before" in told
    assert f"{marks.count('last')} weight gradients are computed after" in told


def test_alternatives_have_what_the_plan_has():
    program = marked(plain(), ("last", "first"))
    assert with_wgrads_of(program, plain()) == program
    assert with_wgrads_of(plain(), program) == plain()
