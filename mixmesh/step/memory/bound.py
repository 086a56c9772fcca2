"""An upper bound of a program's memory: everything that may be kept, plus the most at any time of the values
that are freed after their last use.

It adds up facts of a step without a ledger, in a tenth of the fold's time. If even this bound fits, which is
usual, the peak itself need not be computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import floor

import numpy as np

from ...cost.calls import Kind
from ...cost.exchanges import DUAL_COLLECTIVE, cut_shares
from ...cost.model import VIEWS
from ...cost.outline import is_factored
from ...lang.ir import EVERYWHERE, Cut, Instruction, Program, owned_type, regions
from ...lang.optimizer_states import OptimizerStates
from ...lang.rules import Call
from ..kept import backward_bytes, extra_bytes, forward_bytes, kept, row_of
from ..step import Step
from .before import BROADCAST_BYTES
from .footprints import LOOKUPS
from .moments import Sizes

Times = list[tuple[int, float]]  # (time, bytes); negative bytes are freed
# operators that are always views; the rest of ``VIEWS`` may have to copy
NEVER_COPY = VIEWS - {"aten.view"}
IN_MEMORY_ORDER = (
    "aten.linear",
    "aten.addmm",
    "aten.mm",
    "aten.embedding",
    "aten.layer_norm",
    "input",
    "param",
)


class Bound:
    """Upper bounds of a program's bytes for any ratios and buckets, by their cut, and the bytes ``at_first``
    on every rank."""

    def __init__(self, program: Program, optimizer_states: OptimizerStates, step: Step) -> None:
        """``step`` is that of the program, with any buckets."""
        sizes: Sizes = {}
        self.at_first = _at_first(program)
        _stored(program, optimizer_states, sizes)
        kinds = step.outline.kinds
        last = {name: uses[-1] for name, uses in step.outline.uses.items()}
        for i in program.instructions:
            if i.op == "output":
                shown = program.types[i.inputs[0]]
                # a loop still holds those of the step before
                _add(sizes, shown.cut, float(shown.value.size_bytes))
        _computed(program, kinds, last, sizes)
        _temporaries(program, kinds, sizes)
        _gradients(program, last, step.later, sizes)
        _moved(program, sizes)
        self.cuts = tuple(sizes)
        self.sizes = np.array([sizes[cut] for cut in self.cuts])

    def held_bytes(self, program: Program) -> np.ndarray:
        """Bytes per rank under the ratios of ``program``, without the heap's losses."""
        shares = [cut_shares(cut, program.ratio(cut.ratio), program.world_size) for cut in self.cuts]
        in_steps = self.sizes @ np.array(shares).reshape(len(self.cuts), program.world_size)
        return np.maximum(in_steps, self.at_first)


def has_bound(program: Program) -> bool:
    """Whether the bound applies: not to programs with values made several times, or with copies."""
    return not program.copies and not regions(program)


def _add(sizes: Sizes, cut: Cut, size_bytes: float) -> None:
    sizes[cut] = sizes.get(cut, 0.0) + size_bytes


def _at_first(program: Program) -> float:
    """The bytes of the whole model and batch, and of the groups in which values are sent
    (``before.set_up``)."""
    leaves = [i for i in program.instructions if i.op in ("param", "buffer")]
    model = sum(i.type.value.size_bytes for i in leaves)
    batch = sum(i.type.value.size_bytes for i in program.instructions if i.op == "input")
    largest = max((i.type.value.size_bytes for i in leaves), default=0)
    return float(model + batch + 2 * min(model, BROADCAST_BYTES + largest) + 2 * largest)


def _stored(program: Program, states: OptimizerStates, sizes: Sizes) -> None:
    """Adds parameters with gradients and states, the optimizer's temporaries and the buckets of gradients;
    with owners there are more buffers: gathered, being joined, under way, and the owners' addends."""
    for i in program.instructions:
        if i.op not in ("param", "buffer", "input", "const"):
            continue
        size = i.type.value.size_bytes
        _add(sizes, i.type.cut, size)
        if i.op == "input":
            _add(sizes, EVERYWHERE, size)
        if i.op == "param" and i.result in program.requires_grad:
            owned = owned_type(program, i)
            _add(sizes, (owned or i.type).cut, (states.kept + 1) * size)
            _add(sizes, i.type.cut, (2 if states.earlier else 1) * size)
            _add(sizes, i.type.cut.whole, size if owned is None else 4 * size)
            if owned is not None:
                _add(sizes, owned.cut, program.world_size * size)


def _computed(program: Program, kinds: Sequence[Kind | None], last: Mapping[str, int], sizes: Sizes) -> None:
    """Adds results other than views: all that may be kept, and the most at any time of those freed after
    their ``last`` use."""
    kept_names = _kept(program, kinds)
    coming: dict[Cut, Times] = {}
    for n, (i, kind) in enumerate(zip(program.instructions, kinds)):
        if kind is None or kind.call.op in NEVER_COPY or _is_view(program, i):
            continue
        for name, t in zip(i.results, i.types):
            if name in kept_names:
                _add(sizes, t.cut, t.value.size_bytes)
            else:
                there = coming.setdefault(t.cut, [])
                end = n if name is None else last.get(name, n)
                there += [(n, t.value.size_bytes), (end + 1, -t.value.size_bytes)]
    _most_at_once(coming, sizes)


def _kept(program: Program, kinds: Sequence[Kind | None]) -> set[str | None]:
    """Values that may be held beyond their last use: by autograd, by a view, or by a redistribution."""
    names: set[str | None] = {program.loss}
    # positions of inputs and results that may be kept
    places: dict[Kind, tuple[Sequence[int], Sequence[int]]] = {}
    for i, kind in zip(program.instructions, kinds):
        if kind is None:
            names.update(i.inputs)
            continue
        if kind not in places:
            places[kind] = _kept_places(kind)
        inputs, results = places[kind]
        names.update(i.inputs[n] for n in inputs)
        names.update(i.results[n] for n in results)
    return names


def _kept_places(kind: Kind) -> tuple[Sequence[int], Sequence[int]]:
    """Positions of inputs that are kept, or of which a result may be a view; and of results that are kept."""
    row, every = row_of(kind.call), list(kept(kind.call, kind.takes))
    inputs: Sequence[int] = [n for what, n in every if what == "input"]
    if row.passes and not (row.strided and kind.call.op != "aten.broadcast_tensors"):
        inputs = range(len(kind.inputs))
    return inputs, [n for what, n in every if what == "result"]


def _most_at_once(coming: dict[Cut, Times], sizes: Sizes) -> None:
    """Adds the most bytes that exist at one time, of those that come and go at numbered times."""
    for cut, there in coming.items():
        _, by = np.array(sorted(there)).T
        _add(sizes, cut, float(by.cumsum().max()))


def _temporaries(program: Program, kinds: Sequence[Kind | None], sizes: Sizes) -> None:
    """Adds what operators keep besides their results, and their temporaries."""
    most: Sizes = {}
    for kind, count in Counter(kind for kind in kinds if kind is not None).items():
        call, cut = kind.call, kind.work_type.cut
        for t in kind.inputs if _may_copy(call) else ():
            _add(sizes, t.cut, count * t.value.size_bytes)
        _add(sizes, cut, count * extra_bytes(call))
        # only one of these at a time: temporaries; an arriving gradient and, for a second use, the sum
        needs = [(forward_bytes(call) + backward_bytes(call), cut)]
        needs += [(2.0 * t.value.size_bytes, t.cut) for t in (*kind.inputs, *kind.outputs)]
        if call.op in LOOKUPS:
            needs.append((2.0 * kind.outputs[0].value.size_bytes, kind.outputs[0].cut.whole))
        here: Sizes = {}
        for size, cut in needs:
            _add(here, cut, size)
        for cut, size in here.items():
            most[cut] = max(most.get(cut, 0.0), size)
    for cut, size in most.items():
        _add(sizes, cut, size)
    for i in program.instructions:
        if is_factored(i):  # the factors of all ranks
            factors = program.types[i.inputs[0]].value.size_bytes + i.type.value.size_bytes
            _add(sizes, i.type.cut.whole, float(factors))


def _gradients(program: Program, last: Mapping[str, int], later: Mapping[int, float], sizes: Sizes) -> None:
    """Adds the most at any time of the gradients of values. Each lives from the ``last`` use until its
    value's maker has used it, or until the weight gradient that waits for it if that is ``later``. Gradients
    of parameters stay."""
    grad = program.requires_grad
    wholes: dict[str, float] = {}
    until = {program.instructions[n].results[0]: max(floor(p), 0) for n, p in later.items()}
    for i in program.instructions:
        if i.op == "aten.cat":  # each is a view of the whole
            for part in i.inputs:
                wholes[part] = wholes.get(part, 0.0) + i.type.value.size_bytes
    coming: dict[Cut, Times] = {}
    for n, i in enumerate(program.instructions):
        for name, t in zip(i.results, i.types) if not i.is_leaf else ():
            if name is not None and name in grad:
                size = max(wholes.get(name, 0.0), t.value.size_bytes)
                there = coming.setdefault(t.cut, [])
                there += [(last.get(name, n) + 1, -size), (until.get(name, n), size)]
    _most_at_once(coming, sizes)


def _is_view(program: Program, i: Instruction) -> bool:
    """Whether a view is certain to be one: its source was made by an operator that writes in memory order."""
    if i.op != "aten.view":
        return False
    source = program.producers[i.inputs[0]]
    return source.op in IN_MEMORY_ORDER and source.results[0] == i.inputs[0]


def _may_copy(call: Call) -> bool:
    """Whether a product may keep a copy of an input, made to treat it as one batch of matrices."""
    return call.op == "aten.matmul" and len(call.outputs[0].shape) > 3


def _moved(program: Program, sizes: Sizes) -> None:
    """Adds what redistributions and their gradients hold until arrival, and the largest buffer for
    reordering."""
    at_once: Sizes = {}
    for i in program.instructions:
        if not i.is_redistribution:
            continue
        source, target = program.types[i.inputs[0]], i.type
        size = float(target.value.size_bytes)
        # a piece of a sum comes with the addends of all ranks
        if i.op == "reduce_scatter":
            _add(sizes, target.cut, program.world_size * size)
        elif DUAL_COLLECTIVE.get(i.op) == "reduce_scatter":
            _add(sizes, source.cut, program.world_size * size)
        for cut in (source.cut, target.cut, target.cut.whole):
            _add(sizes, cut, 2 * size)
            at_once[cut] = max(at_once.get(cut, 0.0), 2 * size)
    for cut, size in at_once.items():
        _add(sizes, cut, size)
