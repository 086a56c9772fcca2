"""Rows that a mask selects, ``x[mask]``, during an export: their number is data.

All rows stay, with the mask. What is computed of each row by itself is computed of all, and what sums over
the rows leaves out those that the mask does not select, and counts the others. So all shapes are known, and
rows need no others. A row that is not selected holds a number at which the usual functions and their
gradients are finite, in place of its own. A function that is not known here gets the selected rows
themselves, and the program is refused if their number is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx.experimental import proxy_tensor
from torch.utils import _python_dispatch as dispatch
from torch.utils import _pytree as pytree

from ...errors import TraceError
from .written import written_by

KNOWN: dict[str, Callable] = {}  # what computes a function of selected rows, by its name


def known(*names: str) -> Callable[[Callable], Callable]:
    """Notes a function ``(func, *arguments)`` that computes the functions of these names."""

    def note(run: Callable) -> Callable:
        KNOWN.update(dict.fromkeys(names, run))
        return run

    return note


class Unknown(Exception):
    """What can only be computed of the selected rows themselves."""


class Selected:
    """The rows ``values[mask]``: ``values`` has the dims of the mask, in place of the one of the rows, and
    then those of a row. Numbers of the rows themselves, as ``nonzero`` gives them, are those along the dim
    ``counts`` of the mask."""

    def __init__(self, values: Tensor, mask: Tensor, counts: int | None = None) -> None:
        self.values, self._mask, self._version, self.counts = values, mask, mask._version, counts

    @property
    def mask(self) -> Tensor:
        """The mask that has selected the rows. Raises TraceError if others have been written into it."""
        if self._mask._version != self._version:
            _refuse("a mask that was written to after x[mask]", "give it a mask of its own: x[mask.clone()]")
        return self._mask

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance(x[mask], Tensor) holds
        return Tensor

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        method = getattr(Tensor, name)  # AttributeError, as of a tensor
        if callable(method):
            return lambda *args, **kwargs: computed(method, (self, *args), kwargs)
        return getattr(self.rows(), name)

    def rows(self) -> Tensor:
        """The selected rows themselves, whose number is not known."""
        return torch.ops.aten.index.Tensor(self.values, [self.mask])

    def of(self, values: Tensor) -> Selected:
        """Other values of the same rows."""
        return Selected(values, self.mask)

    def seen_as(self, values: Tensor) -> Selected:
        """A view of the same rows."""
        return Selected(values, self.mask, self.counts if values.numel() == self.values.numel() else None)

    @property
    def row_ndim(self) -> int:
        return self.values.ndim - self.mask.ndim

    def filled(self, value: Any) -> Tensor:
        """The values, with another in the rows that are not selected."""
        return torch.where(_wide(self.mask, self.values), self.values, value)

    def count(self) -> Tensor:
        """The number of rows."""
        return self.mask.sum()

    def place(self, dim: int, more: int = 0) -> int:
        """The dim of ``values`` that is the dim ``dim`` of the rows, where these have ``more`` dims. Raises
        Unknown for the dim along which the rows are."""
        ndim = 1 + self.row_ndim + more
        dim = dim + ndim if dim < 0 else dim
        if not 0 < dim < ndim:
            raise Unknown
        return dim - 1 + self.mask.ndim

    @property
    def ndim(self) -> int:
        return 1 + self.row_ndim

    def dim(self) -> int:
        return self.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def requires_grad(self) -> bool:
        return self.values.requires_grad

    @property
    def shape(self) -> tuple:
        return (self.count(), *self.values.shape[self.mask.ndim :])

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> Tensor:
        return self.count() * self.values.shape[self.mask.ndim :].numel()

    def __len__(self) -> int:
        return len(self.rows())

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.rows())

    def __bool__(self) -> bool:
        return bool(self.rows())

    def __hash__(self) -> int:
        return id(self)


def _operator(name: str) -> Callable:
    method = getattr(Tensor, name)
    return lambda self, *args: computed(method, (self, *args), {})


OPERATORS = """add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg abs invert
and rand or ror xor rxor eq ne lt le gt ge matmul rmatmul getitem setitem""".split()
for _name in OPERATORS:
    setattr(Selected, f"__{_name}__", _operator(f"__{_name}__"))


def computed(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Computes a function of PyTorch one of whose arguments is selected rows."""
    name = func.__name__
    name = name.strip("_") if name.startswith("__") else name
    is_changed = bool(args) and is_selected(args[0]) and (name.endswith("_") or name == "setitem")
    if is_changed or kwargs.get("out") is not None:
        _refuse(f"{name} of x[mask]", "y = x[mask] + 1 in place of y = x[mask]; y += 1")
    kwargs = {key: value for key, value in kwargs.items() if key not in ("out", "_stacklevel")}
    run = KNOWN.get(name) or (by_element if _is_by_element(name) else None)
    try:
        if run is None:
            raise Unknown
        return run(func, *args, **kwargs)
    except (Unknown, TypeError):
        args, kwargs = pytree.tree_map_only(Selected, Selected.rows, (args, kwargs))
        return func(*args, **kwargs)


def is_selected(x: Any) -> bool:
    """Whether it is selected rows, which pass for a tensor."""
    return type(x) is Selected


def as_tensors(output: Any) -> Any:
    """What a model returns, with the selected rows themselves."""
    if not any(map(is_selected, pytree.tree_leaves(output))):
        return output
    return pytree.tree_map_only(Selected, Selected.rows, output)


def _refuse(got: str, hint: str) -> NoReturn:
    raise TraceError(
        "rows that a mask selects, or their mask, are written to, which cannot be traced",
        expected="x[mask] in operators that give new tensors",
        got=got,
        hint=(hint, "or torch.where(mask, a, b) of all rows"),
    )


def _wide(mask: Tensor, values: Tensor) -> Tensor:
    """A mask with a dim of one for each of a row."""
    return mask.reshape(*mask.shape, *[1] * (values.ndim - mask.ndim))


def getitem(x: Tensor, index: Any) -> Any:
    """``x[index]``; selected rows if the index is a mask whose values are not known, or selected numbers."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(map(is_selected, parts)):
        return _by_selected(x, parts)
    if any(_known_mask(part) is not None for part in parts):
        return x[tuple(number for part in parts for number in _numbers(part))]
    if not _selects(x, parts):
        return x[index]
    selected = _selected(x, parts[0])
    return computed(Tensor.__getitem__, (selected, (slice(None), *parts[1:])), {}) if parts[1:] else selected


def _by_selected(x: Tensor, parts: tuple[Any, ...]) -> Any:
    """``x`` indexed by selected numbers: those of the rows themselves, other ones, or both."""
    mask = counted_by(x, parts)
    if mask is not None:
        return _selected(x, mask)
    first = parts[0]
    if len(parts) == 1 and first.dtype is not torch.bool and first.counts is None:
        return first.of(x[first.values])
    if len(parts) == 2 and all(map(is_selected, parts)) and parts[1].row_ndim == 0 and x.ndim == 2:
        mask = counted_by(x, parts[:1])  # a column of each row
        if mask is not None and is_same(mask, parts[1].mask):
            rows = _selected(x, mask)
            return rows.of(rows.values.gather(1, parts[1].values.unsqueeze(1)).squeeze(1))
    return x[tuple(part.rows() if is_selected(part) else part for part in parts)]


def counted_by(x: Tensor, parts: tuple[Any, ...]) -> Tensor | None:
    """The mask for which ``x[parts]`` are the rows ``x[mask]``, as ``parts`` are the numbers that it
    selects."""
    if not all(is_selected(part) and part.row_ndim == 0 and part.counts == n for n, part in enumerate(parts)):
        return None
    mask = parts[0].mask
    fits = len(parts) == mask.ndim and mask.shape == x.shape[: mask.ndim]
    return mask if fits and all(is_same(mask, part.mask) for part in parts) else None


def nonzero(x: Tensor, **options: Any) -> Any:
    """``torch.nonzero``; of a mask, as selected numbers."""
    as_tuple = options.get("as_tuple", False)
    if options.keys() - {"as_tuple"} or is_selected(x) or not _is_mask(x) or (x.ndim > 1 and not as_tuple):
        return torch.nonzero(x, **options)
    numbers = [
        torch.arange(size, device=x.device).reshape(-1, *[1] * (x.ndim - dim - 1)).expand(x.shape)
        for dim, size in enumerate(x.shape)
    ]
    if not as_tuple:
        return Selected(numbers[0].unsqueeze(1), x, 0)
    return tuple(Selected(each, x, dim) for dim, each in enumerate(numbers))


def where(condition: Tensor, *others: Any, **options: Any) -> Any:
    """``torch.where``, with one argument too."""
    if others or options:
        return torch.where(condition, *others, **options)
    return nonzero(condition, as_tuple=True)


def index_select(x: Tensor, dim: int, index: Any) -> Any:
    """``torch.index_select``."""
    if dim != 0 or not is_selected(index):
        return torch.index_select(x, dim, index)
    return _by_selected(x, (index,))


def _known_mask(x: Any) -> Tensor | None:
    """The values of a mask that the forward pass has made of constants."""
    if type(x) is not FakeTensor or x.dtype is not torch.bool or x.ndim == 0:
        return None
    return x.constant


def _numbers(part: Any) -> tuple[Any, ...]:
    """A part of an index; a mask whose values are known, as the numbers that it selects."""
    known_mask = _known_mask(part)
    if known_mask is None:
        return (part,)
    with unset_fake_temporarily(), dispatch._disable_current_modes():
        places = known_mask.nonzero().unbind(1)
        numbers = [each.tolist() for each in places]
    return tuple(torch.tensor(each, device=part.device) for each in numbers)


def _selects(x: Tensor, parts: tuple[Any, ...]) -> bool:
    """Whether an index is a mask of the first dims, and after it perhaps numbers and slices of the others."""
    if not parts or not _is_mask(parts[0]) or x.is_complex():
        return False
    others = all(not isinstance(part, Tensor) and part is not Ellipsis for part in parts[1:])
    return others and parts[0].shape == x.shape[: parts[0].ndim]


def masked_select(x: Tensor, mask: Tensor, **options: Any) -> Any:
    """``torch.masked_select``."""
    if options or not _is_mask(mask) or is_selected(x) or is_selected(mask) or x.is_complex():
        return torch.masked_select(x, mask, **options)
    return _selected(x, mask) if x.shape == mask.shape else _selected(*torch.broadcast_tensors(x, mask))


def setitem(x: Tensor, index: Any, values: Any) -> None:
    """``x[index] = values``; a choice by the mask if the values are rows that the same mask selects."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(map(is_selected, parts)) and not is_selected(x):
        mask = counted_by(x, parts)
        index = tuple(part.rows() if is_selected(part) else part for part in parts) if mask is None else mask
    if not is_selected(values) or not _is_mask(index) or is_selected(index) or is_selected(x):
        x[index] = values
    elif not is_same(index, values.mask) or values.values.shape != x.shape:
        x[index] = values.rows()
    else:
        x.copy_(torch.where(_wide(index, x), values.values, x))


def _is_mask(x: Any) -> bool:
    """Whether it is a mask with values that are known only at run time."""
    if is_selected(x):
        return bool(x.dtype is torch.bool)
    return isinstance(x, Tensor) and x.dtype is torch.bool and x.ndim > 0 and _node_of(x) is not None


def _node_of(x: Tensor) -> fx.Node | None:
    mode = proxy_tensor.get_proxy_mode()
    slot = None if mode is None else proxy_tensor.get_proxy_slot(x, mode.tracer, None)
    return None if slot is None or slot.constant is not None else slot.proxy.node


def _selected(x: Tensor, mask: Tensor) -> Selected:
    if x.is_floating_point():
        # finite in a logarithm or a quotient, and the difference of two such is not zero
        other: Any = 0.5 if x.requires_grad else 0.25
    else:
        other = False if x.dtype is torch.bool else 0
    return Selected(torch.where(_wide(mask, x), x, other), mask)


def is_same(mask: Tensor, other: Tensor) -> bool:
    """Whether two masks are one tensor, or the same operators computed both of the same tensors."""
    node, other_node = _node_of(mask), _node_of(other)
    if mask is other:
        return True
    if node is None or other_node is None or mask.shape != other.shape:
        return False
    first, second = sorted((node, other_node))
    between = first
    while between is not second:
        if between.op == "call_function" and any(written_by(between)):
            return False
        between = between.next
    return _is_same_node(first, second)


def _is_same_node(node: Any, other: Any) -> bool:
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
    return spec == other_spec and all(map(_is_same_node, mine, others))


def aligned(*tensors: Any) -> tuple[Selected, list[Any]]:
    """The first selected rows among values, and all values as tensors that are computed by element with
    theirs. Raises Unknown."""
    first: Selected = next(t for t in tensors if is_selected(t))
    return first, [_aligned(t, first) for t in tensors]


def _aligned(x: Any, first: Selected) -> Any:
    if is_selected(x):
        if x.row_ndim != first.row_ndim or not is_same(x.mask, first.mask):
            raise Unknown
        return x.values
    if isinstance(x, Tensor) and x.ndim > first.row_ndim:
        if x.ndim > first.row_ndim + 1 or x.shape[0] != 1:
            raise Unknown
        return x.squeeze(0)
    return x


def by_element(func: Callable, *args: Any, **kwargs: Any) -> Selected:
    """Computes a function of each element."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    first, plain = aligned(*leaves)
    args, kwargs = pytree.tree_unflatten(plain, spec)
    return first.of(func(*args, **kwargs))


# that PyTorch has under another name, or without a tag
ALSO_BY_ELEMENT = """radd rsub rmul truediv rtruediv div rdiv floordiv rfloordiv mod rmod rpow invert and rand
or ror xor rxor to float double half bfloat16 long int short bool type type_as detach clone contiguous gelu
silu relu6 softplus logsigmoid hardswish hardsigmoid mish selu celu elu leaky_relu hardtanh softsign
tanhshrink softshrink hardshrink threshold nan_to_num""".split()


def _is_by_element(name: str) -> bool:
    if name in ALSO_BY_ELEMENT:
        return True
    packet = getattr(torch.ops.aten, name, None)
    tags = [getattr(packet, overload).tags for overload in packet.overloads()] if packet is not None else []
    return any(torch.Tag.pointwise in t and torch.Tag.nondeterministic_seeded not in t for t in tags)


STAND_INS: dict[Callable, Callable] = {
    Tensor.__getitem__: getitem,
    Tensor.__setitem__: setitem,
    torch.nonzero: nonzero,
    Tensor.nonzero: nonzero,
    torch.where: where,
    torch.index_select: index_select,
    Tensor.index_select: index_select,
    torch.masked_select: masked_select,
    Tensor.masked_select: masked_select,
}
