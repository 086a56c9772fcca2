"""Layers of language models as Megatron-LM runs them, as program text: tensor-parallel, attention not fused.

The models of the measurements (``layer_times``): learned positions, pre-norm blocks, ReLU or GELU, fp32. Data
is [sequence, batch, hidden]. Weights are cut between heads, columns and words (Shoeybi et al., "Megatron-LM",
2019, section 3); every rank computes everything that is whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mixmesh.lang.ir import Program, parse_program

VOCABULARY_MULTIPLE = (
    128  # per rank, Megatron-LM pads the vocabulary to a multiple of this (--make-vocab-size-divisible-by)
)


@dataclass(frozen=True)
class Layout:
    """The sizes of a model, and the contents of its layers. ``has_logits``: its head multiplies by the word
    embeddings; otherwise the loss is computed from the hidden state itself."""

    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    activation: str
    has_dropout: bool
    has_logits: bool

    def words(self, degree: int) -> int:
        """The vocabulary with its padding."""
        unit = VOCABULARY_MULTIPLE * degree
        return -(-self.vocabulary // unit) * unit


class Text:
    """The lines of a program on ``degree`` ranks with equal parts."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self.lines: list[str] = []

    def cut(self, dim: int, unit: int = 1) -> str:
        """The placement of a tensor that is cut along ``dim``."""
        if self.degree == 1:
            return "R"
        return f"S({dim}, {unit})@r" if unit > 1 else f"S({dim})@r"

    @property
    def partial(self) -> str:
        return "R" if self.degree == 1 else "P(sum)"

    def put(self, name: str, body: str, sizes: tuple[int, ...], placement: str = "R", dtype="f32") -> str:
        self.lines.append(f"  %{name} = {body} : {dtype}[{', '.join(map(str, sizes))}] {placement}")
        return name

    def param(self, name: str, sizes: tuple[int, ...], placement: str = "R") -> str:
        return self.put(name, f'param("{name}")', sizes, placement)

    def summed(self, name: str, sizes: tuple[int, ...]) -> str:
        """The sum of a partial value over the ranks."""
        return name if self.degree == 1 else self.put(f"{name}.r", f"all_reduce(%{name})", sizes)

    def program(self, last: str, placement: str = "R") -> Program:
        """The program whose loss is the sum of ``last``, an instruction outside of the layer. The layer's
        input is the parameter ``x``, so that it gets a gradient."""
        ratio = (
            "" if self.degree == 1 else f"  ratio r = [{', '.join([str(1 / self.degree)] * self.degree)}]\n"
        )
        end = self.put("end", f"aten.sum(%{last})", (), placement)
        if placement == "R":
            end = self.put("end.p", "as_partial(%end)", (), "P(sum)")
        body = "\n".join(self.lines)
        return parse_program(f"program layer world={self.degree} {{\n{ratio}{body}\n  return %{end}\n}}\n")


def block(layout: Layout, batch: int, degree: int) -> Program:
    """One transformer block."""
    t = Text(degree)
    hidden, heads, length = layout.hidden, layout.heads, layout.sequence
    size, head = (length, batch, hidden), hidden // heads
    x = t.param("x", size)
    y = normalised(t, "ln1", x, size)
    t.param("qkv.w", (3 * hidden, hidden), t.cut(0, 3 * head))
    t.param("qkv.b", (3 * hidden,), t.cut(0, 3 * head))
    t.put("qkv", f"aten.linear(%{y}, %qkv.w, %qkv.b)", (length, batch, 3 * hidden), t.cut(2, 3 * head))
    each = (length, batch, heads, 3 * head)
    t.put("qkv.v", f"aten.view(%qkv, {list(each)})", each, t.cut(2))
    t.put("qkv.p", "aten.permute(%qkv.v, [1, 2, 0, 3])", (batch, heads, length, 3 * head), t.cut(1))
    one = f"f32[{batch}, {heads}, {length}, {head}] {t.cut(1)}"
    t.lines.append(f"  %q, %k, %v = aten.split.Tensor(%qkv.p, {head}, -1) : {one}, {one}, {one}")
    scores = (batch, heads, length, length)
    t.put("k.t", "aten.transpose.int(%k, -1, -2)", (batch, heads, head, length), t.cut(1))
    t.put("scores", "aten.matmul(%q, %k.t)", scores, t.cut(1))  # scaled by the product itself
    t.put("mask", 'input("mask")', (length, length), dtype="bool")
    t.put("masked", "aten.masked_fill.Scalar(%scores, %mask, -10000.0)", scores, t.cut(1))
    t.put("probs", "aten.softmax.int(%masked, -1)", scores, t.cut(1))
    t.put("context", "aten.matmul(%probs, %v)", (batch, heads, length, head), t.cut(1))
    t.put("context.p", "aten.permute(%context, [2, 0, 1, 3])", (length, batch, heads, head), t.cut(2))
    t.put("context.c", "aten.contiguous(%context.p)", (length, batch, heads, head), t.cut(2))
    t.put("context.v", f"aten.view(%context.c, {list(size)})", size, t.cut(2, head))
    y = added(t, "dense", "context.v", (hidden, hidden), t.cut(1, head), x, size, layout.has_dropout)
    z = normalised(t, "ln2", y, size)
    wide = (length, batch, 4 * hidden)
    t.param("fc1.w", (4 * hidden, hidden), t.cut(0))
    t.param("fc1.b", (4 * hidden,), t.cut(0))
    t.put("fc1", f"aten.linear(%{z}, %fc1.w, %fc1.b)", wide, t.cut(2))
    t.put("act", f"aten.{layout.activation}(%fc1)", wide, t.cut(2))
    return t.program(added(t, "fc2", "act", (hidden, 4 * hidden), t.cut(1), y, size, layout.has_dropout))


def embedding(layout: Layout, batch: int, degree: int) -> Program:
    """Words and positions, added up, and turned from [batch, sequence] to [sequence, batch]."""
    t = Text(degree)
    length, hidden, words = layout.sequence, layout.hidden, layout.words(degree)
    size = (batch, length, hidden)
    t.put("ids", 'input("ids")', (batch, length), dtype="i64")
    t.put("places", 'input("places")', (batch, length), dtype="i64")
    t.param("words.w", (words, hidden), t.cut(0))
    t.param("places.w", (length, hidden))
    ids = "ids" if degree == 1 else masked_ids(t, (batch, length))
    t.put("words", f"aten.embedding(%words.w, %{ids})", size, t.partial)
    y = "words"
    if degree > 1:
        t.put("other.r", f"aten.view(%other, {[batch, length, 1]})", (batch, length, 1), dtype="bool")
        t.put("own", "aten.masked_fill.Scalar(%words, %other.r, 0.0)", size, t.partial)
        y = t.summed("own", size)
    t.put("positions", "aten.embedding(%places.w, %places)", size)
    y = t.put("both", f"aten.add.Tensor(%{y}, %positions)", size)
    y = dropped(t, y, size) if layout.has_dropout else y
    t.put("turned", f"aten.transpose.int(%{y}, 0, 1)", (length, batch, hidden))
    return t.program(t.put("whole", "aten.contiguous(%turned)", (length, batch, hidden)))


def masked_ids(t: Text, size: tuple[int, int]) -> str:
    """Word numbers of a rank's own words, 0 for others, which ``VocabParallelEmbedding`` finds first."""
    t.put("before", "aten.lt.Scalar(%ids, 0)", size, dtype="bool")
    t.put("behind", "aten.ge.Scalar(%ids, 1)", size, dtype="bool")
    t.put("other", "aten.logical_or(%before, %behind)", size, dtype="bool")
    t.put("shifted", "aten.sub.Scalar(%ids, 0)", size, dtype="i64")
    return t.put("known", "aten.masked_fill.Scalar(%shifted, %other, 0)", size, dtype="i64")


def head(layout: Layout, batch: int, degree: int) -> Program:
    """The last norm, logits if there are any, and the loss with its elementwise steps one by one."""
    t = Text(degree)
    length, hidden, words = layout.sequence, layout.hidden, layout.words(degree)
    rows = length * batch
    x = t.param("x", (length, batch, hidden))
    y = normalised(t, "ln", x, (length, batch, hidden))
    t.put("rows", f"aten.view(%{y}, [{rows}, {hidden}])", (rows, hidden))
    t.put("target", 'input("target")', (rows,), dtype="i64")
    if not layout.has_logits:
        return t.program(loss(t, "rows", (rows, hidden), "R", "R"))
    t.param("out.w", (words, hidden), t.cut(0))
    t.put("logits", "aten.linear(%rows, %out.w)", (rows, words), t.cut(1))
    return t.program(loss(t, "logits", (rows, words), t.cut(1), t.partial), t.partial)


def loss(t: Text, logits: str, size: tuple[int, int], cut: str, partial: str) -> str:
    """Cross entropy in fp32 like ``vocab_parallel_cross_entropy`` of Megatron-LM: the maximum is found and
    subtracted, and exponentials are written, summed up, and divided. The backward pass multiplies once with
    the gradient."""
    rows = (size[0],)
    t.put("z", f"aten.detach(%{logits})", size, cut)
    t.put("sums", "mixmesh.sum_exp(%z)", rows, partial, "f64")  # reads all logits once, as the maximum does
    sums = "sums" if partial == "R" else t.put("sums.r", "all_reduce(%sums)", rows, dtype="f64")
    t.put("shifted", "aten.sub.Scalar(%z, 1.0)", size, cut)
    t.put("exp", "aten.exp(%shifted)", size, cut)
    t.put("total", "aten.sum.dim_IntList(%exp, [1])", rows, partial)
    t.put("softmax", "aten.div.Scalar(%exp, 2.0)", size, cut)
    return t.put("loss", f"mixmesh.cross_entropy(%{logits}, %{sums}, %target, 0, -100, 0.0)", rows, partial)


def normalised(t: Text, name: str, x: str, size: tuple[int, ...]) -> str:
    weight, bias = (t.param(f"{name}.{part}", size[-1:]) for part in "wb")
    return t.put(name, f"aten.layer_norm(%{x}, [{size[-1]}], %{weight}, %{bias})", size)


def added(
    t: Text,
    name: str,
    x: str,
    weight: tuple[int, int],
    cut: str,
    rest: str,
    size: tuple[int, ...],
    drops: bool,
) -> str:
    """A product whose addends are summed over the ranks, dropped out, and added to ``rest``."""
    t.param(f"{name}.w", weight, cut)
    t.put(name, f"aten.linear(%{x}, %{name}.w)", size, t.partial)
    y = t.summed(name, size)
    y = dropped(t, y, size) if drops else y
    return t.put(f"{name}.added", f"aten.add.Tensor(%{rest}, %{y})", size)


def dropped(t: Text, x: str, size: tuple[int, ...]) -> str:
    kinds = [f"{dtype}[{', '.join(map(str, size))}] R" for dtype in ("f32", "bool")]
    t.lines.append(f"  %{x}.d, %{x}.m = aten.native_dropout(%{x}, 0.1, true) : {', '.join(kinds)}")
    return f"{x}.d"


LAYERS: dict[str, Callable[[Layout, int, int], Program]] = {
    "embedding": embedding, "block": block, "head": head,
}  # fmt: skip
