"""Hooks: what they do to tensors is kept, and what would be lost is refused with the hook's line."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from gloo_world import assert_passed, run_world
from graph_eval import evaluate
from small_graphs import THREE, TWO, cluster
from torch import nn

from mixmesh.cost import CostModel
from mixmesh.errors import InputError, TraceError
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import make_ratio
from mixmesh.measure.verification import verify
from mixmesh.runtime.parallel import parallelize
from mixmesh.search.baselines import data_parallel
from mixmesh.training.preparation.outside_loss import with_loss

BATCH = {"x": torch.randn(10, 6, generator=torch.Generator().manual_seed(0)), "y": torch.arange(10) % 4}
HERE = "test_hooks.py:"


class Net(nn.Module):
    def __init__(self, in_forward=None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.in_forward = in_forward

    def forward(self, x, y):
        h = self.first(x).relu()
        if self.in_forward is not None:
            self.in_forward(h)
        return F.cross_entropy(self.last(h), y)


def model() -> Net:
    torch.manual_seed(0)
    return Net()


def double(*of):
    return None if of[-1] is None else of[-1] * 2


def look(*of) -> None:
    pass


def change_in_place(module, inputs, output) -> None:
    output.mul_(2)


def scale(module, inputs, output, factor):
    return output * factor


def double_inputs(module, inputs):
    return tuple(x * 2 for x in inputs)


class Observer:
    def __call__(self, *of) -> None:
        pass


GRADIENTS = {
    "register_hook on parameter first.weight": lambda m: m.first.weight.register_hook(double),
    "register_post_accumulate_grad_hook on parameter last.bias": lambda m: (
        m.last.bias.register_post_accumulate_grad_hook(look)
    ),
    "register_full_backward_hook on module last": lambda m: m.last.register_full_backward_hook(look),
    "register_full_backward_pre_hook on module last": lambda m: m.last.register_full_backward_pre_hook(look),
    "register_full_backward_hook on module Net": lambda m: m.register_full_backward_hook(Observer()),
}


@pytest.mark.parametrize("got", GRADIENTS)
def test_a_hook_on_a_gradient_is_refused(got):
    hooked = model()
    GRADIENTS[got](hooked)
    with pytest.raises(TraceError) as caught:
        trace(hooked, BATCH)
    assert caught.value.got == got and HERE in caught.value.where and caught.value.hint
    with pytest.raises(TraceError):  # a plan made before the hook was put there
        parallelize(hooked, None, PROGRAM)


PROGRAM = data_parallel(trace(model(), BATCH).graph, CostModel(cluster(TWO)), make_ratio((0.6, 0.4)))


def test_hooks_of_all_modules_are_refused():
    handle = nn.modules.module.register_module_full_backward_hook(look)
    try:
        with pytest.raises(TraceError, match="all modules"):
            trace(model(), BATCH)
    finally:
        handle.remove()


@pytest.mark.parametrize("how", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_tensor_of_the_forward_pass_is_refused(how):
    with pytest.raises(TraceError) as caught:
        trace(Net(lambda h: getattr(h, how)(double)), BATCH)
    assert how in caught.value.got and HERE in caught.value.where
    h = torch.ones(2, requires_grad=True)
    h.register_hook(double)  # outside of tracing all is as ever
    h.sum().backward()
    assert h.grad.tolist() == [2, 2]


@pytest.mark.parametrize("hook", [look, Observer()])
def test_a_forward_hook_that_only_looks_is_refused(hook):
    hooked = model()
    hooked.first.register_forward_hook(hook)
    with pytest.raises(TraceError, match="would run once") as caught:
        trace(hooked, BATCH)
    assert HERE in caught.value.where
    assert list(hooked.first._forward_hooks.values()) == [hook]


KEPT = {
    "a result in place of another": lambda m: m.first.register_forward_hook(double),
    "a result changed in place": lambda m: m.first.register_forward_hook(change_in_place),
    "a function with an argument": lambda m: m.first.register_forward_hook(partial(scale, factor=3)),
    "inputs": lambda m: m.first.register_forward_pre_hook(double_inputs),
    "weight norm": lambda m: nn.utils.weight_norm(m.first),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_forward_hook_that_changes_tensors_is_kept(name):
    hooked = model()
    KEPT[name](hooked)
    traced = trace(hooked, BATCH)
    program = data_parallel(traced.graph, CostModel(cluster(THREE)), make_ratio((0.5, 0.3, 0.2)))
    assert verify(hooked, BATCH, program, traced=traced).ok
    if name != "weight norm":
        assert not verify(model(), BATCH, program, traced=traced).ok, "the hook is not in the program"


class Keeper:
    def __init__(self) -> None:
        self.last = None
        self.by_name = {}

    def attribute(self, module, inputs, output):
        self.last = output
        return output * 2

    def entry(self, module, inputs, output):
        self.by_name["first"] = output
        return output * 2


SEEN: list = []
COUNTS = {"calls": 0}


def into_a_global(module, inputs, output):
    SEEN.append(output.mean())
    return output * 2


def counting(module, inputs, output):
    COUNTS["calls"] += 1
    return output * 2


def into_a_closure():
    kept = {"values": []}

    def hook(module, inputs, output):
        kept["values"].append(output)
        output.mul_(2)

    return hook


def into_a_set(module, inputs, output):
    OTHERS.add(output)


def named(module, inputs, output, name) -> None:
    FEATURES[name] = output


def of_input(module, inputs) -> None:
    FEATURES["x"] = inputs[0]


FEATURES: dict = {}
OTHERS: set = set()
KEEPER = Keeper()
COLLECTING = {
    "SEEN": lambda: into_a_global,
    "kept['values']": into_a_closure,
    "Keeper.last": lambda: Keeper().attribute,
    "Keeper.by_name": lambda: Keeper().entry,
    "FEATURES['h']": lambda: partial(named, name="h"),
}


@pytest.mark.parametrize("what", COLLECTING)
def test_a_forward_hook_that_collects_is_refused_unless_the_loss_reads_it(what):
    hooked = model()
    hooked.first.register_forward_hook(COLLECTING[what]())
    with pytest.raises(TraceError, match="leaves a tensor in") as caught:
        trace(hooked, BATCH)
    assert caught.value.got.startswith(what) and HERE in caught.value.where
    assert not SEEN and not FEATURES


@pytest.mark.parametrize("hook", [counting, into_a_set])
def test_a_forward_hook_that_collects_other_things_is_refused(hook):
    hooked = model()
    hooked.first.register_forward_hook(hook)
    with pytest.raises(TraceError, match="would .* once") as caught:
        trace(hooked, BATCH)
    assert HERE in caught.value.where
    COUNTS["calls"] = 0
    OTHERS.clear()


class Plain(Net):
    def forward(self, x):
        return self.last(self.first(x).relu())


class Penalty:
    def __call__(self, out, y):
        return F.cross_entropy(out, y) + FEATURES["h"].square().mean()


READ = {
    "an entry": (partial(named, name="h"), Penalty()),
    "all entries": (
        partial(named, name="h"),
        lambda out, y: F.cross_entropy(out, y) + sum(h.square().mean() for h in FEATURES.values()),
    ),
    "a list": (into_a_global, lambda out, y: F.cross_entropy(out, y) + SEEN.pop()),
    "an object": (KEEPER.attribute, lambda out, y: F.cross_entropy(out, y) + KEEPER.last.mean()),
}


@pytest.mark.parametrize("name", READ)
def test_what_a_hook_keeps_for_the_loss_is_part_of_the_program(name):
    hook, loss = READ[name]
    torch.manual_seed(0)
    hooked = Plain()
    hooked.first.register_forward_hook(hook)
    whole = with_loss(hooked, loss)
    traced = trace(whole, BATCH)
    assert not SEEN and not FEATURES and KEEPER.last is None
    params, weight = dict(whole.named_parameters()), hooked.first.weight
    losses = evaluate(traced.graph, params, BATCH)[0], whole(**BATCH)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, weight) for loss in losses))
    SEEN.clear()
    FEATURES.clear()
    KEEPER.last = None


def test_what_a_hook_keeps_on_its_module_is_noted():
    hooked = model()
    hooked.first.register_forward_hook(lambda m, i, o: setattr(m, "seen", o))
    assert trace(hooked, BATCH).left == ("first.seen",)


def later(_: None) -> None:
    """Hooks on the parallel model itself are refused by all ranks at its next call."""
    parallel, _ = parallelize(model(), None, PROGRAM, device="cpu", timeout_s=60)
    parallel(**BATCH).backward()
    put = {
        "gradient of one rank": lambda: parallel.first.weight.register_hook(double),
        "gradient of one rank ": lambda: parallel.last.bias.register_post_accumulate_grad_hook(look),
        "never run": lambda: parallel.last.register_forward_hook(look),
        "never run ": lambda: parallel.last.register_full_backward_hook(look),
    }
    for message, hook in put.items():
        handle = hook()
        with pytest.raises(InputError, match=message.strip()) as caught:
            parallel(**BATCH)
        assert HERE in caught.value.where
        handle.remove()
        parallel(**BATCH).backward()
    seen = []
    parallel.register_forward_hook(lambda m, i, o: seen.append(o))
    loss = parallel(**BATCH)
    assert seen == [loss]


def test_hooks_on_the_parallel_model():
    assert_passed(run_world(2, {"later": later})["later"])
