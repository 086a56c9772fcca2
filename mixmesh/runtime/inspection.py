"""Searches all values and gradients that a rank makes in one pass for those that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..lang.ir import Instruction
from .random import RandomPolicy

Place = tuple[int, str]  # (micro-batch, name of a value)


@dataclass(frozen=True)
class Counts:
    """The numbers of elements of a tensor that are not finite."""

    num_nan: int
    num_infinite: int
    num_elements: int

    @classmethod
    def of(cls, x: Tensor) -> Counts | None:
        """The counts of a tensor's values; None if all are finite."""
        if not is_spoilt(x):
            return None
        num_nan = int(x.isnan().sum())
        return cls(num_nan, x.numel() - num_nan - int(x.isfinite().sum()), x.numel())

    def __str__(self) -> str:
        kinds = ((self.num_nan, "nan"), (self.num_infinite, "infinite"))
        return f"{' and '.join(f'{n} {kind}' for n, kind in kinds if n)} of {self.num_elements} elements"


def is_spoilt(x: Any) -> bool:
    """Whether ``x`` is a tensor with an element that is not finite."""
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        return False
    x = x.detach().float() if x.dtype.itemsize == 1 else x.detach()  # float8 lacks most operators
    return not bool(x.isfinite().all())


@dataclass
class Inspector:
    """Notes the findings of one rank in a pass. ``random`` knows the current micro-batch."""

    random: RandomPolicy
    values: dict[Place, Counts] = field(default_factory=dict)
    # places whose backward pass makes a gradient that is not finite
    gradients: list[Place] = field(default_factory=list)

    def note(self, name: str, x: Tensor) -> None:
        """Checks a value of the forward pass."""
        if (counts := Counts.of(x.detach())) is not None:
            self.values[self.random.micro_step, name] = counts

    def checked(self, i: Instruction, call: Callable[..., tuple]) -> Callable[..., tuple]:
        """Wraps a local operator so that its forward pass and its backward pass are inspected."""
        name = next(r for r in i.results if r is not None)

        def run(*args):
            out = call(*args)
            for result, x in zip(i.results, out):
                if result is not None and isinstance(x, Tensor):
                    self.note(result, x)
            place = self.random.micro_step, name

            def look(made: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
                if any(map(is_spoilt, made)) and not any(map(is_spoilt, given)):
                    self.gradients.append(place)

            for node in nodes_between(args, out):
                node.register_hook(look)
            return out

        return run


def nodes_between(args: Iterable[Any], results: Iterable[Any]) -> list[Any]:
    """Autograd's nodes between ``args`` and ``results``."""
    start_nodes = {a.grad_fn for a in args if isinstance(a, Tensor)}
    nodes: list[Any] = []
    waiting = [x.grad_fn for x in results if isinstance(x, Tensor)]
    while waiting:
        node = waiting.pop()
        if node is None or node in start_nodes or hasattr(node, "variable"):  # a leaf
            continue
        start_nodes.add(node)
        nodes.append(node)
        waiting += [following for following, _ in node.next_functions]
    return nodes
