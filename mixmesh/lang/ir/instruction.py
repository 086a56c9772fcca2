"""One instruction of a program, and the names of redistributions."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...base.lazy import lazy
from .graph import LEAVES, SINKS, Arg, Ref, nameless, refs
from .placement import Partial, Placement, Replicate, Shard
from .types import TensorType

# the names of redistributions; the two placements determine which one it is
REDISTRIBUTIONS = (
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all",
    "local_slice", "as_partial", "pad_partial", "move",
)  # fmt: skip
_REDISTRIBUTIONS, _LEAVES = frozenset(REDISTRIBUTIONS), frozenset(LEAVES)  # sets, for fast look-ups


def redistribution(src: Placement, dst: Placement) -> str:
    """Names the redistribution from ``src`` to ``dst`` under one ratio. Raises ValueError for R -> R and P ->
    P, which have none."""
    match src, dst:
        case Shard(), Replicate():
            return "all_gather"
        case Partial(), Shard():
            return "reduce_scatter"
        case Partial(), Replicate():
            return "all_reduce"
        case Shard(), Shard():
            return "all_to_all"
        case Replicate(), Shard():
            return "local_slice"
        case Replicate(), Partial():
            return "as_partial"  # one rank keeps its copy, the others take zeros
        case Shard(), Partial():
            return "pad_partial"  # every rank pads its piece with zeros
    raise ValueError(f"nothing turns {src} into {dst}")


@dataclass(frozen=True)  # no slots: ``lazy`` values are kept
class Instruction:
    """One line of a program: a ``Node`` with placed types and attributes.

    ``attrs`` say how something is computed, never what: the algorithm of a collective, the gradient bucket of
    a parameter, ``sfb`` for a weight gradient computed from gathered factors, ``wgrad`` for a split one (see
    ``wgrad``), ``owned`` and ``stage`` for a gradient with shard owners (see ``ownership``), ``recompute``
    for a rematerialised region (see ``recompute``). ``location`` is the user's file and line, ``line`` the
    line of the program text that the instruction was read from, or 0.
    """

    results: tuple[str | None, ...]
    types: tuple[TensorType, ...]
    op: str
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()
    attrs: tuple[tuple[str, Arg], ...] = ()
    location: str = field(default="", compare=False)
    line: int = field(default=0, compare=False)

    @lazy
    def inputs(self) -> tuple[str, ...]:
        names = []
        for arg in (*self.args, *[v for _, v in self.kwargs]):
            if isinstance(arg, Ref):  # the usual case: a generator would take up much of planning's time
                names.append(arg.name)
            elif isinstance(arg, tuple):
                names += [r.name for r in refs(arg)]
        return tuple(names)

    @lazy
    def plain(self) -> tuple:
        """Operator and arguments without the names of values, for comparisons."""
        return self.op, nameless(self.args), nameless(self.kwargs)

    @lazy
    def is_leaf(self) -> bool:
        return self.op in _LEAVES

    @property
    def is_sink(self) -> bool:
        return self.op in SINKS

    @lazy
    def is_redistribution(self) -> bool:
        return self.op in _REDISTRIBUTIONS

    @lazy
    def result(self) -> str:
        (name,) = self.results
        return name  # type: ignore[return-value]  # only one of several results can be None

    @lazy
    def type(self) -> TensorType:
        (only,) = self.types
        return only

    def attr(self, name: str, default: Arg = None) -> Arg:
        """The value of an attribute, or ``default`` without it."""
        for key, value in self.attrs:
            if key == name:
                return value
        return default


def with_attrs(i: Instruction, attrs: tuple[tuple[str, Arg], ...]) -> Instruction:
    """Returns ``i`` with other attributes: ``dataclasses.replace`` is slow, and planning does this often."""
    return Instruction(i.results, i.types, i.op, i.args, i.kwargs, attrs, i.location, i.line)
