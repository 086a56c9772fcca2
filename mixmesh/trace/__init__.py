"""Layer 2: from an ordinary PyTorch model and one batch to its graph, without running the model.

Reading order: capture (torch.export), convert (its nodes as ours), then the passes of ``PASSES``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..ir import Graph
from .attention import ATTENTION_RULES
from .build import Builder, Rule, rewrite
from .capture import capture
from .convert import convert, graph_name
from .dtypes import DTYPE_NAME, TORCH_DTYPE
from .losses import LOSS_RULES
from .norms import NORM_RULES
from .schema import bound, normalise, overload
from .simplify import (
    drop_assertions,
    drop_dead,
    drop_identities,
    drop_useless_detach,
    leaves_at_first_use,
    normal_arguments,
    one_factory,
    one_spelling,
    static_shapes,
    updates_at_once,
)

__all__ = [
    "DTYPE_NAME", "PASSES", "TORCH_DTYPE", "Builder", "Rule", "Traced",
    "bound", "normalise", "overload", "rewrite", "trace",
]  # fmt: skip


@dataclass(frozen=True)
class Traced:
    """``output_has_loss``: the model returns an object or dict with the loss, not the loss itself.
    ``warnings`` say what about the model is unlikely to be meant."""

    graph: Graph
    output_has_loss: bool
    warnings: tuple[str, ...] = ()


def exact_attention(graph: Graph) -> Graph:
    return rewrite(graph, ATTENTION_RULES)


def exact_losses(graph: Graph) -> Graph:
    return rewrite(graph, LOSS_RULES)


def exact_batch_norms(graph: Graph) -> Graph:
    return rewrite(graph, NORM_RULES)


PASSES: tuple[Callable[[Graph], Graph], ...] = (
    drop_assertions,
    one_spelling,
    normal_arguments,
    static_shapes,
    one_factory,
    exact_attention,
    exact_losses,
    exact_batch_norms,
    drop_identities,
    drop_useless_detach,
    drop_dead,
    leaves_at_first_use,
    updates_at_once,
)


def trace(model: nn.Module, batch: Mapping[str, Any] | tuple | list, name: str | None = None) -> Traced:
    """The graph of ``model(**batch)`` (or ``model(*batch)``), up to its scalar loss.

    Shapes are the batch's, which is one whole global batch. The model is traced in its current mode,
    training or not, on fake tensors: nothing is computed and no random number is drawn. Raises TraceError
    if PyTorch cannot export the model, or if it does not return a loss.
    """
    captured = capture(model, batch)
    graph = convert(captured, model, name or graph_name(model))
    for step in PASSES:
        graph = step(graph)
    return Traced(graph, captured.output_has_loss, tuple(_warnings(graph)))


def _warnings(graph: Graph):
    flowing = graph.requires_grad
    if graph.loss not in flowing:
        yield "the loss depends on no trainable parameter"
    for node in graph.params:
        if node.result not in flowing and dict(node.kwargs).get("trainable", True):
            yield f"parameter {node.args[0]} gets no gradient: the loss does not depend on it"
