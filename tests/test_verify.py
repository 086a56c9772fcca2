"""What ``verify`` must see: each is a fault that was put in, with and without dropout."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from small_graphs import THREE, cluster
from torch import nn

from mixmesh.cost import CostModel
from mixmesh.errors import InputError
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import make_ratio, parse_program
from mixmesh.measure.verification import TOLERANCE_F64, verify
from mixmesh.runtime import optimizers
from mixmesh.search.baselines import data_parallel

COSTS = CostModel(cluster(THREE))
RATIO = make_ratio((0.5, 0.3, 0.2))


class Scaled(torch.autograd.Function):
    """The identity, with a gradient that is not."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0, factor: float = 1.0) -> None:
        super().__init__()
        self.dropout, self.factor = dropout, factor
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x, y):
        h = F.dropout(self.norm(self.first(x)).relu(), self.dropout, self.training)
        if self.factor != 1.0:
            h = Scaled.apply(h, self.factor)
        return F.cross_entropy(self.last(h), y)


BATCH = {"x": torch.randn(10, 6, generator=torch.Generator().manual_seed(0)), "y": torch.arange(10) % 4}


def model_of(**options) -> Net:
    torch.manual_seed(1)
    return Net(**options)


def program_of(model: nn.Module, batch=BATCH):
    graph = trace(model, batch)
    return graph, data_parallel(graph.graph, COSTS, RATIO)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_an_honest_plan_is_equal_to_the_last_digits(dropout):
    model = model_of(dropout=dropout)
    traced, program = program_of(model)
    before = copy.deepcopy(model.state_dict())
    report = verify(model, BATCH, program, traced=traced, steps=3)
    assert report.ok and report.differs_in == "" and report.steps == 3, report
    errors = (report.max_loss_error_f64, report.max_gradient_error_f64, report.max_update_error)
    assert max(errors) < 1e-12, report
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


@pytest.mark.parametrize("factor", [1.009, 1.5])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
class TestWrongGradients:
    def test_of_the_trace(self, dropout, factor):
        traced, program = program_of(model_of(dropout=dropout))
        report = verify(model_of(dropout=dropout, factor=factor), BATCH, program, traced=traced)
        assert not report.ok and report.differs_in == "trace", report
        assert report.max_gradient_error_f64 > 0.5 * (factor - 1)

    def test_of_a_hook_that_the_trace_knows_nothing_of(self, dropout, factor):
        model = model_of(dropout=dropout)
        traced, program = program_of(model)
        model.last.weight.register_hook(lambda gradient: gradient * factor)
        report = verify(model, BATCH, program, traced=traced)
        assert not report.ok and report.differs_in == "trace" and report.worst == "last.weight", report

    def test_of_the_program(self, dropout, factor):
        model = model_of(dropout=dropout)
        traced, program = program_of(model)
        text = str(program)
        name, kind = re.search(r"%(\S+) = aten.relu\(\S+\) : (.*)", text).groups()
        line = re.search(r".*aten.relu.*\n", text)[0]
        rest = (
            text[text.index(line) + len(line) :]
            .replace(f"%{name},", "%wrong,")
            .replace(f"%{name})", "%wrong)")
        )
        inserted = (
            f"  %more = aten.mul.Tensor(%{name}, {factor - 1}) : {kind}\n"
            f"  %still = aten.detach(%more) : {kind}\n"
            f"  %sum = aten.add.Tensor(%{name}, %more) : {kind}\n"
            f"  %wrong = aten.sub.Tensor(%sum, %still) : {kind}\n"
        )
        wrong = parse_program(text[: text.index(line) + len(line)] + inserted + rest)
        report = verify(model, BATCH, wrong, traced=traced)
        assert not report.ok and report.differs_in == "plan", report
        assert report.max_loss_error_f64 < TOLERANCE_F64 < report.max_gradient_error_f64


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_buffer_that_is_not_updated(dropout):
    model = model_of(dropout=dropout)
    traced, program = program_of(model)
    kept = tuple(i for i in program.instructions if i.op != "update" or i.args[0] != "norm.running_mean")
    assert len(kept) == len(program.instructions) - 1
    report = verify(model, BATCH, replace(program, instructions=kept), traced=traced)
    assert not report.ok and report.differs_in == "plan" and report.worst == "norm.running_mean", report


class Casts(nn.Module):
    """Whatever dtypes a module names or asks for, it is compared in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4, dtype=torch.bfloat16)
        self.lstm = nn.LSTM(4, 4, 2, dropout=0.3, batch_first=True)
        self.register_buffer("phase", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, x, y):
        h = self.first(x.half().float()) + torch.finfo(x.dtype).eps * 1e4
        h = torch.view_as_real(torch.view_as_complex(h.view(-1, 4, 2)) * self.phase).flatten(1)
        with torch.autocast("cpu", torch.bfloat16):
            h = self.last(F.layer_norm(h, (8,))).float() * torch.tensor(0.1)
        h, _ = self.lstm(h.unsqueeze(1) + torch.arange(3)[:, None] / 3)
        h = F.scaled_dot_product_attention(h, h, h, dropout_p=0.2) + torch.randn_like(h)
        return F.cross_entropy(h.mean(1), y)


def test_dtypes_that_the_module_names():
    torch.manual_seed(0)
    model = Casts()
    batch = {**BATCH, "x": BATCH["x"].half().float()}
    traced, program = program_of(model, batch)
    report = verify(model, batch, program, traced=traced, steps=2)
    assert report.ok and report.max_gradient_error_f64 < 1e-11, report
    assert report.max_gradient_error > 1e-6, "its own precision rounds"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_eps_of_a_norm_is_rounded_as_by_the_module(dtype):
    class Normed(Net):
        def forward(self, x, y):
            h = F.rms_norm(1e-3 * self.first(x).to(dtype), (8,), None, 1e-5)
            return F.cross_entropy(self.last(h.float()), y)

    model = Normed()
    traced, program = program_of(model)
    report = verify(model, BATCH, program, traced=traced)
    assert report.ok and report.max_gradient_error_f64 < 1e-13, report


class Picked(Net):
    def forward(self, x, y):
        return -self.last(self.first(x)).log_softmax(-1).gather(1, y[:, None]).mean()


@pytest.mark.parametrize("kind", [Net, Picked])
def test_a_batch_with_which_the_model_fails_on_one_device(kind):
    model, batch = kind(), {**BATCH, "y": BATCH["y"] + 1}  # there is no class 4
    traced, program = program_of(model, batch)
    with pytest.raises(InputError, match="fails on this batch") as caught:
        verify(model, batch, program, traced=traced)
    assert "test_verify.py:" in caught.value.where and "out of bounds" in caught.value.got


class Reshaped(nn.Module):
    """Changes shapes in place, of float32 and of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)

    def forward(self, x, y):
        h = self.first(x)
        is_large = (h > 0).any(1)
        is_large.unsqueeze_(1)
        places = y.clone().unsqueeze_(0).t_()
        return F.cross_entropy(h.unsqueeze_(0).squeeze_(0) * is_large, places.squeeze_(1))


def test_shapes_that_change_in_place():
    torch.manual_seed(0)
    model = Reshaped()
    traced, program = program_of(model, BATCH)
    report = verify(model, BATCH, program, traced=traced)
    assert report.ok, report


def convolutions() -> nn.Module:
    class Pictures(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))

        def forward(self, x, y):
            return F.cross_entropy(self.layers(x).mean((2, 3)), y)

    torch.manual_seed(0)
    return Pictures().to(memory_format=torch.channels_last)


PIXELS = torch.randn(10, 3, 6, 6, generator=torch.Generator().manual_seed(2))
PICTURES = {"x": PIXELS, "y": torch.arange(10) % 4}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_real_steps_of_the_optimizer_are_made(kind, monkeypatch):
    """Gradients that do not lie in memory as their parameters do spoil the step of a fused kernel."""
    model = convolutions()
    traced, program = program_of(model, PICTURES)
    make = lambda params: kind(params, lr=0.01)  # noqa: E731
    report = verify(model, PICTURES, program, traced=traced, optimizer=make, steps=2)
    assert report.ok and report.max_update_error < 1e-12, report
    monkeypatch.setattr(optimizers, "lay_out", lambda optimizer: None)
    report = verify(model, PICTURES, program, traced=traced, optimizer=make)
    assert not report.ok and report.differs_in == "optimizer", report
    assert report.max_update_error > 1e-3 and report.max_gradient_error_f64 < TOLERANCE_F64


def test_an_optimizer_that_cannot_work_on_shards():
    model = model_of()
    traced, program = program_of(model)
    with pytest.raises(InputError, match="LBFGS"):
        verify(model, BATCH, program, traced=traced, optimizer=torch.optim.LBFGS)


class Resized(nn.Module):
    """Makes its positions anew for another length, as ConViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("positions", torch.zeros(1), persistent=False)

    def forward(self, x):
        if len(self.positions) != x.shape[1]:
            self.positions = torch.arange(x.shape[1], dtype=x.dtype)
        return (self.layer(x) * self.positions[:, None]).square().mean()


def test_a_buffer_that_gets_another_shape_and_that_no_step_reads():
    model, batch = Resized(), (torch.randn(12, 5, 4),)
    program = data_parallel(trace(model, batch).graph, COSTS, RATIO)
    assert verify(model, batch, program).ok
