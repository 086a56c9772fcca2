"""Batch normalisation in two operators, so that its samples may be cut.

``moments`` sums over samples, and an all-reduce completes the sums; ``normalise`` is then elementwise. The
backward pass has one all-reduce too, for the gradient of the sums, so as much is sent as with PyTorch's
SyncBatchNorm. The sums are f64, so that a variance can be the difference of two of them without loss; squares
of numbers far from zero are never summed in the precision of the data.
"""

from __future__ import annotations

from functools import lru_cache, reduce

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .pieces import PIECE_BYTES, wide

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
    those of the same moments; they are computed once, because every small kernel costs a GPU a launch."""
    keeps = has_gpu_kernels(moments) and not moments.is_inference()
    now = (count, moments._version, dtype) if keeps else None
    version, statistics = getattr(moments, STATISTICS, (None, None))
    if statistics is None or version != now:
        exact = moments.detach() / count
        exact[1].addcmul_(exact[0], exact[0], value=-1).clamp_(min=0)
        statistics = exact, exact.to(dtype)
        if keeps:
            setattr(moments, STATISTICS, (now, statistics))
    return statistics


def _sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """The approximate mean of each channel [C], and the sums of x and of x^2 [2, C]: f64.

    On a CPU, ``x`` minus its approximate mean is summed, a few samples at a time: PyTorch's kernel for mean
    and variance takes twice as long there, as it adds one number after another.
    """
    count = x.numel() // x.shape[1]
    if has_gpu_kernels(x):
        of_kernel = torch.stack(torch.batch_norm_update_stats(x, None, None, 0.0)).double()
        mean, sums = of_kernel[0], of_kernel * count
        sums[1].addcmul_(mean, sums[0])
        return mean, sums
    dims = [d for d in range(x.ndim) if d != 1]
    about = x.mean(dims, keepdim=True, dtype=wide(x))
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
    """(x - mean) / sqrt(var + eps) * weight + bias, per channel, in one pass."""
    dtype = wide(x)
    weight, bias = (None if t is None else t.to(dtype) for t in (weight, bias))
    return torch.native_batch_norm(x, weight, bias, mean.to(dtype), var.to(dtype), False, 0.0, eps)[0]


# --- one gradient of x instead of two on a GPU ---------------------------------------------------------


LINK = "_mixmesh_moments"  # attribute of the data whose moments were summed
MOST_COUNTED = 2**31 - 1  # values per channel, which the kernel counts in 32 bits


class _Link:
    """Joins the backward passes of the two operators on the same data. Each has a gradient of it, which would
    be two tensors to write and to add. Instead ``normalise`` sends the sums of its gradient through the
    all-reduce, as the gradient of the moments, and ``moments`` computes the whole gradient from the tensors
    in ``passed``, as PyTorch's SyncBatchNorm does. Used only if the moments have a single use."""

    def __init__(self) -> None:
        self.uses = 0
        self.passed: tuple | None = None

    @classmethod
    def on(cls, x: Tensor) -> _Link | None:
        """A new link for the moments of ``x``; None if there are others already, or no kernels."""
        if not has_gpu_kernels(x) or not x.requires_grad:
            return None
        link = None if hasattr(x, LINK) else cls()
        setattr(x, LINK, link)
        return link


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
        link = ctx.link
        if link is not None and link.passed is not None:
            task, count, y_grad, x, mean, scale, weight = link.passed
            link.passed = None
            if task == _graph_task():
                sums = grad.to(mean.dtype)
                number = _as_tensor(count, x.device)
                return torch.batch_norm_backward_elemt(y_grad, x, mean, scale, weight, *sums, number), None
        x, mean = ctx.saved_tensors
        # g1 + 2 g2 x, computed around the mean, as its terms are large and of opposite signs
        slope = 2 * grad[1]
        level = torch.addcmul(grad[0], slope, mean)
        return _scaled(x, mean, torch.ones_like(mean), slope, level, 0.0), None


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
        if is_joined and ctx.count <= MOST_COUNTED:
            around = x, near[0], (near[1] + ctx.eps).rsqrt_(), weight
            of_y, of_difference, of_xhat, _ = torch.batch_norm_backward_reduce(
                grad, *around, True, True, False
            )
            link.passed = _graph_task(), ctx.count, grad, *around
            sums = [None if d is None else g.to(d) for g, d in zip((of_xhat, of_y), ctx.dtypes)]
            return None, torch.stack((of_y, of_difference)).double(), *sums, None, None, None
        scale = (var + ctx.eps).rsqrt_()
        local = [t.to(dtype) for t in (mean, var, scale)]
        # for given statistics it returns dy * weight * scale, and the sums of dy * xhat and dy
        dx, of_xhat, of_y = torch.ops.aten.native_batch_norm_backward(
            grad, x, weight, *local[:2], local[0], local[2], False, ctx.eps,
            [ctx.needs_input_grad[0], True, True],
        )  # fmt: skip
        of_moments = None
        if ctx.needs_input_grad[1]:
            # mean = s1 / count, var = s2 / count - mean^2
            slope = scale * weight / -ctx.count
            of_square = slope * scale * of_xhat * 0.5
            of_moments = torch.stack((torch.addcmul(slope * of_y, mean, of_square, value=-2), of_square))
        sums = [None if d is None else g.to(d) for g, d in zip((of_xhat, of_y), ctx.dtypes)]
        return dx, of_moments, *sums, None, None, None


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
        if has_gpu_kernels(moments) and mean.dtype == var.dtype == torch.float32:
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
