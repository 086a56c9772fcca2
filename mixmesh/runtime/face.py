"""The part of a parallel model that looks like the original: classes, attributes, copies, and the whole
module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn

from ..errors import InputError
from ..frontend.trace.copies import original_of
from .modes import modes_of, set_modes
from .shells import Original, check_attribute, dress, shell_of
from .whole_model import Lending, copy_tensors, own_module


@dataclass(frozen=True, eq=False)
class LentPart:
    """Finds a module of the user's own model while it is lent with whole weights; None otherwise."""

    runtime: Any
    name: str

    def __call__(self) -> nn.Module | None:
        lent = self.runtime.lent
        return None if lent is None else lent.get_submodule(self.name)


class Face(nn.Module):
    """A module that stands in for another one. ``_runtime`` is set before anything else."""

    _runtime: Any  # a Runtime, whose module imports this one

    def _wear(self, model: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Takes on the modules and attributes of ``model``, with these tensors, by name, instead of its
        own."""
        original = own_module(model)
        shell_by_module: dict[nn.Module, nn.Module] = {original: self, model: self}
        dress(self, original, shell_by_module)
        for name in model._modules.keys() - original._modules.keys():  # modules of a loss with parameters
            self._modules[name] = shell_of(model.get_submodule(name), shell_by_module)
        for its, shell in shell_by_module.items():
            shell.__dict__["_stands_for"] = Original(original_of(its), self._is_watched)
        for kind, tensors in (("_parameters", params), ("_buffers", buffers)):
            for name, tensor in tensors.items():
                owner, _, leaf = name.rpartition(".")
                getattr(self.get_submodule(owner), kind)[leaf] = tensor
        for name, shell in self.named_modules():
            if shell is not self and name.partition(".")[0] in original._modules:
                shell.__dict__["_lent"] = LentPart(self._runtime, name)

    def _is_watched(self) -> bool:
        return self._runtime.comm.rank > 0 or bool(self._runtime.forms.reads.of)

    def whole(self) -> Lending:
        """The original module with whole weights, for the duration of a ``with`` block: its class, attributes
        and hooks are the user's own, and it runs at any batch size.

        Collective at the beginning; every rank holds all of the model meanwhile. Weights that are changed
        within must be given back by ``load_full_state_dict``; raises InputError at the end if they were not,
        or if a backward pass has left gradients.
        """
        run = self._runtime
        return Lending(run.original, self, run)

    def __setattr__(self, name: str, value: Any) -> None:
        check_attribute(self, name, value)
        nn.Module.__setattr__(self, name, value)

    def extra_repr(self) -> str:
        return f"mixmesh: rank {self._runtime.comm.rank} of {self._runtime.comm.world_size}"

    def apply(self, fn: Callable[[nn.Module], Any]) -> NoReturn:
        """Refuses an initialisation by a function: on pieces it would differ from the original's, or between
        ranks."""
        raise InputError(
            "apply on a parallel model would change pieces of parameters, on every rank by itself",
            expected="a model that is initialised before it is parallel",
            got="model.apply(function)",
            hint=("model.apply(function) before parallelize", "model.load_full_state_dict(state)"),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Makes another parallel model with pieces of its own, in the same layout and with the same groups.
        Collective; every rank holds the whole model meanwhile."""
        original = self._runtime.original
        with self.whole() as module:
            twin = copy.deepcopy(original)
            if module is not own_module(original):  # the original has values of its own
                copy_tensors(module, own_module(twin))
        copy_of_self = memo[id(self)] = self._runtime.again(twin)
        for mine, its in zip(self.parameters(), copy_of_self.parameters()):
            its.requires_grad_(mine.requires_grad)
        set_modes(copy_of_self.modules(), modes_of(self.modules()))
        return copy_of_self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError(
            "a parallel model cannot be written as an object: it is a part of a model and its connections",
            expected="a state, whole or in pieces",
            got="torch.save(model) or pickle",
            hint=(
                'state = model.full_state_dict(), on every rank; then torch.save(state, "model.pt") on one',
                "torch.distributed.checkpoint.save(model.state_dict())",
            ),
        )
