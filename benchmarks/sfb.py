"""Sufficient factors, measured: from which batch on summing a weight's gradient is faster.

One linear layer of h x f weights on B rows, on n ranks. Nothing overlaps, so that with seconds of a rank,
summing the gradient and gathering its factors take equally long where

    sum_s(e h f) = gather_s(e (h + f) B) + max over ranks of (1 - share) product_s(B)

On n equal devices with a ring this is

    B = 2 h f / (h + f + 2 h f beta / (e F))

for e bytes an element, beta bytes per second of a link and F floating point operations per second. Both sides
are evaluated twice: with what the profile measured of the collectives, and with the wire's rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mixmesh.cost import CostModel, ring_fit
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import Program, make_ratio
from mixmesh.passes.factors import factorable, repeated_s, with_factors
from mixmesh.search.baselines import data_parallel

from . import jobs
from .contest import Turns, profiled, turns
from .measure import cluster_text
from .training import Progress
from .training_cases import Effort

WIDTH = 1024  # h and f
WITHIN = 0.25  # share of the formula's batch
SUMMED, FACTORS = "summed", "factors"


@dataclass(frozen=True)
class Crossing:
    """``shares`` of the batch per device; ``rows`` of the batches that are timed."""

    name: str
    cluster: str
    shares: tuple[float, ...]
    rows: tuple[int, ...] = (128, 256, 384, 512, 768, 1024, 1280)

    def __str__(self) -> str:
        return self.name

    @property
    def profiled_rows(self) -> int:
        return self.rows[len(self.rows) // 2]


@dataclass(frozen=True)
class CrossingResult:
    """Batches, in rows, at which summing and gathering take equally long: measured, and by the formula with
    measured collectives and with the wire's rate. ``step_s``, by batch, is (with sums, with factors)."""

    crossing: Crossing
    step_s: dict[int, tuple[float, float]]
    measured_rows: float
    formula_rows: float
    wire_rows: float
    emulation: str

    @property
    def error(self) -> float:
        return self.measured_rows / self.formula_rows - 1

    @property
    def targets(self) -> dict[str, bool]:
        return {f"within {WITHIN:.0%} of the formula": abs(self.error) <= WITHIN}

    def row(self) -> dict:
        return {
            "case": self.crossing.name,
            "step_s": {rows: {SUMMED: a, FACTORS: b} for rows, (a, b) in self.step_s.items()},
            "measured_rows": self.measured_rows,
            "formula_rows": self.formula_rows,
            "wire_rows": self.wire_rows,
            "error": self.error,
            "targets": self.targets,
        }


CASES = (
    Crossing("equal-pair", cluster_text("0.2", ("0.45",), ("0.45",)), (0.5, 0.5)),
    Crossing("unequal-pair", cluster_text("0.2", ("0.60",), ("0.30",)), (0.7, 0.3)),
)
QUICK = (Crossing("equal-pair", CASES[0].cluster, CASES[0].shares, (128, 512, 1280)),)


def find(crossing: Crossing, effort: Effort, folder: Path, say: Progress) -> CrossingResult:
    costs = profiled(f"product:{crossing.profiled_rows}", crossing.cluster, effort, folder, say)
    programs = {}
    for rows in crossing.rows:
        for kind, program in variants(crossing, rows, costs).items():
            programs[f"{kind} {rows}"] = (f"product:{rows}", program)
    found = turns(programs, costs, effort, folder, say)
    return CrossingResult(
        crossing,
        {
            rows: (found.timing(f"{SUMMED} {rows}").median_s, found.timing(f"{FACTORS} {rows}").median_s)
            for rows in crossing.rows
        },
        measured_rows(found, crossing.rows),
        formula_rows(crossing, costs, costs.collective),
        formula_rows(crossing, costs, lambda name, ranks: ring_fit(costs.cluster, name, ranks)),
        found.emulation,
    )


def variants(crossing: Crossing, rows: int, costs: CostModel) -> Mapping[str, Program]:
    made = jobs.make(f"product:{rows}")
    plain = data_parallel(trace(made.model, made.batch).graph, costs, make_ratio(crossing.shares))
    return {SUMMED: plain, FACTORS: with_factors(plain, frozenset(factorable(plain)))}


def measured_rows(found: Turns, batches: tuple[int, ...]) -> float:
    """The number of rows at which gathering neither loses nor gains: the zero of a line fitted to the losses
    of all rounds. Infinite if the loss does not grow with the rows."""
    points = [
        (rows, factors - summed)
        for rows in batches
        for summed, factors in zip(
            found.timing(f"{SUMMED} {rows}").rounds_s, found.timing(f"{FACTORS} {rows}").rounds_s
        )
    ]
    slope, start = np.polyfit(*np.array(points).T, 1)
    return float(-start / slope) if slope > 0 else float("inf")


def formula_rows(crossing: Crossing, costs: CostModel, collective) -> float:
    """The batch at which both take equally long; ``collective`` gives the cost of a collective between some
    ranks."""
    rows = crossing.profiled_rows
    program = variants(crossing, rows, costs)[SUMMED]
    ((i,),) = factorable(program).values()
    ranks = program.participants(i.type)
    summed, gathered = collective("all_reduce", ranks), collective("all_gather", ranks)
    summed_s = summed.seconds(program.types[i.inputs[1]].value.size_bytes)
    per_row = [t.value.size_bytes / rows for t in (i.type, program.types[i.inputs[0]])]
    repeated = repeated_s(program, i, costs) / rows

    def lost_s(rows: float) -> float:
        return sum(gathered.seconds(rows * size) for size in per_row) + repeated * rows - summed_s

    low, high = 0.0, 1.0
    while lost_s(high) < 0:
        low, high = high, 2 * high
    while high - low > 0.5:
        middle = (low + high) / 2
        low, high = (middle, high) if lost_s(middle) < 0 else (low, middle)
    return high
