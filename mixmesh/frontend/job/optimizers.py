"""The optimizers that a job may have: their states, and how they step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from inspect import unwrap
from typing import Any

from ...errors import InputError, JobError
from ...lang.optimizer_states import ADAM, Earlier, OptimizerStates
from .pieces import steps_alike_in_pieces

# large enough that some optimizers keep a probe in 8 bits, and that rows and columns of it hardly count
PROBE = 256, 384


def optimizer_states(optimizer: Callable[[Iterable], Any] | None, model: Any) -> OptimizerStates:
    """The workspace of an optimizer's step, and its tensors of state per parameter of ``model`` by their
    bytes: 2 for Adam, 0 for plain SGD, 0.5 for an Adam with 8 bits, 6 for one that keeps its own copy in 32
    bits of parameters in 16. An optimizer that fails on a probe is treated like an unfused Adam."""
    import torch

    if optimizer is None:
        return ADAM
    try:
        p = torch.nn.Parameter(torch.zeros(PROBE, dtype=trained_dtype(model)))
        on_sample = optimizer([p])
        is_fused = can_be_fused(on_sample) or all(group.get("fused") for group in on_sample.param_groups)
        p.grad = torch.ones_like(p)
        on_sample.step()
        held = (s for s in on_sample.state[p].values() if isinstance(s, torch.Tensor))
        sizes = [round(8 * s.nbytes / p.nbytes) / 8 for s in held]
        kept, num_kept = sum(sizes), sum(size > 0 for size in sizes)
    except Exception:  # the user's own function may fail on parameters that are not the model's
        kept, num_kept, is_fused = 2, 2, False
    kept = int(kept) if kept == int(kept) else kept
    return OptimizerStates(kept, 0 if is_fused else _workspace(num_kept))


EARLIER_BY_NAME = {"": Earlier.NOTHING, "no_sync": Earlier.ADDENDS, "every pass": Earlier.SUMS}


def earlier_gradients(accumulate: str) -> int:
    """The gradients that ``accumulate``, an argument of ``prepare`` and ``plan``, has a plan count. Raises
    InputError for any other."""
    if accumulate not in EARLIER_BY_NAME:
        raise InputError(
            f"unknown accumulation {accumulate!r}",
            expected='"no_sync", "every pass", or "" for a loop with one backward pass per optimizer step',
            got=repr(accumulate),
            hint='accumulate="no_sync" if passes but the last are within model.no_sync(), else "every pass"',
        )
    return int(EARLIER_BY_NAME[accumulate])


def trained_dtype(model: Any) -> Any:
    """The dtype of most elements that ``model`` trains."""
    import torch

    counts: Counter = Counter()
    for p in model.parameters():
        if p.requires_grad and p.is_floating_point():
            counts[p.dtype] += p.numel()
    return counts.most_common(1)[0][0] if counts else torch.float32


def _workspace(num_kept: int) -> int:
    """The temporary tensors of a step: Adam computes the root of its second moment and the quotient
    (torch.optim), the others at most one tensor, for weight decay."""
    return 2 if num_kept > 1 else 1


# optimizers with a fused kernel that ``fuse`` may turn on later; Adagrad must be constructed with it
FUSED = ("SGD", "Adam", "AdamW")


def can_be_fused(optimizer: Any) -> bool:
    """Whether PyTorch's fused kernel can step an optimizer (``runtime.optimizers.fuse``): the optimizer is
    new, and the user has not chosen how it steps."""
    import torch
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    groups = optimizer.param_groups
    if type(optimizer) not in [getattr(torch.optim, name) for name in FUSED] or optimizer.state:
        return False
    for group in groups:
        # False would be the user's choice, None means no choice
        free = all(group.get(name, False) is None for name in ("fused", "foreach"))
        if not free or group.get("differentiable") or group.get("capturable"):
            return False
    params = [p for group in groups for p in group["params"]]
    devices = _get_fused_kernels_supported_devices()
    return all(
        p.is_floating_point() and p.device.type in devices and not _is_lost(optimizer, p) for p in params
    )


def _is_lost(optimizer: Any, p: Any) -> bool:
    """Whether a fused step would leave a parameter as it is: PyTorch's kernel of SGD for CPUs does not write
    what it computes in 16 bits."""
    import torch

    return isinstance(optimizer, torch.optim.SGD) and p.device.type == "cpu" and p.element_size() == 2


# optimizers that compute each element of an update from the same element of gradient and state alone
ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD",
)  # fmt: skip


def is_elementwise(optimizer: Any) -> bool:
    """Whether an optimizer's step is one of PyTorch's that can step a part of a parameter alone. A class with
    its own ``step`` does not count, regardless of its base classes."""
    import torch

    elementwise_steps = [unwrap(getattr(torch.optim, name).step) for name in ELEMENTWISE]
    return isinstance(optimizer, torch.optim.Optimizer) and unwrap(type(optimizer).step) in elementwise_steps


def can_step_pieces(optimizer: Any) -> bool:
    """Whether an optimizer can step a part of a parameter alone: a known one, or one that passed a trial
    (``pieces``)."""
    return is_elementwise(optimizer) or steps_alike_in_pieces(optimizer)


def check_returned(optimizer: Any) -> None:
    """Raises JobError for None, which an optimizer function without a return statement returns."""
    if optimizer is None:
        raise JobError(
            "the job's optimizer function returns None",
            expected="an optimizer of torch.optim",
            hint="optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)",
        )


def check_supported(optimizer: Any) -> None:
    """Raises InputError for an optimizer that no plan can step."""
    import torch

    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError(
            "LBFGS is not supported: its line search needs whole gradients and repeated steps",
            expected="an optimizer that works element by element: " + ", ".join(ELEMENTWISE),
            got="LBFGS, which no plan can step",
            hint=(
                "torch.optim.AdamW(model.parameters(), lr=1e-3), without a closure",
                "or train with LBFGS on one device, without torchrun",
            ),
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise InputError(
            "SparseAdam is not supported: gradients are dense, as ranks sum them",
            expected="an optimizer that works element by element: " + ", ".join(ELEMENTWISE),
            got="SparseAdam, which takes sparse gradients alone",
            hint=(
                "torch.optim.SGD or Adagrad: the same numbers as with sparse gradients",
                "torch.optim.Adam, which moves rows that are not looked up too, by their momentum",
                "or train with SparseAdam on one device, without torchrun",
            ),
        )


def needs_whole_parameters(optimizer: Callable[[Iterable], Any] | None) -> bool:
    """Whether a job's optimizer computes with whole parameters (LAMB, Adafactor); False if it fails on a
    probe. Raises InputError for one that no plan can step, JobError for a function that returns None."""
    import torch

    if optimizer is None:
        return False
    try:
        on_sample = optimizer([torch.nn.Parameter(torch.zeros(4, 4))])
    except Exception:  # the user's own function may fail on parameters that are not the model's
        return False
    check_returned(on_sample)
    check_supported(on_sample)
    return not can_step_pieces(on_sample)
