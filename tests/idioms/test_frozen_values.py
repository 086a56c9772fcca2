"""Values that a program holds as they were when the model was traced, and that change in a loop: numbers of
modules, tensors of closures, draws from other generators than torch's, batches of objects."""

from __future__ import annotations

import copy
import os
import random
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from gloo_world import assert_passed
from loops import KINDS, batches, check_same, prepare, rows, sgd, train
from plans import named
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from mixmesh.errors import InputError, TraceError
from mixmesh.frontend.trace import trace
from mixmesh.frontend.trace.reads import Number, reads_of
from mixmesh.training.preparation.outside_loss import with_loss


class Net(nn.Module):
    def __init__(self, body: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = body or Scaled(), nn.Linear(8, 4)
        self.calls = 0
        self.double()

    def forward(self, x):
        return self.head(self.body(x).relu())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.alpha, self.noted = nn.Linear(6, 8), 1.0, 0
        self.register_buffer("shift", torch.ones(8), persistent=False)

    def forward(self, x):
        return self.inner(x) * self.alpha + self.shift


def check_a_number_of_a_module_is_traced_again(_) -> None:
    def loop(prepare):
        body = Scaled()
        model = Net(body)
        model, optimizer, loader = prepare(model, sgd(model), batches(), loss=F.cross_entropy)
        for epoch in range(3):
            body.alpha = 1.0 - 0.5 * (epoch % 2)
            body.noted += 1  # not read
            yield from train(model, optimizer, loader)
        if hasattr(model, "_runtime"):
            # the planned one, and one for the other value
            assert len({key[3] for key in model._runtime.forms.kept}) <= 1
            assert len(model._runtime.forms.kept) <= 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_same(loop)


def check_a_number_of_a_criterion_is_traced_again(_) -> None:
    def loop(prepare):
        criterion = nn.CrossEntropyLoss()
        model = Net()
        model, optimizer, loader = prepare(model, sgd(model), batches(), loss=criterion)
        yield from train(model, optimizer, loader)
        criterion.label_smoothing = 0.3
        yield from train(model, optimizer, loader)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_same(loop, kinds=("fsdp-even",))


def check_a_number_of_a_closure_is_traced_again(_) -> None:
    def loop(prepare):
        weight = 0.0

        def loss(logits, y):
            return F.cross_entropy(logits, y) + weight * logits.square().mean()

        model = Net()
        model, optimizer, loader = prepare(model, sgd(model), batches(), loss=loss)
        for epoch in range(2):
            weight = 0.5 * epoch
            yield from train(model, optimizer, loader)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_same(loop, kinds=("fsdp-even",))


def check_a_changed_tensor_of_a_closure_is_refused(_) -> None:
    """In place, and replaced; of a function, and of a module that it calls."""
    weights = torch.ones(4, dtype=torch.float64)
    teacher = nn.Linear(6, 4).double().requires_grad_(False)

    def loss(logits, y):
        return F.cross_entropy(logits, y, weight=weights) + (logits * teacher.bias).mean()

    def replaced() -> None:
        nonlocal weights
        weights = torch.zeros(4, dtype=torch.float64)

    changes = (lambda: weights.mul_(2), lambda: teacher.bias.mul_(2), replaced)
    for change, name in zip(changes, ("weights", "Linear.bias", "weights")):
        model = Net()
        model, optimizer, loader = prepare(model, sgd(model), batches(), loss=loss)
        list(train(model, optimizer, loader))
        change()
        with pytest.raises(InputError, match=f"{name} is a constant of the plan") as caught:
            model(*batches()[0])
        assert "register_buffer" in str(caught.value)


class Weighted(nn.Module):
    """A criterion that learns its weights, and keeps the mean of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.log_weights = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.register_buffer("center", torch.zeros(4, dtype=torch.float64))

    def forward(self, logits, y):
        one, other = torch.exp(-self.log_weights)
        shifted = logits - self.center
        with torch.no_grad():
            self.center.mul_(0.9).add_(logits.mean(0), alpha=0.1)
        loss = one * F.cross_entropy(shifted, y) + other * logits.square().mean()
        return loss + self.log_weights.sum()


def check_a_criterion_learns(_) -> None:
    def loop(prepare):
        # a Sequential runs all modules that it has
        model, criterion = nn.Sequential(Net(), nn.ReLU()), Weighted()
        optimizer = torch.optim.Adam([*model.parameters(), *criterion.parameters()], lr=0.05)
        model, optimizer, loader = prepare(model, optimizer, batches(), loss=criterion)
        for _ in range(2):
            yield from train(model, optimizer, loader)
        average = copy.deepcopy(model)
        model.eval()
        with torch.no_grad():
            for batch in batches():
                yield model(*batch)
                yield average(*batch)
        full = model.full_state_dict() if hasattr(model, "_runtime") else model.state_dict()
        yield full["loss.log_weights"]
        yield full["loss.center"]

    check_same(loop)


def check_a_weight_of_a_criterion_stays_the_scripts(_) -> None:
    """It may be called, and is refused where it is changed."""
    criterion = nn.CrossEntropyLoss(weight=torch.ones(4, dtype=torch.float64))
    model = Net()
    model, optimizer, loader = prepare(model, sgd(model), batches(), loss=criterion)
    list(train(model, optimizer, loader))
    assert criterion(torch.zeros(2, 4, dtype=torch.float64), torch.tensor([0, 1])) > 1
    criterion.weight[0] = 5
    with pytest.raises(InputError, match="CrossEntropyLoss.weight is a constant of the plan"):
        model(*batches()[0])


class Configuration:
    """As libraries have them."""

    def __init__(self) -> None:
        self.alpha, self.noted, self.inner = 1.0, 0, None


class Configured(nn.Module):
    """Reads numbers of an object, of one in it, of a dict, of another one by a key that it computes, and of a
    list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)
        self.config, self.config.inner = Configuration(), Configuration()
        self.options = {"scale": 1.0, "noted": 0}
        self.by_name = {"a": 1.0, "b": 1.0}
        self.powers, self.name = [1.0, 0.5], "a"

    def forward(self, x):
        x = self.layer(x) * self.config.alpha * self.options["scale"]
        return self.config.inner.alpha * x + self.by_name[self.name] + self.powers[0]


SETTINGS = {"scale": 0.1, "noted": 0}


def check_a_number_within_a_container_is_traced_again(_) -> None:
    def loop(prepare):
        body = Configured()
        model = Net(body)
        model, optimizer, loader = prepare(model, sgd(model), batches(size=21), loss=F.cross_entropy)
        changes = [lambda: setattr(body.config, "alpha", 0.5), lambda: body.options.update(scale=2.0)]
        for change in (lambda: None, *changes):
            change()
            body.config.noted += 1  # not read
            body.options["noted"] += 1
            yield from train(model, optimizer, loader)
        if hasattr(model, "_runtime"):
            assert len(model._runtime.forms.kept) == len(changes)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_same(loop, kinds=("fsdp-even",))


def check_an_equal_container_may_be_set_and_is_read_from_then_on(_) -> None:
    """As ``update_attr`` of YOLO's averages does at every epoch, with the names of classes."""

    def loop(prepare):
        model = Net(Configured())
        model, optimizer, loader = prepare(model, sgd(model), batches(size=21), loss=F.cross_entropy)
        average = copy.deepcopy(model)
        for target in (average, model):
            target.body.options, target.body.powers = dict(model.body.options), list(model.body.powers)
        yield from train(model, optimizer, loader)
        model.body.options["scale"] = 2.0
        yield from train(model, optimizer, loader)
        if hasattr(model, "_runtime"):
            for other in ([1.0, 0.25], [1, 0.5], [1.0], (1.0, 0.5)):
                with pytest.raises(InputError, match="powers was planned"):
                    model.body.powers = other

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_same(loop, kinds=("fsdp-even",))


def check_numbers_that_are_drawn_with_the_batch(_) -> None:
    """The way that a loss with draws is told."""

    def loop(prepare):
        def with_noise(x, y):
            return x, y, torch.rand(len(x), 4, dtype=torch.float64)

        def loss(logits, y, noise):
            return F.cross_entropy(F.dropout(logits, 0.3, training=False) + noise, y)

        model = Net()
        model, optimizer, loader = prepare(model, sgd(model), batches(), loss=loss, inputs=with_noise)
        torch.manual_seed(3)
        yield from train(model, optimizer, (with_noise(x, y) for x, y in loader))

    check_same(loop, kinds=("fsdp-even",))


class Scaling(Net):
    """Reads a number of the model itself."""

    alpha = 1.0

    def forward(self, x):
        return super().forward(x) * self.alpha


def check_a_number_of_the_script_s_own_model_is_traced_again(_) -> None:
    """Where the model that is planned is a copy of it, which computes the loss."""

    def loop(prepare):
        own = Scaling()
        model, optimizer, loader = prepare(own, sgd(own), batches(), loss=F.cross_entropy)
        for alpha in (1.0, 0.5):
            own.alpha = alpha
            yield from train(model, optimizer, loader)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_same(loop, kinds=("fsdp-even",))


def check_a_number_set_on_the_parallel_model_is_traced_again(_) -> None:
    """The script's own object has no other name any more. A number of the class, of the model, of a part;
    and a word that chooses a branch."""

    class Schedule(Scaling):
        def __init__(self) -> None:
            super().__init__()
            self.way, self.beta, self.weights = "plain", 1.0, [1.0]

        def forward(self, x):
            h = super().forward(x) * self.beta
            return h.tanh() if self.way == "tanh" else h

    for loss in (F.cross_entropy, None):

        def loop(prepare, loss=loss):
            model = Schedule()
            model, optimizer, loader = prepare(model, sgd(model), batches(), loss=loss)
            for alpha, beta, way, inner in (
                (1.0, 1.0, "plain", 1.0),
                (0.5, 1.0, "tanh", 1.0),
                (0.5, 2.0, "plain", 0.3),
            ):
                model.alpha, model.beta, model.way, model.body.alpha = alpha, beta, way, inner
                for x, y in loader:
                    value = model(x, y) if loss else F.cross_entropy(model(x), y)
                    value.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    yield value
            if hasattr(model, "_runtime"):
                with pytest.raises(InputError, match="was planned"):
                    model.weights = [2.0]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_same(loop, kinds=("fsdp-even",))


class Tasks(Net):
    """Heads of which a word chooses one."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.task = nn.Linear(8, 4).double(), "head"

    def forward(self, x):
        return getattr(self, self.task)(self.body(x).relu())


def check_a_parameter_that_was_planned_without_a_gradient_is_refused_when_it_has_one(_) -> None:
    """It would never learn."""
    for planner in KINDS:
        model = Tasks()
        model, optimizer, loader = prepare(
            model, sgd(model), batches(), loss=F.cross_entropy, planner=planner
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            list(train(model, optimizer, loader))
            model.task = "other"
            with pytest.raises(InputError, match="other.bias gets a gradient in this call") as caught:
                list(train(model, optimizer, loader))
        assert "0 * sum" in caught.value.hint[0]


def masked(samples):
    """Draws a mask for each batch, as language models' data collators do."""
    x, y = map(torch.stack, zip(*samples))
    return x * (torch.rand(len(x), 1) > 0.3), y


def check_masks_that_a_collate_function_draws_are_those_of_one_device(_) -> None:
    def loop(prepare):
        model, loader = Net(), DataLoader(rows(), 7, collate_fn=masked, shuffle=True)
        model, optimizer, loader = prepare(model, sgd(model), loader, loss=F.cross_entropy)
        for _ in range(2):
            yield from train(model, optimizer, loader)

    check_same(loop)


class Changing(Dataset):
    """Changes each sample by a generator of its own."""

    def __init__(self, draw) -> None:
        self.rows, self.draw = rows(), draw

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        x, y = self.rows[i]
        return x + self.draw(), y


class Masking:
    """A collate function that is an object with a generator of its own."""

    def __init__(self) -> None:
        self.numbers = np.random.default_rng(3)

    def __call__(self, samples):
        x, y = map(torch.stack, zip(*samples))
        return x * torch.from_numpy(self.numbers.random((len(x), 1)) > 0.3), y


def check_generators_of_the_script_s_own_draw_what_they_draw_on_one_device(_) -> None:
    """In collate functions and in data sets; where ranks have made theirs with other seeds, too."""

    def masking_by(generator):
        def collate(samples):
            x, y = map(torch.stack, zip(*samples))
            return x * (torch.rand(len(x), 1, generator=generator) > 0.3), y

        return collate

    def loop(prepare):
        rank = int(os.environ.get("RANK", "0"))
        of_torch, of_python = torch.Generator().manual_seed(7 + rank), random.Random(7)
        for data, collate in (
            (rows(), Masking()),
            (rows(), masking_by(of_torch)),
            (Changing(of_python.random), None),
            (Changing(np.random.RandomState(2).rand), None),
        ):
            model, loader = Net(), DataLoader(data, 7, collate_fn=collate, shuffle=True)
            model, optimizer, loader = prepare(model, sgd(model), loader, loss=F.cross_entropy)
            for _ in range(2):
                yield from train(model, optimizer, loader)

    check_same(loop)


TEMPERATURE = 1.0
SCALES = {"body": {"alpha": 1.0}, "unread": 0}


class Settings:
    beta = 0.0
    unread = 0


def scaled(hidden):
    return hidden * SCALES["body"]["alpha"]


class OfVariables(Net):
    """Reads variables of its file, by a function and by a method of its own."""

    def cooled(self, hidden):
        return scaled(hidden) / TEMPERATURE

    def forward(self, x):
        return self.head(self.cooled(self.body(x)).relu())


def with_penalty(logits, y):
    return F.cross_entropy(logits, y) + Settings.beta * logits.square().mean()


class Recipe:
    """An object whose method is the loss."""

    def __init__(self) -> None:
        self.smoothing, self.history = 0.0, [0.0]

    def loss(self, logits, y):
        return F.cross_entropy(logits, y, label_smoothing=self.smoothing)


def check_variables_of_a_file_are_traced_again(_) -> None:
    def loop(prepare):
        global TEMPERATURE
        TEMPERATURE, SCALES["body"]["alpha"], Settings.beta = 1.0, 1.0, 0.0
        model = OfVariables()
        model, optimizer, loader = prepare(
            model, sgd(model), batches(), loss=lambda logits, y: with_penalty(logits, y)
        )
        for epoch in range(4):
            TEMPERATURE = 1.0 + (epoch == 1)
            SCALES["body"]["alpha"] = 1.0 + (epoch == 2)
            Settings.beta = 0.5 * (epoch == 3)
            SCALES["unread"] = Settings.unread = epoch
            yield from train(model, optimizer, loader)
        if hasattr(model, "_runtime"):
            assert len(model._runtime.forms.kept) == 3, "one for each value"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_same(loop, kinds=("fsdp-even",))


def check_a_number_of_an_object_whose_method_is_the_loss_is_traced_again(_) -> None:
    def loop(prepare):
        recipe, model = Recipe(), Net()
        model, optimizer, loader = prepare(model, sgd(model), batches(), loss=recipe.loss)
        for epoch in range(2):
            recipe.smoothing = 0.2 * epoch
            for loss in train(model, optimizer, loader):
                recipe.history.append(float(loss))
                yield loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_same(loop, kinds=("ddp-even",))


IDIOMS = named(
    check_masks_that_a_collate_function_draws_are_those_of_one_device,
    check_generators_of_the_script_s_own_draw_what_they_draw_on_one_device,
    check_variables_of_a_file_are_traced_again,
    check_a_number_of_an_object_whose_method_is_the_loss_is_traced_again,
    check_numbers_that_are_drawn_with_the_batch,
    check_a_number_within_a_container_is_traced_again,
    check_an_equal_container_may_be_set_and_is_read_from_then_on,
    check_a_number_of_the_script_s_own_model_is_traced_again,
    check_a_number_set_on_the_parallel_model_is_traced_again,
    check_a_parameter_that_was_planned_without_a_gradient_is_refused_when_it_has_one,
    check_a_criterion_learns,
    check_a_weight_of_a_criterion_stays_the_scripts,
    check_a_number_of_a_module_is_traced_again,
    check_a_number_of_a_criterion_is_traced_again,
    check_a_number_of_a_closure_is_traced_again,
    check_a_changed_tensor_of_a_closure_is_refused,
)


@pytest.mark.parametrize("name", IDIOMS)
def test_frozen_values(outcomes, name):
    assert_passed(outcomes[name])


@pytest.mark.parametrize("draw, name", [(random.random, "random"), (np.random.rand, "numpy.random")])
def test_draws_from_other_generators_are_refused(draw, name):
    class Drawn(Net):
        def forward(self, x, y):
            return F.cross_entropy(super().forward(x) * draw(), y)

    with pytest.raises(TraceError, match=f"draws from {name}:") as caught:
        trace(Drawn(), batches()[0])
    assert "torch.rand" in str(caught.value)


def sown(seed, draw):
    class Sown(Net):
        def forward(self, x, y):
            seed(7)
            return F.cross_entropy(super().forward(x) * draw(), y)

    return Sown()


SEEDED = [(random, random.random, "random"), (np.random, np.random.rand, "numpy.random")]


@pytest.mark.parametrize("module, draw, name", SEEDED)
def test_draws_after_the_model_s_own_seed_are_the_same_in_every_step(module, draw, name):
    for _ in range(2):  # a trace leaves the generators as they were
        states = random.getstate(), np.random.get_state()[1].tolist()
        traced = trace(sown(lambda n: module.seed(n), draw), batches()[0])
        assert states == (random.getstate(), np.random.get_state()[1].tolist())
        assert f"the forward pass seeds {name}:" in str(traced.warnings)
    module.seed(7)
    assert draw() in [arg for node in traced.graph.nodes for arg in node.args]


@pytest.mark.parametrize("module, draw, name", SEEDED)
def test_draws_that_are_not_known_to_be_seeded_are_refused(module, draw, name):
    """By each trace, though the state of the generator is the same after it."""
    for sowing in (module.seed, lambda n: module.seed(), lambda n: (draw(), module.seed(n))):
        for _ in range(2):
            with pytest.raises(TraceError, match=f"draws from {name}:"):
                trace(sown(sowing, draw), batches()[0])


@pytest.mark.parametrize("draw", [random.Random(0).random, np.random.default_rng(0).random])
def test_draws_from_generators_of_the_model_s_own_are_refused(draw):
    class Drawn(Net):
        def __init__(self) -> None:
            super().__init__()
            self.draw = draw

        def forward(self, x, y):
            return F.cross_entropy(super().forward(x) * (2 if self.draw() < 0.5 else 1), y)

    with pytest.raises(TraceError, match="draws from a generator of its own") as caught:
        trace(Drawn(), batches()[0])
    assert "torch.rand" in str(caught.value)


def test_a_generator_of_torch_in_the_model_is_refused_with_its_line():
    class Drawn(Net):
        def __init__(self) -> None:
            super().__init__()
            self.numbers = torch.Generator().manual_seed(0)

        def forward(self, x, y):
            return F.cross_entropy(super().forward(x * torch.rand(x.shape, generator=self.numbers)), y)

    with pytest.raises(TraceError, match="cannot be traced") as caught:
        trace(Drawn(), batches()[0])
    assert "a torch.Generator of the model's own" in str(caught.value)
    assert "without generator=" in str(caught.value) and "test_frozen_values.py:" in caught.value.where


class Casting(nn.Module):
    """Calls a method of tensors whose name is one of a module's methods, too."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4).double()

    def forward(self, x, y):
        return F.cross_entropy(self.head(x).to(x.dtype), y)


def test_methods_of_every_module_are_no_numbers():
    """While a model is traced, ``nn.Module.to`` is another function."""
    model = Casting()
    trace(model, batches()[0])
    assert reads_of(model).changed(Number) == ()


def test_numbers_that_are_watched_in_containers():
    """Each that is read, of modules and around a loss, and no other; afterwards classes are as before."""
    body, settings = Configured(), Configuration()

    def loss(logits, y):
        return F.cross_entropy(logits * settings.alpha, y) + SETTINGS["scale"] * logits.square().mean()

    model = with_loss(Net(body), loss)
    trace(model, batches()[0])
    reads = reads_of(model)
    assert "__getattribute__" not in vars(Configuration)
    for holder in (body.config, body.config.inner, settings):
        holder.noted = 7
    body.options["noted"] = SETTINGS["noted"] = 7
    assert reads.changed(Number) == ()

    def other_configuration() -> None:
        body.config, old = Configuration(), body.config
        body.config.inner, body.config.alpha = old.inner, 4.0

    for path, change in {
        "body.config.inner.alpha": lambda: setattr(body.config.inner, "alpha", 0.5),
        "body.options['scale']": lambda: body.options.update(scale=2.0),
        "body.by_name['a']": lambda: body.by_name.update(a=2.0),
        "body.powers": lambda: body.powers.insert(0, 0.3),
        "settings.alpha": lambda: setattr(settings, "alpha", 0.8),
        "SETTINGS['scale']": lambda: SETTINGS.update(scale=0.2),
        "body.config.alpha": lambda: setattr(body.config, "alpha", 2.0),
    }.items():
        reads.renew()
        change()
        assert [name for name, _ in reads.changed(Number)] == [path]
    reads.renew()
    other_configuration()
    assert reads.changed(Number) == (("body.config.alpha", "4.0, was 2.0"),)


def noisy(logits, y):
    return F.cross_entropy(logits + 0.1 * torch.rand_like(logits), y)


def dropped(logits, y):
    return F.cross_entropy(F.dropout(logits, 0.3), y)


def smoothed(logits, y):
    other = torch.randint(4, y.shape)
    return 0.9 * F.cross_entropy(logits, y) + 0.1 * F.cross_entropy(logits, other)


class Dropping(nn.CrossEntropyLoss):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, logits, y):
        return super().forward(self.drop(logits), y)


@pytest.mark.parametrize("loss", [noisy, dropped, smoothed, Dropping()])
def test_draws_in_a_loss_are_refused(loss):
    """With the line, and where to draw them; a loss without draws is taken, and one device draws."""
    model = with_loss(Net(), loss)
    with pytest.raises(TraceError, match="the loss draws random numbers") as caught:
        trace(model, batches()[0])
    assert "inputs=lambda x, y: (x, y, torch.rand(len(x)))" in str(caught.value)
    assert "test_frozen_values.py" in str(caught.value)
    assert model(*batches()[0]).isfinite()
    trace(with_loss(Net(), lambda logits, y: F.cross_entropy(F.dropout(logits, 0.3, False), y)), batches()[0])


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


class OfPair(Net):
    def forward(self, pair, mask=None):
        return F.cross_entropy(super().forward(pair.x), pair.y)


class Masked(Net):
    def forward(self, x, mask, y):
        return F.cross_entropy(super().forward(x * torch.as_tensor(mask)), y)


def test_batches_of_objects_are_refused():
    """A program has what they hold as it was in the first batch."""
    x, y = batches()[0]
    with pytest.raises(TraceError, match="holds a value that a program would keep") as caught:
        trace(Masked(), (x, (x > 0).numpy(), y))
    assert "torch.from_numpy" in str(caught.value) and "1 of the batch" in str(caught.value)
    with pytest.raises(TraceError, match="holds a value that a program would keep") as caught:
        trace(OfPair(), (Pair(x, y), None))
    assert "inputs=lambda batch: vars(batch)" in str(caught.value)
    with pytest.raises(TraceError, match="must say how the model is called") as caught:
        trace(OfPair(), Pair(x, y))
    assert "inputs=lambda batch: vars(batch)" in str(caught.value)
