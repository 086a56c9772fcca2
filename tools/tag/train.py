"""How TAG's weights are made: ``python -m tools.tag.train --out tag.pt``

Random models on random clusters (``problems``), judged by the estimate of groups; what the best strategies
are is found by a long local search (``teacher``). From these, states: seeds, what searches came by on their
way, and strategies of which some groups are as in the best, others copy the first or are anything. The
network learns what each group that is not decided is in the best ones. Then it is followed from the best
seeds and first choices, and learns on with the states that this leads to (after DAgger: Ross et al., 2011).
One model in ten is held out, with all of its clusters.

The weights of the package: the defaults, some ten minutes of one CPU core. On held-out models the
cross-entropy is 1.44, of even choice 3.23, at least 0.32; what the network likes best is what is wanted with
a probability of 0.59.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from torch_geometric.data import HeteroData
from torch_geometric.loader import DataLoader
from torch_geometric.utils import scatter, softmax

from mixmesh.base.lazy import lazy
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.search.evaluate import Actions, Evaluator, measure_with
from mixmesh.search.learned.features import Facts
from mixmesh.search.learned.graphs import hetero_data
from mixmesh.search.learned.mcts import order_of_groups
from mixmesh.search.learned.seeds import best_alike, everywhere, judged_seeds
from mixmesh.search.learned.tag import Policy, TagPriors
from mixmesh.search.placement import Space

from .problems import random_model, random_space
from .teacher import Lesson, lessons

HEADROOM = 0.05  # share of memory, as in planning
PER_MODEL = 3  # clusters of each model
LEARNED_FROM = 1.5  # times the seconds of the best lesson's: others teach a first choice that nobody makes
MIXED = 2  # states of each lesson, beside that in which all groups copy the first
PASSED = 4  # states that searches came by, of each problem
FOLLOWED, STEPS = 2, 2  # first choices after which the policy is followed, and how far where none is made
STRAY = 0.05  # share of the groups of a state that are anything
SOFT = 0.01  # first choices whose best step is longer by this part have 1 / e of the probability
SOFT_BEST = 0.003  # the same of strategies after one first choice
BATCH, EPOCHS_BEFORE, EPOCHS, LEARNING_RATE = 16, 3, 8, 2e-3
GRADIENT_NORM = 0.6  # as TAG
HELD_OUT = 10  # one model in so many


@dataclass(frozen=True)
class Taught:
    """A problem with what was found for it."""

    space: Space
    lessons: list[Lesson]

    @lazy
    def evaluate(self) -> Evaluator:
        return Evaluator(self.space, measure_with(self.space, ADAM, HEADROOM))

    @lazy
    def facts(self) -> Facts:
        return Facts(self.space, ADAM, HEADROOM)

    @property
    def fitting(self) -> list[Lesson]:
        """Lessons that a choice for the first group can be learned from."""
        return [x for x in self.lessons if x.outcome.fits == self.lessons[0].outcome.fits]

    @lazy
    def wanted(self) -> list[tuple[Actions, float]]:
        """All that is nearly the best, with weights."""
        best_s = self.lessons[0].outcome.step_s
        return [
            (strategy, weight * math.exp((1 - lesson.outcome.step_s / best_s) / SOFT))
            for lesson in self.fitting
            for strategy, weight in after(lesson)
        ]

    @property
    def worth(self) -> list[Lesson]:
        best_s = self.lessons[0].outcome.step_s
        return [x for x in self.fitting if x.outcome.step_s <= LEARNED_FROM * best_s]


def taught(rng: random.Random, space: Space) -> Taught:
    evaluate = Evaluator(space, measure_with(space, ADAM, HEADROOM))
    judged_seeds(evaluate)
    return Taught(space, lessons(evaluate, rng))


def after(lesson: Lesson) -> list[tuple[Actions, float]]:
    """The strategies of a lesson with weights that sum to one."""
    weights = [math.exp((1 - o.step_s / lesson.outcome.step_s) / SOFT_BEST) for _, o in lesson.best]
    return [(s, w / sum(weights)) for (s, _), w in zip(lesson.best, weights)]


def states(rng: random.Random, made: Taught) -> Iterator[HeteroData]:
    """Graphs with ``wanted``, the probability of every pair of group and kind, and ``asked``, whether there
    is something to learn of a group: first where nothing is decided, at seeds and at what searches came by,
    then after first choices."""
    space, order = made.space, order_of_groups(made.space)
    first = order[0]
    anything = everywhere(space, rng.choice(space.actions(first)))
    passed = [s for lesson in made.worth for s in lesson.passed]
    for current in (best_alike(made.evaluate), anything, *rng.sample(passed, min(PASSED, len(passed)))):
        yield labelled(made, 0, current, made.wanted)
    for lesson in made.worth:
        wanted, copies = after(lesson), everywhere(space, lesson.first)
        yield labelled(made, 1, copies, wanted)
        for _ in range(MIXED):
            decided = rng.randint(1, len(order) - 1)
            current = mixed(rng, space, order, decided, lesson.best[0][0], copies)
            yield labelled(made, decided, current, wanted)


def visited(policy: Policy, made: Taught) -> Iterator[HeteroData]:
    """States that following the policy leads to, from the best seed and after first choices."""
    space, order = made.space, order_of_groups(made.space)
    starts = [(0, best_alike(made.evaluate), made.wanted)]
    starts += [(1, everywhere(space, x.first), after(x)) for x in made.worth[:FOLLOWED]]
    for decided, current, wanted in starts:
        for _ in range(STEPS if not decided else 1):
            advice = TagPriors(policy, made.facts)(decided, current, made.evaluate(current))
            new = [space.actions(k)[int(p.argmax())] for k, p in enumerate(advice)]
            for k in order[:decided]:
                new[k] = current[k]
            if tuple(new) == current:
                break
            current = tuple(new)
            yield labelled(made, decided, current, wanted)


def mixed(rng: random.Random, space: Space, order, decided: int, best: Actions, copies: Actions) -> Actions:
    """The first groups in the order as in the best, of the others a part."""
    part, out = rng.random(), list(best)
    for k in order[decided:]:
        if rng.random() > part:
            out[k] = copies[k]
        if rng.random() < STRAY:
            out[k] = rng.choice(space.actions(k))
    return tuple(out)


def labelled(made: Taught, decided: int, current: Actions, wanted: list[tuple[Actions, float]]) -> HeteroData:
    """A state with ``decided`` groups decided, in the order of the search, and the others asked for."""
    facts, order = made.facts, order_of_groups(made.space)
    tables, known = facts.tables, frozenset(order[:decided])
    data = hetero_data(facts.at(known, current, order[0], made.evaluate(current)))
    target = np.zeros((len(current), len(tables.kinds)))
    total = sum(weight for _, weight in wanted)
    for strategy, weight in wanted:
        target[np.arange(len(current)), tables.numbers(strategy)] += weight / total
    group, kind = facts.may
    data["group"].asked = torch.as_tensor([k not in known for k in range(len(current))])
    data["group", "may", "choice"].wanted = torch.as_tensor(target[group, kind], dtype=torch.float32)
    return data


def losses(policy: Policy, data) -> tuple[torch.Tensor, torch.Tensor]:
    """Per group that is asked for, the cross-entropy of the policy against what is wanted, and the wanted
    probability of what the policy likes best."""
    may = data["group", "may", "choice"]
    group, count = may.edge_index[0], data["group"].x.shape[0]
    p = softmax(policy(data), group, num_nodes=count)
    cross = -scatter(may.wanted * p.clamp_min(1e-9).log(), group, 0, count, "sum")
    most = scatter(p, group, 0, count, "max")
    right = scatter(torch.where(p == most[group], may.wanted, 0.0), group, 0, count, "sum")
    return cross[data["group"].asked], right[data["group"].asked]


def learn(policy: Policy, samples: list[HeteroData], console: Console, epochs: int = EPOCHS) -> None:
    """Ends with a learning rate of nearly zero."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    loader = DataLoader(samples, BATCH, shuffle=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=epochs * len(loader))
    policy.train()
    for _ in track(range(epochs), "learning", console=console):
        for data in loader:
            optimizer.zero_grad()
            losses(policy, data)[0].mean().backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), GRADIENT_NORM)
            optimizer.step()
            schedule.step()
    policy.eval()


@torch.no_grad()
def measured(policy: Policy, samples: list[HeteroData]) -> str:
    """How well it tells what it did not see; an even policy beside it."""
    found = [losses(policy, data) for data in DataLoader(samples, BATCH)]
    cross, right = (torch.cat(values).mean().item() for values in zip(*found))
    even, least = [], []
    for s in samples:
        may = s["group", "may", "choice"]
        counts = torch.bincount(may.edge_index[0])
        even.append(counts.log()[s["group"].asked])
        entropy = -(may.wanted * may.wanted.clamp_min(1e-9).log())
        least.append(scatter(entropy, may.edge_index[0], 0, len(counts), "sum")[s["group"].asked])
    even, least = (torch.cat(values).mean().item() for values in (even, least))
    return f"cross-entropy {cross:.3f} (even {even:.3f}, least {least:.3f}); right {right:.2f}"


def main(
    out: Annotated[Path, typer.Option("--out", help="Where the weights go.")],
    models: Annotated[int, typer.Option("--models")] = 120,
    seed: Annotated[int, typer.Option("--seed")] = 0,
) -> None:
    """Train TAG's policy from nothing."""
    torch.set_num_threads(1)
    console, rng, drawn = Console(stderr=True), random.Random(seed), random.Random(seed + 1)
    made: list[tuple[bool, Taught]] = []
    for n in track(range(models), "problems", console=console):
        model = random_model(rng)
        made += [(n % HELD_OUT == 0, taught(drawn, random_space(rng, model))) for _ in range(PER_MODEL)]
    policy, seen, held_out = trained(made, seed, console)
    torch.save({k: v.half() for k, v in policy.state_dict().items()}, out)
    console.print(f"{len(seen)} states, {len(held_out)} held out: {measured(policy, held_out)}")


def trained(made: Sequence[tuple[bool, Taught]], seed: int, console: Console):
    """The policy, and the states that it has learned from and not, given whether each problem is held out."""
    drawn = random.Random(seed + 7)
    states_of = [(out, [*states(drawn, problem)]) for out, problem in made]
    torch.manual_seed(seed)
    policy = Policy()
    learn(policy, [s for out, group in states_of if not out for s in group], console, EPOCHS_BEFORE)
    states_of += [(out, [*visited(policy, problem)]) for out, problem in made]
    seen, held_out = ([s for o, group in states_of if o == out for s in group] for out in (False, True))
    learn(policy, seen, console)
    return policy, seen, held_out


if __name__ == "__main__":
    typer.run(main)
