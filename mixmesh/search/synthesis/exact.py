"""The search problem as a mixed-integer program: HiGHS finds the cheapest path, or proves how far from it
a path can be.

Steps, options, prices and what is held are those of the search (``steps.py``), folded blocks included:

    minimise    T
    subject to  sum_o y_ko = 1                                       for every step k             [choose]
                y_ko  <= what makes the values that o needs held     for every need of o          [needs]
                x_vck <= what makes v held as c's source             for every conversion x       [converted]
                x_vck <= sum of the y_ko that need it then                                        [converted]
                F_kj  >= F_(k-1)j + work of k + waits of k           for every class j of ranks   [times]
                F_kj  >= F_(k-1)i + work of k + waits of k - M (1 - s_k)    for all classes i, j  [times]
                s_k   >= y_ko, x_vck that wait
                T     >= F_j + B_j                                   after the last step

y, x and s are 0 or 1, and B are the times of the backward pass, with rows like those of F. M is the cost of a
path that is known, and T stays below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import highspy
import numpy as np

from ...base.solver import quiet_solver
from .problem import Problem
from .search import Found, State, advance, found_at, search
from .steps import BITS, FULL, Steps, Transition

LEAST_GAP = 1e-6
Terms = dict[int, float]  # column -> factor
Time = tuple[int, int]  # (step, order of conversions within it)
AT_THE_END = BITS  # after all conversions of a step


def prove(problem: Problem, known: Found | None = None, limit_s: float = 60.0) -> Found:
    """The cheapest path, or after ``limit_s`` the cheapest so far, with its proved bound; never dearer than
    ``known``, which defaults to the result of ``search``. Raises NoProgram."""
    known = known or search(problem, weight=1.01, max_states=10_000)
    if known.optimal:
        return known
    steps = Steps(problem)
    program = _Program(problem, steps, known.cost_s)
    options, bound = program.model.solve(program.options, limit_s)
    bound_s = max(bound * known.cost_s, known.bound_s)
    improved = None if options is None else _walk(steps, options, known.states_expanded)
    best = known if improved is None or improved.cost_s >= known.cost_s else improved
    return replace(best, bound_s=min(bound_s, best.cost_s))


def _walk(steps: Steps, options: list[int], states_expanded: int) -> Found | None:
    problem = steps.problem
    state = State(0, 0, problem.nothing, problem.nothing)
    for step, place in enumerate(options):
        held = {v: mask for v, mask in steps.masks(step, state.masks).items() if v >= 0}
        transition = steps.transition(step, held, problem.options[step][place])
        if transition is None:
            return None
        following = advance(steps, state, transition)
        if following is None:
            return None
        state = following
    return found_at(steps, state, states_expanded, float("inf"))


class _Model:
    """Columns and rows of a model under construction; all columns are at least 0."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.uppers: list[float] = []
        self.integers: list[bool] = []
        self.rows: list[tuple[Terms, float, float]] = []

    def column(self, *, cost: float = 0.0, upper: float = highspy.kHighsInf, integer: bool = False) -> int:
        self.costs.append(cost)
        self.uppers.append(upper)
        self.integers.append(integer)
        return len(self.costs) - 1

    def choice(self) -> int:
        return self.column(upper=1.0, integer=True)

    def at_least(self, column: int, terms: Mapping[int, float], constant: float = 0.0) -> None:
        """``column >= terms + constant``"""
        row = {c: -f for c, f in terms.items()}
        row[column] = row.get(column, 0.0) + 1.0
        self.rows.append((row, constant, highspy.kHighsInf))

    def at_most_one_of(self, column: int, others: Iterable[int]) -> None:
        """``column <= sum of others``"""
        row = dict.fromkeys(others, 1.0)
        row[column] = row.get(column, 0.0) - 1.0
        self.rows.append((row, 0.0, highspy.kHighsInf))

    def solve(self, options: list[list[int | None]], limit_s: float) -> tuple[list[int] | None, float]:
        """For each step, the number of the chosen option, None if no solution was found; and the bound."""
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.costs), len(self.rows)
        lp.col_cost_, lp.col_upper_ = np.array(self.costs), np.array(self.uppers)
        lp.col_lower_ = np.zeros(len(self.costs))
        kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
        lp.integrality_ = [kinds[i] for i in self.integers]
        terms, lower, upper = zip(*self.rows)
        lp.row_lower_, lp.row_upper_ = np.array(lower), np.array(upper)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0, *map(len, terms)])
        lp.a_matrix_.index_ = np.array([c for row in terms for c in row])
        lp.a_matrix_.value_ = np.array([f for row in terms for f in row.values()])
        h = quiet_solver()
        h.setOptionValue("time_limit", float(limit_s))
        h.setOptionValue("mip_rel_gap", LEAST_GAP)
        h.passModel(lp)
        h.run()
        if h.getModelStatus() == highspy.HighsModelStatus.kSolveError:
            # presolve of HiGHS 1.16 can solve the program alone, with a solution that breaks one of its rows
            h.setOptionValue("presolve", "off")
            h.run()
        info = h.getInfo()
        bound = max(info.mip_dual_bound, 0.0) if np.isfinite(info.mip_dual_bound) else 0.0
        if h.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            return None, 1.0  # no path is cheaper than the known one
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None, bound
        value = h.getSolution().col_value
        places = [max((value[c], n) for n, c in enumerate(row) if c is not None)[1] for row in options]
        return places, bound


class _Program:
    """The mixed-integer program of a problem, with seconds as fractions of ``known_s``."""

    def __init__(self, problem: Problem, steps: Steps, known_s: float) -> None:
        self.problem, self.steps, self.known_s = problem, steps, known_s
        self.model = _Model()
        # columns that make a value held, as (column, mask of its placements, time from which it is held)
        self.holds: dict[int, list[tuple[int, int, Time]]] = {}
        self.options: list[list[int | None]] = []
        classes = range(len(problem.classes))
        self.ahead: list[Terms] = [{} for _ in classes]  # times of each class so far, forward
        self.behind: list[Terms] = [{} for _ in classes]
        for step in range(steps.count):
            self.step(step)
        self.repeated()
        total = self.model.column(cost=1.0, upper=1.0 + LEAST_GAP)
        for f, b in zip(self.ahead, self.behind):
            self.model.at_least(total, _sum(f, b))

    def step(self, step: int) -> None:
        """Adds [choose] and [needs] of a step, its conversions, and the times after it."""
        live = [v for v in self.steps.live[step] if v >= 0]
        # with all live values held in all ways, only loads are left to pay for
        transitions = [
            self.steps.transition(step, dict.fromkeys(live, FULL), o) for o in self.problem.options[step]
        ]
        columns = [None if t is None else self.model.choice() for t in transitions]
        self.options.append(columns)
        by_column = {c: t for c, t in zip(columns, transitions) if c is not None and t is not None}
        self.model.rows.append((dict.fromkeys(by_column, 1.0), 1.0, 1.0))
        moves = self.conversions(step, by_column, set(live))
        for column, t in by_column.items():
            for value, code in t.move.option.needs:
                if value in live:
                    self.model.at_most_one_of(column, self.holding(value, code, (step, AT_THE_END)))
            for n, value in enumerate(self.steps.live[step + 1]):
                if value >= 0 and value not in live:
                    mask = t.new >> (BITS * n) & FULL
                    self.holds.setdefault(value, []).append((column, mask, (step, AT_THE_END)))
        works = [{c: t.forward[j] for c, t in by_column.items()} for j in range(len(self.ahead))]
        back = [{c: t.backward[j] for c, t in by_column.items()} for j in range(len(self.ahead))]
        waits = {c: t.wait for c, t in by_column.items()} | {
            c: f for c, (f, _, waits) in moves.items() if waits
        }
        waits_back = {c: t.wait_back for c, t in by_column.items()} | {c: b for c, (_, b, _) in moves.items()}
        hidden = {c: f for c, (f, _, waits) in moves.items() if not waits}
        self.times(self.ahead, [_sum(w, hidden) for w in works], waits)
        self.times(self.behind, back, waits_back)

    def holding(self, value: int, code: int, before: Time) -> list[int]:
        """The columns that make a value held in a certain way before a time."""
        return [c for c, mask, time in self.holds.get(value, ()) if time < before and mask >> code & 1]

    def conversions(
        self, step: int, taken: dict[int, Transition], live: set[int]
    ) -> dict[int, tuple[float, float, bool]]:
        """Adds [converted]: columns with their seconds forward and backward, and whether ranks wait for
        them."""
        out: dict[int, tuple[float, float, bool]] = {}
        wanted: dict[tuple[int, int], list[int]] = {}  # (value, code) -> options that need it
        turns: dict[int, int] = {}  # value -> the most ways in which an option needs it
        for column, t in taken.items():
            for value, code in t.move.option.needs:
                if value in live:
                    wanted.setdefault((value, code), []).append(column)
            for value in live.intersection(v for v, _ in t.move.option.needs):
                turns[value] = max(turns.get(value, 0), sum(1 for v, _ in t.move.option.needs if v == value))
        weight = self.problem.weights[step]
        for (value, code), users in wanted.items():
            sources = 2 + len(self.problem.types[value].shape)
            for turn in range(turns[value]):
                for src in range(sources):
                    price = self.problem.convert(value, src, code)
                    held = self.holding(value, src, (step, turn))
                    if src == code or price is None or not held:
                        continue
                    column = self.model.choice()
                    self.model.at_most_one_of(column, held)
                    self.model.at_most_one_of(column, users)
                    waits = self.problem.waits(value)
                    out[column] = (weight * price[0], weight * price[1] if waits else 0.0, waits)
                    mask = self.steps.closure(value, code)
                    self.holds[value].append((column, mask, (step, turn)))
        return out

    def times(self, clocks: list[Terms], works: list[Terms], waits: Terms) -> None:
        """Adds [times]: ``clocks`` advanced past a step."""
        waits = {c: s for c, s in waits.items() if s > 0}
        totals = [_sum(clock, self.scaled(work), self.scaled(waits)) for clock, work in zip(clocks, works)]
        if not waits:
            clocks[:] = totals
            return
        last, met = self.model.column(), self.model.choice()
        for clock in clocks:
            self.model.at_least(last, clock)
        for column in waits:
            self.model.at_least(met, {column: 1.0})
        for j, work in enumerate(works):
            end = self.model.column()
            self.model.at_least(end, totals[j])
            together = _sum({last: 1.0, met: 1.0}, self.scaled(work), self.scaled(waits))
            self.model.at_least(end, together, -1.0)
            clocks[j] = {end: 1.0}

    def scaled(self, terms: Terms) -> Terms:
        return {c: seconds / self.known_s for c, seconds in terms.items() if seconds}

    def repeated(self) -> None:
        """Requires that the middle of a folded run is left with everything that it was entered with."""
        choices = self.problem.choices
        for at, period in choices.fold.middles:
            end = at + 2 * period
            for value, there in choices.shifts(at, end, period).items():
                if value == there or value not in self.steps.live[at] or there not in self.steps.live[end]:
                    continue
                for column, mask, time in self.holds[value]:
                    if time < (at, 0):
                        for code in range(mask.bit_length()):
                            if mask >> code & 1:
                                self.model.at_most_one_of(column, self.holding(there, code, (end, 0)))


def _sum(*terms: Terms) -> Terms:
    out: Terms = {}
    for some in terms:
        for column, factor in some.items():
            out[column] = out.get(column, 0.0) + factor
    return out
