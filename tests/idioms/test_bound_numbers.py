"""Numbers that come with a loss or a part of the model, as arguments of a ``functools.partial``, as defaults
or as attributes of a function or of a class, are read anew when a loop changes them."""

from __future__ import annotations

import warnings
from functools import partial
from types import SimpleNamespace

import pytest
from gloo_world import assert_passed
from loops import batches, check_same, sgd, train
from plans import named
from torch import nn
from torch.nn import functional as F

OPTIONS = {"beta": 0.0}


def penalized(logits, y, args):
    return F.cross_entropy(logits, y) + args.beta * logits.square().mean()


def with_default(logits, y, options=OPTIONS, *, more=OPTIONS):
    return F.cross_entropy(logits, y) + options["beta"] * logits.square().mean() + more["beta"]


def with_attribute(logits, y):
    return F.cross_entropy(logits, y) + with_attribute.beta * logits.square().mean()


class Criterion:
    beta = 0.0

    @classmethod
    def of_logits(cls, logits, y):
        return F.cross_entropy(logits, y) + cls.beta * logits.square().mean()


class Held(nn.Module):
    """A model with a part that is a ``partial``."""

    def __init__(self, act) -> None:
        super().__init__()
        self.act, self.layer = act, nn.Linear(6, 4).double()

    def forward(self, x):
        return self.act(self.layer(x))


def scaled(args, logits):
    return logits * (1 + args.beta)


def check_numbers_that_come_with_a_function_are_traced_again(_) -> None:
    def loop(prepare, kind):
        args = SimpleNamespace(beta=0.0, step=0)
        of_args = partial(penalized, args=args)
        of_others = partial(penalized, args=(others := SimpleNamespace(beta=0.0)))
        losses = {
            "partial": of_args,
            "closure": lambda logits, y: of_args(logits, y),
            "namesakes": lambda logits, y: of_args(logits, y) + of_others(logits, y),
            "default": with_default,
            "attribute": with_attribute,
            "class": Criterion.of_logits,
            "model": F.cross_entropy,
        }
        model = Held(partial(scaled, args) if kind == "model" else nn.Identity())
        for epoch in range(2):
            args.beta = OPTIONS["beta"] = with_attribute.beta = Criterion.beta = 0.5 * epoch
            args.step += 1  # not read
            others.beta = -0.25 * epoch
            if not epoch:
                model, optimizer, loader = prepare(model, sgd(model), batches(), loss=losses[kind])
            yield from train(model, optimizer, loader)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in ("partial", "closure", "namesakes", "default", "attribute", "class", "model"):
            check_same(partial(loop, kind=kind), kinds=("ddp-even",))


IDIOMS = named(check_numbers_that_come_with_a_function_are_traced_again)


@pytest.mark.parametrize("name", IDIOMS)
def test_bound_numbers(outcomes, name):
    assert_passed(outcomes[name])
