"""S7: two parallel models over the same modules, as a generator and its critic are: one set of weights."""

from __future__ import annotations

import pytest
import torch
from gloo_world import assert_passed
from plans import close, named, plan_of
from torch import nn

from mixmesh.errors import InputError
from mixmesh.runtime.parallel import parallelize


class CriticLoss(nn.Module):
    def __init__(self, generator: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.generator, self.critic = generator, critic

    def forward(self, noise, real):
        made = self.generator(noise).detach()
        return (
            nn.functional.softplus(self.critic(made)).mean()
            + nn.functional.softplus(-self.critic(real)).mean()
        )


class GeneratorLoss(nn.Module):
    def __init__(self, generator: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.generator, self.critic = generator, critic

    def forward(self, noise):
        return nn.functional.softplus(-self.critic(self.generator(noise))).mean()


def pair(first=CriticLoss):
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)).double()
    critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return first(generator, critic), GeneratorLoss(generator, critic)


def inputs(step: int = 0) -> dict:
    g = torch.Generator().manual_seed(step)
    return {
        "noise": torch.randn(12, 4, generator=g, dtype=torch.float64),
        "real": torch.randn(12, 6, generator=g, dtype=torch.float64),
    }


def optimizers(models):
    critic, generator = models[0].critic, models[1].generator
    return [torch.optim.Adam(m.parameters(), lr=0.05) for m in (critic, generator)]


def given(first, step: int = 0) -> tuple[dict, dict]:
    """What both models of a pair are called with."""
    noise = {"noise": inputs(step)["noise"]}
    return (inputs(step) if first is CriticLoss else noise), noise


def trained(first, models, steppers) -> None:
    for step in range(3):
        for loss, stepper, batch in zip(models, steppers, given(first, step)):
            for o in steppers:
                o.zero_grad()
            loss(**batch).backward()
            stepper.step()


def check_shared(_) -> None:
    for first, stage in ((CriticLoss, 0), (GeneratorLoss, 3)):
        single, mine = pair(first), pair(first)
        ours = optimizers(mine)
        plans = [plan_of(model, batch, stage) for model, batch in zip(pair(first), given(first))]
        models = []
        for n in range(2):
            model, ours[n] = parallelize(
                mine[n], ours[n], plans[n], device="cpu", timeout_s=60, check_model=False
            )
            models.append(model)
        name = "critic.0.weight"
        assert models[0].get_parameter(name) is models[1].get_parameter(name)
        trained(first, single, optimizers(single))
        trained(first, models, ours)
        for model, reference in zip(models, single):
            for key, value in model.full_state_dict().items():
                close(value, reference.state_dict()[key], key)


def check_refused_where_plans_hold_them_differently(_) -> None:
    for stages in ((0, 3), (3, 0), (1, 1)):
        models = pair()
        plans = [plan_of(*of) for of in zip(pair(), given(CriticLoss), stages)]
        first, _ = parallelize(models[0], None, plans[0], device="cpu", timeout_s=60)
        with pytest.raises(InputError, match="two parallel models share") as caught:
            parallelize(models[1], None, plans[1], device="cpu", timeout_s=60)
        assert "ddp-proportional" in str(caught.value) and first.training


IDIOMS = named(check_shared, check_refused_where_plans_hold_them_differently)


@pytest.mark.parametrize("name", IDIOMS)
def test_shared_modules(outcomes, name):
    assert_passed(outcomes[name])
