"""A mixture of experts while it is being read: facts about its values, and the text of its experts' body."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...lang.ir import Graph

# the kinds of a region's values: ids and positions of choices, and values that follow from these
IDS, PERMUTATION, TOKEN, COUNTS, ENDS, INVERSE = "ids", "permutation", "token", "counts", "ends", "inverse"
POSITIONS = frozenset({IDS, PERMUTATION, TOKEN, COUNTS, ENDS, INVERSE})
# rows of choices in sorted order, in their own order, and in their own order as [tokens, choices, ...]
SORTED, ROWS, BY_TOKEN = "sorted", "rows", "by token"


class NoMixture(Exception):
    """The region is not a mixture of experts, or not one that can be read."""


@dataclass(frozen=True)
class Held:
    """The facts about a value: its kind, and for rows its name in the body. If each row is the entry of its
    expert in a table, ``entry`` is that table."""

    kind: str
    name: str = ""
    entry: str = ""


@dataclass
class Region:
    """A mixture while it is being read. ``facts`` are about its values; ``inputs`` are its groups of tensors,
    by their prefix in the body."""

    graph: Graph
    ids: str
    num_experts: int = 0
    num_tokens: int = 0
    facts: dict[str, Held] = field(default_factory=dict)
    body: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    inputs: dict[str, list[str]] = field(default_factory=lambda: {"x": [], "s": [], "t": [], "w": []})
    nodes: set[int] = field(default_factory=set)
    result: str = ""

    @property
    def num_choices(self) -> int:
        return self.graph.types[self.ids].shape[0]

    def input(self, prefix: str, value: str) -> str:
        """The name in the body for a tensor from outside."""
        if value in self.facts:
            raise NoMixture("a value of the region is used as one from outside")
        names = self.inputs[prefix]
        if value not in names:
            names.append(value)
        return f"{prefix}{names.index(value)}"

    def step(self, count: int, text: str) -> list[str]:
        """Appends an assignment of ``count`` values to the body, and returns their names."""
        names = [f"v{len(self.body)}"] if count == 1 else [f"v{len(self.body)}_{n}" for n in range(count)]
        self.body.append(f"{', '.join(names)} = {text}")
        return names

    def table(self, value: str) -> str:
        shape = self.graph.types[value].shape
        if not shape or self.num_experts not in (0, shape[0]):
            raise NoMixture("tables of different numbers of experts")
        self.num_experts = shape[0]
        return self.input("t", value)

    def choices_of(self, num_tokens: int) -> int:
        """The number of choices that each of ``num_tokens`` tokens has. Raises NoMixture if the number of
        tokens differs from an earlier one."""
        if not num_tokens or self.num_choices % num_tokens or self.num_tokens not in (0, num_tokens):
            raise NoMixture("different numbers of tokens")
        self.num_tokens = num_tokens
        return self.num_choices // num_tokens
