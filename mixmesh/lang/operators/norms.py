"""Batch normalisation in two operators, so that its samples may be cut.

``moments`` sums over samples, and an all-reduce completes the sums; ``normalise`` is then elementwise. The
backward pass has one all-reduce too, for the gradient of the sums, so as much is sent as with PyTorch's
SyncBatchNorm. The sums are f64, so that a variance can be the difference of two of them without loss; squares
of numbers far from zero are never summed in the precision of the data.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial, reduce

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .pieces import HALF, PIECE_BYTES, wide

# --- numbers per channel -------------------------------------------------------------------------------


def _channels(x: Tensor) -> int:
    if x.ndim < 2 or not x.is_floating_point():
        raise RuntimeError(f"batch norm wants floating-point data [N, C, ...], not {x.dtype} {list(x.shape)}")
    return x.shape[1]


def _check(x: Tensor, moments: Tensor, *of_channels: Tensor | None) -> None:
    channels = _channels(x)
    for t, shape in [(moments, (2, channels)), *((t, (channels,)) for t in of_channels)]:
        if t is not None and tuple(t.shape) != shape:
            raise RuntimeError(f"{list(shape)} wanted for data {list(x.shape)}, not {list(t.shape)}")


def has_gpu_kernels(x: Tensor) -> bool:
    """Whether PyTorch has the kernels of its SyncBatchNorm for a tensor's device."""
    return x.is_cuda


STATISTICS = "_mixmesh_statistics"  # attribute of moments: what has been computed from them


@torch.no_grad()
def _statistics(moments: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The mean and the biased variance [2, C], computed in f64, and the same in ``dtype``. Two operators need
    those of the same moments; they are computed once, because every small kernel costs a launch."""
    keeps = not moments.is_inference()
    now = (count, moments._version, dtype) if keeps else None
    version, statistics = getattr(moments, STATISTICS, (None, None))
    if statistics is None or version != now:
        exact = moments.detach() / count
        exact[1].addcmul_(exact[0], exact[0], value=-1).clamp_(min=0)
        statistics = exact, exact.to(dtype)
        if keeps:
            setattr(moments, STATISTICS, (now, statistics))
    return statistics


EVERY = 8  # one of so many samples gives the approximate mean


def _sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """The approximate mean of each channel [C], and the sums of x and of x^2 [2, C]: f64.

    On a CPU, ``x`` minus the mean of some of its samples is summed, a few samples at a time: PyTorch's kernel
    for mean and variance takes twice as long there, as it adds one number after another.
    """
    count = x.numel() // x.shape[1]
    if has_gpu_kernels(x):
        of_kernel = torch.stack(torch.batch_norm_update_stats(x, None, None, 0.0)).double()
        mean, sums = of_kernel[0], of_kernel * count
        sums[1].addcmul_(mean, sums[0])
        return mean, sums
    dims = [d for d in range(x.ndim) if d != 1]
    some = x[:: EVERY if len(x) >= 2 * EVERY else 1]
    about = some.mean(dims, keepdim=True, dtype=wide(x))
    rows = max(1, PIECE_BYTES * len(x) // (x.numel() * about.element_size()))
    totals, sums_of_squares = [], []
    for piece in x.split(rows):
        difference = piece - about
        totals.append(difference.sum(dims).double())
        sums_of_squares.append(difference.square_().sum(dims).double())
    of_difference, of_square = reduce(torch.add, totals), reduce(torch.add, sums_of_squares)
    mean = about.flatten().double()
    total = mean * count
    squares = torch.addcmul(of_square, mean, total.add(of_difference, alpha=2))
    return mean, torch.stack((total + of_difference, squares))


def _scaled(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias, per channel, in one pass. Mean and variance are of the
    dtype in which the result is computed."""
    weight, bias = (None if t is None else t.to(mean.dtype) for t in (weight, bias))
    return torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]


# --- one gradient of x instead of two ------------------------------------------------------------------


LINK = "_mixmesh_moments"  # attribute of the data whose moments were summed
MOST_COUNTED = 2**31 - 1  # values per channel, which the kernel counts in 32 bits


class _Link:
    """Joins the backward passes of the two operators on the same data. Each has a gradient of it, which would
    be two tensors to write and to add. Instead ``normalise`` sends the sums of its gradient through the
    all-reduce, as the gradient of the moments, and ``moments`` computes the whole gradient from what was
    ``passed``, as PyTorch's SyncBatchNorm does. Used only if the moments have a single use."""

    def __init__(self) -> None:
        self.uses = 0
        self._passed: tuple[int, Callable[[Tensor], Tensor]] | None = None

    @classmethod
    def on(cls, x: Tensor) -> _Link | None:
        """A new link for the moments of ``x``; None if there are others already, or if two gradients are
        more precise: on a CPU those of half types, which kernels of PyTorch compute in single precision."""
        if not x.requires_grad or (x.dtype in HALF and not has_gpu_kernels(x)):
            return None
        link = None if hasattr(x, LINK) else cls()
        setattr(x, LINK, link)
        return link

    def send(self, gradient: Callable[[Tensor], Tensor]) -> None:
        """Passes the function that makes the gradient of x from that of the moments."""
        self._passed = _graph_task(), gradient

    def take(self) -> Callable[[Tensor], Tensor] | None:
        """The function that was passed in the backward pass under way, once."""
        passed, self._passed = self._passed, None
        return passed[1] if passed is not None and passed[0] == _graph_task() else None


def mark_summed(x: Tensor) -> None:
    """Lets a following ``normalise`` of ``x`` alone compute the gradients that it does in a program, where
    the moments of ``x`` were summed before it."""
    if hasattr(x, LINK):
        delattr(x, LINK)
    _Link.on(x)


@lru_cache
def _as_tensor(count: int, device: torch.device) -> Tensor:
    return torch.full((1,), count, dtype=torch.int32, device=device)


def _graph_task() -> int:
    """The number of the backward pass under way."""
    return torch._C._current_graph_task_id()


# --- the operators -------------------------------------------------------------------------------------


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, link):
        mean, sums = _sums(x)
        ctx.save_for_backward(x, mean)
        ctx.link = link
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        joined = None if ctx.link is None else ctx.link.take()
        x, mean = ctx.saved_tensors
        if joined is not None and has_gpu_kernels(x):
            return joined(grad), None
        # g1 + 2 g2 x, computed around the mean, as its terms are large and of opposite signs
        slope = 2 * grad[1]
        level = torch.addcmul(grad[0], slope, mean)
        mean, slope, level = torch.stack((mean, slope, level)).to(wide(x))
        of_moments = _scaled(x, mean, torch.ones_like(mean), slope, level, 0.0)
        return of_moments if joined is None else joined(of_moments), None


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, moments, weight, bias, count, eps, link):
        (mean, var), near = _statistics(moments, count, wide(x))
        ctx.save_for_backward(x, mean, var, weight, near)
        ctx.link = link
        if link is not None:
            link.uses += 1
        ctx.count, ctx.eps = count, eps
        ctx.dtypes = [None if t is None else t.dtype for t in (weight, bias)]
        return _scaled(x, *near, weight, bias, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, mean, var, weight, near = ctx.saved_tensors
        if grad.stride() != x.stride():
            # PyTorch 2.13's CPU kernel errs where x and grad have different memory formats
            grad, x = grad.contiguous(), x.contiguous()
        dtype = wide(x)
        # without a weight a GPU's kernel returns no sums
        weight = torch.ones_like(near[0]) if weight is None else weight.to(dtype)
        link = ctx.link
        is_joined = link is not None and link.uses == 1 and all(ctx.needs_input_grad[:2])
        if is_joined and has_gpu_kernels(x) and ctx.count <= MOST_COUNTED:
            around = x, near[0], (near[1] + ctx.eps).rsqrt_(), weight
            of_y, of_difference, of_xhat, _ = torch.batch_norm_backward_reduce(
                grad, *around, True, True, False
            )
            link.send(partial(_gradient_by_kernel, grad, around, ctx.count))
            sums = [None if d is None else g.to(d) for g, d in zip((of_xhat, of_y), ctx.dtypes)]
            return None, torch.stack((of_y, of_difference)).double(), *sums, None, None, None
        is_joined = is_joined and not has_gpu_kernels(x)
        scale = (var + ctx.eps).rsqrt_()
        scale_near = scale.to(dtype)
        # for given statistics it returns dy * weight * scale, and the sums of dy * xhat and dy
        dx, of_xhat, of_y = torch.ops.aten.native_batch_norm_backward(
            grad, x, weight, *near, near[0], scale_near, False, ctx.eps,
            [ctx.needs_input_grad[0] and not is_joined, True, True],
        )  # fmt: skip
        if is_joined:
            link.send(partial(_add_scaled, grad, weight * scale_near))
        of_moments = None
        if ctx.needs_input_grad[1]:
            # mean = s1 / count, var = s2 / count - mean^2
            slope = scale * weight / -ctx.count
            of_square = slope * scale * of_xhat * 0.5
            of_moments = torch.stack((torch.addcmul(slope * of_y, mean, of_square, value=-2), of_square))
        sums = [None if d is None else g.to(d) for g, d in zip((of_xhat, of_y), ctx.dtypes)]
        return dx, of_moments, *sums, None, None, None


def _gradient_by_kernel(y_grad: Tensor, around: tuple[Tensor, ...], count: int, of_moments: Tensor) -> Tensor:
    """The gradient of ``x`` from that of the result and the sums over all ranks, by a GPU's kernel. In
    ``around`` are ``x``, its mean, the factor that makes its variance one, and the weight."""
    number = _as_tensor(count, y_grad.device)
    arguments: tuple = (y_grad, *around, *of_moments.to(around[1].dtype), number)
    return torch.batch_norm_backward_elemt(*arguments)


def _add_scaled(y_grad: Tensor, factor: Tensor, of_moments: Tensor) -> Tensor:
    """Adds the gradient of the result times a ``factor`` [C] to that through the moments, in place."""
    return of_moments.addcmul_(y_grad, factor.view(-1, *[1] * (y_grad.ndim - 2)))


def moments(x: Tensor) -> Tensor:
    """Sums x and x^2 over all dims of ``x`` [N, C, ...] but the second: f64 [2, C]."""
    _channels(x)
    if x.is_meta or not x.numel():
        return x.new_zeros((2, x.shape[1]), dtype=torch.float64)
    return _Moments.apply(x, _Link.on(x) if torch.is_grad_enabled() else None)


def normalise(
    x: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None, count: int, eps: float
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias, with mean and variance [C] from the ``moments`` of
    ``count`` elements per channel. The moments cover all ranks, ``x`` holds one rank's elements."""
    _check(x, moments, weight, bias)
    link = getattr(x, LINK, None) if torch.is_grad_enabled() and moments.requires_grad else None
    return _Normalise.apply(x, moments, weight, bias, count, eps, link)


def running_statistics(
    moments: Tensor, mean: Tensor, var: Tensor, count: int, momentum: float
) -> tuple[Tensor, Tensor]:
    """Moves ``mean`` and ``var`` [C] by ``momentum`` towards the mean and the unbiased variance; each keeps
    its dtype. It has no gradient."""
    if not tuple(mean.shape) == tuple(var.shape) == tuple(moments.shape[1:]):
        raise RuntimeError(f"moments {list(moments.shape)} for {list(mean.shape)} and {list(var.shape)}")
    unbiased = count / max(count - 1, 1)
    with torch.no_grad():
        if mean.dtype == var.dtype == torch.float32:
            # updated in f32, as by PyTorch's own batch norm
            now, biased = _statistics(moments, count, mean.dtype)[1]
            return torch.lerp(mean, now, momentum), torch.lerp(var, biased * unbiased, momentum)
        now, biased = _statistics(moments, count, torch.float64)[0]
        return _move(mean, now, momentum), _move(var, biased * unbiased, momentum)


def _move(old: Tensor, new: Tensor, momentum: float) -> Tensor:
    return torch.lerp(old.double(), new, momentum).to(old.dtype)


def local_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's own batch norm in training over the samples of this process, as in a model under
    DistributedDataParallel. Returns the result, and ``mean`` and ``var`` [C] moved towards these samples'
    statistics (empty if they are None). ``x`` is [N, C, ...] with at least two values per channel."""
    if _channels(x) and x.numel() // x.shape[1] < 2:
        raise RuntimeError(f"batch norm wants more than one value of a channel, got data {list(x.shape)}")
    mean, var = (None if t is None else t.detach().clone() for t in (mean, var))
    y = torch.batch_norm(x, weight, bias, mean, var, True, momentum, eps, torch.backends.cudnn.enabled)
    nothing = x.new_empty(0)
    return y, nothing if mean is None else mean, nothing if var is None else var


SCHEMAS = (
    (
        "local_batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor? var, float momentum,"
        " float eps) -> (Tensor, Tensor, Tensor)",
        local_batch_norm,
    ),
    ("moments(Tensor x) -> Tensor", moments),
    (
        "normalise(Tensor x, Tensor moments, Tensor? weight, Tensor? bias, int count, float eps) -> Tensor",
        normalise,
    ),
    (
        "running_statistics(Tensor moments, Tensor mean, Tensor var, int count, float momentum)"
        " -> (Tensor, Tensor)",
        running_statistics,
    ),
)
