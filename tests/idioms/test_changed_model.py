"""S4: a model whose code was changed since planning is refused at its first call, on every rank."""

from __future__ import annotations

import pytest
import torch
from gloo_world import assert_passed
from plans import close, named, plan_of
from torch import nn

from mixmesh.errors import PlanError
from mixmesh.runtime.parallel import parallelize


class Net(nn.Module):
    def __init__(self, activation=nn.functional.gelu, smoothing=0.0, rate=0.0, double=False) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.first, self.second = nn.Linear(6, 8).double(), nn.Linear(8, 5).double()
        self.dropout = nn.Dropout(rate)
        self.activation, self.smoothing, self.double = activation, smoothing, double

    def forward(self, x, y, scale=1.0):
        logits = self.second(self.dropout(self.activation(self.first(x)))) * scale
        return nn.functional.cross_entropy(logits, y, label_smoothing=self.smoothing) * (
            2 if self.double else 1
        )


CHANGED = {
    "aten.relu": {"activation": nn.functional.relu},
    "operators": {"double": True},
    "native_dropout": {"rate": 0.25},
    "mixmesh": {"smoothing": 0.1},
}


def inputs() -> dict:
    g = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(12, 6, generator=g, dtype=torch.float64),
        "y": torch.randint(5, (12,), generator=g),
    }


def plans():
    return [plan_of(Net(), inputs(), stage) for stage in (0, 3)]


def check_the_planned_model_runs(_) -> None:
    for plan in plans():
        model, _ = parallelize(Net(), None, plan, device="cpu", timeout_s=60)
        single = Net()
        for batch in (inputs(), {k: v.split([6, 4, 2])[model.comm.rank] for k, v in inputs().items()}):
            close(model(**batch), single(**inputs()))
        model, _ = parallelize(Net(), None, plan, device="cpu", timeout_s=60)
        whole = inputs()
        close(model(whole["x"], y=whole["y"]), single(**whole))


def check_a_changed_model_is_refused(_) -> None:
    for plan in plans()[1:]:
        for change in CHANGED.values():
            model, _ = parallelize(Net(**change), None, plan, device="cpu", timeout_s=60)
            with pytest.raises(PlanError, match="is not the one that was planned") as caught:
                model(**inputs())
            assert "expected" in str(caught.value) and "mixmesh plan JOB" in str(caught.value)
            with pytest.raises(PlanError):
                model(**inputs())  # not at the first call alone


def check_a_model_that_evaluates_is_refused_where_an_input_has_a_gradient(_) -> None:
    plan = plan_of(Net().eval(), inputs(), 0)
    given = inputs()
    given["x"].requires_grad_()
    model, _ = parallelize(Net(**CHANGED["aten.relu"]).eval(), None, plan, device="cpu", timeout_s=60)
    with pytest.raises(PlanError, match="is not the one that was planned"):
        model(**given)


def check_changed_arguments_are_refused(_) -> None:
    """What is no tensor is part of the plan."""
    model, _ = parallelize(Net(), None, plans()[0], device="cpu", timeout_s=60)
    with pytest.raises(PlanError, match="is not the one that was planned"):
        model(**inputs(), scale=2.0)


def check_it_can_be_left_out(_) -> None:
    model, _ = parallelize(
        Net(**CHANGED["aten.relu"]), None, plans()[0], device="cpu", timeout_s=60, check_model=False
    )
    close(model(**inputs()), Net()(**inputs()))


IDIOMS = named(
    check_the_planned_model_runs,
    check_a_changed_model_is_refused,
    check_a_model_that_evaluates_is_refused_where_an_input_has_a_gradient,
    check_changed_arguments_are_refused,
    check_it_can_be_left_out,
)


@pytest.mark.parametrize("name", IDIOMS)
def test_changed_model(outcomes, name):
    assert_passed(outcomes[name])
