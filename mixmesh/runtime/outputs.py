"""The return value of a parallel model that returns more than its loss.

The loss is that of the whole batch. Further tensors that were requested in planning (``outputs=("logits",)``)
are kept: this rank's rows of them, and with ``gather()`` the rows of all ranks in the order of the batch.
Using any other output raises an error that says how to request it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..frontend.trace.dtypes import TORCH_DTYPE
from ..frontend.trace.outputs import first_part
from ..lang.ir import (
    REPLICATE,
    Instruction,
    Program,
    Returned,
    Shard,
    dealt_rows,
    held_rows,
    outputs_of,
    shown_rows,
)
from ..lang.ir.graph import begins_gradient
from .comm import Comm
from .layout import Layout
from .shards import Stored


class Output:
    """The loss and the outputs of one call, under the model's own names or places: ``out.loss``,
    ``out["logits"]``, ``out[1]``, ``loss, logits = out``. Iterating gives values if the model returns a
    tuple, and otherwise names. ``rows`` are the positions in the batch of the rows that this rank shows; None
    if it shows all."""

    def __init__(
        self,
        values: Mapping[str, Any],
        returned: Returned,
        rows: slice | None = None,
        gather: Callable[..., Mapping[str, Any]] | None = None,
    ) -> None:
        self._values, self._returned, self._gather = dict(values), returned, gather
        self.rows = rows

    @property
    def loss(self) -> Tensor:
        name = self._returned.loss or "loss"
        if name not in self._values:
            raise AttributeError(f"the model returns no 'loss', but {', '.join(self._values)}")
        return self._values[name]

    def gather(self, name: str | int | None = None) -> Any:
        """The outputs with the rows of all ranks, or only the output of this name. The values are detached,
        and the same on every rank. Collective."""
        values = self._values if self._gather is None else {**self._values, **self._gather()}
        whole = Output(values, self._returned)
        return whole if name is None else whole[name]

    def everywhere(self) -> Output:
        """This output with the rows of all ranks. Collective if outputs are kept. A backward pass through
        it is refused, as it is through this rank's rows."""
        if self._gather is None:
            return self
        return Output({**self._values, **self._gather(is_guarded=True)}, self._returned)

    def keys(self) -> Iterable[str]:
        return self._values.keys()

    def values(self) -> Iterable[Any]:
        return self._values.values()

    def items(self) -> Iterable[tuple[str, Any]]:
        return self._values.items()

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def to_tuple(self) -> tuple:
        return tuple(self._values.values())

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, slice):
            return self.to_tuple()[key]
        if isinstance(key, int) and str(key) not in self._values:
            return _checked(self.to_tuple()[key])
        return _checked(self._values[str(key)])

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name not in values:
            tensors = ", ".join(values)
            raise AttributeError(f"the model returns no {name!r}, but {tensors}{self._instead_of_methods()}")
        return _checked(values[name])

    def _instead_of_methods(self) -> str:
        """The hint for an object whose methods the loop calls."""
        if self._returned.loss or self._returned.is_tuple:
            return ""
        return (
            ": its tensors. An object with methods is made of them in the loop, as in "
            "torch.distributions.Categorical(logits=out.logits)"
        )

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.to_tuple() if self._returned.is_tuple else tuple(self._values))

    def __repr__(self) -> str:
        return f"Output({', '.join(f'{name}={_brief(value)}' for name, value in self._values.items())})"


class NotKept:
    """Stands for an output that was not requested. Any use of it raises an error that says how to request
    it."""

    name: str

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def error(self) -> InputError:
        key = int(self.name) if self.name.isdigit() else self.name
        return InputError(
            f"the output {self.name} is not kept: memory and links have to be planned for it",
            expected="outputs that were asked for when the plan was made",
            got=f"a use of {self.name}",
            hint=(
                f"mixmesh.prepare(..., outputs=({key!r},))",
                f"mixmesh.plan(..., outputs=({key!r},)), or Job(..., outputs=({key!r},)) in a job",
            ),
        )

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        raise next(x for x in leaves if isinstance(x, NotKept)).error()

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise self.error()

    __getattr__ = __setattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __call__ = __float__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __matmul__ = __neg__ = __int__ = _refuse
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"NotKept({self.name!r})"


def _checked(value: Any) -> Any:
    if isinstance(value, NotKept):
        raise value.error()
    return value


def _brief(value: Any) -> str:
    return f"{list(value.shape)}" if isinstance(value, Tensor) and value.ndim else repr(value)


@dataclass(frozen=True)
class Kept:
    """An output of the program on this rank. ``held`` describes how ranks show its rows. ``is_narrowed``
    means that this rank holds all rows and shows only its own, and ``flows`` that a gradient flows through it
    in the original model."""

    name: str
    held: Stored
    is_narrowed: bool
    flows: bool

    @classmethod
    def of(cls, program: Program, i: Instruction, flowing: frozenset[str]) -> Kept:
        t = program.types[i.inputs[0]]
        rows, ranks = shown_rows(program, i), program.participants(t)
        layout = Layout(REPLICATE, ranks) if rows is None else Layout(Shard(0), ranks, rows)
        stored = Stored(i.args[0], t.value.shape, TORCH_DTYPE[t.value.dtype], layout)
        narrowed = rows is not None and held_rows(program, i) is None
        return cls(i.args[0], stored, narrowed, t.value.is_floating and i.inputs[0] in flowing)

    def shown(self, pieces: list[Tensor], comm: Comm) -> Tensor:
        """The rows that this rank shows, with those of its micro-batches in order."""
        layout = self.held.held
        if not pieces:
            shape = (0, *self.held.shape[1:]) if layout.sizes or self.held.shape else ()
            return torch.empty(shape, dtype=self.held.dtype, device=comm.device)
        value = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if not self.is_narrowed:
            return value
        return value.narrow(0, *layout.piece(comm.rank))


@dataclass(frozen=True)
class Returns:
    """Makes a call's return value in the form that the model ``returned`` in planning, with the outputs that
    are ``kept``. ``rows`` are this rank's samples. ``has_loss`` is False for a call without labels."""

    returned: Returned
    kept: tuple[Kept, ...]
    rows: slice | None
    has_loss: bool = True

    @classmethod
    def of(cls, plan: Any, comm: Comm) -> Returns | None:
        """The returns of a plan; None if the model returns the loss itself."""
        program = plan if isinstance(plan, Program) else plan.program
        outputs = outputs_of(program)
        has_loss = not isinstance(plan, Program) and plan.output_has_loss
        if not has_loss and not outputs:
            return None
        returned = Returned() if isinstance(plan, Program) else plan.returned
        if not returned.names:
            returned = Returned((returned.loss, *outputs), returned.loss)
        flowing = _descendants(program)
        kept = tuple(Kept.of(program, i, flowing) for i in outputs.values())
        return cls(returned, kept, _own_rows(program, comm.rank))

    def with_gradients_of(self, program: Program) -> Returns:
        """The same where gradients flow as in this ``program``, which may have some of inputs."""
        outputs, flowing = outputs_of(program), _descendants(program)
        return replace(self, kept=tuple(Kept.of(program, outputs[k.name], flowing) for k in self.kept))

    def without_loss(self) -> Returns:
        """The same for a call without a loss. Raises InputError for a tuple, because its positions would
        change."""
        if self.returned.is_tuple:
            raise InputError(
                "a tuple has other places without the loss",
                expected="a model that returns an object or a dict",
                got="a tuple, and a call without what the loss is made of",
                hint="pass the labels, or return an object with .loss and .logits",
            )
        return replace(self, has_loss=False)

    def __call__(self, loss: Tensor, shown: Mapping[str, list[Tensor]], comm: Comm) -> Output:
        """Makes the output of one call from this rank's part."""
        mine = {k.name: k.shown(shown.get(k.name, []), comm) for k in self.kept}
        guarded = {k.name: _guarded(mine[k.name], k) for k in self.kept}

        def gather(*, is_guarded: bool = False) -> dict[str, Any]:
            with comm.call("gather of outputs"), torch.no_grad():
                wholes = {k.name: k.held.whole(mine[k.name], comm) for k in self.kept}
            if is_guarded:
                wholes = {k.name: _guarded(wholes[k.name], k) for k in self.kept}
            return trees(wholes)

        named = trees(guarded)
        names = dict.fromkeys(map(first_part, self.returned.names))
        shown_loss = loss if self.has_loss else None
        values = {n: shown_loss if n == self.returned.loss else named.get(n, NotKept(n)) for n in names}
        return Output(values, self.returned, self.rows, gather)


def trees(values: Mapping[str, Tensor]) -> dict[str, Any]:
    """Nests tensors given by path as the model does: ``hidden.0`` and ``hidden.1`` become a tuple
    ``hidden``, in the order of their numbers: a program may compute them in another one."""
    out: dict[str, Any] = {}
    for path, value in values.items():
        *folders, leaf = path.split(".")
        at = out
        for folder in folders:
            at = at.setdefault(folder, {})
        at[leaf] = value
    return {name: _as_tuples(value) for name, value in out.items()}


def _as_tuples(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    as_tuples = {name: _as_tuples(value) for name, value in tree.items()}
    if not all(name.isdigit() for name in as_tuples):
        return as_tuples
    return tuple(as_tuples[name] for name in sorted(as_tuples, key=int))


def _own_rows(program: Program, rank: int) -> slice | None:
    samples = dealt_rows(program)
    return None if samples is None else slice(sum(samples[:rank]), sum(samples[: rank + 1]))


def _descendants(program: Program) -> frozenset[str]:
    """Values that depend on a trainable parameter, or on an input that is given a gradient."""
    names: set[str] = set()
    for i in program.instructions:
        if begins_gradient(i) or (i.op != "aten.detach" and not names.isdisjoint(i.inputs)):
            names.update(r for r in i.results if r is not None)
    return frozenset(names)


def _guarded(value: Tensor, kept: Kept) -> Tensor:
    """Stands for ``value`` in the original model: it requires a gradient, and a backward pass through it is
    refused."""
    if not (kept.flows and torch.is_grad_enabled()):
        return value
    return _NoGradient.apply(value, torch.empty(0, requires_grad=True), kept.name)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value: Tensor, anchor: Tensor, name: str) -> Tensor:
        ctx.name = name
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        raise InputError(
            "an output of a parallel model is shown without a gradient",
            expected="the loss of the whole batch within the program",
            got=f"backward through {ctx.name}",
            hint=(
                "mixmesh.prepare(..., loss=function of (outputs, targets)), or compute the term in forward",
                f"for a metric: {ctx.name}.detach()",
            ),
        )
