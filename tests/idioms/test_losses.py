"""The loss outside of the model, with logits beside it, and several losses of one model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed
from plans import close, named, output_plan
from torch import nn
from torch.nn import functional as F

import mixmesh
from mixmesh.runtime.parallel import parallelize
from mixmesh.training.preparation.outside_loss import with_loss

KINDS = ("data_parallel", "fsdp", "tensor_parallel")


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 8).double(), nn.Linear(8, 4).double()

    def forward(self, x):
        return self.head(self.body(x).relu())


class Two(Classifier):
    """Returns two losses."""

    def forward(self, x, y):
        logits = super().forward(x)
        return dict(main=F.cross_entropy(logits, y), small=1e-2 * logits.square().mean())


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(12, 6, dtype=torch.float64, generator=g), torch.randint(4, (12,), generator=g)


def pair(kind: str, make, loss, outputs: tuple):
    single, mine = with_loss(make(), loss, outputs), with_loss(make(), loss, outputs)
    plan = output_plan(kind, with_loss(make(), loss, outputs), batch(0), outputs)
    sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (single, mine)]
    model, _ = parallelize(mine, sgd[1], plan, device="cpu", timeout_s=20, check_model=False)
    return (single, sgd[0]), (model, sgd[1])


def check_a_loss_outside_gives_logits_beside_it(_) -> None:
    for kind in KINDS:
        pairs = pair(kind, Classifier, F.cross_entropy, ("logits",))
        correct = []
        for n in range(2):
            outs = [model(*batch(n)) for model, _ in pairs]
            close(outs[1].loss, outs[0].loss, kind)
            close(outs[1].gather("logits"), outs[0].logits.detach(), kind)
            own = outs[1].logits.argmax(-1) == batch(n)[1][outs[1].rows or slice(None)]
            correct.append([own.sum(), (outs[0].logits.argmax(-1) == batch(n)[1]).sum()])
            for out, (_, optimizer) in zip(outs, pairs):
                optimizer.zero_grad()
                out.loss.backward()
                optimizer.step()
        for mine, want in correct:
            if kind != "tensor_parallel":  # where all ranks have all rows
                dist.all_reduce(mine)
            assert mine == want, kind
        means = [copy.deepcopy(model) for model, _ in pairs]
        close(means[1](*batch(4)).loss, means[0](*batch(4)).loss, kind)
        # the user's own module, without the loss
        with pairs[1][0].whole() as m, mixmesh.whole(pairs[0][0]) as single, torch.no_grad():
            assert type(m) is Classifier and type(single) is Classifier
            close(m(batch(5)[0][:7]), single(batch(5)[0][:7]), kind)


def check_several_losses_become_one(_) -> None:
    for kind in KINDS:
        pairs = pair(kind, Two, lambda losses: sum(losses.values()), ("main", "small"))
        for n in range(2):
            outs = [model(*batch(n)) for model, _ in pairs]
            for name in ("loss", "main", "small"):
                close(outs[1][name].detach(), outs[0][name].detach(), f"{kind} {name}")
            for out, (_, optimizer) in zip(outs, pairs):
                optimizer.zero_grad()
                out.loss.backward()
                optimizer.step()


IDIOMS = named(check_a_loss_outside_gives_logits_beside_it, check_several_losses_become_one)


@pytest.mark.parametrize("name", IDIOMS)
def test_losses(outcomes, name):
    assert_passed(outcomes[name])
