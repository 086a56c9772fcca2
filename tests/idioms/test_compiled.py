"""``torch.compile`` around a model before it is planned, within it, and around a parallel model."""

from __future__ import annotations

import warnings

import pytest
import torch
from gloo_world import assert_passed
from plans import Mlp, batch, build, close, named, plan_of, program, same_weights
from torch import nn
from torch.nn import functional as F

import mixmesh
from mixmesh.frontend.trace import trace
from mixmesh.frontend.trace.compiled import uncompiled
from mixmesh.runtime.parallel import parallelize
from mixmesh.training.preparation.outside_loss import with_loss

KINDS = ("data_parallel", "fsdp")


def trained(single, model, optimizers, call, steps: int = 2) -> None:
    for step in range(steps):
        expected, loss = single(**batch(step)), call(batch(step))
        close(loss.detach(), expected.detach())
        for value, optimizer in ((expected, optimizers[0]), (loss, optimizers[1])):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    same_weights(single, model)


def check_a_compiled_model_is_unwrapped(_) -> None:
    for name in KINDS:
        single, mine = Mlp(0), Mlp(0)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (single, mine)]
        model, optimizers[1] = parallelize(
            torch.compile(mine), optimizers[1], program(name), device="cpu", timeout_s=20
        )
        assert isinstance(model, Mlp) and "fc1.weight" in dict(model.named_parameters())
        trained(single, model, optimizers, lambda b, model=model: model(**b))
        with mixmesh.whole(model) as m:
            assert m is mine


def check_a_compiled_part_keeps_its_name(_) -> None:
    inputs = batch(0)
    single, mine = Mlp(0), Mlp(0)
    for m in (single, mine):
        m.fc1 = torch.compile(m.fc1, backend="eager")
    plan = plan_of(mine, inputs, 3)
    model, _ = parallelize(mine, None, plan, device="cpu", timeout_s=20)
    close(model(**inputs).detach(), single(**inputs).detach())
    assert list(model.full_state_dict()) == list(single.state_dict())


def check_a_parallel_model_may_be_compiled(_) -> None:
    for name in KINDS:
        single, its, model, mine = build(name)
        compiled = torch.compile(model)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            compiled(**batch(0))
        said = [w for w in told if "torch.compile changes nothing" in str(w.message)]
        assert len(said) == (not torch.distributed.get_rank()), [str(w.message) for w in told]
        trained(single, model, (its, mine), lambda b, compiled=compiled: compiled(**b))
        with mixmesh.whole(compiled) as m:
            close(m.fc1.weight, single.fc1.weight)


def check_compiled_in_place(_) -> None:
    single, its, model, mine = build("fsdp")
    model.compile()
    trained(single, model, (its, mine), lambda b: model(**b))


def step(model, optimizer, inputs):
    optimizer.zero_grad()
    loss = model(**inputs) * 1.0
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach(), norm


def check_a_compiled_training_step(_) -> None:
    compiled = torch.compile(step, backend="eager")
    single, its, model, mine = build("data_parallel", torch.optim.SGD)
    expected = step(single, its, batch(0))
    for a, b in zip(compiled(model, mine, batch(0)), expected):
        close(a, b)
    same_weights(single, model)
    model, mine = build("fsdp", torch.optim.SGD)[2:]
    with pytest.raises(Exception, match="without torch.compile"):
        compiled(model, mine, batch(0))


IDIOMS = named(
    check_a_compiled_model_is_unwrapped,
    check_a_compiled_part_keeps_its_name,
    check_a_parallel_model_may_be_compiled,
    check_compiled_in_place,
    check_a_compiled_training_step,
)


@pytest.mark.parametrize("name", IDIOMS)
def test_compiled(outcomes, name):
    assert_passed(outcomes[name])


def test_a_compiled_model_is_planned_as_the_model_itself():
    x, y = torch.ones(12, 6), torch.zeros(12, dtype=torch.int64)
    expected = trace(with_loss(nn.Linear(6, 4), F.cross_entropy), (x, y)).graph
    compiled = torch.compile(nn.Linear(6, 4))
    given = trace(with_loss(uncompiled(compiled), F.cross_entropy), (x, y)).graph
    assert given.fingerprint == expected.fingerprint
    assert trace(torch.compile(with_loss(nn.Linear(6, 4), F.cross_entropy)), (x, y)).graph == expected


def test_on_one_device_a_compiled_model_stays_compiled(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    original = nn.Linear(6, 4)
    for loss in (None, F.cross_entropy):
        model, _, _ = mixmesh.prepare(torch.compile(original), None, [], loss=loss)
        assert model._compiled_call_impl is not None if loss else hasattr(model, "_orig_mod")
        with mixmesh.whole(model) as m:
            assert m is original
