"""Symbols in place of sizes: one export of a call serves batches of many sizes.

PyTorch can export a call with symbols for some sizes of its inputs. Some questions, as ``if length > 512``,
have no answer for a symbol. PyTorch then answers for the sizes at hand and notes a condition. For all sizes
that fulfil the conditions the program is the same, with numbers in place of symbols.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import CeilToInt, FloorToInt, IntTrueDiv, RoundToInt, ToFloat, TruncToInt

from ...base.patch import patched

# the dims of each input, by its name, whose sizes are symbols
FreeDims = Mapping[str, Collection[int]]
Shape = tuple[int, ...]
NUMBERS = torch.SymInt | torch.SymFloat | torch.SymBool
END = 2**63 - 1  # the end of a slice that goes to the end of its dim
TENSORS_OF_SLICES = {torch.ops.aten.slice.Tensor: 1, torch.ops.aten.slice_scatter.default: 2}
# PyTorch's files, and those of what it computes with symbols by
WITHIN = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (torch, sympy))
ROUNDED = CeilToInt, FloorToInt, RoundToInt, TruncToInt
ASSERTION = torch.ops.aten._assert_scalar.default


class NotSymbolic(Exception):
    """A call that is not exported with symbols: something in it is exact for its own sizes alone."""


@contextmanager
def symbols_as_numbers(limit_s: float) -> Iterator[None]:
    """A context in which the model's code takes symbols for the numbers that they stand for: they are
    instances of ``int``, and their text is that of the number, which thereby is the only one that fits. After
    ``limit_s`` the next use of a symbol raises NotSymbolic: some expressions keep sympy busy for minutes."""
    end_s = time.monotonic() + limit_s
    with ExitStack() as patches:
        for symbol, number in ((torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool)):
            patches.enter_context(patched(symbol, "__getattribute__", _attributes_of(number, end_s)))
            patches.enter_context(patched(symbol, "__repr__", _text_of(number, symbol.__repr__)))
        yield


def _attributes_of(kind: type, end_s: float) -> Callable[[Any, str], Any]:
    """A ``__getattribute__`` of symbols that are of this ``kind`` for the model's code."""

    def attribute(self: Any, name: str) -> Any:
        if name == "__class__" and not _asked_by_torch():  # isinstance() asks for it
            return kind
        if time.monotonic() > end_s:
            raise NotSymbolic
        return object.__getattribute__(self, name)

    return attribute


def _text_of(kind: type, shown: Callable[[Any], str]) -> Callable[[Any], str]:
    """A ``__repr__`` of symbols that are of this ``kind`` for the model's code."""

    def text(self: Any) -> str:
        return shown(self) if _asked_by_torch() else repr(kind(self))

    return text


def _asked_by_torch() -> bool:
    """Whether the code that called a function of this file is PyTorch's."""
    return sys._getframe(2).f_code.co_filename.startswith(WITHIN)


def free_dims(shapes: Sequence[Mapping[str, Shape]]) -> dict[str, set[int]]:
    """The dims whose sizes differ between several ``shapes``, by input; without those that have none."""
    return {
        name: dims
        for name, shape in shapes[0].items()
        if (dims := {dim for other in shapes for dim, n in enumerate(shape) if other[name][dim] != n})
    }


def dynamic_shapes(names: Iterable[str], free: FreeDims) -> Any:
    """The argument of ``torch.export.export`` that makes symbols of free dims; None for no free dims."""
    return (tuple({dim: Dim.AUTO for dim in free.get(name, ())} for name in names),) if free else None


def is_symbol(size: Any) -> bool:
    """Whether a size is computed from sizes of inputs, and from no tensor's values."""
    return isinstance(size, torch.SymInt) and not free_unbacked_symbols(size)


def has_symbols(program: ExportedProgram) -> bool:
    """Whether sizes of a program's inputs are symbols."""
    values = [node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")]
    return any(isinstance(size, torch.SymInt) for x in values if isinstance(x, Tensor) for size in x.shape)


def put_numbers_in_place(program: ExportedProgram) -> None:
    """Removes the nodes that compute numbers, in place: the operators that read them get the symbols."""
    for node in list(program.graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, NUMBERS):
            continue
        in_place = partial(_instead, node, value)
        for user in list(node.users):
            user.args = fx.map_arg(user.args, in_place)
            user.kwargs = fx.map_arg(user.kwargs, in_place)
        program.graph.erase_node(node)


def _instead(node: fx.Node, value: Any, argument: fx.Node) -> Any:
    return value if argument is node else argument


def written_out(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an operator as export writes them without symbols: slices with a start and an end."""
    before = TENSORS_OF_SLICES.get(target)
    if before is None:
        return args
    usual: tuple[Any, ...] = 0, None, None
    dim, start, end, *step = args[before:] + usual[len(args) - before :]
    return *args[:before], dim, start or 0, END if end is None else end, *step


@dataclass(frozen=True)
class Conditions:
    """The conditions under which a program with symbols is right. ``inputs`` are the shapes of its inputs by
    name, ``relations`` what must hold, ``ranges`` the smallest and the largest value of each symbol."""

    inputs: Mapping[str, tuple[Any, ...]]
    relations: tuple[Any, ...]
    ranges: Mapping[sympy.Symbol, Any]

    @classmethod
    def of(cls, program: ExportedProgram, names: Sequence[str]) -> Conditions:
        """The conditions of a program whose inputs have these names. Raises NotSymbolic for a program with
        numbers that depend on values, or with fractions whose last digits might be others: sympy makes
        ``n * 0.3`` of ``n * 0.1 * 3``."""
        placeholders = program.graph.find_nodes(op="placeholder")
        users = dict(zip(program.graph_signature.user_inputs, names))
        inputs = {users[n.name]: tuple(n.meta["val"].shape) for n in placeholders if n.name in users}
        mode = detect_fake_mode([n.meta.get("val") for n in placeholders])
        shapes = None if mode is None else mode.shape_env
        if shapes is None or any(shapes.deferred_runtime_asserts.values()):
            raise NotSymbolic
        relations = [guard.expr for guard in shapes.guards] + _asserted(program.graph)
        if any(map(has_fractions, relations)):
            raise NotSymbolic
        _check_numbers(program.graph)
        return cls(
            {name: tuple(_expression(size, shapes) for size in shape) for name, shape in inputs.items()},
            tuple(shapes.replace(relation) for relation in relations),
            {symbol: r for symbol, r in shapes.var_to_range.items() if symbol not in shapes.replacements},
        )

    def sizes(self, shapes: Mapping[str, Shape | None]) -> Sizes | None:
        """The numbers for the symbols, with inputs of these ``shapes``; None if the program is not theirs."""
        if shapes.keys() != self.inputs.keys():
            return None
        pairs: list[tuple[Any, int]] = []
        for name, expected in self.inputs.items():
            shape = shapes[name]
            if shape is None or len(shape) != len(expected):
                return None
            pairs += zip(expected, shape)
        number_of = {size: sympy.Integer(n) for size, n in pairs if isinstance(size, sympy.Symbol)}
        sizes = Sizes(number_of)
        fits = all(sizes.value(size) == n for size, n in pairs)
        in_range = all(s in number_of and number_of[s] in r for s, r in self.ranges.items())
        return sizes if fits and in_range and all(map(sizes.holds, self.relations)) else None


class Sizes:
    """Gives the numbers of sizes that are symbols, or computed from symbols."""

    def __init__(self, number_of: Mapping[Any, sympy.Integer]) -> None:
        self._number_of = number_of
        self._known: dict[Any, Any] = {}

    def value(self, expression: Any) -> Any:
        if expression not in self._known:
            self._known[expression] = sympy.sympify(expression).xreplace(self._number_of)
        return self._known[expression]

    def holds(self, relation: Any) -> bool:
        return self.value(relation) == sympy.true

    def __call__(self, size: Any) -> Any:
        """A symbol as its number; anything else as it is. Raises NotSymbolic for one without a number."""
        if isinstance(size, torch.SymInt):
            number = self.value(size.node.expr)
            if not number.is_Integer:
                raise NotSymbolic
            return int(number)
        if isinstance(size, torch.SymFloat):
            return self._quotient(size.node.expr)
        if isinstance(size, torch.SymBool):
            return self.holds(size.node.expr)
        return size

    def _quotient(self, expression: Any) -> float:
        """The number of ``float(n)`` or ``n / m``, by Python's own division."""
        numbers = [self.value(part) for part in expression.args]
        if not all(number.is_Integer for number in numbers):
            raise NotSymbolic
        above, *below = map(int, numbers)
        return above / below[0] if below else float(above)


def _expression(size: Any, shapes: ShapeEnv) -> Any:
    return shapes.replace(size.node.expr) if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _asserted(graph: fx.Graph) -> list[Any]:
    """The relations that assertions of the program state."""
    stated = [node.args[0] for node in graph.find_nodes(op="call_function", target=ASSERTION)]
    return [x.node.expr for x in stated if isinstance(x, torch.SymBool)]


def _check_numbers(graph: fx.Graph) -> None:
    for node in graph.nodes:
        for value in pytree.tree_leaves((node.args, node.kwargs, node.meta.get("val"))):
            sizes = value.shape if isinstance(value, Tensor) else (value,)
            if not all(map(_is_exact, sizes)):
                raise NotSymbolic


def _is_exact(size: Any) -> bool:
    if not isinstance(size, torch.SymInt | torch.SymFloat):
        return True
    expression = size.node.expr
    if isinstance(size, torch.SymInt):
        return is_symbol(size) and not has_fractions(expression)
    is_quotient = isinstance(expression, ToFloat | IntTrueDiv) and not free_unbacked_symbols(size)
    return is_quotient and not any(map(has_fractions, expression.args))


def has_fractions(expression: Any) -> bool:
    """Whether a number or a relation is computed from fractions, other than a quotient of two whole numbers
    that is rounded at once."""
    if isinstance(expression, ROUNDED) and isinstance(expression.args[0], IntTrueDiv):
        return any(map(has_fractions, expression.args[0].args))
    is_whole = not isinstance(expression, sympy.Expr) or expression.is_integer or expression.is_Rational
    is_sum = isinstance(expression, sympy.Add | sympy.Mul | sympy.Pow)
    is_fraction = isinstance(expression, sympy.Float) or not (is_whole or is_sum)
    return is_fraction or any(map(has_fractions, expression.args))
