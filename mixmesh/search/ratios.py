"""Sharding ratios by linear programming (HAP, EuroSys'24, section 5), with memory rows.

For a fixed program the step is a sum of phases; within a phase every rank computes and the slowest
decides. Equal devices get equal shares (the problem is convex: the mean of two solutions that differ by
their order is one), so that ``j`` counts classes of ``n_j`` equal ranks; and phases that cost alike, as
those of repeated blocks, are one phase that counts ``w_s`` times. With the share ``r_j`` of a rank, phase
times ``T_s`` and costs affine in the share,

    minimise    sum_s w_s T_s
    subject to  T_s >= sum_{i in s} (a_ij + b_ij r_j)    for every phase s, class j    [phase_rows]
                m_jt + d_jt r_j <= M_j                    for every class j, moment t   [memory_rows]
                sum_j n_j r_j = 1                                                       [balance_row]
                r_j >= 0, T_s >= 0

``a_ij`` is the fixed cost of instruction i on rank j (launches, replicated work, the optimizer step over
replicated parameters), ``b_ij`` what its whole sharded work costs, ``m_jt`` replicated bytes and ``d_jt``
sharded bytes. Communication does not depend on the shares here and is left out. HiGHS solves it.

Measured costs are curves; the LP takes the line that a curve is around the program's own shares, and is
solved anew around its solution until that stands.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TypeGuard

import highspy
import numpy as np

from ..base.solver import quiet_solver
from ..cost import CostModel
from ..cost.placed import Sheet
from ..errors import Infeasible
from ..lang.ir import Program, Ratio, make_ratio
from ..lang.optimizer_states import ADAM, OptimizerStates
from ..step import Compute, Event, Start, Step, step_of
from ..step.events import LOCAL
from ..step.memory import PeakMemory
from ..step.works import works_by_part

MAX_REFITS = 4
SAME_SHARE = 0.005


@dataclass(frozen=True)
class LinearProgram:
    """``min c x`` subject to ``lower <= A x <= upper`` and ``x >= 0``; rows have names for messages."""

    c: np.ndarray
    A: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    rows: tuple[str, ...]


@dataclass(frozen=True)
class Solution:
    """``x`` with its certificate: ``row_dual`` y and ``reduced_cost`` c - A'y."""

    x: np.ndarray
    row_dual: np.ndarray
    reduced_cost: np.ndarray


@dataclass(frozen=True)
class Phase:
    """Fixed and per-share seconds of every rank between two synchronisations."""

    fixed: np.ndarray
    slope: np.ndarray


def phases(
    program: Program,
    costs: CostModel,
    ranks: tuple[int, ...],
    step: Step[Sheet] | None = None,
) -> tuple[Phase, ...]:
    """The phases of the steady-state step: optimizer and forward to the first collective, …, backward.

    They are the step split at its collectives. If neither pass has a collective, optimizer, forward and
    backward are one phase, as no rank waits in between. ``step`` is that of the program, under any ratios.
    """
    step = step or step_of(Sheet(program, costs))
    sheet = step.outline
    optimizer = np.zeros((len(sheet.optimized), 2, len(ranks)))
    for line, (cut, size_bytes) in zip(optimizer, sheet.optimized.items()):
        line[1 if cut.size else 0] = [costs.optimizer_s(rank, size_bytes) for rank in ranks]
    lines = np.concatenate(_lines(sheet, program, ranks))
    out: list[Phase | None] = []
    phase_by_works: dict[tuple[bool, bytes], Phase | None] = {}
    for n, works in enumerate(works_of_phases(step)):
        key = (n == 0, works.tobytes())
        if key not in phase_by_works:
            parts = lines[works] if n else np.concatenate((optimizer, lines[works]))
            # added one after the other, so that it rounds like repeated additions
            total = np.add.accumulate(parts)[-1] if len(parts) else parts
            phase_by_works[key] = Phase(*total) if total.any() else None
        out.append(phase_by_works[key])
    return tuple(phase for phase in out if phase is not None)


def works_of_phases(step: Step[Sheet]) -> list[np.ndarray]:
    """The works of each phase: first those of the forward pass, then those of the backward pass, whose
    numbers follow the forward ones. No rank waits between the two passes.

    A collective that is awaited within its pass ends a phase where it begins: no rank gets beyond its await
    before the last rank has reached that point. Collectives without an await are waited for at the end of the
    pass.
    """
    sheet, behind = step.outline, len(step.outline.works)
    phases: list[list[int]] = [[]]
    for event in step.forward.script.events:
        if isinstance(event, Compute):
            phases[-1].append(sheet.work_of[event.at])
        elif _ends_phase(event) and sheet.flows[event.at]:
            phases.append([])
    work_of, at_the_end = works_by_part(sheet), []
    for event in step.backward.script.events:
        if isinstance(event, Compute):
            phases[-1].append(behind + work_of[event.part][event.at])
        elif _ends_phase(event):
            phases.append([])
        elif isinstance(event, Start) and event.product is not None:
            at_the_end.append(behind + work_of[event.product.part][event.product.at])
    phases[-1] += at_the_end
    return [np.array(works, dtype=int) for works in phases]


def _ends_phase(event: Event) -> TypeGuard[Start]:
    return isinstance(event, Start) and event.number != LOCAL and bool(event.value)


def _lines(sheet: Sheet, program: Program, ranks: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Fixed and per-share seconds of every work, forward and backward: (work, 2, rank)."""
    out = np.zeros((2, len(sheet.works), 2, len(ranks)))
    for n, work in enumerate(sheet.works):
        ratio = program.ratio(work.cut.ratio)
        for column, rank in enumerate(ranks):
            time = work.times[sheet.costs.class_of[rank]]
            share = ratio[rank] if work.cut.size and ratio else 1.0
            for direction, curve in enumerate((time.forward, time.backward)):
                a, b = curve.line_at(share)
                # work that is not cut costs its whole at any share
                out[direction, n, :, column] = (a, b) if work.cut.size else (a + b, 0.0)
    return out[0], out[1]


def ratio_program(
    program: Program,
    costs: CostModel,
    ranks: tuple[int, ...],
    *,
    optimizer_states: OptimizerStates,
    headroom: float,
    memory: PeakMemory | None = None,
    limited: bool = True,
    every: tuple[Phase, ...] | None = None,
) -> LinearProgram:
    """The LP above, with memory rows only if it is ``limited``. The variables are the share of a rank of each
    class, then the phase times. Rows are named after the first rank of their class. ``every`` passes the
    phases of the program, if they are known."""
    classes = equal_ranks(costs, ranks)
    firsts = tuple(equal[0] for equal in classes)
    every = phases(program, costs, firsts) if every is None else every
    alike = {(p.fixed.tobytes(), p.slope.tobytes()): p for p in every}
    weights = Counter((p.fixed.tobytes(), p.slope.tobytes()) for p in every)
    parts = list(alike.values())
    n, s = len(classes), len(parts)
    rows: list[tuple[np.ndarray, float, float, str]] = []

    def phase_rows():
        for k, part in enumerate(parts):
            for column, rank in enumerate(firsts):
                row = np.zeros(n + s)
                row[n + k], row[column] = 1.0, -part.slope[column]
                rows.append((row, part.fixed[column], np.inf, f"phase {k} rank {rank}"))

    def memory_rows():
        kinds = [costs.cluster.devices[rank].kind for rank in firsts]
        peaks = memory or PeakMemory(costs, optimizer_states)
        constants = peaks.constants(program, ranks)
        moments = {kind: peaks.of(program, kind).envelope() for kind in dict.fromkeys(kinds)}
        for column, (rank, kind) in enumerate(zip(firsts, kinds)):
            for number, held in enumerate(moments[kind]):
                slope = sum(size_bytes for cut, size_bytes in held.items() if cut.size)
                fixed = sum(size_bytes for cut, size_bytes in held.items() if not cut.size)
                row = np.zeros(n + s)
                row[column] = slope / 2**30
                room = usable_bytes(costs, rank, headroom) - constants[rank] - fixed
                rows.append((row, -np.inf, room / 2**30, f"memory rank {rank}" + f" {number}" * bool(number)))

    def balance_row():
        row = np.zeros(n + s)
        row[:n] = [len(equal) for equal in classes]
        rows.append((row, 1.0, 1.0, "shares sum to 1"))

    phase_rows()
    if limited:
        memory_rows()
    balance_row()
    c = np.concatenate([np.zeros(n), [weights[key] for key in alike]])
    matrix, lower, upper, names = zip(*rows)
    return LinearProgram(c, np.array(matrix), np.array(lower), np.array(upper), names)


def equal_ranks(costs: CostModel, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The ranks among ``ranks``, grouped by classes of equal devices."""
    classes: dict[int, list[int]] = {}
    for rank in ranks:
        classes.setdefault(costs.class_of[rank], []).append(rank)
    return tuple(map(tuple, classes.values()))


def usable_bytes(costs: CostModel, rank: int, headroom: float) -> float:
    """The bytes of a rank's memory that a plan may use."""
    return costs.cluster.devices[rank].memory_bytes * (1 - headroom)


def solve(lp: LinearProgram) -> Solution:
    """Solves with HiGHS. Raises Infeasible if no shares satisfy the rows."""
    h = quiet_solver()
    count = len(lp.c)
    inf = highspy.kHighsInf
    h.addVars(count, np.zeros(count), np.full(count, inf))
    h.changeColsCost(count, np.arange(count, dtype=np.int32), lp.c)
    for row, low, high in zip(lp.A, lp.lower, lp.upper):
        used = np.flatnonzero(row).astype(np.int32)
        h.addRow(max(low, -inf), min(high, inf), len(used), used, row[used])
    h.run()
    status = h.getModelStatus()
    if status != highspy.HighsModelStatus.kOptimal:
        raise Infeasible(
            f"no ratio satisfies the memory of all ranks (HiGHS: {h.modelStatusToString(status)})"
        )
    solution = h.getSolution()
    x = np.array(solution.col_value)
    return Solution(x, np.array(solution.row_dual), np.array(solution.col_dual))


def optimal_ratio(
    program: Program,
    costs: CostModel,
    ranks: tuple[int, ...],
    *,
    optimizer_states: OptimizerStates = ADAM,
    headroom: float = 0.05,
    step: Step[Sheet] | None = None,
    memory: PeakMemory | None = None,
    limited: bool = True,
) -> Ratio:
    """The shares of the LP, zero for ranks outside of ``ranks``. If not ``limited``, memory does not count.
    ``step`` and ``memory``, of the same program, are reused if given.

    Raises Infeasible if no shares fit in memory.
    """
    ratio = program.shares
    step = step or step_of(Sheet(program, costs))
    memory = memory or PeakMemory(costs, optimizer_states, step=step)
    classes = equal_ranks(costs, ranks)

    def solved(at: Program, every: tuple[Phase, ...], limited: bool) -> Ratio:
        lp = ratio_program(
            at,
            costs,
            ranks,
            optimizer_states=optimizer_states,
            headroom=headroom,
            memory=memory,
            limited=limited,
            every=every,
        )
        shares = [0.0] * program.world_size
        for equal, share in zip(classes, solve(lp).x):
            for rank in equal:
                shares[rank] = max(float(share), 0.0)
        return make_ratio(shares)

    def surely_fits(ratio: Ratio) -> bool:
        most = memory.at_most(program.with_shares(ratio))
        return most is not None and all(most[r] <= usable_bytes(costs, r, headroom) for r in ranks)

    for _ in range(MAX_REFITS if costs.profile else 1):
        before, at = ratio, program.with_shares(ratio)
        every = phases(at, costs, tuple(equal[0] for equal in classes), step)
        free = solved(at, every, limited=False)
        # the best of all shares is also the best of those that fit, provided it fits
        ratio = free if not limited or surely_fits(free) else solved(at, every, limited=True)
        if max(abs(a - b) for a, b in zip(before, ratio)) < SAME_SHARE:
            break
    return ratio


def with_ratio(program: Program, name: str, ratio: Ratio) -> Program:
    """``program`` with another value for one ratio; the ranks that take part must stay the same. Raises
    KeyError for a ratio that it does not have."""
    if name not in program.ratio_of:
        raise KeyError(name)
    return program.changed(ratios=tuple((n, ratio if n == name else r) for n, r in program.ratios))
