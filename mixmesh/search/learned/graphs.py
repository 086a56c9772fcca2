"""Features as graphs of torch_geometric."""

from __future__ import annotations

import torch
from torch_geometric.data import HeteroData

from .features import Features

RELATIONS = (
    ("group", "next", "group"),
    ("group", "before", "group"),
    ("device", "link", "device"),
    ("group", "place", "device"),
    ("device", "serve", "group"),
)


def hetero_data(f: Features) -> HeteroData:
    """Groups, device groups and kinds of choice as nodes. A kind has an edge from every device group, and one
    from every group that it may be chosen for."""
    n, t, a = len(f.groups), len(f.devices), len(f.choices)
    data = HeteroData()
    data["group"].x = _float(f.groups)
    data["device"].x = _float(f.devices)
    data["choice"].x = _float(f.choices)
    data["group", "next", "group"].edge_index = torch.as_tensor(f.edges)
    data["group", "before", "group"].edge_index = torch.as_tensor(f.edges).flip(0)
    for relation in RELATIONS[:2]:
        data[relation].edge_attr = _float(f.edge_sizes)
    data["device", "link", "device"].edge_index = _pairs(t, t)
    data["device", "link", "device"].edge_attr = _float(f.links).flatten(0, 1)
    data["group", "place", "device"].edge_index = _pairs(n, t)
    data["device", "serve", "group"].edge_index = _pairs(n, t).flip(0)
    for relation in RELATIONS[3:]:
        data[relation].edge_attr = _float(f.serves).flatten(0, 1)
    data["device", "held", "choice"].edge_index = _pairs(a, t).flip(0)
    data["device", "held", "choice"].edge_attr = _float(f.held).flatten(0, 1)
    data["group", "may", "choice"].edge_index = torch.as_tensor(f.may)
    data["group", "may", "choice"].edge_attr = _float(f.pairs)
    return data


def _float(x) -> torch.Tensor:
    return torch.as_tensor(x, dtype=torch.float32)


def _pairs(rows: int, columns: int) -> torch.Tensor:
    return torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).T
