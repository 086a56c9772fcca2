"""The options of ``mixmesh run`` for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..base.progress import say
from ..errors import Infeasible, InputError
from ..lang.plan_file import Plan
from .launch import meet

if TYPE_CHECKING:
    from ..checkpoint.run import RunCheckpoints, Settings
    from ..runtime.parallel import ParallelModel

DEFAULT_EVERY = "600s"
CheckpointFolder = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        metavar="DIR",
        help="Write checkpoints there, and resume from the newest good one, up to --steps.",
    ),
]
CheckpointEvery = Annotated[
    str | None,
    typer.Option(
        "--every",
        metavar="N",
        help=f"How often: 50 is every 50 steps, 600s every 600 seconds; {DEFAULT_EVERY} without it.",
    ),
]
CheckpointKeep = Annotated[
    int,
    typer.Option("--keep", min=1, metavar="K", help="How many checkpoints to keep; older ones are removed."),
]
CheckpointFresh = Annotated[
    bool, typer.Option("--fresh", help="Start over even if there are checkpoints; these then count as older.")
]


def checkpoint_settings(
    folder: Path | None, every: str | None, keep: int, is_fresh: bool, timeout_s: float
) -> Settings | None:
    """The settings of checkpoints; None without a folder. Collective with one. Raises InputError on all ranks
    if the first one cannot write there."""
    if folder is None:
        if every is not None or is_fresh:
            raise InputError(
                "where checkpoints are is not said",
                expected="--checkpoint DIR",
                got="--every or --fresh without it",
                hint="--checkpoint checkpoints",
            )
        return None
    from ..checkpoint.run import Every, Settings
    from ..runtime.first_rank import from_first_rank

    settings = Settings(folder, Every.parse(every or DEFAULT_EVERY), keep, is_fresh)
    meet(timeout_s)
    from_first_rank(settings.check_folder)
    return settings


@contextmanager
def checkpoint_stays(settings: Settings | None) -> Iterator[None]:
    """Adds a hint to an error that no plan fits: the checkpoint from which another start can continue."""
    try:
        yield
    except Infeasible as error:
        if settings is not None:
            from ..checkpoint.manifest import checkpoints_in

            newest = next(iter(checkpoints_in(settings.folder)), None)
            stays = "no checkpoint was written yet" if newest is None else f"the checkpoint {newest} stays"
            error.hint = (*error.hint, f"{stays}: the same command goes on with more or larger devices")
        raise


def keeper_of(
    settings: Settings | None,
    plan: Plan,
    epochs: int | None,
    initial: Callable[[ParallelModel], object],
    *,
    is_quiet: bool,
    may_follow: bool,
    on_saved: Callable[[int], object],
) -> RunCheckpoints | None:
    """The keeper of a run's checkpoints, or None. ``initial`` is called if there is no earlier checkpoint to
    resume from; ``may_follow``: another plan of the same form may follow during the run; ``on_saved`` gets
    the step of every complete checkpoint."""
    if settings is None:
        return None
    from ..checkpoint.run import RunCheckpoints

    def say_unless_quiet(text: str) -> None:
        if not is_quiet:
            say(text)

    return RunCheckpoints(
        settings, plan, epochs, say_unless_quiet, initial, may_follow=may_follow, on_saved=on_saved
    )
