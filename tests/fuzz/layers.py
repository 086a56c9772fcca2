"""Families of operators with parameters. Each takes a draft and returns the code of a new value, or None."""

from __future__ import annotations

import re

from .draft import Draft


def linear(d: Draft) -> str | None:
    if (x := d.floats()) is None:
        return None
    bias = d.rng.random() < 0.7
    return f"{d.make(f'nn.Linear({d.shape(x)[-1]}, {d.size()}, bias={bias})')}({x})"


def mlp(d: Draft) -> str | None:
    if (x := d.floats()) is None:
        return None
    width, hidden = d.shape(x)[-1], d.size()
    act = d.rng.choice(("nn.GELU()", "nn.ReLU()", "nn.SiLU()"))
    m = d.make(f"nn.Sequential(nn.Linear({width}, {hidden}), {act}, nn.Linear({hidden}, {width}))")
    return f"{m}({x}) + {x}"


def tied_linear(d: Draft) -> str | None:
    """A linear layer whose weight another one, transposed, uses too."""
    if (x := d.floats()) is None:
        return None
    width, hidden = d.shape(x)[-1], d.size()
    m = d.make(f"nn.Linear({width}, {hidden})")
    return f"F.linear({m}({x}).tanh(), {m}.weight.t())"


def bias_twice(d: Draft) -> str | None:
    """A bias that is added twice, and whose linear layer is called twice."""
    if (x := d.floats()) is None:
        return None
    width = d.shape(x)[-1]
    m = d.make(f"nn.Linear({width}, {width})")
    return f"{m}({m}({x}).relu()) * 0.5 + {m}.bias"


def frozen_linear(d: Draft) -> str | None:
    if (x := d.floats()) is None:
        return None
    m = d.make(f"nn.Linear({d.shape(x)[-1]}, {d.size()})")
    d.setup(f"{m}.{d.rng.choice(('weight', 'bias'))}.requires_grad_(False)")
    return f"{m}({x})"


def unused_parameter(d: Draft) -> str | None:
    if (x := d.floats()) is None:
        return None
    d.parameter(d.size())
    return f"{x} * {d.parameter()}"


def scale(d: Draft) -> str | None:
    if (x := d.floats()) is None:
        return None
    shape = d.shape(x)
    kept = shape[d.rng.randrange(len(shape)) :]
    size = [n if d.rng.random() < 0.7 else 1 for n in kept]
    sign = d.rng.choice("*+-")
    return f"{x} {sign} {d.parameter(*size)}"


def bilinear(d: Draft) -> str | None:
    if (x := d.floats(2, 3)) is None or (y := d.like(x)) is None:
        return None
    width = d.shape(x)[-1]
    return f"{d.make(f'nn.Bilinear({width}, {width}, {d.size()})')}({x}, {y})"


def convolution(d: Draft) -> str | None:
    n = d.rng.choice((1, 2))
    if (x := d.floats(n + 2)) is None:
        return None
    channels = d.shape(x)[1]
    groups = d.rng.choice([g for g in (1, 2, 3, channels) if channels % g == 0])
    out = groups * d.rng.choice((1, 2, 3))
    kernel, stride = d.rng.choice((1, 2, 3)), d.rng.choice((1, 1, 2))
    padding, dilation = d.rng.choice((0, 1)), d.rng.choice((1, 1, 2))
    mode = d.rng.choice(("zeros", "zeros", "zeros", "reflect", "circular", "replicate"))
    return (
        d.make(
            f"nn.Conv{n}d({channels}, {out}, {kernel}, stride={stride}, padding={padding}, "
            f"dilation={dilation}, groups={groups}, bias={d.rng.random() < 0.6}, padding_mode={mode!r})"
        )
        + f"({x})"
    )


def patches(d: Draft) -> str | None:
    """A kernel as large as what it is applied to, or a convolution without overlap."""
    if (x := d.floats(4)) is None:
        return None
    _, channels, height, width = d.shape(x)
    if d.rng.random() < 0.5:
        return f"F.{d.rng.choice(('max', 'avg'))}_pool2d({x}, ({height}, {width}))"
    kernel = d.rng.choice([k for k in (1, 2, 3, height) if height % k == 0 and width % k == 0] or [1])
    return f"{d.make(f'nn.Conv2d({channels}, {d.size()}, {kernel}, stride={kernel})')}({x})"


def transposed_convolution(d: Draft) -> str | None:
    n = d.rng.choice((1, 2))
    if (x := d.floats(n + 2)) is None:
        return None
    kernel, stride = d.rng.choice((2, 3)), d.rng.choice((1, 2))
    return f"{d.make(f'nn.ConvTranspose{n}d({d.shape(x)[1]}, {d.size()}, {kernel}, stride={stride})')}({x})"


def batch_norm(d: Draft) -> str | None:
    if (x := d.floats(2, 3, 4)) is None:
        return None
    shape = d.shape(x)
    n = {2: 1, 3: 1, 4: 2}[len(shape)]
    options = d.rng.choice(
        ("", "", ", momentum=None", ", affine=False", ", track_running_stats=False", ", momentum=0.3")
    )
    return f"{d.make(f'nn.BatchNorm{n}d({shape[1]}, eps=0.1{options})')}({x})"


def layer_norm(d: Draft) -> str | None:
    if (x := d.floats()) is None:
        return None
    shape = d.shape(x)[-d.rng.choice((1, 1, 2)) :]
    kind = d.rng.choice(("LayerNorm", "RMSNorm"))
    return f"{d.make(f'nn.{kind}({list(shape)}, eps=0.1)')}({x})"


def group_norm(d: Draft) -> str | None:
    if (x := d.floats(2, 3, 4)) is None:
        return None
    channels = d.shape(x)[1]
    groups = d.rng.choice([g for g in (1, 2, 3, channels) if channels % g == 0])
    return f"{d.make(f'nn.GroupNorm({groups}, {channels}, eps=0.1)')}({x})"


def instance_norm(d: Draft) -> str | None:
    if (x := d.floats(4)) is None:
        return None
    return f"{d.make(f'nn.InstanceNorm2d({d.shape(x)[1]}, eps=0.1, affine=True)')}({x})"


def self_attention(d: Draft) -> str | None:
    if (x := d.floats(3)) is None:
        return None
    width = d.shape(x)[-1]
    heads = d.rng.choice([h for h in (1, 2, 3, 4) if width % h == 0])
    causal = d.rng.random() < 0.4
    q, k, v = (
        f"{d.make(f'nn.Linear({width}, {width})')}({x}).unflatten(-1, ({heads}, -1)).transpose(1, 2)"
        for _ in "qkv"
    )
    return f"F.scaled_dot_product_attention({q}, {k}, {v}, is_causal={causal}).transpose(1, 2).flatten(2)"


def grouped_attention(d: Draft) -> str | None:
    """Attention with fewer heads of keys and values than of queries, with a mask."""
    if (x := d.floats(3)) is None:
        return None
    _, length, width = d.shape(x)
    heads, groups, size = d.rng.choice(((2, 1, 3), (4, 2, 2), (6, 3, 1)))
    q, k, v = (
        f"{d.make(f'nn.Linear({width}, {n * size})')}({x}).unflatten(-1, ({n}, {size})).transpose(1, 2)"
        for n in (heads, groups, groups)
    )
    if d.rng.random() < 0.5:
        mask = d.buffer(f"torch.randn({length}, {length})")
    else:
        mask = d.buffer(f"torch.ones({length}, {length}, dtype=torch.bool).tril()")
    made = f"F.scaled_dot_product_attention({q}, {k}, {v}, attn_mask={mask}, enable_gqa=True)"
    return f"{made}.transpose(1, 2).flatten(2)"


def multihead(d: Draft) -> str | None:
    if (x := d.floats(3)) is None:
        return None
    width = d.shape(x)[-1]
    heads = d.rng.choice([h for h in (1, 2, 3) if width % h == 0])
    first = d.rng.random() < 0.5
    return f"{d.make(f'nn.MultiheadAttention({width}, {heads}, batch_first={first})')}({x}, {x}, {x})[0]"


def recurrent(d: Draft) -> str | None:
    if (x := d.floats(3)) is None:
        return None
    kind = d.rng.choice(("GRU", "LSTM", "RNN"))
    options = d.rng.choice(("", ", bidirectional=True", ", num_layers=2", ", bias=False"))
    first = d.rng.random() < 0.5
    return f"{d.make(f'nn.{kind}({d.shape(x)[-1]}, {d.size()}, batch_first={first}{options})')}({x})[0]"


def chunked_recurrent(d: Draft) -> str | None:
    """A recurrent layer over pieces of each sample, each a sequence of its own."""
    if (x := d.floats(3)) is None:
        return None
    batch, length, width = d.shape(x)
    parts = [p for p in (2, 3, 4) if length % p == 0]
    if not parts:
        return None
    p = d.rng.choice(parts)
    m = d.make(f"nn.{d.rng.choice(('GRU', 'LSTM'))}({width}, {d.size()}, batch_first=True)")
    return f"{m}({x}.reshape({batch * p}, {length // p}, {width}))[0].reshape({batch}, {length}, -1)"


def embedding(d: Draft) -> str | None:
    if (x := d.pick(lambda v: str(v.dtype) == "torch.int64" and v.ndim <= 2)) is None:
        return None
    low, high = int(d.values[x].min()), int(d.values[x].max())
    if low < 0:
        return None
    padding = d.rng.choice(("", f", padding_idx={low}"))
    return f"{d.make(f'nn.Embedding({high + d.rng.randint(1, 3)}, {d.size()}{padding})')}({x})"


def embedding_bag(d: Draft) -> str | None:
    if (x := d.pick(lambda v: str(v.dtype) == "torch.int64" and v.ndim == 2 and int(v.min()) >= 0)) is None:
        return None
    mode = d.rng.choice(("sum", "mean", "max"))
    return f"{d.make(f'nn.EmbeddingBag({int(d.values[x].max()) + 2}, {d.size()}, mode={mode!r})')}({x})"


def table(d: Draft) -> str | None:
    """Rows of a parameter by indices."""
    if (
        x := d.pick(lambda v: str(v.dtype) == "torch.int64" and v.ndim in (1, 2) and int(v.min()) >= 0)
    ) is None:
        return None
    return f"{d.parameter(int(d.values[x].max()) + 1, d.size())}[{x}]"


def prelu(d: Draft) -> str | None:
    if (x := d.floats(2, 3, 4)) is None:
        return None
    return f"{d.make(f'nn.PReLU({d.rng.choice((1, d.shape(x)[1]))})')}({x})"


def einsum_weight(d: Draft) -> str | None:
    if (x := d.floats(3)) is None:
        return None
    _, length, width = d.shape(x)
    out = d.size()
    equation, shape = d.rng.choice(
        (
            ("btd,do->bto", (width, out)),
            ("btd,tdo->bto", (length, width, out)),
            ("btd,tdo->bo", (length, width, out)),
        )
    )
    return f"torch.einsum({equation!r}, {x}, {d.parameter(*shape)}) * 0.5"


def again(d: Draft) -> str | None:
    """A module that was called before, called on something else."""
    called = [name for line in d.lines for name in re.findall(r"(self\.m\d+)\(", line.code)]
    x = d.floats()
    return f"{d.rng.choice(called)}({x})" if called and x else None


def without_gradient(d: Draft) -> str | None:
    """A module whose result counts, but passes no gradient on."""
    code = d.rng.choice((linear, batch_norm, layer_norm))(d)
    return None if code is None else f"{code}.detach()"


FAMILIES = (
    linear, linear, linear, mlp, tied_linear, bias_twice, frozen_linear, unused_parameter, scale, scale,
    bilinear, convolution,
    convolution, patches, transposed_convolution, batch_norm, layer_norm, group_norm, instance_norm,
    self_attention,
    grouped_attention, multihead, recurrent, chunked_recurrent, embedding, embedding, embedding_bag, table,
    prelu,
    einsum_weight, again, again, without_gradient,
)  # fmt: skip
