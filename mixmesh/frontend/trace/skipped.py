"""Branches that skip rows that a mask selects where it selects none: ``if mask.any(): h[mask] = f(h[mask])``.

A graph holds one path. The rows stay where they are (``selected``), so the path that computes them is the
right one for every mask, if it changes nothing where the mask selects no row. That is proved, not assumed:
the call is exported again with every second of these branches skipped, with all of them, and others. The
program with all of them taken must become each of these if the masks of the skipped ones are zeros. A value
that is zero makes others zero, and a choice by zeros is the other value.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from .fx_nodes import packet_of
from .row_indices import FILLS

aten = torch.ops.aten


@dataclass(frozen=True)
class Emptiness:
    """A condition that says whether a mask selects anything: the node of the mask, the condition's value if
    it does, and the number that the condition compares, if any."""

    mask: fx.Node
    if_any: bool
    count: fx.Node | None = None

    @property
    def counted(self) -> Iterator[fx.Node]:
        """The mask, what it was made of, and its count: all are no zeros if it selects anything."""
        yield from (each for each in _also_zero(self.mask) if isinstance(each, fx.Node))
        if self.count is not None:
            yield self.count


ANY = {(operator.gt, 0), (operator.ge, 1), (operator.ne, 0)}
NONE = {(operator.eq, 0), (operator.lt, 1), (operator.le, 0)}
ALIASES = {"greater": "gt", "greater_equal": "ge", "not_equal": "ne", "less": "lt", "less_equal": "le"}
COMPARISONS = {
    getattr(aten, name).Scalar: getattr(operator, ALIASES.get(name, name))
    for name in ("gt", "ge", "ne", "eq", "lt", "le", *ALIASES)
}
NEGATIONS = (aten.logical_not.default, aten.bitwise_not.default)
SUMS = (aten.sum.default, aten.sum.dim_IntList)


def emptiness(node: Any) -> Emptiness | None:
    """Reads a condition; None for another one."""
    if not isinstance(node, fx.Node) or not node.args:
        return None
    target: Any = node.target
    source: Any = node.args[0]
    if target in NEGATIONS:
        inner = emptiness(source)
        return None if inner is None else replace(inner, if_any=not inner.if_any)
    if target is aten.any.default and isinstance(source, fx.Node):
        return Emptiness(source, True)
    if target is aten.select.int and _counted(source) is not None:
        return Emptiness(node, True)  # one entry of a mask
    counted = _summed(node)
    if counted is not None:  # `if rows.numel():`
        return Emptiness(counted, True, node)
    comparison = COMPARISONS.get(target), node.args[-1]
    mask = _summed(source)
    if mask is None or not {comparison} & (ANY | NONE):
        return None
    return Emptiness(mask, comparison in ANY, source)


def _summed(node: Any) -> fx.Node | None:
    """The mask whose selected elements a node counts, at least once each: a sum of what is never negative."""
    while isinstance(node, fx.Node) and node.target is aten.mul.Tensor and _is_positive(node.args[1]):
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target not in SUMS:
        return None
    source: Any = node.args[0]
    return source if _is_never_negative(source) else None


def is_count(node: Any) -> bool:
    """Whether a node is the number of elements that a mask selects, or a multiple of it."""
    return _summed(node) is not None and node.meta["val"].dtype is torch.long


def _is_positive(number: Any) -> bool:
    return type(number) is int and number > 0


def _counted(node: Any) -> tuple[fx.Node, Sequence[int]] | None:
    """The mask and the dims along which each entry of another mask, ``node``, says whether it selects any."""
    if not isinstance(node, fx.Node) or len(node.args) < 2:
        return None
    source: Any = node.args[0]
    along: Any = node.args[1]
    if node.target in (aten.any.dims, aten.any.dim):
        return source, along if isinstance(along, list | tuple) else [along]
    target: Any = node.target
    mask = _summed(source)
    if mask is None or (COMPARISONS.get(target), along) not in ANY or source.target is not SUMS[1]:
        return None
    return mask, source.args[1]


def _is_never_negative(node: Any) -> bool:
    while isinstance(node, fx.Node):
        if node.meta["val"].dtype in (torch.bool, torch.uint8) or node.target is aten.one_hot.default:
            return True
        if packet_of(node.target) not in (*SAME_ELEMENTS, aten.select, aten.slice):
            return False
        node = node.args[0]
    return False


# --- the proof -----------------------------------------------------------------------------------------

# the first argument's elements, in another shape or dtype
SAME_ELEMENTS = [
    getattr(aten, name) for name in """view reshape flatten unflatten unsqueeze squeeze permute transpose t
    detach alias clone contiguous _to_copy to _unsafe_view""".split()
]  # fmt: skip
# zeros of zeros
KEEPS_ZEROS = [
    *SAME_ELEMENTS,
    *(getattr(aten, name) for name in """expand select slice sum any amax max cumsum split chunk unbind
    abs neg relu gelu silu elu leaky_relu tanh sin tan erf expm1 log1p square""".split()),
]  # fmt: skip
CHOICES = (aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
PRODUCTS = (aten.mul, aten.bitwise_and, aten.logical_and)
# the argument that is zeros, and the one that an operator then returns
UNCHANGED = {
    aten.where: (0, 2), aten.masked_fill: (1, 0), aten.add: (1, 0), aten.sub: (1, 0), aten.index_add: (3, 0),
}  # fmt: skip
# infinite at zero, or their gradient is
SINGULAR = [getattr(aten, name) for name in "reciprocal log log2 log10 sqrt rsqrt pow".split()]
CLASSES = (aten.cross_entropy_loss, aten.nll_loss, aten.nll_loss_nd)
# the place of the number that a factory fills a tensor with; None for zeros
FACTORIES = {
    aten.zeros: None, aten.zeros_like: None, aten.new_zeros: None, aten.full: 1, aten.full_like: 1,
    aten.new_full: 2,
}  # fmt: skip
ZERO = "zeros"
Zeros = fx.Node | tuple[fx.Node, int, int]  # a value, or an entry of one: its dim and index


Skips = Callable[[int], bool]  # whether the branch that comes in this turn is skipped


def proves_skips(program: ExportedProgram, other: ExportedProgram, count: int, skips: Skips) -> bool:
    """Whether ``program`` computes what ``other`` does if the masks of the skipped branches are zeros. Their
    last ``count`` outputs are the conditions of branches: all were taken, but in ``other`` some were
    skipped."""
    conditions, others = _conditions(program, count), _conditions(other, count)
    if len(conditions) != count or len(others) != count:
        return False
    numbers: dict[Any, int] = {}
    return _outputs(program, conditions, numbers, skips) == _outputs(other, others, numbers, skips)


def none_skipped(turn: int) -> bool:
    return False


FEW = 4  # branches, such as those of terms of a loss, of which each is skipped alone


def parts(sites: Sequence[Any]) -> Iterator[Skips]:
    """Parts of the branches at these lines: every second one, and the others. If they are few, each alone;
    else those at one line without those at another, for any two."""
    turns, lines = range(len(sites)), list(dict.fromkeys(sites))
    groups = [{turn for turn in turns if turn % 2 == side} for side in (0, 1)]
    if len(sites) <= FEW:
        groups += [{turn} for turn in turns]
    else:
        for bit in range((len(lines) - 1).bit_length()):
            of_side = [lines.index(site) >> bit & 1 for site in sites]
            groups += [{turn for turn in turns if of_side[turn] == side} for side in (0, 1)]
    yield from (skipped.__contains__ for skipped in dict.fromkeys(map(frozenset, groups)) if skipped)


def all_skipped(turn: int) -> bool:
    return True


def _conditions(program: ExportedProgram, count: int) -> list[fx.Node]:
    results: Any = program.graph.output_node().args[0]
    return [node for node in results[len(results) - count :] if isinstance(node, fx.Node)]


def _outputs(
    program: ExportedProgram, conditions: Sequence[fx.Node], numbers: dict[Any, int], skips: Skips
) -> Any:
    """The outputs but for the conditions, and the buffers that are written, each as the number of its
    computation."""
    empty = [e.mask for turn, node in enumerate(conditions) if skips(turn) and (e := emptiness(node))]
    zeros = {each for mask in empty for each in _also_zero(mask)}
    computed = Computations(program, zeros, numbers)
    specs = program.graph_signature.output_specs
    results: Any = program.graph.output_node().args[0]
    last = len(results) - len(conditions)
    named = [(spec.kind, spec.target) if spec.kind is not OutputKind.USER_OUTPUT else "" for spec in specs]
    return [(name, computed.number(node)) for name, node in zip(named[:last], results[:last])]


def _also_zero(mask: fx.Node) -> Iterator[Zeros]:
    """The values that are zeros if ``mask`` is: itself, and what it was made of; an entry along a dim of
    another as that one, the dim and the index."""
    node: Any = mask
    source: Any
    dim: Any
    index: Any
    while isinstance(node, fx.Node):
        yield node
        if node.target is aten.select.int:
            source, dim, index = node.args[:3]
            yield source, dim, index
            counted = _counted(source)
            if counted is not None and all(d % counted[0].meta["val"].ndim > dim for d in counted[1]):
                yield counted[0], dim, index
            return
        counted = _counted(node)
        if counted is not None:
            node = counted[0]
        elif packet_of(node.target) in SAME_ELEMENTS and _shows_zeros(node):
            node = node.args[0]
        else:
            return


def _shows_zeros(node: fx.Node) -> bool:
    """Whether a node with another's elements, perhaps in another dtype, is zero only where that one is. A
    fraction as a whole number is zero too."""
    source: Any = node.args[0]
    old, new = source.meta["val"].dtype, node.meta["val"].dtype
    return bool(old is new or torch.bool in (old, new) or (not old.is_floating_point and new is torch.long))


class Computations:
    """The computations of a program, each with a number: that of the same operator with the same arguments.
    ``zeros`` are values that are known to be zeros, and entries of values along a dim; so is what is computed
    alike."""

    def __init__(self, program: ExportedProgram, zeros: set[Zeros], numbers: dict[Any, int]) -> None:
        self.program, self.numbers = program, numbers
        self.alike = Computations(program, set(), {}) if zeros else None
        self.zeros = {self._named(each) for each in zeros}
        self.draws: dict[Any, int] = {}  # how often a random computation has come
        self.keys: dict[fx.Node, Any] = {}
        self.learned: set[fx.Node] = set()  # with a gradient
        self.changed: set[fx.Node] = set()  # no zeros, but computed of them
        self.infinite: set[fx.Node] = set()  # perhaps, they or their gradient, as they are computed of zeros
        inputs = program.graph.find_nodes(op="placeholder")
        self.spec_of = dict(zip(inputs, program.graph_signature.input_specs))
        for node in program.graph.nodes:
            if node.op != "output":
                self.keys[node] = self._key(node)

    def _named(self, value: Any) -> Any:
        """A value, or an entry of one, by the number of what is computed alike."""
        node, *place = value if isinstance(value, tuple) else (value,)
        return None if self.alike is None else (self.alike.number(node), *place)

    def number(self, node: Any) -> Any:
        """The number of a node's computation, for its shape and dtype if it is zeros; another argument as it
        is."""
        if not isinstance(node, fx.Node):
            return repr(node)
        key = self.keys[node]
        if key == ZERO:
            value = node.meta["val"]
            key = ZERO, tuple(value.shape), value.dtype
        return self.numbers.setdefault(key, len(self.numbers))

    def _is_zero(self, node: Any) -> bool:
        return isinstance(node, fx.Node) and self.keys.get(node) == ZERO

    def _key(self, node: fx.Node) -> Any:
        if self._is_learned(node):  # zeros, perhaps, that are about to become others
            self.learned.add(node)
        elif self._named(node) in self.zeros or self._is_entry(node):
            return ZERO
        if node.op == "placeholder":
            return self._leaf(node)
        packet = packet_of(node.target)
        if self._may_be_infinite(node, packet):  # for that, zero times it is not zero
            self.infinite.add(node)
        elif self._makes_zeros(node, packet):
            return ZERO
        elif (same := self._same_as(node, packet)) is not None:
            if same in self.changed:
                self.changed.add(node)
            return self.keys[same]
        if any(map(self._is_odd, node.all_input_nodes)) and not _is_kept_from_zero(node, packet):
            self.changed.add(node)
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        if node.target is aten.where.ScalarOther and node.args[2] in FILLS:
            leaves[2] = FILLS  # rows that the first mask selects may have had no gradient
        key = node.op, str(node.target), str(spec), tuple(map(self.number, leaves))
        if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            return key
        self.draws[key] = self.draws.get(key, 0) + 1
        return *key, self.draws[key]

    def _leaf(self, node: fx.Node) -> Any:
        spec = self.spec_of[node]
        value = self.program.constants.get(spec.target or "")
        if isinstance(value, Tensor) and spec.kind is InputKind.CONSTANT_TENSOR:  # numbered differently
            if not value.any():
                return ZERO
            return "constant", str(value.dtype), tuple(value.shape), repr(value.tolist())
        return "input", node.name

    def _is_learned(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and not value.is_floating_point() or node.target is aten.detach.default:
            return False
        if node.op == "placeholder":
            return self.spec_of[node].kind is InputKind.PARAMETER
        return any(each in self.learned for each in node.all_input_nodes)

    def _is_odd(self, node: Any) -> bool:
        """Whether it is another value than on one device, which does not compute it."""
        return self._is_zero(node) or (isinstance(node, fx.Node) and node in self.changed)

    def _may_be_infinite(self, node: fx.Node, packet: Any) -> bool:
        args: Any = node.args
        if any(each in self.infinite for each in node.all_input_nodes):
            return True
        if packet is aten.div:
            return self._may_be_zero(args[1], self._is_zero(args[0]))
        if packet in SINGULAR:
            return any(map(self._is_odd, args)) and not _is_plain_power(node)
        if packet is aten.where:
            others = args[2:] if self._is_zero(args[0]) else args
            return self._is_odd(args[0]) and any(map(self._is_endless, others))
        if packet is aten.masked_fill:
            return args[1] in self.changed and any(map(self._is_endless, args))
        if packet in CLASSES:  # a mean of no rows
            reduction = [*args[3:4], 1][0]
            return bool(reduction == 1) and (args[1] in self.changed or self._leaves_all_out(node))
        return False

    def _may_be_zero(self, divisor: Any, of_zero: bool) -> bool:
        """Whether a divisor is computed of zeros, or is another number of data that may be zero by zero."""
        if not isinstance(divisor, fx.Node) or self._is_one(divisor):
            return False
        is_number = divisor not in self.learned and not _is_kept_from_zero(divisor, packet_of(divisor.target))
        return self._is_odd(divisor) or (of_zero and is_number)

    def _is_endless(self, number: Any) -> bool:
        """Whether it is infinite, or a constant that is."""
        if isinstance(number, fx.Node) and number in self.spec_of:
            number = self.program.constants.get(self.spec_of[number].target or "")
            return isinstance(number, Tensor) and not bool(number.isfinite().all())
        if isinstance(number, fx.Node):
            return any(map(_is_infinite, number.args)) and packet_of(number.target) in FACTORIES
        return _is_infinite(number)

    def _is_entry(self, node: fx.Node) -> bool:
        return node.target is aten.select.int and self._named(node.args) in self.zeros

    def _makes_zeros(self, node: fx.Node, packet: Any) -> bool:
        if not node.args:
            return False
        if node.target in CHOICES and self._is_zero(node.args[0]):
            return self._is_nothing(node.args[2])
        if packet in PRODUCTS:  # other numbers are finite; one that is not is seen in the loss
            return any(map(self._is_nothing, node.args))
        if packet in FACTORIES:
            place = FACTORIES[packet]
            return place is None or bool(node.args[place] == 0)
        if packet is aten.div:
            return self._is_zero(node.args[0]) and (_is_finite(node.args[1]) or self._is_one(node.args[1]))
        if packet is aten.cross_entropy_loss:
            return self._sums_no_rows(node)
        is_kept = packet in KEEPS_ZEROS or node.target is operator.getitem or _says_if_zero(node)
        is_kept = is_kept or _is_plain_power(node)
        return is_kept and self._is_zero(node.args[0])

    def _sums_no_rows(self, node: fx.Node) -> bool:
        """Whether a cross entropy is the sum over no rows."""
        return node.args[3:4] == (2,) and self._leaves_all_out(node)

    def _leaves_all_out(self, node: fx.Node) -> bool:
        """Whether all targets of a cross entropy are the one that is left out."""
        args: Any = node.args
        target, _, _, left_out = [*args[1:], *(None, 1, -100)[len(args) - 2 :]][:4]
        if not isinstance(target, fx.Node):
            return False
        while packet_of(target.target) in SAME_ELEMENTS:
            target = target.args[0]
        is_choice = target.target is aten.where.ScalarOther and self._is_zero(target.args[0])
        return is_choice and target.args[2] == left_out

    def _same_as(self, node: fx.Node, packet: Any) -> fx.Node | None:
        """The argument that a node is equal to, for one because another one is zeros."""
        args: Any = node.args
        nothing, kept = UNCHANGED.get(packet, (0, 0))
        if nothing != kept and len(args) > max(nothing, kept) and self._is_nothing(args[nothing]):
            other = args[kept]
        elif packet is aten.copy:
            other = args[1]
        elif packet is aten.add and self._is_zero(args[0]) and not node.kwargs:
            other = args[1]
        elif node.target is aten.select_scatter.default and self._is_selected_from(args[1], args):
            other = args[0]
        else:
            return None
        if not isinstance(other, fx.Node):
            return None
        value, its = node.meta["val"], other.meta["val"]
        return other if value.shape == its.shape and value.dtype is its.dtype else None

    def _is_one(self, node: Any) -> bool:
        """Whether a number of rows is one at least, as something was done for none: ``count.clamp(min=1)``,
        or ``count + (count == 0)``, or a multiple of it."""
        while isinstance(node, fx.Node) and node.target is aten.mul.Tensor and _is_positive(node.args[1]):
            node = node.args[0]
        if not isinstance(node, fx.Node):
            return False
        if node.target is aten.clamp.default:
            return self._is_zero(node.args[0]) and node.args[1:] == (1,)
        is_none: Any = node.args[1] if node.target is aten.add.Tensor else None
        if not isinstance(is_none, fx.Node) or is_none.target is not aten.eq.Scalar or is_none.args[1] != 0:
            return False
        return self._is_zero(is_none.args[0]) and _summed(node.args[0]) is not None

    def _is_nothing(self, arg: Any) -> bool:
        return self._is_zero(arg) or _is_nought(arg)

    def _is_selected_from(self, part: Any, args: Any) -> bool:
        """Whether a part that is written to a tensor is the one that is there already."""
        while (
            self.keys.get(part) is not None
            and (same := self._same_as(part, packet_of(part.target))) is not None
        ):
            part = same
        source, _, *place = args
        if (
            not isinstance(part, fx.Node)
            or part.target is not aten.select.int
            or list(part.args[1:]) != place
        ):
            return False
        return self.number(part.args[0]) == self.number(source)


def _is_nought(number: Any) -> bool:
    return type(number) in (int, float) and number == 0


def _is_finite(number: Any) -> bool:
    return type(number) in (int, float) and number != 0 and math.isfinite(number)


def _is_infinite(number: Any) -> bool:
    return type(number) is float and not math.isfinite(number)


def _is_kept_from_zero(node: fx.Node, packet: Any) -> bool:
    """Whether a value computed of zeros is at least, or is, another number: ``x + eps``, ``x.clamp(min=1)``,
    and what fills rows that are not selected."""
    args: Any = node.args
    if node.target is aten.where.ScalarOther:
        return _is_finite(args[2])
    is_floored = packet in (aten.add, aten.clamp, aten.clamp_min) and len(args) > 1
    return is_floored and _is_finite(args[1]) and args[1] > 0


def _is_plain_power(node: fx.Node) -> bool:
    exponent: Any = node.args[-1] if node.args else None
    return packet_of(node.target) is aten.pow and type(exponent) is int and exponent > 0


def _says_if_zero(node: fx.Node) -> bool:
    target: Any = node.target
    return COMPARISONS.get(target) in (operator.gt, operator.ne) and bool(node.args[1] == 0)


def without_conditions(program: ExportedProgram, count: int) -> ExportedProgram:
    """A program without its last ``count`` outputs."""
    output = program.graph.output_node()
    results: Any = output.args[0]
    output.args = (tuple(results[: len(results) - count]),)
    del program.graph_signature.output_specs[len(results) - count :]
    if program.graph.eliminate_dead_code() or count:
        program.graph_module.recompile()
    return program
