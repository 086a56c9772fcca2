"""The option of ``mixmesh run`` for initial weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .launch import meet

if TYPE_CHECKING:
    from ..runtime.parallel import ParallelModel

InitialWeights = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        metavar="FROM",
        help="Start from the weights in a .safetensors file, in the files of an index, or in a folder with "
        "either; ignored when a checkpoint is resumed.",
    ),
]


def initial_weights(path: Path | None, timeout_s: float) -> Callable[[ParallelModel], object]:
    """A function that loads the weights of ``path`` into a parallel model; without a path it does nothing.
    Collective with a path. Raises InputError on all ranks, before planning, if the first one cannot read the
    weights."""
    if path is None:
        return lambda model: None
    from ..checkpoint import load_weights
    from ..checkpoint.weight_files import held_tensors
    from ..runtime.first_rank import from_first_rank

    def check() -> None:  # without a result, which would be sent to the other ranks
        held_tensors(path)

    meet(timeout_s)
    from_first_rank(check)
    return lambda model: load_weights(model, path)
