"""The option of ``mixmesh run`` for losses and gradients that are not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InputError

if TYPE_CHECKING:
    from ..runtime.finite import OnNan

CHOICES = ("stop", "skip", "ignore")  # the values of ``OnNan``, whose module would import torch
OnNanName = Annotated[
    str | None,
    typer.Option(
        "--on-nan",
        metavar="WHAT",
        help="If a loss or gradients are not finite: stop (the default), skip the batch, or ignore.",
    ),
]
AllowNan = Annotated[bool, typer.Option("--allow-nan", hidden=True, help="The same as --on-nan ignore.")]


def on_nan_of(name: str | None, allow_nan: bool) -> OnNan:
    """The choice made by the options. Raises InputError for an unknown word, and for two options that
    contradict each other."""
    from ..runtime.finite import OnNan

    choice = name if name is not None else "ignore" if allow_nan else "stop"
    if choice not in CHOICES or (allow_nan and choice != "ignore"):
        raise InputError(
            "what is done about a loss that is not finite cannot be read",
            expected=f"--on-nan {', '.join(CHOICES[:-1])} or {CHOICES[-1]}",
            got=f"--on-nan {choice}" + (" and --allow-nan" if allow_nan else ""),
            hint="--on-nan skip",
        )
    return OnNan(choice)
