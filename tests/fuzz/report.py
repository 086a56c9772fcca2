"""What a kind of generator has tried, and each failure as a file that reproduces it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

CASES_PER_SEED = 1_000_000  # the cases of neighbouring seeds do not meet

Progress = Callable[[str], None]


def silent(_: str) -> None:
    """Reports no progress."""


@dataclass(frozen=True)
class Failure:
    """One case that went wrong: ``what`` in one line, ``text`` as the content of a file that reproduces
    it."""

    kind: str
    case_seed: int
    what: str
    text: str
    suffix: str = ".py"

    @property
    def file_name(self) -> str:
        return f"{self.kind}-{self.case_seed}{self.suffix}"


@dataclass
class Report:
    """Outcomes by name with their numbers, and the failures."""

    kind: str
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # why cases were refused
    num_seeds: int = 0

    @property
    def num_cases(self) -> int:
        return self.outcomes.total()

    def add(self, outcome: str, failure: Failure | None = None) -> None:
        self.outcomes[outcome] += 1
        if failure is not None:
            self.failures.append(failure)

    def refuse(self, outcome: str, why: str) -> None:
        self.add(outcome)
        self.notes.append(f"{outcome}: {' '.join(why.split())[:300]}")

    def join(self, other: Report) -> None:
        self.outcomes.update(other.outcomes)
        self.failures.extend(other.failures)
        self.notes.extend(other.notes)
        self.num_seeds += other.num_seeds

    def write(self, folder: Path) -> list[Path]:
        """Writes every failure into ``folder`` and returns the paths."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for failure in self.failures:
            paths.append(folder / failure.file_name)
            paths[-1].write_text(failure.text)
        return paths

    def as_json(self) -> str:
        failures = [{k: v for k, v in asdict(f).items() if k != "text"} for f in self.failures]
        told = {"kind": self.kind, "num_seeds": self.num_seeds, "outcomes": self.outcomes}
        return json.dumps(told | {"failures": failures, "notes": self.notes})


def case_seeds(seed: int):
    """Yields the seeds of the cases of a run."""
    yield from range(seed * CASES_PER_SEED, (seed + 1) * CASES_PER_SEED)
