"""Modes of modules that change after planning: batch norm that is frozen, dropout that is switched off or on,
``train()`` and ``eval()`` of a model's own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed
from loops import KINDS, batches, check_same, prepare, sgd, train
from plans import close, named
from torch import nn
from torch.nn import functional as F

import mixmesh
from mixmesh.errors import InputError


class Net(nn.Module):
    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.dropout = nn.Dropout(rate)
        self.double()

    def forward(self, x):
        return self.head(self.dropout(self.norm(self.inner(x)).relu()))


class Frozen(Net):
    """Batch norm that evaluates in training, as models are written for fine-tuning."""

    def train(self, mode: bool = True):
        super().train(mode)
        self.norm.eval()
        return self


def check_batch_norm_that_evaluates_from_the_second_epoch_on(_) -> None:
    def loop(prepare):
        model = Net()
        model, optimizer, loader = prepare(model, sgd(model), batches(), loss=F.cross_entropy)
        for epoch in range(3):
            model.train()
            if epoch:
                model.norm.eval()
            yield from train(model, optimizer, loader)
        yield model.state_dict()["norm.running_mean"].sum()

    check_same(loop)


def check_a_loss_in_the_loop(_) -> None:
    def loop(prepare):
        model = Net()
        model, optimizer, loader = prepare(model, sgd(model), batches())
        for epoch in range(2):
            model.train()
            model.norm.train(not epoch)
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                yield loss

    check_same(loop)


def check_train_of_the_models_own(_) -> None:
    """What is planned is the step that a loop makes which calls it."""

    def loop(prepare):
        model = Frozen()
        model, optimizer, loader = prepare(model, sgd(model), batches(), loss=F.cross_entropy)
        assert model.norm.training  # nobody has called it yet
        for _ in range(2):
            model.train()
            assert model.training and not model.norm.training
            yield from train(model, optimizer, loader)
        model.eval()
        with torch.no_grad():
            for batch in loader:
                yield model(*batch)
        if hasattr(model, "_runtime"):
            planned = model._runtime.forms.planned
            assert not any(i.op == "update" for i in planned.program.instructions)

    check_same(loop)


def check_without_train_it_is_as_it_was_made(_) -> None:
    def loop(prepare):
        model = Frozen()
        model, optimizer, loader = prepare(model, sgd(model), batches(), loss=F.cross_entropy)
        yield from train(model, optimizer, loader)
        yield model.state_dict()["norm.running_mean"].sum()

    check_same(loop)


def check_dropout_that_is_switched_off(_) -> None:
    """In training, and with it on in evaluation."""

    def loop(prepare):
        model = Net(rate=0.5)
        model, optimizer, loader = prepare(model, sgd(model), batches(), loss=F.cross_entropy)
        model.dropout.eval()
        yield from train(model, optimizer, loader)

    check_same(loop)
    for kind in KINDS:
        model = Net(rate=0.5)
        model, _, _ = prepare(model, sgd(model), batches(), loss=F.cross_entropy, planner=kind)
        x, y = batches()[0]
        model.eval()
        with torch.no_grad():
            plain = [model(x, y) for _ in range(2)]
            close(plain[0], F.cross_entropy(Net().eval()(x), y))
            close(plain[0], plain[1])
            model.dropout.train()
            drawn = [model(x, y) for _ in range(2)]
        assert len({float(value) for value in (plain[0], *drawn)}) == 3, kind


def check_the_whole_model_has_the_modes_of_each_module(_) -> None:
    """Dropout that draws in evaluation, as for an estimate of uncertainty, and batch norm that evaluates."""

    def loop(prepare):
        model = Net(rate=0.5)
        model, _, _ = prepare(model, sgd(model), batches(), loss=F.cross_entropy)
        x = batches()[0][0]
        model.eval()
        model.dropout.train()
        with torch.no_grad(), mixmesh.whole(model) as whole:
            torch.manual_seed(1)
            yield from (whole(x).square().sum(), whole(x).square().sum())
        model.train()
        model.norm.eval()
        with torch.no_grad(), mixmesh.whole(model) as whole:
            whole.dropout.eval()
            yield whole(x).square().sum()

    check_same(loop)


def check_modules_taken_before(_) -> None:
    """Modes set on modules that the script took from its model before it was prepared: in the next epoch
    ``train()`` of the model that is returned resets them, and they are set again."""

    def loop(prepare):
        model = Net(rate=0.0)
        norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d)]
        model, optimizer, loader = prepare(model, sgd(model), batches(), loss=F.cross_entropy)
        for _ in range(2):
            model.train()
            for norm in norms:
                norm.eval()
            yield from train(model, optimizer, loader)
        norms[0].train()
        with mixmesh.whole(model) as whole:
            assert all(m.training for m in whole.modules() if isinstance(m, nn.BatchNorm1d))
        yield from train(model, optimizer, loader)
        model.eval()
        assert not any(norm.training for norm in norms)

    check_same(loop)


def check_other_modes_on_one_rank_are_refused(_) -> None:
    model = Net()
    model, _, loader = prepare(model, sgd(model), batches(), loss=F.cross_entropy)
    if dist.get_rank() == 1:
        model.norm.eval()
    with pytest.raises(InputError, match="train on some ranks that evaluate on others"):
        model(*next(iter(loader)))


IDIOMS = named(
    check_batch_norm_that_evaluates_from_the_second_epoch_on,
    check_a_loss_in_the_loop,
    check_train_of_the_models_own,
    check_without_train_it_is_as_it_was_made,
    check_dropout_that_is_switched_off,
    check_the_whole_model_has_the_modes_of_each_module,
    check_modules_taken_before,
    check_other_modes_on_one_rank_are_refused,
)


@pytest.mark.parametrize("name", IDIOMS)
def test_modes(outcomes, name):
    assert_passed(outcomes[name])
