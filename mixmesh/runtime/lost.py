"""The message about a lost rank: which rank, on which device, in which step, and what the others waited
for."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ..errors import CollectiveError, MixmeshError


class Waiting(NamedTuple):
    """The call in which a rank waits, the time at which it began to wait, and the instruction with its place,
    if the call is one. ``is_met`` is False for a rank that computes there and does not wait."""

    what: str
    since: float
    where: str = ""
    is_met: bool = True

    @classmethod
    def now(cls, what: str, where: str = "", *, is_met: bool = True) -> Waiting:
        return cls(what, time.monotonic(), where, is_met=is_met)


@dataclass(frozen=True)
class Lost:
    """A rank that was lost: ``how``, and the last ``word`` that it left."""

    rank: int
    how: str
    word: str = "no sign of life"


@dataclass(frozen=True)
class Position:
    """The position of a training: the number of the current step, and the devices by rank; None and empty
    while unknown."""

    step: int | None = None
    devices: tuple[str, ...] = ()

    def name(self, rank: int) -> str:
        """A rank, with its device if that is known."""
        return f"rank {rank} ({self.devices[rank]})" if rank < len(self.devices) else f"rank {rank}"

    def error(self, lost: Lost, waiting: Waiting, world_size: int) -> CollectiveError:
        """The error of a rank that waits for the lost one, or is about to."""
        at_step = "" if self.step is None else f", at step {self.step}"
        wait = "the others wait for it in" if waiting.is_met else "this rank needs it, and has come to"
        return CollectiveError(
            f"{self.name(lost.rank)} {lost.how}, and {wait} {waiting.what}{at_step}",
            where=waiting.where or waiting.what,
            expected=f"{world_size} ranks to take part",
            got=lost.word,
            hint="its own output says more, and that of its launcher which signal it was, if any",
        )


def fields_of(error: MixmeshError, lost: Lost | None) -> dict[str, Any]:
    """The fields of an error, for other ranks to read; with ``lost`` each of these adds what it was waiting
    for."""
    fields = {name: getattr(error, name) for name in ("message", "expected", "got", "where")}
    return {**fields, "hint": list(error.hint), "lost": None if lost is None else asdict(lost)}


def error_of(fields: dict[str, Any]) -> tuple[CollectiveError, Lost | None]:
    """The error that another rank reported, and the lost rank, if there is one."""
    lost = fields.get("lost")
    rest = {name: value for name, value in fields.items() if name != "lost"}
    return CollectiveError(**rest), None if lost is None else Lost(**lost)
