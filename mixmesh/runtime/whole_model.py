"""The user's own module with whole weights, lent for a while: to evaluate, generate, export.

This is the very object that ``parallelize`` took over, with its class, hooks and attributes. Afterwards it is
empty again, so that it is never out of date.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from ..base.patch import patched
from ..base.progress import warn_once
from ..errors import InputError
from ..frontend.trace.compiled import uncompiled
from .accelerator import is_accelerator
from .comm import Comm
from .modes import set_modes_like
from .optimizers import full_state
from .original import TakenOver, give_back, take_over
from .shard_numbers import Off
from .shard_tensor import plain
from .shards import Stored

# for each parameter by name, whether it requires a gradient: in the original, and in the parallel model
Learning = dict[str, tuple[bool, bool]]

WITHOUT_LOSS = "_without_loss"  # the attribute in which a model wrapped with a loss keeps the bare model
SUMMED_AT_A_TIME = 2**20  # values of a tensor
IS_LENT = "_is_lent"  # set in such a model while it runs without its loss


class Parallel(Protocol):
    """A parallel model, whose class is in a module that imports this one."""

    _runtime: Any  # a Runtime, whose module imports this one

    def whole(self) -> AbstractContextManager[nn.Module]: ...


def is_parallel(model: nn.Module) -> TypeGuard[Parallel]:
    return hasattr(model, "_runtime")


def whole(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> AbstractContextManager[nn.Module]:
    """A context that gives the user's own module with whole weights. For a parallel model it is
    ``model.whole()``, which is collective; for any other model it is the model itself, so that a script runs
    on one device too. Within the block ``model`` and its modules also run the lent module. A module that
    contains parallel models, such as an average of one, has them whole within the block.

    With its ``optimizer``, ``model.state_dict()`` and ``optimizer.state_dict()`` are those of one device
    within the block, on every rank: for an object of a library that holds both, and saves them on one."""
    if is_parallel(model):
        return model.whole() if optimizer is None else _with_states(model, optimizer)
    places = _lent_places(model)
    return _WholeParts(model, places) if places else _own(model)


@contextmanager
def _with_states(model: Parallel, optimizer: torch.optim.Optimizer) -> Iterator[nn.Module]:
    run = model._runtime
    state = full_state(optimizer, run.by_param, run.comm)
    with (
        model.whole() as module,
        patched(model, "state_dict", module.state_dict),
        patched(optimizer, "state_dict", lambda: dict(state)),
    ):
        yield module


def pieces_of(model: nn.Module) -> dict[str, Any]:
    """The ``state_dict`` of a model as this rank holds it, also in a block that shows the whole one."""
    return type(model).state_dict(model, keep_vars=True)


@contextmanager
def _own(model: nn.Module) -> Iterator[nn.Module]:
    """The user's module of a model on one device, which runs without its loss within the block."""
    wrapped = uncompiled(model)
    if WITHOUT_LOSS not in wrapped.__dict__:
        yield wrapped
        return
    before = wrapped.__dict__.get(IS_LENT, False)
    wrapped.__dict__[IS_LENT] = True
    try:
        yield own_module(wrapped)
    finally:
        wrapped.__dict__[IS_LENT] = before


def _lent_places(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The places within ``model`` whose modules are not the user's own: the parent, and the name in it."""
    return [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if hasattr(child, "_runtime") or WITHOUT_LOSS in child.__dict__
    ]


class _WholeParts(AbstractContextManager):
    """``model``, whose parts at ``places`` are the user's own modules with whole weights for a while."""

    def __init__(self, model: nn.Module, places: list[tuple[nn.Module, str]]) -> None:
        self.model, self.places = model, places
        self._before = [parent.get_submodule(name) for parent, name in places]
        self._lent = ExitStack()

    def __enter__(self) -> nn.Module:
        with ExitStack() as stack:  # if one cannot be lent, those before it are taken back
            modules = [stack.enter_context(whole(child)) for child in self._before]
            self._lent = stack.pop_all()
        self._place(modules)
        return self.model

    def __exit__(self, *error: Any) -> None:
        self._place(self._before)
        self._lent.__exit__(*error)

    def _place(self, modules: list[nn.Module]) -> None:
        for (parent, name), module in zip(self.places, modules):
            parent._modules[name] = module


def own_module(model: nn.Module) -> nn.Module:
    """The user's module within a module that computes a loss of its outputs; any other module itself."""
    model = uncompiled(model)
    return model.__dict__.get(WITHOUT_LOSS, model)


@torch.no_grad()
def whole_tensors(parallel: nn.Module, stored: Mapping[str, Stored], comm: Comm) -> dict[str, Tensor]:
    """All parameters and buffers of a parallel model by every name, whole. Collective."""
    every = chain(
        parallel.named_parameters(remove_duplicate=False), parallel.named_buffers(remove_duplicate=False)
    )
    wholes: dict[int, Tensor] = {}
    out = {}
    for name, mine in every:
        if id(mine) not in wholes:
            wholes[id(mine)] = stored[name].whole(plain(mine), comm)
        out[name] = wholes[id(mine)]
    return out


def learn_alike(shown: Mapping[str, Tensor], lent: Mapping[str, Tensor]) -> Learning:
    """Sets ``requires_grad`` of the ``lent`` parameters as in the parallel model, whose parameters are
    ``shown``, both by name. Returns, by name, the old and the new setting."""
    learning = {
        name: (x.requires_grad, shown[name].requires_grad)
        for name, x in lent.items()
        if isinstance(x, nn.Parameter)
    }
    for name, (_, wants) in learning.items():
        lent[name].requires_grad_(wants)
    return learning


def give_learning(learning: Learning, lent: Mapping[str, Tensor], shown: Mapping[str, Tensor]) -> None:
    """Passes on to the parallel model which parameters were frozen or unfrozen while they were ``lent``: the
    next step trains them so, or is refused. The lent parameters get their old settings back, as they are
    traced again for other shapes."""
    for name, (did, wants) in learning.items():
        if lent[name].requires_grad != wants:
            shown[name].requires_grad_(not wants)
        lent[name].requires_grad_(did)


@dataclass(eq=False)
class Loan:
    """A module that has whole weights for a while. ``known`` has marks of its ``tensors``, by name, as they
    are in the parallel model; ``learning`` says which of them required gradients before and now."""

    module: nn.Module
    tensors: dict[str, Tensor]
    known: dict[str, tuple] = field(default_factory=dict)
    learning: Learning = field(default_factory=dict)

    def note(self) -> None:
        """Notes that its weights now equal the parallel model's."""
        self.known = {name: sums(x) for name, x in self.tensors.items()}

    def changed(self) -> dict[str, Tensor]:
        return {name: x for name, x in self.tensors.items() if sums(x) != self.known[name]}


@torch.no_grad()
def mark(x: Tensor) -> tuple:
    """A mark that changes on every rank when a tensor changes on any: some ranks may hold no piece of it."""
    return x._version, *sums(x)


@torch.no_grad()
def sums(x: Tensor) -> tuple[str, ...]:
    """Sums of a tensor's values, one of them weighted by position. Values that were changed and put back have
    the same sums. They are taken piece by piece: in float64 a large tensor is larger than what a device may
    have left."""
    dtype = torch.complex128 if x.is_complex() else torch.float64
    flat = x.detach().flatten()
    ramp = torch.linspace(1, 2, min(len(flat), SUMMED_AT_A_TIME), dtype=dtype, device=x.device)
    totals = torch.zeros(3, dtype=dtype, device=x.device)
    for n, piece in enumerate(flat.split(SUMMED_AT_A_TIME)):
        wide = piece.to(dtype)
        total = wide.sum()
        totals += torch.stack([total, wide.dot(wide.conj()), wide.dot(ramp[: len(wide)]) + n * total])
    return tuple(map(str, totals.tolist()))


class Lending(AbstractContextManager):
    """Lends the user's own module ``original`` with the values of ``parallel``, whose runtime is ``run``, and
    empties it again at the end of the block. Collective at its beginning.

    An original that was made whole before (``load_state_dict``) stays as it is, and a copy is lent. Raises
    InputError at the end if weights were changed or gradients left, as both would be lost. A lending that is
    dropped without its end does nothing: garbage is collected at any time, and the module may be in use.
    """

    def __init__(self, original: nn.Module, parallel: nn.Module, run: Any) -> None:
        self._original, self._parallel, self._run = original, parallel, run
        self._loan: Loan | None = None
        self._is_empty = False  # whether the original was empty before it was lent
        self._modes: dict[nn.Module, bool] = {}

    def __enter__(self) -> nn.Module:
        original, parallel, run = self._original, self._parallel, self._run
        run.check_values()
        if run.followed is not None:
            run.followed.pass_on()
        self._tell_if_too_large()
        with run.comm.call("whole"):
            values = whole_tensors(parallel, run.stored, run.comm)
        own = own_module(original)
        self._is_empty = all(isinstance(x, TakenOver) for x in _tensors(own).values())
        module = own if self._is_empty else copy.deepcopy(own)
        # includes the tensors of a loss with parameters; a copy may be made of it
        loan = self._loan = Loan(module, _tensors(original if self._is_empty else module))
        self._modes = {m: m.training for m in module.modules()}
        for name, x in loan.tensors.items():
            _fill(x, values[name])
        set_modes_like(module, parallel)
        run.left.show()
        loan.note()
        loan.learning = learn_alike(_tensors(parallel), loan.tensors)
        run.loans.add(loan)
        return module

    def _tell_if_too_large(self) -> None:
        """Warns, on the first rank, if a device has no room for the whole model beside what it stores."""
        from .shapes.room import whole_model_over

        run = self._run
        cut = {id(s): s for s in run.stored.values() if not s.is_everywhere(run.comm.world_size)}.values()
        if run.comm.rank or not cut:
            return
        size_bytes = sum(math.prod(s.shape) * s.dtype.itemsize for s in cut)
        text = whole_model_over(run.forms.plan, size_bytes, cuda=is_accelerator(run.comm.device))
        if text is not None:
            warn_once(text)

    def changed(self) -> dict[str, Tensor]:
        """The weights, by name, that were changed since they were lent."""
        return {} if self._loan is None else self._loan.changed()

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self.close(self.changed() if kind is None else None)

    def close(self, changed: Collection[str] | None) -> None:
        """Ends the block. Raises InputError if there are ``changed`` weights, given by name, or gradients;
        with None nothing is checked."""
        loan, self._loan = self._loan, None
        assert loan is not None  # __enter__ has made it
        try:
            if changed is not None:
                _check(loan, changed)
        finally:
            self._run.loans.discard(loan)
            if self._run.lent is None:
                self._run.left.hide()
            for m, training in self._modes.items():
                m.training = training
            if self._run.followed is not None:
                self._run.followed.show()
            shown = _tensors(self._parallel)
            give_learning(loan.learning, loan.tensors, shown)
            for name, x in loan.tensors.items() if self._is_empty else ():
                if not isinstance(x, TakenOver):
                    take_over(x, shown[name])


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    params, buffers = module.named_parameters, module.named_buffers
    return {**dict(params(remove_duplicate=False)), **dict(buffers(remove_duplicate=False))}


def copy_tensors(source: nn.Module, to: nn.Module) -> None:
    """Copies the values of one module to another of the same kind."""
    values = _tensors(source)
    for name, x in _tensors(to).items():
        _fill(x, values[name])


@torch.no_grad()
def _fill(x: Tensor, value: Tensor) -> None:
    if isinstance(x, TakenOver):
        with Off():
            give_back(x)
        x.data = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=value.device).copy_(value)
    else:
        x.data.copy_(value)


def _check(loan: Loan, changed: Collection[str]) -> None:
    learnt = [name for name, x in loan.tensors.items() if x.grad is not None]
    if changed or learnt:
        raise InputError(
            "weights were changed within model.whole(), and would be lost"
            if changed
            else "a backward pass was made within model.whole(), whose gradients would be lost",
            expected="evaluation (m.eval() for batch norm), or the changes given back",
            got=", ".join(list(changed or learnt)[:3]),
            hint=(
                "model.load_full_state_dict(m.state_dict())  # within the block, on every rank, for weights",
                "copy.deepcopy(m).merge_and_unload()  # a change for a file is made in a copy",
                "with torch.no_grad(): ...  # where no gradient is meant",
            ),
        )
