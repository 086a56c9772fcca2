"""Outputs beside the loss: found by the trace, kept by planners, checked, counted in memory, verified."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import replace

import pytest
import torch
from pipelines import COSTS, THREE_STAGES, Language, batch, cut_into, pipelined
from torch import nn
from torch.nn.functional import cross_entropy

from mixmesh.api import plan, plan_traced
from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.errors import ParseError, PlanError, TraceError, VerificationError
from mixmesh.frontend.trace import LossSource, trace
from mixmesh.lang.check import check_program
from mixmesh.lang.ir import Returned, batch_size_of, has_gradient, outputs_of, parse_program
from mixmesh.lang.plan_file import MicroBatch, Plan
from mixmesh.measure.verification import verify
from mixmesh.runtime.outputs import trees
from mixmesh.runtime.outside import Outside
from mixmesh.search.baselines import data_parallel, tensor_parallel
from mixmesh.step.memory import PeakMemory

CLUSTER = Cluster.parse("""
name = "two machines"
[network]
bandwidth_gbit_per_s = 1
latency_us = 30
[[machine]]
name = "a"
link_gbit_per_s = 50
devices = [{ cpu_share = 0.6 }, { cpu_share = 0.3 }]
[[machine]]
name = "b"
devices = [{ cpu_share = 0.3 }]
""")
BATCH = dict(x=torch.randn(12, 4, 6), y=torch.randint(5, (12, 4)))


class Tagger(nn.Module):
    """Returns what ``form`` makes of its loss and logits."""

    def __init__(self, form) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.form = nn.Linear(6, 8), nn.Linear(8, 5), form

    def forward(self, x, y):
        logits = self.head(self.body(x).relu())
        return self.form(cross_entropy(logits.flatten(0, 1), y.flatten()), logits, self)


def as_dict(loss, logits, model):
    return dict(
        loss=loss,
        logits=logits,
        words=logits.flatten(0, 1),
        best=logits.argmax(-1),
        nested=(logits.mean(1), [logits.softmax(-1)]),
        norm=model.head.weight.sum(),
        name="tagger",
    )


ALL = ("logits", "words", "best", "nested", "norm")


def outputs_in(graph) -> dict[str, bool]:
    return {n.args[0]: dict(n.kwargs).get("rows", False) for n in graph.nodes if n.op == "output"}


def test_a_trace_names_what_the_model_returns():
    traced = trace(Tagger(as_dict), BATCH, outputs=("nested", "norm", "words"))
    assert traced.returned.names == ("loss", "logits", "words", "best", "nested.0", "nested.1.0", "norm")
    assert traced.returned.loss == "loss" and not traced.returned.is_tuple
    assert outputs_in(traced.graph) == {"words": True, "nested.0": True, "nested.1.0": True, "norm": False}
    assert not outputs_in(trace(Tagger(as_dict), BATCH).graph)


class Shifted(nn.Module):
    """Adds positions and multiplies by a mask, which all samples share: dim 0 of most inputs is 1."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, positions, mask):
        return self.linear(x + positions) * mask


def test_values_that_all_samples_share_are_no_samples():
    x, shared = torch.ones(6, 4), torch.ones(1, 4)
    traced = trace(Shifted(), (x, shared, shared), loss=LossSource.MAYBE_CALLER)
    assert outputs_in(traced.graph) == {"": True}
    assert batch_size_of(n.types[0] for n in traced.graph.batch_inputs) == 6


class Classifier(nn.Module):
    """Returns numbers of each class beside those of each sample; there are as many classes as samples."""

    def __init__(self, at_any_size=True):
        super().__init__()
        self.linear, self.at_any_size = nn.Linear(4, 6), at_any_size

    def forward(self, x, y):
        logits = self.linear(x) if self.at_any_size else self.linear(x).view(6, 6)
        right = (logits.argmax(-1) == y).float()
        return {
            "loss": nn.functional.cross_entropy(logits, y),
            "mean": logits.mean(0),
            "counts": nn.functional.one_hot(y, 6).sum(0),
            "right": torch.zeros(6).scatter_add(0, y, right),
            "of_each": torch.stack([(y == n).sum() for n in range(6)]),
            "bias": self.linear.bias * right.mean(),
            "rank": right.argsort(),
            "filled": torch.zeros(len(x), 2).index_put((torch.arange(len(x)),), logits[:, :2]),
        }


OF_CLASSES, OF_SAMPLES = ("mean", "counts", "right", "of_each", "bias"), ("rank", "filled")


def test_numbers_of_each_class_are_no_rows_though_as_many_as_samples():
    batch = {"x": torch.ones(6, 4), "y": torch.arange(6)}
    outputs = (*OF_CLASSES, *OF_SAMPLES)
    rows = dict.fromkeys(OF_CLASSES, False) | dict.fromkeys(OF_SAMPLES, True)
    assert outputs_in(trace(Classifier(), batch, outputs=outputs).graph) == rows
    of_one_size = trace(Classifier(at_any_size=False), batch, outputs=("counts", "filled"))
    assert outputs_in(of_one_size.graph) == {"counts": True, "filled": True}


def test_a_call_is_traced_once_where_operators_tell_which_outputs_have_rows(monkeypatch):
    calls = []
    monkeypatch.setattr(
        Tagger, "__call__", lambda self, *a, **k: calls.append(1) or nn.Module.__call__(self, *a, **k)
    )
    trace(Tagger(as_dict), BATCH, outputs=ALL)
    once = len(calls)
    trace(Tagger(as_dict), BATCH)
    assert once and len(calls) == 2 * once


@pytest.mark.parametrize("first", [True, False])
def test_of_a_tuple_the_one_scalar_is_the_loss(first):
    form = (lambda loss, logits, _: (loss, logits)) if first else (lambda loss, logits, _: (logits, loss))
    traced = trace(Tagger(form), BATCH, outputs=(int(first),))
    assert traced.returned == Returned(("0", "1"), str(int(not first)), is_tuple=True)
    assert outputs_in(traced.graph) == {str(int(first)): True}


@pytest.mark.parametrize("form", [lambda loss: loss.item(), lambda loss: {"loss": loss.item()}])
def test_a_number_is_no_loss(form):
    with pytest.raises(TraceError, match="scalar loss") as caught:
        trace(Tagger(lambda loss, logits, _: form(loss)), BATCH)
    assert "a number" in caught.value.got and "without .item()" in caught.value.hint[0]


def test_of_a_named_tuple_too():
    made = namedtuple("Made", "logits loss")
    traced = trace(Tagger(lambda loss, logits, _: made(logits, loss)), BATCH, outputs=("logits",))
    assert traced.returned == Returned(("logits", "loss"), "loss", is_tuple=True)
    assert outputs_in(traced.graph) == {"logits": True}


@pytest.mark.parametrize(
    "form, line",
    [
        (lambda loss, logits, _: (loss, logits.mean()), "loss=lambda losses: sum(losses)"),
        (lambda loss, logits, _: dict(a=loss, b=loss * 2), "loss=lambda losses: sum(losses.values())"),
        (lambda loss, logits, _: (logits.mean().detach(), loss), "loss=lambda out: out[1])"),
        (lambda loss, logits, _: dict(a=loss, b=loss.detach()), "loss=lambda out: out['a'])"),
    ],
)
def test_several_losses_are_refused_with_the_line_to_write(form, line):
    with pytest.raises(TraceError) as caught:
        trace(Tagger(form), BATCH)
    assert line in str(caught.value)


def test_a_model_without_a_loss():
    """All that it returns has a gradient, but for what has none on one device."""
    features = Tagger(lambda _, logits, model: (logits, logits.argmax(-1), model.head.weight.sum()))
    scaled = Tagger(lambda _, logits, model: (logits, model.head.bias.exp().sum()))  # a scale is no loss
    for model, marks in ((features, (1, 0, 1)), (scaled, (1, 1))):
        traced = trace(model, BATCH, loss=LossSource.MAYBE_CALLER)
        assert traced.returned == Returned(tuple(map(str, range(len(marks)))), "", is_tuple=True)
        assert [has_gradient(n) for n in traced.graph.nodes if n.op == "output"] == [*map(bool, marks)]
    nothing = Tagger(lambda _, logits, __: (logits, None, logits.mean(1)))
    assert trace(nothing, BATCH, loss=LossSource.MAYBE_CALLER).returned.names == ("0", "1?", "2")
    with pytest.raises(TraceError, match="a str at place 1 of a tuple"):
        trace(Tagger(lambda _, logits, __: (logits, "words")), BATCH, loss=LossSource.MAYBE_CALLER)
    with_loss = Tagger(lambda loss, logits, _: (logits, loss))
    assert trace(with_loss, BATCH, loss=LossSource.MAYBE_CALLER).returned.loss == "1"


@pytest.mark.parametrize("planner", ("fsdp-even", "tensor-parallel", "hap", "two-level", "model-parallel"))
def test_planners_keep_the_gradients_of_outputs(planner):
    """A program without them is refused when it is to run."""
    traced = trace(
        Tagger(lambda _, logits, __: (logits, logits.mean(1))), BATCH, loss=LossSource.MAYBE_CALLER
    )
    made = plan_traced(traced, CLUSTER, planner=planner)
    check_program(made.program)
    assert all(map(has_gradient, outputs_of(made.program).values()))
    assert Outside.of(Plan.parse(str(made)), None).returned == traced.returned
    without = [
        replace(i, kwargs=(("rows", True),)) if i.op == "output" else i for i in made.program.instructions
    ]
    with pytest.raises(PlanError, match="no gradient for the model's output 0"):
        Outside.of(replace(made, program=replace(made.program, instructions=tuple(without))), None)


def test_an_output_that_there_is_not():
    with pytest.raises(TraceError, match="no tensor 'logit'") as caught:
        trace(Tagger(as_dict), BATCH, outputs=("logit",))
    assert "logits, words, best, nested, norm" in str(caught.value)
    with pytest.raises(TraceError, match="no tensor 'logits'"):
        trace(Tagger(lambda loss, *_: loss), BATCH, outputs=("logits",))


PLANNERS = (
    "single",
    "ddp-tuned",
    "fsdp-even",
    "tensor-parallel",
    "hap",
    "two-level",
    "model-parallel",
    "poplar",
)


@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner_keeps_outputs_and_verify_compares_them(planner):
    model = Tagger(as_dict)
    made = plan(model, BATCH, CLUSTER, planner=planner, outputs=ALL)
    assert set(outputs_of(made.program)) == {"logits", "words", "best", "nested.0", "nested.1.0", "norm"}
    assert verify(model, BATCH, made).ok
    read = Plan.parse(str(made))
    assert (read.program, read.returned) == (made.program, made.returned)


APART = Cluster.parse("""
[network]
bandwidth_gbit_per_s = 1
[[machine]]
devices = [{ cpu_share = 0.6 }]
[[machine]]
devices = [{ cpu_share = 0.3, count = 2 }]
""")


@pytest.mark.parametrize("planner", ["segments", "poplar", "hap"])
def test_a_rank_without_samples_shows_what_has_no_rows(planner):
    """Its share became 0 after the program was made: it showed an empty tensor, of which a mean is NaN."""
    model = Tagger(lambda loss, logits, _: dict(loss=loss, mean=logits.mean((0, 1)), worst=logits.amax()))
    made = plan(model, BATCH, APART, planner=planner, outputs=("mean", "worst"))
    assert 0 in dict(made.program.ratios)["r0"]
    for i in outputs_of(made.program).values():
        assert made.program.participants(made.program.types[i.inputs[0]]) == (0, 1, 2)
    assert verify(model, BATCH, made).ok


class Shown(Language):
    """Returns logits beside the loss."""

    def forward(self, ids, labels):
        h = self.table(ids)
        for block in self.blocks:
            h = block(h)
        logits = self.head(h)
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_a_pipeline_is_not_planned_with_outputs():
    """No rank has the rows of all micro-batches. Without outputs the same stages are a plan."""
    chains = {
        outputs: cut_into(trace(Shown(), batch(), outputs=outputs).graph, THREE_STAGES, COSTS)
        for outputs in ((), ("logits",))
    }
    assert pipelined(chains[()], 2).order is not None
    with pytest.raises(PlanError, match="micro-batches cannot run this program"):
        pipelined(chains["logits",], 2)


def programs(outputs: tuple[str, ...] = ("logits",)):
    graph = trace(Tagger(as_dict), BATCH, outputs=outputs).graph
    return data_parallel(graph, CostModel(CLUSTER), (0.5, 0.25, 0.25))


def test_micro_steps_put_their_rows_together():
    graph = trace(Tagger(as_dict), BATCH, outputs=("logits", "words")).graph
    program = data_parallel(graph, CostModel(CLUSTER), (0.5, 0.25, 0.25))
    steps = (MicroBatch(4, 2, 2), *[MicroBatch(2, 2, 1)] * 2)
    made = Plan(program, "test", 0.0, (), "", graph_fingerprint=graph.fingerprint, micro_batches=steps)
    assert verify(Tagger(as_dict), BATCH, made).ok


def test_a_wrong_output_does_not_verify():
    text = str(programs())
    assert 'output("logits", %linear_1, rows=true)' in text
    spoilt = text.replace('output("logits", %linear_1', 'output("logits", %spoilt').replace(
        "  output(", "  %spoilt = aten.relu(%linear_1) : f32[12, 4, 5] S(0)@r0\n  output("
    )
    report = verify(Tagger(as_dict), BATCH, parse_program(spoilt))
    assert not report.ok and report.worst == "output logits"


def refusal(text: str) -> str:
    with pytest.raises((VerificationError, ParseError)) as caught:
        check_program(parse_program(text))
    return str(caught.value)


def test_the_checker_refuses_what_ranks_cannot_show():
    text = str(programs())
    shown = 'output("logits", %linear_1, rows=true)'
    assert "given twice" in refusal(text.replace(shown, f"{shown}\n  {shown}"))
    assert "no output" in refusal(text.replace(shown, 'output("logits")'))
    assert "only whether it has rows" in refusal(text.replace("rows=true", "rows=1"))
    assert "not cut as samples are" in refusal(text.replace(", rows=true", ""))
    loss = text.splitlines()[-2].split("%")[-1]
    assert "no addend" in refusal(text.replace(shown, f'output("logits", %{loss})'))
    assert "rows of this output are no samples" in refusal(
        text.replace(shown, 'output("logits", %head.bias, rows=true)')
    )


def test_outputs_cut_by_classes_are_gathered():
    graph = trace(Tagger(as_dict), BATCH, outputs=("logits", "words")).graph
    program = tensor_parallel(graph, CostModel(CLUSTER), (0.5, 0.25, 0.25))
    check_program(program)
    assert verify(Tagger(as_dict), BATCH, program).ok


def test_outputs_count_in_memory():
    """Those of this step, which nothing else keeps, and of the one before, which a loop still holds."""
    costs = CostModel(CLUSTER)
    kept, without = (PeakMemory(costs).peaks(programs(names)) for names in (("nested",), ()))
    size_bytes = 12 * (5 + 4 * 5) * 4
    for rank, share in enumerate((0.5, 0.25, 0.25)):
        assert kept[rank] - without[rank] >= 2 * share * size_bytes


def test_the_program_names_the_samples_of_outputs_however_it_is_printed():
    program = programs(ALL)
    assert parse_program(str(program)) == replace(
        program, instructions=tuple(replace(i, location="") for i in program.instructions)
    )


def test_a_nested_tuple_has_its_own_order_whatever_that_of_the_program():
    paths = ["hidden.10", "counts.2", "hidden.9", "counts.0", "more.b.1", "more.b.0"]
    values = {path: torch.tensor(n) for n, path in enumerate(paths)}
    assert trees(values) == {"hidden": (2, 0), "counts": (3, 1), "more": {"b": (5, 4)}}
