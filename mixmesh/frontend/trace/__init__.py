"""Traces an ordinary PyTorch model and one batch to a graph, without running the model.

Reading order: capture (torch.export), convert (its nodes to ours), then the passes of ``PASSES``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ...errors import InputError, MixmeshError, TraceError
from ...lang.ir import BATCH_NORMS, Graph, Node, Returned, batch_size_of
from ...lang.ir.graph import begins_gradient, computed_of
from ...lang.ir.local_norms import EXACT, LOCAL
from ...lang.rules import RULES
from .attention import ATTENTION_RULES
from .autocast import Autocast
from .build import Builder, Rule, rewrite
from .capture import Capture, LossSource, Request, capture, shapes_of
from .checkpoints import check_updates
from .compiled import uncompiled
from .convert import convert
from .draws import DRAW_RULES
from .dtypes import DTYPE_NAME, TORCH_DTYPE
from .folded import linears_without_folding
from .locate import Place
from .lookups import LOOKUP_RULES
from .losses import LOSS_RULES
from .mixtures import mixtures_as_operators
from .norms import NORM_RULES
from .recurrent import RECURRENT_RULES
from .rows import first_samples, sources_with_rows
from .sample_lookups import SAMPLE_RULES
from .schema import bound, normalise, on_meta, overload
from .selected_regions import selected_as_operators
from .simplify import (
    ALIASES,
    IDENTITY_RULES,
    RESHAPES,
    broadcasts_written_out,
    drop_assertions,
    drop_dead,
    drop_identities,
    drop_useless_detach,
    eps_written_out,
    leaves_at_first_use,
    normal_arguments,
    one_factory,
    one_spelling,
    static_shapes,
    updates_at_once,
)
from .symbolic import Conditions, FreeDims, NotSymbolic, symbols_as_numbers
from .symbolic_trace import SymbolicTrace
from .tf32 import tf32_now

__all__ = [
    "DTYPE_NAME", "PASSES", "TORCH_DTYPE", "Builder", "LossSource", "Rule", "SymbolicTrace", "Traced",
    "bound", "check_batch_norm", "check_has_shapes", "normalise", "on_meta", "overload", "rewrite", "trace",
    "trace_symbolic",
]  # fmt: skip


@dataclass(frozen=True)
class Traced:
    """The graph of a model with facts about the traced call.

    ``output_has_loss``: the model returns an object or dict with the loss, not the loss itself. ``warnings``
    point out probable mistakes in the model. ``arguments`` are those of the call, by name: "tensor", or the
    text of a constant. ``returned`` describes the return value if it is not the loss itself. ``autocast`` is
    the context of the call. ``tf32``: whether the process allowed TF32 in float32 matrix products
    (``torch.backends.cuda.matmul.allow_tf32``). ``left`` are the attributes of the model's modules where the
    call leaves tensors, which a program does not.
    """

    graph: Graph
    output_has_loss: bool
    warnings: tuple[str, ...] = ()
    arguments: tuple[tuple[str, str], ...] | None = None
    returned: Returned = Returned()
    autocast: Autocast | None = None
    tf32: bool = False
    left: tuple[str, ...] = ()


# a trace with symbols takes three to five times as long as one without; it is given up after so many times as
# long, but not before this number of seconds
SLOWER, LEAST_S = 12, 10.0
# operators that have a rule, or that a pass replaces
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


def lookups_by_sample(graph: Graph) -> Graph:
    return rewrite(graph, SAMPLE_RULES)


def exact_batch_norms(graph: Graph) -> Graph:
    return rewrite(graph, NORM_RULES[EXACT])


def local_batch_norms(graph: Graph) -> Graph:
    """Makes batch norms use each rank's own statistics."""
    return rewrite(graph, NORM_RULES[LOCAL])


Pass = Callable[[Graph], Graph]
PASSES: tuple[Pass, ...] = (
    drop_assertions,
    one_spelling,
    normal_arguments,
    static_shapes,
    broadcasts_written_out,
    one_factory,
    eps_written_out,
    exact_draws,
    plain_lookups,
    exact_attention,
    exact_losses,
    exact_batch_norms,
    linears_without_folding,
    drop_identities,
    drop_useless_detach,
    lookups_by_sample,
    drop_dead,
    mixtures_as_operators,
    selected_as_operators,
    drop_dead,
    leaves_at_first_use,
    updates_at_once,
)


def trace(
    model: nn.Module,
    batch: Mapping[str, Any] | tuple | list,
    passes: Sequence[Pass] = PASSES,
    *,
    batch_norm: str = EXACT,
    outputs: Collection[str | int] = (),
    autocast: Autocast | None = None,
    loss: LossSource = LossSource.RETURNED,
    learns: bool = True,
) -> Traced:
    """Traces ``model(**batch)`` (or ``model(*batch)``) up to its scalar loss.

    ``batch`` is one whole global batch, and gives the graph its shapes. The model is traced in its current
    mode, training or not, on fake tensors: nothing is computed and no random number is drawn. ``passes`` turn
    what was exported into the graph; benches leave some out. ``batch_norm`` decides which statistics batch
    norm takes in training: those of the whole batch ("exact") or of each rank's own samples ("local").
    ``outputs`` names what else is kept of the model's output: an attribute, a key, or an index in a tuple.
    The model is called under ``autocast``, a type of device and the name of a dtype, and under no other such
    context.

    ``loss`` says where the loss comes from. Where the call returns none, ``returned.loss`` is "" and a number
    takes its place; if the caller computes the loss, all tensors that the model returns become outputs with a
    gradient. A call that ``learns`` nothing, under ``torch.no_grad()``, may have a loss without a gradient,
    such as that of a model whose adapters are turned off.

    Raises TraceError if PyTorch cannot export the model or there is no loss, InputError for another kind of
    batch norm.
    """
    check_batch_norm(batch_norm)
    call = _Call(uncompiled(model), batch, Request(outputs, autocast, loss), passes, batch_norm, learns)
    check_has_shapes(call.model)
    captured = call.captured()
    graph = convert(captured, call.model)
    if loss is LossSource.MAYBE_CALLER and captured.returned.names and not depends_on_batch(graph):
        # that scalar was an output other than a loss, such as a scale
        call = replace(call, request=replace(call.request, loss=LossSource.CALLER))
        captured = call.captured()
        graph = convert(captured, call.model)
    return call.finished(captured, call.passed(graph))


def trace_symbolic(
    model: nn.Module,
    batch: Mapping[str, Any] | tuple | list,
    free: FreeDims,
    passes: Sequence[Pass] = PASSES,
    *,
    limit_s: float = math.inf,
    batch_norm: str = EXACT,
    outputs: Collection[str | int] = (),
    autocast: Autocast | None = None,
    loss: LossSource = LossSource.RETURNED,
    learns: bool = True,
) -> tuple[Traced, SymbolicTrace[Traced] | None]:
    """Traces a call as ``trace`` does, and again with symbols for the sizes of its inputs' ``free`` dims. The
    second trace gives those for other sizes; None if this call has none, or if it took more than ``limit_s``.
    Raises what ``trace`` does."""
    call = _Call(uncompiled(model), batch, Request(outputs, autocast, loss), passes, batch_norm, learns)
    started = time.monotonic()
    captured = call.captured()
    limit_s = min(limit_s, max(LEAST_S, SLOWER * (time.monotonic() - started)))
    converted = convert(captured, call.model)
    plain = call.passed(converted)
    traced = call.finished(captured, plain)
    rows = frozenset(
        n.inputs[0] for n in traced.graph.nodes if n.op == "output" and dict(n.kwargs).get("rows")
    )
    with_symbols = replace(call, request=replace(call.request, free=free))
    try:
        with symbols_as_numbers(limit_s):
            other = with_symbols.captured()
        other.program.example_inputs = None  # the batch, which would be kept as long as the trace
        conditions = Conditions.of(other.program, other.inputs)
        later = replace(call, batch={})
        finish = partial(later.finished, other, rows=rows)
        symbolic = SymbolicTrace(call.model, other, conditions, later.passed, finish)
        return traced, symbolic.named_as(converted, plain, shapes_of(batch))
    except (NotSymbolic, MixmeshError):
        return traced, None


@dataclass(frozen=True)
class _Call:
    """A call to trace, with the options of ``trace``."""

    model: nn.Module
    batch: Mapping[str, Any] | tuple | list
    request: Request
    passes: Sequence[Pass]
    batch_norm: str
    learns: bool

    def captured(self) -> Capture:
        return capture(self.model, self.batch, KNOWN, self.request)

    def passed(self, graph: Graph) -> Graph:
        """A converted graph after all passes. Raises TraceError for one that cannot be trained."""
        for step in self.passes:
            step = local_batch_norms if step is exact_batch_norms and self.batch_norm == LOCAL else step
            graph = step(graph)
        if self.learns:
            check_trainable(graph)
        check_updates(graph)
        return graph

    def finished(self, captured: Capture, graph: Graph, rows: frozenset[str] | None = None) -> Traced:
        """The result of ``trace`` for a graph. ``rows`` are the sources of outputs with a row per sample, if
        they are known."""
        if captured.outputs:
            may_be_outside = self.request.loss in (LossSource.MAYBE_CALLER, LossSource.CALLER)
            if rows is None:
                rows = sources_with_rows(graph, partial(self._smaller, graph))
            is_outside = may_be_outside and not captured.returned.has_loss
            graph = mark_outputs(graph, rows, is_outside=is_outside)
        warnings = (*captured.warnings, *_warnings(graph))
        facts = captured.arguments, captured.returned, self.request.autocast
        return Traced(graph, captured.output_has_loss, warnings, *facts, tf32_now(), captured.left)

    def _smaller(self, graph: Graph) -> Graph:
        """The converted graph of the same call with one sample less than ``graph`` is for."""
        size = batch_size_of(n.types[0] for n in graph.batch_inputs)
        batch = dict(self.batch) if isinstance(self.batch, Mapping) else self.batch
        fewer = replace(self, batch=first_samples(batch, size, size - 1))
        return convert(fewer.captured(), self.model)


def depends_on_batch(graph: Graph) -> bool:
    """Whether the loss depends on any input of the graph."""
    return graph.loss in computed_of(graph.nodes, (n.result for n in graph.batch_inputs))


def mark_outputs(graph: Graph, rows: Collection[str], *, is_outside: bool) -> Graph:
    """Marks the outputs whose ``rows`` are samples, and those that need a gradient because the loss
    ``is_outside``."""
    flowing = graph.requires_grad if is_outside else frozenset()

    def marked(node: Node) -> Node:
        (source,) = node.inputs
        options = (("rows", source in rows), ("grad", source in flowing))
        return replace(node, kwargs=tuple((name, True) for name, holds in options if holds))

    return replace(graph, nodes=tuple(marked(n) if n.op == "output" else n for n in graph.nodes))


def check_batch_norm(kind: str) -> None:
    """Raises InputError for an unknown kind of batch norm."""
    if kind not in BATCH_NORMS:
        raise InputError(
            f"there is no batch norm {kind!r}",
            expected=" or ".join(BATCH_NORMS),
            got=kind,
            hint=f'batch_norm="{kind.lower() if kind.lower() in BATCH_NORMS else EXACT}"',
        )


def check_has_shapes(model: nn.Module) -> None:
    """Raises InputError for a parameter or buffer that gets its shape in the first call, as in LazyLinear."""
    named = (*model.named_parameters(), *model.named_buffers())
    name = next((name for name, value in named if is_lazy(value)), None)
    if name is not None:
        raise InputError(
            "the model has parameters without a shape, which its first call would give them",
            expected="a model whose parameters have shapes and values",
            got=f"{name}, still without one",
            hint="model(x) once on one batch, before the optimizer is made",
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
        where=str(Place(loss_node.location, loss_node.source)),
        hint="a frozen model needs no plan: leave it out of prepare, and every rank runs it as it is"
        if frozen
        else "leave requires_grad of what is to be trained, and no detach() or no_grad() on the way",
    )


def _warnings(graph: Graph) -> Iterator[str]:
    flowing = graph.requires_grad
    trainable = [n for n in graph.params if begins_gradient(n)]
    unused = [str(n.args[0]) for n in trainable if n.result not in flowing]
    if len(unused) > MANY:
        first = ", ".join(unused[:MANY])
        yield f"{len(unused)} parameters get no gradient, as the loss does not depend on them: {first}, ..."
        return
    for name in unused:
        yield f"parameter {name} gets no gradient: the loss does not depend on it"


MANY = 3  # more parameters than this share one line
