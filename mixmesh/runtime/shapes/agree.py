"""Lets all ranks agree on the batch of a call before any of them goes on.

A rank passes a whole batch, as all others do, or its own rows of one. Alone it can neither tell the two apart
nor know how many rows the others have. So in every call the ranks exchange the shapes that they were given,
in one message of a few numbers between their hosts. This also reveals ranks with batches of different sizes,
since a loss over these would be that of no batch.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...base.units import ranks_text
from ...errors import InputError
from ...frontend.trace.dtypes import TORCH_DTYPE
from ...lang.ir import Instruction, Program, Shard, shard_sizes
from ..agreement import by_value
from ..batches import input_words, other_dtype
from ..calls import missing
from ..collectives import done
from ..comm import Comm
from ..given import num_dealt, num_given
from ..listeners import Listeners
from ..modes import Modes

# by input of a program, in order; None for an input that was left out
Shapes = tuple[tuple[int, ...] | None, ...]
Given = tuple[tuple[int, ...] | None, ...]  # by rank
Told = tuple[Given, ...]  # by input
SAMPLED = 1024  # number of elements that ranks compare to find out whether a tensor is the same
ABSENT = -1
WANTED = 1024  # added to the number of dims of an input whose gradient is wanted
SHAPES, TOLD = "shapes", "shapes, told"  # purposes of messages


@dataclass(frozen=True)
class _Heard:
    """The messages of all ranks: by input and rank, the shape that the rank was given, None for a rank that
    takes no part; the ``values`` of the first rank that computes, and the number of batches that were dealt
    out to it; and each rank's digests, if they were sent."""

    told: Told
    values: int
    num_dealt: int
    digests: list[list[int]] | None


class Agreement:
    """Lets the ranks of a program agree on a batch. With ``is_outside``, which says that the caller computes
    the loss, every rank is expected to pass whole batches."""

    def __init__(self, program: Program, comm: Comm, *, is_outside: bool = False) -> None:
        self.program, self.comm, self._is_outside = program, comm, is_outside
        self._listeners = Listeners(program)
        # the same on all ranks: whether the previous call needed digests, and how many batches were dealt out
        self._was_unclear, self._num_dealt = False, 0

    def groups(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The groups of the ranks that agree and of those that are informed, with their purposes."""
        return ((SHAPES, self._listeners.working), (TOLD, self._listeners.told))

    def shapes(
        self,
        tensors: Mapping[str, Tensor],
        *,
        evaluates: bool,
        wanted: Collection[str] = (),
        modes: Modes = (),
        values: int = 0,
    ) -> tuple[Shapes, bool, int]:
        """The shapes of the whole batch, in which evaluating ranks may all leave an input out, whether ranks
        were given their own rows of it, and the ``values`` of the first computing rank. Collective. Raises
        InputError for tensors that cannot be the program's inputs; and on all ranks if they are not parts of
        one batch or of different ones, if only some want the gradient of an input, or if modules are in
        different ``modes``."""
        check_kinds(self.program, tensors, self.comm.rank, evaluates=evaluates)
        mine = self.given(tensors)
        if self.comm.world_size == 1:
            return mine, False, values
        mark = zlib.crc32(bytes(modes))
        heard = self._heard(tensors, wanted, mark, values, with_digests=self._was_unclear)
        told, was_dealt = heard.told, heard.num_dealt != self._num_dealt
        self._num_dealt = heard.num_dealt
        choices = [_choices(self.program, i, told[n]) for n, i in enumerate(self.program.batch_inputs)]
        self._was_unclear = any(len(shapes_of_input) > 1 for shapes_of_input in choices)
        are_same = are_parts = False
        if self._was_unclear:
            digests = self._exchange(self._digests(tensors)) if heard.digests is None else heard.digests
            is_cut = [isinstance(i.type.placement, Shard) for i in self.program.batch_inputs]
            alike = _alike([[number for number, cut in zip(row, is_cut) if cut] for row in digests])
            are_whole = _are_whole_by_others(self.program, told, choices)
            are_parts = was_dealt and (alike is False or are_whole is False)
            are_same = alike is True or alike is None and (self._is_outside or are_whole is True)
        agreed = resolve(self.program, told, choices, are_same=are_same, are_parts=are_parts)
        return agreed, _are_own_rows(told, agreed), heard.values

    def given(self, tensors: Mapping[str, Tensor]) -> Shapes:
        """The shapes that this rank was given."""
        names = [i.args[0] for i in self.program.batch_inputs]
        return tuple(tuple(tensors[name].shape) if name in tensors else None for name in names)

    def _heard(
        self,
        tensors: Mapping[str, Tensor],
        wanted: Collection[str],
        mark: int,
        values: int,
        *,
        with_digests: bool,
    ) -> _Heard:
        """The messages of all ranks on what they were given. ``mark`` is the same on all. Collective."""
        inputs, numbers = self.program.batch_inputs, [mark, num_given(), num_dealt(), values]
        for i in inputs:
            tensor = tensors.get(i.args[0]) if self._takes_part(i) else None
            num_dims = len(i.type.value.shape)
            head = num_dims + WANTED * (i.args[0] in wanted)
            numbers += [ABSENT] * (num_dims + 1) if tensor is None else [head, *tensor.shape]
        length = len(numbers)
        table = self._exchange(numbers + (self._digests(tensors) if with_digests else []))
        rows = [iter(row[:length]) for row in table]
        _check_modes([next(row) for row in rows])
        _check_given([next(row) for row in rows])
        first = self._listeners.working[0]
        dealt, values = [next(row) for row in rows][first], [next(row) for row in rows][first]
        told = []
        for i in inputs:
            heads = [next(row) for row in rows]
            _check_wanted(i.args[0], [head >= WANTED for head in heads if head != ABSENT])
            dims = [tuple(next(row) for _ in i.type.value.shape) for row in rows]
            told.append(tuple(None if head == ABSENT else d for head, d in zip(heads, dims)))
        return _Heard(tuple(told), values, dealt, [row[length:] for row in table] if with_digests else None)

    def _digests(self, tensors: Mapping[str, Tensor]) -> list[int]:
        """A number for each input that depends on its values."""
        inputs = self.program.batch_inputs
        own_tensors = [tensors.get(i.args[0]) if self._takes_part(i) else None for i in inputs]
        return [ABSENT if x is None else digest(x) for x in own_tensors]

    def _takes_part(self, i: Instruction) -> bool:
        return self.comm.rank in self.program.participants(i.type)

    def _exchange(self, numbers: list[int]) -> list[list[int]]:
        """Exchanges the numbers of every rank; a rank that computes nothing has none. Collective."""
        comm, working = self.comm, self._listeners.working
        mine = torch.tensor(numbers or [0], dtype=torch.int64)
        table = torch.full((comm.world_size, len(mine)), ABSENT, dtype=torch.int64)
        if comm.rank in working and len(working) > 1:
            channel = comm.channel(working, "all_gather of the batch's shapes", SHAPES)
            everyones = [torch.empty_like(mine) for _ in working]
            channel.finish(channel.start(dist.all_gather, everyones, mine))
            table[list(working)] = torch.stack(everyones)
        elif comm.rank in working:
            table[comm.rank] = mine
        return self._listeners.tell(comm, done(table), "the batch's shapes", TOLD).wait().tolist()


def _check_modes(marks: Sequence[int]) -> None:
    """Raises InputError if modules train on some ranks and evaluate on others. ``marks`` are by rank."""
    by_mark = _ranks_by(marks)
    if len(by_mark) > 1:
        one, other = list(by_mark.values())[:2]
        raise InputError(
            "modules train on some ranks that evaluate on others",
            expected="model.train(), model.eval() and those of its modules alike on all ranks",
            got=f"other modes on rank {one[0]} than on rank {other[0]}",
            hint=(
                "no train() or eval() within `if rank == 0:`",
                "where one evaluates too early: leave the loop over a loader after the same batch on all",
            ),
        )


def _ranks_by(numbers: Sequence[int]) -> dict[str, list[int]]:
    """The ranks that have told a number, by that number."""
    return by_value({rank: str(number) for rank, number in enumerate(numbers) if number != ABSENT})


def _check_given(counts: Sequence[int]) -> None:
    """Raises InputError if the loader has given more batches on some ranks than on others. ``counts`` are by
    rank."""
    by_count = _ranks_by(counts)
    if len(by_count) > 1:
        got = (f"batch {count} of the epoch on {ranks_text(ranks)}" for count, ranks in by_count.items())
        idle = by_count.get("0", [])
        here = "call the model in the thread that reads the loader"
        raise InputError(
            "the ranks call the model with rows of different batches",
            expected="every rank to call it with its own rows of one batch, or to skip the same batches",
            got="; ".join(got),
            hint=(
                *([f"{here}: {ranks_text(idle)} read nothing in this one"] if idle else ()),
                "model, optimizer, _ = mixmesh.prepare(...)  # and the script's own loader: by whole batches "
                "all ranks decide alike",
                "or let all ranks decide together: torch.distributed.all_reduce of what decides",
            ),
        )


def _check_wanted(name: str, wants: Sequence[bool]) -> None:
    """Raises InputError if only some ranks want the gradient of an input."""
    if len(set(wants)) > 1:
        raise InputError(
            f"only some ranks want the gradient of {input_words(name)}",
            expected="requires_grad alike on all ranks",
            got=f"{sum(wants)} of {len(wants)} ranks",
        )


def _alike(digests: list[list[int]]) -> bool | None:
    """Whether all ranks were given the same values, judging by samples of them; None if each input has a
    single value everywhere, such as zeros, which may be the rows of different samples. ``digests`` are by
    rank and input that is cut: what every rank needs whole is the same in any case."""
    columns = [{n for n in column if n != ABSENT} for column in zip(*digests)]
    if any(len(column) > 1 for column in columns):
        return False
    return True if any(any(column) for column in columns) else None


def _are_whole_by_others(
    program: Program, told: Told, choices: Sequence[set[tuple[int, ...]]]
) -> bool | None:
    """Whether ranks were given whole batches of the inputs that they may also have in part, judging by inputs
    that every rank has whole and that were planned with as many samples; None if these do not decide it."""
    sizes: dict[tuple[int, int], set[int]] = defaultdict(set)  # by the dim and its planned size
    for i, options in zip(program.batch_inputs, choices):
        if not isinstance(i.type.placement, Shard) and options:
            for place, (planned, size) in enumerate(zip(i.type.value.shape, next(iter(options)))):
                sizes[place, planned].add(size)
    verdicts = set()
    for i, rows, options in zip(program.batch_inputs, told, choices):
        if len(options) > 1 and isinstance(i.type.placement, Shard):
            dim = i.type.placement.dim
            fitting = [shape for shape in options if shape[dim] in sizes[dim, i.type.value.shape[dim]]]
            verdicts.add(fitting[0] in rows if len(fitting) == 1 else None)
    return verdicts.pop() if len(verdicts) == 1 else None


def digest(x: Tensor) -> int:
    """A digest of a sample of the values; 0 if all of them are equal, as that proves nothing."""
    if x.device.type == "meta" or not x.numel():
        return 0
    flat = x.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED].cpu().contiguous()
    if bool((some == some[0]).all()):
        return 0
    return zlib.crc32(some.view(torch.uint8).numpy().data)


def check_kinds(
    program: Program, tensors: Mapping[str, Tensor], rank: int, *, evaluates: bool = False
) -> None:
    """Raises InputError for an input that is missing, unless the call evaluates, or of another dtype or
    number of dims."""
    for i in program.batch_inputs:
        if rank not in program.participants(i.type):
            continue
        name, value, got = i.args[0], i.type.value, tensors.get(i.args[0])
        if got is None and evaluates:
            continue
        if got is None:
            raise missing(name, ", ".join(map(input_words, tensors)) or "no tensors")
        dtype = TORCH_DTYPE[value.dtype]
        if got.dtype != dtype:
            raise other_dtype(name, dtype, got.dtype)
        if got.ndim != len(value.shape):
            raise InputError(
                f"{input_words(name)} is neither a whole batch nor rank {rank}'s part of one",
                expected=f"{len(value.shape)} dims, as in the planned {list(value.shape)}",
                got=f"{list(got.shape)}",
            )


def resolve(
    program: Program,
    told: Told,
    choices: Sequence[set[tuple[int, ...]]],
    *,
    are_same: bool,
    are_parts: bool = False,
) -> Shapes:
    """The shapes of the whole batch, from the ``choices`` for each input. If each rank's rows could be either
    a part of a batch or a whole batch, they are parts if that is known (``are_parts``), and whole batches if
    the ranks have the same values (``are_same``). Raises InputError."""
    agreed: list[tuple[int, ...] | None] = []
    for i, rows, options in zip(program.batch_inputs, told, choices):
        if all(rows[r] is None for r in program.participants(i.type)):
            agreed.append(None)
            continue
        if not options:
            raise _no_batch(program, i, rows)
        whole = next(shape for shape in rows if shape is not None)
        if not are_parts and whole in options and (are_same or len(options) == 1):
            agreed.append(whole)
        elif not are_parts and i.type.value.shape in options:
            agreed.append(i.type.value.shape)
        else:
            agreed.append(max(options))  # the rows of all ranks together
    _check_samples(program, agreed)
    return tuple(agreed)


def _check_samples(program: Program, agreed: Sequence[tuple[int, ...] | None]) -> None:
    """Raises InputError if inputs that were planned with equally many samples now have different numbers. Two
    that are cut along different dims are not compared, as one of them may be cut along its features."""
    counts: dict[tuple[int, int], tuple[str, int]] = {}  # by the dim and its planned size
    for i, shape in zip(program.batch_inputs, agreed):
        if shape is not None and isinstance(i.type.placement, Shard):
            dim = i.type.placement.dim
            planned = dim, i.type.value.shape[dim]
            name, count = counts.setdefault(planned, (i.args[0], shape[dim]))
            if count != shape[dim]:
                raise InputError(
                    f"{input_words(name)} and {input_words(i.args[0])} are of batches of other sizes",
                    expected="as many samples in both, as planned",
                    got=f"{count} and {shape[dim]}",
                )


def _are_own_rows(told: Told, agreed: Shapes) -> bool:
    return any(shape not in (None, whole) for given, whole in zip(told, agreed) for shape in given)


def _choices(program: Program, i: Instruction, given: Given) -> set[tuple[int, ...]]:
    """The possible shapes of a whole input: every rank was given all of it, or its own rows."""
    ranks = program.participants(i.type)
    told_by = {r: shape for r in ranks if (shape := given[r]) is not None}
    if len(told_by) < len(ranks):
        return set()
    placement = i.type.placement
    if not isinstance(placement, Shard):
        return set(told_by.values()) if len(set(told_by.values())) == 1 else set()
    dim = placement.dim
    if len({shape[:dim] + shape[dim + 1 :] for shape in told_by.values()}) != 1:
        return set()
    sizes = {r: shape[dim] for r, shape in told_by.items()}
    shapes = set()
    for total in {sum(sizes.values()), *sizes.values()}:
        if total:
            rows = shard_sizes(total, program.cut_by(i.type), placement.dealt(total).unit)
            if all(size in (total, rows[r]) for r, size in sizes.items()):
                shape = next(iter(told_by.values()))
                shapes.add(shape[:dim] + (total,) + shape[dim + 1 :])
    return shapes


def _no_batch(program: Program, i: Instruction, given: Given) -> InputError:
    name, placement, ranks = i.args[0], i.type.placement, program.participants(i.type)
    got = "; ".join(f"rank {r}: {'nothing' if (shape := given[r]) is None else list(shape)}" for r in ranks)
    if not isinstance(placement, Shard):
        return InputError(
            f"{input_words(name)} is needed whole on every rank, and the ranks have other sizes of it",
            expected="one shape on all ranks",
            got=got,
            hint="pad every batch on all ranks to one length",
        )
    shares = ""
    shapes = [shape for r in ranks if (shape := given[r]) is not None]
    total = sum(shape[placement.dim] for shape in shapes) if len(shapes) == len(ranks) else 0
    if total:
        rows = shard_sizes(total, program.cut_by(i.type), placement.dealt(total).unit)
        shares = f", or of {total} rows " + ", ".join(str(rows[r]) for r in ranks)
    return InputError(
        f"{input_words(name)}: the ranks were given neither one whole batch nor each its own part of one",
        expected=f"the same batch on all ranks{shares}, with one length",
        got=got,
        hint=(
            "pass the whole batch on every rank, or the loader of mixmesh.prepare, or mixmesh.shard_batches",
            "model, optimizer, _ = mixmesh.prepare(...)  # the script's own loader, padded as a whole",
        ),
    )
