"""``mixmesh.prepare``: a script for one device, with one line more, under torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType

import numpy as np
import pytest
import torch
from pipelines import THREE_STAGES, batch, chain, model_of, pipelined
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    TensorDataset,
)
from warm_python import python

import mixmesh
from mixmesh.cli.prepare import check_data
from mixmesh.errors import InputError, TraceError
from mixmesh.frontend.job import Job
from mixmesh.frontend.trace import trace
from mixmesh.frontend.trace.own_generators import generators_in, marks_of
from mixmesh.runtime.batches import other_dtype
from mixmesh.training.preparation import refusals, script, start
from mixmesh.training.preparation.loading import depends_on_others, example_batch, same_random_numbers
from mixmesh.training.preparation.outside_loss import check_has_targets, needed_names, with_loss
from mixmesh.training.preparation.refusals import check_gives_all, check_last_batch, check_workers
from mixmesh.training.preparation.script import made_inputs, maker_like, naming_inputs, taken_by
from mixmesh.training.preparation.untouched import untouched

TRAINING_LOOP = Path(__file__).parents[1] / "docs" / "guide" / "training-loop.md"

SCRIPT = """
import json, os, sys
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
import mixmesh

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 5)).double()
data = TensorDataset(torch.randn(51, 20).double(), torch.randint(5, (51,)))
loader = DataLoader(data, batch_size=10, shuffle=True, num_workers={workers},
                    generator=torch.Generator().manual_seed(7))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
model, optimizer, loader = mixmesh.prepare(
    model, optimizer, loader, loss=F.cross_entropy, profile_s=0, planner="{planner}", cache="{cache}")
losses, rows = [], 0
for epoch in range(2):
    for x, y in loader:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        rows += len(x)
text = json.dumps({{"losses": losses, "rows": rows, "batches": len(loader)}})
print(text + "\\n", end="", flush=True)  # in one piece: the ranks share their output
"""


def run_script(tmp_path: Path, world_size: int, planner: str = "auto", workers: int = 0) -> list[dict]:
    """What each rank of the script printed; without torchrun for a world of 0."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(planner=planner, cache=tmp_path / "cache", workers=workers))
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(world_size)] if world_size else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python(), *launcher, str(script)],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(("planner", "workers"), [("ddp-even", 2), ("tensor-parallel", 0)])
def test_a_script_trains_as_on_one_device(tmp_path, planner, workers):
    (single,) = run_script(tmp_path, 0)
    ranks = run_script(tmp_path, 2, planner, workers)
    assert len(ranks) == 2 and single["rows"] == 102
    for rank in ranks:
        torch.testing.assert_close(rank["losses"], single["losses"], rtol=1e-9, atol=1e-9)
        assert rank["batches"] == single["batches"] == 6
    if planner == "ddp-even":  # each loads its own rows alone, the second none of the last batch of one
        assert sorted(rank["rows"] for rank in ranks) == [50, 52]


def test_a_loss_outside_keeps_the_model_as_it_is():
    model = nn.Bilinear(3, 3, 2)
    wrapped = with_loss(model, F.mse_loss)
    a, b, y = torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 2)
    expected = F.mse_loss(model(a, b), y)
    assert torch.equal(wrapped(a, b, y), expected)
    assert torch.equal(with_loss(model, F.mse_loss)(input1=a, input2=b, target=y), expected)
    assert isinstance(wrapped, nn.Bilinear) and type(model) is nn.Bilinear
    assert dict(wrapped.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert all(p is q for p, q in zip(wrapped.parameters(), model.parameters()))


def test_a_forward_of_the_object_alone_is_called():
    """As Accelerate gives a model under mixed precision."""
    x, y = torch.ones(4, 3), torch.ones(4, 2)
    for bind in (MethodType, partial):
        model = nn.Linear(3, 2)
        model.forward = bind(lambda self, input: 2 * nn.Linear.forward(self, input), model)
        expected = F.mse_loss(model(x), y)
        assert torch.equal(with_loss(model, F.mse_loss)(x, y), expected)


def test_a_forward_that_takes_anything_is_refused():
    class Anything(nn.Module):
        def forward(self, *values):
            return values[0]

    with pytest.raises(mixmesh.InputError, match="does not say"):
        with_loss(Anything(), F.mse_loss)(torch.ones(2, 2), torch.ones(2, 2))


def test_a_loss_outside_gives_what_the_model_returns_if_it_is_asked_for():
    model, x, y = nn.Linear(3, 2), torch.randn(4, 3), torch.randint(2, (4,))
    out = with_loss(model, F.cross_entropy, ("logits",))(x, y)
    assert torch.equal(out.loss, F.cross_entropy(model(x), y)) and torch.equal(out.logits, model(x))
    assert out["logits"] is out.logits and torch.equal(out.gather().logits, out.logits) and out.rows is None

    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    out = with_loss(Pair(3, 2), lambda made, y: F.cross_entropy(made[0], y), (1,))(x, y)
    assert out[1] is x and out.loss.ndim == 0


def test_on_one_device_the_whole_model_is_the_users_own():
    model = nn.Linear(3, 2)
    for made in (model, with_loss(model, F.cross_entropy)):
        with mixmesh.whole(made) as m:
            assert m is model


KINDS = ("SGD", "Adam", "AdamW", "NAdam", "RMSprop", "Adagrad", "Adafactor", "Muon")


@pytest.mark.parametrize("kind", [*KINDS, "own"])
def test_the_profiled_optimizer_is_of_the_same_settings(kind):
    """AdamW keeps a default that is no argument of it."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    if kind == "own":

        class Own(torch.optim.SGD):
            def __init__(self, params, lr=0.1, **others):
                super().__init__(params, lr=lr, **others)

        given = Own([weight], lr=0.3, momentum=0.5)
    else:
        given = getattr(torch.optim, kind)([weight], lr=0.3)
    made = maker_like(given)([torch.nn.Parameter(torch.ones(3, 2))])
    assert type(made) is type(given) and made.defaults == given.defaults


def test_an_optimizer_with_an_argument_that_it_does_not_keep_is_not_made_again():
    class Ascending(torch.optim.Optimizer):
        """Steps by another optimizer, as SAM."""

        def __init__(self, params, base, rho=0.05, **others):
            super().__init__(params, {"rho": rho, **others})
            self.base = base(self.param_groups, **others)

    weight = torch.nn.Parameter(torch.ones(2, 2))
    assert maker_like(Ascending([weight], torch.optim.SGD, lr=0.1)) is None


def test_values_that_the_loss_needs_are_not_for_optional_arguments():
    class Masked(nn.Linear):
        def forward(self, x, mask=None):
            return super().forward(x if mask is None else x * mask)

    class Called(nn.Module):  # without a forward pass, as timm's JsdCrossEntropy
        def __call__(self, made, target):
            return F.mse_loss(made, target)

    model, x, y, mask = Masked(3, 2), torch.randn(4, 3), torch.randn(4, 2), torch.rand(4, 1)
    wrapped = with_loss(model, F.mse_loss)
    assert torch.equal(wrapped(x, y), F.mse_loss(model(x), y))
    assert torch.equal(wrapped(x, mask, y), F.mse_loss(model(x, mask), y))
    assert torch.equal(wrapped(x, mask, target=y), F.mse_loss(model(x, mask), y))
    assert torch.equal(wrapped(x, y, mask=mask), F.mse_loss(model(x, mask), y))
    for criterion in (nn.MSELoss(), Called()):
        assert torch.equal(with_loss(model, criterion)(x, y), F.mse_loss(model(x), y))
    both = with_loss(model, lambda made, y, weight: (weight * (made - y)).mean())
    assert torch.equal(both(x, y, mask), (mask * (model(x) - y)).mean())


class Penalised(nn.Module):
    """A model that leaves a penalty for its loss."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.layer, self.penalty = nn.Linear(4, 1), 0.0

    def forward(self, x):
        out = self.layer(x)
        self.penalty = out.square().mean()
        return out


def test_a_loss_reads_what_the_model_leaves_in_attributes():
    net = Penalised()
    model = with_loss(net, lambda out, y: (out - y).square().mean() + net.penalty)
    x, y = torch.randn(6, 4), torch.randn(6, 1)
    out = net.layer(x)
    torch.testing.assert_close(model(x, y), (out - y).square().mean() + out.square().mean())
    traced = trace(model, (x, y))
    assert [n.op for n in traced.graph.nodes].count("aten.mean") == 2
    assert traced.left == ("penalty",) and net.penalty == 0.0


def test_a_batch_has_more_than_the_model_and_its_loss_take():
    """Without a loss the rest is for the loop; with one words are, at the end, and other values are not."""
    linear, x, y, words = nn.Linear(3, 2), torch.ones(2, 3), torch.ones(2), ["a", "b"]
    assert taken_by(linear, None, (x, y, words)) == (x,)
    assert taken_by(linear, None, {"input": x, "y": y}) == {"input": x}
    assert taken_by(linear, F.cross_entropy, (x, y, words)) == (x, y)
    assert taken_by(linear, F.cross_entropy, (x, y, y)) == (x, y, y)


def test_labels_that_the_model_and_the_loss_take():
    """As of the models of transformers, whose forward also has ``**kwargs``."""

    class Head(nn.Linear):
        def forward(self, x, labels=None, **kwargs):
            assert labels is not None and set(kwargs) == {"more"}
            return super().forward(x)

    model, x, y = Head(3, 2), torch.ones(2, 3), torch.tensor([0, 1])
    made = with_loss(model, lambda out, labels, weight: F.cross_entropy(out, labels, weight=weight))
    got = made(x=x, labels=y, weight=torch.tensor([1.0, 3.0]), more=1)
    expected = F.cross_entropy(nn.Linear.forward(model, x), y, weight=torch.tensor([1.0, 3.0]))
    assert torch.equal(got, expected)


def test_inputs_are_what_the_loop_makes_of_a_batch():
    def noised(x):
        return x + np.random.rand(), x

    np.random.seed(3)
    with same_random_numbers():
        first = made_inputs(noised, (torch.ones(2),))
    assert torch.equal(first[0], noised(torch.ones(2))[0])  # numpy's numbers too are drawn again
    (alone,) = made_inputs(lambda x: 2 * x, torch.ones(2))
    assert torch.equal(alone, torch.full((2,), 2.0))
    made = made_inputs(lambda x, y: {"x": x, "y": y}, {"y": 1, "x": 2})
    assert made == {"x": 2, "y": 1}


@pytest.mark.parametrize(
    ("batch", "call", "write"),
    [
        ({"x": 1, "y": 2}, r"inputs\(x, y\): values by their keys", r"inputs=lambda \*\*batch"),
        ((1, 2, 3), r"inputs\(a, b, c\): one argument for each value", r"inputs=lambda a, b, c: "),
    ],
)
def test_inputs_that_take_a_batch_as_one_value_are_refused(batch, call, write):
    """With how they are called, in place of Python's own words."""
    with pytest.raises(mixmesh.InputError, match=f"(?s){call}.*{write}"):
        made_inputs(lambda batch: batch["x"], batch)
    with pytest.raises(TypeError, match="of the function's own"):
        made_inputs(fails, batch)


def test_a_loss_of_the_input_itself_is_told_to_pass_it_twice():
    """As that of an autoencoder whose loader gives the input alone."""
    x = torch.ones(4, 3)
    with pytest.raises(mixmesh.InputError, match=r"inputs=lambda input: \(input, input\)"):
        check_has_targets(nn.Linear(3, 3), F.mse_loss, (x,))
    check_has_targets(nn.Linear(3, 3), F.mse_loss, (x, x))
    check_has_targets(nn.Linear(3, 3), F.mse_loss, {"input": x})
    check_has_targets(nn.Linear(3, 3), lambda out: out.mean(), (x,))


def test_the_hint_for_a_call_with_other_arguments_comes_first():
    """Such as a loss of two values for a loader that gives three; for any other error it comes last."""
    batch = torch.ones(4, 3), torch.zeros(4, 2), torch.ones(4)
    short, wrong = (lambda out, y: out.sum()), (lambda out, y, weight: out @ y)
    for loss, place in ((short, 0), (wrong, -1)):
        with pytest.raises(TraceError) as caught, naming_inputs(batch):
            trace(with_loss(nn.Linear(3, 2), loss), batch)
        assert "inputs=lambda a, b, c: (a, ...)" in caught.value.hint[place] and len(caught.value.hint) > 1
        assert 'in Accelerate planning={"batch": (a, ...)}' in caught.value.hint[place]


def test_a_loader_that_gives_less_than_forward_takes_is_told_to_name_what_it_is_called_with():
    """As in training a diffusion model, whose loop draws the second argument."""
    batch = {"images": torch.ones(4, 3)}
    with pytest.raises(TraceError, match="does not take the batch") as caught, naming_inputs(batch):
        trace(nn.Bilinear(3, 2, 1), (batch,))
    assert "inputs=lambda images: (images, ...)" in caught.value.hint[0] and len(caught.value.hint) > 1


def test_a_target_that_is_passed_for_a_mask_is_told_first():
    """As to a ViT of timm, whose loss is outside of it."""

    class Masked(nn.Linear):
        def forward(self, x, attn_mask=None):
            return super().forward(x) if attn_mask is None else super().forward(x) + attn_mask

    model, batch = Masked(3, 2), (torch.ones(4, 3), torch.zeros(4))
    with pytest.raises(TraceError) as caught, naming_inputs(batch, len(needed_names(model))):
        trace(model, batch)
    assert "inputs=lambda a, b: (a, ...)" in caught.value.hint[0] and len(caught.value.hint) > 1


def fails(*values, **named):
    raise TypeError("of the function's own")


@pytest.mark.parametrize("is_compiled", [False, True])
def test_on_one_device_a_block_of_the_whole_model_is_without_the_loss(is_compiled):
    original = nn.Linear(3, 2)
    model = with_loss(original, F.mse_loss)
    if is_compiled:
        model.compile(backend="eager")
    x, y = torch.ones(4, 3), torch.zeros(4, 2)
    expected = F.mse_loss(original(x), y)
    assert torch.equal(model(x, y), expected)
    with mixmesh.whole(model) as m:
        assert m is original and torch.equal(model(x), original(x))
    assert torch.equal(model(x, y), expected)


def test_a_state_on_one_device_is_written_as_by_torch(tmp_path):
    state = {"model": nn.Linear(3, 2).state_dict(), "losses": [1.0, 2.0]}
    mixmesh.save(state, tmp_path / "file")
    kept = torch.load(tmp_path / "file")
    assert torch.equal(kept["model"]["weight"], state["model"]["weight"]) and kept["losses"] == [1.0, 2.0]


def test_saving_on_one_device_is_that_of_torch(tmp_path):
    model = with_loss(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), F.mse_loss)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3), torch.randn(4, 2)).backward()
    optimizer.step()
    parts = {"model": model, "ema": AveragedModel(model), "optimizer": optimizer}
    mixmesh.save(tmp_path / "ours", **parts, epoch=3)
    torch.save({**{name: part.state_dict() for name, part in parts.items()}, "epoch": 3}, tmp_path / "plain")
    ours, plain = (torch.load(tmp_path / name) for name in ("ours", "plain"))
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    assert list(ours) == list(plain)


class Again:
    """Begins anew in every epoch."""

    def __iter__(self):
        return iter([torch.ones(2, 3)])


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("batches", lambda: DataLoader(torch.ones(4, 3))),
        ("batches", lambda: iter(Again())),
        ("batches", lambda: (torch.ones(2, 3) for _ in range(2))),
        ("loader", lambda: [(torch.ones(2, 3), torch.ones(2))]),
        ("train_loader", Again),
    ],
)
def test_a_loader_without_a_state_is_not_saved(tmp_path, name, make):
    with pytest.raises(mixmesh.InputError, match=f"{name} does not know how far it has come") as error:
        mixmesh.save(tmp_path / "file", model=nn.Linear(3, 2), **{name: make()})
    assert f"leave {name} out" in str(error.value) and not (tmp_path / "file").exists()


def test_values_that_are_no_loaders_are_saved(tmp_path):
    values = {
        "loader_seed": 3, "loader_numbers": torch.ones(3), "loader_state": {"epoch": 1},
        "loader_names": ["train", "test"], "logits": [torch.ones(2), torch.zeros(2)],
    }  # fmt: skip
    mixmesh.save(tmp_path / "file", **values)
    kept = torch.load(tmp_path / "file")
    assert list(kept) == list(values) and kept["loader_names"] == values["loader_names"]
    assert torch.equal(kept["loader_numbers"], values["loader_numbers"])


class Around:
    """An optimizer around another one, as people write them."""

    def __init__(self, base):
        self.base, self.param_groups, self.defaults = base, base.param_groups, base.defaults
        self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = {}


@pytest.mark.parametrize(
    ("optimizer", "sampler", "message", "hint"),
    [
        (Around, None, "Around is not made as an optimizer", "optimizer = Around(base)"),
        (
            lambda base: [base, base],
            None,
            "prepare takes one optimizer",
            "mixmesh.prepare(model, None, loader)",
        ),
        (lambda base: torch.optim.LBFGS([nn.Parameter(torch.ones(2))]), None, "LBFGS", "AdamW"),
        (
            lambda base: torch.optim.Adam([*base.param_groups[0]["params"], nn.Parameter(torch.ones(2))]),
            None,
            "holds a parameter that is not the model's",
            "another Adam with the same settings",
        ),
        (
            None,
            {"num_replicas": 2},
            "which prepare would deal out again",
            "DistributedSampler(..., num_replicas=1",
        ),
    ],
)
def test_what_cannot_be_right_is_refused_before_anything_else(monkeypatch, optimizer, sampler, message, hint):
    monkeypatch.setenv("RANK", "0")
    model, data = nn.Linear(3, 2), TensorDataset(torch.ones(8, 3), torch.ones(8, 2))
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, 4, sampler=sampler and DistributedSampler(data, rank=0, **sampler))
    with pytest.raises(mixmesh.InputError, match=message) as error:
        mixmesh.prepare(model, optimizer(base) if optimizer else base, loader, loss=F.mse_loss)
    assert hint in str(error.value)


@pytest.mark.parametrize(
    ("option", "hint"), [({"planner": "ddp-evn"}, "ddp-even"), ({"batch_norm": "lokal"}, "exact")]
)
def test_names_are_refused_before_anything_is_measured(monkeypatch, option, hint):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(script, "prepare_job", lambda *args, **named: pytest.fail("it was prepared"))
    model, data = nn.Linear(3, 2), TensorDataset(torch.ones(8, 3), torch.ones(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(mixmesh.InputError, match=next(iter(option.values()))) as error:
        mixmesh.prepare(model, optimizer, DataLoader(data, 4), loss=F.mse_loss, **option)
    assert hint in str(error.value)


def test_a_sampler_for_one_rank_is_taken():
    data = torch.ones(8, 3)
    check_gives_all(DataLoader(data, 4, sampler=DistributedSampler(data, num_replicas=1, rank=0)))
    check_gives_all([data])


def test_workers_whose_socket_has_too_long_a_name_are_refused(monkeypatch):
    data = TensorDataset(torch.zeros(8, 4))
    check_workers(DataLoader(data, 4, num_workers=1))
    monkeypatch.setattr(refusals, "get_temp_dir", lambda: "/tmp/" + "t" * 90 + "/pymp-12345678")
    check_workers(DataLoader(data, 4))
    with pytest.raises(InputError, match=r"workers cannot send batches[\s\S]*TMPDIR=/tmp"):
        check_workers(DataLoader(data, 4, num_workers=1))


@pytest.mark.parametrize(("rows", "fits"), [(24, True), (18, True), (16, False), (17, False)])
def test_a_last_batch_that_a_pipeline_cannot_cut_is_refused_at_once(rows, fits):
    """Of 12 samples two devices of a stage have 8 and 4, each in two micro-batches."""
    plan = pipelined(chain(model_of(), batch(), THREE_STAGES), 2)
    assert plan.order is not None
    data = torch.ones(rows, 3)
    check_last_batch(DataLoader(data, 12, drop_last=True), plan)
    check_last_batch(DataLoader(data, 12), plan, num_batches=1)  # training ends before
    batches = BatchSampler(range(rows), 12, drop_last=False)
    for loader in (DataLoader(data, 12), DataLoader(data, batch_sampler=batches), data.split(12)):
        with contextlib.nullcontext() if fits else pytest.raises(mixmesh.InputError, match="2 micro-batches"):
            check_last_batch(loader, plan, num_batches=2)


def test_mixmesh_run_looks_ahead_to_the_last_batch():
    plan = pipelined(chain(model_of(), batch(), THREE_STAGES), 2)
    job = Job(model_of(), batch(), data=DataLoader(torch.ones(16, 3), 12))
    check_data(job, 1, plan)  # ends before it
    for num_steps in (2, None):
        with pytest.raises(mixmesh.InputError, match="2 micro-batches") as error:
            check_data(job, num_steps, plan)
        assert "--planner ddp-tuned" in str(error.value)


@pytest.mark.parametrize(
    ("planner", "rows", "fits_in_memory", "asked"),
    [
        ("auto", 16, True, ["auto", "hap"]),
        ("auto", 16, False, ["auto", "hap"]),
        ("auto", 24, True, ["auto"]),
        ("pipeline", 16, True, ["pipeline"]),
    ],
)
def test_a_plan_for_all_batches_takes_the_place_of_a_pipeline(planner, rows, fits_in_memory, asked):
    plan = pipelined(chain(model_of(), batch(), THREE_STAGES), 2)
    other = replace(plan, planner="hap")
    planned, said = [], []

    def planned_by(name):
        planned.append(name)
        if name == "hap" and not fits_in_memory:
            raise mixmesh.Infeasible("nothing fits")
        return other if name == "hap" else plan

    check = partial(check_last_batch, DataLoader(torch.ones(rows, 3), 12))
    made = start._for_all_batches(planned_by, planner, check, lambda refusal: refusal(), said.append)
    assert planned == asked
    is_replaced = fits_in_memory and len(asked) > 1
    assert made is (other if is_replaced else plan)
    assert ["drop_last=True" in line for line in said] == [True] * is_replaced


def test_the_guides_lines_for_going_on_run_on_one_device(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    section = TRAINING_LOOP.read_text().split("## Resuming after a stop")[1].split("\n## ")[0]
    train, load = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    step = "model(*batch).backward(); optimizer.step(); optimizer.zero_grad(); given += batch[0].tolist()"

    def started(start_epoch: int) -> dict:
        torch.manual_seed(start_epoch)
        model, data = nn.Linear(3, 2), TensorDataset(torch.arange(18.0).reshape(6, 3), torch.zeros(6, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        parts = mixmesh.prepare(model, optimizer, DataLoader(data, 2, shuffle=True), loss=F.mse_loss)
        names = dict(zip(("model", "optimizer", "loader"), parts))
        return {**names, "start_epoch": start_epoch, "given": [], "mixmesh": mixmesh, "torch": torch}

    def run(names: dict, last_epoch: int) -> None:
        exec(train.replace("...", step).replace("start_epoch, 10", f"start_epoch, {last_epoch}"), names)

    run(first := started(0), 2)
    exec(load, rest := started(1))
    assert rest["start_epoch"] == 2
    run(rest, 4)
    run(whole := started(0), 4)
    assert whole["given"] == first["given"] + rest["given"]
    torch.testing.assert_close(whole["model"].state_dict(), rest["model"].state_dict(), rtol=0, atol=0)


def test_an_average_of_a_model_with_a_loss_is_evaluated_without_it():
    model = nn.Linear(3, 2)
    average, x = AveragedModel(with_loss(model, F.mse_loss)), torch.randn(4, 3)
    inner = average.module
    with mixmesh.whole(average) as whole:
        assert whole is average and torch.equal(average(x), model(x))
    assert average.module is inner


class Buckets(Sampler):
    """Batches in an order that it shuffles in place, by a generator and a number of epochs of its own."""

    def __init__(self):
        self.order, self.epoch, self.generator = list(range(20)), 0, random.Random(3)
        self.more = torch.Generator().manual_seed(3)

    def __iter__(self):
        self.generator.shuffle(self.order)
        self.epoch += 1
        first = int(torch.randint(20, (), generator=self.more))
        yield [(n + self.epoch + first) % 20 for n in self.order[:6]]
        yield self.order[6:10]


class Halves(Sampler):
    """Batches of two samplers that know each other and shuffle one order by one generator."""

    def __init__(self, other=None):
        self.other = Halves(self) if other is None else other
        if other is None:
            self.order, self.generator = list(range(20)), random.Random(5)
            self.other.order, self.other.generator = self.order, self.generator

    def __iter__(self):
        for half in (self, self.other, self.other.other):
            half.generator.shuffle(half.order)
            yield half.order[:5]


class Drawn(IterableDataset):
    """Rows drawn by a generator of its own."""

    def __init__(self):
        self.generator = np.random.default_rng(3)

    def __iter__(self):
        for _ in range(4):
            yield self.generator.random(2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(torch.arange(20), batch_sampler=Buckets()),
        lambda: DataLoader(torch.arange(20), batch_sampler=Halves()),
        lambda: DataLoader(Drawn(), batch_size=2),
        lambda: DataLoader(Drawn(), batch_size=2, generator=torch.Generator().manual_seed(4)),
    ],
)
def test_a_loader_gives_the_same_batches_after_it_was_asked_for_one(make):
    asked, plain = make(), make()
    assert torch.equal(example_batch(asked), next(iter(make())))
    for _ in range(2):
        for mine, expected in zip(asked, plain, strict=True):
            assert torch.equal(mine, expected)
    if asked.generator is not None:
        assert torch.equal(asked.generator.get_state(), plain.generator.get_state())


def test_copies_share_what_was_shared():
    halves = Halves()
    copied = untouched(halves)
    assert copied.other is not halves.other and copied.other.other is copied
    assert copied.order is not halves.order and copied.order is copied.other.order
    assert copied.generator is not halves.generator and copied.generator is copied.other.generator


class Lengths(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, i):
        return torch.ones(1 + i // 10)


def padded(rows):
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def mixed(rows):
    batch = torch.stack(rows)
    return 0.5 * batch + 0.5 * batch.flip(0)


def doubled(rows):
    if len(rows) % 2:
        raise ValueError("an even number of rows")
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("data", "collate", "depends"),
    [
        (Lengths(), padded, True),
        (torch.randn(20, 3), mixed, True),
        (torch.randn(20, 3), doubled, True),
        (torch.randn(20, 3), None, False),
        (torch.randn(20, 3), lambda rows: torch.stack(rows) + torch.rand(len(rows), 1), True),  # its draws
        (torch.randn(1, 3), None, False),
    ],
)
def test_rows_that_depend_on_others_of_their_batch_are_found(data, collate, depends):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert depends_on_others(DataLoader(data, batch_size=6, collate_fn=collate)) is depends
    assert torch.equal(torch.get_rng_state(), before)


OF_FILE = torch.Generator()


class Holder:
    """Draws by generators that are reached in all ways."""

    of_class = np.random.RandomState(0)
    __slots__ = ("of_slot",)

    def __init__(self) -> None:
        self.of_slot = random.Random(0)

    @staticmethod
    def draw(generator=torch.Generator()):  # noqa: B008
        return torch.rand(1, generator=OF_FILE)


def test_generators_of_the_script_are_found_and_go_on_from_where_they_were():
    enclosed, in_list = np.random.default_rng(0), torch.Generator()
    in_partial, of_builtin = random.Random(1), random.Random(2)

    def collate(rows, holder=[Holder(), {"a": [in_list]}], draw=of_builtin.random):  # noqa: B006, B008
        return enclosed, random.random(), np.random.rand(), torch.rand(1)

    loader = DataLoader(torch.randn(9, 3), 3, collate_fn=partial(collate, other=in_partial))
    found = generators_in(loader)
    wanted = [
        enclosed,
        in_list,
        in_partial,
        of_builtin,
        OF_FILE,
        Holder.of_class,
        Holder.draw.__defaults__[0],
    ]
    assert len(found) == 1 + len(wanted) and {id(x) for x in wanted} < {id(x) for x in found}
    before = marks_of(found)
    with same_random_numbers(found):
        for draw in (enclosed.random, in_partial.random, Holder.draw, Holder.of_class.rand):
            draw()
            assert marks_of(found) != before
    assert marks_of(found) == before
    assert generators_in(random.random, np.random.rand, torch.default_generator) == []  # the process's


class Hidden:
    """Changes its samples by what nothing leads to."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.tensor([time.perf_counter_ns() % 2**40, i])


def test_samples_that_come_out_otherwise_by_what_is_not_found_are_warned_of():
    with pytest.warns(UserWarning, match="loaded twice with the same random numbers, came out otherwise"):
        assert depends_on_others(DataLoader(Hidden(), 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        depends_on_others(DataLoader(torch.full((12, 3), torch.nan), 6))  # not equal to itself


def test_an_input_without_a_name_is_named_by_its_place():
    error = other_dtype("0", torch.float32, torch.float64)
    assert "input 1 of the model has another dtype" in str(error) and ".to(torch.float32)" in str(error)
    assert "x has another dtype" in str(other_dtype("x", torch.float32, torch.float64))


@pytest.mark.parametrize(
    "options", [{"batch_size": 4}, {"batch_size": 4, "num_workers": 1}, {"batch_size": None}]
)
def test_a_loader_without_samples_is_refused(options):
    data = TensorDataset(torch.ones(0, 3))
    with pytest.raises(mixmesh.InputError, match="the loader has no batch"):
        example_batch(DataLoader(data, **options))


class Stream(IterableDataset):
    """Samples that are read once, or from their start each time, in an order of the process's numbers."""

    def __init__(self, is_read_once: bool) -> None:
        self.rows = iter(torch.arange(12.0)) if is_read_once else torch.arange(12.0)

    def __iter__(self):
        return (x + torch.rand(()) for x in self.rows)


def test_a_stream_that_the_example_would_use_up_is_refused():
    """Its first batch was lost without a word."""
    with pytest.raises(mixmesh.InputError, match="do not start over") as error:
        example_batch(DataLoader(Stream(is_read_once=True), batch_size=4))
    assert "prepare(model, optimizer, iter(loader))" in str(error.value)
    loader = DataLoader(Stream(is_read_once=False), batch_size=4)
    torch.manual_seed(3)
    example = example_batch(loader)
    assert torch.equal(example, next(iter(loader)))


class Jittered(torch.utils.data.Dataset):
    """Samples that are changed at random, as images are."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, n: int) -> torch.Tensor:
        return n + torch.rand(2)


class Ahead:
    """An object around a loader, as timm's ``PrefetchLoader``."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader

    def __iter__(self):
        for x in self.loader:
            yield 2 * x


def test_the_example_of_an_object_around_a_loader_leaves_workers_that_persist_as_they_were():
    """These had drawn numbers for the example, and the first batch that trains was refused as another one."""
    loader = Ahead(DataLoader(Jittered(), 4, shuffle=True, num_workers=1, persistent_workers=True))
    torch.manual_seed(3)
    example = example_batch(loader)
    assert loader.loader._iterator is None
    assert torch.equal(example, next(iter(loader)))


def test_parameters_without_a_shape_are_refused(monkeypatch):
    model, data = nn.Sequential(nn.LazyLinear(2)), TensorDataset(torch.ones(8, 3), torch.ones(8, 2))
    with pytest.raises(mixmesh.InputError, match="without a shape") as error:
        trace(model, (torch.ones(8, 3),))
    assert "0.weight" in str(error.value) and "model(x) once" in str(error.value)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(mixmesh.InputError, match="without a shape"):
        mixmesh.prepare(model, optimizer, DataLoader(data, 4), loss=F.mse_loss)
