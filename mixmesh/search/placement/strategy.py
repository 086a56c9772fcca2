"""Op groups on devices: the choices for each group, and all choices together as a program.

HeteroG (CoNEXT'20, section 4.1.2) lets a group of operators run on one device, or replicated on all of them,
evenly or in proportion to their speed, with its gradients summed by AllReduce or by a parameter server. TAG
(TPDS'23) allows any set of device groups instead of all. Here a choice is a ratio over all ranks, zeros for
those outside, and a way to synchronise gradients; shares cut the batch into whole samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from ...base.lazy import lazy
from ...cost import CostModel
from ...errors import InputError
from ...lang.ir import (
    Program,
    Ratio,
    batch_size_of,
    make_ratio,
    ratio_of_speeds,
    shard_sizes,
    support,
)
from .lower import SYNCS, Placed, even_over, lower

# with up to this many device groups every subset is a choice; with more only the fastest ones
MAX_SUBSETS_OF = 4


@dataclass(frozen=True)
class Group:
    """Operators that are placed together, in order, by the names of their first results.

    ``forward`` and ``backward``: per device class, fixed seconds and the further seconds of the whole batch.
    For the whole batch, ``kept_bytes`` are kept for the backward pass, and ``passing_bytes`` is the most that
    one operator holds temporarily in it.
    """

    nodes: tuple[str, ...]
    params: tuple[str, ...]
    param_bytes: int
    forward: tuple[tuple[float, float], ...]
    backward: tuple[tuple[float, float], ...]
    kept_bytes: int = 0
    passing_bytes: int = 0

    @property
    def seconds(self) -> tuple[float, ...]:
        """The seconds of the whole batch on each device class, forward and backward."""
        return tuple(sum(f) + sum(b) for f, b in zip(self.forward, self.backward))


@dataclass(frozen=True)
class Value:
    """A value that goes from one group to others: its bytes for the whole batch, and whether a gradient of
    the same size comes back."""

    source: int
    targets: tuple[int, ...]
    size_bytes: int
    gradient: bool


@dataclass(frozen=True)
class Edge:
    """All values that go from one group to another; with ``gradient``, some have a gradient that comes
    back."""

    source: int
    target: int
    size_bytes: int
    gradient: bool


@dataclass(frozen=True)
class Grouping:
    """Groups in topological order: values go from lower to higher numbers."""

    groups: tuple[Group, ...]
    values: tuple[Value, ...]

    @lazy
    def edges(self) -> tuple[Edge, ...]:
        """The values between each two groups together."""
        between: dict[tuple[int, int], list[Value]] = {}
        for value in self.values:
            for target in value.targets:
                between.setdefault((value.source, target), []).append(value)
        return tuple(
            Edge(*ends, sum(v.size_bytes for v in values), any(v.gradient for v in values))
            for ends, values in sorted(between.items())
        )

    @lazy
    def group_of(self) -> dict[str, int]:
        """The group of every operator, by name. Operators that depend neither on inputs nor on parameters
        have none."""
        return {name: k for k, group in enumerate(self.groups) for name in group.nodes}


@dataclass(frozen=True)
class Action:
    """A choice for a group. ``device_groups`` are the numbers of the participating ones, ``shares`` is
    "even", "proportional" or "single" (one device)."""

    device_groups: tuple[int, ...]
    shares: str
    placed: Placed


class Space:
    """All strategies of one model on one cluster.

    ``program`` is the model with data parallelism on all devices (``baselines.data_parallel``): a group cuts
    every value between its own devices in the same way. Raises InputError for the groups of another model.
    """

    def __init__(self, program: Program, costs: CostModel, grouping: Grouping) -> None:
        self.program, self.costs, self.grouping = program, costs, grouping
        self.groups = grouping.groups
        self.device_groups = device_groups(costs)
        self._actions: dict[int, tuple[Action, ...]] = {}
        unknown = [name for name in grouping.group_of if name not in program.producers]
        if unknown:
            raise InputError(
                "the groups are those of another model",
                expected=f"operators of {program.name}",
                got=f"%{unknown[0]}",
            )

    @lazy
    def batch(self) -> int:
        """Samples in the batch; shares are whole numbers of them."""
        return batch_size_of(i.type.value for i in self.program.batch_inputs) or 1000

    @lazy
    def proportional(self) -> Ratio:
        """Shares of all devices by their speed on the whole model. All groups use them, so that those on the
        same devices cut alike and nothing moves between them."""
        classes = range(len(self.costs.classes))
        seconds = [sum(g.seconds[c] for g in self.groups) for c in classes]
        of_ranks = [seconds[c] for c in self.costs.class_of]
        return ratio_of_speeds(of_ranks, range(len(of_ranks)))

    @lazy
    def subsets(self) -> tuple[tuple[int, ...], ...]:
        """Sets of device groups, the full set first."""
        count = len(self.device_groups)
        if count <= MAX_SUBSETS_OF:
            sizes = range(count, 0, -1)
            return tuple(s for size in sizes for s in combinations(range(count), size))
        speed = [sum(self.proportional[r] for r in ranks) for ranks in self.device_groups]
        fastest = sorted(range(count), key=lambda g: -speed[g])
        sets = [tuple(sorted(fastest[:size])) for size in range(count, 0, -1)]
        return tuple(dict.fromkeys((*sets, *((g,) for g in range(count)))))

    @lazy
    def shared(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], str, Ratio], ...]:
        """Ways to divide the batch between several ranks, each as (device groups, ranks, shares, ratio).
        Ratios that give the same whole samples count as one, named "even"."""
        groups = []
        for subset in self.subsets:
            ranks = tuple(sorted(r for g in subset for r in self.device_groups[g]))
            ratios = {"proportional": self.shares(ranks), "even": self.even(ranks)}
            by_samples = {shard_sizes(self.batch, ratio): name for name, ratio in ratios.items()}
            if len(ranks) > 1:
                names = sorted(by_samples.values())
                groups += [(subset, ranks, name, ratios[name]) for name in names]
        return tuple(groups)

    def actions(self, k: int) -> tuple[Action, ...]:
        """The choices for group ``k``, each once. A group without parameters has nothing to synchronise."""
        if k not in self._actions:
            syncs = SYNCS if self.groups[k].param_bytes else SYNCS[:1]
            self._actions[k] = tuple(self._choices(k, syncs))
        return self._actions[k]

    def _choices(self, k: int, syncs: Sequence[str]):
        for subset, ranks, shares, ratio in self.shared:
            for sync in syncs:
                root = self.root(ranks, k) if sync == "ps" else None
                yield Action(subset, shares, Placed(ratio, sync, root))
        for g, ranks in enumerate(self.device_groups):
            for rank in ranks:
                yield Action((g,), "single", Placed(self.even((rank,))))

    def even(self, ranks: Sequence[int]) -> Ratio:
        return even_over(ranks, self.program.world_size)

    def shares(self, ranks: Sequence[int]) -> Ratio:
        return make_ratio([s if r in ranks else 0.0 for r, s in enumerate(self.proportional)])

    def root(self, ranks: Sequence[int], k: int) -> int:
        """The server of group ``k``: groups take turns among the ranks with the widest link to other
        machines."""
        cluster = self.costs.cluster
        width = {r: cluster.machines[cluster.machine_index_of(r)].nic_bytes_per_s for r in ranks}
        best = [r for r in ranks if width[r] == max(width.values())]
        return best[k % len(best)]

    def lower(self, actions: Sequence[Action | Placed]) -> Program:
        """The program of one choice per group. Raises InputError for another number of choices."""
        if len(actions) != len(self.groups):
            raise InputError(
                "a strategy has one choice for each group",
                expected=f"{len(self.groups)} choices",
                got=f"{len(actions)}",
            )
        placed = [a.placed if isinstance(a, Action) else a for a in actions]
        return lower(self.program, {name: placed[k] for name, k in self.grouping.group_of.items()})


def device_groups(costs: CostModel) -> tuple[tuple[int, ...], ...]:
    """Groups of equal devices of one machine, as ranks."""
    ranks_of: dict[tuple[int, int], list[int]] = {}
    for rank, kind in enumerate(costs.class_of):
        ranks_of.setdefault((costs.cluster.machine_index_of(rank), kind), []).append(rank)
    return tuple(map(tuple, ranks_of.values()))


def used_ranks(actions: Sequence[Action]) -> tuple[int, ...]:
    """The ranks that take part in any group."""
    return tuple(sorted({r for a in actions for r in support(a.placed.ratio)}))
