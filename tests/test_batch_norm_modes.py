"""Batch norm with averages over all batches, with given statistics, and with no statistics kept: as on one
device, on unequal shards."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from gloo_world import assert_passed, run_world
from programs import make_plan
from small_graphs import THREE, cluster
from torch import nn

from mixmesh.cost import CostModel
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import make_ratio, samples_of
from mixmesh.measure.verification import verify
from mixmesh.runtime.interpret import interpret
from mixmesh.runtime.parallel import parallelize
from mixmesh.search.baselines import data_parallel

COSTS = CostModel(cluster(THREE))
RATIOS = {"unequal": (0.5, 0.3, 0.2), "none on one": (0.6, 0.0, 0.4), "few on one": (0.02, 0.9, 0.08)}
STEPS = 3


class Net(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6, **options)
        self.head, self.norm2 = nn.Linear(6, 4), nn.BatchNorm1d(4, **options)

    def forward(self, x, y):
        x = self.norm1(self.first(x)).relu()
        return F.cross_entropy(self.norm2(self.head(x.mean((2, 3)))), y)


def averaging() -> Net:
    return Net(momentum=None)


def averaging_one() -> Net:
    """One layer of two: the other moves by a momentum."""
    model = Net(momentum=0.3)
    model.norm2.momentum = None
    return model


def evaluated() -> Net:
    """All of the model: what its dropout or batch norm does in training it does not do."""
    return Net().eval()


def averaging_evaluated() -> Net:
    return averaging().eval()


def frozen() -> Net:
    """Layers whose statistics stay while the model trains."""
    model = Net()
    for norm in (model.norm1, model.norm2):
        norm.eval()
    return model


def frozen_one() -> Net:
    """One layer that stays as it is, with its parameters."""
    model = Net()
    model.norm1.eval().requires_grad_(False)
    return model


def nothing_kept() -> Net:
    return Net(track_running_stats=False).eval()


MODELS = {
    f.__name__: f
    for f in (averaging, averaging_one, evaluated, averaging_evaluated, frozen, frozen_one, nothing_kept)
}


def model_of(name: str) -> Net:
    """In float64, with statistics that some training has left."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    for norm in (model.norm1, model.norm2):
        if norm.running_mean is not None:
            norm.running_mean.normal_(0.5, 0.2)
            norm.running_var.uniform_(0.5, 2.0)
            norm.num_batches_tracked += 7
    return model


def batch(step: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(10, 3, 6, 6, generator=g, dtype=torch.float64) * (1 + step) + step,
        "y": torch.arange(10) % 4,
    }


def program_of(name: str, ratio=RATIOS["unequal"]):
    return data_parallel(trace(model_of(name), batch(0)).graph, COSTS, make_ratio(ratio))


@pytest.mark.parametrize("ratio", RATIOS.values(), ids=RATIOS)
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_one_device(name, ratio):
    report = verify(model_of(name), batch(0), program_of(name, ratio), steps=STEPS)
    assert report.ok and report.max_gradient_error_f64 < 1e-9, report


@pytest.mark.parametrize("name", MODELS)
def test_buffers_follow_from_batch_to_batch(name):
    """Of batches that differ in mean and scale: an average of the last ones would not do."""
    model, program = model_of(name), program_of(name)
    tensors = {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
    for step in range(STEPS):
        tensors |= interpret(program, tensors, batch(step)).buffers
        with torch.no_grad():
            model(**batch(step))
        for key, want in model.named_buffers():
            torch.testing.assert_close(tensors[key], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["evaluated", "averaging_evaluated", "frozen"])
def test_given_statistics_stay(name):
    """No sum over ranks is needed, so parts of a batch may follow each other."""
    program = program_of(name)
    assert not any(i.op in ("update", "mixmesh.moments") for i in program.instructions)
    assert samples_of(program).counts == (5, 3, 2)


class Training:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, _) -> None:
        single = model_of(self.name)
        mine = copy.deepcopy(single)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (single, mine)]
        plan = make_plan(program_of(self.name), cluster(THREE))
        model, optimizers[1] = parallelize(mine, optimizers[1], plan, device="cpu", timeout_s=60)
        for step in range(STEPS):
            for m, optimizer in zip((single, model), optimizers):
                m(**batch(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
        found = model.full_state_dict()
        for key, want in single.state_dict().items():
            torch.testing.assert_close(
                found[key], want, rtol=1e-9, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}"
            )


CHECKS = {name: Training(name) for name in MODELS}


@pytest.fixture(scope="module")
def world():
    return run_world(3, CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_processes_train_as_one_device(world, name):
    assert_passed(world[name])
