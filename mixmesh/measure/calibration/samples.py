"""Kernels that a calibration measures: operators by class, dtype and size, independent of a user's job.

Sizes are those of real layers, from ones that hardly use a device to ones that fill any. A device is measured
on as many of them as its time allows (``timing``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...base.lazy import lazy
from ...cluster import Device
from ...cluster.classes import (
    ANY,
    ATTENTION,
    CONVOLUTION,
    DEPTHWISE,
    ELEMENTWISE,
    F32,
    HALF,
    LOOKUP,
    PRODUCT,
    REDUCTION,
    TF32,
    THIN,
)
from ...lang.ir import Program, parse_program
from ...lang.rules import Call, call_of

SMALL = "small kernels"
Row = tuple[str, str]  # class and dtype of the arithmetic


@dataclass(frozen=True)
class Shape:
    """An operator at one size: its text, its inputs by name (``ids`` are integers) and its result."""

    op: str
    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    output: tuple[int, ...]
    ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    """A kernel to measure. ``element`` is the dtype of its tensors. A ``chained`` kernel is measured as one
    of many in a row, each on the result of the one before."""

    kernels: str
    dtype: str
    element: str
    shape: Shape
    chained: bool = False

    @property
    def row(self) -> Row:
        return self.kernels, self.dtype

    @lazy
    def program(self) -> Program:
        """A program with only this instruction."""
        lines = [
            f'  %{name} = input("{name}") : {"i64" if name in self.shape.ids else self.element}{list(size)} R'
            for name, size in self.shape.inputs
        ]
        out = f"  %out = {self.shape.op} : {self.element}{list(self.shape.output)} R"
        return parse_program(
            "\n".join(["program sample world=1 {", *lines, out, "  return %out", "}"]) + "\n"
        )

    @lazy
    def call(self) -> Call:
        return call_of(self.program.instructions[-1], self.program.types)

    @property
    def num_gradients(self) -> int:
        return len(self.shape.inputs) - len(self.shape.ids)

    @property
    def size_bytes(self) -> int:
        """Bytes of its inputs and outputs."""
        return sum(t.size_bytes for t in (*self.call.inputs, *self.call.outputs))


@dataclass(frozen=True)
class Timing:
    """Measured seconds of a sample; ``backward_s`` is None if it was too short for the clock."""

    sample: Sample
    forward_s: float
    backward_s: float | None


def linear(m: int, k: int, n: int) -> Shape:
    return Shape("aten.linear(%x, %w)", (("x", (m, k)), ("w", (n, k))), (m, n))


def heads(count: int, length: int, width: int) -> Shape:
    inputs = (("x", (count, length, width)), ("y", (count, width, length)))
    return Shape("aten.bmm(%x, %y)", inputs, (count, length, length))


def attention(batch: int, count: int, length: int, width: int) -> Shape:
    size = (batch, count, length, width)
    op = "aten.scaled_dot_product_attention(%q, %k, %v)"
    return Shape(op, (("q", size), ("k", size), ("v", size)), size)


def convolution(batch: int, channels: int, side: int, *, groups: int = 1) -> Shape:
    size = (batch, channels, side, side)
    op = f"aten.conv2d(%x, %w, none, [1, 1], [1, 1], [1, 1], {groups})"
    return Shape(op, (("x", size), ("w", (channels, channels // groups, 3, 3))), size)


def unary(op: str, rows: int, columns: int) -> Shape:
    return Shape(op, (("x", (rows, columns)),), (rows, columns))


def added(rows: int, columns: int) -> Shape:
    size = (rows, columns)
    return Shape("aten.add.Tensor(%x, %y)", (("x", size), ("y", size)), size)


def normalised(rows: int, columns: int) -> Shape:
    inputs = (("x", (rows, columns)), ("w", (columns,)), ("b", (columns,)))
    return Shape(f"aten.layer_norm(%x, [{columns}], %w, %b)", inputs, (rows, columns))


def embedded(words: int, rows: int, columns: int) -> Shape:
    inputs = (("w", (words, columns)), ("i", (rows,)))
    return Shape("aten.embedding(%w, %i)", inputs, (rows, columns), ids=("i",))


GELU, RELU, SOFTMAX = "aten.gelu(%x)", "aten.relu(%x)", "aten.softmax.int(%x, -1)"
SIZES: dict[str, tuple[Shape, ...]] = {
    PRODUCT: (
        linear(128, 512, 512), linear(512, 512, 512), linear(1024, 768, 768), linear(1024, 1024, 1024),
        linear(2048, 1024, 4096), linear(4096, 1024, 1024), linear(4096, 4096, 1024),
        linear(4096, 4096, 4096), linear(8192, 4096, 4096), linear(8192, 8192, 8192),
    ),
    THIN: (
        heads(8, 256, 64), heads(64, 256, 64), linear(4096, 1024, 64), heads(64, 512, 64),
        heads(128, 512, 64), heads(128, 1024, 64), heads(256, 1024, 64), heads(128, 2048, 64),
    ),
    ATTENTION: (
        attention(1, 8, 256, 64), attention(4, 8, 512, 64), attention(8, 12, 512, 64),
        attention(8, 16, 1024, 64), attention(4, 16, 2048, 128), attention(8, 16, 2048, 64),
    ),
    CONVOLUTION: (
        convolution(2, 64, 28), convolution(8, 64, 28), convolution(8, 64, 56), convolution(32, 64, 56),
        convolution(32, 128, 28), convolution(32, 256, 14), convolution(64, 256, 28),
        convolution(128, 128, 56),
    ),
    DEPTHWISE: (
        convolution(2, 96, 28, groups=96), convolution(8, 96, 28, groups=96),
        convolution(8, 96, 56, groups=96), convolution(32, 96, 56, groups=96),
        convolution(32, 384, 28, groups=384), convolution(128, 96, 56, groups=96),
    ),
    ELEMENTWISE: (
        unary(RELU, 512, 1024), added(1024, 1024), unary(GELU, 2048, 1024), added(4096, 1024),
        unary(RELU, 8192, 1024), unary(GELU, 8192, 4096), added(16384, 4096), unary(RELU, 32768, 4096),
    ),
    REDUCTION: (
        normalised(512, 1024), unary(SOFTMAX, 1024, 1024), normalised(4096, 1024),
        unary(SOFTMAX, 8192, 1024), normalised(16384, 1024), unary(SOFTMAX, 32768, 2048),
        normalised(32768, 4096),
    ),
    LOOKUP: (
        embedded(8192, 1024, 512), embedded(30522, 4096, 768), embedded(32000, 8192, 1024),
        embedded(50257, 16384, 1024), embedded(50257, 65536, 1024),
    ),
}  # fmt: skip
SMALL_SHAPES = (
    unary(RELU, 8, 32), unary(GELU, 16, 64), unary(SOFTMAX, 8, 32), linear(8, 32, 32), normalised(8, 32),
    unary(RELU, 32, 128), linear(16, 64, 64),
)  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Samples that are measured together, within a share of the time."""

    name: str
    share: float
    samples: tuple[Sample, ...]

    @property
    def rows(self) -> dict[Row, list[Sample]]:
        """The samples by row, the smallest of each first."""
        rows: dict[Row, list[Sample]] = {}
        for sample in self.samples:
            rows.setdefault(sample.row, []).append(sample)
        return rows


def groups(device: Device, *, has_half: bool) -> tuple[Group, ...]:
    """The groups of samples for a device: small kernels, memory-bound ones, products by dtype. Convolutions
    of float32 run in TF32 if a card has it (``cost.kernels``). Half precision is bfloat16 if the device
    computes in it."""
    half = "bf16" if device.supports_bf16 or device.kind == "cpu" else "f16"
    small = tuple(Sample(SMALL, ANY, "f32", shape, chained=True) for shape in SMALL_SHAPES)
    bound = tuple(samples_of((ELEMENTWISE, REDUCTION, LOOKUP), ANY, "f32"))
    has_tf32 = device.tf32_flop_per_s > 0
    plain = (PRODUCT, THIN, ATTENTION) if has_tf32 else (PRODUCT, THIN, ATTENTION, CONVOLUTION, DEPTHWISE)
    every = (PRODUCT, THIN, ATTENTION, CONVOLUTION, DEPTHWISE)
    out = [
        Group(SMALL, 0.1, small),
        Group("kernels bound by memory", 0.25, bound),
        Group("products, float32", 0.25, tuple(samples_of(plain, F32, "f32"))),
    ]
    if has_tf32:
        out.append(Group("products, TF32", 0.2, tuple(samples_of(every, TF32, "f32"))))
    if has_half:
        out.append(Group("products, half precision", 0.25, tuple(samples_of(every, HALF, half))))
    return tuple(out)


def samples_of(classes: tuple[str, ...], dtype: str, element: str) -> Iterator[Sample]:
    for name in classes:
        yield from (Sample(name, dtype, element, shape) for shape in SIZES[name])
