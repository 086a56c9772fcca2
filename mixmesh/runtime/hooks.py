"""Refuses hooks that were put on a parallel model after it was made: none of them would have its usual
effect.

A gradient hook would see one rank's addend before the sum, and the modules within a parallel model are never
called: the program has their operators.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ..errors import InputError
from ..frontend.trace.hooks import FORWARD, GRADIENT_HINT, OF_MODULES, OF_PARAMETERS, place_of_hook


class HookWatch:
    """Looks for hooks if any was registered in this process since the last look."""

    def __init__(self, model: nn.Module) -> None:
        self._own = {id(hook) for p in model.parameters() for hook, _ in _hooks(p, OF_PARAMETERS)}
        self._last = RemovableHandle.next_id

    def check(self, model: nn.Module) -> None:
        """Raises InputError, with the hook's line."""
        if RemovableHandle.next_id == self._last:
            return
        for name, p in model.named_parameters():
            for hook, how in _hooks(p, OF_PARAMETERS):
                if id(hook) not in self._own:
                    raise InputError(
                        "a hook on a parameter of a parallel model would see the gradient of one rank alone",
                        expected="gradients to be read and changed after loss.backward(), when they are sums",
                        got=f"{how} on {name}",
                        where=str(place_of_hook(hook)),
                        hint=GRADIENT_HINT[0],
                    )
        for name, module in model.named_modules():
            for hook, _ in _hooks(module, (*FORWARD, *OF_MODULES)) if name else ():
                raise InputError(
                    "a hook on a module within a parallel model would never run",
                    expected="hooks on the original model, before it is planned",
                    got=f"a hook on module {name}",
                    where=str(place_of_hook(hook)),
                )
        self._last = RemovableHandle.next_id


def _hooks(held: Any, attributes: Any) -> list[tuple[Any, str]]:
    """The hooks on a parameter or module, each with the attribute that holds it or with another name for
    it."""
    kinds = attributes if isinstance(attributes, dict) else dict(zip(attributes, attributes))
    return [
        (hook, how)
        for attribute, how in kinds.items()
        for hook in (getattr(held, attribute, None) or {}).values()
    ]
