"""Tests by a trial whether an optimizer of the script's own steps each element of a parameter by itself.

One copy of it steps whole tensors, and two more copies step a piece of each tensor, as two ranks would: with
the same gradients, in float64, several times. Ranks may hold pieces only if all elements come out alike. An
optimizer that behaves differently later is still stopped: it steps shards, which refuse any access to
elements of other ranks.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

STEPS = 3
TOLERANCE = 1e-10  # relative: vectorised kernels round the end of a tensor differently
MOST_OF_A_DIM = 256  # larger sizes are reduced to it: Adafactor's factored moments begin at 32 or 128
MOST_ELEMENTS = 2**16
MOST_TENSORS = 8  # limit on the tensors of different shapes that are tried
SEED = 5


def steps_alike_in_pieces(optimizer: Any) -> bool:
    """Whether copies of an optimizer that step pieces of parameters give the same result as one that steps
    them whole. False if that cannot be tried because the optimizer cannot be copied, has hooks, or needs a
    closure."""
    if type(optimizer).__module__.startswith("torch."):
        return False  # PyTorch's own optimizers are known without a trial
    try:
        return _is_alike(optimizer)
    except Exception:  # the user's own code may fail on tensors that are not the model's
        return False


def _is_alike(optimizer: Any) -> bool:
    import torch

    params = [p for group in optimizer.param_groups for p in group["params"]]
    if _has_hooks(optimizer) or not all(p.is_floating_point() for p in params):
        return False
    generator = torch.Generator().manual_seed(SEED)
    shapes = tuple(_shapes(params))
    values, *gradients = (
        [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        for _ in range(1 + STEPS)
    )
    with torch.random.fork_rng(devices=[]):
        whole = _stepped(optimizer, params, values, gradients)
        return all(_is_alike_cut(optimizer, params, values, gradients, whole, dim) for dim in (0, -1))


def _is_alike_cut(
    optimizer: Any,
    params: Sequence[Any],
    values: Sequence[Any],
    gradients: Sequence[Sequence[Any]],
    whole: Sequence[Any],
    dim: int,
) -> bool:
    """Whether steps of tensors cut along ``dim`` give the same results as those of the ``whole`` tensors in
    every group."""
    import torch

    cut = [[_cut(x, dim) for x in row] for row in (values, *gradients)]
    low, high = (
        _stepped(optimizer, params, *_first_and_rest([[pair[side] for pair in row] for row in cut]))
        for side in (0, 1)
    )
    joined = [torch.cat(pair, dim) for pair in zip(low, high)]
    return all(
        torch.allclose(mine, x, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
        for mine, x in zip(joined, whole)
    )


def _first_and_rest(rows: list[list[Any]]) -> tuple[list[Any], list[list[Any]]]:
    return rows[0], rows[1:]


def _has_hooks(optimizer: Any) -> bool:
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def _shapes(params: Sequence[Any]) -> Iterator[tuple[int, ...]]:
    """Yields shapes like those of the parameters that have dims, then a vector and a square matrix, each
    shape once."""
    shapes = dict.fromkeys(_bounded(tuple(p.shape)) for p in params if p.ndim and p.numel() > 1)
    by_dims: dict[int, int] = {}
    for shape in sorted(shapes, key=_num_elements, reverse=True):
        by_dims[len(shape)] = by_dims.get(len(shape), 0) + 1
        if by_dims[len(shape)] <= MOST_TENSORS // 4:
            yield shape
    yield (5,)
    yield (MOST_OF_A_DIM, MOST_OF_A_DIM)


def _bounded(shape: tuple[int, ...]) -> tuple[int, ...]:
    bounded = tuple(min(size, MOST_OF_A_DIM) for size in shape)
    while _num_elements(bounded) > MOST_ELEMENTS:
        most = max(bounded)
        bounded = tuple(size // 2 if size == most else size for size in bounded)
    return bounded


def _num_elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _cut(x: Any, dim: int) -> tuple[Any, Any]:
    """Two pieces, the first one larger."""
    first = (2 * x.shape[dim] + 2) // 3
    return tuple(part.clone() for part in x.split([first, x.shape[dim] - first], dim))


def _stepped(
    optimizer: Any, params: Sequence[Any], values: Sequence[Any], gradients: Sequence[Sequence[Any]]
) -> list[Any]:
    """``values`` after one step for each row of ``gradients``, by a copy of the optimizer whose groups hold
    them instead of ``params``."""
    import torch

    trial, groups = _copy(optimizer, params)
    each: list[list[Any]] = []
    for group in groups:
        group["params"][:] = [torch.nn.Parameter(x.clone()) for x in values]
        each.append(group["params"])
    step = type(trial).step
    step = step.__wrapped__ if hasattr(step, "hooked") else step  # without the hooks that every optimizer has
    for row in gradients:
        for mine in each:
            for p, g in zip(mine, row):
                p.grad = g.clone()
        step(trial)
    return [p.detach() for mine in each for p in mine]


def _copy(optimizer: Any, params: Sequence[Any]) -> tuple[Any, list[dict]]:
    """A copy of an optimizer without parameters and their state, and its groups."""
    memo: dict[int, Any] = {id(p): None for p in params}
    held = {key: x for key, x in vars(optimizer).items() if key not in ("state", "step", "zero_grad")}
    trial = object.__new__(type(optimizer))
    vars(trial).update(copy.deepcopy(held, memo), state=defaultdict(dict))
    for group in trial.param_groups:
        group["params"] = []
    return trial, trial.param_groups
