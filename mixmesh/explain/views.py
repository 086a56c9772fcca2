"""Asks the question about a tensor in the form that suits each of three kinds of plans.

A plan over one ratio is searched as a whole. For a plan with several ratios (stages, segments, groups of
operators), the search uses the ratio of the tensor's operator; operators under other ratios stay as they are,
and both parts are lowered again. For a plan with a program per machine, the search is over the program of
that machine, and its result is joined with the others.

A placement may name the part of the plan where it holds: ``S(0)@r1`` under the ratio r1, ``R@m0`` in machine
0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..base.lazy import lazy
from ..cost import CostModel
from ..errors import InputError
from ..lang.ir import REPLICATE, Placement, Program, Ratio, even_ratio, support
from ..lang.optimizer_states import OptimizerStates
from ..passes.zero import stored_by_owners
from ..planner.two_level import PRICES
from ..search.baselines import fully_sharded
from ..search.placement.join import join
from ..search.placement.lift import lifted, operator_name, placed_of, ratios_of
from ..search.placement.lower import Placed, lower
from ..search.placement.sets import is_joined, members_of
from ..search.placement.split import split
from .names import find_tensor, in_all_layers
from .places import ROWS, Place, Search, held_as


class View(ABC):
    """A tensor of a plan. ``tensors`` are the tensor and its counterparts in other layers; ``values`` are its
    values in the plan's program, one for every machine in question."""

    tensors: tuple[str, ...]
    values: tuple[str, ...]
    places: tuple[Place, ...]
    nothing = "no program of the whole model has it so"

    @property
    @abstractmethod
    def own(self) -> tuple[Placement, ...]:
        """The plan's own placement of the tensor, by place."""

    def forced(self, placement: Placement) -> tuple[Placement, ...]:
        """The placements to force for ``placement``; a place where it is impossible keeps its own."""
        return tuple(placement if place.possible(placement) else place.own for place in self.places)

    def text(self, placements: Sequence[Placement]) -> str:
        """A placement in words."""
        return str(placements[0])

    def impossible(self, placement: Placement) -> str:
        """The reason why no program has the placement; empty if one may have it."""
        if any(place.possible(placement) for place in self.places):
            return ""
        return next(filter(None, (place.impossible(placement) for place in self.places)))

    @abstractmethod
    def programs(self, placements: tuple[Placement, ...]) -> Iterator[Program]:
        """Yields whole programs with these placements: at every price, and stored in rows."""

    def in_shards(self, program: Program) -> Program | None:
        """The program with all other parameters stored in shards; None if that is not tried here."""
        return None

    def elsewhere(self) -> Iterator[tuple[str, Program]]:
        """Yields programs with the tensor's operator on other ranks of the plan, each with its placement
        there."""
        yield from ()


def view_of(
    program: Program, costs: CostModel, tensor: str, all_layers: bool, optimizer_states: OptimizerStates
) -> View:
    """Makes the view for this kind of plan. Raises InputError for a tensor that is not there, and for a
    program with copies that no planner makes."""
    if is_joined(program):
        return Joined(program, costs, tensor, all_layers, optimizer_states)
    if program.copies:
        raise InputError(
            "alternatives are searched in plans as planners make them",
            expected="parameters with copies in a plan of two levels, with ratios m0, m1, ...",
            got=f"ratios {', '.join(name for name, _ in program.ratios)}",
        )
    name = find_tensor(program, tensor)
    names = in_all_layers(program.graph, name) if all_layers else (name,)
    names = (name, *(other for other in names if other != name))
    kind = Lowered if len(set(ratios_of(program).values())) > 1 else Flat
    return kind(program, costs, names, optimizer_states)


class Flat(View):
    """A plan over one ratio."""

    def __init__(
        self, program: Program, costs: CostModel, names: tuple[str, ...], optimizer_states: OptimizerStates
    ) -> None:
        self.program, self.tensors, self.values = program, names, names[:1]
        ratios = [*ratios_of(program).values(), *(ratio for _, ratio in program.ratios)]
        ratio = next(iter(ratios), even_ratio(program.world_size))
        self.place = Place(program, ratio, names, Search(costs, optimizer_states))
        self.places = (self.place,)

    @property
    def own(self) -> tuple[Placement, ...]:
        return (self.place.own,)

    def programs(self, placements: tuple[Placement, ...]) -> Iterator[Program]:
        yield from self.place.searched(*placements).values()
        yield from self.place.stored(*placements).values()

    def in_shards(self, program: Program) -> Program | None:
        rest = {p.result for p in self.place.graph.params} - set(self.place.names)
        return fully_sharded(program, rest)


class Lowered(View):
    """A plan with operators under several ratios. The search uses that of the tensor's operator; for a leaf,
    of the first operator that uses it."""

    nothing = "where ratios meet, a leaf is loaded as its operators take it"

    def __init__(
        self, program: Program, costs: CostModel, names: tuple[str, ...], optimizer_states: OptimizerStates
    ) -> None:
        self.program, self.values = program, names[:1]
        self.graph = program.graph
        self.ratios = ratios_of(program)
        first = self.operators_of(names[0])
        self.ratio = next((self.ratios[o] for o in first if o in self.ratios), program.shares)
        # counterparts in layers under other ratios keep their placements
        names = tuple(n for n in names if n == names[0] or self.ratio in self.ratios_of(n))
        self.tensors = names
        others = [n for n in self.graph.nodes if self.ratios.get(operator_name(n)) != self.ratio]
        fixed = frozenset(r for n in others if not n.is_leaf for r in n.results if r is not None)
        self.place = Place(program, self.ratio, names, Search(costs, optimizer_states, fixed=fixed))
        self.places = (self.place,)

    def operators_of(self, name: str) -> list[str]:
        """The operator that makes a value, or for a leaf the operators that use it."""
        node = self.graph.producers[name]
        if not node.is_leaf:
            return [operator_name(node)]
        return [operator_name(n) for n in self.graph.nodes if name in n.inputs and not n.is_sink]

    def ratios_of(self, name: str) -> set[Ratio]:
        return {self.ratios[o] for o in self.operators_of(name) if o in self.ratios}

    @property
    def own(self) -> tuple[Placement, ...]:
        return (self.place.own,)

    def text(self, placements: Sequence[Placement]) -> str:
        return f"{placements[0]}@{self.name_of(self.ratio)}"

    def name_of(self, ratio: Ratio) -> str:
        return next(name for name, r in self.program.ratios if r == ratio)

    def impossible(self, placement: Placement) -> str:
        ranks = support(self.ratio)
        if len(ranks) == 1 and placement != self.place.own:
            return self.place.impossible(placement)
        return super().impossible(placement)

    @lazy
    def placed(self) -> dict[str, Placed]:
        return placed_of(self.program)

    def programs(self, placements: tuple[Placement, ...]) -> Iterator[Program]:
        (placement,) = placements
        if len(support(self.ratio)) == 1:
            return
        mine = [name for name, ratio in self.ratios.items() if ratio == self.ratio]
        for plain in self.place.searched(placement).values():
            yield from self.held_so(
                placement, lower(lifted(self.program, dict.fromkeys(mine, plain)), self.placed)
            )
        if placement == ROWS and self.place.is_param:
            for plain in self.place.searched(REPLICATE).values():
                lowered = lower(lifted(self.program, dict.fromkeys(mine, plain)), self.placed)
                owners = [name for name, ratio in lowered.ratios if ratio == self.ratio]
                names = {n for n in self.tensors if held_as(lowered, self.graph, n) == REPLICATE}
                if owners and names:
                    yield from self.held_so(placement, stored_by_owners(lowered, names, owners[0]))

    def held_so(self, placement: Placement, lowered: Program) -> Iterator[Program]:
        """Yields the program if the tensor still has the placement after lowering."""
        if all(held_as(lowered, self.graph, name) == placement for name in self.tensors):
            yield lowered

    def elsewhere(self) -> Iterator[tuple[str, Program]]:
        """Yields programs with the operator moved alone, and with all operators under its ratio before it,
        after it, or both."""
        plain = lifted(self.program)
        mine = [name for name, ratio in self.ratios.items() if ratio == self.ratio]
        asked = [o for name in self.tensors for o in self.operators_of(name) if o in mine]
        if not asked:
            return
        first, last = min(map(mine.index, asked)), max(map(mine.index, asked))
        moved = dict.fromkeys(map(tuple, (asked, mine[first:], mine[: last + 1], mine)))
        for ratio in dict.fromkeys(self.ratios.values()):
            if ratio == self.ratio:
                continue
            for names in moved:
                lowered = lower(plain, {**self.placed, **dict.fromkeys(names, Placed(ratio))})
                held = held_as(lowered, self.graph, self.tensors[0])
                yield f"{held}@{self.name_of(ratio)}", lowered


class Joined(View):
    """A plan with a program per machine. The question about a value of a machine's program (``h.m0``) is for
    that machine; for the path of a parameter or a plain name, it is for all machines that have it."""

    def __init__(
        self,
        program: Program,
        costs: CostModel,
        tensor: str,
        all_layers: bool,
        optimizer_states: OptimizerStates,
    ) -> None:
        self.program = program
        self.sets, self.wholes = split(program)
        asked = tensor.strip().removeprefix("%")
        members = members_of(program)
        of_one = [member for member in members if member.own(asked) != asked]
        self.members = tuple(of_one) or members
        asked = self.members[0].own(asked)
        places: list[Place] = []
        tensors: list[str] = []
        values: list[str] = []
        place_of: dict[tuple, Place] = {}  # machines of equal devices with equal samples share a search
        settings = Search(costs, optimizer_states, PRICES)
        for member in self.members:
            mine = self.sets[member.number].program
            graph = mine.graph
            name = find_tensor(mine, asked)
            names = in_all_layers(graph, name) if all_layers else (name,)
            names = (name, *(other for other in names if other != name))
            ratio = mine.shares
            shares = tuple((costs.class_of[r], ratio[r]) for r in support(ratio))
            types = tuple(i.types for i in mine.instructions)
            key = (graph.fingerprint, names, shares, types)
            if key in place_of:
                places.append(place_of[key].on(mine, ratio))
            else:
                places.append(place_of.setdefault(key, Place(mine, ratio, names, settings)))
            tensors += names if member == self.members[0] else ()
            value = member.value(name)
            values.append(value if value in program.producers else name)
        self.places, self.tensors, self.values = tuple(places), tuple(tensors), tuple(values)
        if len(self.members) == 1:
            self.tensors = tuple(map(self.members[0].value, tensors))

    @property
    def own(self) -> tuple[Placement, ...]:
        return tuple(place.own for place in self.places)

    def text(self, placements: Sequence[Placement]) -> str:
        """The placement in words: one if all machines have the same, else that of each."""
        if len(placements) == len(self.sets) and len(set(placements)) == 1:
            return str(placements[0])
        return ", ".join(f"{placement}@{member}" for member, placement in zip(self.members, placements))

    def programs(self, placements: tuple[Placement, ...]) -> Iterator[Program]:
        """Joins the machines' programs at one price each; a machine without a program at that price uses its
        first one, and machines that are not in question keep theirs."""
        options_of = [
            {
                **({"plan": self.sets[member.number].program} if placement == place.own else {}),
                **place.searched(placement),
                **{("stored", price): p for price, p in place.stored(placement).items()},
            }
            for member, place, placement in zip(self.members, self.places, placements)
        ]
        keys = dict.fromkeys(key for options in options_of for key in options)
        for key in keys if all(options_of) else ():
            chosen = [s.program for s in self.sets]
            for member, options in zip(self.members, options_of):
                chosen[member.number] = options[key] if key in options else next(iter(options.values()))
            yield self.joined(chosen)

    def joined(self, programs: Sequence[Program]) -> Program:
        sets = [replace(s, program=p) for s, p in zip(self.sets, programs)]
        return join(self.program.name, sets, self.wholes)

    def in_shards(self, program: Program) -> Program | None:
        sets, _ = split(program)
        rest = {p.result for p in self.places[0].graph.params} - {n for p in self.places for n in p.names}
        ranks = [support(s.program.shares) for s in sets]
        return self.joined(
            [fully_sharded(s.program, rest) if len(r) > 1 else s.program for s, r in zip(sets, ranks)]
        )
