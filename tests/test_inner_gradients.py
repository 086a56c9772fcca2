"""Gradients that a forward pass computes, and custom backward passes: as operators of the pass they run on
shards and equal the module on one device, or they are refused with their line."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.on_shards import assert_equals_one_device, assert_samples_stay
from torch import nn
from torch.autograd.function import once_differentiable

from mixmesh.errors import TraceError
from mixmesh.frontend.trace import trace

SAMPLES = 10
DRAW = torch.Generator().manual_seed(0)
X = torch.randn(SAMPLES, 6, 8, generator=DRAW)
NEAR = torch.randint(0, 6, (SAMPLES, 7), generator=DRAW)
grad = torch.autograd.grad


class Model(nn.Module):
    def __init__(self, loss) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.loss = loss
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(3, 16), nn.Linear(16, 2)
        self.frozen = nn.Parameter(torch.randn(16), requires_grad=False)
        self.norm, self.scale = nn.LayerNorm(16), nn.Parameter(torch.tensor([0.3]))
        self.book = nn.Parameter(torch.randn(5, 16))
        self.conv = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 3, padding=1, bias=False)
        )
        self.batch_norm = nn.BatchNorm1d(16)

    def forward(self, *batch):
        return self.loss(self, *batch)


def leaf(x):
    return x.detach().requires_grad_()


def energy(m, x):
    return m.c(torch.tanh(m.a(x)))


def forces(m, x):
    x = x.requires_grad_()
    each = energy(m, x).sum((1, 2))
    return F.mse_loss(each, torch.ones_like(each)) + grad(each.sum(), x, create_graph=True)[0].square().mean()


def second_derivatives(m, x):
    x = leaf(x)
    u = energy(m, x)[..., :1]
    du = grad(u, x, torch.ones_like(u), create_graph=True)[0]
    ddu = grad(du[..., 0].sum(), x, create_graph=True)[0][..., 0]
    return (du[..., 1] - 0.1 * ddu).square().mean()


def of_atoms(m, x, near):
    """Distances to neighbours, and a sum over them that is written in place."""
    places = leaf(x[..., :3]).clone()
    gone = torch.gather(places, 1, near[..., None].expand(-1, -1, 3)) - places[:, :1]
    messages = m.a(torch.exp(-(gone.norm(dim=-1)[..., None] + 0.1) * torch.arange(1, 9) * 0.2))
    nodes = torch.zeros(SAMPLES, 6, 16).scatter_add_(1, near[..., None].expand(-1, -1, 16), messages)
    each = m.c(F.silu(nodes)).sum((1, 2))
    return grad(each, places, torch.ones_like(each), create_graph=True)[0].square().mean() + each.mean()


def of_norms(m, x):
    x = leaf(x)
    h = m.norm(F.gelu(m.a(x)))
    h = F.group_norm((h + F.softmax(h, -1)).transpose(1, 2), 4)
    return grad(m.c(h.transpose(1, 2)).sum(), x, create_graph=True)[0].square().mean()


def of_convolutions(m, x):
    x = leaf(x[:, None])
    gradient = grad(m.conv(x).sum(), x, create_graph=True)[0]
    return gradient.flatten(1).norm(dim=1).sub(1).square().mean()


def without_a_graph(m, x):
    """A perturbation along the gradient, which gradients do not go through."""
    x = leaf(x)
    along = grad(energy(m, x).square().sum(), x)[0]
    return energy(m, x.detach() + 0.1 * along).square().mean()


def in_a_loop(m, x):
    y = x[..., :3]
    for _ in range(2):
        y = y.requires_grad_()
        y = y - 0.1 * grad(m.c(torch.tanh(m.b(y))).sum(), y, create_graph=True)[0]
    return y.square().mean()


def of_parameters(m, x):
    """A step of gradient descent within the pass."""
    names = list(dict(m.a.named_parameters()))
    steps = grad(energy(m, x[:, :3]).square().mean(), list(m.a.parameters()), create_graph=True)
    fast = {n: p - 0.1 * g for n, p, g in zip(names, m.a.parameters(), steps)}
    return m.c(torch.tanh(F.linear(x[:, 3:], fast["weight"], fast["bias"]))).square().mean()


def through_part(m, x):
    """Part of the energy is stopped, by detach and by no_grad."""
    x = leaf(x)
    h = torch.tanh(m.a(x))
    with torch.no_grad():
        weights = h * 2
    return grad((h * h.detach() * weights).sum(), x, create_graph=True)[0].square().mean()


def through_writes(m, x):
    x = leaf(x)
    h = torch.zeros(SAMPLES, 6, 16)
    h[:, :3] = m.a(x[:, :3])
    h[:, 3:] += m.a(x[:, 3:]).sin()
    h.mul_(0.5)
    return grad(m.c(h.tanh()).sum(), x, create_graph=True)[0].square().mean()


def of_what_was_written(m, x):
    """The inputs of derivatives are written to before, through views too, and so is what is read."""
    x = leaf(x).clone()
    x[:, 0] = 0
    h = m.a(x.clamp_(-1, 1)) * 1
    view = h.flatten(1)
    h.mul_(2)
    y = view.sin().sum() + energy(m, x).sum()
    first, second = grad(y, (x, h), create_graph=True)
    with torch.no_grad():
        half = torch.ones_like(h)
        half[:, 3:] = 0.5
    third = grad((h * half).sin().sum(), h, create_graph=True)[0]
    return first.square().mean() + second.square().mean() + third.square().mean()


def results_written(m, x):
    """Gradients are written to; those without a graph too."""
    x = leaf(x)
    values = energy(m, x)
    found = grad(values.sum(), x, create_graph=True)[0]
    found[:, 0] = 0
    steps = grad(values.square().sum(), x, retain_graph=True)[0]
    steps.sign_()
    return found.square().mean() + energy(m, x.detach() + 0.1 * steps).square().mean()


def of_several(m, x):
    """One of the outputs depends on no input."""
    x = leaf(x)
    outputs = [energy(m, x).sum(), m.c.weight.sin().sum()]
    return grad(outputs, [x], create_graph=True)[0].square().mean()


def of_class_losses(m, x):
    scale = torch.ones(2, requires_grad=True)
    classes = (x[..., 0] > 0).long()
    loss = F.cross_entropy((energy(m, x) * scale).transpose(1, 2), classes, reduction="sum")
    loss = loss - F.logsigmoid(energy(m, x) * scale).sum()
    return grad(loss, scale, create_graph=True)[0].square().sum()


def of_slopes(m, x, kind):
    """The bias matters in no other way, and has zeros as its gradient."""
    x = leaf(x)
    h = m.a(x)
    shrunk = {"hard": F.hardshrink, "soft": F.softshrink, "pooled": lambda h: F.max_pool2d(h, 3, 1, 1)}
    shrunk = shrunk.get(kind, lambda h: F.prelu(h, m.scale))(h)
    return grad(F.linear(shrunk, m.c.weight).sum(), x, create_graph=True)[0].square().mean()


def of_signs(m, x):
    """A second derivative is zeros without memory, which verification reads."""
    x = leaf(x)
    return grad(m.c(F.softsign(m.a(x))).sum(), x, create_graph=True)[0].square().mean()


def not_all_used(m, x):
    x, other = leaf(x), torch.ones(3, requires_grad=True)
    found, none = grad(energy(m, x).sum(), (x, other), create_graph=True, allow_unused=True)
    assert none is None
    return found.square().mean()


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(x, scale):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.scale * gradient, None


class Sign(torch.autograd.Function):
    """The backward writes by a mask."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        gradient = gradient.clone()
        gradient[x.abs() > 1] = 0
        return gradient


class Quantised(torch.autograd.Function):
    """The size of a step is learned: its gradient is a sum over all entries."""

    @staticmethod
    def forward(ctx, x, step, most):
        ctx.save_for_backward(x, step)
        ctx.most = most
        return (x / step).round().clamp(-most, most) * step

    @staticmethod
    def backward(ctx, gradient):
        x, step = ctx.saved_tensors
        whole = x / step
        inside = (whole.abs() <= ctx.most).to(x.dtype)
        of_step = inside * (whole.round() - whole) + (1 - inside) * whole.sign() * ctx.most
        return gradient * inside, (gradient * of_step).sum().reshape(1), None


class Nearest(torch.autograd.Function):
    """Entries of a code book, and their numbers."""

    @staticmethod
    def forward(ctx, x, book):
        flat = x.reshape(-1, book.shape[1])
        numbers = torch.cdist(flat, book).argmin(1)
        ctx.save_for_backward(numbers, book)
        ctx.mark_non_differentiable(numbers)
        return book.index_select(0, numbers).view_as(x), numbers

    @staticmethod
    def backward(ctx, gradient, _):
        numbers, book = ctx.saved_tensors
        of_book = torch.zeros_like(book).index_add_(0, numbers, gradient.reshape(-1, book.shape[1]))
        return gradient.clone(), of_book


class OnlyWhatNeedsOne(torch.autograd.Function):
    """The gradient depends on which inputs need one."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x.round() * weight

    @staticmethod
    def backward(ctx, gradient):
        (weight,) = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            return 2 * gradient * weight, gradient.sum((0, 1))
        return 5 * gradient * weight, None


class Gated(torch.autograd.Function):
    """The gradient of an input is zeros, which is not None; one of the results has none."""

    @staticmethod
    def forward(ctx, x, scale):
        gate = (x > 0).to(x.dtype)
        ctx.save_for_backward(gate, scale)
        ctx.mark_non_differentiable(gate)
        return x.round(), x * gate * scale, gate

    @staticmethod
    def backward(ctx, first, second, _):
        gate, scale = ctx.saved_tensors
        return first + second * gate, torch.zeros_like(scale)


class Drawn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.bernoulli(torch.sigmoid(x))

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Clipped(Rounded):
    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1e-3, 1e-3)


class ClippedFarOut(Rounded):
    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1e3, 1e3)


class Pulled(Reversed):
    """The backward adds a little that does not depend on the gradient."""

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 1e-9, None


class SeesWhichIsUsed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x.round(), x * 2

    @staticmethod
    def backward(ctx, first, second):
        return 3 * first if second is None else 2 * second if first is None else first + second


def applied(function, *others):
    def loss(m, x):
        result = function.apply(m.a(x), *(o(m) if callable(o) else o for o in others))
        return m.c(torch.tanh(result[0] if isinstance(result, tuple) else result)).square().mean()

    return loss


LOSSES = {
    **{f.__name__: f for f in (
        forces, second_derivatives, of_atoms, of_norms, of_convolutions, without_a_graph, in_a_loop,
        of_parameters, through_part, through_writes, not_all_used, of_what_was_written, results_written,
        of_several, of_class_losses, of_signs,
    )},
    **{k: partial(of_slopes, kind=k) for k in ("hard", "soft", "pooled", "prelu")},
    "rounded": applied(Rounded),
    "reversed": applied(Reversed, 0.7),
    "sign": applied(Sign),
    "quantised": applied(Quantised, lambda m: m.scale, 3),
    "nearest": applied(Nearest, lambda m: m.book),
    "drawn": applied(Drawn),
    "frozen": applied(OnlyWhatNeedsOne, lambda m: m.frozen),
    "needed": applied(OnlyWhatNeedsOne, lambda m: m.book[0]),
    "no gradient": applied(Gated, lambda m: m.scale),
    "the second result": lambda m, x: m.c(Gated.apply(m.a(x), m.scale)[1]).square().mean(),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_equals_one_device(name):
    model, batch = Model(LOSSES[name]), (X, NEAR) if name == "of_atoms" else (X,)
    assert_samples_stay(assert_equals_one_device(model, batch))


def test_the_pass_is_not_computed_twice():
    assert [n.op for n in trace(Model(forces), (X,)).graph.nodes].count("aten.tanh") == 1


def with_dropout(m, x):
    x = leaf(x)
    return grad(F.dropout(energy(m, x), 0.5).sum(), x, create_graph=True)[0].square().mean()


def with_batch_norm(m, x):
    x = leaf(x)
    return grad(m.batch_norm(m.a(x).flatten(0, 1)).sum(), x, create_graph=True)[0].square().mean()


def with_a_later_write(m, x):
    x, weights = leaf(x), m.book[0, :8] * 1
    values = energy(m, x + weights).sum()
    weights += 1
    return grad(values, x, create_graph=True)[0].square().mean()


def with_a_write_without_gradients(m, x):
    h = m.a(x) * 1
    twice = h * 2
    with torch.no_grad():
        twice.mul_(3)
    found = grad((twice * twice).sum(), (h, m.a.weight), create_graph=True, allow_unused=True)
    return found[0].square().mean()


def by_batches(m, x):
    x = leaf(x)
    two = energy(m, x).sum((0, 1))
    return grad(two, x, torch.eye(2), create_graph=True, is_grads_batched=True)[0].square().mean()


@pytest.mark.parametrize(
    "loss, why",
    [
        (with_dropout, "draws random numbers"),
        (with_batch_norm, "aten.batch_norm.default writes to"),
        (with_a_later_write, "aten.add_.Tensor writes to"),
        (with_a_write_without_gradients, "aten.mul_.Tensor writes to"),
        (by_batches, "is_grads_batched"),
        (applied(Clipped), "test_inner_gradients.Clipped"),
        (applied(ClippedFarOut), "test_inner_gradients.ClippedFarOut"),
        (applied(Pulled, 0.7), "test_inner_gradients.Pulled"),
        (applied(SeesWhichIsUsed), "test_inner_gradients.SeesWhichIsUsed"),
    ],
)
def test_refused_with_the_line(loss, why):
    with pytest.raises(TraceError) as caught:
        trace(Model(loss), (X,))
    assert why in caught.value.got and "test_inner_gradients.py:" in caught.value.where


def test_wrong_calls_are_told_as_pytorch_tells_them():
    with pytest.raises(TraceError) as caught:
        trace(Model(lambda m, x: grad(energy(m, x).sum(), x, create_graph=True)[0].sum()), (X,))
    assert "does not require grad" in caught.value.got
