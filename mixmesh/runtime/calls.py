"""Binds the arguments of a call to the names in the model's own forward, and checks them against the planned
call.

A plan knows the arguments of one call. Its tensors are the program's inputs, and all others are constants
within the program. An unknown argument, or a constant with another value, would change nothing, so it is
refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..base.callers import line_of_script
from ..errors import InputError
from ..frontend.trace.capture import key_text
from ..frontend.trace.leaves import TENSOR, describe_argument
from ..frontend.trace.words import WORDS, is_words
from ..lang.ir import Program
from .batches import input_words
from .shells import WHOLE_HINT

Parameter = inspect.Parameter
POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
WITHOUT_GRADIENTS = f"a call without gradients: {WHOLE_HINT}"


@dataclass(frozen=True)
class Signature:
    """The arguments of a forward pass: its ``positions``, all its ``names`` with their defaults, and whether
    it takes more of either kind (``*args``, ``**kwargs``)."""

    positions: tuple[str, ...] = ()
    names: Mapping[str, Any] = field(default_factory=dict)
    more_positions: bool = True
    more_names: bool = True

    @classmethod
    def of(cls, model: nn.Module) -> Signature:
        try:
            parameters = inspect.signature(model.forward).parameters.values()
        except (TypeError, ValueError):  # a function that is not written in Python
            return cls()
        kinds = {p.kind for p in parameters}
        named = {p.name: p.default for p in parameters if p.kind in (*POSITIONAL, Parameter.KEYWORD_ONLY)}
        positions = tuple(p.name for p in parameters if p.kind in POSITIONAL)
        return cls(positions, named, Parameter.VAR_POSITIONAL in kinds, Parameter.VAR_KEYWORD in kinds)

    def bind(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Binds the arguments of a call to their names, or to their positions if they have no name. Raises
        InputError."""
        bound = {self.name_of(n): value for n, value in enumerate(args)}
        if len(args) > len(self.positions) and not self.more_positions:
            raise self._refusal(f"{len(args)} arguments by position")
        for name, value in kwargs.items():
            if name in bound:
                raise self._refusal(f"{name} twice, by position and by name")
            if name not in self.names and not self.more_names:
                raise self._refusal(f"{name}, which it does not take")
            bound[name] = value
        return bound

    def name_of(self, position: int) -> str:
        return self.positions[position] if position < len(self.positions) else str(position)

    def named(self, path: str) -> str:
        """The path of a leaf in a batch, with a position at its start replaced by the name: ``0.key`` ->
        ``x.key``."""
        first, dot, rest = path.partition(".")
        return self.name_of(int(first)) + dot + rest if first.isdigit() else path

    def _refusal(self, got: str) -> InputError:
        return InputError(
            "the model is not called as its forward is written",
            expected=f"({', '.join(self.names)}{', ...' if self.more_names else ''})",
            got=got,
        )


def signature_of(model: nn.Module) -> Signature:
    """The signature of a model; for a parallel model that of its original."""
    runtime = getattr(model, "_runtime", None)
    return Signature.of(model) if runtime is None else runtime.calls.signature


@dataclass(frozen=True)
class Calls:
    """The calls that a plan can answer. ``inputs`` maps argument names to the program's inputs. ``known``
    describes every argument of the planned call (``describe_argument``); None if the plan does not record
    them."""

    signature: Signature
    inputs: Mapping[str, str]
    known: Mapping[str, str] | None

    @classmethod
    def of(cls, model: nn.Module, plan: Any) -> Calls:
        program = plan if isinstance(plan, Program) else plan.program
        signature = Signature.of(model)
        arguments = None if isinstance(plan, Program) else plan.arguments
        inputs = {signature.named(i.args[0]): i.args[0] for i in program.batch_inputs}
        planned_text = (
            None if arguments is None else {signature.named(name): text for name, text in arguments}
        )
        return cls(signature, inputs, planned_text)

    def tensors(
        self, args: tuple, kwargs: Mapping[str, Any], *, evaluates: bool = False
    ) -> dict[str, Tensor]:
        """The inputs of the program by its own names; a call that ``evaluates`` may omit some. Raises
        InputError for a call that the program cannot answer."""
        bound = self.signature.bind(args, kwargs)
        leaves = flat(bound)
        if self.known is not None:
            self._check(self.known, leaves, evaluates)
        return {
            self.inputs[name]: leaf
            for name, leaf in leaves.items()
            if name in self.inputs and isinstance(leaf, Tensor)
        }

    def _check(self, known: Mapping[str, str], leaves: Mapping[str, Any], evaluates: bool) -> None:
        for name, leaf in leaves.items():
            text, planned_text = describe_argument(leaf), known.get(name)
            if planned_text is None and leaf is None:
                continue  # equivalent to not passing it
            if planned_text == TENSOR and leaf is None:
                if evaluates:
                    continue
                raise missing(name)
            if planned_text is None and name in self.signature.names:
                planned_text = describe_argument(
                    self.signature.names[name]
                )  # its default, which was not passed when planning
            if text != planned_text:
                raise self._other(name, text, planned_text)
        for name, planned_text in known.items():
            if planned_text in (TENSOR, WORDS) or name in leaves:
                continue  # missing tensors are reported where they are needed; strings are never read
            default = self.signature.names.get(name, Parameter.empty)
            text = "nothing" if default is Parameter.empty else describe_argument(default)
            if text != planned_text:
                raise self._other(name, text, planned_text)

    def _other(self, name: str, text: str, known: str | None) -> InputError:
        if known is None:
            return InputError(
                f"the plan was made without the argument {name}, and would ignore it",
                expected=", ".join(self.known or ()) or "no arguments",
                got=f"{name}={text}",
                hint=(
                    f"plan again with {name} in the batch: mixmesh.prepare(model, optimizer, [batch])",
                    "and give it in every call: the first state of a recurrent network as zeros, not None",
                    WITHOUT_GRADIENTS,
                ),
            )
        argument = name.partition(".")[0]
        changing: tuple[str, ...] = (
            f"a number that changes from call to call: {name}=torch.tensor(...), in the batch too",
            f"one that is a size, or changes rarely: an attribute, model.{name} = ..., which forward reads; "
            "it is traced again for each value",
        )
        if known[:1] in ("'", '"'):  # a string, in the form of describe_argument
            changing = (
                f"strings that change from call to call: leave {argument} out of the call, or out of what "
                "collate_fn returns; a program reads none",
            )
        if "." in name or known == TENSOR:
            changing = changing[:1]
        return InputError(
            f"{name} is {'a tensor' if known == TENSOR else 'a constant'} in the plan, and differs here",
            expected=f"{name}={known}",
            got=f"{name}={text}",
            hint=(
                f"plan again with {name}={text} in the batch",
                *changing,
                WITHOUT_GRADIENTS,
            ),
        )


def missing(name: str, given: str = "None") -> InputError:
    """The error for a call without an input that the loss depends on."""
    words = input_words(name)
    absent = words if name.isdigit() else f"tensor {name!r}"
    return InputError(
        f"the batch has no {absent}, and the planned loss is made of it",
        expected=f"{words}, as in the batch that was planned with",
        got=given,
        where=line_of_script(),
        hint=(
            f"pass {words}",
            "if the script computes the loss itself: mixmesh.prepare(..., inputs=lambda x, y: (x,)), "
            'in Accelerate planning={"batch": (x,)}, with what the model is called with',
            "to evaluate without it: mixmesh.prepare(..., outputs=(...,)), and model.eval()",
        ),
    )


def by_size(tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[tuple[int, int], str]:
    """The tensor that has each size in a dim, by the dim and the size; of several the last of ``names``."""
    return {(dim, size): name for name in names for dim, size in enumerate(tensors[name].shape)}


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of arguments by path: ``past.0.key``."""
    pairs, _ = pytree.tree_flatten_with_path(dict(tree), is_leaf=is_words)
    return {".".join(map(key_text, path)): leaf for path, leaf in pairs}


def as_planned(model: nn.Module, batch: Mapping[str, Any] | tuple | list, program: Program) -> Any:
    """A batch in the form after which the program's inputs are named: a tuple, or a dict."""
    names = [i.args[0].partition(".")[0] for i in program.batch_inputs]
    positions = Signature.of(model).positions
    by_position = any(name.isdigit() for name in names)
    if isinstance(batch, Mapping) and by_position and set(batch) == set(positions[: len(batch)]):
        return tuple(batch[name] for name in positions[: len(batch)])
    if not isinstance(batch, Mapping) and names and not by_position and len(batch) <= len(positions):
        return dict(zip(positions, batch))
    return batch
