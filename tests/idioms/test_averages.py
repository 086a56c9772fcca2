"""Copies of a parallel model, and averages of its weights: as on one device, or refused at once."""

from __future__ import annotations

import copy

import pytest
import torch
from gloo_world import assert_passed
from plans import PLANS, Mlp, batch, close, named, program
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mixmesh.runtime.parallel import parallelize


def start(name: str):
    single, mine = Mlp(0), Mlp(0)
    sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (single, mine)]
    model, optimizer = parallelize(mine, sgd[1], program(name), device="cpu", timeout_s=20)
    return (single, sgd[0]), (model, optimizer)


def step(pair, seed: int) -> None:
    model, optimizer = pair
    optimizer.zero_grad()
    model(**batch(seed)).backward()
    optimizer.step()


def same_loss(single, model, seed: int, what: str) -> None:
    with torch.no_grad():
        close(model(**batch(seed)), single(**batch(seed)), what)


def check_a_deep_copy_stands_for_itself(_) -> None:
    for name in PLANS:
        pairs = start(name)
        for pair in pairs:
            step(pair, 0)
        copies = [copy.deepcopy(model) for model, _ in pairs]
        for pair in pairs:
            step(pair, 1)
        same_loss(*copies, 2, f"{name}: the copy")
        same_loss(*(model for model, _ in pairs), 3, f"{name}: the original of the copy")
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in copies]
        for pair in zip(copies, optimizers):
            step(pair, 4)
        same_loss(*copies, 5, f"{name}: the copy, trained")


def check_a_copy_beside_an_original_that_was_made_whole(_) -> None:
    for name in ("data_parallel", "fsdp"):
        single, original = Mlp(0), Mlp(0)
        model, _ = parallelize(original, None, program(name), device="cpu", timeout_s=20)
        original.load_state_dict(model.full_state_dict())
        with torch.no_grad():
            original.fc1.weight.zero_()
        same_loss(single, copy.deepcopy(model), 0, name)


def check_averaged_models(_) -> None:
    averages = (dict(), dict(multi_avg_fn=get_ema_multi_avg_fn(0.9)))
    for name in PLANS:
        for options in averages:
            pairs = start(name)
            means = [AveragedModel(model, **options) for model, _ in pairs]
            for n in range(3):
                for pair, mean in zip(pairs, means):
                    step(pair, n)
                    mean.update_parameters(pair[0])
            same_loss(*means, 7, f"{name} {options}")


def check_averages_by_hand(_) -> None:
    """As timm's ModelEma does it, over the state of a deep copy, and as a dict of shadows."""
    for name in PLANS:
        pairs = start(name)
        copies = [copy.deepcopy(model).eval().requires_grad_(False) for model, _ in pairs]
        shadows = [{n: p.detach().clone() for n, p in model.named_parameters()} for model, _ in pairs]
        for n in range(3):
            for pair, mean, shadow in zip(pairs, copies, shadows):
                step(pair, n)
                with torch.no_grad():
                    for a, b in zip(mean.state_dict().values(), pair[0].state_dict().values()):
                        if a.is_floating_point():
                            a.copy_(0.9 * a + (1 - 0.9) * b)
                    for key, p in pair[0].named_parameters():
                        shadow[key].mul_(0.9).add_(p, alpha=0.1)
        same_loss(*(m.train() for m in copies), 7, f"{name}: over the state")
        for (model, _), shadow in zip(pairs, shadows):
            with torch.no_grad():
                for key, p in model.named_parameters():
                    p.copy_(shadow[key])
        same_loss(*(model for model, _ in pairs), 8, f"{name}: shadows")


def by_data(mean, model) -> None:
    for a, p in zip(mean.parameters(), model.parameters()):
        a.data = a.data * 0.9 + p.data * 0.1


def in_place(mean, model) -> None:
    for a, p in zip(mean.parameters(), model.parameters()):
        a.mul_(0.9).add_(p, alpha=0.1)


def by_lists(mean, model) -> None:
    torch._foreach_lerp_(list(mean.parameters()), [p.detach() for p in model.parameters()], 0.1)


def by_state(mean, model) -> None:
    mean.load_state_dict(model.state_dict())


def check_an_average_made_of_the_original_is_right_where_parameters_are_cut(_) -> None:
    """A teacher: a copy from before parallelize, which every rank holds whole."""
    for name in ("fsdp", "tensor_parallel"):
        for update in (by_data, in_place, by_lists, by_state):
            pairs, means = start(name), [Mlp(1), Mlp(1)]
            for n in range(2):
                for pair, mean in zip(pairs, means):
                    step(pair, n)
                    with torch.no_grad():
                        update(mean, pair[0])
            for (key, mine), value in zip(means[1].state_dict().items(), means[0].state_dict().values()):
                assert type(mine) is torch.Tensor and mine.shape == value.shape, key
                close(mine, value, f"{name}, {update.__name__}: {key}")


def by_copies(mean, model) -> None:
    for a, p in zip(mean.parameters(), model.parameters()):
        a.data.copy_(p.data)


def check_a_target_that_is_cut_otherwise_follows(_) -> None:
    """A plan cuts what learns and what does not in different ways, as in BYOL of one module."""
    for names in (("fsdp", "tensor_parallel"), ("tensor_parallel", "one_stage_each")):
        for update in (by_data, in_place, by_lists, by_state, by_copies):
            pairs = start(names[0])
            means = [Mlp(1), parallelize(Mlp(1), None, program(names[1]), device="cpu", timeout_s=20)[0]]
            for n in range(2):
                for pair, mean in zip(pairs, means):
                    step(pair, n)
                    with torch.no_grad():
                        update(mean, pair[0])
            same_loss(*means, 7, f"{names}, {update.__name__}")


def check_whole_tensors_beside_shards_are_cut_like_them(_) -> None:
    """Masks of gradients, and penalties on the distance to weights that every rank holds whole, through which
    gradients flow."""
    for name in ("fsdp", "tensor_parallel"):
        pairs = start(name)
        begin = {key: p.detach().clone() + 0.5 for key, p in Mlp(1).named_parameters()}
        for model, optimizer in pairs:
            parameters = dict(model.named_parameters())
            far = sum((begin[key] * (p - begin[key]).square()).sum() for key, p in parameters.items())
            (model(**batch(0)) + far).backward()
            for key, p in parameters.items():
                p.grad.mul_(begin[key] > 0.5)
            torch._foreach_mul_([p.grad for p in parameters.values()], [*begin.values()])
            optimizer.step()
        same_loss(*(model for model, _ in pairs), 3, name)


def check_weights_are_compared(_) -> None:
    """With others of any shape, cut or whole, as a search for one among those of an optimizer does."""
    for name in ("data_parallel", "fsdp", "tensor_parallel"):
        _, (model, _) = start(name)
        whole = {key: p.detach().clone() for key, p in Mlp(0).named_parameters()}
        parameters = dict(model.named_parameters())
        for key, p in parameters.items():
            assert torch.equal(p, whole[key]) and torch.equal(whole[key], p) and torch.allclose(p, whole[key])
            assert not torch.equal(p, whole[key] + 1) and not torch.allclose(p, whole[key] + 1)
            assert [k for k, other in parameters.items() if torch.equal(p, other)] == [key]
            assert not torch.equal(p, torch.zeros(3, 3, 3))


IDIOMS = named(
    check_weights_are_compared,
    check_a_deep_copy_stands_for_itself,
    check_a_copy_beside_an_original_that_was_made_whole,
    check_averaged_models,
    check_averages_by_hand,
    check_an_average_made_of_the_original_is_right_where_parameters_are_cut,
    check_a_target_that_is_cut_otherwise_follows,
    check_whole_tensors_beside_shards_are_cut_like_them,
)


@pytest.mark.parametrize("name", IDIOMS)
def test_averages(outcomes, name):
    assert_passed(outcomes[name])
