"""S14: optimizers made from the parallel model's parameters: right, or refused when they are made."""

from __future__ import annotations

import pytest
import torch
from gloo_world import assert_passed
from plans import CUT, batch, close, named, parallel, same_weights

from mixmesh.errors import InputError, MixmeshError
from mixmesh.frontend.job import can_step_pieces, check_supported


class Lion(torch.optim.Optimizer):
    """As it is usually written: element by element."""

    def __init__(self, params, lr=0.01, beta=0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                average = state["average"]
                update = average.clone().mul_(group["beta"]).add(p.grad, alpha=1 - group["beta"]).sign_()
                p.add_(update, alpha=-group["lr"])
                average.mul_(0.99).add_(p.grad, alpha=0.01)


class Lamb(torch.optim.Optimizer):
    """Each step is scaled by the norms of a whole parameter and of its update."""

    def __init__(self, params, lr=0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad, 0.1)
                state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                update = state["m"] / (state["v"].sqrt() + 1e-6)
                trust = torch.where(p.norm() > 0, p.norm() / update.norm(), 1.0)
                p.add_(update * trust, alpha=-group["lr"])


def stepped(name: str, make) -> None:
    single, model = parallel(name)
    optimizers = [make(m.parameters()) for m in (single, model)]
    for step in range(3):
        for m, o in zip((single, model), optimizers):
            m(**batch(step)).backward()
            o.step()
            o.zero_grad()
    same_weights(single, model)


RIGHT = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.05),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=0.05, foreach=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=0.05, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=0.01),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    "adamax": lambda ps: torch.optim.Adamax(ps, lr=0.01),
    "lion": Lion,
    "lamb": Lamb,
}


def check_right(_) -> None:
    for name in ("data_parallel", "fsdp", "tensor_parallel", "levels_to_owners", "one_stage_each"):
        for make in RIGHT.values():
            stepped(name, make)


def check_refused(_) -> None:
    for name in CUT:
        for make in (torch.optim.Adafactor, lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2])):
            _, model = parallel(name)
            with pytest.raises(InputError, match="may mix the elements of a parameter") as caught:
                make(model.parameters())
            assert "ddp-proportional" in caught.value.hint[0]


class Rows(torch.optim.Optimizer):
    """Scales rows, by a number that no trial of its step knows before the class has set it."""

    def __init__(self, params) -> None:
        super().__init__(params, {})
        self.rate = 0.1

    @torch.no_grad()
    def step(self):
        rate = self.rate
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and p.ndim == 2:
                p.sub_(p.grad / p.grad.norm(dim=1, keepdim=True) * rate)


def check_what_cannot_be_tried_is_refused_at_its_first_step(_) -> None:
    _, model = parallel("fsdp")
    optimizer = Rows(model.parameters())
    model(**batch(0)).backward()
    with pytest.raises(InputError, match="needs elements that other ranks hold"):
        optimizer.step()


def check_the_same_are_right_where_nothing_is_cut(_) -> None:
    stepped("data_parallel", torch.optim.Adafactor)
    stepped("data_parallel", lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2]))


def check_a_closure_sees_shards(_) -> None:
    """The kernel runs on pieces; what a closure or a hook asks is answered for the whole."""
    from plans import build

    single, optimizer, model, sharded = build("fsdp")
    norms: list[list[torch.Tensor]] = [[], []]
    for n, (m, o) in enumerate(((single, optimizer), (model, sharded))):
        o.register_step_pre_hook(
            lambda o, *_, n=n, m=m: norms[n].append(torch.nn.utils.get_total_norm(list(m.parameters())))
        )

        def closure(m=m, n=n):
            m.zero_grad()
            loss = m(**batch(0))
            loss.backward()
            norms[n].append(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1))
            return loss

        o.step(closure)
    assert len(norms[0]) == 2
    for ours, theirs in zip(norms[1], norms[0]):
        close(ours.detach(), theirs.detach())
    same_weights(single, model)


def check_a_scaler_of_torch_agrees(_) -> None:
    """An overflow that one rank alone sees makes every rank skip the step."""
    for name in CUT:
        _, model = parallel(name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = {k: v.clone() for k, v in model.full_state_dict().items()}
        scaler.scale(model(**batch(0))).backward()
        weight = model.get_parameter("fc1.weight")
        if model.comm.rank == 0 and weight.to_local().numel():
            weight.grad.to_local().view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        for key, value in model.full_state_dict().items():
            close(value, before[key], key)


class Lars(torch.optim.SGD):
    """An elementwise optimizer of PyTorch with a step of its own, which is none."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.mul_(0.1 * p.norm() / p.grad.norm())
        return super().step(closure)


class Slower(torch.optim.SGD):
    """One with a step of its own that still is."""

    def step(self, closure=None):
        self.param_groups[0]["lr"] *= 0.9
        return super().step(closure)


class FactoredWhereLarge(Lion):
    """As Adafactor: another step for large matrices alone."""

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                large = p.ndim == 2 and min(p.shape) >= 128
                p.sub_(p.grad / p.grad.norm(dim=1, keepdim=True) if large else p.grad)


def check_optimizers_of_ones_own_that_are_made_before(_) -> None:
    from loops import batches, check_same, train
    from torch import nn

    def loop_of(make):
        def loop(prepare):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
            loss = nn.functional.cross_entropy
            model, optimizer, loader = prepare(model, make(model.parameters()), batches(), loss=loss)
            yield from train(model, optimizer, loader)

        return loop

    for make in (Lion, lambda ps: Slower(ps, lr=0.1)):
        check_same(loop_of(make), kinds=("fsdp-even",))
    with pytest.raises(MixmeshError, match="steps whole ones only"):
        check_same(loop_of(lambda ps: Lars(ps, lr=0.1)), kinds=("fsdp-even",))
    check_same(loop_of(lambda ps: Lars(ps, lr=0.1)), kinds=("ddp-even",))


IDIOMS = named(
    check_optimizers_of_ones_own_that_are_made_before,
    check_right,
    check_refused,
    check_what_cannot_be_tried_is_refused_at_its_first_step,
    check_the_same_are_right_where_nothing_is_cut,
    check_a_closure_sees_shards,
    check_a_scaler_of_torch_agrees,
)


@pytest.mark.parametrize("name", IDIOMS)
def test_optimizers_made_after(outcomes, name):
    assert_passed(outcomes[name])


@pytest.mark.parametrize(
    "make, expected",
    [
        (Lion, True),
        (lambda ps: Slower(ps, lr=0.1), True),
        (lambda ps: torch.optim.SGD(ps, lr=0.1), True),
        (lambda ps: Lars(ps, lr=0.1), False),
        (Rows, False),
        (Lamb, False),
        (FactoredWhereLarge, False),
        (torch.optim.Adafactor, False),
    ],
)
def test_a_step_is_tried_on_pieces(make, expected):
    """On copies: parameters, gradients and state stay as they are."""
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((300, 200), (7,), (4, 3, 2, 2))]
    before, optimizer = [p.detach().clone() for p in params], make(params)
    assert can_step_pieces(optimizer) is expected
    assert all(torch.equal(p, b) and p.grad is None for p, b in zip(params, before))
    assert not optimizer.state and optimizer.param_groups[0]["params"] == params


def test_sparse_adam_is_refused():
    with pytest.raises(InputError, match="SparseAdam is not supported: gradients are dense"):
        check_supported(torch.optim.SparseAdam([torch.nn.Parameter(torch.zeros(2, 2))]))
