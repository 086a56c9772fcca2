"""The collectives of a program: which collective a change of placement is, between which ranks, and how many
bytes it moves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from ..cluster import Cluster
from ..lang.ir import (
    Cut,
    Instruction,
    Partial,
    Placement,
    Program,
    Ratio,
    Replicate,
    Shard,
    TensorType,
    dual,
    is_even,
    shard_sizes,
    support,
)
from .collectives import CollectiveFit, level_fits
from .model import CostModel
from .names import DIRECT, LEVELLED
from .resources import Link, Sent, link_s_per_byte, sent_s_per_byte

# maps the name of a redistribution to that of its gradient
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
    """A collective of a program: its name, the bytes of the whole tensor, and the ranks that communicate. If
    the ratio changes, ``sent`` is what ranks send each other. ``rooted``: one rank holds all of what is
    gathered or scattered, so it is a broadcast or a reduce. A sum may be ``levelled``, within machines first,
    or ``direct``, each rank sending its addend to each other one. It may be of several tensors, ``joined``
    into one buffer first. Pieces are in proportion to the ranks' speeds, unless they are ``even``."""

    name: str
    size_bytes: int
    ranks: tuple[int, ...]
    sent: Sent | None = None
    rooted: bool = False
    levelled: bool = False
    direct: bool = False
    joined: bool = False
    even: bool = False

    @property
    def performed(self) -> str:
        """The name of the collective that is actually performed."""
        if self.levelled:
            return LEVELLED[self.name]
        if self.direct:
            return DIRECT
        return ROOTED[self.name] if self.rooted else self.name

    def seconds(self, costs: CostModel) -> float:
        if len(self.ranks) < 2 or self.sent == ():
            return 0.0
        name, ranks, size_bytes = self.as_measured(costs.cluster)
        return costs.collective(name, ranks).seconds(size_bytes, 1.0 if self.even else None)

    def as_measured(self, cluster: Cluster) -> tuple[str, tuple[int, ...], float]:
        """The measured collective that is assumed to take as long: its name, ranks and bytes.

        A measured collective sends the same amount between all pairs, so the bytes are scaled to the load of
        the fullest link. If some ranks only send and the others only receive, it is like one rank sending to
        another: links that are full in both directions at once are slower.
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
        """Whether no rank both sends and receives."""
        sent = self.sent or ()
        return bool(sent) and not {a for a, _, _ in sent} & {b for _, b, _ in sent}

    def lag_s(self, costs: CostModel) -> float:
        """Seconds of this sum during which others of its kind may already run: the stages of hierarchical
        sums overlap, so a sum delays the next only by its longest stage. 0 if it was measured, because CPU
        time used by one sum is not available to another."""
        if not self.levelled or not isinstance(costs.collective(self.performed, self.ranks), CollectiveFit):
            return 0.0
        stages = [f.seconds(self.size_bytes) for f in level_fits(costs.cluster, self.name, self.ranks)]
        return self.seconds(costs) * (1 - max(stages) / sum(stages))

    def link_s_per_byte(self, cluster: Cluster, *, usual: bool = False) -> dict[Link, float]:
        """Seconds for which the exchange occupies each link, per byte of the whole tensor."""
        if self.sent is not None and not usual:
            return sent_s_per_byte(cluster, self.sent)
        return link_s_per_byte(cluster, self.performed, self.ranks)


def exchange_of(program: Program, i: Instruction, *, backward: bool = False) -> Exchange | None:
    """The collective that a redistribution issues in the forward or the backward pass; None if it is local.

    It is the one step that communicates in the runtime's ``route`` between the two layouts: no route has
    more.
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
        sent = sent_between(_pieces(program, a), _pieces(program, b), a.shard.dim == b.shard.dim)
    owners = wanted if backward == (name == "all_gather") else held
    rooted = name in ROOTED and len(owners) == 1
    direct = name == "all_reduce" and program.sums_directly(size_bytes)
    even = name in ROOTED and any(is_cut_evenly(program, t) for t in (before, after))
    return Exchange(name, size_bytes, ranks, sent, rooted=rooted, direct=direct, even=even)


def is_cut_evenly(program: Program, t: TensorType) -> bool:
    """Whether a tensor is cut into equal pieces for all ranks of the program."""
    ratio = program.ratio(t.ratio)
    return isinstance(t.placement, Shard) and ratio is not None and is_even(ratio)


def _pieces(program: Program, t: TensorType) -> tuple[float, ...]:
    return _shares(t.value.shape[t.shard.dim], program.ratio(t.ratio), t.shard.unit)


@lru_cache(maxsize=4096)
def sent_between(src: tuple[float, ...], dst: tuple[float, ...], same_dim: bool = True) -> Sent:
    """The amounts that ranks send each other to turn pieces of shares ``src`` into pieces of shares
    ``dst``."""
    transfers = []
    starts, ends = [(0.0, *accumulate(shares)) for shares in (src, dst)]
    for a, held in enumerate(src):
        for b, wanted in enumerate(dst):
            share = held * wanted
            if same_dim:
                share = min(starts[a + 1], ends[b + 1]) - max(starts[a], ends[b])
            if a != b and share > 1e-9:
                transfers.append((a, b, share))
    return tuple(transfers)


@lru_cache(maxsize=4096)
def _meeting(
    src: Placement, held: tuple[int, ...], dst: Placement, wanted: tuple[int, ...]
) -> tuple[str, tuple[int, ...]]:
    """The collective from ``src`` on the ranks ``held`` to ``dst`` on the ranks ``wanted``, and the ranks
    that take part in it."""
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
        case ((Shard() | Partial()), Partial()):  # leaving ranks give their addends to a remaining one
            return "reduce", tuple(sorted({wanted[0], *leaving})) if leaving else ()
        case Replicate(), Partial() if len(missing) < len(wanted):
            return "", ()  # one rank that holds it keeps it, the others hold zeros
        case Replicate(), _:
            return "broadcast", tuple(sorted({held[0], *missing})) if missing else ()
    raise AssertionError(f"{src} -> {dst}")


def is_cut_alike(program: Program, a: TensorType, b: TensorType) -> bool:
    """Whether two types of a tensor put equal pieces on each rank."""
    if a.placement != b.placement or not isinstance(a.placement, Shard):
        return False
    size, unit = a.value.shape[a.placement.dim], a.placement.unit
    one, two = program.ratio(a.ratio), program.ratio(b.ratio)
    return support(one) == support(two) and shard_sizes(size, one, unit) == shard_sizes(size, two, unit)


def cut_shares(cut: Cut, ratio: Ratio | None, world_size: int) -> tuple[float, ...]:
    """The share of a tensor that each rank holds under a cut, with sizes rounded to integers."""
    if ratio is None:
        return (1.0,) * world_size
    if not cut.size:
        return tuple(1.0 if share > 0 else 0.0 for share in ratio)
    return _shares(cut.size, ratio, cut.unit)
