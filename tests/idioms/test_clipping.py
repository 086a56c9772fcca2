"""S2: PyTorch's own clipping, and norms written by hand, are those of the whole model on every rank."""

from __future__ import annotations

import math

import pytest
import torch
from gloo_world import assert_passed
from plans import PLANS, build, close, named, same_weights
from torch import nn
from torch.nn.utils import clip_grad_norm_

from mixmesh.errors import InputError
from mixmesh.runtime import collectives

from plans import batch  # isort: skip


def stepped(name: str, clip) -> None:
    """Two steps with ``clip(parameters)`` before each, alike on a single device and in parallel."""
    single, optimizer, model, sharded = build(name)
    for step in range(2):
        single(**batch(step)).backward()
        model(**batch(step)).backward()
        expected, got = clip(single.parameters()), clip(model.parameters())
        if expected is not None:
            close(
                torch.as_tensor(got, dtype=torch.float64),
                torch.as_tensor(expected, dtype=torch.float64),
                name,
            )
        for o in (optimizer, sharded):
            o.step()
            o.zero_grad()
    same_weights(single, model)


def check_clip_grad_norm(_) -> None:
    for name in PLANS:
        for norm_type in (2.0, 1.0, math.inf):
            stepped(name, lambda ps, n=norm_type: nn.utils.clip_grad_norm_(ps, 0.1, n))


def check_clip_grad_norm_with_and_without_foreach(_) -> None:
    for name in PLANS:
        for foreach in (True, False):
            stepped(name, lambda ps, f=foreach: nn.utils.clip_grad_norm_(ps, 0.1, foreach=f))


def check_total_norm_and_scaling_apart(_) -> None:
    def clip(parameters):
        parameters = [p for p in parameters if p.grad is not None]
        total = nn.utils.get_total_norm([p.grad for p in parameters])
        nn.utils.clip_grads_with_norm_(parameters, 0.1, total)
        return total

    for name in PLANS:
        stepped(name, clip)


def check_clip_grad_value(_) -> None:
    for name in PLANS:
        stepped(name, lambda ps: nn.utils.clip_grad_value_(ps, 0.01))


def check_norms_by_hand(_) -> None:
    def by_hand(parameters):
        gradients = [p.grad for p in parameters if p.grad is not None]
        total = sum(g.data.norm(2).item() ** 2 for g in gradients) ** 0.5
        largest = max(g.abs().max() for g in gradients)
        squares = sum((g**2).sum() for g in gradients)
        finite = all(torch.isfinite(g).all() for g in gradients)
        mean = sum(g.detach().mean() for g in gradients)
        spread = sum(g.std() + g.var(False) + torch.std(g, correction=2) for g in gradients)
        for g in gradients:
            g.mul_(min(1.0, 0.1 / total))
        return [total, float(largest), float(squares), float(finite), float(mean), float(spread)]

    for name in PLANS:
        stepped(name, by_hand)


def check_norms_of_state(_) -> None:
    """Norms of the optimizer's state that a loop logs, also of a state that was loaded."""

    def norms(optimizer) -> torch.Tensor:
        state = optimizer.state.values()
        of_each = [entries[key].norm() for entries in state for key in ("exp_avg", "exp_avg_sq")]
        return torch.tensor([float(x) for x in of_each], dtype=torch.float64).sort().values

    for name in PLANS:
        single, optimizer, model, sharded = build(name)
        for step in range(2):
            for m, o in ((single, optimizer), (model, sharded)):
                m(**batch(step)).backward()
                o.step()
                o.zero_grad()
            close(norms(sharded), norms(optimizer), name)
            sharded.load_state_dict(sharded.state_dict())
            close(norms(sharded), norms(optimizer), f"{name}, loaded")
        same_weights(single, model)


def check_the_optimizers_own_list(_) -> None:
    """Lightning clips what the optimizer holds."""
    single, optimizer, model, sharded = build("fsdp")
    single(**batch(0)).backward()
    model(**batch(0)).backward()
    norms = [nn.utils.clip_grad_norm_(o.param_groups[0]["params"], 0.1) for o in (optimizer, sharded)]
    close(norms[1], norms[0])


def check_clipping_takes_one_message(_) -> None:
    _, model = build("fsdp")[1:3]
    model(**batch(0)).backward()
    sent: list[str] = []
    original = collectives.all_gather

    def counted(channel, *args, **kwargs):
        sent.append(channel.what)
        return original.start(channel, *args, **kwargs)

    collectives.all_gather = collectives.Collective(counted)
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    finally:
        collectives.all_gather = original
    assert sent == ["all_gather of numbers of shards"]


def check_an_idle_rank_takes_part(_) -> None:
    """A rank without any piece of a parameter clips by the whole's norm too."""
    stepped("parameter_server", lambda ps: nn.utils.clip_grad_norm_(ps, 0.1))


def check_clipping_between_batches_of_a_step(_) -> None:
    """Under ``no_sync`` gradients wait to be summed: to clip them or to step by them is refused, and right
    once they are summed. Where nothing waits, it is right at once."""
    for name in PLANS:
        single, optimizer, model, sharded = build(name)
        single(**batch(0)).backward()
        with model.no_sync():
            model(**batch(0)).backward()
        clip_grad_norm_(single.parameters(), 1e9)
        if name == "fsdp":
            clip_grad_norm_(model.parameters(), 1e9)
        else:
            for clip in (clip_grad_norm_, lambda ps, n: nn.utils.clip_grad_value_(iter(ps), n)):
                with pytest.raises(InputError, match="no_sync has left unsummed") as caught:
                    clip(model.parameters(), 1e9)
                assert "test_clipping.py" in caught.value.where
            with pytest.raises(InputError, match="the optimizer steps by gradients that no_sync has left"):
                sharded.step()
        for m, o in ((single, optimizer), (model, sharded)):
            m(**batch(1)).backward()
            clip_grad_norm_(m.parameters(), 0.1)
            o.step()
        same_weights(single, model)


IDIOMS = named(
    check_clipping_between_batches_of_a_step,
    check_clip_grad_norm,
    check_clip_grad_norm_with_and_without_foreach,
    check_total_norm_and_scaling_apart,
    check_clip_grad_value,
    check_norms_by_hand,
    check_norms_of_state,
    check_the_optimizers_own_list,
    check_clipping_takes_one_message,
    check_an_idle_rank_takes_part,
)


@pytest.mark.parametrize("name", IDIOMS)
def test_clipping(outcomes, name):
    assert_passed(outcomes[name])
