"""Families of operators without parameters: elementwise, views, joins and splits, reductions, products."""

from __future__ import annotations

import math

from .draft import Draft


def activation(d: Draft) -> str | None:
    if (x := d.floats()) is None:
        return None
    name = d.rng.choice(
        ("F.gelu", "F.relu", "F.silu", "torch.tanh", "torch.sigmoid", "F.softplus", "F.elu", "F.leaky_relu",
         "F.hardswish",
         "torch.sin", "torch.abs", "F.logsigmoid", "F.mish", "torch.square", "torch.erf", "torch.atan")
    )  # fmt: skip
    return f"{name}({x})"


def softmax(d: Draft) -> str | None:
    if (x := d.floats()) is None:
        return None
    name = d.rng.choice(("F.softmax", "F.log_softmax", "torch.logcumsumexp", "F.softmin"))
    return f"{name}({x}, dim={d.dim(x)})"


def binary(d: Draft) -> str | None:
    if (x := d.floats()) is None or (y := d.like(x)) is None:
        return None
    form = d.rng.choice(
        ("{} + {}", "{} * {}", "{} - {}", "torch.maximum({}, {})", "torch.lerp({}, {}, 0.3)",
         "{} / (1 + {}.abs())",
         "torch.hypot({}, {} + 3)", "torch.where({} > 0, {}, 0.5)", "torch.addcmul({0}, {0}, {1})",
         "torch.atan2({}, {} + 2)")
    )  # fmt: skip
    return form.format(x, y)


def broadcast(d: Draft) -> str | None:
    """Two values whose shapes fit each other only by broadcasting."""
    if (x := d.floats()) is None or (y := d.floats()) is None:
        return None
    return f"{x} {d.rng.choice('+*-')} {y}" if d.shape(x) != d.shape(y) else None


def dropout(d: Draft) -> str | None:
    if (x := d.floats()) is None:
        return None
    return f"F.dropout({x}, {d.rng.choice((0.0, 0.3, 0.5))}, self.training)"


def flattened(d: Draft) -> str | None:
    if (x := d.floats(3, 4)) is None:
        return None
    start = d.rng.randrange(len(d.shape(x)) - 1)
    return f"{x}.flatten({start}, {start + 1})"


def regrouped(d: Draft) -> str | None:
    """Permuted and viewed with other dims: compound dims in another order."""
    if (x := d.floats(3, 4)) is None:
        return None
    shape = d.shape(x)
    order = d.rng.sample(range(len(shape)), len(shape))
    start = d.rng.randrange(len(shape) - 1)
    return f"{x}.permute({order}).flatten({start}, {start + 1})"


def unflattened(d: Draft) -> str | None:
    if (x := d.floats()) is None or (dim := d.dim(x)) is None:
        return None
    size = d.shape(x)[dim]
    factor = d.rng.choice([f for f in range(1, size + 1) if size % f == 0])
    form = d.rng.choice(("{}.unflatten({}, ({}, {}))", "{}.unflatten({}, ({}, {})).transpose({}, {})"))
    return form.format(x, dim, factor, size // factor, dim, dim + 1)


def reviewed(d: Draft) -> str | None:
    """Any other shape of the same elements."""
    if (x := d.floats()) is None:
        return None
    total, sizes = math.prod(d.shape(x)), []
    while total > 1 and len(sizes) < 3:
        sizes.append(d.rng.choice([f for f in range(1, total + 1) if total % f == 0]))
        total //= sizes[-1]
    return f"{x}.reshape({[*sizes, total]})"


def permuted(d: Draft) -> str | None:
    if (x := d.floats(2, 3, 4)) is None:
        return None
    n = len(d.shape(x))
    return d.rng.choice(
        (
            f"{x}.permute({d.rng.sample(range(n), n)})",
            f"{x}.transpose(0, {n - 1})",
            f"{x}.transpose({n - 2}, {n - 1})",
        )
    )


def squeezed(d: Draft) -> str | None:
    if (x := d.floats()) is None:
        return None
    return d.rng.choice(
        (f"{x}.unsqueeze({d.rng.randrange(len(d.shape(x)) + 1)})", f"{x}.squeeze()", f"{x}[..., None, :]")
    )


def expanded(d: Draft) -> str | None:
    if (x := d.floats(1, 2)) is None:
        return None
    return f"{x}.unsqueeze(0).expand({[d.rng.choice((2, 3)), *d.shape(x)]})"


def joined(d: Draft) -> str | None:
    if (x := d.floats()) is None or (y := d.like(x)) is None:
        return None
    shape = d.shape(x)
    return d.rng.choice(
        (f"torch.cat([{x}, {y}], {d.dim(x)})", f"torch.stack([{y}, {x}], {d.rng.randrange(len(shape) + 1)})",
         f"torch.cat([{x}, {y}, {x}], {d.dim(x)})")
    )  # fmt: skip


def joined_unequal(d: Draft) -> str | None:
    if (x := d.floats()) is None or (y := d.floats(len(d.shape(x)))) is None:
        return None
    differ = [n for n, (a, b) in enumerate(zip(d.shape(x), d.shape(y))) if a != b]
    return f"torch.cat([{x}, {y}], {differ[0]})" if len(differ) == 1 else None


def split(d: Draft) -> str | None:
    if (x := d.floats()) is None or (dim := d.dim(x, least=2)) is None:
        return None
    size = d.shape(x)[dim]
    first = d.rng.randrange(1, size)
    return d.rng.choice(
        (f"{x}.split([{first}, {size - first}], {dim})", f"{x}.chunk(2, {dim})", f"{x}.split({first}, {dim})",
         f"{x}.unbind({dim})" if size <= 4 else f"{x}.chunk(3, {dim})")
    )  # fmt: skip


def sliced(d: Draft) -> str | None:
    if (x := d.floats()) is None or (dim := d.dim(x, least=2)) is None:
        return None
    size = d.shape(x)[dim]
    start = d.rng.randrange(size - 1)
    return d.rng.choice(
        (f"{x}.narrow({dim}, {start}, {size - start})", f"{x}.select({dim}, {start})", f"{x}[::2]",
         f"{x}[..., 1:]",
         f"{x}[:-1]", f"{x}.movedim({dim}, 0)[-1]")
    )  # fmt: skip


def rolled(d: Draft) -> str | None:
    if (x := d.floats()) is None:
        return None
    dim = d.dim(x)
    return d.rng.choice(
        (f"torch.roll({x}, {d.rng.choice((1, -1, 2))}, {dim})", f"{x}.flip({dim})",
         f"{x}.tril()" if len(d.shape(x)) > 1 else f"{x}.flip(0)",
         f"{x}.diff(dim={dim})", f"torch.cumsum({x}, {dim}) * 0.2",
         f"torch.roll({x}, (1, 1), (0, {len(d.shape(x)) - 1}))")
    )  # fmt: skip


def padded(d: Draft) -> str | None:
    if (x := d.floats(2, 3, 4)) is None:
        return None
    before, after = d.rng.randrange(3), d.rng.randrange(2)
    mode = d.rng.choice(("constant", "constant", "reflect", "replicate", "circular"))
    if mode == "constant":
        return f"F.pad({x}, {d.rng.choice(((before, after), (before, after, 1, 0)))}, value=0.5)"
    return f"F.pad({x}, ({before}, {after}), mode={mode!r})"


def repeated(d: Draft) -> str | None:
    if (x := d.floats(1, 2, 3)) is None:
        return None
    return d.rng.choice(
        (f"{x}.repeat_interleave({d.rng.choice((2, 3))}, {d.dim(x)})",
         f"{x}.repeat({[d.rng.choice((1, 2)) for _ in d.shape(x)]})",
         f"torch.tile({x}, (2,))")
    )  # fmt: skip


def reduced(d: Draft) -> str | None:
    if (x := d.floats()) is None:
        return None
    n = len(d.shape(x))
    dims = sorted(d.rng.sample(range(n), d.rng.randint(1, max(1, n - 1))))
    keep = d.rng.random() < 0.4
    name = d.rng.choice(("sum", "mean", "mean", "amax", "logsumexp", "var", "std"))
    if name in ("var", "std"):
        text = f"({x}.var({dims}, correction={d.rng.choice((0, 1))}, keepdim={keep}) + 0.1)"
        return text if name == "var" else f"{text}.sqrt()"
    return f"{x}.{name}({dims}, keepdim={keep})" + (" * 0.3" if name == "sum" else "")


def normalised(d: Draft) -> str | None:
    if (x := d.floats()) is None or (dim := d.dim(x)) is None:
        return None
    return d.rng.choice(
        (f"F.normalize({x}, dim={dim}, eps=0.1)", f"{x} - {x}.mean({dim}, keepdim=True)",
         f"{x} / (1 + {x}.norm(dim={dim}, keepdim=True))", f"{x} / (1 + {x}.abs().amax({dim}, keepdim=True))")
    )  # fmt: skip


def sorted_(d: Draft) -> str | None:
    if (x := d.floats()) is None or (dim := d.dim(x, least=2)) is None:
        return None
    return d.rng.choice(
        (f"{x}.sort({dim}).values", f"{x}.topk(2, {dim}).values", f"{x}.max({dim}).values",
         f"{x}.median({dim}).values",
         f"{x}.argsort({dim})", f"{x}.argmax({dim})", f"{x}.cummax({dim}).values",
         f"{x}.kthvalue(2, {dim}).values")
    )  # fmt: skip


def product(d: Draft) -> str | None:
    if (x := d.floats(2, 3)) is None or (y := d.like(x)) is None:
        return None
    forms = ["({} @ {}.transpose(-1, -2)) * 0.3", "({}.transpose(-1, -2) @ {}) * 0.3"]
    if len(d.shape(x)) == 3:
        forms += ["torch.bmm({}, {}.transpose(1, 2)) * 0.3", "torch.einsum('bij,bkj->bik', {}, {}) * 0.3",
                  "torch.einsum('bij,cij->bc', {}, {}) * 0.2",
                  "torch.einsum('bij,bij->ij', {}, {}) * 0.2"]  # fmt: skip
    else:
        forms += ["torch.cdist({}, {} + 1) * 0.3", "torch.einsum('ij,kj->ik', {}, {}) * 0.3"]
    return d.rng.choice(forms).format(x, y)


def broadcast_product(d: Draft) -> str | None:
    if (x := d.floats(3, 4)) is None or (y := d.floats(2, 3)) is None:
        return None
    return f"({x} @ {y}) * 0.3" if d.shape(x)[-1] == d.shape(y)[-2] else None


def pooled(d: Draft) -> str | None:
    n = d.rng.choice((1, 2))
    if (x := d.floats(n + 2)) is None:
        return None
    kind = d.rng.choice(("max", "avg", "adaptive_avg", "adaptive_max"))
    if kind.startswith("adaptive"):
        return f"F.{kind}_pool{n}d({x}, {d.rng.choice((1, 2, 3))})"
    kernel, stride = d.rng.choice((2, 3)), d.rng.choice((1, 2, 3))
    return f"F.{kind}_pool{n}d({x}, {kernel}, stride={stride}, padding={d.rng.choice((0, 1))})"


def interpolated(d: Draft) -> str | None:
    if (x := d.floats(4)) is None:
        return None
    mode = d.rng.choice(
        ("'nearest'", "'bilinear', align_corners=False", "'bicubic', align_corners=True", "'area'")
    )
    return d.rng.choice(
        (f"F.interpolate({x}, scale_factor=2, mode={mode})", f"F.interpolate({x}, size=(3, 4), mode={mode})")
    )


def unfolded(d: Draft) -> str | None:
    if (x := d.floats(4)) is None:
        return None
    kernel = d.rng.choice((1, 2, 3))
    return d.rng.choice(
        (f"F.unfold({x}, {kernel}, stride={d.rng.choice((1, kernel))})",
         f"F.unfold({x}, {kernel}, stride={kernel}).transpose(1, 2)",
         f"F.pixel_unshuffle({x}, 2)", f"F.pixel_shuffle({x}, 2)", f"{x}.unfold(3, 2, 1)")
    )  # fmt: skip


FAMILIES = (
    activation, activation, activation, softmax, binary, binary, binary, broadcast, broadcast, dropout,
    flattened, regrouped,
    unflattened, reviewed, permuted, permuted, squeezed, expanded, joined, joined_unequal, split, split,
    sliced, sliced, rolled,
    padded, repeated, reduced, reduced, normalised, sorted_, product, product, broadcast_product, pooled,
    interpolated, unfolded,
)  # fmt: skip
