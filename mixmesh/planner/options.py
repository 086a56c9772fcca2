"""The options of planning, as one value."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection
from dataclasses import dataclass

from ..cost import Profile
from ..errors import InputError
from ..lang.optimizer_states import ADAM, OptimizerStates
from .planners import PLANNERS


@dataclass(frozen=True)
class Options:
    """The wishes of the caller for a plan. ``planner`` is a name in ``PLANNERS``, or ``auto`` for the best of
    them.

    ``profile`` holds measured costs. ``optimizer_states`` are tensors per parameter, and ``whole_parameters``
    is for optimizers that cannot step parts of parameters (LAMB). ``search_s`` limits the open-ended planners
    (heterog, tag, placed: each ``SEARCH_S`` by default); ``auto`` asks these and other slow ones only if it
    is given. ``exact_s`` is the time for HiGHS to prove how far the chosen program is from the cheapest.
    ``unmeasured`` names mechanisms of GPUs to count on although they were never measured
    (``cost.UNMEASURED``). ``tf32`` tells whether matrix products of float32 may run in TF32; None takes the
    job's setting when it was traced, and counts on none for a bare graph, which has no setting.

    Raises InputError for an unknown planner, or a search whose time is no time.
    """

    planner: str = "auto"
    profile: Profile | None = None
    optimizer_states: OptimizerStates = ADAM
    whole_parameters: bool = False
    search_s: float | None = None
    exact_s: float | None = None
    unmeasured: Collection[str] = ()
    tf32: bool | None = None

    def __post_init__(self) -> None:
        check_planner(self.planner)
        check_limits(self.exact_s, self.search_s)


def check_planner(planner: str) -> None:
    """Raises InputError for a planner that does not exist."""
    if planner in PLANNERS:
        return
    near = difflib.get_close_matches(str(planner).lower(), PLANNERS, 1, cutoff=0.4)
    raise InputError(
        f"unknown planner {planner!r}",
        expected=", ".join(PLANNERS),
        got=str(planner),
        hint=f'planner="{near[0]}"' if near else "",
    )


def check_limits(exact_s: float | None, search_s: float | None) -> None:
    """Raises InputError for an exact search without time, or a search that would not end."""
    if exact_s is not None and not 0 < exact_s < math.inf:
        problem = "would not end" if exact_s == math.inf else "has no time"
        raise InputError(
            f"the exact search {problem}", expected="seconds above 0", got=str(exact_s), hint="--exact 60"
        )
    if search_s is not None and not 0 <= search_s < math.inf:
        raise InputError(
            "the open-ended planners would not end" if search_s > 0 else "planners have no such time",
            expected="seconds, 0 or more",
            got=str(search_s),
            hint="--search-seconds 20",
        )
