"""Manual optimization: ``training_step`` runs as it is written, on every rank with the whole batch, and the
modules that it calls run by a plan.

Their outputs are whole on every rank, with a gradient, so that every rank computes the same losses and takes
the same branches. Optimizers and schedulers are the script's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from ....lang.ir import REPLICATE
from ....runtime import optimizers as sharded
from ....runtime.first_rank import from_first_rank
from ....runtime.layout import Layout
from ....runtime.optimizers import params_of
from ....runtime.parallel import ParallelModel
from ....runtime.shards import Stored
from ..launched import check_alike, check_scaled, learning_rates
from .parts import CONTAINERS, Call, Part, keeping_modes, plan_part
from .refusals import called_within

RUN = "_compiled_call_impl"  # if it is set, PyTorch calls it in place of a module's forward and hooks


class Manual:
    """The manual steps of a LightningModule, and the parts of it that were planned so far."""

    def __init__(
        self,
        module: pl.LightningModule,
        optimizers: list[torch.optim.Optimizer],
        planning: Mapping[str, Any],
        scaler: Any = None,
    ) -> None:
        self.module, self.optimizers, self.scaler = module, optimizers, scaler
        self.planning = planning
        self.parts: list[Part] = []
        self._trains = {id(p): p.requires_grad for p in module.parameters()}
        self._replaced: dict[nn.Module, Any] = {}  # for each module, the former value of ``RUN``
        self._is_lent = False

    # ---- a step

    @contextmanager
    def step(self, batch: Any) -> Iterator[None]:
        """A context for ``training_step``, in which the first call of a module plans it. Raises InputError if
        ranks have different batches or learning rates. Collective."""
        check_alike(tensors_of(batch), tuple(rate for o in self.optimizers for rate in learning_rates(o)))
        self.take_back()
        self._watch()
        try:
            yield
        finally:
            self._unwatch()

    def _watch(self) -> None:
        """Makes the first call of every module that is not planned, and that trains, plan it. The
        LightningModule, which no parallel model can replace, goes on to be watched as a part."""
        whole = [self.module] if self._part_of(self.module) else []
        for module in (*self._unplanned(), *whole):
            self._replace(module, partial(self._called, module))
        for part in self.parts:
            for name, module in part.parallel.named_modules():
                if name:
                    self._replace(module, partial(self._refuse, part, name))

    def _replace(self, module: nn.Module, run: Any) -> None:
        self._replaced[module] = vars(module).get(RUN)
        vars(module)[RUN] = run

    def _refuse(self, part: Part, name: str, *_: Any, **__: Any) -> Any:
        named = [n for n, m in self.module.named_modules() if m is part.parallel]
        whole = ".".join(("self", *named[:1]))
        raise called_within(f"{whole}.{name}", whole)

    def _unwatch(self) -> None:
        for module, before in self._replaced.items():
            vars(module)[RUN] = before
        self._replaced.clear()

    def _part_of(self, module: nn.Module) -> Part | None:
        """The part that the LightningModule is, if it is one. Other parts are replaced by their models."""
        if module is not self.module:
            return None
        return next((part for part in self.parts if part.is_all), None)

    def _unplanned(self) -> list[nn.Module]:
        every = [(part.place, part.original, part.parallel) for part in self.parts]
        planned = {id(m) for models in every for model in models for m in model.modules()}
        return [
            module
            for module in self.module.modules()
            if id(module) not in planned
            and not isinstance(module, CONTAINERS)
            and any(self._trains.get(id(p), p.requires_grad) for p in module.parameters())
        ]

    def _called(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        part = self._part_of(module)
        if part is None and not self._can_be_planned(module):
            return module._call_impl(*args, **kwargs)
        self._unwatch()  # a trace follows modules in their normal state
        try:
            part = part or self._plan(module, (args, kwargs))
            return part.parallel(*args, **kwargs)
        finally:
            self._watch()

    def _can_be_planned(self, module: nn.Module) -> bool:
        """Whether a module can be a part. A LightningModule with several optimizers cannot: its ``forward``
        belongs to one of them, and the part is the module that ``forward`` calls."""
        holds_parts = any(isinstance(each, ParallelModel) for each in module.modules())
        return not holds_parts and (module is not self.module or len(self.optimizers) == 1)

    def _plan(self, module: nn.Module, call: Call) -> Part:
        # by parameter, although Lightning declares it as by name
        toggled: Any = self.module._param_requires_grad_state
        part = plan_part(
            module,
            call,
            self.optimizers,
            self.planning,
            self._trains,
            toggled,
            is_all=module is self.module,
        )
        part.stand_in(self.module)
        self.parts.append(part)
        check_scaled(part.parallel, self.scaler, 'precision="16-mixed"')
        return part

    # ---- the weights

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives all ranks the first rank's values of the parameters that no part has: each rank trains these
        alone, and devices may round differently. Collective."""
        alone = [p for p in params_of(optimizer) if id(p) not in self._of_parts()]
        if alone:
            values = from_first_rank(lambda: [p.detach().cpu() for p in alone], what="weights of no part")
            with torch.no_grad():
                for p, value in zip(alone, values, strict=True):
                    p.copy_(value)

    def _of_parts(self) -> set[int]:
        return {id(p) for part in self.parts for p in part.parallel.parameters()}

    def lend(self) -> None:
        """Puts the user's own modules back in their places, with whole weights. Collective."""
        if not self._is_lent:
            with keeping_modes(self.module):
                for part in self.parts:
                    part.step_aside(self.module)
                    part.lender.lend()
            self._is_lent = True
        for part in self.parts:
            part.lender.lend()

    def take_back(self) -> None:
        """Puts the parallel models in their places, with weights that a callback changed in the lent modules.
        Raises InputError if ranks changed them differently. Collective while they are lent."""
        if not self._is_lent:
            return
        with keeping_modes(self.module):
            for part in self.parts:
                part.lender.take_back()
                part.stand_in(self.module)
        self._is_lent = False

    def finish(self) -> None:
        """Leaves the user's own modules with the trained values for good. Collective."""
        self.lend()
        for part in self.parts:
            part.fill()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """``optimizer.state_dict()`` as on a single device, the same on all ranks. Collective."""
        if not self.parts:
            return optimizer.state_dict()
        comm = self.parts[0].parallel.comm
        stored: dict[Tensor, Stored] = {}
        for part in self.parts:
            stored |= part.parallel._runtime.by_param
        everywhere = Layout(REPLICATE, tuple(range(comm.world_size)))
        for p in params_of(optimizer):
            if p not in stored:
                stored[p] = Stored("a parameter of no part", tuple(p.shape), p.dtype, everywhere)
        return sharded.full_state(optimizer, stored, comm)


def tensors_of(batch: Any) -> dict[str, Tensor]:
    """The tensors of a batch by their place in it."""
    leaves = torch.utils._pytree.tree_leaves(batch)
    return {str(n): leaf for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
