"""Feeds a program: cuts every rank's share out of global batches that each rank has loaded whole, and tells
which samples of a batch are a rank's own."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..lang.ir import Instruction, Program, Shard
from ..lang.plan_file import Plan
from .accelerator import indexed
from .batches import batch_dim_input, dealt_type, local_input
from .calls import Signature, signature_of
from .executor import local_piece
from .given import count_dealt
from .layout import Layout, layout
from .streams import copied

T = TypeVar("T")
# where a collate_fn returns None for a batch that the loop leaves out
SKIPPED = "model, optimizer, _ = mixmesh.prepare(...)  # and the script's own loader: all ranks skip alike"
Inputs = Mapping[str, Instruction]  # inputs of a program by the path of a call's argument: past.0.key


def shard_batches(
    batches: Iterable[Any],
    plan: Plan | Program,
    rank: int,
    *,
    device: torch.device | str | None = None,
    model: nn.Module | None = None,
) -> Iterator[Any]:
    """Yields this rank's share of every global batch: a dict or tuple of tensors, or a tensor. If the plan
    was made with a dict, ``model`` (or its parallel model) gives the names for the places of a tuple.

    Inputs that the program uses whole are passed whole, as are inputs that it does not use, and inputs of a
    pipeline, which are cut between the ranks of a stage micro-batch by micro-batch. A rank that takes no part
    in an input gets an empty tensor. From a batch of another size each rank gets its planned share, rounded
    again, which may be no rows at all. Raises InputError for a tuple whose names are unknown.
    """
    return shard_batches_by(Followed(plan), batches, rank, device=device, model=model)


class Followed(Generic[T]):
    """A value that is used once for every batch, and may be replaced by another."""

    def __init__(self, value: T) -> None:
        self.value = value
        self._next: tuple[int, T] | None = None

    def follow(self, value: T, after: int = 0) -> None:
        """Makes ``value`` the current one after ``after`` more uses."""
        self._next = after, value

    def settle(self) -> None:
        """Makes the next value the current one immediately."""
        if self._next is not None:
            (_, self.value), self._next = self._next, None

    def use(self) -> T:
        """The value for one more batch."""
        if self._next is not None:
            after, following = self._next
            self._next = (after - 1, following) if after else None
            self.value = self.value if after else following
        return self.value


class Feed(Generic[T]):
    """This rank's batches in order. ``follow(plan)`` makes another plan of the same form cut them after the
    next ``num_ahead`` ones, which are already being loaded; it is None if that is impossible."""

    def __init__(
        self,
        batches: Iterator[T],
        follow: Callable[[Plan], object] | None = None,
        num_ahead: int = 0,
    ) -> None:
        self._batches, self.follow, self.num_ahead = batches, follow, num_ahead

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return next(self._batches)


def shard_batches_by(
    followed: Followed[Plan | Program],
    batches: Iterable[Any],
    rank: int,
    *,
    device: torch.device | str | None = None,
    model: nn.Module | None = None,
    cuts_others: bool = False,
) -> Iterator[Any]:
    """``shard_batches`` by a plan that may be replaced by others of the same form. With ``cuts_others`` it
    also cuts values that the program does not use, if they have a row or a string per sample, such as
    file names, as a loader that loads only this rank's rows would."""
    plan = followed.value
    program = plan.program if isinstance(plan, Plan) else plan
    is_pipeline = isinstance(plan, Plan) and plan.order is not None
    where = None if device is None else indexed(device)
    signature = Signature() if model is None else signature_of(model)  # keeps no reference to the model
    by_name = {signature.named(i.args[0]): i for i in program.batch_inputs}

    def cut(batch: Any) -> Any:
        now = followed.use()
        if not is_pipeline:
            count_dealt()
        shares = now.program if isinstance(now, Plan) else now

        def shares_of(names: Iterable[str], values: Sequence[Any], inputs: Inputs = by_name) -> list:
            found: list[tuple[Instruction | None, Any]] = []
            named = list(zip(names, values))
            for name, value in named:
                _with_leaves(value, name, inputs, lambda *leaf: found.append(leaf))
            rows = _rows_of_samples(shares, found, rank) if cuts_others and not is_pipeline else None

            def share(i: Instruction | None, value: Any) -> Any:
                if i is None and rows is not None:
                    return _own_part(value, *rows)
                return _share(shares, i, value, rank, where, whole=is_pipeline)

            return [_with_leaves(value, name, inputs, share) for name, value in named]

        first = signature.name_of(0)
        if isinstance(batch, Mapping) and _is_one_argument(batch, first, by_name):
            return shares_of([first], [batch])[0]
        if isinstance(batch, Mapping):
            return _like(batch, dict(zip(batch, shares_of(map(str, batch), list(batch.values())))))
        if isinstance(batch, tuple | list | Tensor):
            values = [batch] if isinstance(batch, Tensor) else list(batch)
            places = [signature.name_of(n) for n in range(len(values))]
            made = shares_of(places, values, _at_places(program, places, by_name))
            return made[0] if isinstance(batch, Tensor) else _like(batch, tuple(made))
        raise InputError(
            "a batch must say how the model is called",
            expected="a dict or a tuple of tensors, or a tensor",
            got=type(batch).__name__,
            hint=SKIPPED if batch is None else "",
        )

    return map(cut, batches)  # not a generator, whose frame would keep the whole batch alive


def _is_one_argument(batch: Mapping, first: str, inputs: Inputs) -> bool:
    """Whether the model was planned with all of a dict as its ``first`` argument: ``model(batch)``."""
    return not any(_has_inputs(str(key), inputs) for key in batch) and _has_inputs(first, inputs)


def _has_inputs(name: str, inputs: Inputs) -> bool:
    """Whether the argument of this name is an input of the program, or holds some."""
    return name in inputs or any(path.startswith(f"{name}.") for path in inputs)


def _with_leaves(
    value: Any, name: str, inputs: Inputs, function: Callable[[Instruction | None, Any], Any]
) -> Any:
    """The argument ``name`` with each leaf replaced by what ``function`` makes of it and of the input that it
    is, if it is one. A container that holds no input is a leaf."""
    if name in inputs or not isinstance(value, dict | list | tuple) or not _has_inputs(name, inputs):
        return function(inputs.get(name), value)
    if isinstance(value, dict):
        return _like(value, {k: _with_leaves(v, f"{name}.{k}", inputs, function) for k, v in value.items()})
    keys = getattr(value, "_fields", range(len(value)))
    made = [_with_leaves(v, f"{name}.{key}", inputs, function) for key, v in zip(keys, value)]
    return made if isinstance(value, list) else _like(value, tuple(made))


def _rows_of_samples(
    program: Program, found: Iterable[tuple[Instruction | None, Any]], rank: int
) -> tuple[int, int, int] | None:
    """(first sample of this rank, their number, samples of the batch) if all inputs are cut alike along dim
    0; else None."""
    if own_samples(program, rank) is None:
        return None
    counts = [len(v) for i, v in found if i is not None and isinstance(v, Tensor) and v.ndim]
    return (*own_rows(program, rank, counts[0]), counts[0]) if counts and counts[0] else None


def _own_part(value: Any, start: int, size: int, num_samples: int) -> Any:
    """This rank's part of a value that has a row, or a list item, for each sample; any other value
    unchanged."""
    if isinstance(value, Tensor):
        return value[start : start + size] if value.ndim and len(value) == num_samples else value
    if isinstance(value, list) and len(value) == num_samples:
        return value[start : start + size]
    if isinstance(value, tuple) and type(value) is tuple and len(value) == num_samples:
        return value[start : start + size]
    return value


def _like(batch: Any, shares: Any) -> Any:
    """Puts ``shares`` into the class of ``batch``, as scripts may use more than its values: ``batch.x`` of a
    named tuple, ``batch.to(device)`` of a BatchEncoding. Mappings become dicts if they are neither dicts nor
    UserDicts, whose copies may share memory, or cannot be copied; other tuples and lists become tuples."""
    if isinstance(batch, tuple) and isinstance(getattr(batch, "_fields", None), tuple):
        return type(batch)(*shares)
    if not isinstance(batch, dict | UserDict) or type(batch) is dict:
        return shares
    try:
        like = copy.copy(batch)
        for name, share in shares.items():
            like[name] = share
        share_of = {id(batch[name]): share for name, share in shares.items()}
    except Exception:  # copying and changing an object of any class may fail in any way
        return shares
    attributes = getattr(like, "__dict__", {})
    for name, value in attributes.items():  # a class whose values are attributes: batch.x
        if isinstance(value, Tensor):
            attributes[name] = share_of.get(id(value), value)
    return like


def _at_places(program: Program, places: Sequence[str], inputs: Inputs) -> Inputs:
    """The inputs of a tuple with these names for its places. Raises InputError if their order is unknown and
    matters."""
    if any(_has_inputs(place, inputs) for place in places) or not inputs:
        return inputs
    types = {(layout(program, i.type), i.type.value) for i in inputs.values()}
    if len(inputs) == len(places) and len(types) == 1:
        return dict(zip(places, inputs.values()))  # all inputs are cut alike, so their order does not matter
    raise InputError(
        "the plan names its inputs, and a tuple has no names",
        expected=f"a dict of {', '.join(i.args[0] for i in inputs.values())}",
        got=f"a tuple of {len(places)}",
        hint="mixmesh.shard_batches(batches, plan, rank, model=model) takes names from its forward",
    )


def _share(
    program: Program,
    i: Instruction | None,
    value: Any,
    rank: int,
    device: torch.device | None,
    *,
    whole: bool = False,
) -> Any:
    if i is None or not isinstance(value, Tensor):
        return value
    if rank not in program.participants(i.type):
        return value.new_empty(0) if device is None else value.new_empty(0).to(device)
    if whole:
        return value if device is None else copied(value, device)
    if tuple(value.shape) == i.type.value.shape:
        return local_input(program, i, value, rank, device)
    piece = local_piece(value, _other_layout(program, i, tuple(value.shape)), rank)
    return piece if device is None else copied(piece, device)


def _other_layout(program: Program, i: Instruction, shape: tuple[int, ...]) -> Layout:
    """The layout of an input in a batch of another shape: shares are rounded again. Raises InputError."""
    if len(shape) != len(i.type.value.shape):
        raise InputError(
            f"{i.args[0]} cannot be cut as planned",
            expected=f"the dims of {list(i.type.value.shape)}",
            got=f"{list(shape)}",
        )
    return layout(program, dealt_type(i, shape))


def own_samples(program: Program, rank: int) -> tuple[int, int, int] | None:
    """(first sample of ``rank``, their number, samples of the global batch); None if the inputs are not all
    cut alike along dim 0."""
    first = batch_dim_input(program)
    layouts = {layout(program, i.type) for i in program.batch_inputs}
    if (
        first is None
        or len({(h.sizes, h.ranks) for h in layouts}) > 1
        or any(not isinstance(h.placement, Shard) or h.placement.dim for h in layouts)
    ):
        return None
    return *layout(program, first.type).piece(rank), first.type.value.shape[0]


def own_rows(program: Program, rank: int, num_samples: int) -> tuple[int, int]:
    """The position of the first sample of ``rank`` in a batch of ``num_samples``, and their number. The
    program must have ``own_samples``."""
    first = batch_dim_input(program)
    assert first is not None  # checked by own_samples
    return _other_layout(program, first, (num_samples, *first.type.value.shape[1:])).piece(rank)
