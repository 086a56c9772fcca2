"""Checks, before anything is computed, that a parallel model may be called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import is_, methodcaller

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..frontend.trace.autocast import Autocast, autocast_now, autocast_text
from .shard_numbers import Off
from .shard_whole import PRUNED

AGAIN = "plan again with the model as it is now, and parallelize that"


class Tables:
    """The parameters and children of a model's modules when they were last looked at. Comparing them with the
    present ones takes a tenth of the time of asking the model for its parameters."""

    def __init__(self) -> None:
        self._tables: list[Mapping[str, object]] = []
        self._lengths: list[int] = []
        self._values: list[object] = []
        self._buffers: list[tuple[str, Mapping[str, Tensor | None], str]] = []

    def see(self, model: nn.Module) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        self._tables = [table for m in modules.values() for table in (m._parameters, m._modules)]
        self._lengths = list(map(len, self._tables))
        self._values = list(self._present())
        self._buffers = [
            (f"{prefix}.{key}" if prefix else key, m._buffers, key)
            for prefix, m in modules.items()
            for key in m._buffers
        ]

    def buffers(self) -> dict[str, Tensor]:
        """The buffers of the modules, by all of their names."""
        values = ((name, table.get(key)) for name, table, key in self._buffers)
        return {name: x for name, x in values if x is not None}

    def are_as_seen(self) -> bool:
        return (
            bool(self._tables)
            and list(map(len, self._tables)) == self._lengths
            and all(map(is_, self._present(), self._values))
        )

    def _present(self) -> Iterator[object]:
        return chain.from_iterable(map(methodcaller("values"), self._tables))


@dataclass(frozen=True)
class Guards:
    """``shown`` are the model's parameters in their order, ``inner`` the program's tensors for them, in the
    same memory. ``trainable`` says for each whether it was trainable when the plan was made."""

    names: tuple[str, ...]
    shown: tuple[nn.Parameter, ...]
    inner: tuple[nn.Parameter, ...]
    trainable: tuple[bool, ...]
    device: torch.device
    autocast: Autocast | None = None  # the autocast that the model was planned under
    tables: Tables = field(default_factory=Tables, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        names: tuple[str, ...],
        inner: Mapping[nn.Parameter, nn.Parameter],
        device: torch.device,
        autocast: Autocast | None = None,
    ) -> Guards:
        """Guards for the parameters with these names; ``inner`` maps each shown parameter to the program's
        tensor."""
        trainable = tuple(p.requires_grad for p in inner.values())
        return cls(names, tuple(inner), tuple(inner.values()), trainable, device, autocast)

    def check(self, model: nn.Module) -> None:
        """Raises InputError if the program would not compute what the caller expects."""
        _check_autocast(self.device, self.autocast)
        with Off():
            if not self.tables.are_as_seen():
                now = tuple(model.parameters())
                if len(now) != len(self.shown) or not all(map(is_, now, self.shown)):
                    raise self._replaced(model)
                self.tables.see(model)
            for name, p, trainable in zip(self.names, self.shown, self.trainable):
                if p.requires_grad and not trainable:
                    raise InputError(
                        f"{name} was frozen when the plan was made: the program computes no gradient of it",
                        expected=f"{name}.requires_grad = False",
                        got=f"{name}.requires_grad = True",
                        hint=(
                            "freeze it after planning: it may be trained again whenever the script wants",
                            f"set requires_grad before planning: {AGAIN}",
                            "let it train from the start, and drop its gradients until it should: "
                            "p.grad = None after backward, in Lightning in on_after_backward",
                        ),
                    )
            if list(map(Tensor.data_ptr, self.shown)) != list(map(Tensor.data_ptr, self.inner)):
                for name, p, mine in zip(self.names, self.shown, self.inner):
                    if p.data_ptr() != mine.data_ptr():
                        _follow(name, p, mine)

    def check_conversion(self, fn: Callable[[Tensor], Tensor]) -> None:
        for dtype in {p.dtype for p in self.inner}:
            before = torch.empty(0, dtype=dtype, device=self.device)
            after = fn(before)
            if after.dtype != before.dtype or after.device != before.device:
                raise InputError(
                    "a parallel model keeps the device and the dtype that it was planned with",
                    expected=f"{before.dtype} on {before.device}",
                    got=f"{after.dtype} on {after.device}",
                    hint="model.half(), model.to(...) of the model before prepare or plan; then plan again",
                )

    def _replaced(self, model: nn.Module) -> InputError:
        now = dict(model.named_parameters())
        current = dict(zip(self.names, self.shown))
        changed = [n for n in {**current, **now} if now.get(n) is not current.get(n)]
        pruned = [n for n in changed if n.endswith("_orig") and n.removesuffix("_orig") in changed]
        return InputError(
            "parameters of the parallel model were replaced, added or removed",
            expected="the parameters that parallelize made",
            got=", ".join(changed[:3]),
            hint=(
                *((PRUNED,) if pruned else ()),
                "change values in place: p.data.copy_(values), or model.load_full_state_dict(state)",
                AGAIN,
            ),
        )


def _follow(name: str, p: nn.Parameter, mine: nn.Parameter) -> None:
    """Makes the program use the new memory that ``p.data = values`` gave a parameter."""
    if p.shape != mine.shape or p.dtype != mine.dtype or p.device != mine.device:
        raise InputError(
            f"the data of {name} is of another kind than planned",
            expected=f"{list(mine.shape)} {mine.dtype} on {mine.device}",
            got=f"{list(p.shape)} {p.dtype} on {p.device}",
            hint="p.data.copy_(values)",
        )
    mine.data = p.data


def _check_autocast(device: torch.device, planned: Autocast | None) -> None:
    now = autocast_now(device.type)
    if now == planned:
        return
    hint: tuple[str, ...]
    if planned is None:
        hint = (
            "mixmesh.plan(..., autocast=torch.bfloat16), or mixmesh.prepare within the same context",
            f"or in the model's forward: with torch.autocast({device.type!r}, torch.bfloat16): ...",
            "or no context, if the model casts by itself, as under Accelerator(mixed_precision=...)",
        )
    else:
        hint = (
            f"with {autocast_text(planned)}: around the call, to evaluate too",
            "or plan again, under the context that the model is called under",
        )
    raise InputError(
        "the model is not called under the autocast that it was planned under: its casts are in the program",
        expected=autocast_text(planned),
        got=autocast_text(now),
        hint=hint,
    )


def wrapped_twice(wrapper: str) -> InputError:
    return InputError(
        "this model is parallel already: a wrapper would sum its gradients, or cut its batches, once more",
        expected="the model that parallelize returned, used as it is",
        got=f"{wrapper} around it",
        hint=(
            "leave the wrapper out: mixmesh sums the gradients and cuts the batches",
            "in place of a Trainer: from mixmesh.hf import Trainer (docs/guide/trainers.md)",
            "in place of an Accelerator: from mixmesh.accelerate import Accelerator",
            "in place of a strategy of Lightning: mixmesh.lightning.Strategy()",
            "to evaluate: model.eval(), and whole batches of any loader on every rank",
        ),
    )
