"""Logits and metrics of batches of other sizes, with labels and without, in training and evaluation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from gloo_world import assert_passed
from plans import close, named, output_plan, plan_of
from torch import nn
from torch.nn.functional import cross_entropy

from mixmesh.errors import InputError, TraceError
from mixmesh.frontend.trace import LossSource, trace
from mixmesh.runtime.parallel import parallelize
from mixmesh.training.preparation.outside_loss import with_loss


class Classifier(nn.Module):
    """Batch norm and dropout; no loss without labels."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)
        self.dropout = nn.Dropout(0.5)
        self.double()

    def forward(self, x, labels=None):
        logits = self.head(self.dropout(self.norm(self.inner(x)).relu()))
        loss = None if labels is None else cross_entropy(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits)


class Pair(Classifier):
    def forward(self, x, labels=None):
        made = super().forward(x, labels)
        return (made.logits,) if made.loss is None else (made.loss, made.logits)


class Adapted(nn.Module):
    """A frozen model with an adapter, which may be turned off."""

    adapts = True

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.inner, self.adapter = nn.Linear(6, 5).double(), nn.Linear(6, 5).double()
        self.inner.requires_grad_(False)

    def forward(self, x, labels=None):
        logits = self.inner(x) + self.adapter(x) if self.adapts else self.inner(x)
        return SimpleNamespace(loss=cross_entropy(logits, labels), logits=logits)


def batch(size: int) -> dict:
    g = torch.Generator().manual_seed(size)
    x = torch.randn(size, 6, generator=g, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(5, (size,), generator=g)}


def parallel(kind: str, model=Classifier, outputs=("logits",)):
    plan = output_plan(kind, model(), batch(12), outputs)
    return parallelize(model(), None, plan, device="cpu", timeout_s=60)[0]


def check_evaluation_of_any_size(_) -> None:
    for kind in ("data_parallel", "fsdp", "tensor_parallel"):
        single, model = Classifier().eval(), parallel(kind).eval()
        for size in (12, 7, 1):
            with torch.no_grad():
                expected, out = single(**batch(size)), model(**batch(size))
                close(out.loss, expected.loss, f"{kind} {size}")
                close(out.logits, expected.logits[out.rows or slice(None)], f"{kind} {size}")
                close(out.gather().logits, expected.logits, f"{kind} {size}, gathered")
        with torch.no_grad():
            for given in (batch(9)["x"], batch(12)["x"]):
                for call in ({"x": given}, {"x": given, "labels": None}):
                    out = model(**call)
                    assert out.loss is None
                    close(out.gather("logits"), single(given).logits, f"{kind}, no labels")
        assert len(model._runtime.forms.kept) == 5
        model.train()
        out = model(**batch(5))
        assert out.gather().logits.shape == (5, 5)
        out.loss.backward()


def check_what_cannot_go_without_labels(_) -> None:
    model = parallel("data_parallel")
    with pytest.raises(InputError, match="no tensor 'labels'"):
        model(x=batch(12)["x"])
    model.eval()
    with pytest.raises(InputError, match="ranks were given|no tensor 'labels'"), torch.no_grad():
        model(x=batch(12)["x"], labels=batch(12)["labels"] if model.comm.rank else None)
    plain = plan_of(Classifier(), batch(12), 0)
    plain, _ = parallelize(Classifier(), None, plain, device="cpu", timeout_s=60)
    with pytest.raises(InputError, match="no tensor 'labels'"), torch.no_grad():
        plain.eval()(x=batch(12)["x"])
    pair = parallel("data_parallel", Pair, (1,)).eval()
    with torch.no_grad():
        close(pair(**batch(7)).gather(1), Pair().eval()(**batch(7))[1])


def check_a_model_whose_adapters_are_off(_) -> None:
    """As the reference of a preference loss, in training mode too: nothing that trains has a part in it."""
    for kind in ("data_parallel", "fsdp", "tensor_parallel"):
        single, net = Adapted(), Adapted()
        plan = output_plan(kind, net, batch(12), ("logits",))
        model, _ = parallelize(net, None, plan, device="cpu", timeout_s=60, check_model=False)
        for size, trains in ((12, True), (12, False), (7, True)):
            for adapts in (False, True):
                for m in (single, model):
                    m.train(trains)
                    m.adapts = adapts
                with torch.no_grad():
                    expected, out = single(**batch(size)), model(**batch(size))
                close(out.loss, expected.loss, f"{kind} {size} {adapts}")
                close(out.gather().logits, expected.logits, f"{kind} {size} {adapts}")
            for m in (single, model):
                m.train()
                m.zero_grad()
                m(**batch(size)).loss.backward()
            for p, q in zip(model.adapter.parameters(), single.adapter.parameters()):
                close(p.grad.norm(), q.grad.norm(), f"{kind} {size}")
        model.adapts = False
        with pytest.raises(TraceError, match="no trainable parameter"):
            model(**batch(12))


IDIOMS = named(
    check_evaluation_of_any_size,
    check_what_cannot_go_without_labels,
    check_a_model_whose_adapters_are_off,
)


@pytest.mark.parametrize("name", IDIOMS)
def test_evaluation(outcomes, name):
    assert_passed(outcomes[name])


def test_a_loss_outside_is_left_out_with_its_targets():
    model = with_loss(nn.Sequential(nn.Linear(6, 5).double()), cross_entropy, ("logits",)).eval()
    given = batch(4)
    assert model(given["x"]).loss is None and model(given["x"]).logits.shape == (4, 5)
    assert model(given["x"], given["labels"]).loss.ndim == 0
    traced = trace(model, (given["x"],), outputs=("logits",), loss=LossSource.OPTIONAL)
    assert traced.returned.loss == "" and [n.op for n in traced.graph.batch_inputs] == ["input"]
    with pytest.raises(TraceError, match="scalar loss"):
        trace(model, (given["x"],), outputs=("logits",))
