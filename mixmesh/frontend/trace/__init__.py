"""Layer 2: from an ordinary PyTorch model and one batch to its graph, without running the model.

Reading order: capture (torch.export), convert (its nodes as ours), then the passes of ``PASSES``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ...errors import InputError, TraceError
from ...lang.ir import BATCH_NORMS, Graph, Returned
from ...lang.ir.local_norms import EXACT, LOCAL
from ...lang.rules import RULES
from .attention import ATTENTION_RULES
from .autocast import Autocast
from .build import Builder, Rule, rewrite
from .capture import capture
from .compiled import uncompiled
from .convert import convert, graph_name
from .draws import DRAW_RULES
from .dtypes import DTYPE_NAME, TORCH_DTYPE
from .lookups import LOOKUP_RULES
from .losses import LOSS_RULES
from .mixtures import mixtures_as_operators
from .norms import NORM_RULES
from .outputs import values_with_rows
from .recurrent import RECURRENT_RULES
from .schema import bound, normalise, on_meta, overload
from .simplify import (
    ALIASES,
    IDENTITY_RULES,
    RESHAPES,
    broadcasts_written_out,
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
from .tf32 import tf32_now

__all__ = [
    "DTYPE_NAME", "PASSES", "TORCH_DTYPE", "Builder", "Rule", "Traced",
    "bound", "check_batch_norm", "normalise", "on_meta", "overload", "rewrite", "trace",
]  # fmt: skip


@dataclass(frozen=True)
class Traced:
    """``output_has_loss``: the model returns an object or dict with the loss, not the loss itself.
    ``warnings`` say what about the model is unlikely to be meant; ``arguments`` are those of the call that
    was traced, by name: "tensor", or a constant's text. ``returned`` says what the model returns where
    it does not return the loss itself. ``autocast`` is the context of that call, ``tf32`` whether the process
    let matrix products of float32 run in TF32 (``torch.backends.cuda.matmul.allow_tf32``)."""

    graph: Graph
    output_has_loss: bool
    warnings: tuple[str, ...] = ()
    arguments: tuple[tuple[str, str], ...] | None = None
    returned: Returned = Returned()
    autocast: Autocast | None = None
    tf32: bool = False


# operators that have a rule, or are written out by a pass
KNOWN = frozenset().union(
    RULES, ATTENTION_RULES, DRAW_RULES, LOOKUP_RULES, LOSS_RULES, NORM_RULES[EXACT], RECURRENT_RULES, ALIASES,
    IDENTITY_RULES, RESHAPES, ("aten.broadcast_tensors", "aten.expand_copy"),
)  # fmt: skip


def exact_attention(graph: Graph) -> Graph:
    return rewrite(graph, ATTENTION_RULES)


def exact_losses(graph: Graph) -> Graph:
    return rewrite(graph, LOSS_RULES)


def exact_draws(graph: Graph) -> Graph:
    return rewrite(graph, DRAW_RULES | RECURRENT_RULES)


def plain_lookups(graph: Graph) -> Graph:
    return rewrite(graph, LOOKUP_RULES)


def exact_batch_norms(graph: Graph) -> Graph:
    return rewrite(graph, NORM_RULES[EXACT])


def local_batch_norms(graph: Graph) -> Graph:
    """The graph whose batch norms take each rank's own statistics."""
    return rewrite(graph, NORM_RULES[LOCAL])


Pass = Callable[[Graph], Graph]
PASSES: tuple[Pass, ...] = (
    drop_assertions,
    one_spelling,
    normal_arguments,
    static_shapes,
    broadcasts_written_out,
    one_factory,
    exact_draws,
    plain_lookups,
    exact_attention,
    exact_losses,
    exact_batch_norms,
    drop_identities,
    drop_useless_detach,
    drop_dead,
    mixtures_as_operators,
    drop_dead,
    leaves_at_first_use,
    updates_at_once,
)


def trace(
    model: nn.Module,
    batch: Mapping[str, Any] | tuple | list,
    name: str | None = None,
    passes: Sequence[Pass] = PASSES,
    *,
    batch_norm: str = EXACT,
    outputs: Collection[str | int] = (),
    autocast: Autocast | None = None,
    needs_loss: bool = True,
    may_be_outside: bool = False,
) -> Traced:
    """The graph of ``model(**batch)`` (or ``model(*batch)``), up to its scalar loss.

    Shapes are the batch's, which is one whole global batch. The model is traced in its current mode,
    training or not, on fake tensors: nothing is computed and no random number is drawn. ``passes`` make the
    graph of what was exported, for a bench that leaves one out. ``batch_norm`` says whose statistics batch
    norm takes in training: those of the whole batch ("exact") or of each rank's own samples ("local").
    ``outputs`` names what else of the model's output is kept: an attribute, a key, or a place in a tuple.
    The model is called under ``autocast``, a type of device and a dtype's name, and under no other such
    context. Unless it ``needs_loss``, a number stands in the place of a loss that the call does not give, and
    ``returned.loss`` is "". So it is where the loss ``may_be_outside`` and the model returns none: then all
    tensors that it returns are outputs whose gradient comes from the caller. Raises TraceError if PyTorch
    cannot export the model, or if it does not return a loss, InputError for another kind of batch norm.
    """
    check_batch_norm(batch_norm)
    model = uncompiled(model)
    has_loss = None if may_be_outside else True
    captured = capture(model, batch, KNOWN, outputs, autocast, needs_loss, has_loss)
    graph = convert(captured, model, name or graph_name(model))
    if may_be_outside and captured.returned.names and not depends_on_batch(graph):
        # a scale among features, that is no loss
        captured = capture(model, batch, KNOWN, outputs, autocast, needs_loss, has_loss=False)
        graph = convert(captured, model, name or graph_name(model))
    for step in passes:
        step = local_batch_norms if step is exact_batch_norms and batch_norm == LOCAL else step
        graph = step(graph)
    check_trainable(graph)
    if captured.outputs:
        graph = mark_outputs(graph, is_outside=may_be_outside and not captured.returned.has_loss)
    warnings = (*captured.warnings, *_warnings(graph))
    call = captured.arguments, captured.returned, autocast
    return Traced(graph, captured.output_has_loss, warnings, *call, tf32_now())


def depends_on_batch(graph: Graph) -> bool:
    """Whether the loss is made of any input."""
    dependent = {n.result for n in graph.batch_inputs}
    for node in graph.nodes:
        if not dependent.isdisjoint(node.inputs):
            dependent.update(r for r in node.results if r is not None)
    return graph.loss in dependent


def mark_outputs(graph: Graph, *, is_outside: bool) -> Graph:
    """The graph in which outputs say whether their rows are samples, and, where the loss ``is_outside``,
    whether they have a gradient."""
    rows = values_with_rows(graph)
    flowing = graph.requires_grad if is_outside else frozenset()

    def marked(node):
        (source,) = node.inputs
        options = (("rows", source in rows), ("grad", source in flowing))
        return replace(node, kwargs=tuple((name, True) for name, holds in options if holds))

    return replace(graph, nodes=tuple(marked(n) if n.op == "output" else n for n in graph.nodes))


def check_batch_norm(kind: str) -> None:
    """Raises InputError for what is no kind of batch norm."""
    if kind not in BATCH_NORMS:
        raise InputError(
            f"there is no batch norm {kind!r}",
            expected=" or ".join(BATCH_NORMS),
            got=kind,
            hint=f'batch_norm="{EXACT}"',
        )


def check_trainable(graph: Graph) -> None:
    """Raises TraceError for a loss without a gradient."""
    if graph.loss in graph.requires_grad:
        return
    loss_node = next(n for n in graph.nodes if graph.loss in n.results)
    frozen = all(not dict(n.kwargs).get("trainable", True) for n in graph.params)
    raise TraceError(
        "the loss depends on no trainable parameter",
        expected="a loss that gradients flow from to some parameter",
        got="a model whose parameters are all frozen" if frozen else "a loss computed without gradients",
        where=f"{loss_node.location}, {loss_node.source}" if loss_node.source else loss_node.location,
        hint="leave requires_grad of what is to be trained, and no detach() or no_grad() on the way",
    )


def _warnings(graph: Graph):
    flowing = graph.requires_grad
    for node in graph.params:
        if node.result not in flowing and dict(node.kwargs).get("trainable", True):
            yield f"parameter {node.args[0]} gets no gradient: the loss does not depend on it"
