"""Rows that a mask selects, ``x[mask]``, during an export: their number is data.

All rows stay, with the mask. What is computed of each row by itself is computed of all, and what sums over
the rows leaves out those that the mask does not select, and counts the others. So all shapes are known, and
rows need no others. A row that is not selected holds a number at which the usual functions and their
gradients are finite, in place of its own. A function that is not known here gets the selected rows
themselves, and the program is refused if their number is needed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _python_dispatch as dispatch
from torch.utils import _pytree as pytree

from ...errors import TraceError
from .fx_nodes import packet_of, slot_of
from .known_masks import numbers_selected
from .schema import is_by_element
from .written import written_by

KNOWN: dict[str, Callable] = {}  # the computation of a function of selected rows, by the name of the function


def known(*names: str) -> Callable[[Callable], Callable]:
    """Notes a function ``(func, *arguments)`` that computes the functions of these names."""

    def note(run: Callable) -> Callable:
        KNOWN.update(dict.fromkeys(names, run))
        return run

    return note


class Unknown(Exception):
    """A function that needs the selected rows themselves."""


class Selected(Tensor):
    """The rows ``values[mask]``: ``values`` has the dims of the mask, in place of the one of the rows, and
    then those of a row. Operators in place write to ``values``, which views of the rows share. ``source`` is
    what the mask has selected from, if nothing was computed of it. Numbers of the rows themselves, as
    ``nonzero`` gives them, are those along the dim ``counts`` of the mask.

    A tensor for all who ask, with no memory of its own."""

    values: Tensor  # type: ignore[assignment]
    source: Tensor | None
    counts: int | None
    _mask: Tensor
    _mask_version: int
    _source_version: int

    @staticmethod
    def __new__(
        cls, values: Tensor, mask: Tensor, source: Tensor | None = None, counts: int | None = None
    ) -> Selected:
        with dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            rows = Tensor._make_subclass(cls, torch.empty((), device="meta"))
        rows.values, rows.source, rows.counts = values, source, counts
        rows._mask, rows._mask_version = mask, mask._version
        rows._source_version = 0 if source is None else source._version
        return rows

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @property
    def mask(self) -> Tensor:
        """The mask. Raises TraceError if it has been changed since it selected the rows."""
        if self._mask._version != self._mask_version:
            raise TraceError(
                "a mask is changed in place after it has selected rows, which cannot be traced",
                expected="masks that keep their values",
                got="rows x[mask], and then an operator in place of mask, such as mask &= other",
                hint="mask = mask & other, or mask = mask.clone() before the change",
            )
        return self._mask

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})

    def __iter__(self) -> Iterator[Tensor]:
        """The numbers that a mask of one dim selects, as ``for expert in hit.nonzero()``: each of its entries
        is asked."""
        if self.counts != 0 or self.mask.ndim != 1 or self.values.numel() != len(self.mask):
            yield from self.rows()
            return
        for number in range(len(self.mask)):
            if self.mask[number]:
                yield torch.tensor(number).reshape(self.row_shape)

    def rows(self) -> Tensor:
        """The selected rows themselves, whose number is not known unless the mask follows from shapes."""
        is_source = self.is_fresh and self.source._version == self._source_version  # type: ignore[union-attr]
        numbers = numbers_selected(self.mask) or [self.mask]
        return torch.ops.aten.index.Tensor(self.source if is_source else self.values, numbers)

    @property
    def is_fresh(self) -> bool:
        """Whether nothing has been computed of the rows, so that those not selected hold the usual number."""
        return self.source is not None and self.values._version == 0

    def of(self, values: Tensor) -> Selected:
        """Other values of the same rows."""
        return Selected(values, self.mask)

    def seen_as(self, values: Tensor) -> Selected:
        """A view of the same rows."""
        counts = self.counts if values.numel() == self.values.numel() else None
        return Selected(values, self.mask, counts=counts)

    @property
    def row_shape(self) -> torch.Size:
        return self.values.shape[self.mask.ndim :]

    @property
    def row_ndim(self) -> int:
        return self.values.ndim - self.mask.ndim

    def filled(self, value: Any) -> Tensor:
        """The values, with another in the rows that are not selected."""
        return torch.where(wide(self.mask, self.values), self.values, value)

    def places(self) -> Tensor:
        """The values as indices, with 0 in the rows that are not selected."""
        return self.values if self.is_fresh else self.filled(0)

    def count(self) -> Tensor:
        """The number of rows."""
        return self.mask.sum()

    def divisor(self) -> Tensor:
        """The number of rows, for a mean. Within a branch on whether there are any it is one at least, where
        a pass that computes the branch in any case must not divide by zero."""
        return self.count().clamp(min=1) if is_counted(self.mask) else self.count()

    def place(self, dim: int, more: int = 0) -> int:
        """The dim of ``values`` that is the dim ``dim`` of the rows, where these have ``more`` dims. Raises
        Unknown for the dim along which the rows are."""
        ndim = 1 + self.row_ndim + more
        dim = dim + ndim if dim < 0 else dim
        if not 0 < dim < ndim:
            raise Unknown
        return dim - 1 + self.mask.ndim


def shape_of(x: Selected) -> tuple:
    """The shape of the rows, the first of which is a tensor."""
    return (x.count(), *x.row_shape)


OF_ALL_ROWS = """dtype device requires_grad is_cuda is_cpu is_mps is_xpu is_meta is_sparse is_quantized
is_nested layout itemsize""".split()


def _attribute(x: Selected, name: str) -> Any:
    match name:
        case "shape":
            return shape_of(x)
        case "ndim":
            return 1 + x.row_ndim
        case "data":
            return x.detach()
    return getattr(x.values if name in OF_ALL_ROWS else x.rows(), name)


def computed(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Computes a function of PyTorch one of whose arguments is selected rows."""
    name = func.__name__
    if name == "__get__":
        return _attribute(args[0], func.__self__.__name__)  # type: ignore[attr-defined]
    name = name.strip("_") if name.startswith("__") else name
    if kwargs.get("out") is not None:
        _refuse(name)
    if args and is_selected(args[0]) and (name.endswith("_") or name in IN_PLACE):
        return _changed(name, args, kwargs)
    kwargs = {key: value for key, value in kwargs.items() if key not in ("out", "_stacklevel")}
    run = KNOWN.get(name) or (by_element if _is_by_element(name) else None)
    try:
        if run is None:
            raise Unknown
        return run(func, *args, **kwargs)
    except (Unknown, TypeError):
        args, kwargs = pytree.tree_map_only(Selected, Selected.rows, (args, kwargs))
        return func(*args, **kwargs)


IN_PLACE = {f"i{name}": name for name in "add sub mul truediv floordiv mod pow and or xor".split()}
IN_PLACE["setitem"] = "setitem"


def _changed(name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Writes to rows in place. Raises TraceError where the operator is not computed by element."""
    x, base = args[0], IN_PLACE.get(name) or name.rstrip("_")
    method = getattr(Tensor, f"__{base}__" if name in IN_PLACE else base, None)
    try:
        if not x.values.is_contiguous():  # a view of the rows might not be a view of the values
            raise Unknown
        if base in ("zero", "fill"):
            x.values.fill_(*(args[1:] or (0,)))
        elif base == "setitem":
            KNOWN["setitem"](method, *args)
        elif method is not None and _is_by_element(base):
            x.values.copy_(by_element(method, *args, **kwargs).values.to(x.dtype))
        else:
            raise Unknown
    except (Unknown, TypeError):
        _refuse(name)
    return None if base == "setitem" else x


def is_selected(x: Any) -> bool:
    """Whether it is selected rows, which pass for a tensor."""
    return type(x) is Selected


def as_tensors(output: Any) -> Any:
    """The output of a model, with the selected rows themselves."""
    if not any(map(is_selected, pytree.tree_leaves(output))):
        return output
    return pytree.tree_map_only(Selected, Selected.rows, output)


def _refuse(name: str) -> NoReturn:
    raise TraceError(
        "rows that a mask selects are changed in place, which cannot be traced",
        expected="operators in place of each element of x[mask], by numbers or by rows of that mask",
        got=f"a tensor x[mask], and {name} of it",
        hint=("y = x[mask] + 1 in place of y = x[mask]; y += 1", "or torch.where(mask, a, b) of all rows"),
    )


def wide(mask: Tensor, values: Tensor) -> Tensor:
    """A mask with a dim of one for each of a row."""
    return mask.reshape(*mask.shape, *[1] * (values.ndim - mask.ndim))


def node_of(x: Tensor) -> fx.Node | None:
    """The node of a tensor whose values are known only at run time; None for any other one."""
    slot = slot_of(x)
    return None if slot is None or slot.constant is not None else slot.proxy.node


def is_same(mask: Tensor, other: Tensor) -> bool:
    """Whether two masks are one tensor, or the same operators computed both of the same tensors."""
    node, other_node = node_of(mask), node_of(other)
    if mask is other:
        return True
    if node is None or other_node is None or mask.shape != other.shape:
        return False
    compared: set[fx.Node] = set()
    if not _is_same_node(node, other_node, compared):
        return False
    if not compared:
        return True
    between, last = min(compared), max(compared)
    while between is not last:  # a write to what one of them was computed of
        if between.op == "call_function" and any(written_by(between)):
            return False
        between = between.next
    return True


def _is_same_node(node: Any, other: Any, compared: set[fx.Node]) -> bool:
    """Whether two values are the same node, or computed alike by nodes that are added to ``compared``."""
    if not isinstance(node, fx.Node) or not isinstance(other, fx.Node):
        return type(node) is type(other) and bool(node == other)
    if node is other:
        return True
    target = node.target
    if node.op != "call_function" or other.op != "call_function" or target is not other.target:
        return False
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    mine, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
    others, other_spec = pytree.tree_flatten((other.args, dict(other.kwargs)))
    compared.update((node, other))
    return spec == other_spec and all(_is_same_node(a, b, compared) for a, b in zip(mine, others))


# an entry of a node's ``meta``: True for a number, of elements that a mask selects, and False for a mask
COUNTED = "mask or count that a branch has found to be no zeros"


def is_counted(mask: Tensor) -> bool:
    """Whether a branch that this path has taken asked whether the mask, or one computed alike, selects
    anything."""
    node = _unviewed(node_of(mask))
    if node is None:
        return False
    counted = [n for n in node.graph.nodes if COUNTED in n.meta]
    return any(n is node or _is_same_node(n, node, set()) for n in counted)


VIEWS = [getattr(torch.ops.aten, name) for name in "view reshape flatten unsqueeze squeeze unflatten".split()]


def _is_in_one_order(mask: Tensor, other: Tensor) -> bool:
    """Whether two masks are views of one, perhaps of different shapes, which keep the order of elements."""
    node, other_node = _unviewed(node_of(mask)), _unviewed(node_of(other))
    return mask.numel() == other.numel() and node is not None and node is other_node


# operators that keep the order of numbers, and so which of them are different
KEEP_ORDER = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.to.dtype)


def has_one_choice(mask: Tensor) -> bool:
    """Whether a mask selects at most one of each row of its last dim: it says which of the choices of a
    token, all different as ``topk`` gives them, are one of the numbers."""
    node = node_of(mask)
    if node is None or node.target is not torch.ops.aten.eq.Scalar:
        return False
    choices: Any = node.args[0]
    while choices.target in KEEP_ORDER and choices.meta["val"].dtype is not torch.bool:
        choices = choices.args[0]
    if (
        choices.target is not operator.getitem
        or choices.args[1] != 1
        or choices.meta["val"].shape != mask.shape
    ):
        return False
    if _is_written(choices, node):
        return False
    source: Any = choices.args[0]
    dim = source.args[2] if len(source.args) > 2 else -1
    return source.target is torch.ops.aten.topk.default and dim % mask.ndim == mask.ndim - 1


def _is_part(node: fx.Node) -> bool:
    """Whether a value may share the memory of the first argument."""
    if node.target is operator.getitem:
        return True
    arguments: Any = node.target._schema.arguments if isinstance(node.target, OpOverload) else ()
    return bool(arguments) and arguments[0].alias_info is not None


def _is_written(x: fx.Node, until: fx.Node) -> bool:
    """Whether an operator before another one writes to a part of a value."""
    node = x
    while node is not until:
        node = node.next
        for written in written_by(node) if node.op == "call_function" else ():
            part: Any = written
            while isinstance(part, fx.Node) and part is not x:
                part = part.args[0] if _is_part(part) else None
            if part is x:
                return True
    return False


def is_any_of(mask: Tensor, choices: Tensor) -> bool:
    """Whether a mask selects the rows in which another, ``choices``, selects the one of their last dim."""
    node, other = node_of(mask), node_of(choices)
    if node is None or node.target is not torch.ops.aten.any.dim or node.args[0] is not other:
        return False
    dim: Any = node.args[1]
    keeps_dim = len(node.args) > 2 and node.args[2]
    return not keeps_dim and dim % choices.ndim == choices.ndim - 1 and has_one_choice(choices)


def _unviewed(node: Any) -> fx.Node | None:
    while isinstance(node, fx.Node) and packet_of(node.target) in VIEWS:
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def aligned(*tensors: Any) -> tuple[Selected, list[Any]]:
    """The first selected rows among values, and all values as tensors that are computed by element with
    theirs. Raises Unknown."""
    first: Selected = next(t for t in tensors if is_selected(t))
    return first, [_aligned(t, first) for t in tensors]


def _aligned(x: Any, first: Selected) -> Any:
    if is_selected(x):
        if x.row_ndim != first.row_ndim:
            raise Unknown
        if is_same(x.mask, first.mask):
            return x.values
        if _is_in_one_order(x.mask, first.mask):
            return x.values.reshape(*first.mask.shape, *x.row_shape)
        if is_any_of(first.mask, x.mask):  # each row has one choice
            return x.filled(0).sum(first.mask.ndim)
        if is_any_of(x.mask, first.mask):
            return x.values.unsqueeze(x.mask.ndim).expand(*first.mask.shape, *x.row_shape)
        raise Unknown
    if isinstance(x, Tensor) and x.ndim > first.row_ndim:
        if x.ndim > first.row_ndim + 1 or x.shape[0] != 1:
            raise Unknown
        return x.squeeze(0)
    return x


def by_element(func: Callable, *args: Any, **kwargs: Any) -> Selected:
    """Computes a function of each element."""
    leaves, spec = pytree.tree_flatten((_within_domain(func.__name__.strip("_"), args), kwargs))
    first, plain = aligned(*leaves)
    args, kwargs = pytree.tree_unflatten(plain, spec)
    result = func(*args, **kwargs)
    if not isinstance(result, Tensor):
        raise Unknown
    return first.of(result)


# functions that are infinite, undefined or an error somewhere, or whose gradient is
DIVISIONS = "truediv div divide true_divide floordiv floor_divide mod fmod remainder".split()
DIVISIONS_OF_OTHERS = "rtruediv rdiv rfloordiv rmod".split()
WITH_DOMAIN = """sqrt rsqrt log log2 log10 log1p pow rpow float_power reciprocal acos arccos asin arcsin atanh
arctanh logit erfinv xlogy atan2 arctan2 hypot digamma lgamma tan binary_cross_entropy kl_div""".split()


def _within_domain(name: str, args: tuple) -> tuple:
    """The arguments of a function, with a number at which it and its gradient are finite in the rows that are
    not selected: what is computed of the usual number may be anything, and a gradient of zero times an
    infinite one would be NaN."""
    if name in ("acosh", "arccosh"):
        return tuple(_instead(x, 2) for x in args)
    if name in DIVISIONS:
        return (args[0], *(_instead(x, 1) for x in args[1:]))
    is_power = name == "pow" and type(args[-1]) is int and args[-1] >= 1
    if name in DIVISIONS_OF_OTHERS or name in WITH_DOMAIN and not is_power:
        return tuple(_instead(x, 0.5) for x in args)
    return args


def _instead(x: Any, value: float) -> Any:
    if not is_selected(x) or x.dtype is torch.bool or (x.is_fresh and x.values.is_floating_point()):
        return x
    return x.of(x.filled(value if x.values.is_floating_point() else 1))


# that PyTorch has under another name, or without a tag
ALSO_BY_ELEMENT = """radd rsub rmul truediv rtruediv div rdiv floordiv rfloordiv mod rmod rpow invert and rand
or ror xor rxor to float double half bfloat16 long int short bool type type_as detach clone contiguous gelu
cpu cuda silu relu6 softplus logsigmoid hardswish hardsigmoid mish selu celu elu leaky_relu hardtanh softsign
tanhshrink softshrink hardshrink threshold nan_to_num""".split()


@cache
def _is_by_element(name: str) -> bool:
    if name in ALSO_BY_ELEMENT:
        return True
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(is_by_element(getattr(packet, name)) for name in packet.overloads())
