"""The logical graph: what a model computes, at global shapes, with no word on who computes it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...base.lazy import lazy
from .types import ValueType


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of a value."""

    name: str

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True, slots=True)
class DType:
    """A dtype as an argument, so that it cannot be taken for a string."""

    name: str

    def __str__(self) -> str:
        return self.name


# An argument: Ref, DType, int, float, bool, str, None, or a tuple of arguments.
Arg = Any

LEAVES = ("input", "param", "buffer", "const")
# take a value and give none: the new value of a buffer, a value that the caller is shown
SINKS = ("update", "output")


def refs(args: Arg) -> Iterator[Ref]:
    """Every use in an argument tree, in order, repeated uses included."""
    if isinstance(args, Ref):
        yield args
    elif isinstance(args, tuple):
        for arg in args:
            yield from refs(arg)


def map_refs(args: Arg, fn) -> Arg:
    if isinstance(args, Ref):
        return fn(args)
    if isinstance(args, tuple):
        return tuple(map_refs(arg, fn) for arg in args)
    return args


def nameless(arg: Arg) -> Arg:
    """An argument without the names of values, to compare; types keep 1, 1.0 and True apart."""
    if isinstance(arg, Ref):
        return "%"
    if isinstance(arg, tuple):
        return tuple(map(nameless, arg))
    return (type(arg), arg)


@dataclass(frozen=True)  # no slots: what it reads is worked out once
class Node:
    """One operator, or a leaf (``input``, ``param``, ``buffer``, ``const``), an ``update`` of a buffer, or
    an ``output`` (see ``outputs``).

    ``results`` has a None for a result that nobody uses. Operators are named as in ATen, the overload
    left out where it is ``default``: ``aten.linear``, ``aten.add.Tensor``.
    """

    results: tuple[str | None, ...]
    types: tuple[ValueType, ...]
    op: str
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()
    location: str = field(default="", compare=False)
    source: str = field(default="", compare=False)
    region: int | None = field(default=None, compare=False)  # that the user checkpointed

    @lazy
    def inputs(self) -> tuple[str, ...]:
        """Names of the values used, in order of appearance, repeated uses included."""
        return tuple(r.name for r in refs((self.args, tuple(v for _, v in self.kwargs))))

    @lazy
    def plain(self) -> tuple:
        """Operator and arguments without the names of values, to compare."""
        return self.op, nameless(self.args), nameless(self.kwargs)

    @property
    def is_leaf(self) -> bool:
        return self.op in LEAVES

    @property
    def is_sink(self) -> bool:
        return self.op in SINKS

    @property
    def result(self) -> str:
        (name,) = self.results
        return name  # type: ignore[return-value]  # only one of several results is left out


@dataclass(frozen=True)
class Graph:
    """Nodes in topological order; ``loss`` names the scalar that is minimised."""

    name: str
    nodes: tuple[Node, ...]
    loss: str

    @lazy
    def types(self) -> dict[str, ValueType]:
        return {r: t for n in self.nodes for r, t in zip(n.results, n.types) if r is not None}

    @lazy
    def producers(self) -> dict[str, Node]:
        return {r: n for n in self.nodes for r in n.results if r is not None}

    @lazy
    def consumers(self) -> dict[str, tuple[Node, ...]]:
        out: dict[str, list[Node]] = {name: [] for name in self.types}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                out[name].append(node)
        return {name: tuple(nodes) for name, nodes in out.items()}

    @lazy
    def requires_grad(self) -> frozenset[str]:
        """Values through which a gradient flows: floating, descended from a trainable parameter and
        able to reach the loss."""
        return gradient_flow(self.nodes, self.loss, self.types)

    @lazy
    def params(self) -> tuple[Node, ...]:
        return tuple(n for n in self.nodes if n.op == "param")

    @lazy
    def batch_inputs(self) -> tuple[Node, ...]:
        return tuple(n for n in self.nodes if n.op == "input")

    @lazy
    def fingerprint(self) -> str:
        """12 hex digits of everything that decides what is computed."""
        text = "\n".join(repr((n.results, n.types, n.op, n.args, n.kwargs)) for n in self.nodes)
        return hashlib.sha256((text + self.loss).encode()).hexdigest()[:12]


# results of these have no gradient, though they may be floating: PyTorch leaves the gradients of their inputs
# alone, and an optimizer does not even decay a parameter without one
# (tests/rules/test_differentiable.py holds it against PyTorch's table of derivatives)
_POLYNOMIALS = (
    "chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w "
    "hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p "
    "shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v "
    "shifted_chebyshev_polynomial_w"
).split()
_BESSEL = (
    "airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1 "
    "modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1 "
    "spherical_bessel_j0"
).split()
NOT_DIFFERENTIABLE = frozenset(
    {"aten.detach", "aten.histc", "aten.view.dtype", "mixmesh.sum_exp", *SINKS}
    | {f"aten.special_{what}" for what in _BESSEL}
    | {f"aten.special_{what}{form}" for what in _POLYNOMIALS for form in ("", ".x_scalar", ".n_scalar")}
    | {f"aten.{what}_like" for what in ("zeros", "ones", "full", "empty", "rand", "randn")}
    | {f"aten.new_{what}" for what in ("zeros", "ones", "full", "empty")}
)


def has_gradient(node) -> bool:
    """Whether an input gets a gradient, or an output has one."""
    return bool(dict(node.kwargs).get("grad", False)) if node.kwargs else False


def begins_gradient(node) -> bool:
    """Whether a gradient is asked for of what the node itself brings in."""
    if node.op == "param":
        return dict(node.kwargs).get("trainable", True)
    return node.op == "input" and has_gradient(node)


def gradient_flow(nodes, loss: str, types: dict[str, ValueType]) -> frozenset[str]:
    """Values between what gets a gradient (trainable parameters, and inputs with ``grad=true``) and what has
    one: the loss, and outputs with ``grad=true``, whose gradient comes from outside of the program."""
    down: set[str] = set()
    up: set[str] = {loss, *(n.inputs[0] for n in nodes if n.op == "output" and has_gradient(n))}
    nodes = [node for node in nodes if node.op not in NOT_DIFFERENTIABLE]
    for node in nodes:
        if begins_gradient(node) or not down.isdisjoint(node.inputs):
            down.update([r for r in node.results if r is not None and types[r].is_floating])
    for node in reversed(nodes):
        for r in node.results:
            if r in up and r in down:  # it descends from a parameter: no comparison, and no choice
                up.update(node.inputs)
                break
    return frozenset(down & up)
