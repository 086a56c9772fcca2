"""A model while it is being made: every statement runs as soon as it is proposed, so that only valid ones
stay."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .source import Line, Source

LARGEST = 30.0  # no value grows beyond, so that rounding stays far below what is looked for
MOST_ELEMENTS = 6000  # of a value
Condition = Callable[[Tensor], bool]


class Draft:
    """Values by name, beside the statements that made them. ``rng`` makes all choices."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.module = nn.Module()
        self.space: dict = {"torch": torch, "F": F, "nn": nn, "self": self.module}
        self.inputs: list[tuple[str, str]] = []
        self.lines: list[Line] = []
        self.values: dict[str, Tensor] = {}
        self._init: list[str] = []
        self._count = 0
        torch.manual_seed(seed)

    # --- what families ask for ---------------------------------------------------------------------------

    def pick(self, accepts: Condition) -> str | None:
        """The name of a value that ``accepts`` takes, a late one more often; None if there is none."""
        names = [n for n, v in self.values.items() if accepts(v)]
        if not names:
            return None
        return names[max(self.rng.randrange(len(names)) for _ in range(3))]

    def floats(self, *ranks: int) -> str | None:
        """The name of a floating-point value of one of these numbers of dims (of at least one without
        any)."""
        return self.pick(lambda v: v.is_floating_point() and (v.ndim in ranks if ranks else v.ndim > 0))

    def like(self, name: str) -> str | None:
        """Another floating-point value of the same shape."""
        shape = self.values[name].shape
        return self.pick(lambda v: v.is_floating_point() and v.shape == shape)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def make(self, code: str) -> str:
        """An attribute that ``__init__`` sets to ``code``."""
        self._count += 1
        name = f"self.m{self._count}"
        self._init.append(f"{name} = {code}")
        return name

    def setup(self, statement: str) -> None:
        """A statement of ``__init__``."""
        self._init.append(statement)

    def parameter(self, *shape: int) -> str:
        return self.make(f"nn.Parameter(torch.randn({list(shape)}) * 0.5)")

    def buffer(self, value: str) -> str:
        self._count += 1
        self.setup(f'self.register_buffer("b{self._count}", {value})')
        return f"self.b{self._count}"

    @property
    def module_has_parameters(self) -> bool:
        return any(p.requires_grad for p in self.module.parameters())

    def dim(self, name: str, *, least: int = 1) -> int | None:
        """A dim of at least so many elements."""
        dims = [d for d, size in enumerate(self.shape(name)) if size >= least]
        return self.rng.choice(dims) if dims else None

    def size(self) -> int:
        return self.rng.choice((1, 2, 3, 3, 4, 5, 6, 7, 8, 8, 12))

    # --- statements --------------------------------------------------------------------------------------

    def input(self, code: str) -> str:
        name = f"x{len(self.inputs)}"
        self.inputs.append((name, code))
        self.values[name] = eval(code, self.space)
        self.space[name] = self.values[name]
        return name

    def propose(self, family: Callable[[Draft], str | None], *, binds: bool = True) -> str | None:
        """Runs what a family proposes; the name of the new value, or None where it has no use for it. A
        tuple that
        is given becomes several values, of which the last is returned."""
        self._init = []
        code = family(self)
        if code is None:
            return None
        space = dict(self.space)
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                for statement in self._init:
                    exec(statement, space)
                self.module.double()
                if not binds:
                    exec(code, space)
                    self._append(Line("", code, tuple(self._init)))
                    return ""
                value = eval(code, space)
        except Exception:  # a proposal that PyTorch refuses is none
            return None
        parts = value if isinstance(value, tuple | list) else (value,)
        if not all(map(_is_moderate, parts)):
            return None
        if not isinstance(value, tuple | list):
            return self._bind(code, value)
        whole = self._bind(code, None)
        return [self._bind(f"{whole}[{n}]", part) for n, part in enumerate(parts)][-1]

    def _bind(self, code: str, value: Tensor | None) -> str:
        name = f"v{len(self.lines)}"
        self._append(Line(name, code, tuple(self._init)))
        if value is not None:
            self.values[name] = value
        self.space[name] = value
        return name

    def _append(self, line: Line) -> None:
        self.lines.append(line)
        self._init = []

    def source(self, losses: list[str]) -> Source:
        title = f"A random model: case {self.seed}."
        return Source(tuple(self.inputs), tuple(self.lines), tuple(losses), self.seed % 2**31, title)


def _is_moderate(value: object) -> bool:
    if not isinstance(value, Tensor) or value.numel() == 0 or value.numel() > MOST_ELEMENTS:
        return False
    if value.dtype not in (torch.float64, torch.int64, torch.bool):
        return False
    wide = value.double()
    return bool(wide.isfinite().all()) and bool(wide.abs().max() <= LARGEST)
