"""Groups ranks that do the same."""

from __future__ import annotations

from collections.abc import Hashable, Iterable


class Alike:
    """Groups ranks by kind: ranks of one kind do the same at the same times, so that one clock serves for all
    of them. ``kinds`` has a key for each rank."""

    def __init__(self, kinds: Iterable[Hashable]) -> None:
        numbers: dict[Hashable, int] = {}
        self.kind_of = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
        firsts = [-1] * len(numbers)
        for rank, kind in enumerate(self.kind_of):
            if firsts[kind] < 0:
                firsts[kind] = rank
        self.firsts = tuple(firsts)  # for each kind, its first rank
        self._kinds: dict[tuple[int, ...], tuple[int, ...]] = {}

    def of(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The kinds of some ranks."""
        kinds = self._kinds.get(ranks)  # only once: hashing many ranks takes long
        if kinds is None:
            kinds = self._kinds[ranks] = tuple(dict.fromkeys([self.kind_of[r] for r in ranks]))
        return kinds

    def ranks(self, kinds: Iterable[int]) -> tuple[int, ...]:
        wanted = set(kinds)
        return tuple(r for r, kind in enumerate(self.kind_of) if kind in wanted)


def membership(groups: Iterable[tuple[int, ...]], world_size: int) -> list[tuple[int, ...]]:
    """For each rank, the groups in which it is."""
    groups_of: list[list[int]] = [[] for _ in range(world_size)]
    for number, ranks in enumerate(groups):
        for r in ranks:
            groups_of[r].append(number)
    return list(map(tuple, groups_of))
