"""TAG's policy (TPDS'23): a network over op groups and device groups that scores the choices for a group.

It knows no number of groups, devices or choices, so that weights that were trained once serve any model on
any cluster. Encoder: attention over five relations (next and previous group, device groups to each other,
groups and device groups to each other), their mean, residuals. Decoder: for every choice, what it gives to
each device group beside what that group is, meaned over the device groups; with the op group that it is for,
one score. TAG has widths of 256, four layers and batch norm; less, with layer norm, is fast on a CPU.

The weights of the package come from ``train``. A probability is mixed with an even one: what the network
never saw must not keep a search from looking.
"""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import torch
from torch import nn
from torch_geometric.nn import GATv2Conv, HeteroConv
from torch_geometric.utils import scatter, softmax

from ..errors import InputError
from ..placement import Action
from . import features as sizes
from .evaluate import Outcome
from .features import Facts
from .graphs import RELATIONS, hetero_data
from .mcts import order_of_groups
from .seeds import data_parallel

WEIGHTS = Path(__file__).with_name("tag.pt")
WIDTH, HEADS, LAYERS = 48, 4, 2
EVEN = 0.25  # of the probability is spread evenly
MOST_ASKED = 80  # states for which the network is asked; later ones take its last answer for the same group
EDGE_WIDTHS = (sizes.EDGE, sizes.EDGE, sizes.LINK, sizes.SERVE, sizes.SERVE)


class Policy(nn.Module):
    """Scores of choices: ``forward`` takes a graph of ``hetero_data``, or a batch of them, and returns one
    logit per choice."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, layers: int = LAYERS) -> None:
        super().__init__()
        self.enter = nn.ModuleDict(
            {"group": nn.Linear(sizes.GROUP, width), "device": nn.Linear(sizes.DEVICE, width)}
        )
        self.layers = nn.ModuleList(
            HeteroConv(
                {
                    relation: GATv2Conv(
                        (width, width), width // heads, heads, edge_dim=size, add_self_loops=False
                    )
                    for relation, size in zip(RELATIONS, EDGE_WIDTHS)
                },
                aggr="mean",
            )
            for _ in range(layers)
        )
        self.norms = nn.ModuleList(
            nn.ModuleDict({"group": nn.LayerNorm(width), "device": nn.LayerNorm(width)})
            for _ in range(layers)
        )
        self.on_device = nn.Sequential(
            nn.Linear(width + sizes.HELD, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.score = nn.Sequential(nn.Linear(2 * width + sizes.CHOICE, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, data) -> torch.Tensor:
        x = {kind: torch.tanh(enter(data[kind].x)) for kind, enter in self.enter.items()}
        edges = {relation: data[relation].edge_index for relation in RELATIONS}
        attrs = {relation: data[relation].edge_attr for relation in RELATIONS}
        for layer, norm in zip(self.layers, self.norms):
            new = layer(x, edges, edge_attr_dict=attrs)
            x = {kind: x[kind] + torch.tanh(norm[kind](new[kind])) for kind in x}
        held = data["device", "held", "choice"]
        device, choice = held.edge_index
        given = self.on_device(torch.cat([x["device"][device], held.edge_attr], 1))
        count = data["choice"].x.shape[0]
        given = scatter(given, choice, 0, count, "mean")
        asked = data["group", "asked", "choice"].edge_index[0]
        return self.score(torch.cat([given, x["group"][asked], data["choice"].x], 1)).squeeze(1)


def load(path: Path = WEIGHTS) -> Policy:
    """The policy with trained weights. Raises InputError if there are none, or not of this network."""
    policy = Policy()
    try:
        policy.load_state_dict(torch.load(path, weights_only=True))
    except (OSError, RuntimeError, EOFError, ValueError, UnpicklingError) as error:
        raise InputError(
            "the policy's weights cannot be read",
            expected="a file that python -m mixmesh.policies.train wrote",
            got=" ".join(str(error).split())[:120],
            where=str(path),
        ) from None
    return policy.eval()


class TagPriors:
    """A policy as the priors of a tree search."""

    def __init__(self, policy: Policy, facts: Facts) -> None:
        self.policy, self.facts = policy, facts
        self.order = order_of_groups(facts.space)
        self.rest = next(data_parallel(facts.space))[self.order[0]]
        self.asked = 0
        self.last: dict[int, np.ndarray] = {}  # by number of choices made

    def data(self, decided: tuple[Action, ...], outcome: Outcome):
        """The graph of the state in which the next group is to be placed."""
        asked = self.order[len(decided)]
        chosen = dict(zip(self.order, decided))
        return hetero_data(self.facts.at(chosen, asked, decided[0] if decided else self.rest, outcome))

    def __call__(self, decided: tuple[Action, ...], outcome: Outcome) -> np.ndarray:
        if self.asked < MOST_ASKED or len(decided) not in self.last:
            self.asked += 1
            with torch.inference_mode():
                scores = self.policy(self.data(decided, outcome))
                p = softmax(scores, torch.zeros(len(scores), dtype=torch.long)).numpy()
            self.last[len(decided)] = (1 - EVEN) * p + EVEN / len(p)
        return self.last[len(decided)]
