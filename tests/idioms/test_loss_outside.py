"""Models that return no loss: the loop computes it of whole outputs, of several calls or models."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed
from plans import close, named, output_plan
from torch import nn
from torch.nn.functional import cross_entropy, normalize, softplus
from torch.utils.checkpoint import checkpoint

from mixmesh.errors import InputError, PlanError
from mixmesh.runtime.parallel import parallelize

KINDS = ("data_parallel", "fsdp", "tensor_parallel", "one_rank")
BATCH = 12


@dataclass
class Returned:
    features: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    norms: torch.Tensor


class Net(nn.Module):
    """Returns a tensor, or a tuple or an object with more, one value of which is of the whole batch."""

    def __init__(self, form: str = "tensor", width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.first, self.norm = nn.Linear(width, 8).double(), nn.BatchNorm1d(8).double()
        self.last = nn.Linear(8, 5).double()

    def forward(self, x):
        hidden = self.norm(self.first(x)).tanh()
        features = self.last(hidden)
        if self.form == "tensor":
            return features
        if self.form == "tuple":
            return features, None, (hidden, features.argmax(-1))
        return Returned(features, (hidden,), features.square().mean(0))


def drawn(seed: int, rows: int = BATCH, width: int = 6) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parallel(kind: str, model: nn.Module, example: tuple, optimizer=None):
    plan = output_plan(kind, model, example, is_outside=True)
    return parallelize(model, optimizer, plan, device="cpu", timeout_s=20, check_model=False)


def contrast(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A loss that ties every sample to all others."""
    return cross_entropy(normalize(a) @ normalize(b).T, torch.arange(len(a)))


def loss_of(form: str, model: nn.Module, seed: int, rows: int) -> torch.Tensor:
    """Of two calls of the model, and of all that it returns."""
    one, other = model(drawn(seed, rows)), model(drawn(seed + 9, rows))
    if form == "tensor":
        return contrast(one, other)
    if form == "tuple":
        (a, nothing, (hidden, best)), (b, *_) = one, other
        assert nothing is None
        return contrast(a, b) + hidden.square().mean() + (hidden[:, 0] * best).mean()
    return contrast(one.features, other.features) + one.norms.sum() * one.hidden[0].mean()


def same_weights(model, single: nn.Module, what: str) -> None:
    """Asserts that a parallel model, whole, has the weights and buffers of the one on a single device."""
    whole = single.state_dict()
    for name, value in model.full_state_dict().items():
        close(value, whole[name], f"{what} {name}")


def check_any_loss_of_several_calls(_) -> None:
    for kind in KINDS:
        for form in ("tensor", "tuple", "object"):
            single, mine = Net(form), Net(form)
            sgd = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (single, mine)]
            model, _ = parallel(kind, mine, (drawn(0),), sgd[1])
            for step, rows in enumerate((BATCH, BATCH, 7)):
                losses = []
                for m, optimizer in zip((single, model), sgd):
                    optimizer.zero_grad()
                    losses.append(loss_of(form, m, step, rows))
                    losses[-1].backward()
                    optimizer.step()
                close(losses[1], losses[0], f"{kind} {form}")
            same_weights(model, single, f"{kind} {form}")


def check_outputs_are_those_of_one_device(_) -> None:
    for kind in KINDS:
        single, (model, _) = Net(), parallel(kind, Net(), (drawn(0),))
        out = model(drawn(0))
        close(out, single(drawn(0)), kind)
        assert out.requires_grad and type(out) is torch.Tensor
        for m in (single, model):
            m.eval()
        with torch.no_grad():
            for rows in (BATCH, 5):
                close(model(drawn(1, rows)), single(drawn(1, rows)), f"{kind} {rows}")


class Policy(Net):
    def forward(self, x):
        return torch.distributions.Categorical(logits=super().forward(x))


def check_an_object_with_methods_is_made_in_the_loop(_) -> None:
    model, _ = parallel("data_parallel", Policy(), (drawn(0),))
    out, single = model(drawn(0)), Policy()
    with pytest.raises(AttributeError, match=r"no 'log_prob', but .* made of them in the loop, as in"):
        out.log_prob(torch.zeros(BATCH))
    made = torch.distributions.Categorical(logits=out.logits)
    close(made.entropy(), single(drawn(0)).entropy(), "entropy")


def check_outputs_are_changed_in_place(_) -> None:
    """As in fast_neural_style, whose loop scales the image that the model returns."""
    for kind in KINDS:
        single, (model, _) = Net("tuple"), parallel(kind, Net("tuple"), (drawn(0),))
        for m in (single, model):
            features, _, (hidden, best) = m(drawn(1))
            best.add_(1)
            features.div_(2.0)[:, 0].mul_(3.0)
            (features.square().sum() + (hidden * best[:, None]).mean()).backward()
        for name, p in single.named_parameters():
            got = dict(model.named_parameters())[name].grad
            close(got.full_tensor() if hasattr(got, "full_tensor") else got, p.grad)


def check_two_models_in_turn(_) -> None:
    """As a generator and its critic: the one learns through the other."""
    for kinds in (("fsdp", "data_parallel"), ("one_rank", "tensor_parallel")):
        makers, critics = [Net(width=4), Net(width=4)], [nn.Linear(5, 3).double(), nn.Linear(5, 3).double()]
        critics[1].load_state_dict(critics[0].state_dict())
        rates = {"lr": 0.1}
        sgd = [[torch.optim.Adam(m.parameters(), **rates) for m in pair] for pair in zip(makers, critics)]
        makers[1], _ = parallel(kinds[0], makers[1], (drawn(0, width=4),), sgd[1][0])
        critics[1], _ = parallel(kinds[1], critics[1], (drawn(0, width=5),), sgd[1][1])
        for step in range(2):
            seen = []
            for make, judge, steppers in zip(makers, critics, sgd):
                noise, real = drawn(step, width=4), drawn(step, width=5)
                made = make(noise)
                judge.zero_grad()
                of_judge = softplus(judge(made.detach())).mean() + softplus(-judge(real)).mean()
                of_judge.backward()
                steppers[1].step()
                make.zero_grad()
                of_maker = softplus(-judge(made)).mean()
                of_maker.backward()
                steppers[0].step()
                seen.append(torch.stack([of_judge, of_maker]).detach())
            close(seen[1], seen[0], str(kinds))
        for single, model in (makers, critics):
            same_weights(model, single, str(kinds))


class Critic(nn.Module):
    """Returns the gradient of its scores too, for a penalty (Gulrajani et al., 2017)."""

    def __init__(self, *, asks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.asks = asks
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def forward(self, x):
        if not self.asks:
            x.requires_grad_()
        elif not x.requires_grad:
            x = x.detach().requires_grad_()
        scores = self.net(x)
        return scores, torch.autograd.grad(scores.sum(), x, create_graph=True)[0]


def check_a_critic_with_a_gradient_penalty(_) -> None:
    for kinds in (("fsdp", "data_parallel"), ("one_rank", "tensor_parallel")):
        makers, critics = [Net(width=4), Net(width=4)], [Critic(), Critic()]
        adam = [[torch.optim.Adam(m.parameters(), lr=0.1) for m in pair] for pair in zip(makers, critics)]
        makers[1], _ = parallel(kinds[0], makers[1], (drawn(0, width=4),), adam[1][0])
        critics[1], _ = parallel(kinds[1], critics[1], (drawn(0, width=5),), adam[1][1])
        for step in range(2):
            seen = []
            for make, judge, steppers in zip(makers, critics, adam):
                made, real = make(drawn(step, width=4)), drawn(step, width=5)
                between = (0.3 * real + 0.7 * made).detach()
                judge.zero_grad()
                penalty = (judge(between)[1].norm(dim=1) - 1).square().mean()
                of_judge = judge(made.detach())[0].mean() - judge(real)[0].mean() + 10 * penalty
                of_judge.backward()
                steppers[1].step()
                make.zero_grad()
                of_maker = -judge(made)[0].mean()
                of_maker.backward()
                steppers[0].step()
                seen.append(torch.stack([of_judge, of_maker]).detach())
            close(seen[1], seen[0], str(kinds))
        for single, model in (makers, critics):
            same_weights(model, single, str(kinds))


class Skip(Net):
    """Adds to the scores what it computes of its input with a gradient, or without one."""

    def forward(self, x):
        kept = x.detach() if not x.requires_grad else x
        return super().forward(kept) + x.sum(1, keepdim=True)


def check_a_question_about_gradients_is_refused(_) -> None:
    """Batches are traced without gradients: with one, one device takes another branch. In ``Skip`` the input
    has a gradient by another path, so that only the question itself can tell."""
    for net, width in ((Critic(asks=True), 5), (Skip(), 6)):
        model, _ = parallel("data_parallel", net, (drawn(0, width=width),))
        model(drawn(1, width=width))
        for _ in range(2):
            with pytest.raises(InputError, match="the model asks whether its input has a gradient") as caught:
                model(drawn(1, width=width).requires_grad_())
            assert caught.value.got == "requires_grad of input 1 of the model"
            assert "x.requires_grad" in caught.value.where
        model(drawn(1, width=width))


class Judged(Net):
    """Takes for granted that its targets have no gradient, as many losses do."""

    def forward(self, x, wanted):
        assert not wanted.requires_grad
        return super().forward(x) - wanted.sum(1, keepdim=True)


class Reentrant(Net):
    """One device runs a reentrant checkpoint with gradients only if what it is given has one."""

    def forward(self, x):
        return self.last(checkpoint(lambda x: self.first(x).tanh(), x, use_reentrant=True)) + x[:, :5]


class Slopes(Net):
    def forward(self, x):
        def total(x):
            return self.last(self.first(x).tanh()).sum()

        return torch.autograd.functional.jacobian(total, x, create_graph=True)


def check_questions_of_pytorch_are_refused_too(_) -> None:
    for net in (Reentrant(), Slopes()):
        model, _ = parallel("data_parallel", net, (drawn(0),))
        with pytest.raises(InputError, match="the model asks whether its input has a gradient") as caught:
            model(drawn(1).requires_grad_())
        assert "test_loss_outside.py" in caught.value.where


def check_a_question_about_another_input(_) -> None:
    single, (model, _) = Judged(), parallel("fsdp", Judged(), (drawn(0), drawn(1)))
    given = [drawn(2).requires_grad_() for _ in range(2)]
    for m, x in zip((single, model), given):
        m(x, drawn(3)).square().sum().backward()
    close(given[1].grad, given[0].grad)
    with pytest.raises(InputError, match="the model asks") as caught:
        model(drawn(2).requires_grad_(), drawn(3).requires_grad_())
    assert caught.value.got == "requires_grad of input 2 of the model"


class Beside(Net):
    """Returns what depends on its input alone beside what depends on parameters."""

    def forward(self, x):
        return super().forward(x), x.square(), x.detach() + 1


def check_outputs_of_the_input_alone_have_its_gradient(_) -> None:
    for kind in KINDS:
        single, (model, _) = Beside(), parallel(kind, Beside(), (drawn(0),))
        for turn in range(2):
            given = [drawn(1).requires_grad_() for _ in range(2)]
            for m, x in zip((single, model), given):
                outputs = m(x)
                sum(y.sin().sum() for y in outputs[turn:]).backward()
            close(given[1].grad, given[0].grad, kind)


class Stopped(Net):
    def forward(self, x):
        return super().forward(x.detach())


def check_an_input_that_is_detached_gets_no_gradient(_) -> None:
    for kind in ("fsdp", "tensor_parallel"):
        single, mine = Stopped(), Stopped()
        sgd = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (single, mine)]
        model, _ = parallel(kind, mine, (drawn(0),), sgd[1])
        for m, optimizer in zip((single, model), sgd):
            x = drawn(1).requires_grad_()
            m(x).square().sum().backward()
            optimizer.step()
            assert x.grad is None
        same_weights(model, single, kind)


def check_gradients_of_own_rows(_) -> None:
    single, (model, _) = Net(), parallel("fsdp", Net(), (drawn(0),))
    whole = drawn(3).requires_grad_()
    single(whole).square().sum().backward()
    rows = slice(*((0, 6), (6, 10), (10, 12))[dist.get_rank()])
    mine = drawn(3)[rows].requires_grad_()
    model(mine).square().sum().backward()
    close(mine.grad, whole.grad[rows])


def check_a_batch_of_equal_values_is_a_whole_batch(_) -> None:
    """With even shares it could also be each rank's own rows of a larger batch of such values."""
    single, (model, _) = Net(), parallel("even", Net(), (drawn(0),))
    single.eval(), model.eval()
    with torch.no_grad():
        for rows in (1, 4, 7):
            x = torch.zeros(rows, 6, dtype=torch.float64)
            close(model(x), single(x), f"{rows} rows")


def check_losses_that_differ_between_ranks_are_refused(_) -> None:
    model, _ = parallel("data_parallel", Net(), (drawn(0),))
    out = model(drawn(0))
    with pytest.raises(InputError, match="the gradient of the model's output differs"):
        cross_entropy(out, torch.full((BATCH,), dist.get_rank())).backward()


def check_ranks_want_the_same_gradients(_) -> None:
    model, _ = parallel("data_parallel", Net(), (drawn(0),))
    with pytest.raises(InputError, match="only some ranks want the gradient of input 1 of the model"):
        model(drawn(0).requires_grad_(dist.get_rank() == 1))


def check_micro_steps_are_refused(_) -> None:
    with pytest.raises(PlanError, match="gradient that comes when all micro-batches are over"):
        parallel("micro_steps", nn.Linear(6, 5).double(), (drawn(0),))


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4).double()

    def forward(self, x):
        return self.layer(x).tanh().square().mean()


def check_a_row_without_gradients_under_micro_steps(_) -> None:
    """In training mode, as reinforcement learning asks for an action."""
    plan = output_plan("micro_steps", Squares(), (drawn(0),))
    model, _ = parallelize(Squares(), None, plan, device="cpu", timeout_s=20, check_model=False)
    with torch.no_grad():
        close(model(drawn(1)[:1]), Squares()(drawn(1)[:1]))


class WithScale(nn.Module):
    """As CLIP: two rows per sample, and a number that is no loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(6, 4).double(), nn.Linear(6, 4).double()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return self.one(x), self.other(x), self.scale.exp()


def check_a_number_beside_outputs_in_a_smaller_batch(_) -> None:
    single = WithScale()
    model, _ = parallel("data_parallel", WithScale(), (drawn(0),))
    for seed, size in ((0, BATCH), (1, 7)):
        losses = []
        for m in (single, model):
            one, other, scale = m(drawn(seed)[:size])
            losses.append(cross_entropy(scale * one @ other.t(), torch.arange(size)))
            losses[-1].backward()
        close(losses[1].detach(), losses[0].detach())
    close(model.get_parameter("scale").grad, single.scale.grad)


IDIOMS = named(
    check_a_number_beside_outputs_in_a_smaller_batch,
    check_any_loss_of_several_calls,
    check_outputs_are_those_of_one_device,
    check_an_object_with_methods_is_made_in_the_loop,
    check_outputs_are_changed_in_place,
    check_two_models_in_turn,
    check_a_critic_with_a_gradient_penalty,
    check_a_question_about_gradients_is_refused,
    check_questions_of_pytorch_are_refused_too,
    check_a_question_about_another_input,
    check_outputs_of_the_input_alone_have_its_gradient,
    check_an_input_that_is_detached_gets_no_gradient,
    check_gradients_of_own_rows,
    check_a_batch_of_equal_values_is_a_whole_batch,
    check_losses_that_differ_between_ranks_are_refused,
    check_ranks_want_the_same_gradients,
    check_micro_steps_are_refused,
    check_a_row_without_gradients_under_micro_steps,
)


@pytest.mark.parametrize("name", IDIOMS)
def test_loss_outside(outcomes, name):
    assert_passed(outcomes[name])
