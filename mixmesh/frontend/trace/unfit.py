"""The error for a batch that a model's forward does not take: it says which values are too many or absent."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from ...errors import TraceError
from .locate import place_of_function

UNFIT = "the model's forward does not take the batch"


def of_an_unfit_batch(error: Exception, model: nn.Module, batch: Any) -> TraceError | None:
    """The error for a call ``model(**batch)`` or ``model(*batch)`` that Python refused; None if the forward
    takes the batch, or if its arguments are unknown."""
    if not isinstance(error, TypeError):
        return None
    values, named = ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})
    try:
        signature = inspect.signature(model.forward)
    except ValueError:  # a function that is not written in Python
        return None
    try:
        signature.bind(*values, **named)
    except TypeError as reason:
        return TraceError(
            UNFIT,
            expected=f"the arguments of {type(model).__name__}.forward{_by_names(signature)}",
            got=f"{', '.join(named) if named else f'{len(values)} values'}: {reason}",
            where=str(place_of_function(inspect.unwrap(model.forward))),
            hint=_remedies(signature, values, named),
        )
    return None


def _by_names(signature: inspect.Signature) -> str:
    """The arguments without their types, which may be long."""
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


def _remedies(
    signature: inspect.Signature, values: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[str, ...]:
    taken = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    rest = taken[len(values) :]
    names = {p.name for p in rest}
    takes_all = len(taken) < len(signature.parameters)
    too_many = [] if takes_all else [name for name in named if name not in names]
    absent = [p.name for p in rest if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    absent = [name for name in absent if name not in named]
    surplus = len(values) - len(taken)
    return tuple(
        text
        for is_so, text in (
            (too_many, f"leave {', '.join(too_many)} out of the batch, in the data set or its collate_fn"),
            (surplus > 0, f"a batch of {len(taken)} values, from the data set or its collate_fn"),
            (absent, f"put {', '.join(absent)} into the batch, or give forward a default for it"),
        )
        if is_so
    )
