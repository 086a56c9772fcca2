"""Monte Carlo tree search over strategies (TAG, TPDS'23; PUCT: Silver et al., 2017).

A node holds choices for the first groups in order of cost; the other groups copy the first one's, so every
node is a whole strategy, which the simulator judges: there are no rollouts. Four things differ from TAG's
search as released. An untried choice has its parent's value instead of zero, or bad parents would be searched
as widely as good ones. The search explores less, as rewards here are smaller. After the first group, the
order also counts gradients on the wire, as a group worth placing separately may be cheap to compute. And a
policy asked about one group also gives choices for all others: the strategy of all these choices is judged,
and if it is better than copying the first choice, undecided groups follow it.

A search with a policy begins with the policy's version of the best seed, judged before any playout. Then
three kinds of trial take turns, so that the best of them waits for at most two others: a playout; one with
another choice of the root, for each set of devices and shares, until all have been tried; a change of the
best strategy (``improve``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ..evaluate import Actions, Evaluator, Outcome
from ..placement import Action, Space
from .improve import Improvement
from .seeds import best_alike, data_parallel, everywhere

Advice = tuple[np.ndarray, ...]  # for each group, the probability of each of its choices
# advice, from the number of decided groups, a strategy and its outcome; None: no new advice
Priors = Callable[[int, Actions, Outcome], Advice | None]
OUT_OF_MEMORY = -1.0
EXPLORE = 0.1
EXPLORE_ADVISED = 0.25  # advice is followed for longer if the first gains came without it
# share of probability that is spread evenly: wrong advice must not keep a search from looking elsewhere
EVEN = 0.25
REFINED = 3  # number of times at most that a policy is asked about its own strategy before the first playout
PLAYOUTS_PER_CALL = 30  # a limit, because strategies repeat


def order_of_groups(space: Space) -> tuple[int, ...]:
    """The order of decisions: first the group that takes longest to compute, whose choice others copy; then
    by the seconds of computing and of summing gradients, the longest first."""
    cluster = space.costs.cluster
    slowest = min(cluster.bandwidth_bytes_per_s, *(m.nic_bytes_per_s for m in cluster.machines))
    computing = [max(g.seconds) / cluster.world_size for g in space.groups]
    seconds = [c + 2 * g.param_bytes / slowest for c, g in zip(computing, space.groups)]
    first = max(range(len(seconds)), key=computing.__getitem__)
    return tuple(sorted(range(len(seconds)), key=lambda k: (k != first, -seconds[k], k)))


def reward(outcome: Outcome, base_s: float) -> float:
    """The speed-up over the best baseline minus one, as a fourth root above one; -1 if the strategy does not
    fit."""
    if not outcome.fits:
        return OUT_OF_MEMORY
    gain = base_s / outcome.step_s - 1
    return gain if gain <= 1 else gain**0.25


@dataclass(eq=False)
class Node:
    decided: tuple[Action, ...]
    value: float
    outcome: Outcome
    strategy: Actions  # the judged strategy: before any choice, data parallelism
    choices: tuple[Action, ...] = ()  # in the space's ``mixed`` order
    mixed: np.ndarray = field(default_factory=lambda: np.empty(0))
    prior: np.ndarray = field(default_factory=lambda: np.empty(0))
    visits: np.ndarray = field(default_factory=lambda: np.empty(0))
    totals: np.ndarray = field(default_factory=lambda: np.empty(0))
    children: dict[int, Node] = field(default_factory=dict)
    advice: Advice | None = None


class Tree:
    """A tree search; ``evaluate`` keeps the best strategy. Without ``priors`` all choices are equally
    likely."""

    def __init__(
        self, evaluate: Evaluator, base_s: float, priors: Priors | None = None, seed: int = 0
    ) -> None:
        self.evaluate, self.base_s, self.priors = evaluate, base_s, priors
        self.space = evaluate.space
        self.order = order_of_groups(self.space)
        self._rests: dict[Action, tuple[Outcome, Actions]] = {}  # by the first choice
        self.rng = np.random.default_rng(seed)
        start = next(data_parallel(self.space)) if priors is None else best_alike(evaluate)
        self.root = Node((), 0.0, evaluate(start), start)
        self.improvement = None
        if priors is not None:
            self.improvement = Improvement(self.space, evaluate, partial(priors, 0), start, seed)
            for _ in range(REFINED):
                if evaluate.spent or self.improvement.advised() is None:
                    break
        self._expand(self.root)
        self._unseen = [] if priors is None else self._one_per_ratio()

    def run(self, max_playouts: int | None = None) -> None:
        """Runs playouts until the evaluator's budget is spent, or at most ``max_playouts``."""
        most = PLAYOUTS_PER_CALL * self.evaluate.max_calls if max_playouts is None else max_playouts
        for _ in range(most):
            for turn in self._turns():
                if self.evaluate.spent:
                    return
                turn()

    def _turns(self) -> Iterator[Callable[[], None]]:
        yield self.playout
        if self._unseen:
            yield partial(self.playout, self._unseen.pop(0))
        if self.improvement:
            yield self.improvement.step

    def playout(self, first: int | None = None) -> None:
        """Goes down to a new node, or to a strategy that is complete. ``first`` is the root's choice."""
        node = self.root
        path: list = []
        while len(node.decided) < len(self.order):
            if not len(node.prior):
                self._expand(node)
            index = self._select(node) if first is None or path else first
            path.append((node, index))
            child = node.children.get(index)
            if child is None:
                child = node.children[index] = self._leaf(node, node.choices[index])
                node = child
                break
            node = child
        for parent, index in path:
            parent.visits[index] += 1
            parent.totals[index] += node.value

    def completed(self, decided: tuple[Action, ...]) -> Actions:
        """A choice for every group, in order: undecided ones copy the first, or follow the advice if that
        proved better."""
        return self._with(decided, self._rest(decided[0])[1])

    def _with(self, decided: tuple[Action, ...], rest: Actions) -> Actions:
        chosen = list(rest)
        for k, action in zip(self.order, decided):
            chosen[k] = action
        return tuple(chosen)

    def _rest(self, first: Action) -> tuple[Outcome, Actions]:
        if first not in self._rests:
            copies = everywhere(self.space, first)
            self._rests[first] = self.evaluate(copies), copies
        return self._rests[first]

    def _one_per_ratio(self) -> list[int]:
        """The likeliest of the root's choices for each set of device groups and shares, the likeliest first.
        All are tried soon, so that a policy that misjudges a ratio does not keep the search from it."""
        likeliest: dict[tuple, int] = {}
        for index in np.argsort(-self.root.prior, kind="stable"):
            action = self.root.choices[index]
            likeliest.setdefault((action.device_groups, action.shares), int(index))
        return list(likeliest.values())

    def _judged(self, strategy: Actions) -> Outcome:
        outcome = self.evaluate(strategy)
        if self.improvement:
            self.improvement.offer(strategy, outcome)
        return outcome

    def _select(self, node: Node) -> int:
        """Selects a child by PUCT. TAG has c = sqrt(|A| / 10); rewards here differ by less."""
        tried, total = node.visits, node.visits.sum()
        mean = np.where(tried > 0, node.totals / np.maximum(tried, 1), self._untried(node))
        explore = EXPLORE if self.priors is None else EXPLORE_ADVISED
        c = explore * np.sqrt(len(node.choices) / 10)
        return int(np.argmax(mean + c * node.prior * np.sqrt(total + 1) / (1 + tried)))

    def _untried(self, node: Node) -> float:
        return (node.value + node.totals.sum()) / (1 + node.visits.sum())

    def _leaf(self, parent: Node, action: Action) -> Node:
        decided = (*parent.decided, action)
        strategy = self.completed(decided)
        outcome = self._judged(strategy)
        advice = parent.advice if parent.decided else None
        return Node(decided, reward(outcome, self.base_s), outcome, strategy, advice=advice)

    def _expand(self, node: Node) -> None:
        """Gives a node its choices with their probabilities, in random order to break ties; none if all
        groups are decided."""
        if len(node.decided) == len(self.order):
            return
        self._advise(node)
        k = self.order[len(node.decided)]
        choices = self.space.actions(k)
        prior = np.full(len(choices), 1 / len(choices))
        if node.advice is not None:
            prior = (1 - EVEN) * node.advice[k] + EVEN * prior
        mixed = node.mixed = self.rng.permutation(len(choices))
        node.choices, node.prior = tuple(choices[n] for n in mixed), prior[mixed]
        node.visits, node.totals = np.zeros(len(choices)), np.zeros(len(choices))

    def _advise(self, node: Node) -> None:
        """Asks for advice, and judges the strategy that follows it for all undecided groups."""
        if self.priors is None:
            return
        advice = self.priors(len(node.decided), node.strategy, node.outcome)
        if advice is None:
            return
        node.advice = advice
        if node.decided:
            best = tuple(self.space.actions(k)[int(p.argmax())] for k, p in enumerate(advice))
            strategy = self._with(node.decided, best)
            outcome = self._judged(strategy)
            if outcome.key < self._rest(node.decided[0])[0].key:
                self._rests[node.decided[0]] = outcome, strategy
