"""A* over the placements of the live values, in a fixed topological order of the graph.

HAP (EuroSys'24, section 4) searches sets of Hoare triples and with them the order of independent
instructions, which multiplies the states by about ten per parallel branch. Here the order is fixed, and a
state is what is held of the values that are still needed: ``(step, facts)``. Its cost is a vector: the
seconds at which each class of ranks has finished so far, forward and backward, with a collective
levelling the classes. That is HAP's stage sum, exactly.

The heuristic adds to each class the least remaining compute (every remaining step at its cheapest option
for that class, communication free), which never exceeds the true remainder. A state is dropped if another
with the same facts is not worse for any class.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from .problem import Option, Problem, R, Vector

Facts = frozenset[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Move:
    """One step of a path: the option taken and the conversions made first, as (value, src, dst)."""

    option: Option
    converts: tuple[tuple[int, int, int], ...]
    loads: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Found:
    """The cheapest path. ``cost_s`` is its stage sum; ``optimal`` is false if a bound cut the search."""

    moves: tuple[Move, ...]
    loss_code: int
    cost_s: float
    states_expanded: int
    optimal: bool


BEAM = 24  # states kept per step once the exact search has used up its budget


class NoProgram(ValueError):
    """No option of some step can be reached."""


@dataclass(slots=True)
class _State:
    step: int
    facts: Facts
    forward: Vector
    backward: Vector
    parent: _State | None
    move: Move | None


def search(problem: Problem, *, max_states: int | None = None, beam: int | None = None) -> Found:
    """The program of least stage sum. Raises NoProgram if there is none.

    After ``max_states`` expansions the search starts again with at most ``BEAM`` states kept per step
    (``beam`` asks for that from the start), which bounds the time on large graphs; the result then need
    not be optimal, and says so.
    """
    if beam is not None:
        return _beam_search(problem, beam, 0)
    ahead = remaining(problem)
    start = _start(problem)
    heap = [(0.0, 0, 0, start)]
    kept: list[dict[Facts, list[_State]]] = [{} for _ in range(len(problem.steps) + 1)]
    pushed = expanded = 0
    end = len(problem.steps)
    while heap:
        _, _, _, state = heapq.heappop(heap)
        if state.step == end:
            return _found(problem, state, expanded, optimal=True)
        if _is_stale(kept, state):
            continue
        expanded += 1
        if max_states is not None and expanded > max_states:
            return _beam_search(problem, BEAM, expanded)
        for child in successors(problem, state):
            if _keep(kept[child.step], child):
                pushed += 1
                heapq.heappush(heap, (bound(child, ahead), -child.step, pushed, child))
    raise NoProgram("no program computes this graph with the options given")


def _beam_search(problem: Problem, width: int, expanded: int) -> Found:
    ahead = remaining(problem)
    level = [_start(problem)]
    cut = False
    for _ in problem.steps:
        rivals: dict[Facts, list[_State]] = {}
        for state in level:
            expanded += 1
            for child in successors(problem, state):
                _keep(rivals, child)
        level = [s for states in rivals.values() for s in states]
        if not level:
            raise NoProgram("no program computes this graph with the options given")
        if len(level) > width:
            cut = True
            level = heapq.nsmallest(width, level, key=lambda s: bound(s, ahead))
    best = min(level, key=lambda s: bound(s, ahead))
    return _found(problem, best, expanded, optimal=not cut)


def _start(problem: Problem) -> _State:
    zeros = (0.0,) * len(problem.classes)
    return _State(0, frozenset(), zeros, zeros, None, None)


def remaining(problem: Problem) -> list[tuple[Vector, Vector]]:
    """Per step, the least compute from there on: what the heuristic adds, forward and backward."""
    count = len(problem.classes)
    after: list[tuple[Vector, Vector]] = [((0.0,) * count, (0.0,) * count)]
    for options in reversed(problem.options):
        forward, backward = after[-1]
        least_f = tuple(min(o.forward[c] for o in options) for c in range(count))
        least_b = tuple(min(o.backward[c] for o in options) for c in range(count))
        after.append((_add(forward, least_f), _add(backward, least_b)))
    return after[::-1]


def bound(state: _State, ahead: list[tuple[Vector, Vector]]) -> float:
    """Cost so far plus the heuristic: never above the cost of any completion."""
    forward, backward = ahead[state.step]
    return max(map(float.__add__, state.forward, forward)) + max(map(float.__add__, state.backward, backward))


def _add(a: Vector, b: Vector) -> Vector:
    return tuple(map(float.__add__, a, b))


def successors(problem: Problem, state: _State):
    held: dict[int, list[int]] = {}
    for value, code in state.facts:
        held.setdefault(value, []).append(code)
    for option in problem.options[state.step]:
        child = _apply(problem, state, held, option)
        if child is not None:
            yield child


def _apply(problem: Problem, state: _State, held: dict[int, list[int]], option: Option) -> _State | None:
    forward, backward = state.forward, state.backward
    facts = set(state.facts)
    converts: list[tuple[int, int, int]] = []
    loads: list[tuple[int, int]] = []
    for value, code in option.needs:
        have = held.get(value)
        if have is None:  # a leaf, loaded as it is needed
            if (value, code) in loads:
                continue
            price = problem.load(value, code)
            if price is None:
                load_code, price = R, problem.load(value, R)
                if price is None or problem.convert(value, R, code) is None:
                    return None
                converts.append((value, R, code))
            else:
                load_code = code
            loads.append((value, load_code))
            backward = _add(backward, price.optimizer)
            if price.sync_s:
                backward = tuple(t + price.sync_s for t in backward)
            if value in problem.tracked:
                facts.add((value, load_code))
            continue
        if code in have:
            continue
        best = None
        for src in have:
            price = problem.convert(value, src, code)
            if price is not None and (best is None or sum(price) < sum(best[1])):
                best = (src, price)
        if best is None:
            return None
        src, (forward_s, backward_s) = best
        converts.append((value, src, code))
        if forward_s:
            forward = _level(forward, forward_s)
            facts.add((value, code))
        if backward_s:
            backward = _level(backward, backward_s)
    forward, backward = _add(forward, option.forward), _add(backward, option.backward)
    facts.update(option.gives)
    step = state.step
    alive = frozenset(f for f in facts if problem.uses[f[0]] > step)
    move = Move(option, tuple(converts), tuple(loads))
    return _State(step + 1, alive, forward, backward, state, move)


def _level(times: Vector, seconds: float) -> Vector:
    """A collective: all classes wait for the last, then communicate."""
    return (max(times) + seconds,) * len(times)


def _keep(kept: dict[Facts, list[_State]], state: _State) -> bool:
    """Registers a state unless one with the same facts is not worse for any class."""
    rivals = kept.setdefault(state.facts, [])
    for rival in rivals:
        if _not_worse(rival, state):
            return False
    rivals[:] = [r for r in rivals if not _not_worse(state, r)]
    rivals.append(state)
    return True


def _is_stale(kept, state: _State) -> bool:
    return state.step > 0 and not any(r is state for r in kept[state.step].get(state.facts, ()))


def _not_worse(a: _State, b: _State) -> bool:
    return all(map(float.__le__, a.forward, b.forward)) and all(map(float.__le__, a.backward, b.backward))


def _found(problem: Problem, state: _State, expanded: int, *, optimal: bool) -> Found:
    loss = problem.ids[problem.graph.loss]
    codes = [code for value, code in state.facts if value == loss]
    moves = []
    cost = max(state.forward) + max(state.backward)
    while state.move is not None:
        moves.append(state.move)
        state = state.parent
    return Found(tuple(reversed(moves)), 1 if 1 in codes else codes[0], cost, expanded, optimal)
