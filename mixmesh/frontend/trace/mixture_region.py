"""A mixture of experts while it is read: what is known of its values, and the text of its experts' body."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...lang.ir import Graph

# kinds of a region's values: ids and positions of choices, and what follows from them
IDS, PERMUTATION, TOKEN, COUNTS, ENDS, INVERSE = "ids", "permutation", "token", "counts", "ends", "inverse"
POSITIONS = frozenset({IDS, PERMUTATION, TOKEN, COUNTS, ENDS, INVERSE})
# rows of choices in sorted order, in their own, and these as [tokens, choices, ...]
SORTED, ROWS, BY_TOKEN = "sorted", "rows", "by token"


class NoMixture(Exception):
    """A region that is no mixture of experts, or none that can be read."""


@dataclass(frozen=True)
class Held:
    """The facts known of a value: its kind, and for rows the name that it has in the body; ``entry`` names
    the table of which it is every row's own entry."""

    kind: str
    name: str = ""
    entry: str = ""


@dataclass
class Region:
    """A mixture while it is read. ``inputs``: its groups of tensors by their prefix in the body."""

    graph: Graph
    ids: str
    num_experts: int = 0
    num_tokens: int = 0
    known: dict[str, Held] = field(default_factory=dict)
    body: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    inputs: dict[str, list[str]] = field(default_factory=lambda: {"x": [], "s": [], "t": [], "w": []})
    nodes: set[int] = field(default_factory=set)
    result: str = ""

    @property
    def num_choices(self) -> int:
        return self.graph.types[self.ids].shape[0]

    def input(self, prefix: str, value: str) -> str:
        """The name that a tensor from outside has in the body."""
        if value in self.known:
            raise NoMixture("a value of the region is used as one from outside")
        names = self.inputs[prefix]
        if value not in names:
            names.append(value)
        return f"{prefix}{names.index(value)}"

    def step(self, count: int, text: str) -> list[str]:
        """Appends an assignment of ``count`` values; their names."""
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
        """How many choices each of ``num_tokens`` has: the same number wherever it is asked."""
        if not num_tokens or self.num_choices % num_tokens or self.num_tokens not in (0, num_tokens):
            raise NoMixture("different numbers of tokens")
        self.num_tokens = num_tokens
        return self.num_choices // num_tokens
