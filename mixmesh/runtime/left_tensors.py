"""Attributes where the forward pass of a model leaves tensors for its caller: an auxiliary loss, the last
loss, maps of attention.

A program computes what the call returns, and sets no attributes. A parallel model would show what was there
before, such as 0.0, and a loop that adds it to the loss would train without it. So its modules refuse to be
asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..base.callers import line_of_script
from ..errors import InputError


def refuse_left(parallel: nn.Module, left: Iterable[str]) -> None:
    """Makes the modules of a parallel model refuse the attributes at these paths. While the whole model is
    lent, they have those of its last call."""
    names_by_owner: dict[str, list[str]] = {}
    for path in left:
        owner, _, name = path.rpartition(".")
        names_by_owner.setdefault(owner, []).append(name)
    modules = dict(parallel.named_modules())
    for owner, names in names_by_owner.items():
        if owner in modules:
            kind: type = type(modules[owner])
            members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            refused = {name: _refusing(f"{owner}.{name}".lstrip("."), name) for name in names}
            modules[owner].__class__ = type(kind.__name__, (kind,), {**members, **refused})


def _refusing(path: str, name: str) -> property:
    def get(module: nn.Module) -> Any:
        lent = _lent(module)
        if lent is not None:
            return getattr(lent, name)
        raise InputError(
            f"the forward pass leaves a tensor in {path}, and the program of a parallel model does not",
            expected="a value that the model returns, or that its loss reads",
            got=f"{path}, read from the parallel model",
            where=line_of_script(),
            hint=(
                f"to train on it: mixmesh.prepare(..., loss=lambda out, y: criterion(out, y) + net.{path}), "
                "where net is the script's own model",
                "to look at it: return it from forward too, and mixmesh.prepare(..., outputs=(1,))",
                f"without gradients: with mixmesh.whole(model) as m: m(x), and then m.{path}",
            ),
        )

    return property(get, lambda module, value: None)


def _lent(module: nn.Module) -> nn.Module | None:
    runtime = module.__dict__.get("_runtime")
    if runtime is not None:
        return runtime.lent
    return module.__dict__["_lent"]() if "_lent" in module.__dict__ else None
