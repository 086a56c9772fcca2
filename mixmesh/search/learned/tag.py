"""TAG's policy (TPDS'23): a network over op groups and device groups that scores the choices for a group.

It does not depend on the number of groups, devices or choices, so weights that were trained once serve any
model on any cluster. The encoder has attention over five relations (next and previous group, device groups to
each other, groups and device groups to each other), their mean, and residuals. The decoder takes, for every
choice, what it assigns to each device group together with that group's features, averaged over the device
groups; from that, the op group and the effects of the choice there it makes one score. TAG has widths of 256,
four layers and batch norm; fewer, with layer norm, are fast on a CPU. And while TAG scores the choices of one
group, this scores those of all.

The weights of the package come from ``train``.
"""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import torch
from torch import nn
from torch_geometric.nn import GATv2Conv, HeteroConv
from torch_geometric.utils import scatter, softmax

from ...errors import InputError
from ..evaluate import Actions, Outcome
from . import features as sizes
from .features import Facts
from .graphs import RELATIONS, hetero_data
from .mcts import Advice, order_of_groups

WEIGHTS = Path(__file__).with_name("tag.pt")
WIDTH, HEADS, LAYERS = 48, 4, 2
# number of states for which the network is asked; later states reuse the last answer above them
MOST_ASKED = 80
EDGE_WIDTHS = (sizes.EDGE, sizes.EDGE, sizes.LINK, sizes.SERVE, sizes.SERVE)


class Policy(nn.Module):
    """Scores of choices: ``forward`` takes a graph of ``hetero_data``, or a batch of them, and returns one
    logit per pair of group and kind that it may have."""

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
        self.of_group = nn.Linear(width, width)
        self.of_choice = nn.Linear(width + sizes.CHOICE, width, bias=False)
        self.of_pair = nn.Linear(sizes.PAIR, width, bias=False)
        self.score = nn.Sequential(nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, data) -> torch.Tensor:
        x = {kind: torch.tanh(enter(data[kind].x)) for kind, enter in self.enter.items()}
        edges = {relation: data[relation].edge_index for relation in RELATIONS}
        attrs = {relation: data[relation].edge_attr for relation in RELATIONS}
        for layer, norm in zip(self.layers, self.norms):
            assert isinstance(norm, nn.ModuleDict)
            new = layer(x, edges, edge_attr_dict=attrs)
            x = {kind: x[kind] + torch.tanh(norm[kind](new[kind])) for kind in x}
        held = data["device", "held", "choice"]
        device, choice = held.edge_index
        offered = self.on_device(torch.cat([x["device"][device], held.edge_attr], 1))
        offered = scatter(offered, choice, 0, data["choice"].x.shape[0], "mean")
        may = data["group", "may", "choice"]
        group, choice = may.edge_index
        of_choice = self.of_choice(torch.cat([offered, data["choice"].x], 1))
        pairs = self.of_group(x["group"])[group] + of_choice[choice] + self.of_pair(may.edge_attr)
        return self.score(pairs).squeeze(1)


def load(path: Path = WEIGHTS) -> Policy:
    """The policy with trained weights. Raises InputError if there are none, or if they belong to another
    network."""
    policy = Policy()
    try:
        policy.load_state_dict(torch.load(path, weights_only=True))
    except (OSError, RuntimeError, EOFError, ValueError, UnpicklingError) as error:
        raise InputError(
            "the policy's weights cannot be read",
            expected="a file that python -m tools.tag.train wrote",
            got=" ".join(str(error).split())[:120],
            where=str(path),
        ) from None
    return policy.eval()


class TagPriors:
    """Uses a policy for the priors of a tree search."""

    def __init__(self, policy: Policy, facts: Facts) -> None:
        self.policy, self.facts = policy, facts
        self.order = order_of_groups(facts.space)
        self.asked = 0

    def data(self, decided: int, current: Actions, outcome: Outcome):
        """The graph of a strategy with the first ``decided`` groups decided, in the order of the search."""
        groups = frozenset(self.order[:decided])
        return hetero_data(self.facts.at(groups, current, self.order[0], outcome))

    def __call__(self, decided: int, current: Actions, outcome: Outcome) -> Advice | None:
        """The network's advice; None if it was asked often enough."""
        if self.asked >= MOST_ASKED:
            return None
        self.asked += 1
        data = self.data(decided, current, outcome)
        with torch.inference_mode():
            p = softmax(self.policy(data), data["group", "may", "choice"].edge_index[0]).numpy()
        ends = np.cumsum([len(mine) for mine in self.facts.tables.kinds_of])[:-1]
        return tuple(np.split(p, ends))
