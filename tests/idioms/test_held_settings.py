"""Settings that a loss or a model reads by way of something else: a class that a module holds, an object that
is called, a method that reads a global variable, a function in a dict, a value that is no plain number. All
are read anew when a loop changes them."""

from __future__ import annotations

import enum
import warnings
from collections import deque
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from gloo_world import assert_passed
from loops import batches, check_same, prepare, sgd, train
from plans import named
from torch import nn
from torch.nn import functional as F

from mixmesh.errors import InputError

BETA = 0.0


class CFG:
    beta = 0.0

    class Inner:
        beta = 0.0


class Mode(enum.Enum):
    PLAIN, DOUBLE = 1, 2


class Weights(NamedTuple):
    beta: float = 0.0


class Penalty:
    """An object that is called, as an annealing schedule."""

    def __init__(self) -> None:
        self.beta = 0.0

    def __call__(self, logits):
        return self.beta * logits.square().mean()

    def of_variable(self, logits):
        return penalty(logits)

    @staticmethod
    def static(logits):
        return penalty(logits)


class Doubled(Penalty):
    def of_variable(self, logits):
        return 2 * super().of_variable(logits)


class Net(nn.Module):
    """Scales what it computes by a setting of something that it holds."""

    shift = 0.0

    def __init__(self, held=None, scale=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.held, self.scale = nn.Linear(6, 4).double(), held, scale

    def forward(self, x):
        x = self.layer(x)
        return x if self.scale is None else self.scale(x, self.held) + Net.shift


def penalty(logits):
    return BETA * logits.square().mean()


@torch.no_grad()
def coefficient(logits):
    return BETA * logits.abs().mean()


def by_import(logits):
    from test_held_settings import BETA as beta

    return beta * logits.square().mean()


def of_argument(logits, y, cfg=CFG):
    return F.cross_entropy(logits, y) + cfg.beta * logits.square().mean()


def scaled(logits, beta, **others):
    return beta * logits.mean()


PENALTIES = {"square": penalty}


def with_term(term):
    return lambda logits, y: F.cross_entropy(logits, y) + term(logits)


def losses(changed):
    """By name, losses that read settings of ``changed``."""
    c, calls, doubled = changed, changed["calls"], changed["doubled"]
    return {
        "default": of_argument,
        "argument": partial(of_argument, cfg=CFG),
        "class in a class": with_term(lambda logits: CFG.Inner.beta * logits.square().mean()),
        "copy": with_term(lambda logits: c["a"].copy()["b"]["c"]["d"] * logits.mean()),
        "alias": with_term(lambda logits: getattr(CFG, "beta") * logits.square().mean()),  # noqa: B009
        "called object": with_term(lambda logits: calls(logits)),
        "method": with_term(lambda logits: doubled.of_variable(logits)),
        "static method": with_term(lambda logits: Penalty.static(logits)),
        "registry": with_term(lambda logits: PENALTIES["square"](logits)),
        "decorated": with_term(lambda logits: coefficient(logits) * logits.mean()),
        "compiled": torch.compile(with_term(penalty), backend="eager"),
        "import": with_term(by_import),
        "number of NumPy": with_term(lambda logits: c["number"] * logits.square().mean()),
        "array": with_term(lambda logits: float(c["array"][0]) * logits.square().mean()),
        "set": with_term(lambda logits: logits.mean() if "mean" in c["set"] else 0),
        "queue": with_term(lambda logits: sum(c["queue"]) * logits.mean()),
        "depths": with_term(lambda logits: c["a"]["b"]["c"]["d"] * logits.mean()),
        "vars": with_term(lambda logits: scaled(logits, **vars(c["calls"]))),
        "enum": with_term(lambda logits: c["mode"].value * logits.mean()),
        "function": lambda logits, y: c["function"](logits, y),
        "criterion": lambda logits, y: c["criterion"](logits, y),
        "terms": lambda logits, y: sum(term(logits, y) for term in c["terms"]),
    }


def start() -> dict:
    parts = {
        "calls": Penalty(),
        "doubled": Doubled(),
        "array": np.zeros(2),
        "set": set(),
        "queue": deque([0.0]),
    }
    parts |= {"a": {"b": {"c": {"d": 0.0}}}, "terms": [F.cross_entropy]}
    set_to(parts, 0)
    return parts


def set_to(changed: dict, n: int) -> None:
    global BETA
    BETA = CFG.beta = CFG.Inner.beta = Net.shift = changed["calls"].beta = 0.5 * n
    changed["number"], changed["array"][0] = np.float64(0.5 * n), 0.5 * n
    changed["mode"] = Mode.DOUBLE if n else Mode.PLAIN
    changed["a"]["b"]["c"]["d"] = 0.5 * n
    changed["function"] = F.multi_margin_loss if n else F.cross_entropy
    changed["criterion"] = nn.MultiMarginLoss() if n else nn.CrossEntropyLoss()
    if n:
        changed["set"].add("mean")
        changed["queue"].append(0.5)
        changed["terms"].append(F.multi_margin_loss)


def same(loop) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_same(loop, kinds=("ddp-even",))


def check_settings_of_a_loss_are_read_anew(_) -> None:
    def loop(prepare, kind):
        changed = start()
        model = Net()
        model, optimizer, loader = prepare(model, sgd(model), batches()[:1], loss=losses(changed)[kind])
        for n in range(2):
            set_to(changed, n)
            yield from train(model, optimizer, loader)

    for kind in losses(start()):
        same(partial(loop, kind=kind))


def check_settings_of_a_model_are_read_anew(_) -> None:
    models = {
        "class": lambda: Net(CFG, lambda x, held: x * (1 + held.beta)),
        "called object": lambda: Net(Penalty(), lambda x, held: x + held(x)),
        "named tuple": lambda: Net(Weights(), lambda x, held: x * (1 + held.beta)),
        "function": lambda: Net(F.relu, lambda x, held: held(x)),
    }

    def loop(prepare, kind):
        changed, net = start(), models[kind]()
        model, optimizer, loader = prepare(net, sgd(net), batches()[:1], loss=F.cross_entropy)
        for n in range(2):
            set_to(changed, n)
            if kind == "called object":
                net.held.beta = 0.5 * n
            elif n and kind == "named tuple":
                net.held = net.held._replace(beta=0.5)
            elif n and kind == "function":
                net.held = torch.tanh
            yield from train(model, optimizer, loader)

    for kind in models:
        same(partial(loop, kind=kind))


def check_another_tensor_in_a_dict_is_refused(_) -> None:
    held = {"weight": torch.ones(4, dtype=torch.float64)}
    model = Net()
    loss = lambda logits, y: F.cross_entropy(logits, y, weight=held["weight"])  # noqa: E731
    model, optimizer, loader = prepare(model, sgd(model), batches()[:1], loss=loss, planner="ddp-even")
    list(train(model, optimizer, loader))
    held["weight"] = torch.full((4,), 0.5, dtype=torch.float64)
    with pytest.raises(InputError, match=r"held\['weight'\] is a constant of the plan"):
        list(train(model, optimizer, loader))


class Attributes:
    """A configuration whose entries are found by ``__getattr__``."""

    def __init__(self, **entries) -> None:
        self.__dict__["_content"] = entries

    def __getattr__(self, name):
        if name in self._content:
            return self._content[name]
        raise AttributeError(name)


def check_a_configuration_by_getattr_gets_no_warning(_) -> None:
    cfg = Attributes(beta=0.5)
    model = Net()
    loss = with_term(lambda logits: cfg.beta * logits.mean())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the forward pass changes")
        prepare(model, sgd(model), batches()[:1], loss=loss, planner="ddp-even")


class Trainer:
    def __init__(self, state) -> None:
        self.state = state

    def loss(self, logits, y):
        return F.cross_entropy(logits, y) + self.state["beta"] * logits.mean()


def by_key(logits, y, cfg):
    return F.cross_entropy(logits, y) + cfg["beta"] * logits.mean()


def check_counts_beside_a_setting_are_not_read(_) -> None:
    """Of an argument, and of an object's dict: no step is traced again for them."""
    for kind in ("argument", "position", "trainer"):
        state = {"beta": 0.5, "step": 0}
        losses = {
            "argument": partial(by_key, cfg=state),
            "position": partial(lambda cfg, logits, y: by_key(logits, y, {"beta": cfg["beta"]}), state),
            "trainer": Trainer(state).loss,
        }
        model = Net()
        model, optimizer, loader = prepare(
            model, sgd(model), batches()[:1], loss=losses[kind], planner="ddp-even"
        )
        for _ in range(2):
            state["step"] += 1
            list(train(model, optimizer, loader))
        assert not model._runtime.forms.traces.spent_s, kind


IDIOMS = named(
    check_settings_of_a_loss_are_read_anew,
    check_settings_of_a_model_are_read_anew,
    check_another_tensor_in_a_dict_is_refused,
    check_a_configuration_by_getattr_gets_no_warning,
    check_counts_beside_a_setting_are_not_read,
)


@pytest.mark.parametrize("name", IDIOMS)
def test_held_settings(outcomes, name):
    assert_passed(outcomes[name])
