"""Costs of the instructions of a program: the shares of work, times and collectives that simulator, LP
and report all read.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from ..cluster import Cluster
from ..ir import (
    Cut,
    Instruction,
    Partial,
    Placement,
    Program,
    Ratio,
    Replicate,
    Shard,
    TensorType,
    cells,
    dual,
    owned_type,
    region_of,
    shard_sizes,
    support,
    wgrad_of,
)
from ..lazy import lazy
from ..rules import call_of
from .calls import kinds_of
from .collectives import DIRECT, LEVELLED, CollectiveFit, level_fits
from .curve import ZERO
from .micro_steps import Part, scaled
from .model import CostModel, OpTime
from .resources import Link, Sent, link_s_per_byte, sent_s_per_byte

# the redistribution that a redistribution's gradient is, by name
ROOTED = {"all_gather": "broadcast", "reduce_scatter": "reduce"}
DUAL_COLLECTIVE = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "move": "move"}


def held_share(program: Program, t: TensorType, rank: int) -> float:
    """The share of a tensor that a rank holds, by integer sizes; 0 if it takes no part."""
    ratio = program.ratio(t.ratio)
    if ratio is not None and ratio[rank] == 0:
        return 0.0
    if not isinstance(t.placement, Shard):
        return 1.0
    return _shares(t.value.shape[t.placement.dim], ratio, t.placement.unit)[rank]


@lru_cache(maxsize=65536)
def _shares(size: int, ratio, unit: int) -> tuple[float, ...]:
    if size == 0:
        return (0.0,) * len(ratio)
    return tuple(n / size for n in shard_sizes(size, ratio, unit))


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective of a program: its name, the whole tensor's bytes, and the ranks that meet. Where the
    ratio changes, what ranks have ``sent`` each other. Where one rank holds all of what is gathered or
    scattered it is ``rooted``: a broadcast or a reduce. A sum may be ``levelled``: within machines first; or
    ``direct``: each rank sends its addend to each other one."""

    name: str
    size_bytes: int
    ranks: tuple[int, ...]
    sent: Sent | None = None
    rooted: bool = False
    levelled: bool = False
    direct: bool = False

    @property
    def performed(self) -> str:
        """The collective that is performed."""
        if self.levelled:
            return LEVELLED[self.name]
        if self.direct:
            return DIRECT
        return ROOTED[self.name] if self.rooted else self.name

    def seconds(self, costs: CostModel) -> float:
        if len(self.ranks) < 2 or self.sent == ():
            return 0.0
        name, ranks, size_bytes = self.as_measured(costs.cluster)
        return costs.collective(name, ranks).seconds(size_bytes)

    def as_measured(self, cluster: Cluster) -> tuple[str, tuple[int, ...], float]:
        """The collective that takes as long: its name, between whom it is, and of how many bytes.

        The bytes that ranks have sent each other are scaled to what the fullest link carries, as a collective
        sends every pair as much. Where some ranks only send and the others only receive it is like one
        sending to another: links that are full both ways at once are slower.
        """
        if not self.sent:
            return self.performed, self.ranks, self.size_bytes
        load = max(self.link_s_per_byte(cluster).values())
        if self.is_one_way:
            a, b, _ = max(self.sent, key=lambda pair: pair[2])
            usual = max(sent_s_per_byte(cluster, ((a, b, 1.0),)).values())
            return "send", (a, b), self.size_bytes * load / usual
        usual = max(self.link_s_per_byte(cluster, usual=True).values())
        return self.performed, self.ranks, self.size_bytes * load / usual

    @property
    def is_one_way(self) -> bool:
        """Whether nobody both sends and receives."""
        return bool(self.sent) and not {a for a, _, _ in self.sent} & {b for _, b, _ in self.sent}

    def lag_s(self, costs: CostModel) -> float:
        """Seconds of these in which others of its kind may go on: the stages of sums by levels overlap, and
        the longest one is what a sum takes of the next. Where they were measured nothing is said of that: a
        processor's time for one is not the other's."""
        if not self.levelled or not isinstance(costs.collective(self.performed, self.ranks), CollectiveFit):
            return 0.0
        stages = [f.seconds(self.size_bytes) for f in level_fits(costs.cluster, self.name, self.ranks)]
        return self.seconds(costs) * (1 - max(stages) / sum(stages))

    def link_s_per_byte(self, cluster: Cluster, *, usual: bool = False) -> dict[Link, float]:
        """Seconds for which it occupies each link, per byte of the whole tensor."""
        if self.sent is not None and not usual:
            return sent_s_per_byte(cluster, self.sent)
        return link_s_per_byte(cluster, self.performed, self.ranks)


def exchange_of(program: Program, i: Instruction, *, backward: bool = False) -> Exchange | None:
    """The collective that a redistribution issues forward, or in the backward pass; None if it is local.

    The one step of the runtime's ``route`` between the two layouts that communicates: no route has more.
    """
    if not i.is_redistribution:
        return None
    before, after = program.types[i.inputs[0]], i.type
    held, wanted = program.participants(before), program.participants(after)
    if backward:
        name, ranks = _meeting(dual(after.placement), wanted, dual(before.placement), held)
    else:
        name, ranks = _meeting(before.placement, held, after.placement, wanted)
    size_bytes = after.value.size_bytes
    if len(ranks) < 2 or (size_bytes == 0 and name != "all_to_all"):
        return None
    if name == "all_to_all" and is_cut_alike(program, before, after):
        return None
    sent = None
    if name == "all_to_all" and before.ratio != after.ratio:
        a, b = (after, before) if backward else (before, after)
        sent = sent_between(_pieces(program, a), _pieces(program, b), a.placement.dim == b.placement.dim)
    owners = wanted if backward == (name == "all_gather") else held
    rooted = name in ROOTED and len(owners) == 1
    direct = name == "all_reduce" and program.sums_directly(size_bytes)
    return Exchange(name, size_bytes, ranks, sent, rooted=rooted, direct=direct)


def _pieces(program: Program, t: TensorType) -> tuple[float, ...]:
    return _shares(t.value.shape[t.placement.dim], program.ratio(t.ratio), t.placement.unit)


@lru_cache(maxsize=4096)
def sent_between(src: tuple[float, ...], dst: tuple[float, ...], same_dim: bool = True) -> Sent:
    """How much passes between two ranks where pieces of these shares become those."""
    found = []
    starts, ends = [(0.0, *accumulate(shares)) for shares in (src, dst)]
    for a, held in enumerate(src):
        for b, wanted in enumerate(dst):
            share = held * wanted
            if same_dim:
                share = min(starts[a + 1], ends[b + 1]) - max(starts[a], ends[b])
            if a != b and share > 1e-9:
                found.append((a, b, share))
    return tuple(found)


@lru_cache(maxsize=4096)
def _meeting(
    src: Placement, held: tuple[int, ...], dst: Placement, wanted: tuple[int, ...]
) -> tuple[str, tuple[int, ...]]:
    """The collective from ``src`` on the ranks ``held`` to ``dst`` on those ``wanted``, and who meets."""
    everyone = tuple(sorted({*held, *wanted}))
    missing, leaving = set(wanted) - set(held), set(held) - set(wanted)
    match src, dst:
        case Shard(), Replicate():
            return "all_gather", everyone
        case Partial(), Shard():
            return "reduce_scatter", everyone
        case Partial(), Replicate():
            return "all_reduce", everyone
        case Shard(), Shard():
            return "all_to_all", everyone
        case ((Shard() | Partial()), Partial()):  # those that leave give their addends to one that stays
            return "reduce", tuple(sorted({wanted[0], *leaving})) if leaving else ()
        case Replicate(), Partial() if len(missing) < len(wanted):
            return "", ()  # a rank that holds it keeps it, the others hold zeros
        case Replicate(), _:
            return "broadcast", tuple(sorted({held[0], *missing})) if missing else ()
    raise AssertionError(f"{src} -> {dst}")


def is_cut_alike(program: Program, a: TensorType, b: TensorType) -> bool:
    """Whether two types of one tensor put the same pieces on the same ranks."""
    if a.placement != b.placement or not isinstance(a.placement, Shard):
        return False
    size, unit = a.value.shape[a.placement.dim], a.placement.unit
    one, two = program.ratio(a.ratio), program.ratio(b.ratio)
    return support(one) == support(two) and shard_sizes(size, one, unit) == shard_sizes(size, two, unit)


def first_uses(program: Program) -> dict[str, int]:
    """Index of the first instruction that uses each value."""
    out: dict[str, int] = {}
    for n, i in enumerate(program.instructions):
        for name in i.inputs:
            out.setdefault(name, n)
    return out


def op_time(program: Program, i: Instruction, costs: CostModel, device_class: int) -> OpTime:
    call = call_of(i, program.types)
    grads = sum(1 for name in dict.fromkeys(i.inputs) if name in program.requires_grad)
    cut = costs.cut(call, [program.types[name].placement for name in i.inputs])
    return costs.op(call, grads, device_class, cut)


def synchronised(program: Program, i: Instruction) -> bool:
    """Whether a parameter's gradient must be summed over ranks after the backward pass."""
    return (
        i.op == "param"
        and i.result in program.requires_grad
        and (
            i.args[0] in program.copies
            or (not isinstance(i.type.placement, Shard) and len(program.participants(i.type)) > 1)
        )
        and i.result not in program.factored
    )


def summed_params(program: Program) -> list[Instruction]:
    """The parameters whose gradients are summed after the backward pass; of copies the first, for all."""
    return [i for i in program.params if synchronised(program, i) and is_first(program, i)]


def is_first(program: Program, param: Instruction) -> bool:
    """Whether no earlier instruction loads the parameter."""
    copies = program.copies.get(param.args[0])
    return copies is None or copies[0].result == param.result


def is_stored(program: Program, i: Instruction) -> bool:
    """Whether a redistribution brings a parameter that is stored sharded: its gradient goes straight to
    the parameter, and is awaited at the end of the backward pass only."""
    source = program.producers[i.inputs[0]]
    return source.op == "param" and isinstance(source.type.placement, Shard)


def purpose_of(program: Program, i: Instruction) -> str:
    """The purpose of the process group of a redistribution: those that bring a parameter and take back its
    gradient have one of their own, as what is computed of samples need not wait for them."""
    return "parameter" if is_stored(program, i) else "data"


def is_resharded(program: Program, i: Instruction) -> bool:
    """Whether a gathered parameter is freed after its last use and gathered again (ZeRO-3)."""
    return i.op == "all_gather" and bool(i.attr("reshard", False)) and is_stored(program, i)


def cut_shares(cut: Cut, ratio: Ratio | None, world_size: int) -> tuple[float, ...]:
    """The share of a tensor cut so that each rank holds, by integer sizes."""
    size, unit, _ = cut
    if ratio is None:
        return (1.0,) * world_size
    if not size:
        return tuple(1.0 if share > 0 else 0.0 for share in ratio)
    return _shares(size, ratio, unit)


@dataclass(frozen=True, slots=True)
class Work:
    """Computations that cost alike: an operator's times per device class, and how its work is cut."""

    times: tuple[OpTime, ...]
    cut: Cut


class Sheet:
    """The costs of a program, whatever the values of its ratios and its buckets: made once, then read for
    many ratios. The ranks that take part must stay the same.
    """

    def __init__(self, program: Program, costs: CostModel, like: Sheet | None = None) -> None:
        """``like`` is of the same instructions on other ranks."""
        self.program, self.costs = program, costs
        self.world_size = program.world_size
        if like is not None:
            self.kinds, self.borders, self.ratio_names = like.kinds, like.borders, like.ratio_names
            self.works, self.work_of = like.works, like.work_of
            self.factor_work_of, self.again_work_of = like.factor_work_of, like.again_work_of
            self.wgrad_work_of = like.wgrad_work_of
            self.uses, self.flows, self.optimized = like.uses, like.flows, like.optimized
            self.pattern = self.pattern_of(program)
            return
        self.borders = tuple(i for i in program.instructions if _moves_borders(program, i))
        self.pattern = self.pattern_of(program)
        self.kinds = kinds_of(program)
        self.works: list[Work] = []
        self.work_of: dict[int, int] = {}  # index of a computation -> index of its work
        self.factor_work_of: dict[int, int] = {}  # a computation with sfb -> that of the weight's gradient
        self.again_work_of: dict[int, int] = {}  # a computation in a region -> its second run
        self.wgrad_work_of: dict[int, int] = {}  # a computation with wgrad -> that of the weight's gradient
        numbers: dict[tuple[int, Cut, str], int] = {}

        def number(times: int, cut: Cut, part: str, found: tuple[OpTime, ...]) -> int:
            known = numbers.setdefault((times, cut, part), len(self.works))
            if known == len(self.works):
                self.works.append(Work(found, cut))
            return known

        known: dict[tuple, int] = {}  # calls that cost alike
        times: list[tuple[OpTime, ...]] = []
        # by the identity of a kind, and what else an instruction says: its work, that of the factors, of a
        # second run
        works: dict[tuple[int, str, bool], tuple[int, int | None, int | None]] = {}
        for n, (i, kind) in enumerate(zip(program.instructions, self.kinds)):
            if kind is None:
                continue
            apart = "factors" if is_factored(i) else "wgrad" if wgrad_of(i) else ""
            key_of_work = (id(kind), apart, region_of(i) is not None)
            found = works.get(key_of_work)
            if found is None:
                call, grads = kind.call, kind.grads
                inputs_cut = costs.cut(call, [t.placement for t in kind.inputs])
                key = (i.plain, call.inputs, call.outputs, grads, inputs_cut)
                at = known.setdefault(key, len(times))
                if at == len(times):
                    times.append(
                        tuple(costs.op(call, grads, c, inputs_cut) for c in range(len(costs.classes)))
                    )
                cut = kind.work_type.cut
                if apart:
                    own, product = split_by_factors(program, i, times[at])
                    cut_too = cut if apart == "wgrad" else (0, 1, cut[2])  # factors are gathered whole
                    found = number(at, cut, "own", own), number(at, cut_too, apart, product)
                else:
                    found = (number(at, cut, "", times[at]), None)
                again = None
                if region_of(i) is not None:
                    second = tuple(OpTime(ZERO, t.forward) for t in times[at])
                    again = number(at, cut, "again", second)
                found = works[key_of_work] = (*found, again)
            self.work_of[n] = found[0]
            if found[1] is not None:
                (self.wgrad_work_of if apart == "wgrad" else self.factor_work_of)[n] = found[1]
            if found[2] is not None:
                self.again_work_of[n] = found[2]

    def with_owners(self, program: Program) -> Sheet:
        """The costs of the same program with other owners of its parameters."""
        made = copy(self)
        made.program, made.pattern = program, self.pattern_of(program)
        for known in ("optimized", "cuts"):  # which are of what owners step
            made.__dict__.pop(known, None)
        return made

    def pattern_of(self, program: Program) -> tuple:
        """The key of which collectives there are and between whom: the ranks that take part, and what
        changes of ratio move, and what copies of a parameter share."""
        shared = [cells(program, i[0]) for i in program.copies.values()]
        return (supports(program), *(exchange_of(program, i) for i in self.borders), *shared)

    @lazy
    def uses(self) -> dict[str, list[int]]:
        """Indices of the instructions that use each value."""
        out: dict[str, list[int]] = {}
        for n, i in enumerate(self.program.instructions):
            for name in dict.fromkeys(i.inputs):
                out.setdefault(name, []).append(n)
        return out

    @lazy
    def ratio_names(self) -> frozenset[str | None]:
        """That types name."""
        return frozenset(t.ratio for i in self.program.instructions for t in i.types)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that take part in everything; none where types name several ratios, or some of them none."""
        if len(self.ratio_names) != 1:
            return ()
        (name,) = self.ratio_names
        return support(self.program.ratio_of[name]) if name else tuple(range(self.world_size))

    @lazy
    def cuts(self) -> tuple[Cut, ...]:
        """How works, and what the optimizer steps over, are cut."""
        return tuple(dict.fromkeys((*(work.cut for work in self.works), *self.optimized)))

    @lazy
    def flows(self) -> tuple[bool, ...]:
        """Per instruction, whether the backward pass goes through it."""
        grad = self.program.requires_grad
        return tuple(any(r in grad for r in i.results) for i in self.program.instructions)

    @lazy
    def optimized(self) -> dict[Cut, int]:
        """Bytes of trainable parameters, by how they are cut."""
        out: dict[Cut, int] = {}
        for i in self.program.params:
            if i.result in self.program.requires_grad:
                cut = (owned_type(self.program, i) or i.type).cut
                out[cut] = out.get(cut, 0) + i.type.value.size_bytes
        return out

    @lazy
    def gradients(self) -> dict[Cut, int]:
        """Bytes of the gradients that micro-steps add up, by how they are cut."""
        out: dict[Cut, int] = {}
        for i in self.program.params:
            if i.result in self.program.requires_grad:
                out[i.type.cut] = out.get(i.type.cut, 0) + i.type.value.size_bytes
        return out

    @lazy
    def exchanges(self) -> dict[tuple[str, bool], Exchange | None]:
        """By the result of a redistribution, and whether it is in the backward pass."""
        out: dict[tuple[str, bool], Exchange | None] = {}
        known: dict[tuple[TensorType, TensorType], tuple[Exchange | None, Exchange | None]] = {}
        by_identity: dict[tuple[int, int], tuple[Exchange | None, Exchange | None]] = {}
        types = self.program.types
        for i in self.program.instructions:
            if i.is_redistribution:
                ends = types[i.inputs[0]], i.type
                found = by_identity.get((id(ends[0]), id(ends[1])))
                if found is None:
                    if ends not in known:
                        known[ends] = tuple(exchange_of(self.program, i, backward=b) for b in (False, True))
                    found = by_identity[id(ends[0]), id(ends[1])] = known[ends]
                out[i.result, False], out[i.result, True] = found
        return out

    def shares(self, cut: Cut, program: Program, part: Part = None) -> tuple[float, ...]:
        """Shares of what is cut so; in a micro-step, in which ranks take this ``part`` of their samples."""
        return scaled(cut_shares(cut, program.ratio(cut[2]), self.world_size), cut[2], part)

    def seconds(
        self,
        program: Program,
        *,
        whole: bool = True,
        ranks: Sequence[int] | None = None,
        part: Part = None,
    ) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
        """Seconds of every work on every rank, or on ``ranks``, under the ratios of ``program``, forward and
        backward; if not ``whole``, as if a tensor could be cut within an element. ``part`` is that of a
        micro-step."""
        class_of = self.costs.class_of
        ranks = range(self.world_size) if ranks is None else ranks
        known: dict[tuple, tuple[float, float]] = {}
        forward, backward = [], []
        for n, work in enumerate(self.works):
            pairs = []
            ratio = program.ratio(work.cut[2])
            shares = self.shares(work.cut, program, part) if whole or not work.cut[0] else ratio
            for rank in ranks:
                share = shares[rank]
                key = (n, class_of[rank], share)
                if key not in known:
                    time = work.times[class_of[rank]]
                    known[key] = (time.forward.at(share), time.backward.at(share))
                pairs.append(known[key])
            forward.append(tuple(f for f, _ in pairs))
            backward.append(tuple(b for _, b in pairs))
        return forward, backward

    def optimizer_s(self, program: Program) -> tuple[float, ...]:
        """Seconds of the optimizer's step on every rank."""
        held = self.held_bytes(self.optimized, program)
        return tuple(self.costs.optimizer_s(rank, size) for rank, size in enumerate(held))

    def accumulation_s(self, program: Program) -> tuple[float, ...]:
        """Seconds in which every rank adds the gradients of a micro-step to those of earlier ones."""
        held = self.held_bytes(self.gradients, program)
        return tuple(self.costs.accumulation_s(rank, size) for rank, size in enumerate(held))

    def held_bytes(self, sizes: dict[Cut, float], program: Program) -> list[float]:
        """Bytes on every rank of values with these unsharded ``sizes``."""
        out = [0.0] * self.world_size
        for cut, size in sizes.items():
            for rank, share in enumerate(self.shares(cut, program)):
                out[rank] += size * share
        return out


def _moves_borders(program: Program, i: Instruction) -> bool:
    """Whether a redistribution cuts by another ratio what is cut already."""
    if not i.is_redistribution:
        return False
    ends = program.types[i.inputs[0]], i.type
    return all(isinstance(t.placement, Shard) for t in ends) and ends[0].ratio != ends[1].ratio


def is_factored(i: Instruction) -> bool:
    return bool(i.attrs) and bool(i.attr("sfb", False))


def split_by_factors(
    program: Program, i: Instruction, times: tuple[OpTime, ...]
) -> tuple[tuple[OpTime, ...], tuple[OpTime, ...]]:
    """Times of a product whose weight's gradient is apart: those of the rest, and those of that gradient. Of
    two products in the backward pass one is the weight's."""
    share = 0.5 if i.inputs[0] in program.requires_grad else 0.0
    own = tuple(OpTime(t.forward, t.backward.scaled(share) if share else ZERO) for t in times)
    return own, tuple(OpTime(ZERO, t.backward.scaled(1 - share)) for t in times)


def supports(program: Program) -> tuple[tuple[int, ...], ...]:
    return tuple(support(ratio) for _, ratio in program.ratios)
