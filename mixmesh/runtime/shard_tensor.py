"""Parameters of which a rank holds a piece: tensors that stand for the whole.

A ``ShardTensor`` is this rank's piece, in plain memory, with a note of the whole. PyTorch's kernels run on it
directly. Python code gets answers for the whole (shape, norm, sum); its operations are done piece by piece
(arithmetic, clamping, copying) or refused (``shard_rules``). So clipping, penalties, optimizers that compute
norms, ``numel()`` and checkpoints by ``torch.distributed.checkpoint`` give the same results as on one device.
The program's own kernels run on plain tensors in the same memory, and never meet a ShardTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _foreach_supported_types as _optimizers_types
from torch.utils._foreach_utils import _foreach_supported_types as _clipping_types

from ..errors import InputError
from . import collectives
from .shard_numbers import Off, ShardNumber, known
from .shard_reductions import reduce_whole
from .shard_rules import REFUSED_GETTERS, Kind, Rule, rule_of
from .shard_whole import ShardBase, Whole, check_alike, check_no_gradient, refusal


class SeesFirst(Tensor):
    """A tensor whose class gets a function before the shards among its arguments do."""


class ShardTensor(ShardBase):
    """This rank's piece of a parameter, of its gradient or of its optimizer state.

    ``shape``, ``numel()`` and ``size()`` are the whole's. ``to_local()`` is the piece, ``full_tensor()`` the
    whole (collective). Raises InputError for a function that needs elements of other ranks.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if ShardNumber in types:
            args, kwargs = known((args, kwargs))
        if len(types) > 1 and any(issubclass(t, SeesFirst) for t in types):
            return NotImplemented
        with Off():
            return _call(func, args, kwargs)

    def to_local(self) -> Tensor:
        """This rank's piece as a plain tensor of the same memory, without autograd."""
        with Off():
            return self.detach().as_subclass(Tensor)

    def full_tensor(self) -> Tensor:
        """The whole tensor, on every rank. Collective."""
        comm = self.whole.comm
        with Off():
            stored = replace(self.whole.stored, dtype=self.dtype)
        with comm.call(f"full_tensor of {stored.name}"):
            return stored.whole(self.to_local(), comm)

    # torch.distributed.checkpoint asks for pieces like this; imported only when it is used

    def __create_write_items__(self, name: str, _tensor: Any) -> list:
        from . import shard_files

        counts = self.whole.stored.counts(self.whole.comm.rank)
        return shard_files.write_items(name, self.whole.shape, self._piece()) if counts else []

    def __create_chunk_list__(self) -> list:
        from . import shard_files

        _written(self)  # pieces that are requested by chunks are about to be loaded
        return shard_files.chunks(self._piece())

    def __get_tensor_shard__(self, _index: Any) -> Tensor:
        return self.to_local()

    def _piece(self) -> tuple[tuple[int, ...], Tensor]:
        """The position of the piece in the whole, and the piece."""
        stored, piece = self.whole.stored, self.to_local()
        return (stored.origin(self.whole.comm.rank) if piece.ndim == len(stored.shape) else ()), piece


def shard(piece: Tensor, whole: Whole, *, is_parameter: bool = False, requires_grad: bool = False) -> Tensor:
    """The shard for a plain tensor: another object with the same memory."""
    out = torch.Tensor._make_subclass(ShardTensor, piece.detach(), requires_grad)
    out.whole = whole
    if is_parameter:
        out._is_param = True
    return out


def plain(x: Tensor) -> Tensor:
    """The part of a tensor, shard or not, that this rank holds, as a plain tensor."""
    return x.to_local() if isinstance(x, ShardTensor) else x


def _as_shard(x: Any, whole: Whole, local: torch.Size) -> Any:
    is_piece = type(x) is Tensor and x.shape == local
    if is_piece:
        x.__class__ = ShardTensor
        x.whole = whole
    return x


# --- calls, all with __torch_function__ off: shapes are those of pieces ---------------------------------


def _call(func: Callable, args: tuple, kwargs: dict) -> Any:
    name = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(func, "__self__", func).__name__  # the name of its descriptor
        return _get(func, attribute, *args) if name == "__get__" else _set(func, attribute, *args)
    rule = rule_of(name)
    if rule.kind is Kind.PLAIN:
        return func(*args, **kwargs)
    return _CALLS[rule.kind](func, rule, args, kwargs)


def _get(func: Callable, attribute: str, x: ShardTensor, *_) -> Any:
    if attribute in REFUSED_GETTERS:
        raise refusal(attribute, x.whole)
    if attribute in ("shape", "nbytes", "ndim"):
        return _sizes(func, Rule(Kind.SIZE, attribute), (x,), {})
    value = func(x)
    if attribute == "grad":
        return _as_shard(value, replace(x.whole, written=None), x.shape)
    if attribute == "data":
        return _as_shard(value, x.whole, x.shape)
    return value


def _set(func: Callable, attribute: str, x: ShardTensor, *values: Any) -> None:
    if attribute == "grad" and values and isinstance(values[0], Tensor):
        value = _piece_of(x, values[0], "grad")
        return func(x, _as_shard(value, replace(x.whole, written=None), x.shape))
    if attribute == "data":
        if x.whole.written is not None:
            raise InputError(
                f"other ranks work with copies of {x.whole.stored.name}, which a new .data would not reach",
                expected="values written in place",
                got=f"{x.whole.stored.name}.data = ..., of {x.whole.text}",
                hint="p.data.copy_(values)",
            )
        value = _piece_of(x, values[0], "data")
        return func(x, value.as_subclass(Tensor))
    return func(x, *values)


def _sizes(_func: Callable, rule: Rule, args: tuple, kwargs: dict) -> Any:
    shape = args[0].whole.shape
    if rule.name in ("numel", "nelement"):
        return shape.numel()
    if rule.name == "nbytes":
        return shape.numel() * args[0].element_size()
    if rule.name == "__len__":
        return shape[0]
    if rule.name in ("dim", "ndim", "ndimension"):
        return len(shape)
    if rule.name == "shape":
        return shape
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return shape if dim is None else shape[dim]


def _elementwise(func: Callable, rule: Rule, args: tuple, kwargs: dict) -> Any:
    if rule.is_list:
        return _elementwise_lists(func, rule, args, kwargs)
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    first = next(x for x in tensors if isinstance(x, ShardTensor))
    has_whole = any(is_whole(x, first) for x in tensors)
    if has_whole:
        if _is_of_whole(rule, args[0], tensors):
            check_alike(rule.name, first, [x for x in tensors if not is_whole(x, first)])
            args, kwargs = torch.utils._pytree.tree_map_only(
                ShardTensor, ShardTensor.full_tensor, (args, kwargs)
            )
            return func(*args, **kwargs)
        check_no_gradient(rule.name, first, tensors)  # before the cut, which drops it
    if has_whole or any(_is_cut_otherwise(first, x) for x in tensors):
        args, kwargs = torch.utils._pytree.tree_map_only(
            Tensor, lambda x: _laid_like(first, _cut_like(first, x)), (args, kwargs)
        )
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    check_alike(rule.name, first, tensors)
    check_no_gradient(rule.name, first, tensors)
    out = func(*args, **kwargs)
    if rule.in_place:
        _written(args[0])
        return out
    return _as_shard(out, first.whole, first.shape)


def is_whole(x: Any, beside: ShardTensor) -> bool:
    """Whether a plain tensor that is used together with a shard has the shape of the whole, on every rank."""
    stored = beside.whole.stored
    return not isinstance(x, ShardTensor) and x.ndim > 0 and tuple(x.shape) == stored.shape


def _is_of_whole(rule: Rule, target: Any, tensors: Iterable[Tensor]) -> bool:
    """Whether shards combined with whole tensors give a whole tensor, as in averages of weights: ``k.lerp_(p,
    0.1)``, ``k.data = m * k.data + (1 - m) * p.data``. Otherwise the result is a shard through which
    gradients flow, ``(p - start).square().sum()``, or changes a shard, ``p.grad.mul_(mask)``."""
    if rule.in_place:
        return not isinstance(target, ShardTensor)
    flows = torch.is_grad_enabled() and any(isinstance(x, ShardTensor) and x.requires_grad for x in tensors)
    return not flows


def _cut_like(first: ShardTensor, x: Tensor) -> Tensor:
    """Cuts a whole tensor in the way of a shard; returns any other tensor unchanged."""
    return _piece_of(first, x, "elements") if is_whole(x, first) else x


def _is_cut_otherwise(first: ShardTensor, x: Any) -> bool:
    """Whether another shard, through which no gradient flows, has the same shape in another layout: a target
    network follows ``online``, and the plan cuts what learns and what does not in different ways."""
    return (
        isinstance(x, ShardTensor)
        and x.whole.shape == first.whole.shape
        and not x.whole.is_like(first.whole)
        and not (torch.is_grad_enabled() and x.requires_grad)
    )


def _laid_like(first: ShardTensor, x: Tensor) -> Tensor:
    """A copy of such a shard in the layout of ``first``; returns any other tensor unchanged. Collective."""
    if not _is_cut_otherwise(first, x):
        return x
    assert isinstance(x, ShardTensor)
    whole = first.whole
    piece = whole.stored.piece(x.full_tensor(), whole.comm.rank, first.device)
    return shard(piece, replace(whole, written=None))


def _elementwise_lists(func: Callable, rule: Rule, args: tuple, kwargs: dict) -> Any:
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, tuple | list)]
    lists = [a for a in lists if a and isinstance(a[0], Tensor)]
    rows = [a for a in lists if len(a) == len(lists[0])]
    firsts: list[ShardTensor | None] = []
    alike: list[list[Tensor]] = []
    for row in zip(*rows):
        first, row = _laid_alike(rule, row)
        firsts.append(first)
        alike.append(list(row))
    now = {id(a): list(column) for a, column in zip(rows, zip(*alike))}
    args = tuple(now.get(id(a), a) for a in args)
    kwargs = {key: now.get(id(a), a) for key, a in kwargs.items()}
    out = func(*args, **kwargs)
    if rule.in_place:
        for x in lists[0]:
            _written(x)
        return out
    pairs = zip(out, firsts)
    return type(out)(x if of is None else _as_shard(x, of.whole, of.shape) for x, of in pairs)


def _laid_alike(rule: Rule, row: tuple[Tensor, ...]) -> tuple[ShardTensor | None, tuple[Tensor, ...]]:
    """The tensors of one operation in one layout, that of the first shard among them, which is None where
    they are whole."""
    first = next((x for x in row if isinstance(x, ShardTensor)), None)
    if first is None:
        return None, row
    if any(is_whole(x, first) for x in row):
        if _is_of_whole(rule, row[0], row):
            return None, tuple(x.full_tensor() if isinstance(x, ShardTensor) else x for x in row)
        check_no_gradient(rule.name, first, row)
    row = tuple(_laid_like(first, _cut_like(first, x)) for x in row)
    check_alike(rule.name, first, row)
    return first, row


def _written(x: Any) -> None:
    if isinstance(x, ShardTensor) and x.whole.written is not None:
        x.whole.written()


def _reduce(func: Callable, rule: Rule, args: tuple, kwargs: dict) -> Any:
    if rule.name in ("max", "min") and len(args) > 1 and isinstance(args[1], Tensor):
        return _elementwise(func, rule, args, kwargs)
    if rule.name in ("equal", "allclose"):
        first = next(x for x in args if isinstance(x, ShardTensor))
        args = tuple(_cut_like(first, x) if isinstance(x, Tensor) else x for x in args)
    return reduce_whole(func, rule, args, kwargs)


def _special(func: Callable, rule: Rule, args: tuple, kwargs: dict) -> Any:
    return _SPECIAL[rule.name](func, args, kwargs)


def _copy_(func: Callable, args: tuple, kwargs: dict) -> Tensor:
    target, source = args[0], args[1]
    if not isinstance(target, ShardTensor):
        if target.ndim and is_whole(target, source):
            return func(target, source.full_tensor(), *args[2:], **kwargs)
        if target.ndim and target.shape != source.shape:
            raise refusal("copy_ to a plain tensor", source.whole, f"of shape {list(target.shape)}")
        return func(*args, **kwargs)
    func(target, _piece_of(target, source, "copy_"), *args[2:], **kwargs)
    _written(target)
    return target


def _as_number(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Reads a tensor of one element as a number, such as a temperature that a loop logs. Collective."""
    x = args[0]
    if x.whole.shape.numel() != 1:
        raise refusal(func.__name__, x.whole)
    return func(x.full_tensor(), *args[1:], **kwargs)


def _as_list(func: Callable, args: tuple, _kwargs: dict) -> Any:
    """All elements of the whole tensor as a list, for a log. Collective."""
    return func(args[0].full_tensor())


def _as_array(func: Callable, args: tuple, kwargs: dict) -> Any:
    """The whole tensor as an array of NumPy, for histograms and logs. Collective. The array is read-only, as
    on one device it has the parameter's own memory, and what is written there changes the parameter."""
    x = args[0]
    whole = x.full_tensor().clone().requires_grad_(x.requires_grad)  # PyTorch refuses arrays of these
    array = func(whole, *args[1:], **kwargs)
    array.flags.writeable = False
    return array


def _piece_of(x: ShardTensor, value: Tensor, what: str) -> Tensor:
    """The part of another shard, of a whole tensor or of a piece that belongs into ``x``."""
    whole = x.whole
    if isinstance(value, ShardTensor):
        value = _laid_like(x, value)
        check_alike(what, x, [value])
        return value
    if tuple(value.shape) == whole.stored.shape:
        return whole.stored.piece(value, whole.comm.rank, x.device)
    if value.ndim and value.shape != x.shape:
        raise refusal(what, whole, f"from a tensor of shape {list(value.shape)}")
    return value


def _show(_func: Callable, args: tuple, _kwargs: dict) -> str:
    x = args[0]
    values = repr(x.detach().as_subclass(Tensor))
    return f"ShardTensor({x.whole.text}: {values})"


def _refuse_pickling(_func: Callable, args: tuple, _kwargs: dict) -> Any:
    raise InputError(
        f"a file of {args[0].whole.stored.name} would hold one rank's piece of it",
        expected="a file of whole tensors, or one that all ranks write together",
        got=args[0].whole.text,
        hint=(
            "mixmesh.save(state, path)  # in place of torch.save, on every rank",
            "with mixmesh.whole(model, optimizer): ...  # on every rank, around what a library saves on one",
            "state = model.full_state_dict()  # on every rank; then torch.save(state, path) on rank 0",
            "torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=path)  # on every rank",
        ),
    )


def _deepcopy(_func: Callable, args: tuple, _kwargs: dict) -> Tensor:
    x, memo = args[0], args[1] if len(args) > 1 else {}
    is_parameter = getattr(x, "_is_param", False)
    out = shard(
        x.detach().as_subclass(Tensor).clone(),
        replace(x.whole, written=None),
        is_parameter=is_parameter,
        requires_grad=x.requires_grad,
    )
    memo[id(x)] = out
    return out


def _new_empty(func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """Turns an empty tensor of the whole's shape into a shard with the values: code that stages checkpoints
    expects them."""
    x = args[0]
    size = kwargs.get("size", args[1] if len(args) > 1 else None)
    if isinstance(size, torch.Size | tuple | list) and tuple(size) == x.whole.stored.shape:
        device = kwargs.get("device", x.device)
        copy = x.detach().as_subclass(Tensor).clone().to(device)
        return shard(copy, replace(x.whole, written=None))
    return func(x.as_subclass(Tensor), *args[1:], **kwargs)


def _new_plain(func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """A plain tensor that has only the shard's dtype and device: scripts make states of recurrent networks
    from any parameter."""
    return func(args[0].as_subclass(Tensor), *args[1:], **kwargs)


def _unscale(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Unscales gradients, and makes all ranks agree on whether one of them is not finite."""
    out = func(*args, **kwargs)
    found_inf, comm = args[1], next(x.whole.comm for x in args[0] if isinstance(x, ShardTensor))
    channel = comm.channel(comm.everyone, "all_reduce of whether gradients are finite")
    with comm.call("whether gradients are finite"):
        of_all = collectives.all_reduce(channel, found_inf.detach().clone().reshape(1), "max")
    found_inf.copy_(of_all.reshape(found_inf.shape))
    return out


def _grad(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Like ``torch.autograd.grad``, from the edges of the graph where shards are. Hooks still see shards."""

    def edge(x: Any) -> Any:
        return torch.autograd.graph.get_gradient_edge(x) if isinstance(x, ShardTensor) else x

    outputs, inputs, *rest = [*args, kwargs.pop("inputs")] if "inputs" in kwargs else args
    inputs = tuple(map(edge, inputs)) if isinstance(inputs, tuple | list) else edge(inputs)
    with torch._C._EnableTorchFunction():
        return func(outputs, inputs, *rest, **kwargs)


def _refuse(_func: Callable, rule: Rule, args: tuple, kwargs: dict) -> Any:
    raise refusal(rule.name, _first(args, kwargs).whole)


def _first(*trees: Any) -> ShardTensor:
    leaves = torch.utils._pytree.tree_leaves(trees)
    return next(x for x in leaves if isinstance(x, ShardTensor))


_CALLS: dict[Kind, Callable] = {
    Kind.ELEMENTWISE: _elementwise,
    Kind.REDUCTION: _reduce,
    Kind.SIZE: _sizes,
    Kind.SPECIAL: _special,
    Kind.REFUSED: _refuse,
}
_SPECIAL: dict[str, Callable] = {
    "grad": _grad,
    "copy_": _copy_,
    "__repr__": _show,
    "__format__": _show,
    "__reduce_ex__": _refuse_pickling,
    "__deepcopy__": _deepcopy,
    **dict.fromkeys(("item", "__float__", "__int__", "__bool__"), _as_number),
    "tolist": _as_list,
    **dict.fromkeys(("numpy", "__array__"), _as_array),
    "data_ptr": lambda func, args, kwargs: 0,  # as for a DTensor, because the whole has no memory
    "new_empty": _new_empty,
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_tensor"), _new_plain),
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}

# as DTensor does: optimizers and clipping then use their faster path, over lists of tensors
for _types in (_optimizers_types, _clipping_types):
    if ShardTensor not in _types:
        _types.append(ShardTensor)
