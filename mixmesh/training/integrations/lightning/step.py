"""``training_step`` as the planned model: it takes a batch and returns the loss and the logged values."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ....errors import InputError
from ....runtime.outputs import Output
from .refusals import MANUAL, METHODS_OF_TRAINER, OF_TRAINER, BatchIndex, in_training_step

LOGGED, RETURNED = "logged", "returned"
_LOG = inspect.signature(pl.LightningModule.log)
SIMPLE = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Logged:
    """A call of ``self.log`` in ``training_step``. Its value is the output ``key``; None for the loss."""

    name: str
    key: str | None
    options: tuple[tuple[str, Any], ...]
    batch_size: int | None = None

    def log(self, module: pl.LightningModule, out: Any, batch_size: int | None) -> None:
        """Logs the value that the step's output ``out`` has for this call."""
        loss = out.loss if isinstance(out, Output) else out
        value = loss if self.key is None else out[LOGGED][self.key]
        size = None if self.batch_size is None else batch_size
        module.log(self.name, value.detach(), batch_size=size, **dict(self.options))


@dataclass(frozen=True)
class Form:
    """The form of a batch: its structure, and its values other than tensors by place."""

    spec: Any
    constants: tuple[tuple[int, Any], ...]

    @classmethod
    def of(cls, batch: Any) -> tuple[Form, dict[str, Tensor]]:
        """The form of a batch, and its tensors by name. Raises InputError for values other than tensors that
        cannot be compared between steps."""
        leaves, spec = pytree.tree_flatten(batch)
        others = [(n, leaf) for n, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)]
        for _, leaf in others:
            if not isinstance(leaf, SIMPLE):
                raise InputError(
                    "the batch holds a value that is no tensor",
                    expected="tensors, numbers and strings in lists, tuples and dicts",
                    got=type(leaf).__name__,
                    hint="a collate_fn that returns a dict of tensors",
                )
        tensors = {f"batch_{n}": leaf for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        return cls(spec, tuple(others)), tensors

    def batch(self, tensors: Mapping[str, Tensor]) -> Any:
        """The batch of this form with these tensors."""
        constants = dict(self.constants)
        count = len(constants) + len(tensors)
        leaves = [constants[n] if n in constants else tensors[f"batch_{n}"] for n in range(count)]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass
class Log:
    """The calls of ``self.log`` of a step, once it was traced. A separate object, since export undoes
    assignments to modules."""

    calls: tuple[Logged, ...] | None = None
    returned: tuple[str, ...] = ()  # the names of the values returned besides the loss

    def keep(self, calls: tuple[Logged, ...], returned: tuple[str, ...]) -> None:
        """Remembers the calls and names. Raises InputError if they depend on the shape of the batch."""
        if self.calls is None:
            self.calls, self.returned = calls, returned
        if self.returned != returned:
            raise in_training_step(
                "other names of its dict for some shapes of a batch", "return the same names"
            )
        if [replace(x, batch_size=None) for x in calls] != [replace(x, batch_size=None) for x in self.calls]:
            raise in_training_step("self.log for some shapes of a batch alone", "log the same in every step")

    def traced(self) -> tuple[tuple[Logged, ...], tuple[str, ...]]:
        """The calls of a step that was traced, and the names that it returns."""
        assert self.calls is not None  # every run of the step sets them
        return self.calls, self.returned

    def result(self, out: Any) -> Any:
        """The return value of ``training_step`` for the output ``out`` of a step: the loss, or a dict with
        it."""
        if not self.returned:
            return out.loss
        values = {name: out[RETURNED][f"v{n}"].detach() for n, name in enumerate(self.returned)}
        return {"loss": out.loss, **values}


class TrainingStep(nn.Module):
    """``module.training_step`` for batches of one ``form``. After tracing, ``log`` has the values that it
    logs."""

    def __init__(self, module: pl.LightningModule, batch: Any, takes_index: bool) -> None:
        super().__init__()
        self.module = module
        self.form, self.tensors = Form.of(batch)
        self.takes_index, self.batch_size = takes_index, size_of(batch)
        self.log = Log()
        self.training = module.training

    def forward(self, **tensors: Tensor) -> dict[str, Any]:
        batch = self.form.batch(tensors)
        calls: list[dict[str, Any]] = []
        with _traced(self.module, calls):
            index = (BatchIndex(),) if self.takes_index else ()
            loss, more = _parts_of(self.module.training_step(batch, *index))
        logged, values = [], {}
        for n, call in enumerate(calls):
            value = call.pop("value")
            key = None if value is loss else f"v{n}"
            if key is not None:
                values[key] = value.detach().reshape(())
            logged.append(self._record(call, key, size_of(batch)))
        self.log.keep(tuple(logged), tuple(more))
        shown = {LOGGED: values, RETURNED: {f"v{n}": x.detach() for n, x in enumerate(more.values())}}
        return {"loss": loss, **{name: each for name, each in shown.items() if each}}

    def _record(self, call: dict[str, Any], key: str | None, batch_size: int | None) -> Logged:
        size = call.pop("batch_size", None)
        if size is not None and size != batch_size:
            raise in_training_step(
                f"self.log({call['name']!r}, batch_size={size})", "leave batch_size= out, or give the batch's"
            )
        return Logged(call.pop("name"), key, tuple(call.items()), size)


def size_of(batch: Any) -> int | None:
    """The number of samples that Lightning counts in a batch; None if it is unknown."""
    try:
        return extract_batch_size(batch)
    except Exception:  # MisconfigurationException: the batch has no tensor
        return None


def _parts_of(returned: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the other tensors of a dict by name, which ``training_step`` has ``returned``."""
    values = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
    others = [name for name, value in values.items() if not isinstance(value, Tensor)]
    if others or "loss" not in values:
        kinds = (f"{name}, a {type(values[name]).__name__}" for name in others[:3])
        names = ", ".join(map(str, kinds if others else values))
        got = f"a dict with {names}" if isinstance(returned, Mapping) else type(returned).__name__
        raise InputError(
            "training_step has to return its loss",
            expected='a tensor, or a dict of tensors with "loss"',
            got=got,
            hint=(
                "self.log(name, tensor) for what else is to be known of a step",
                MANUAL,
            ),
        )
    return values.pop("loss"), values


@contextmanager
def _traced(module: pl.LightningModule, calls: list[dict[str, Any]]) -> Iterator[None]:
    """A context in which ``module`` appends what it logs to ``calls``, and refuses logging that changes from
    step to step."""

    def log(self: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        call = dict(_LOG.bind(self, *args, **kwargs).arguments)
        del call["self"]
        value = call["value"]
        if not isinstance(value, Tensor) or value.numel() != 1:
            kind = "a tensor of many numbers" if isinstance(value, Tensor) else type(value).__name__
            raise in_training_step(
                f"self.log({call['name']!r}, {kind})", f"self.log({call['name']!r}, a tensor of one number)"
            )
        calls.append(call)

    def log_dict(self: pl.LightningModule, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in dictionary.items():
            self.log(name, value, *args, **kwargs)

    def refuse(name: str, hint: str, *_: Any, **__: Any) -> Any:
        raise in_training_step(f"self.{name}", hint)

    members: dict[str, Any] = {"log": log, "log_dict": log_dict}
    members |= {name: property(partial(refuse, name, hint)) for name, hint in OF_TRAINER.items()}
    members |= {name: partial(refuse, name, hint) for name, hint in METHODS_OF_TRAINER.items()}
    original, lengths = type(module), _lengths(module)
    module.__class__ = type(original.__name__, (original,), {**members, "__module__": original.__module__})
    try:
        yield
    finally:
        module.__class__ = original
    for name, length in _lengths(module).items():
        if length != lengths.get(name, length):
            raise in_training_step(
                f"self.{name} to collect something of every step",
                "self.log(name, tensor, on_epoch=True), or a callback's on_train_batch_end",
            )


def _lengths(module: nn.Module) -> dict[str, int]:
    """The lengths of all lists, sets and deques that are attributes of a module or of modules within it, by
    path."""
    return {
        f"{path}.{name}".lstrip("."): len(value)
        for path, each in module.named_modules()
        for name, value in vars(each).items()
        if isinstance(value, list | set | deque)
    }
