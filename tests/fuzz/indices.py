"""Families of operators with integers, booleans and buffers, and statements that update buffers."""

from __future__ import annotations

import torch
from torch import Tensor

from .draft import Draft


def is_index(v: Tensor) -> bool:
    return v.dtype == torch.int64 and v.ndim > 0


def is_mask(v: Tensor) -> bool:
    return v.dtype == torch.bool and v.ndim > 0


def compared(d: Draft) -> str | None:
    if (x := d.floats()) is None:
        return None
    return d.rng.choice((f"{x} > 0.1", f"{x}.abs() < 0.7", f"({x} > {x}.mean())"))


def positions(d: Draft) -> str | None:
    """Indices that depend on values or on places."""
    if (x := d.floats()) is None:
        return None
    size = d.shape(x)[-1]
    return d.rng.choice(
        (f"torch.arange({size})", f"{x}.argmax(-1)", f"({x} > 0).long()", f"({x} > 0).long().cumsum(0)")
    )


def masked(d: Draft) -> str | None:
    if (m := d.pick(is_mask)) is None or (x := d.floats()) is None:
        return None
    if d.shape(m) != d.shape(x):
        return f"{x} * {m}.double()" if d.shape(m) == d.shape(x)[: len(d.shape(m))] == d.shape(x) else None
    return d.rng.choice(
        (
            f"{x}.masked_fill({m}, 0.25)",
            f"torch.where({m}, {x}, {x} * 0.5)",
            f"{x} * {m}",
            f"torch.where(~{m}, 0.0, {x})",
        )
    )


def cast(d: Draft) -> str | None:
    x = d.pick(lambda v: not v.is_floating_point() and v.ndim > 0)
    return None if x is None else f"{x}.double() * 0.3"


def one_hot(d: Draft) -> str | None:
    if (x := d.pick(lambda v: is_index(v) and int(v.min()) >= 0)) is None:
        return None
    return f"F.one_hot({x}, {int(d.values[x].max()) + d.rng.choice((1, 2))}).double()"


def gathered(d: Draft) -> str | None:
    if (x := d.floats()) is None:
        return None
    i = d.pick(lambda v: is_index(v) and v.ndim == len(d.shape(x)) and int(v.min()) >= 0)
    return None if i is None else f"{x}.gather({d.dim(x)}, {i})"


def own_gathered(d: Draft) -> str | None:
    """Looked up by an order of its own."""
    if (x := d.floats()) is None or (dim := d.dim(x, least=2)) is None:
        return None
    return f"{x}.gather({dim}, {x}.argsort({dim}))"


def scattered(d: Draft) -> str | None:
    if (x := d.floats(2, 3)) is None or (dim := d.dim(x, least=2)) is None:
        return None
    return d.rng.choice(
        (f"torch.zeros_like({x}).scatter_add({dim}, {x}.argsort({dim}), {x})",
         f"{x}.scatter({dim}, {x}.argsort({dim}), 0.3)",
         f"{x}.scatter_reduce({dim}, {x}.argsort({dim}), {x}, 'sum')")
    )  # fmt: skip


def selected(d: Draft) -> str | None:
    """Rows by an index of one dim, in three spellings, or added at one."""
    if (i := d.pick(lambda v: is_index(v) and v.ndim == 1 and int(v.min()) >= 0)) is None or (
        x := d.floats()
    ) is None:
        return None
    most = int(d.values[i].max())
    dims = [n for n, size in enumerate(d.shape(x)) if size > most]
    if not dims:
        return None
    dim = d.rng.choice(dims)
    rows = f"{x}.index_select({dim}, {i})"
    return d.rng.choice((rows, rows, f"{x}[{i}]" if dim == 0 else rows, f"{x}.index_add({dim}, {i}, {rows})"))


def paired(d: Draft) -> str | None:
    """One element of every row: ``x[arange, index]``."""
    if (x := d.floats(2, 3)) is None:
        return None
    i = d.pick(lambda v: is_index(v) and v.shape == d.values[x].shape[:1] and 0 <= int(v.min()))
    return None if i is None else f"{x}[torch.arange({d.shape(x)[0]}), {i}]"


def counted(d: Draft) -> str | None:
    """A division by how many of something there are."""
    if (m := d.pick(is_mask)) is None or (x := d.like(m)) is None:
        return None
    return f"({x} * {m}).sum(0) / ({m}.sum(0) + 1.0)"


def buffered(d: Draft) -> str | None:
    if (x := d.floats()) is None:
        return None
    return f"{x} {d.rng.choice('+*')} {d.buffer(f'torch.randn({list(d.shape(x)[1:])}) * 0.5')}"


FAMILIES = (
    compared, positions, masked, masked, cast, one_hot, gathered, own_gathered, scattered, selected, paired,
    counted, buffered,
)  # fmt: skip


# --- statements that update buffers ----------------------------------------------------------------------


def running_mean(d: Draft) -> str | None:
    if (x := d.floats()) is None:
        return None
    b = d.buffer(f"torch.zeros({list(d.shape(x)[1:])})")
    return f"{b}.mul_(0.9).add_(0.1 * {x}.detach().mean(0))"


def counter(d: Draft) -> str | None:
    return f"{d.buffer('torch.zeros((), dtype=torch.long)')}.add_(1)"


def copied(d: Draft) -> str | None:
    if (x := d.floats()) is None:
        return None
    return f"{d.buffer(f'torch.zeros({list(d.shape(x))})')}.copy_({x}.detach())"


def unread_norm(d: Draft) -> str | None:
    """A batch norm whose result nobody reads, but whose statistics are updated."""
    if (x := d.floats(2, 4)) is None:
        return None
    n = {2: 1, 4: 2}[len(d.shape(x))]
    return f"{d.make(f'nn.BatchNorm{n}d({d.shape(x)[1]}, eps=0.1)')}({x})"


UPDATES = (running_mean, counter, copied, unread_norm)
