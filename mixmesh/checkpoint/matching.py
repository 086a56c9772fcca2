"""Matches each tensor in a file of weights to one of the model, strictly by name; refuses files that do not
match."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import InputError, PlanError
from ..frontend.trace.dtypes import DTYPE_NAME, TORCH_DTYPE
from ..runtime.whole_model import own_module, pieces_of
from .pretrained import is_pretrained
from .weight_files import Held

SHOWN = 3  # names in an error
UNEXPECTED_KEYS = "_keys_to_ignore_on_load_unexpected"  # an attribute of classes of transformers


@dataclass(frozen=True, eq=False)
class Own:
    """A parameter or buffer of a model, with all of its names: several if it is tied."""

    names: tuple[str, ...]
    tensor: Tensor

    @classmethod
    def all_of(cls, model: nn.Module) -> list[Own]:
        """The tensors in the ``state_dict`` of a model. Raises InputError for state that is not a tensor."""
        names: dict[int, list[str]] = defaultdict(list)
        state = pieces_of(model)
        for name, value in state.items():
            if not isinstance(value, Tensor):
                raise InputError(
                    f"{name} is not in files of weights",
                    expected="parameters and buffers",
                    got=f"a {type(value).__name__}, of get_extra_state",
                )
            names[id(value)].append(name)
        return [cls(tuple(own), state[own[0]].detach()) for own in names.values()]

    @property
    def text(self) -> str:
        return f"{self.names[0]} {DTYPE_NAME.get(self.tensor.dtype)}{list(self.tensor.shape)}"


@dataclass(frozen=True, eq=False)
class Match:
    """A tensor of a model, and where its values are in the files: several places if a file holds a tied
    tensor twice."""

    own: Own
    held: tuple[Held, ...]


def match(model: nn.Module, held: Mapping[str, Held], place: Path) -> list[Match]:
    """The tensors of ``model``, each with its values. Raises PlanError if a file has too many or too few
    names, or other shapes or dtypes."""
    owns = Own.all_of(model)
    own_of = {name: own for own in owns for name in own.names}
    runtime = getattr(model, "_runtime", None)
    original = own_module(model if runtime is None else runtime.original)
    rename = renaming(own_of, held)
    held_of: dict[Own, list[Held]] = {own: [] for own in owns}
    unknown = []
    for name, tensor in held.items():
        own = own_of.get(rename(name))
        if own is not None:
            held_of[own].append(tensor)
        else:
            unknown.append(name)
    unused = unused_names(original)
    unknown = [name for name in unknown if not any(re.search(p, name) for p in unused)]
    missing = [own.names[0] for own, tensors in held_of.items() if not tensors]
    if missing or unknown:
        raise PlanError(
            "the weights are of another model",
            expected=_some(missing) if missing else "no other names than the model's",
            got=f"{_some(unknown)} too"
            if unknown
            else f"files without {'it' if len(missing) == 1 else 'them'}",
            where=str(place),
            hint=hints_for(original, place),
        )
    pairs = [(own, tensor) for own, tensors in held_of.items() for tensor in tensors]
    others = [(own, tensor) for own, tensor in pairs if not fits(own.tensor, tensor)]
    if others:
        raise PlanError(
            "the weights have other shapes or dtypes than the model's",
            expected="; ".join(own.text for own, _ in others[:SHOWN]),
            got="; ".join(f"{t.part.dtype}{list(t.part.shape)}" for _, t in others[:SHOWN]) + _more(others),
            where=str(place),
            hint=dtype_hint(others[0][1]),
        )
    return [Match(own, tuple(tensors)) for own, tensors in held_of.items()]


def renaming(own: Collection[str], held: Collection[str]) -> Callable[[str], str]:
    """A function that maps the files' names to the model's: unchanged, or with one prefix added to all of
    them or removed from all of them, whichever makes most of them names of the model."""
    counts = Counter({(0, ""): len({*own} & {*held})})  # 0: leaves names unchanged; preferred among equals
    for kind, whole, ends in ((1, own, {*held}), (2, held, {*own})):
        for name in whole:
            counts.update((kind, prefix) for prefix in prefixes(name) if name.removeprefix(prefix) in ends)
    (kind, prefix), _ = max(counts.items(), key=lambda item: (item[1], -item[0][0], -len(item[0][1])))
    if kind == 1:
        return lambda name: prefix + name
    # a name without the prefix must not match, even if it is a name of the model
    return lambda name: name.removeprefix(prefix) if name.startswith(prefix) else f" {name}"


def prefixes(name: str) -> Iterator[str]:
    """The prefixes of a name: ``a.b.`` and ``a.`` for ``a.b.c``."""
    for dot in re.finditer(r"\.", name):
        yield name[: dot.end()]


def unused_names(original: nn.Module) -> list[str]:
    """Patterns of the names, in files of earlier versions, that classes of transformers have no use for."""
    patterns: set[str] = set()
    for module in original.modules():
        if is_pretrained(module):
            patterns.update(getattr(module, UNEXPECTED_KEYS) or ())
    return sorted(patterns)


def fits(own: Tensor, held: Held) -> bool:
    """Whether the model's tensor has the shape, and a dtype that holds each value exactly."""
    return tuple(own.shape) == held.part.shape and holds(own.dtype, TORCH_DTYPE[held.part.dtype])


def holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether ``dtype`` can represent every value of ``other``: floating-point numbers with at least as many
    digits and as wide a range."""
    if dtype == other or not (dtype.is_floating_point and other.is_floating_point):
        return dtype == other
    wide, narrow = torch.finfo(dtype), torch.finfo(other)
    return wide.eps <= narrow.eps and wide.max >= narrow.max


def hints_for(original: nn.Module, place: Path) -> tuple[str, ...]:
    """The hints for names that differ."""
    if not is_pretrained(original):
        return (
            "the model that the weights were saved of",
            "model.load_state_dict(..., strict=False) in the job",
        )
    loaded = f"{type(original).__name__}.from_pretrained({str(place if place.is_dir() else place.parent)!r})"
    return (
        f"model = {loaded}, without these weights: it makes new what is not there",
        f"or, where that renames what it reads, the folder OTHER of {loaded}"
        ".save_pretrained(OTHER, save_original_format=False)",
    )


def dtype_hint(held: Held) -> str:
    return (
        f"a model of the files' shapes, in {str(TORCH_DTYPE[held.part.dtype])}, or one that holds it exactly"
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + _more(names)


def _more(items: Sequence) -> str:
    return f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
