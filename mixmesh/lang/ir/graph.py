"""The logical graph: the computation of a model at global shapes, without placements."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

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
Args = tuple[Arg, ...]
Kwargs = tuple[tuple[str, Arg], ...]

LEAVES = ("input", "param", "buffer", "const")
# instructions without results: they give a buffer its new value, or show a value to the caller
SINKS = ("update", "output")


class Operation(Protocol):
    """The common part of nodes of a graph and instructions of a program."""

    @property
    def op(self) -> str: ...
    @property
    def results(self) -> tuple[str | None, ...]: ...
    @property
    def args(self) -> tuple[Arg, ...]: ...
    @property
    def kwargs(self) -> tuple[tuple[str, Arg], ...]: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...


AnyOperation = TypeVar("AnyOperation", bound=Operation)


def refs(args: Arg) -> Iterator[Ref]:
    """Yields every use in an argument tree, in order, repeated uses included."""
    if isinstance(args, Ref):
        yield args
    elif isinstance(args, tuple):
        for arg in args:
            yield from refs(arg)


def map_refs(args: Arg, fn: Callable[[Ref], Arg]) -> Arg:
    """Applies ``fn`` to every use of a value in an argument tree."""
    if isinstance(args, Ref):
        return fn(args)
    if isinstance(args, tuple):
        return tuple(map_refs(arg, fn) for arg in args)
    return args


def map_arguments(args: Args, kwargs: Kwargs, fn: Callable[[Ref], Arg]) -> tuple[Args, Kwargs]:
    """Applies ``fn`` to every use of a value in the arguments of an operator, in order."""
    return map_refs(args, fn), tuple([(key, map_refs(value, fn)) for key, value in kwargs])


def with_inputs(args: Args, kwargs: Kwargs, names: Iterable[str]) -> tuple[Args, Kwargs]:
    """The arguments with other inputs: the uses, in order, are replaced by the next of ``names``."""
    left = iter(names)
    return map_arguments(args, kwargs, lambda _: Ref(next(left)))


def with_names(operation: AnyOperation, names: Mapping[str, str]) -> AnyOperation:
    """A node or instruction with its inputs renamed by ``names``."""
    if not any(name in names for name in operation.inputs):
        return operation
    renamed = map_arguments(operation.args, operation.kwargs, lambda ref: Ref(names.get(ref.name, ref.name)))
    return replace(operation, args=renamed[0], kwargs=renamed[1])  # type: ignore[type-var]


def users_of(operations: Iterable[AnyOperation]) -> dict[str, list[AnyOperation]]:
    """The nodes or instructions that use each value, each of them once."""
    users: dict[str, list[AnyOperation]] = {}
    for operation in operations:
        for name in dict.fromkeys(operation.inputs):
            users.setdefault(name, []).append(operation)
    return users


def computed_of(operations: Iterable[AnyOperation], names: Iterable[str]) -> set[str]:
    """These values, and all that are computed of them."""
    reached = set(names)
    for operation in operations:
        if not reached.isdisjoint(operation.inputs):
            reached.update(result for result in operation.results if result is not None)
    return reached


def nameless(arg: Arg) -> Arg:
    """An argument without the names of values, for comparisons. Values carry their types, so that 1, 1.0 and
    True differ."""
    if isinstance(arg, Ref):
        return "%"
    if isinstance(arg, tuple):
        return tuple(map(nameless, arg))
    return (type(arg), arg)


@dataclass(frozen=True)  # no slots: ``lazy`` values are kept
class Node:
    """One operator, or a leaf (``input``, ``param``, ``buffer``, ``const``), an ``update`` of a buffer, or
    an ``output`` (see ``outputs``).

    ``results`` has None for a result that is not used. Operators have their names in ATen, without the
    overload ``default``: ``aten.linear``, ``aten.add.Tensor``. ``region`` is the number of the region that
    the user checkpointed.
    """

    results: tuple[str | None, ...]
    types: tuple[ValueType, ...]
    op: str
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()
    location: str = field(default="", compare=False)
    source: str = field(default="", compare=False)
    region: int | None = field(default=None, compare=False)

    @lazy
    def inputs(self) -> tuple[str, ...]:
        """The names of the used values, in order of appearance, including repeated uses."""
        return tuple(r.name for r in refs((self.args, tuple(v for _, v in self.kwargs))))

    @lazy
    def plain(self) -> tuple:
        """Operator and arguments without the names of values, for comparisons."""
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
        return name  # type: ignore[return-value]  # only one of several results can be None


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
    def requires_grad(self) -> frozenset[str]:
        """The values through which a gradient flows (see ``gradient_flow``)."""
        return gradient_flow(self.nodes, self.loss, self.types)

    @lazy
    def params(self) -> tuple[Node, ...]:
        return tuple(n for n in self.nodes if n.op == "param")

    @lazy
    def trained_bytes(self) -> int:
        """The bytes of the parameters that get a gradient."""
        return sum({n.args[0]: n.types[0].size_bytes for n in self.params if self._is_trained(n)}.values())

    @lazy
    def fixed_bytes(self) -> int:
        """The bytes of the other parameters, and of the buffers."""
        leaves = [n for n in self.nodes if n.op == "buffer" or (n.op == "param" and not self._is_trained(n))]
        return sum({n.args[0]: n.types[0].size_bytes for n in leaves}.values())

    def _is_trained(self, param: Node) -> bool:
        return param.result in self.requires_grad

    @lazy
    def batch_inputs(self) -> tuple[Node, ...]:
        return tuple(n for n in self.nodes if n.op == "input")

    @lazy
    def fingerprint(self) -> str:
        """12 hex digits that identify the computation of the graph."""
        text = "\n".join(repr((n.results, n.types, n.op, n.args, n.kwargs)) for n in self.nodes)
        return hashlib.sha256((text + self.loss).encode()).hexdigest()[:12]


# Operators without a derivative: their inputs get no gradient from them, not even zeros, so that an optimizer
# skips parameters that nothing else uses (tests/rules/test_differentiable.py compares with PyTorch's table)
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
    | {f"aten.special_{name}" for name in _BESSEL}
    | {f"aten.special_{name}{form}" for name in _POLYNOMIALS for form in ("", ".x_scalar", ".n_scalar")}
    | {f"aten.{name}_like" for name in ("zeros", "ones", "full", "empty", "rand", "randn")}
    | {f"aten.new_{name}" for name in ("zeros", "ones", "full", "empty")}
)


def has_gradient(node: Operation) -> bool:
    """Whether an input is given a gradient, or an output has one."""
    return bool(dict(node.kwargs).get("grad", False)) if node.kwargs else False


def begins_gradient(node: Operation) -> bool:
    """Whether a gradient is wanted for the value of a leaf: a trainable parameter, or an input with
    ``grad=true``."""
    if node.op == "param":
        return dict(node.kwargs).get("trainable", True)
    return node.op == "input" and has_gradient(node)


def gradient_flow(nodes: Iterable[Operation], loss: str, types: Mapping[str, ValueType]) -> frozenset[str]:
    """The values through which a gradient flows: they are floating, descend from a leaf that needs a gradient
    (``begins_gradient``), and lead to the loss or to an output with ``grad=true``, whose gradient comes from
    outside of the program."""
    nodes = list(nodes)
    up: set[str] = {loss, *(n.inputs[0] for n in nodes if n.op == "output" and has_gradient(n))}
    down: set[str] = set()
    nodes = [node for node in nodes if node.op not in NOT_DIFFERENTIABLE]
    for node in nodes:
        if begins_gradient(node) or not down.isdisjoint(node.inputs):
            down.update([r for r in node.results if r is not None and types[r].is_floating])
    for node in reversed(nodes):
        for r in node.results:
            if r in up and r in down:  # ``down`` lacks the results of comparisons and the like
                up.update(node.inputs)
                break
    return frozenset(down & up)
