"""S9, S10: terms added to the loss outside of the model, gradients asked for, second gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed
from plans import CUT, PLANS, batch, build, close, named, output_plan, same_weights
from test_gloo import same_gradients
from torch import nn

from mixmesh.errors import InputError, MixmeshError
from mixmesh.runtime.parallel import parallelize

PENALTIES = {
    "norms": lambda ps: 0.01 * sum(p.norm() for p in ps),
    "squares": lambda ps: 0.01 * sum((p**2).sum() for p in ps),
    "absolute values": lambda ps: 0.01 * sum(p.abs().sum() for p in ps),
    "means": lambda ps: sum(p.square().mean() for p in ps),
}


def check_penalties(_) -> None:
    for name in PLANS:
        for penalty in PENALTIES.values():
            single, optimizer, model, sharded = build(name)
            for step in range(2):
                for m, o in ((single, optimizer), (model, sharded)):
                    o.zero_grad()
                    (m(**batch(step)) + penalty(list(m.parameters()))).backward()
                    o.step()
            same_weights(single, model)


MIXED = {
    "a share": lambda p: (p / p.norm()).pow(4).sum(),
    "a distance from the mean": lambda p: (p - p.mean()).pow(4).sum(),
    "a tensor of the whole's shape": lambda p: (p * torch.ones(p.shape, requires_grad=True)).sum(),
}


def check_gradients_of_what_is_beside_a_parameter(_) -> None:
    """Each rank would have only its piece's part: right where parameters are whole, and refused where cut."""
    for name in PLANS:
        single, optimizer, model, sharded = build(name)
        for mixed in MIXED.values():
            if name in CUT:
                p = next(p for p in model.parameters() if hasattr(p, "full_tensor"))
                with pytest.raises(InputError, match="one rank's part of a gradient") as caught:
                    mixed(p)
                assert "keeps parameters whole" in str(caught.value)
                with torch.no_grad():
                    mixed(p)
                continue
            for m, o in ((single, optimizer), (model, sharded)):
                o.zero_grad()
                (m(**batch(0)) + 0.01 * sum(mixed(p) for p in m.parameters())).backward()
                o.step()
        same_weights(single, model)


def check_a_penalty_while_gradients_accumulate(_) -> None:
    for name in PLANS:
        single, _, model, _ = build(name)
        for step in range(3):
            (single(**batch(step)) + PENALTIES["squares"](list(single.parameters()))).backward()
        with model.no_sync():
            for step in range(2):
                (model(**batch(step)) + PENALTIES["squares"](list(model.parameters()))).backward()
        (model(**batch(2)) + PENALTIES["squares"](list(model.parameters()))).backward()
        same_gradients(single, model)


def check_dropped_gradients_do_not_come_back(_) -> None:
    """After no_sync, zero_grad of the model and of the optimizer drop what was left to be summed."""
    for name in PLANS:
        single, _, model, sharded = build(name)
        for drop in (sharded.zero_grad, model.zero_grad):
            with model.no_sync():
                model(**batch(0)).backward()
            drop()
            single.zero_grad()
            single(**batch(1)).backward()
            model(**batch(1)).backward()
            same_gradients(single, model)


def check_gradients_asked_for(_) -> None:
    """torch.autograd.grad with respect to parameters gives finished gradients."""
    for name in PLANS:
        single, _, model, _ = build(name)
        names = [n for n, _ in single.named_parameters() if n != "unused"]
        expected = torch.autograd.grad(single(**batch(0)), [single.get_parameter(n) for n in names])
        got = torch.autograd.grad(model(**batch(0)), [model.get_parameter(n) for n in names])
        for n, e, g in zip(names, expected, got):
            close(g.norm(), e.norm(), n)
            close(g.full_tensor() if hasattr(g, "full_tensor") else g, e, n)
        assert all(p.grad is None for p in model.parameters())


def check_second_gradients_are_refused(_) -> None:
    for name in PLANS:
        model = build(name)[2]
        with pytest.raises(MixmeshError, match="has no gradient itself") as caught:
            torch.autograd.grad(model(**batch(0)), [model.get_parameter("fc1.weight")], create_graph=True)
        assert "create_graph" in str(caught.value)


def check_a_second_backward_pass(_) -> None:
    for name in PLANS:
        single, _, model, _ = build(name)
        for m in (single, model):
            loss = m(**batch(0))
            loss.backward(retain_graph=True)
            loss.backward()
        same_gradients(single, model)
        with pytest.raises(MixmeshError, match="was called on this loss before"):
            loss.backward()


def check_gradients_of_inputs(_) -> None:
    """Every rank has the gradient of the whole batch that it gave, together with those of parameters."""
    for name in PLANS:
        single, _, model, _ = build(name)
        mine, whole = batch(0), batch(0)
        for inputs, m in ((whole, single), (mine, model)):
            inputs["x"].requires_grad_()
            (3 * m(**inputs)).backward()
        close(mine["x"].grad, whole["x"].grad, name)
        same_gradients(single, model)
        with torch.no_grad():
            model(**mine)


class Floor(torch.autograd.Function):
    """Its derivative is zero, and its backward is not."""

    @staticmethod
    def forward(ctx, x):
        return x.floor()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Stopped(nn.Module):
    """Stops a part of the gradient of its input, and passes another on where there is none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x):
        with torch.no_grad():
            doubled = x * 2
        scale = (3 * x).detach().square().sum(1, keepdim=True) + doubled.sum(1, keepdim=True)
        return (self.layer(Floor.apply(2 * x)).square() * scale).mean()


def check_gradients_of_inputs_that_are_stopped(_) -> None:
    """The trace knew of no gradient of the input."""
    x = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    single, mine = Stopped(), Stopped()
    plan = output_plan("data_parallel", mine, {"x": x})
    model, _ = parallelize(mine, None, plan, device="cpu", timeout_s=20)
    expected, got = x.clone().requires_grad_(), x.clone().requires_grad_()
    single(expected).backward()
    model(got).backward()
    close(got.grad, expected.grad, "x")


def check_weights_clamped_in_place(_) -> None:
    """As a Wasserstein critic's are: the copies of shard owners' rows follow."""
    for name in PLANS:
        single, optimizer, model, sharded = build(name)
        for step in range(2):
            for m, o in ((single, optimizer), (model, sharded)):
                o.zero_grad()
                m(**batch(step)).backward()
                o.step()
                for p in m.parameters():
                    p.data.clamp_(-0.2, 0.2)
        same_weights(single, model)


def check_a_weight_of_the_loss_is_one_number(_) -> None:
    """A loss that each rank divides by its own number of tokens has a gradient that is nobody's."""
    for name in PLANS:
        model = build(name)[2]
        (model(**batch(0)) / 3).backward()
        with pytest.raises(InputError, match="divided by another number on each rank") as caught:
            (model(**batch(1)) / (1 + dist.get_rank())).backward()
        assert "1 on rank 0 and 0.5 on rank 1" in str(caught.value)


def check_functions_across_pieces_are_refused(_) -> None:
    for name in CUT:
        p = next(p for p in build(name)[2].parameters() if hasattr(p, "full_tensor") and p.ndim == 2)
        for use in (lambda p=p: p @ p.T, lambda p=p: p.mean(dim=0), lambda p=p: p.sort(), lambda p=p: p[0]):
            with pytest.raises(InputError, match="needs elements that other ranks hold") as caught:
                use()
            assert "full_tensor()" in str(caught.value)
        with pytest.raises(InputError, match="plain tensor of shape"):
            p.data.mul_(torch.ones(5, 5))


def check_noise_is_drawn_for_the_whole(_) -> None:
    """On gradients; that of a piece alone is refused, and the error says how it is right."""
    for name in PLANS:
        single, optimizer, model, sharded = build(name)
        for m, o in ((single, optimizer), (model, sharded)):
            m(**batch(0)).backward()
            g = torch.Generator().manual_seed(0)
            for p in m.parameters():
                noise = torch.randn(p.shape, generator=g, dtype=p.dtype)
                if p.grad is not None:
                    p.grad.add_(noise)
            o.step()
        same_weights(single, model)
        shards = [p for p in model.parameters() if hasattr(p, "full_tensor")]
        assert bool(shards) == (name in CUT)
        for p in shards:
            for draw in (torch.randn_like, torch.nn.init.normal_, lambda x: x.data.uniform_(0, 1)):
                with pytest.raises(InputError, match="would draw numbers for a piece") as caught:
                    draw(p)
                assert "p.grad.add_(torch.randn(p.shape, generator=g))" in str(caught.value)


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        return (self.scale.exp() * x + self.bias).square().mean()


def check_a_parameter_of_one_element_is_a_number(_) -> None:
    x = dict(x=torch.ones(6, 2, dtype=torch.float64))
    for kind in ("data_parallel", "fsdp", "one_rank"):
        model, _ = parallelize(Tempered(), None, output_plan(kind, Tempered(), x), device="cpu", timeout_s=20)
        assert model.scale.exp().item() == float(model.scale.exp()) == torch.tensor(0.5).double().exp().item()
        assert model.bias.tolist() == [0.0] and not model.bias and int(model.scale) == 0


def check_weights_as_arrays(_) -> None:
    """``numpy()`` and ``tolist()``, as TensorBoard's histograms read weights and gradients."""
    for name in PLANS:
        single, _, model, _ = build(name)
        for m in (single, model):
            m(**batch(0)).backward()
        for p, q in zip(model.parameters(), single.parameters()):
            pairs = [(p.detach(), q.detach()), (p.data.cpu().abs(), q.data.abs())]
            assert (p.grad is None) == (q.grad is None)
            for mine, one in pairs if p.grad is None else [*pairs, (p.grad, q.grad)]:
                for array in (mine.numpy(), np.asarray(mine)):
                    assert array.shape == tuple(q.shape)
                    close(torch.from_numpy(array.copy()), one, name)
                assert torch.tensor(mine.tolist()).shape == q.shape
            with pytest.raises(RuntimeError, match="requires grad"):
                p.numpy()
            if hasattr(p, "full_tensor"):
                with pytest.raises(ValueError, match="read-only"):  # it would not reach the weights
                    p.detach().numpy()[...] = 0


IDIOMS = named(
    check_penalties,
    check_weights_as_arrays,
    check_gradients_of_what_is_beside_a_parameter,
    check_a_penalty_while_gradients_accumulate,
    check_a_parameter_of_one_element_is_a_number,
    check_dropped_gradients_do_not_come_back,
    check_gradients_asked_for,
    check_second_gradients_are_refused,
    check_a_second_backward_pass,
    check_gradients_of_inputs,
    check_gradients_of_inputs_that_are_stopped,
    check_weights_clamped_in_place,
    check_a_weight_of_the_loss_is_one_number,
    check_functions_across_pieces_are_refused,
    check_noise_is_drawn_for_the_whole,
)


@pytest.mark.parametrize("name", IDIOMS)
def test_outside_terms(outcomes, name):
    assert_passed(outcomes[name])
