"""S8: parameters frozen, unfrozen, replaced or converted after planning."""

from __future__ import annotations

import pytest
import torch
from gloo_world import assert_passed
from loops import prepare
from plans import PLANS, Mlp, batch, build, close, named, program, same_weights

from mixmesh.errors import InputError
from mixmesh.lang.ir import parse_program
from mixmesh.runtime.parallel import parallelize


def check_freezing_is_exact(_) -> None:
    for name in PLANS:
        single, optimizer, model, sharded = build(name)
        for step in range(4):
            for m, o in ((single, optimizer), (model, sharded)):
                for p in (m.get_parameter("fc1.weight"), m.get_parameter("fc2.bias")):
                    p.requires_grad_(step not in (1, 2))
                o.zero_grad()
                m(**batch(step)).backward()
                assert (m.get_parameter("fc1.weight").grad is None) == (step in (1, 2))
                o.step()
        same_weights(single, model)


def check_a_momentum_begins_later(_) -> None:
    """SGD keeps no momentum of what is frozen from the start, or loses its first gradients, as in SwAV."""
    for name in PLANS:
        single, optimizer, model, sharded = build(
            name, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01)
        )
        for step in range(4):
            for m, o in ((single, optimizer), (model, sharded)):
                m.get_parameter("fc1.weight").requires_grad_(step > 1)
                o.zero_grad()
                m(**batch(step)).backward()
                if step < 1:
                    m.get_parameter("fc2.bias").grad = None
                o.step()
        same_weights(single, model)
        assert sharded.param_groups[0]["fused"]


def check_unfreezing_is_refused(_) -> None:
    """A program that was planned with a frozen parameter computes no gradient of it."""
    for name in ("data_parallel", "fsdp"):
        text = str(program(name)).replace('param("fc1.weight")', 'param("fc1.weight", trainable=false)')
        frozen = Mlp(0)
        frozen.fc1.weight.requires_grad_(False)
        model, _ = parallelize(frozen, None, parse_program(text), device="cpu", timeout_s=20)
        model(**batch(0)).backward()
        assert model.get_parameter("fc1.weight").grad is None
        model.get_parameter("fc1.weight").requires_grad_(True)
        with pytest.raises(InputError, match="was frozen when the plan was made") as caught:
            model(**batch(0))
        assert "plan again" in str(caught.value) and "p.grad = None" in str(caught.value)


def check_what_is_frozen_while_it_is_lent_stays_so(_) -> None:
    """As scripts do it on the module that an integration lends."""
    for name in ("data_parallel", "fsdp"):
        single, optimizer, model, sharded = build(name)
        for step in range(4):
            if step in (1, 3):
                single.fc1.requires_grad_(step == 3)
                with model.whole() as m:
                    m.fc1.requires_grad_(step == 3)
            for m, o in ((single, optimizer), (model, sharded)):
                o.zero_grad()
                m(**batch(step)).backward()
                assert (m.get_parameter("fc1.weight").grad is None) == (step in (1, 2))
                o.step()
        same_weights(single, model)


def check_what_is_unfrozen_while_it_is_lent_is_refused(_) -> None:
    for name in ("data_parallel", "fsdp"):
        text = str(program(name)).replace('param("fc1.weight")', 'param("fc1.weight", trainable=false)')
        frozen = Mlp(0)
        frozen.fc1.weight.requires_grad_(False)
        model, _ = parallelize(frozen, None, parse_program(text), device="cpu", timeout_s=20)
        with model.whole() as m:
            assert not m.fc1.weight.requires_grad
            m.requires_grad_(True)
        with pytest.raises(InputError, match="fc1.weight was frozen when the plan was made"):
            model(**batch(0))


def check_replaced_parameters_are_refused(_) -> None:
    for name in PLANS:
        model = build(name)[2]
        model.fc2.bias = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
        with pytest.raises(InputError, match="replaced, added or removed") as caught:
            model(**batch(0))
        assert "fc2.bias" in str(caught.value)


def check_replaced_modules_are_refused(_) -> None:
    """Through the script's own object; a module that is added is none of the program's business, nor is a
    metric."""
    from torchmetrics import MeanMetric

    net = Mlp(1)
    net.seen = MeanMetric()
    model, optimizer, _ = prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), [batch(0)])
    net.extra, net.seen = torch.nn.Linear(2, 2), MeanMetric()
    model(**batch(0)).backward()
    net.fc2 = torch.nn.Linear(net.fc2.in_features, net.fc2.out_features).double()
    with pytest.raises(InputError, match="fc2 was replaced since"):
        model(**batch(0))


def check_pruning(_) -> None:
    """Pruning after planning adds parameters: refused with what is right, a mask that was there before."""
    from torch.nn.utils import prune

    for name in ("data_parallel", "fsdp"):
        model = build(name)[2]
        with pytest.raises(InputError, match="prune.identity"):
            prune.l1_unstructured(model.fc1, "weight", amount=0.5)
            model(**batch(0))


def check_new_memory_is_followed(_) -> None:
    """``p.data = values``, as averages of weights are swapped in and out."""
    for name in ("data_parallel", "fsdp", "tensor_parallel"):
        single, _, model, _ = build(name)
        before = [p.data for p in model.parameters()]
        for m in (single, model):
            for p in m.parameters():
                p.data = p.data * 0.5
        with torch.no_grad():
            close(model(**batch(0)), single(**batch(0)))
        for p, data in zip(model.parameters(), before):
            p.data = data
        with torch.no_grad():
            close(model(**batch(0)), Mlp(0)(**batch(0)))


def check_conversions(_) -> None:
    model = build("fsdp")[2]
    assert model.to("cpu") is model and model.to(memory_format=torch.channels_last) is model
    for convert in (model.half, model.float, lambda: model.to("meta")):
        with pytest.raises(InputError, match="keeps the device and the dtype"):
            convert()


IDIOMS = named(
    check_freezing_is_exact,
    check_a_momentum_begins_later,
    check_unfreezing_is_refused,
    check_what_is_frozen_while_it_is_lent_stays_so,
    check_what_is_unfrozen_while_it_is_lent_is_refused,
    check_replaced_parameters_are_refused,
    check_replaced_modules_are_refused,
    check_pruning,
    check_new_memory_is_followed,
    check_conversions,
)


@pytest.mark.parametrize("name", IDIOMS)
def test_frozen(outcomes, name):
    assert_passed(outcomes[name])
