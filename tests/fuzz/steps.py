"""What a few steps of training leave: losses, gradients, buffers and parameters, and how far two of these
differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mixmesh.runtime.random import RandomPolicy

TOLERANCE = 1e-9  # relative to the largest element of what is compared
FLOOR = 1e-4  # of the largest of its kind: what is smaller is compared on that scale
LEAST = 1e-3  # what is smaller than this is compared on this scale: sums that cancel are rounding

OptimizerOf = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Steps:
    """Per step the loss, the parameters and the buffers after it, and the gradients where they are whole."""

    losses: tuple[float, ...]
    parameters: tuple[Mapping[str, Tensor], ...]
    buffers: tuple[Mapping[str, Tensor], ...]
    gradients: tuple[Mapping[str, Tensor], ...] | None = None


@contextmanager
def in_float64():
    """A quotient of integers is of the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Draws(TorchFunctionMode):
    """Within it, dropout draws the numbers that are defined for the single device: those of ``RandomPolicy``
    for the n-th draw of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.count = RandomPolicy(), 0

    def next_step(self) -> None:
        self.policy.step += 1
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.nn.functional.dropout:
            return func(*args, **(kwargs or {}))
        x, (p, training) = args[0], drop_options(*args[1:], **(kwargs or {}))
        if not (p and training):
            return x
        generator = self.policy.generator(self.count, 0, x.device)
        self.count += 1
        return x * torch.empty(x.shape).bernoulli_(1 - p, generator=generator) / (1 - p)


def drop_options(p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple[float, bool]:
    return p, training


def single_device(
    model: nn.Module, batch: Mapping[str, Tensor], optimizer_of: OptimizerOf, num_steps: int
) -> Steps:
    """Trains ``model`` itself, which is changed, with nothing but PyTorch."""
    optimizer = optimizer_of(list(model.parameters()))
    losses, parameters, buffers, gradients = [], [], [], []
    draws = Draws()
    for _ in range(num_steps):
        draws.next_step()
        with draws:
            loss = model(**batch)
        loss.backward()
        losses.append(loss.item())
        gradients.append({n: copy_of(p.grad, p) for n, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        parameters.append({n: p.detach().clone() for n, p in model.named_parameters()})
        buffers.append({n: b.detach().clone() for n, b in model.named_buffers()})
    return Steps(tuple(losses), tuple(parameters), tuple(buffers), tuple(gradients))


def copy_of(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient.detach().to_dense().clone()


def difference(got: Steps, want: Steps, tolerance: float = TOLERANCE) -> str:
    """The first thing by which two differ, in one line; empty if they do not."""
    for step, (a, b) in enumerate(zip(got.losses, want.losses, strict=True)):
        if not abs(a - b) <= tolerance * max(abs(b), LEAST):
            return f"loss of step {step}: {a!r} in place of {b!r}"
        kinds = [("gradient", got.gradients, want.gradients), ("buffer", got.buffers, want.buffers),
                 ("parameter", got.parameters, want.parameters)]  # fmt: skip
        for kind, mine, true in kinds:
            if mine is None or true is None:
                continue
            text = _first_difference(mine[step], true[step], tolerance)
            if text:
                return f"{kind} of step {step}: {text}"
    return ""


def _first_difference(got: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float) -> str:
    if got.keys() != want.keys():
        return f"names differ: {sorted(got.keys() ^ want.keys())}"
    floor = max(LEAST, FLOOR * max((_largest(t) for t in want.values()), default=0.0))
    for name, true in want.items():
        mine = got[name]
        if mine.shape != true.shape or mine.dtype != true.dtype:
            return f"{name} is {mine.dtype}{list(mine.shape)} in place of {true.dtype}{list(true.shape)}"
        wrong = _largest(mine.double() - true.double())
        scale = max(_largest(true), floor)
        if not wrong <= tolerance * scale:
            return f"{name} differs by {wrong / scale:.2g}"
    return ""


def _largest(t: Tensor) -> float:
    return t.double().abs().max().item() if t.numel() else 0.0


def is_well_conditioned(
    make: Callable[[], tuple[nn.Module, dict[str, Tensor]]], optimizer_of: OptimizerOf, num_steps: int
) -> bool:
    """Whether a relative change of the parameters by 1e-13 changes nothing by more than 1e-11: rounding then
    stays far
    below what is looked for, and no choice (of a maximum, of an order) hangs on it."""
    runs = []
    for size in (0.0, 1e-13):
        model, batch = make()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + size * torch.randn(p.shape, generator=generator, dtype=p.dtype))
        runs.append(single_device(model, batch, optimizer_of, num_steps))
    finite = all(map(math.isfinite, runs[0].losses)) and all(
        bool(t.isfinite().all()) for step in runs[0].parameters for t in step.values()
    )
    return finite and not difference(*runs, tolerance=1e-11)
