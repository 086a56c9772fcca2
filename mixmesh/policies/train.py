"""How TAG's weights are made: ``python -m mixmesh.policies.train --out tag.pt``

Random models on random clusters (``problems``), judged by the estimate of groups; what the best strategies
are is found by a long local search (``teacher``). From these, states: strategies of which some groups are as
in the best, others copy the first or are anything. The network learns what each group that is not decided is
in the best ones. One model in ten is held out, with all of its clusters.

The weights of the package: the defaults, some five minutes of one CPU core. On held-out models the
cross-entropy is 1.41, of even choice 3.83, at least 0.42; what the network likes best is what is wanted with
a probability of 0.63.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
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

from ..placement import Space
from .evaluate import Actions, Evaluator, estimated
from .features import Facts
from .graphs import hetero_data
from .mcts import order_of_groups
from .problems import STATES, random_model, random_space
from .seeds import data_parallel, everywhere, judged_seeds
from .tag import Policy
from .teacher import Lesson, lessons

HEADROOM = 0.05  # of memory, as in planning
PER_MODEL = 5  # clusters of each model
LEARNED_FROM = 1.5  # times the seconds of the best lesson's: others teach a first choice that nobody makes
MIXED = 3  # states of each lesson, beside that in which all groups copy the first
STRAY = 0.05  # of the groups of a state are anything
SOFT = 0.03  # first choices whose best step is longer by this part have 1 / e of the probability
SOFT_BEST = 0.003  # the same of strategies after one first choice
BATCH, EPOCHS, LEARNING_RATE = 16, 10, 2e-3
GRADIENT_NORM = 0.6  # as TAG
HELD_OUT = 10  # one model in so many


def taught(rng: random.Random, space: Space) -> tuple[Space, list[Lesson]]:
    evaluate = Evaluator(space, estimated(space, STATES, HEADROOM))
    judged_seeds(evaluate)
    return space, lessons(evaluate, rng)


def states(rng: random.Random, space: Space, found: list[Lesson]) -> Iterator[HeteroData]:
    """Graphs with ``wanted``, the probability of every pair of group and kind, and ``asked``, whether there
    is something to learn of a group."""
    evaluate = Evaluator(space, estimated(space, STATES, HEADROOM))
    facts, order = Facts(space, STATES, HEADROOM), order_of_groups(space)
    best_s = found[0].outcome.step_s
    fitting = [x for x in found if x.outcome.fits == found[0].outcome.fits]
    weights = [math.exp((1 - x.outcome.step_s / best_s) / SOFT) for x in fitting]
    firsts = [(everywhere(space, x.first), w) for x, w in zip(fitting, weights)]
    start = next(data_parallel(space))
    yield labelled(facts, 0, start, evaluate, firsts, order[:1])
    for lesson in fitting:
        if lesson.outcome.step_s > LEARNED_FROM * best_s:
            continue
        after = [(s, math.exp((1 - o.step_s / lesson.outcome.step_s) / SOFT_BEST)) for s, o in lesson.best]
        copies = everywhere(space, lesson.first)
        yield labelled(facts, 1, copies, evaluate, after, order[1:])
        for _ in range(MIXED):
            decided = rng.randint(1, len(order) - 1)
            current = mixed(rng, space, order, decided, lesson.best[0][0], copies)
            yield labelled(facts, decided, current, evaluate, after, order[decided:])


def mixed(rng: random.Random, space: Space, order, decided: int, best: Actions, copies: Actions) -> Actions:
    """The first groups in the order as in the best, of the others a part."""
    part, out = rng.random(), list(best)
    for k in order[decided:]:
        if rng.random() > part:
            out[k] = copies[k]
        if rng.random() < STRAY:
            out[k] = rng.choice(space.actions(k))
    return tuple(out)


def labelled(
    facts: Facts,
    decided: int,
    current: Actions,
    evaluate: Evaluator,
    wanted: list[tuple[Actions, float]],
    asked,
) -> HeteroData:
    tables, order = facts.tables, order_of_groups(facts.space)
    data = hetero_data(facts.at(frozenset(order[:decided]), current, order[0], evaluate(current)))
    target = np.zeros((len(current), len(tables.kinds)))
    total = sum(weight for _, weight in wanted)
    for strategy, weight in wanted:
        target[np.arange(len(current)), tables.numbers(strategy)] += weight / total
    group, kind = facts.may
    data["group"].asked = torch.as_tensor(np.isin(np.arange(len(current)), asked))
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
    models: Annotated[int, typer.Option("--models")] = 35,
    seed: Annotated[int, typer.Option("--seed")] = 0,
) -> None:
    """Train TAG's policy from nothing."""
    torch.set_num_threads(1)
    console, rng, drawn = Console(stderr=True), random.Random(seed), random.Random(seed + 1)
    seen, held_out = [], []
    for n in track(range(models), "problems", console=console):
        model = random_model(rng)
        for _ in range(PER_MODEL):
            made = states(drawn, *taught(rng, random_space(rng, model)))
            (held_out if n % HELD_OUT == 0 else seen).extend(made)
    torch.manual_seed(seed)
    policy = Policy()
    learn(policy, seen, console)
    torch.save({k: v.half() for k, v in policy.state_dict().items()}, out)
    console.print(f"{len(seen)} states, {len(held_out)} held out: {measured(policy, held_out)}")


if __name__ == "__main__":
    typer.run(main)
