"""A* over the placements of the live values, in a fixed topological order of the graph.

HAP (EuroSys'24, section 4) searches sets of Hoare triples and with them the order of independent
instructions, which multiplies the states by about ten per parallel branch. Here the order is fixed, and a
state is the placements held of the values still needed: ``(step, masks)``. Its cost is two vectors: the
seconds at which each class of ranks has finished so far, forward and backward, with a collective levelling
the classes. That is HAP's stage sum, with one difference: no rank waits between the forward and the backward
pass, so the last forward stage and the first backward one are one stage, and the total is the largest *sum*
of the two, as in the linear program and the simulator.

The heuristic is the bound of ``bound.py``. A state is dropped if another is no worse for any class and holds
at least the same placements.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

from ...base.lazy import lazy
from .bound import Bound
from .problem import Problem, Vector
from .steps import Move, Steps, Transition

BEAM = 8  # states kept per step once the exact search has used up its budget


class NoProgram(ValueError):
    """No option of some step can be reached."""


@dataclass(frozen=True)
class Found:
    """The cheapest path. ``cost_s`` is its stage sum, ``bound_s`` a lower bound of all paths."""

    moves: tuple[Move, ...]
    cost_s: float
    bound_s: float
    states_expanded: int

    @property
    def gap(self) -> float:
        """The share by which the path may cost more than the cheapest."""
        return max(self.cost_s / self.bound_s - 1, 0.0) if self.bound_s > 0 else 0.0

    @lazy
    def number(self) -> int:
        """A number that identifies the path."""
        return hash(tuple([(m.option.needs, m.option.gives, m.loads) for m in self.moves]))

    @property
    def optimal(self) -> bool:
        return self.gap < 1e-9


class State:
    """The values held before a step, and the cost of getting there."""

    __slots__ = ("backward", "dropped", "forward", "masks", "parent", "step", "transition")

    def __init__(self, step, masks, forward, backward, parent=None, transition=None) -> None:
        self.step: int = step
        self.masks: int = masks
        self.forward: Vector = forward
        self.backward: Vector = backward
        self.parent: State | None = parent
        self.transition: Transition | None = transition
        self.dropped = False


def search(
    problem: Problem,
    *,
    weight: float = 1.0,
    max_states: int | None = None,
    beam: int | None = None,
    dominance: bool = True,
    known: Sequence[Found] = (),
) -> Found:
    """The program with the least stage sum. Raises NoProgram if there is none.

    If the cheapest of the ``known`` paths (of a problem with the same choices) costs at most ``weight`` times
    the lower bound of all paths, it is the answer and nothing is searched.

    A ``weight`` above 1 trusts the bound that much more: fewer states, and a result at most that factor
    dearer than the cheapest. After ``max_states`` expansions the search starts again with at most ``BEAM``
    states kept per step (``beam`` does so from the start), which bounds the time on large graphs.
    ``Found.gap`` is the remaining uncertainty. ``dominance`` is for tests.
    """
    steps = Steps(problem)
    ahead = Bound(problem, steps)
    start = State(0, 0, problem.nothing, problem.nothing)
    if beam is not None:
        return _beam_search(steps, ahead, start, beam, 0.0)
    ends = [end for path in known if (end := followed(steps, path)) is not None]
    if ends:
        end, least_s = min(ends, key=cost_s), _bound(start, ahead)
        if cost_s(end) <= weight * least_s:
            return found_at(steps, end, 0, least_s)
    kept: list[dict[int, list[State]]] = [{} for _ in range(steps.count + 1)]
    heap = [(0.0, 0, 0, start)]
    pushed = expanded = 0
    while heap:
        _, _, _, state = heapq.heappop(heap)
        if state.dropped:
            continue
        if state.step == steps.count:
            # only continuations of open states can still be cheaper
            open_s = min((_bound(s, ahead) for *_, s in heap if not s.dropped), default=float("inf"))
            return found_at(steps, state, expanded, open_s if weight > 1 else float("inf"))
        expanded += 1
        if max_states is not None and expanded > max_states:
            open_s = min(_bound(s, ahead) for s in [state, *(s for *_, s in heap)] if not s.dropped)
            return _beam_search(steps, ahead, start, BEAM, open_s, expanded)
        for child in successors(steps, state):
            if not dominance or _keep(kept[child.step], child):
                pushed += 1
                heapq.heappush(heap, (_bound(child, ahead, weight), -child.step, pushed, child))
    raise NoProgram("no program computes this graph with the options given")


def followed(steps: Steps, path: Found) -> State | None:
    """The final state of a path that was found in a problem with the same choices but other prices; None if
    it is not a path of this problem."""
    state = State(0, 0, steps.problem.nothing, steps.problem.nothing)
    for step, move in enumerate(path.moves):
        wanted = move.option.needs, move.option.gives
        option = next((o for o in steps.problem.options[step] if (o.needs, o.gives) == wanted), None)
        if option is None:
            return None
        t = steps.transition(step, steps.needed(step, state.masks), option)
        following = advance(steps, state, t) if t is not None else None
        if following is None:
            return None
        state = following
    return state


def _beam_search(
    steps: Steps, ahead: Bound, start: State, width: int, known_s: float, expanded: int = 0
) -> Found:
    level = [start]
    cut_s = float("inf")  # the least cost to which a state that was left out might have led
    for _ in range(steps.count):
        rivals: dict[int, list[State]] = {}
        for state in level:
            expanded += 1
            for child in successors(steps, state):
                _keep(rivals, child)
        level = sorted((s for r in rivals.values() for s in r), key=lambda s: _bound(s, ahead))
        if not level:
            raise NoProgram("no program computes this graph with the options given")
        if len(level) > width:
            cut_s = min(cut_s, _bound(level[width], ahead))
            level = _widest(steps, level, width)
    best = min(level, key=lambda s: _bound(s, ahead))
    return found_at(steps, best, expanded, max(cut_s, known_s))


def _widest(steps: Steps, level: list[State], width: int) -> list[State]:
    """The best states of a level; inside folded blocks, also the best for every set of values held on entry,
    because not every state can leave the blocks."""
    kept = level[:width]
    entered = {steps.entry(s.step, s.masks) for s in kept}
    for state in level[width:]:
        entry = steps.entry(state.step, state.masks)
        if entry not in entered:
            entered.add(entry)
            kept.append(state)
    return kept


def _bound(state: State, ahead: Bound, weight: float = 1.0) -> float:
    """The cost so far plus the heuristic: never above the cost of any completion (at weight 1)."""
    rest = ahead.remaining(state.step, state.masks)
    if weight != 1.0:
        rest = tuple([weight * after for after in rest])
    so_far = [*map(add, state.forward, state.backward)]
    return max(*map(add, so_far, rest), sum(so_far) / len(so_far) + rest[-1])


def successors(steps: Steps, state: State):
    """The states that are one step further."""
    for t in steps.transitions(state.step, state.masks):
        following = advance(steps, state, t)
        if following is not None:
            yield following


def advance(steps: Steps, state: State, t: Transition) -> State | None:
    """The state after a transition; None if it leaves a folded middle with less than was held on entry."""
    masks = steps.after(state.step, state.masks, t)
    if masks is None:
        return None
    if t.wait:  # a collective: all classes wait for the last, then communicate
        level = max(state.forward) + t.wait
        ahead = tuple([level + x for x in t.forward])
    else:
        ahead = tuple(map(add, state.forward, t.forward))
    if t.wait_back:
        level = max(state.backward) + t.wait_back
        behind = tuple([level + x for x in t.backward])
    else:
        behind = tuple(map(add, state.backward, t.backward))
    return State(state.step + 1, masks, ahead, behind, state, t)


def _keep(kept: dict[int, list[State]], state: State) -> bool:
    """Registers a state unless another holds as much and is not worse for any class."""
    masks = state.masks
    covered = []  # rivals that hold no more than the new state
    for other, rivals in kept.items():
        union = other | masks
        if union == other:
            for r in rivals:
                if _not_worse(r, state):
                    return False
        if union == masks and rivals:
            covered.append(rivals)
    for rivals in covered:
        beaten = [r for r in rivals if _not_worse(state, r)]
        for r in beaten:
            r.dropped = True
        if beaten:
            rivals[:] = [r for r in rivals if not r.dropped]
    kept.setdefault(masks, []).append(state)
    return True


def _not_worse(a: State, b: State) -> bool:
    for x, y in zip(a.forward, b.forward):
        if x > y:
            return False
    for x, y in zip(a.backward, b.backward):
        if x > y:
            return False
    return True


def cost_s(state: State) -> float:
    return max(map(add, state.forward, state.backward))


def found_at(steps: Steps, state: State, expanded: int, open_s: float) -> Found:
    """The path that ends in a state; no other path is cheaper than ``open_s``."""
    cost = cost_s(state)
    moves = []
    passed: State | None = state
    while passed is not None and passed.transition is not None:
        moves.append(passed.transition.move)
        passed = passed.parent
    return Found(tuple(reversed(moves)), cost, min(cost, open_s), expanded)
