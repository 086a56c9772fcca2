"""Random numbers that are equal in a module and in a program: they depend only on the operator and the shape.

So two runs draw the same numbers even if they draw them in another order, or one of them draws numbers that
it does not use, and a module with dropout can be compared with a program to the last digit. Programs draw
such numbers by a ``RandomPolicy`` with ``by_shape``; this module handles the operators that modules call, as
``trace.draws`` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...lang.ir.samples import draws_numbers
from ...runtime.random import RandomPolicy

aten = torch.ops.aten
CPU = torch.device("cpu")


class DrawsAlike(TorchDispatchMode):
    """A context in which random numbers depend on the shape."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return draw_alike(func, args, kwargs or {})


def draw_alike(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs an operator; the random numbers that it draws depend on the shape."""
    if func in DRAWS:
        return DRAWS[func](*args, **{k: v for k, v in kwargs.items() if k != "generator"})
    if not draws_numbers(str(func)):
        return func(*args, **kwargs)
    with torch.random.fork_rng([]):
        torch.manual_seed(_generator(CPU).initial_seed())
        return func(*args, **kwargs)


def _generator(device: torch.device) -> torch.Generator:
    return RandomPolicy(exact=True, by_shape=True).generator(0, 0, device)


def _keep(shape: Any, probability: float, device: torch.device) -> Tensor:
    return torch.empty(shape, device=device).bernoulli_(probability, generator=_generator(device))


def _rand(shape: Any, device: torch.device = CPU, dtype: torch.dtype | None = None) -> Tensor:
    return torch.rand(shape, generator=_generator(device), device=device, dtype=dtype)


def _randn(shape: Any, device: torch.device = CPU, dtype: torch.dtype | None = None) -> Tensor:
    return torch.randn(shape, generator=_generator(device), device=device, dtype=dtype)


def _exponential(u: Tensor) -> Tensor:
    return torch.clamp_min(-torch.log1p(-u), torch.finfo(u.dtype).eps / 2)


def _native_dropout(x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    keep = _keep(x.shape, 1 - p, x.device).bool()
    return x * keep * (0.0 if p == 1 else 1 / (1 - p)), keep


def _fill(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        return draw(size, torch.device(device or CPU), dtype)

    return run


def _fill_like(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(like: Tensor, *, dtype: Any = None, **_: Any) -> Tensor:
        return draw(like.shape, like.device, dtype or like.dtype)

    return run


def _integers(shape: Any, low: int, high: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    scaled = _rand(shape, device, torch.float64) * float(high - low)
    return scaled.floor().to(dtype) + low


def _randint(high: int, size: Any, **options: Any) -> Tensor:
    return _randint_low(0, high, size, **options)


def _randint_low(
    low: int, high: int, size: Any, *, dtype: Any = None, device: Any = None, **_: Any
) -> Tensor:
    return _integers(size, low, high, torch.device(device or CPU), dtype or torch.int64)


def _randint_like(like: Tensor, high: int, *, dtype: Any = None, **_: Any) -> Tensor:
    return _integers(like.shape, 0, high, like.device, dtype or like.dtype)


def _randint_like_low(like: Tensor, low: int, high: int, *, dtype: Any = None, **_: Any) -> Tensor:
    return _integers(like.shape, low, high, like.device, dtype or like.dtype)


def _randperm(n: int, *, device: Any = None, **_: Any) -> Tensor:
    return torch.argsort(_rand((n,), torch.device(device or CPU), torch.float64))


def _normal_(x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return x.copy_(_randn(x.shape, x.device, x.dtype) * std + mean)


def _normal(mean: Any, std: Any = 1.0, *_: Any, **__: Any) -> Tensor:
    like = mean if isinstance(mean, Tensor) else std
    if isinstance(mean, Tensor) and isinstance(std, Tensor):
        like = torch.broadcast_tensors(mean, std)[0]
    return _randn(like.shape, like.device, like.dtype) * std + mean


def _normal_floats(
    mean: float, std: float, size: Any, *, dtype: Any = None, device: Any = None, **_: Any
) -> Tensor:
    return _randn(size, torch.device(device or CPU), dtype) * std + mean


def _uniform_(x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return x.copy_(_rand(x.shape, x.device, x.dtype) * (high - low) + low)


def _exponential_(x: Tensor, lambd: float = 1.0) -> Tensor:
    return x.copy_(_exponential(_rand(x.shape, x.device, x.dtype)) / lambd)


def _multinomial(weights: Tensor, count: int, replacement: bool = False) -> Tensor:
    if replacement and count > 1:
        weights = weights.unsqueeze(-2).expand(*weights.shape[:-1], count, weights.shape[-1])
    keys = weights / _exponential(_rand(weights.shape, weights.device, weights.dtype))
    return keys.argmax(-1) if replacement and count > 1 else keys.topk(count, -1)[1]


def _rrelu(
    x: Tensor, noise: Tensor, low: float = 1 / 8, high: float = 1 / 3, training: bool = False
) -> Tensor:
    if not training:
        return torch.nn.functional.leaky_relu(x, (low + high) / 2)
    slope = _rand(x.shape, x.device, x.dtype) * (high - low) + low
    noise.copy_(torch.where(x >= 0, torch.ones_like(x), slope))
    return x * noise


DRAWS: dict[Any, Callable[..., Any]] = {
    aten.native_dropout.default: _native_dropout,
    aten.bernoulli_.float: lambda x, p=0.5: x.copy_(_keep(x.shape, p, x.device)),
    aten.bernoulli.p: lambda x, p=0.5: _keep(x.shape, p, x.device).to(x.dtype),
    aten.bernoulli.default: lambda p: (_rand(p.shape, p.device) < p).to(p.dtype),
    aten.bernoulli_.Tensor: lambda x, p: x.copy_(_rand(x.shape, x.device) < p),
    aten.rand.default: _fill(_rand),
    aten.rand.generator: _fill(_rand),
    aten.randn.default: _fill(_randn),
    aten.randn.generator: _fill(_randn),
    aten.rand_like.default: _fill_like(_rand),
    aten.randn_like.default: _fill_like(_randn),
    aten.randint.default: _randint,
    aten.randint.low: _randint_low,
    aten.randint_like.default: _randint_like,
    aten.randint_like.low_dtype: _randint_like_low,
    aten.randperm.default: _randperm,
    aten.normal_.default: _normal_,
    aten.normal.float_float: _normal_floats,
    aten.normal.Tensor_float: _normal,
    aten.normal.float_Tensor: _normal,
    aten.normal.Tensor_Tensor: _normal,
    aten.uniform_.default: _uniform_,
    aten.exponential_.default: _exponential_,
    aten.multinomial.default: _multinomial,
    aten.rrelu_with_noise.default: _rrelu,
}  # fmt: skip
