"""Rule text: einsum-like patterns with named factors, parsed once and bound to shapes.

    "... k, n k, +n -> ... n"       linear with a bias
    "... d! -> ... d!"              softmax over the last dim: d must be whole
    "n (c h! w!) -> n c h! w!"      a compound dim; only its leading factor can be sharded

A factor that an input and the output share can be sharded on both. A factor missing from an output is
contracted by a sum, so sharding it leaves that output partial. ``!`` requires the factor to be whole. ``+``
marks an additive term (a bias), which must be partial where the output is. ``1`` is a dim without a factor (a
broadcast one). ``...`` stands for any number of dims, aligned to the right as in broadcasting.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache

_TERM = re.compile(r"\(([^)]*)\)|(\.\.\.)|([A-Za-z_]\w*!?|1)")

Dim = tuple[str, ...]  # factors of one tensor dim, the leading one first; () for a dim without any


@dataclass(frozen=True, slots=True)
class Term:
    """One tensor of a pattern: its dims, before the ellipsis and after it. ``after`` is None without one."""

    dims: tuple[Dim, ...]
    after: tuple[Dim, ...] | None = None
    additive: bool = False


@dataclass(frozen=True, slots=True)
class Pattern:
    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    whole: frozenset[str]  # the factors marked with !


@cache
def parse_pattern(text: str) -> Pattern:
    """Parses rule text. Raises ValueError with the text and the part that is wrong."""
    if text.count("->") != 1:
        raise ValueError(f"a rule needs one '->', got {text!r}")
    whole: set[str] = set()
    left, right = text.split("->")
    inputs = tuple(_term(t, whole, text) for t in left.split(",")) if left.strip() else ()
    outputs = tuple(_term(t, whole, text) for t in right.split(","))
    return Pattern(inputs, outputs, frozenset(whole))


def _term(text: str, whole: set[str], rule: str) -> Term:
    text = text.strip()
    additive = text.startswith("+")
    rest = text[1:] if additive else text
    sides: list[list[Dim]] = [[]]
    for match in _TERM.finditer(rest):
        compound, ellipsis, single = match.groups()
        if ellipsis:
            sides.append([])
            continue
        factors = []
        for name in compound.split() if compound is not None else [single]:
            if name.endswith("!"):
                whole.add(name[:-1])
            if name != "1":
                factors.append(name.rstrip("!"))
        sides[-1].append(tuple(factors))
    if len(sides) > 2 or _TERM.sub("", rest).strip():
        raise ValueError(f"cannot read {_TERM.sub('', rest).strip() or '...'!r} in rule {rule!r}")
    return Term(tuple(sides[0]), tuple(sides[1]) if len(sides) > 1 else None, additive)


@dataclass(frozen=True)
class Bound:
    """A pattern bound to the shapes of one operator call: factors per dim, and their sizes."""

    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    sizes: dict[str, int]
    whole: frozenset[str]
    additive: frozenset[int]

    def trailing(self, dim: Dim) -> int:
        """The number of elements of a dim per step of its leading factor."""
        return math.prod(self.sizes[f] for f in dim[1:])

    def shardable(self) -> tuple[str, ...]:
        """The factors that may be sharded: those not marked whole, longer than 1, and leading in every dim
        that has them."""
        out = []
        for factor, size in self.sizes.items():
            if size <= 1 or factor in self.whole:
                continue
            places = [d for t in self.inputs + self.outputs for d in t if factor in d]
            if places and all(d[0] == factor for d in places):
                out.append(factor)
        return tuple(out)


class PatternMismatch(ValueError):
    """The shapes of a call do not fit the pattern of its rule."""


def bind(
    pattern: Pattern,
    in_shapes: tuple[tuple[int, ...], ...],
    out_shapes: tuple[tuple[int, ...], ...],
    sizes: dict[str, int] | None = None,
) -> Bound:
    """Assigns a size to every factor. Extra input terms at the end are optional inputs that are absent.

    ``sizes`` has those of factors within compound dims that the shapes leave open. Raises PatternMismatch. A
    factor behind another one in a compound dim is whole, even if the size of the one before it is 1: the rule
    does not say what an operator does with a part of a window, a patch or a repetition.
    """
    terms = pattern.inputs
    if not terms and in_shapes == ((),):
        terms = (Term(()),)  # a single scalar input leaves the left of the arrow empty too
    if len(in_shapes) > len(terms) or len(out_shapes) > len(pattern.outputs):
        raise PatternMismatch(
            f"{len(in_shapes)} inputs and {len(out_shapes)} outputs for a rule of "
            f"{len(pattern.inputs)} and {len(pattern.outputs)}"
        )
    whole = set(pattern.whole)
    inputs = [_expand(t, s) for t, s in zip(terms, in_shapes)]
    outputs = [_expand(t, s) for t, s in zip(pattern.outputs, out_shapes)]
    whole |= {factor for dims in inputs + outputs for dim in dims for factor in dim[1:]}
    pairs = [(d, n) for dims, s in zip(inputs + outputs, in_shapes + out_shapes) for d, n in zip(dims, s)]
    size_of = _factor_sizes(pairs, sizes or {})
    return Bound(
        tuple(_without_broadcast(d, s, size_of) for d, s in zip(inputs, in_shapes)),
        tuple(_without_broadcast(d, s, size_of) for d, s in zip(outputs, out_shapes)),
        size_of,
        frozenset(whole),
        frozenset(i for i, t in enumerate(pattern.inputs) if t.additive),
    )


def _factor_sizes(pairs: list[tuple[Dim, int]], sizes: dict[str, int]) -> dict[str, int]:
    """The size of every factor in ``pairs`` of (dim, size), including those of ``sizes``."""
    size_of = dict(sizes)
    for dim, n in pairs:
        if len(dim) == 1:
            size_of[dim[0]] = max(n, size_of.get(dim[0], 0))
    for _ in range(2):  # a compound dim with only one unknown factor determines that factor
        for dim, n in pairs:
            unknown = [f for f in dim if f not in size_of]
            if len(unknown) == 1 and n:
                size_of[unknown[0]] = n // math.prod(size_of[f] for f in dim if f in size_of)
    missing = {f for dim, _ in pairs for f in dim} - size_of.keys()
    if missing:
        raise PatternMismatch(f"the sizes of {sorted(missing)} cannot be told from the shapes")
    return size_of


def _without_broadcast(dims: list[Dim], shape: tuple[int, ...], size_of: dict[str, int]) -> tuple[Dim, ...]:
    """The dims without the factors of size 1 and those that are broadcast."""
    kept: list[Dim] = []
    for dim, n in zip(dims, shape):
        # a factor of size 1 cannot be cut; a dim of size 1 with a longer factor is broadcast
        slim = tuple(f for f in dim if size_of[f] != 1)
        if math.prod(size_of[f] for f in slim) == n:
            kept.append(slim)
        elif n == 1:
            kept.append(())
        else:
            raise PatternMismatch(f"dim of {n} where the rule's {' '.join(dim)} is {size_of}")
    return tuple(kept)


def _expand(term: Term, shape: tuple[int, ...]) -> list[Dim]:
    """The dims of a term, with its ellipsis replaced by factors that are counted from the right."""
    if term.after is None:
        if len(term.dims) != len(shape):
            raise PatternMismatch(f"shape {shape} for {len(term.dims)} dims")
        return list(term.dims)
    named = len(term.dims) + len(term.after)
    count = len(shape) - named
    if count < 0:
        raise PatternMismatch(f"shape {shape} is too short for {named} named dims")
    return [*term.dims, *((f"_{count - 1 - i}",) for i in range(count)), *term.after]
