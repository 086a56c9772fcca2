"""A rank that is alone runs on the shown parameters, and everything around the model sees one device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from plans import Mlp, batch, close, same_weights
from test_gloo import adamw, same_gradients

import mixmesh
from mixmesh.base.launched import is_launched
from mixmesh.cluster import Cluster
from mixmesh.errors import InputError, MixmeshError
from mixmesh.frontend.trace import trace
from mixmesh.planner import make_plan

ONE = Cluster.parse('[[machine]]\nname = "a"\ndevices = [{ cpu_share = 1.0 }]\n')


@pytest.fixture
def one_rank(monkeypatch):
    for name in ("RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


@pytest.fixture
def models(one_rank):
    """A model with its optimizer, and the same in parallel on one rank."""
    plan = make_plan(trace(Mlp(), batch(0)), ONE, planner="single")
    single, other = Mlp(), Mlp()
    return single, adamw(single.parameters()), *mixmesh.parallelize(other, adamw(other.parameters()), plan)


def test_the_graph_begins_at_the_shown_parameters(models):
    _, _, model, _ = models
    loss, seen, below = model(**batch(0)), set(), []
    below.append(loss.grad_fn)
    while below:
        node = below.pop()
        seen.add(type(node).__name__)
        below += [n for n, _ in node.next_functions if n is not None and n not in below]
    assert "MeanBackward0" in seen and "_ModelBackward" not in seen


def test_steps_with_a_penalty_and_accumulation(models):
    single, optimizer, model, parallel = models
    for step in range(3):
        for m, o in ((single, optimizer), (model, parallel)):
            o.zero_grad()
            m(**batch(step)).backward()
            loss = m(**batch(step + 1))
            loss /= 2
            (loss + 0.01 * sum(p.square().sum() for p in m.parameters())).backward()
            o.step()
    same_weights(single, model)


def test_gradients_asked_for(models):
    single, _, model, _ = models
    names = [n for n, _ in single.named_parameters() if n != "unused"]
    expected = torch.autograd.grad(single(**batch(0)), [single.get_parameter(n) for n in names])
    got = torch.autograd.grad(model(**batch(0)), [model.get_parameter(n) for n in names])
    for name, e, g in zip(names, expected, got):
        close(g, e, name)
    assert all(p.grad is None for p in model.parameters())


def test_gradients_of_inputs(models):
    single, _, model, _ = models
    mine, whole = batch(0), batch(0)
    for inputs, m in ((whole, single), (mine, model)):
        inputs["x"].requires_grad_()
        (3 * m(**inputs)).backward()
    close(mine["x"].grad, whole["x"].grad)
    same_gradients(single, model)


class Scaled(Mlp):
    """Its scale is used in training alone."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x, y):
        return super().forward(x * self.scale if self.training else x, y)


@pytest.mark.parametrize("takes_given", (False, True))
def test_a_parameter_without_a_gradient_in_this_call(one_rank, takes_given):
    """It has None as on one device, also where the graph has a node because an input gets a gradient."""
    single, model = Scaled(), Scaled()
    plan = make_plan(trace(model, batch(0)), ONE, planner="single")
    model, _ = mixmesh.parallelize(model, None, plan)
    for m in (single, model):
        inputs = batch(0)
        inputs["x"].requires_grad_(takes_given)
        m.eval()(**inputs).backward()
        assert m.get_parameter("scale").grad is None
    close(model.get_parameter("fc1.weight").grad, single.fc1.weight.grad)


def test_all_parameters_frozen(models):
    _, _, model, _ = models
    model.requires_grad_(False)
    assert not model(**batch(0)).requires_grad


def test_what_is_refused(models):
    _, _, model, _ = models
    with pytest.raises(MixmeshError, match="has no gradient itself"):
        torch.autograd.grad(model(**batch(0)), [model.get_parameter("fc1.weight")], create_graph=True)
    loss = model(**batch(0))
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(MixmeshError, match="was called on this loss before"):
        loss.backward()


LAUNCHERS = [("SLURM_STEP_NUM_TASKS", "srun"), ("OMPI_COMM_WORLD_SIZE", "mpirun"), ("PMI_SIZE", "mpiexec")]


@pytest.mark.parametrize("name, launcher", LAUNCHERS)
def test_processes_that_were_not_told_their_rank(monkeypatch, name, launcher):
    """``srun python train.py`` sets no RANK: each process would train by itself, into the same file."""
    monkeypatch.delenv("RANK", raising=False)
    model, optimizer = Mlp(), None
    monkeypatch.setenv(name, "4")
    for started in (lambda: mixmesh.prepare(model, optimizer, [batch(0)]), is_launched):
        with pytest.raises(InputError) as caught:
            started()
        assert f"{launcher} started 4 processes" in caught.value.message
        assert "torchrun" in caught.value.hint[0] and f"env -u {name}" in caught.value.hint[1]
    monkeypatch.setenv(name, "1")
    assert mixmesh.prepare(model, optimizer, [batch(0)])[0] is model and not is_launched()


def test_a_command_under_srun(tmp_path):
    job = tmp_path / "job.py"
    job.write_text("raise AssertionError('the job is not read')")
    given = {name: value for name, value in os.environ.items() if name != "RANK"}
    ran = subprocess.run(
        [sys.executable, "-m", "mixmesh", "run", str(job)],
        env=given | {"SLURM_STEP_NUM_TASKS": "2"}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 2 and "srun started 2 processes" in ran.stderr


@pytest.mark.parametrize("num_devices, is_told", [(0, False), (1, False), (4, True)])
def test_devices_that_one_process_leaves_unused(monkeypatch, capsys, num_devices, is_told):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("mixmesh.training.preparation.script.device_count", lambda: num_devices)
    mixmesh.prepare(Mlp(), None, [batch(0)])
    assert ("4 devices are here" in capsys.readouterr().err) == is_told
