"""What a model keeps from one call to the next: buffers that are updated in place, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from small_graphs import TWO, cluster
from torch import nn

from mixmesh.api import plan_traced
from mixmesh.errors import TraceError
from mixmesh.frontend.trace import trace
from mixmesh.lang.plan_file import Plan
from mixmesh.measure.verification import verify

BATCH = {"x": torch.randn(6, 4, generator=torch.Generator().manual_seed(0))}


class Model(nn.Module):
    """``body(model, h)`` is given the output of a layer, and gives what is added to it."""

    def __init__(self, body, prepare=None) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("a", torch.ones(4))
        self.register_buffer("b", torch.ones(4))
        self.register_buffer("c", torch.ones(4), persistent=False)
        self.plain, self.count = torch.ones(4), 0
        self.body = body
        if prepare is not None:
            prepare(self)

    def forward(self, x):
        h = self.layer(x)
        return (h + self.body(self, h)).square().sum()


def mean(h):
    return h.mean(0).detach()


def replaced(m, h):
    m.a = 0.9 * m.a + 0.1 * mean(h)
    return m.a


def replaced_data(m, h):
    m.a.data = m.a + 1
    return m.a


def replaced_plain(m, h):
    m.plain = m.plain + mean(h)
    return m.plain


def saved_and_not_read(m, h):
    m.b = mean(h)
    return m.b


REPLACED = {"a": (replaced, replaced_data), "plain": (replaced_plain,), "b": (saved_and_not_read,)}


@pytest.mark.parametrize(("name", "body"), [(name, body) for name, all in REPLACED.items() for body in all])
def test_a_tensor_that_is_replaced_is_refused(name, body):
    with pytest.raises(TraceError, match=f"replaces {name}, so every step") as caught:
        trace(Model(body), BATCH)
    assert caught.value.hint[0] == f"self.{name}.copy_(value) in forward"
    assert "test_trace_state.py" in caught.value.where


def averaged(m, h):
    m.a.copy_(0.9 * m.a + 0.1 * mean(h))
    m.aside = mean(h)
    return m.a + m.aside


def test_what_is_updated_in_place_is_in_the_program():
    model = Model(averaged)
    traced = trace(model, BATCH)
    assert [n.args[0] for n in traced.graph.nodes if n.op == "update"] == ["a"]
    plan = plan_traced(traced, cluster(TWO), planner="ddp-even")
    assert verify(model, BATCH, plan, traced=traced, steps=2).ok


def made_anew(m, h):
    m.c = torch.arange(4.0)
    return m.c


def test_a_buffer_that_is_made_anew_in_every_call_is_no_state():
    model = Model(made_anew)
    assert trace(model, BATCH)
    assert model.c.tolist() == [1.0] * 4 and type(model.c) is torch.Tensor


def test_a_number_that_changes_is_warned_of():
    def counted(m, h):
        m.count += 1
        return m.count

    (warning,) = trace(Model(counted), BATCH).warnings
    assert "the number count" in warning and "test_trace_state.py" in warning


def carried(m, h):
    """Carries what it computes from one call to the next."""
    before, m.hidden = m.hidden, (mean(h), [mean(h)])
    return 0 if before is None else before[0]


def asks_whether_it_is_there(m, h):
    before = getattr(m, "hidden", None)
    m.hidden = mean(h)
    return 0 if before is None else before


def without(m):
    m.hidden = None


def averaged_from_zero(m, h):
    m.hidden = 0.9 * m.hidden + 0.1 * mean(h)
    return m.hidden


def zero(m):
    m.hidden = 0.0


@pytest.mark.parametrize(
    ("body", "prepare", "found"),
    [
        (carried, without, "empty"),
        (asks_whether_it_is_there, None, "empty"),
        (averaged_from_zero, zero, r"to be 0\.0"),
    ],
)
def test_what_is_carried_in_an_attribute_that_holds_no_tensor_at_first_is_refused(body, prepare, found):
    model = Model(body, prepare)
    before = dict(vars(model))
    with pytest.raises(TraceError, match=f"finds hidden {found}") as caught:
        trace(model, BATCH)
    assert "test_trace_state.py" in caught.value.where and "self.hidden.copy_" in caught.value.hint[0]
    assert vars(model) == before


def made_once(m, h):
    """A table and a mask, made in the first call."""
    if m.hidden is None:
        m.hidden = (m.a * torch.arange(4.0)).cos(), torch.ones(4).cumsum(0)
    return m.hidden[0] + m.hidden[1]


def only_recorded(m, h):
    m.hidden = mean(h)
    return 0


def set_anew(m, h):
    """Collects within one call."""
    m.hidden = None
    for _ in range(2):
        m.hidden = mean(h) if m.hidden is None else m.hidden + mean(h)
    return m.hidden


def summed_anew(m, h):
    m.hidden = 0.0
    for _ in range(2):
        m.hidden = m.hidden + mean(h)
    return m.hidden


@pytest.mark.parametrize("body", [made_once, only_recorded, set_anew, summed_anew])
def test_what_does_not_matter_to_the_next_call_is_no_state(body):
    model = Model(body, without)
    assert trace(model, BATCH).warnings == () and model.hidden is None


def counts_entries(m, h):
    m.notes["list"].append(1)
    return len(m.notes["list"])


def counts_in_a_dict(m, h):
    m.notes["count"] = m.notes.get("count", 0) + 1
    return m.notes["count"]


def keeps_in_a_dict(m, h):
    before, m.notes["mean"] = m.notes.get("mean"), mean(h)
    return 0 if before is None else before


def keeps_the_last(m, h):
    m.past.append(mean(h))
    m.past = m.past[-3:]
    return sum(m.past)


def counts_outside(m, h):
    OUTSIDE[0] += 1
    return OUTSIDE[0]


OUTSIDE = [0]


def stated(body) -> Model:
    """A model with a dict and a list, whose own method ``body`` is."""

    def prepare(m):
        m.notes, m.past = {"list": []}, []

    def forward(self, x):
        h = self.layer(x)
        return (h + self.change(h)).square().sum()

    return type("Stated", (Model,), {"change": body, "forward": forward})(body, prepare)


CHANGED = {
    "notes['list']": counts_entries, "notes['count']": counts_in_a_dict, "notes['mean']": keeps_in_a_dict,
    "past": keeps_the_last, "OUTSIDE": counts_outside,
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_an_entry_that_is_read_and_changed_is_warned_of(name):
    model = stated(CHANGED[name])
    (warning,) = trace(model, BATCH).warnings
    assert f"the forward pass changes {name}, which it reads" in warning
    assert model.notes == {"list": []} and model.past == []


class Hooked(Model):
    """Reads what hooks leave in a dict of the model, as losses on features do."""

    def __init__(self):
        super().__init__(None)
        self.features = {}
        self.layer.register_forward_hook(self.keep)

    def keep(self, layer, inputs, output):
        self.features["h"] = output

    def forward(self, x):
        h = self.layer(x)
        return h.square().mean() + self.feature()


class Bracketed(Hooked):
    def feature(self):
        return self.features["h"].abs().mean()


class Asking(Hooked):
    def feature(self):
        return self.features.get("h").abs().mean()


class Trying(Hooked):
    def feature(self):
        try:
            return self.features["h"].abs().mean()
        except KeyError:
            return 0


@pytest.mark.parametrize(("kind", "is_warned"), [(Bracketed, False), (Asking, True), (Trying, True)])
def test_an_entry_that_can_only_be_read_once_the_pass_has_written_it_is_not_warned_of(kind, is_warned):
    """Reading a missing entry in brackets raises KeyError, so that what is read was written before."""
    model = kind()
    assert bool(trace(model, BATCH).warnings) == is_warned and model.features == {}


class Config:
    kind = None
    scale = None


def names_its_kind_once(m, h):
    if m.config.kind is None:
        m.config.kind = "regression"
    return 0 if m.config.kind == "regression" else h


def scales_from_the_second_call_on(m, h):
    if m.config.scale is None:
        m.config.scale = "twice"
        return 0
    return h if m.config.scale == "twice" else 0


@pytest.mark.parametrize(
    ("name", "body", "is_amiss"),
    [("kind", names_its_kind_once, False), ("scale", scales_from_the_second_call_on, True)],
)
def test_what_the_first_call_sets_for_all_is_warned_of_only_where_the_second_differs(name, body, is_amiss):
    model = Model(body)
    model.config = Config()
    warning = "".join(trace(model, BATCH).warnings)
    assert (f"the forward pass changes config.{name}, which it reads" in warning) == is_amiss


def notes_only(m, h):
    m.notes["mean"] = mean(h)
    m.past.append(mean(h))
    return 0


def clears_first(m, h):
    m.past.clear()
    m.past.append(mean(h))
    return sum(m.past)


def makes_it_anew(m, h):
    m.past = []
    m.past.append(mean(h))
    return sum(m.past)


def leaves_nothing(m, h):
    m.count, m.notes["width"] = 0, h.shape[1]
    return m.plain


LEFT = {
    "hidden": (only_recorded, set_anew),
    "c": (made_anew,),
    "notes past": (notes_only,),
    "past": (clears_first, makes_it_anew),
    "": (leaves_nothing,),
}


@pytest.mark.parametrize(
    ("names", "body"), [(names, body) for names, bodies in LEFT.items() for body in bodies]
)
def test_attributes_where_a_call_leaves_tensors_are_noted(names, body):
    model = stated(body)
    model.hidden = 0.0
    traced = trace(model, BATCH)
    assert sorted(traced.left) == names.split()
    plan = plan_traced(traced, cluster(TWO), planner="ddp-even")
    assert plan.left == traced.left == Plan.parse(str(plan)).left


@pytest.mark.parametrize("body", [notes_only, clears_first, makes_it_anew])
def test_entries_that_do_not_matter_to_the_next_call_are_no_state(body):
    model = stated(body)
    assert trace(model, BATCH).warnings == ()
    assert model.notes == {"list": []} and model.past == []
    copy.deepcopy(model)


def test_no_list_of_a_trace_stays_on_a_module():
    def noted(m, h):
        m.noted = {"means": [mean(h)]}
        return 0

    model = Model(noted)
    assert trace(model, BATCH).warnings == () and "noted" not in vars(model)


def one_value_for_two(m, h):
    value = mean(h)
    m.a.copy_(value)
    m.b.copy_(value)
    return m.a


def one_value_each(m, h):
    value = mean(h)
    m.a.copy_(value)
    m.b.copy_(value.clone())
    return m.a


def test_two_buffers_updated_with_one_value():
    with pytest.raises(TraceError) as caught:
        trace(Model(one_value_for_two), BATCH)
    assert "self.b.copy_(value.clone())" in caught.value.hint[0]
    model = Model(one_value_each)
    updates = [n.args[0] for n in trace(model, BATCH).graph.nodes if n.op == "update"]
    assert updates == ["a", "b"]


def tie(m):
    m.register_buffer("again", m.a)


def update_tied(m, h):
    m.a.add_(mean(h))
    return m.again


def update_once(m, h):
    m.a.add_(mean(h))
    return m.a


def test_a_buffer_of_two_names():
    with pytest.raises(TraceError, match="two names is updated") as caught:
        trace(Model(update_tied, tie), BATCH)
    assert caught.value.got == "a and again, which share memory"
    assert caught.value.hint[0] == "register a once, and use it by that name in place of again"
    assert trace(Model(update_once), BATCH)
    assert trace(Model(lambda m, h: m.a + m.again, tie), BATCH)  # that is only read


class Twice(nn.Module):
    def __init__(self, hide: bool) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.again = [self.norm] if hide else self.norm

    def forward(self, x):
        again = self.again[0] if isinstance(self.again, list) else self.again
        return again(self.norm(self.layer(x))).square().sum()


def test_a_norm_of_two_names():
    with pytest.raises(TraceError, match="two names is updated") as caught:
        trace(Twice(hide=False), BATCH)
    assert "self.again = [self.module]" in caught.value.hint[1]
    assert trace(Twice(hide=True), BATCH)
