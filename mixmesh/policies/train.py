"""How TAG's weights are made: ``python -m mixmesh.policies.train --out tag.pt``

Games on random small models and clusters (``problems``), judged by the estimate of groups. A game searches,
keeps the states that were visited often with the visits of their choices, makes the most expensive group's
choice by chance in proportion to its visits, and goes on from there. The network learns to give each choice
the part of the visits that it got (AlphaZero: Silver et al., 2018; no value is learned). The first round
searches without a policy, each later one with what the rounds before taught. One game in ten is held out.

The weights of the package: the defaults, some six minutes of one CPU core. On held-out games, whose models
occur in other games too, the cross-entropy against the visits is 2.07, of even choice 3.12, at least 1.47.
"""

from __future__ import annotations

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

from .evaluate import Evaluator, estimated
from .features import Facts
from .mcts import Node, Tree
from .problems import STATES, Model, random_model, random_space
from .seeds import judged_seeds
from .tag import Policy, TagPriors

HEADROOM = 0.05  # of memory, as in planning
MODELS = 30  # each is used with many clusters
PLAYOUTS = 500  # for each choice of a game
CHOICES = 3  # made in a game
ENOUGH = 100  # visits that make a state worth learning from
MOST_STATES = 12  # of a game
BATCH, EPOCHS, LEARNING_RATE = 16, 10, 2e-3
GRADIENT_NORM = 0.6  # as TAG
HELD_OUT = 10  # one game in so many


def game(rng: random.Random, model: Model, policy: Policy | None) -> list[HeteroData]:
    """States of one game, with ``visits``, the part of each choice."""
    space = random_space(rng, model)
    evaluate = Evaluator(space, estimated(space, STATES, HEADROOM))
    _, base_s = judged_seeds(evaluate)
    facts = Facts(space, STATES, HEADROOM)
    graphs = TagPriors(policy, facts)
    tree = Tree(evaluate, base_s, graphs if policy else None, seed=rng.randrange(2**31))
    found: list[Node] = []
    for _ in range(min(CHOICES, len(space.groups))):
        tree.run(PLAYOUTS)
        found += often_visited(tree.root)
        visits = tree.root.visits
        tree.descend(rng.choices(range(len(visits)), visits.tolist())[0])
    once = {id(node): node for node in found}
    best = sorted(once.values(), key=lambda node: -node.visits.sum())[:MOST_STATES]
    return [labelled(graphs, node) for node in best]


def often_visited(node: Node) -> Iterator[Node]:
    if len(node.visits) and node.visits.sum() >= ENOUGH:
        yield node
        for child in node.children.values():
            yield from often_visited(child)


def labelled(graphs: TagPriors, node: Node) -> HeteroData:
    data = graphs.data(node.decided, node.outcome)
    visits = np.empty(len(node.visits))
    visits[node.mixed] = node.visits / node.visits.sum()
    data["choice"].visits = torch.as_tensor(visits, dtype=torch.float32)
    return data


def losses(policy: Policy, data) -> tuple[torch.Tensor, torch.Tensor]:
    """Per state, the cross-entropy of the policy against the visits, and the probability that the policy
    gives to the choice with most of them."""
    state, visits = data["choice"].batch, data["choice"].visits
    p = softmax(policy(data), state)
    count = int(state[-1]) + 1
    cross = -scatter(visits * p.clamp_min(1e-9).log(), state, 0, count, "sum")
    most = scatter(visits, state, 0, count, "max")
    return cross, scatter(torch.where(visits == most[state], p, 0.0), state, 0, count, "sum")


def learn(policy: Policy, samples: list[HeteroData], console: Console) -> None:
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    loader = DataLoader(samples, BATCH, shuffle=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=EPOCHS * len(loader))
    policy.train()
    for _ in track(range(EPOCHS), "learning", console=console):
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
    cross, top = (torch.cat(values).mean().item() for values in zip(*found))
    even = float(np.mean([np.log(len(s["choice"].x)) for s in samples]))
    own = [s["choice"].visits for s in samples]
    least = float(np.mean([-(v * v.clamp_min(1e-9).log()).sum().item() for v in own]))
    return f"cross-entropy {cross:.3f} (even {even:.3f}, least {least:.3f}); most visited gets {top:.2f}"


def main(
    out: Annotated[Path, typer.Option("--out", help="Where the weights go.")],
    games: Annotated[int, typer.Option("--games", help="In each round.")] = 200,
    rounds: Annotated[int, typer.Option("--rounds")] = 2,
    seed: Annotated[int, typer.Option("--seed")] = 0,
) -> None:
    """Train TAG's policy from nothing."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    console, rng = Console(stderr=True), random.Random(seed)
    models = [random_model(rng) for _ in track(range(MODELS), "tracing", console=console)]
    policy, seen, held_out = Policy(), [], []
    for n in range(rounds):
        for played in track(range(games), f"round {n}: games", console=console):
            states = game(rng, rng.choice(models), policy if n else None)
            (held_out if played % HELD_OUT == 0 else seen).extend(states)
        learn(policy, seen, console)
        torch.save({k: v.half() for k, v in policy.state_dict().items()}, out)
        console.print(
            f"round {n}: {len(seen)} states, {len(held_out)} held out: {measured(policy, held_out)}"
        )


if __name__ == "__main__":
    typer.run(main)
