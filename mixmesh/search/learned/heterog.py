"""HeteroG's policy (CoNEXT'20): a network over the op groups of one model, trained for it on the spot.

For each group it chooses one device, or all devices evenly or in proportion, by AllReduce or a parameter
server. Graph attention over the groups, a transformer over their sequence, one score per choice. Trained by
REINFORCE: the reward is -sqrt(T / T_base), ten times that if memory does not suffice, minus a moving mean; a
bonus for entropy is raised while no new strategies appear; every third step learns from an elite of earlier
strategies.

As released it takes hours on two V100, so three things differ. The scores begin at the best seed's choices
and the network learns what to change. A strategy that does not fit is penalised by how much it exceeds
memory. Elites are the fastest of all seen, not those that beat a mean. And the rewards come from this
package's simulator: gradients have their whole size, links are shared, sums of gradients overlap the backward
pass.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch_geometric.nn import GATv2Conv

from ..evaluate import Evaluator, Outcome, Strategy
from ..placement import Action, Placed, Space
from .features import EDGE, Facts
from .seeds import judged_seeds, like

WIDTH, HEADS, GRAPH_LAYERS = 64, 4, 2
SAMPLES = 4  # strategies per step
LEARNING_RATE = 3e-3
AT_SEED = 0.9  # probability of the best seed's choice before anything is learned
ENTROPY, STIRRED = 0.002, 20.0  # weight of the bonus; its factor if the last steps were all alike
LOOK_BACK = 20
ELITES, ELITE_EVERY = 20, 3
WORST_EXCESS = 3.0  # multiple of the usable memory above which everything is equally bad


class Policy(nn.Module):
    """``forward`` returns scores [N, choices]."""

    def __init__(self, inputs: int, choices: int) -> None:
        super().__init__()
        self.enter = nn.Linear(inputs, WIDTH)
        self.graph = nn.ModuleList(
            GATv2Conv(WIDTH, WIDTH // HEADS, HEADS, edge_dim=EDGE) for _ in range(GRAPH_LAYERS)
        )
        self.sequence = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.leave = nn.Linear(WIDTH, choices)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def forward(self, x, edges, sizes) -> torch.Tensor:
        h = torch.tanh(self.enter(x))
        for layer in self.graph:
            h = h + nn.functional.elu(layer(h, edges, sizes))
        return self.leave(self.sequence(h[None])[0])


def choices_of(space: Space) -> tuple[Action, ...]:
    """The M + 4 choices of HeteroG, for the group with the most parameters."""
    most = max(range(len(space.groups)), key=lambda k: space.groups[k].param_bytes)
    everyone = len(space.device_groups)
    return tuple(
        a
        for a in space.actions(most)
        if a.shares == "single" or (len(a.device_groups) == everyone and a.placed.sync != "sharded")
    )


def reward(outcome: Outcome, base_s: float) -> float:
    worst = min(max(max(outcome.memory), 1.0), WORST_EXCESS)
    fitting = -((outcome.step_s / base_s) ** 0.5)
    return fitting if worst <= 1 else min(fitting, -1.0) * (1 + 9 * (worst - 1) / (WORST_EXCESS - 1))


class Training:
    """REINFORCE on one space, until the evaluator's budget is spent."""

    def __init__(
        self,
        evaluate: Evaluator,
        facts: Facts,
        more: Iterable[Sequence[Action | Placed]] = (),
        seed: int = 0,
    ) -> None:
        """``more`` are further strategies to start from, besides data parallelism and single devices."""
        self.evaluate, self.space = evaluate, evaluate.space
        self.generator = torch.Generator().manual_seed(seed)
        self.random = random.Random(seed)
        self.choices = choices_of(self.space)
        self.actions = [tuple(like(self.space, k, a) for a in self.choices) for k in range(len(facts.groups))]
        seeds, self.base_s = judged_seeds(evaluate, more)
        self.x = torch.as_tensor(facts.per_group, dtype=torch.float32)
        self.edges = torch.as_tensor(facts.edges)
        self.sizes = torch.as_tensor(facts.edge_sizes, dtype=torch.float32)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.policy = Policy(self.x.shape[1], len(self.choices))
        self.elites: dict[tuple[int, ...], Outcome] = {}
        for strategy in seeds:
            index = self.index_of(strategy)
            if index is not None:
                self.elites[index] = evaluate(strategy)
        self.start = self.from_seed(min(self.elites, key=lambda i: self.elites[i].key))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))
        self.mean: float | None = None
        self.recent: list[float] = []

    def index_of(self, strategy: Strategy) -> tuple[int, ...] | None:
        """A strategy as numbers of choices; None if it is not one of HeteroG's."""
        indices = []
        for placed, mine in zip(strategy, self.actions):
            index = next((n for n, action in enumerate(mine) if action.placed == placed), None)
            if index is None:
                return None
            indices.append(index)
        return tuple(indices)

    def from_seed(self, index: tuple[int, ...]) -> torch.Tensor:
        start = torch.zeros(len(index), len(self.choices))
        odds = AT_SEED / (1 - AT_SEED) * (len(self.choices) - 1)
        start[torch.arange(len(index)), torch.tensor(index)] = float(torch.tensor(odds).log())
        return start

    def run(self) -> None:
        step = 0
        while not self.evaluate.spent:
            self.step(with_elite=step % ELITE_EVERY == ELITE_EVERY - 1)
            step += 1

    def step(self, with_elite: bool) -> None:
        log_p = torch.log_softmax(self.policy(self.x, self.edges, self.sizes) + self.start, 1)
        drawn = torch.multinomial(log_p.detach().exp(), SAMPLES, replacement=True, generator=self.generator)
        batch = [tuple(column) for column in drawn.T.tolist()]
        if with_elite:
            batch.append(self.random.choice(list(self.elites)))
        rewards = []
        for index in batch:
            outcome = self.evaluate([mine[n] for mine, n in zip(self.actions, index)])
            rewards.append(reward(outcome, self.base_s))
            self.elites[index] = outcome
        self.elites = dict(sorted(self.elites.items(), key=lambda e: e[1].key)[:ELITES])
        own = sum(rewards[:SAMPLES]) / SAMPLES
        self.mean = own if self.mean is None else (self.mean + own) / 2
        self.recent = [*self.recent, max(rewards[:SAMPLES])][-LOOK_BACK:]
        stirred = len(self.recent) == LOOK_BACK and len(set(self.recent)) < 5
        chosen_log_p = torch.stack([log_p[torch.arange(len(i)), torch.tensor(i)].sum() for i in batch])
        advantage = torch.tensor(rewards) - self.mean
        entropy = -(log_p.exp() * log_p).sum()
        loss = -(chosen_log_p * advantage).mean() - ENTROPY * (STIRRED if stirred else 1.0) * entropy
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
