"""Times of whole local steps, which tie the operators' times to real seconds."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from ..cost import OpMeasurement, op_key
from ..ir import Graph
from ..rules import call_of
from .meter import REPEATS, Meter


def measure_steps(
    graph: Graph, job: Any, share: float, ops: dict[str, OpMeasurement], meter: Meter, device: torch.device
) -> tuple[float, float]:
    """Real seconds of a local step over the sum of its operators', and optimizer seconds per byte."""
    model = job.model.to(device)
    make = job.optimizer or (lambda params: torch.optim.AdamW(params, lr=0.0))
    optimizer = make(model.parameters())
    size_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    tensors = [t for t in tensors_of(job.batch) if t.dim()]
    rows = max((t.shape[0] for t in tensors), default=1)
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    scales, optimizer_s = [], []
    for factor in (0.6, 1.0):
        count = max(1, round(rows * share * factor))
        batch = cut_batch(job.batch, rows, count, device)

        def step(batch=batch):
            out = model(**batch) if isinstance(batch, dict) else model(*batch)
            loss = (
                out if isinstance(out, torch.Tensor) else out["loss"] if isinstance(out, dict) else out.loss
            )
            loss.backward()

        step()
        measured = statistics.median(meter.wall(step) for _ in range(REPEATS))
        predicted = predicted_step_s(graph, ops, count / rows)
        if predicted > 0:
            scales.append(measured / predicted)
        optimizer.step()
        optimizer_s.append(statistics.median(meter.wall(optimizer.step) for _ in range(REPEATS)))
        optimizer.zero_grad()
    model.load_state_dict(state)
    scale = statistics.mean(scales) if scales else 1.0
    return scale, statistics.median(optimizer_s) / max(size_bytes, 1)


def predicted_step_s(graph: Graph, ops: dict[str, OpMeasurement], share: float) -> float:
    total = 0.0
    for node in graph.nodes:
        if node.is_leaf or node.op == "update":
            continue
        measured = ops.get(op_key(call_of(node, graph.types)))
        if measured is not None:
            total += measured.forward.at(share)
            if any(r in graph.requires_grad for r in node.results):
                total += measured.backward.at(share)
    return total


def tensors_of(batch: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(batch) if isinstance(t, torch.Tensor)]


def cut_batch(batch: Any, rows: int, count: int, device: torch.device) -> Any:
    def cut(t):
        if not isinstance(t, torch.Tensor):
            return t
        return (t[:count] if t.dim() and t.shape[0] == rows else t).to(device)

    return torch.utils._pytree.tree_map(cut, batch)
