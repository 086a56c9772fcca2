"""Logits, hidden states and metrics beside the loss: a rank's own rows, and all of them on request."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed
from plans import close, named, output_plan
from torch import nn
from torch.nn.functional import cross_entropy

from mixmesh.errors import InputError, PlanError
from mixmesh.runtime.parallel import parallelize

KINDS = ("data_parallel", "fsdp", "tensor_parallel", "micro_steps", "one_rank")
BATCH, TIME, WIDTH, WORDS = 12, 5, 8, 10


@dataclass
class Returned:
    logits: torch.Tensor
    loss: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    accuracy: torch.Tensor


class Words(nn.Module):
    """Returns an object as those of transformers: the loss, logits, hidden states, and a number."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(WORDS, WIDTH, dtype=torch.float64)
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.head = nn.Linear(WIDTH, WORDS, dtype=torch.float64)

    def forward(self, x, y):
        first = self.embed(x)
        second = self.inner(first).relu()
        logits = self.head(second)
        loss = cross_entropy(logits.flatten(0, 1), y.flatten())
        accuracy = (logits.argmax(-1) == y).double().mean()
        return Returned(logits, loss, (first, second.mean(1)), accuracy)


class Pair(Words):
    """Returns a tuple: logits of every word in one dim, and the loss."""

    def forward(self, x, y):
        made = super().forward(x, y)
        return made.logits.flatten(0, 1), made.loss


def batch(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randint(WORDS, (BATCH, TIME), generator=g)  # noqa: E731
    return dict(x=draw(), y=draw())


@lru_cache
def plan_for(kind: str, model: type, outputs: tuple):
    return output_plan(kind, model(), batch(0), outputs)


def parallel(kind: str, model: nn.Module, outputs: tuple, optimizer=None):
    plan = plan_for(kind, type(model), outputs)
    return parallelize(model, optimizer, plan, device="cpu", timeout_s=20, check_model=False)


def check_outputs_are_those_of_one_device(_) -> None:
    for kind in KINDS:
        single = Words()
        numbers = () if kind == "micro_steps" else ("accuracy",)  # one of all samples, not of a micro-batch's
        model, _ = parallel(kind, Words(), ("logits", "hidden", *numbers))
        for n, training in itertools.product(range(2), (True, False)):
            want = single(**batch(n))
            with torch.set_grad_enabled(training):
                out = model(**batch(n))
            close(out.loss, want.loss)
            if numbers:
                close(out.accuracy, want.accuracy, f"{kind} accuracy")
            rows = out.rows or slice(0, BATCH)
            if len(out.logits):
                close(out.logits.detach(), want.logits[rows], f"{kind} logits")
                close(out["hidden"][1].detach(), want.hidden[1][rows], f"{kind} hidden")
            assert out.logits.requires_grad == training
            whole = out.gather()
            for got, expected in zip((whole.logits, *whole.hidden), (want.logits, *want.hidden)):
                close(got, expected, f"{kind} gathered")
            assert not whole.logits.requires_grad and whole.loss is out.loss
            close(out.gather("logits"), want.logits)
            if training:
                out.loss.backward()


def check_rows_are_those_that_a_loader_gives(_) -> None:
    for kind, sizes in (("data_parallel", (6, 4, 2)), ("tensor_parallel", (12, 12, 12))):
        model, _ = parallel(kind, Words(), ("logits",))
        out = model(**batch(0))
        assert len(out.logits) == sizes[dist.get_rank()], kind


def check_a_tuple_unpacks(_) -> None:
    for kind in KINDS:
        single, (model, _) = Pair(), parallel(kind, Pair(), (0,))
        logits, loss = model(**batch(0))
        want, its_loss = single(**batch(0))
        out = model(**batch(0))
        close(loss, its_loss)
        close(out[1], its_loss)
        close(out.gather(0), want, kind)
        assert list(out.keys()) == ["0", "1"] and len(out) == 2 and out.loss is out[1]
        if kind == "data_parallel":
            assert len(logits) == TIME * (6, 4, 2)[dist.get_rank()]


def check_training_is_as_on_one_device(_) -> None:
    for kind in KINDS:
        single, mine = Words(), Words()
        sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (single, mine)]
        model, _ = parallel(kind, mine, ("logits",), sgd[1])
        for n in range(3):
            for m, optimizer in zip((single, model), sgd):
                optimizer.zero_grad()
                m(**batch(n)).loss.backward()
                optimizer.step()
        whole = single.state_dict()
        for name, value in model.full_state_dict().items():
            close(value, whole[name], f"{kind} {name}")


def check_a_metric_that_micro_steps_cannot_give_is_refused(_) -> None:
    with pytest.raises(PlanError, match="micro-batches cannot run"):
        parallel("micro_steps", Words(), ("accuracy",))


def check_a_gradient_through_an_output_is_refused(_) -> None:
    for kind in KINDS:
        model, _ = parallel(kind, Words(), ("logits",))
        out = model(**batch(0))
        with pytest.raises(InputError, match="without a gradient") as caught:
            out.logits.square().sum().backward()
        assert "loss=" in str(caught.value)


class Seen(nn.Module):
    """Returns what depends on its input alone beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(WIDTH, 1, dtype=torch.float64)

    def forward(self, x):
        return {"loss": self.inner(x).square().mean(), "squares": x.square()}


def check_a_gradient_of_an_input_through_an_output_is_refused(_) -> None:
    x = torch.arange(BATCH * WIDTH, dtype=torch.float64).reshape(BATCH, WIDTH).sin()
    model, _ = parallelize(
        Seen(),
        None,
        output_plan("fsdp", Seen(), {"x": x}, ("squares",)),
        device="cpu",
        timeout_s=20,
        check_model=False,
    )
    assert not model(x=x).squares.requires_grad
    out = model(x=x.clone().requires_grad_())
    with pytest.raises(InputError, match="without a gradient"):
        (out.loss + out.squares.sum()).backward()


def check_what_is_not_kept_says_what_to_write(_) -> None:
    model, _ = parallel("data_parallel", Words(), ())
    out = model(**batch(0))
    for use in (lambda: out.logits, lambda: out["logits"], lambda: out[0]):
        with pytest.raises(InputError, match="is not kept") as caught:
            use()
        assert "mixmesh.prepare(..., outputs=('logits',))" in str(caught.value)
    with pytest.raises(AttributeError, match="returns no 'attention'"):
        _ = out.attention
    assert list(out) == ["logits", "loss", "hidden", "accuracy"] and "hidden" in out

    model, _ = parallel("data_parallel", Pair(), ())
    logits, loss = model(**batch(0))  # unpacking asks for nothing yet
    loss.backward()
    uses = (lambda: logits.argmax(-1), lambda: logits + 1, lambda: torch.relu(logits), lambda: logits[0])
    for use in (*uses, lambda: cross_entropy(logits, batch(0)["y"].flatten()), lambda: float(logits)):
        with pytest.raises(InputError, match=r"outputs=\(0,\)"):
            use()


IDIOMS = named(
    check_outputs_are_those_of_one_device,
    check_rows_are_those_that_a_loader_gives,
    check_a_tuple_unpacks,
    check_training_is_as_on_one_device,
    check_a_metric_that_micro_steps_cannot_give_is_refused,
    check_a_gradient_through_an_output_is_refused,
    check_a_gradient_of_an_input_through_an_output_is_refused,
    check_what_is_not_kept_says_what_to_write,
)


@pytest.mark.parametrize("name", IDIOMS)
def test_shown_outputs(outcomes, name):
    assert_passed(outcomes[name])
