"""Sets of ranks in a joined program, and the names that say what belongs to which set.

A joined program is text like any other, so only names can say this. This module alone writes and reads them:
ratio ``m1.r0`` is the ratio ``r0`` of set 1, ratio ``m1`` is for values that all ranks of set 1 hold whole,
and value ``h.m1`` is its ``h``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...lang.ir import Program, support

SHARED = "m"  # the ratio of values that all sets hold, if some ranks belong to no set
RATIO = re.compile(r"m(\d+)(?:\.(.+))?")


@dataclass(frozen=True, slots=True)
class Member:
    """A set of a joined program, identified by its number there."""

    number: int

    def __str__(self) -> str:
        return f"m{self.number}"

    def ratio(self, own: str | None) -> str:
        """The name, in the joined program, of a ratio of the set; without one, that of the whole set."""
        return str(self) if own is None else f"{self}.{own}"

    def value(self, own: str) -> str:
        """The name, in the joined program, of a value of the set."""
        return f"{own}.{self}"

    def own(self, value: str) -> str:
        """The name, within the set, of one of its values; any other name is returned unchanged."""
        return value.removesuffix(f".{self}")

    def region(self, own: int, num_sets: int) -> int:
        """The number of a rematerialised region of the set: no two sets have one in common, because no rank
        rematerialises for another."""
        return own * num_sets + self.number

    def own_region(self, region: int, num_sets: int) -> int:
        return region // num_sets


@dataclass(frozen=True, slots=True)
class SetScope:
    """The scope of a ratio of one set: the set, and the ratio's name there; None for the whole set."""

    member: Member
    own: str | None


def scope_of(ratio: str) -> SetScope | None:
    """The scope expressed by the name of a ratio of a joined program; None if it is not a ratio of one
    set."""
    match = RATIO.fullmatch(ratio)
    return None if match is None else SetScope(Member(int(match[1])), match[2])


def members_of(program: Program) -> tuple[Member, ...]:
    """The sets of a joined program, which share no rank, in order; empty for any other program."""
    numbers = {scope.member.number for name, _ in program.ratios if (scope := scope_of(name)) is not None}
    members = tuple(map(Member, range(len(numbers))))
    wholes = [program.ratio_of.get(member.ratio(None)) for member in members]
    ranks = [rank for whole in wholes if whole is not None for rank in support(whole)]
    is_joined = len(members) > 1 and None not in wholes and len(ranks) == len(set(ranks))
    return members if is_joined else ()


def is_joined(program: Program) -> bool:
    return bool(members_of(program))
