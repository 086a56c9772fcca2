"""The parts of a LightningModule that its manual ``training_step`` calls, each planned by its first call.

A part is a module that is called outside of any other part: a generator, a discriminator, or the
LightningModule itself (``self(x)``). While a step runs, its parallel model stands in its place, so that
``self.generator.parameters()`` are the trained ones; to evaluate and to save, the user's own module does.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import InputError
from ....frontend.job import can_step_pieces, check_supported
from ....frontend.trace.compiled import uncompiled
from ....frontend.trace.copies import stand_for
from ....runtime.modes import modes_by_name, set_modes_by_name
from ....runtime.optimizers import cut_state, params_of
from ....runtime.parallel import ParallelModel
from ....runtime.shard_numbers import Off
from ..launched import parallel_for
from ..lending import Lender
from ..weights import fill
from .refusals import IN_FORWARD, in_forward

Call = tuple[tuple[Any, ...], Mapping[str, Any]]  # the arguments by position, and by name
States = Mapping[int, Mapping[str, Any]]  # the state of an optimizer for each parameter, by its id
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True, eq=False)
class Part:
    """A planned module: the user's own in its ``place``, the ``original`` of it that was planned (a shallow
    copy of the LightningModule; what ``torch.compile`` was given), and its ``parallel`` model."""

    place: nn.Module
    original: nn.Module
    parallel: ParallelModel
    lender: Lender
    is_all: bool  # whether it is the LightningModule

    def stand_in(self, module: nn.Module) -> None:
        """Puts the parallel model in the place of the original within ``module``."""
        if self.is_all:
            wear(module, self.parallel)
        else:
            replace_module(module, self.place, self.parallel)

    def step_aside(self, module: nn.Module) -> None:
        """Puts the original back in its place within ``module``."""
        if self.is_all:
            wear(module, self.original)
        else:
            replace_module(module, self.parallel, self.place)

    def fill(self) -> None:
        """Gives the original the trained values for good. Collective."""
        self.lender.take_back()
        fill(self.original, self.parallel)


def wear(module: nn.Module, source: nn.Module) -> None:
    """Gives ``module`` the tensors of ``source``, and its submodules that have tensors; metrics stay."""
    module._parameters.update(source._parameters)
    module._buffers.update(source._buffers)
    source.training = module.training
    for name, child in source._modules.items():
        if child is not None and has_tensors(child):
            module._modules[name] = child


def twin_of(module: nn.Module) -> nn.Module:
    """A shallow copy of a module, with the same tensors and submodules, whose places are the copy's own."""
    twin = copy.copy(module)
    for table in ("_modules", "_parameters", "_buffers"):
        twin.__dict__[table] = dict(module.__dict__[table])
    return twin


@contextmanager
def keeping_modes(module: nn.Module) -> Iterator[None]:
    """A context for putting other modules in places within ``module``: these then train or evaluate like
    those before."""
    modes = modes_by_name(module)
    yield
    set_modes_by_name(module, modes)


def replace_module(within: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Puts ``new`` in all places of ``old`` within a module."""
    for parent in list(within.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new


def has_tensors(module: nn.Module) -> bool:
    """Whether a module, or one within it, has a parameter or a buffer."""
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def plan_part(
    module: nn.Module,
    call: Call,
    optimizers: Iterable[torch.optim.Optimizer],
    planning: Mapping[str, Any],
    trains: Mapping[int, bool],
    toggled: dict[Tensor, bool],
    *,
    is_all: bool,
) -> Part:
    """Makes ``module`` a part, planned by the arguments of its first ``call``. The optimizers step the
    parallel model's parameters afterwards. ``trains`` says, by the id of a parameter, whether it required a
    gradient before the step: a step may freeze some for a while, and Lightning keeps in ``toggled`` what
    ``untoggle_optimizer`` is to restore. ``is_all`` says that ``module`` is the LightningModule. Collective.
    """
    model = without_trainer(module) if is_all else uncompiled(module)
    named = dict(model.named_parameters())
    numbers = {id(p): name for name, p in named.items()}
    whole, rest = split_users(optimizers, set(numbers))
    states = [{id(p): each.state.pop(p) for p in named.values() if p in each.state} for each in rest]
    learning = Learning.take(named, trains, toggled)
    with torch.enable_grad():
        example = example_of(model, *call)
        parallel = parallel_for(model, whole, example, {"rebalance": False, **planning})
    shown = dict(parallel.named_parameters())
    heirs = {number: shown[name] for number, name in numbers.items()}
    for each, its in zip(rest, states):
        adopt(each, heirs, its, parallel)
    learning.give(shown, toggled)
    return Part(module, model, parallel, Lender(parallel), is_all)


def split_users(
    optimizers: Iterable[torch.optim.Optimizer], numbers: set[int]
) -> tuple[torch.optim.Optimizer | None, list[torch.optim.Optimizer]]:
    """The first optimizer whose parameters all have ids in ``numbers``, and the other optimizers that have
    some of these parameters. Raises InputError for one of these that cannot step pieces."""
    has = {o: [id(p) in numbers for p in params_of(o)] for o in optimizers}
    whole = next((o for o, are in has.items() if are and all(are)), None)
    rest = [o for o, are in has.items() if any(are) and o is not whole]
    for each in rest:
        check_steps_pieces(each)
    return whole, rest


@dataclass(frozen=True)
class Learning:
    """By name, whether parameters require a gradient in the step that plans them, and the settings that
    ``untoggle_optimizer`` will restore."""

    wanted: Mapping[str, bool]
    restored: Mapping[str, bool]

    @classmethod
    def take(
        cls, named: Mapping[str, Tensor], trains: Mapping[int, bool], toggled: dict[Tensor, bool]
    ) -> Learning:
        """Makes parameters require gradients as before the step, by their ids in ``trains``."""
        wanted = {name: p.requires_grad for name, p in named.items()}
        restored = {name: toggled.pop(p) for name, p in named.items() if p in toggled}
        for p in named.values():
            p.requires_grad_(trains.get(id(p), p.requires_grad))
        return cls(wanted, restored)

    def give(self, named: Mapping[str, Tensor], toggled: dict[Tensor, bool]) -> None:
        """Makes the parameters in their place require gradients as in the step."""
        for name, p in named.items():
            p.requires_grad_(self.wanted[name])
            if name in self.restored:
                toggled[p] = self.restored[name]


def without_trainer(module: nn.Module) -> nn.Module:
    """A shallow copy of a LightningModule whose ``forward`` may not read anything from the Trainer, because
    it is traced once for all steps."""

    def refuse(name: str, hint: str, *_: Any) -> Any:
        raise in_forward(name, hint)

    kind = type(module)
    members: dict[str, Any] = {
        name: property(partial(refuse, name, hint)) for name, hint in IN_FORWARD.items()
    }
    twin = twin_of(module)
    stand_for(twin, module)
    twin.__class__ = type(kind.__name__, (kind,), {**members, "__module__": kind.__module__})
    return twin


def example_of(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """The arguments of a call as ``prepare`` takes a batch: a tuple, or a dict by name. Tensors are detached
    from the graph that they came from."""
    if kwargs:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
        kinds = {name: p.kind for name, p in bound.signature.parameters.items()}
        if any(kinds[name] is inspect.Parameter.VAR_POSITIONAL for name in bound.arguments):
            raise InputError(
                f"{type(model).__name__} is called with arguments by position and by name, and takes *args",
                expected="all arguments by position, or all by name",
                got=f"{len(args)} by position, and {', '.join(kwargs)}",
                hint="name the arguments of its forward",
            )
        more = next((n for n, kind in kinds.items() if kind is inspect.Parameter.VAR_KEYWORD), "")
        named = dict(bound.arguments)
        args_or_names: Any = {**named, **named.pop(more, {})}
    else:
        args_or_names = args
    return torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, args_or_names)


def check_steps_pieces(optimizer: torch.optim.Optimizer) -> None:
    """Raises InputError for an optimizer that cannot step the parameters of several parts."""
    check_supported(optimizer)
    if not can_step_pieces(optimizer):
        raise InputError(
            f"{type(optimizer).__name__} steps the parameters of several modules that are planned one by one",
            expected="an optimizer that works element by element (AdamW, SGD), or one module",
            got=type(optimizer).__name__,
            hint="one optimizer for each module that training_step calls",
        )


def adopt(
    optimizer: torch.optim.Optimizer, heirs: Mapping[int, Tensor], states: States, parallel: ParallelModel
) -> None:
    """Makes an optimizer step the ``heirs``, parameters in ``parallel``, given by the ids of the parameters
    that they replace. The ``states`` of the replaced ones, from a checkpoint for instance, are cut like them.
    """
    with Off():
        for group in optimizer.param_groups:
            group["params"] = [heirs.get(id(p), p) for p in group["params"]]
    for number, state in states.items():
        p = heirs[number]
        optimizer.state[p] = cut_state(state, p, parallel._runtime.by_param[p], parallel.comm)
