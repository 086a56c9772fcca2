"""Shares that change in the middle of a training: it goes on as on a single device, under every kind of
plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gloo_world import assert_passed, run_world
from idioms.plans import MICRO_BATCHES, Mlp, batch, build, close, named, plan_of, same_weights
from test_gloo import adafactor, adamw, sgd
from torch import nn

from mixmesh.errors import InputError, PlanError
from mixmesh.lang.ir import Program, Ratio, make_ratio
from mixmesh.lang.plan_file import MicroBatch, Plan
from mixmesh.runtime.parallel import full_optimizer_state_dict, parallelize
from mixmesh.runtime.reshare import change_shares, moved_params, why_other_form
from mixmesh.runtime.shard_tensor import plain

WORLD = 3
KINDS = (
    "data_parallel_buckets", "levels_to_owners", "zero_share", "fsdp", "fsdp_other_ratio", "tensor_parallel",
    "fsdp_reshard", "gathered_early", "sufficient_factors", "one_listens",
)  # fmt: skip


def reversed_shares(ratio: Ratio) -> Ratio:
    """The same ranks with each other's shares."""
    shares = iter([s for s in reversed(ratio) if s])
    return make_ratio([next(shares) if s else 0.0 for s in ratio])


def other(plan: Plan) -> Plan:
    program = plan.program.changed(ratios=tuple((n, reversed_shares(r)) for n, r in plan.program.ratios))
    return replace(plan, program=program)


def step_together(single, own, model, optimizer, steps):
    """Returns the last loss with its graph: in a script's loop it lives until the next one is there."""
    for step in steps:
        losses = []
        for m, o in ((single, own), (model, optimizer)):
            loss = m(**batch(step))
            loss.backward()
            o.step()
            o.zero_grad()
            losses.append(loss.detach())
        close(losses[1], losses[0], f"loss of step {step}")
    return loss


def same_state(own, model, optimizer) -> None:
    """The optimizer's whole state is that of the single device's."""
    mine, its = full_optimizer_state_dict(model, optimizer)["state"], own.state_dict()["state"]
    assert mine.keys() == its.keys()
    for n, entries in its.items():
        assert entries.keys() == mine[n].keys()
        for key, value in entries.items():
            close(torch.as_tensor(mine[n][key]), torch.as_tensor(value), f"{key} of {n}")


def check_there_and_back(single, own, model, optimizer) -> None:
    first = model._runtime.forms.plan
    second = other(first)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 1.0)
    params = list(model.parameters())
    held = step_together(single, own, model, optimizer, range(2))
    change_shares(model, optimizer, second)
    assert all(a is b for a, b in zip(params, model.parameters()))
    for name, p in model.named_parameters():
        layout = model._runtime.stored[name].held
        assert plain(p).shape == layout.shape(tuple(p.shape), model.comm.rank) or not plain(p).numel()
    same_state(own, model, optimizer)
    same_weights(single, model)
    held = step_together(single, own, model, optimizer, range(2, 5))
    scheduler.step()
    change_shares(model, optimizer, first)
    step_together(single, own, model, optimizer, range(5, 7))
    assert held.grad_fn is not None
    same_state(own, model, optimizer)
    same_weights(single, model)


def check_every_program(_) -> None:
    has_moved = []
    for name in KINDS:
        for make in (adamw, sgd) if name == "fsdp" else (adamw,):
            single, own, model, optimizer = build(name, make)
            plan = model._runtime.forms.plan
            has_moved.append(bool(moved_params(plan.program, other(plan).program)))
            check_there_and_back(single, own, model, optimizer)
    assert any(has_moved)


def check_every_stage_of_zero(_) -> None:
    for stage in range(4):
        single, mine = Mlp(0), Mlp(0)
        optimizer = adamw(mine.parameters())
        model, _ = parallelize(mine, optimizer, plan_of(Mlp(0), batch(0), stage), device="cpu", timeout_s=20)
        check_there_and_back(single, adamw(single.parameters()), model, optimizer)


def check_micro_batches(_) -> None:
    plan = replace(plan_of(Mlp(0), batch(0), 2), micro_batches=MICRO_BATCHES)
    single, mine = Mlp(0), Mlp(0)
    own, optimizer = adamw(single.parameters()), adamw(mine.parameters())
    model, _ = parallelize(mine, optimizer, plan, device="cpu", timeout_s=20)
    step_together(single, own, model, optimizer, range(2))
    second = other(plan)
    assert "micro-batches" in why_other_form(plan, second, optimizer)
    rows = (MicroBatch(2, 1, 2), MicroBatch(4, 1, 4), MicroBatch(4, 2, 2))
    change_shares(model, optimizer, replace(second, micro_batches=rows))
    step_together(single, own, model, optimizer, range(2, 4))
    same_weights(single, model)


class Normed(nn.Module):
    """Has no bias before its norm: the gradient of one is nothing but rounding errors, which Adam divides by
    their own size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.body = body.double()

    def forward(self, x, y):
        return (self.body(x) - y).square().mean()


def check_running_statistics(_) -> None:
    single, mine = Normed(), Normed()
    own, optimizer = adamw(single.parameters()), adamw(mine.parameters())
    plan = plan_of(Normed(), batch(0), 3)
    model, _ = parallelize(mine, optimizer, plan, device="cpu", timeout_s=20)
    step_together(single, own, model, optimizer, range(2))
    change_shares(model, optimizer, other(plan))
    step_together(single, own, model, optimizer, range(2, 5))
    for name, value in model.full_state_dict().items():
        close(value, single.state_dict()[name], name)


def check_what_is_refused(_) -> None:
    _, _, model, optimizer = build("fsdp")
    plan = model._runtime.forms.plan
    model(**batch(0)).backward()
    with pytest.raises(InputError, match="still gradients"):
        change_shares(model, optimizer, other(plan))
    optimizer.zero_grad()
    fewer = plan.program.changed(ratios=tuple((n, (0.5, 0.5, 0.0)) for n, _ in plan.program.ratios))
    with pytest.raises(PlanError, match="other ranks take part"):
        change_shares(model, optimizer, replace(plan, program=fewer))
    renamed = replace(plan.program, name="another")
    with pytest.raises(PlanError, match="another program"):
        change_shares(model, optimizer, replace(plan, program=renamed))
    rows = adafactor(Mlp(0).parameters())
    assert "Adafactor" in why_other_form(plan, other(plan), rows)
    whole = plan_of(Mlp(0), batch(0), 0)  # every rank has all of it: no state moves
    assert isinstance(whole.program, Program) and not why_other_form(whole, other(whole), rows)


CHECKS = named(
    check_every_program,
    check_every_stage_of_zero,
    check_micro_batches,
    check_running_statistics,
    check_what_is_refused,
)


@pytest.fixture(scope="module")
def results():
    return run_world(WORLD, CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_shares_change(name, results):
    assert_passed(results[name])
