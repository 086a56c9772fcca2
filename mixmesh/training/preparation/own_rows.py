"""Notices results that a loop computes from a rank's own rows in the first batches and that would differ for
the whole batch: a mean that goes into the model, rows chosen by position, a sum that is counted or printed.

Tensors of the first batches have a class that sees every operation on them. A result is marked if it joins
rows (it no longer has one for each sample) or picks them by position. A marked tensor is refused as an input
of the model. A warning follows if a number is read from joined rows, or changes a piece of a parameter or of
a gradient, or if samples are counted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from ...base.callers import is_script, warn
from ...errors import InputError
from ...frontend.trace.words import is_words
from ...lang.plan_file import Plan
from ...runtime.data import own_samples
from ...runtime.shard_tensor import SeesFirst, ShardTensor
from .counted_rows import SIZES, counts_samples

WATCHED_BATCHES = 3
MESSAGE = (
    "a number is used that {function} has made of a rank's own {rows} rows of the batch: other ranks have "
    "other rows, and other numbers. Write model, optimizer, _ = mixmesh.prepare(...) and loop over your own "
    "loader, which has whole batches on every rank, or take out.gather(), or sum it over ranks"
)
OF_COUNTS = (
    "samples are counted by a rank's own {rows} rows of the batch: other ranks have other rows, and the loss "
    "is that of the whole batch. Write model, optimizer, _ = mixmesh.prepare(...) and loop over your own "
    "loader, which has whole batches on every rank, or sum over ranks"
)
HINTS = (
    "model, optimizer, _ = mixmesh.prepare(...)  # and the script's own loader: whole batches on every rank",
    "mixmesh.prepare(..., inputs=function), with the function that does this to a whole batch",
)
# functions that choose or move rows by position, along a given dim
ALONG_A_DIM = frozenset("roll flip sort argsort gather take_along_dim narrow select index_select".split())
# functions that do the same, but whose results have different rows
IN_PARTS = frozenset(
    "cat concat concatenate stack vstack row_stack split chunk tensor_split unbind repeat tile".split()
)
# functions that join rows if their dim is that of the rows
JOINING_A_DIM = frozenset("cumsum cumprod logcumsumexp cummax cummin softmax log_softmax normalize".split())
# functions that return the same rows in another form
FORMS = frozenset(
    "view reshape flatten unflatten transpose permute movedim t squeeze unsqueeze expand view_as reshape_as "
    "repeat_interleave ravel masked_select nonzero __get__ __getitem__".split()
)
# PyTorch's own code between len(x) in a script and this file
_BETWEEN = frozenset({torch._tensor.__file__, torch.overrides.__file__})
# functions whose results of each rank's own rows an all_reduce makes those of the whole batch, by its op
OVER_RANKS = {
    dist.ReduceOp.SUM: frozenset(("sum", "nansum", "count_nonzero")),
    dist.ReduceOp.MAX: frozenset(("max", "amax")),
    dist.ReduceOp.MIN: frozenset(("min", "amin")),
}
READING = frozenset("item tolist __float__ __int__ __bool__ __format__ __repr__".split())


class OwnRows(SeesFirst):
    """A tensor that was made from a rank's own ``rows``. ``joined`` and ``picked`` name the function that
    joined some rows, or picked some by position."""

    rows: int = 0
    watch: RowWatch | None = None
    joined: str = ""
    picked: str = ""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        _check_count(func, name, args, sys._getframe(1))
        given = pytree.tree_leaves((args, kwargs))
        sources = [x for x in given if isinstance(x, OwnRows)]
        joined = next((x.joined for x in sources if x.joined), "")
        picked = next((x.picked for x in sources if x.picked), "")
        if name in READING or any(isinstance(x, ShardTensor) for x in given):
            if joined and sources[0].watch is not None:
                sources[0].watch.warn(joined, sources[0].rows)
            return func(*pytree.tree_map(plain, args), **pytree.tree_map(plain, kwargs))
        if func is dist.all_reduce and joined in OVER_RANKS.get(kwargs.get("op"), ()):
            _stop_watching(sources)
        result = super().__torch_function__(func, types, args, kwargs)
        for rows_made in pytree.tree_leaves(result) if sources else ():
            if isinstance(rows_made, OwnRows):
                source = max(sources, key=Tensor.dim)
                rows_made.watch, rows_made.rows = source.watch, _rows_of(name, source, rows_made)
                rows_made.joined = joined or (name if _joins(name, source, rows_made, args, kwargs) else "")
                rows_made.picked = picked or (name if _picks(name, source, rows_made, args, kwargs) else "")
        return result


def _stop_watching(rows: Iterable[OwnRows]) -> None:
    for x in rows:
        x.watch, x.joined, x.picked = None, "", ""


def _check_count(func: Any, name: str, args: tuple, reader: FrameType) -> None:
    """Makes the watch warn if a function asks for a size that the script's current line uses to count
    samples."""
    if name not in SIZES and not (name == "__get__" and func.__self__.__name__ == "shape"):
        return
    x = args[0]
    if not isinstance(x, OwnRows) or x.watch is None or x.joined:
        return
    while reader.f_code.co_filename in _BETWEEN and reader.f_back is not None:
        reader = reader.f_back
    if is_script(reader.f_code.co_filename) and counts_samples(reader):
        x.watch.warn_of_count(x.rows)


class OwnWords(list):
    """A list with a string for each of a rank's own rows, such as a file name; tells ``watch`` when they are
    counted."""

    watch: RowWatch | None = None

    def __len__(self) -> int:
        _check_words(self, sys._getframe(1))
        return super().__len__()


class OwnWordsInTuple(tuple):
    """The same as a tuple, in which PyTorch collates samples that are tuples."""

    watch: RowWatch | None = None

    def __len__(self) -> int:
        _check_words(self, sys._getframe(1))
        return super().__len__()


WORDS: dict[type, type[OwnWords] | type[OwnWordsInTuple]] = {list: OwnWords, tuple: OwnWordsInTuple}


def _check_words(words: OwnWords | OwnWordsInTuple, reader: FrameType) -> None:
    if words.watch is not None and is_script(reader.f_code.co_filename) and counts_samples(reader):
        words.watch.warn_of_count(sum(1 for _ in words))


def _is_watched_words(x: Any) -> bool:
    return isinstance(x, OwnWords | OwnWordsInTuple)


def plain(x: Any) -> Any:
    """Converts a tensor of a rank's rows to PyTorch's own class, and strings to a plain list or tuple;
    returns anything else unchanged."""
    if isinstance(x, OwnWords):
        return list(x)
    if isinstance(x, OwnWordsInTuple):
        return tuple(iter(x))
    if not isinstance(x, OwnRows):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def _rows_of(name: str, source: OwnRows, made: OwnRows) -> int:
    """The number of rows of ``made`` that belong to samples, or k times as many."""
    length = len(plain(made)) if plain(made).ndim else 0
    return length if name in FORMS and source.rows and length % source.rows == 0 else source.rows


def _joins(name: str, source: OwnRows, made: OwnRows, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    before, after = plain(source).shape, plain(made).shape
    if not before or name in FORMS or name in ALONG_A_DIM or name in IN_PARTS:
        return False
    if name in JOINING_A_DIM:
        return _is_along_rows(len(before), args, kwargs)
    return not after or (before[0] == source.rows and after[0] != before[0])


def _picks(name: str, source: OwnRows, made: OwnRows, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    if name == "__getitem__":
        return _is_picking_index(args[1])
    if name in ALONG_A_DIM:
        return _is_along_rows(plain(source).ndim, args, kwargs)
    return name in IN_PARTS and plain(made).shape[:1] != plain(source).shape[:1]


def _is_along_rows(num_dims: int, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function is called along the first dim. A positional dim is the first number among its
    arguments, or the last one for ``roll``."""
    told = kwargs.get("dim", kwargs.get("dims"))
    if told is None:
        numbers = [x for x in args[1:] if isinstance(x, int | tuple | list) and not isinstance(x, bool)]
        told = numbers[-1 if len(numbers) > 1 and len(args) == 3 else 0] if numbers else -1
    return any(dim % max(num_dims, 1) == 0 for dim in (told if isinstance(told, tuple | list) else (told,)))


def _is_picking_index(index: Any) -> bool:
    """Whether an index chooses rows by position: a number, a slice, a tensor of numbers."""
    first = index[0] if isinstance(index, tuple) and index else index
    if isinstance(first, slice):
        return first != slice(None)
    if isinstance(first, Tensor):
        return first.dtype != torch.bool
    return first is not None and first is not Ellipsis


def _shown(function: str) -> str:
    """A function's name in the form in which a script writes it."""
    return "an index" if function == "__getitem__" else f"{function}()"


class RowWatch:
    """Watches the first batches of a rank that is given some rows of each."""

    def __init__(self, plan: Plan, rank: int) -> None:
        own = own_samples(plan.program, rank)
        self._left = WATCHED_BATCHES if own is not None and 0 < own[1] < own[2] else 0
        self._has_warned = self._has_warned_of_count = rank != 0

    def warn(self, function: str, rows: int) -> None:
        """Warns of a number that was read or meets a piece, once, on the first rank."""
        if not self._has_warned:
            self._has_warned = True
            warn(MESSAGE.format(function=_shown(function), rows=rows))

    def warn_of_count(self, rows: int) -> None:
        """Warns of samples that are counted, once, on the first rank."""
        if not self._has_warned_of_count:
            self._has_warned_of_count = True
            warn(OF_COUNTS.format(rows=rows))

    def watching(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches, with tensors of the first ones as ``OwnRows``."""
        return map(self.watched, batches)

    def watched(self, batch: Any) -> Any:
        """A batch, with its tensors watched if it is one of the first."""
        if not self._left:
            return batch
        self._left -= 1
        leaves = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor) and x.ndim]
        rows = max((len(x) for x in leaves), key=[len(x) for x in leaves].count, default=0)

        def watched(x: Any) -> Any:
            if type(x) in WORDS and len(x) == rows:
                words = WORDS[type(x)](x)
                words.watch = self
                return words
            if type(x) is not Tensor or not x.ndim or len(x) != rows:
                return x
            made = x.as_subclass(OwnRows)
            made.rows, made.watch = rows, self
            return made

        return pytree.tree_map(watched, batch, is_leaf=is_words)

    def on_call(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, Mapping[str, Any]]:
        """The arguments of a model's call as plain tensors. Raises InputError for rows that were joined, or
        picked by position."""
        for x in pytree.tree_leaves((args, kwargs)):
            if isinstance(x, OwnRows) and (x.joined or x.picked):
                raise InputError(
                    "an input of the model is made of several of this rank's own rows, or of some by their "
                    "place: of the whole batch it would be another one",
                    expected="rows as the loader gives them, each changed by itself",
                    got=f"{_shown(x.joined or x.picked)} of {x.rows} rows",
                    hint=HINTS,
                )
        return (
            pytree.tree_map(plain, args, is_leaf=_is_watched_words),
            pytree.tree_map(plain, kwargs, is_leaf=_is_watched_words),
        )
