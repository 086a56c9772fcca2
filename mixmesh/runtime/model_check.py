"""Checks that the model is still the planned one, by tracing its forward pass once more at the first call.

A plan holds the forward pass as a program. A later change of the code (another activation, label smoothing, a
dropout rate) would silently have no effect. So rank 0 traces the model that was handed to ``parallelize``, at
the planned sizes and without computing anything, compares the graph with the plan's, and informs the other
ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import PlanError
from ..frontend.trace import TORCH_DTYPE, trace
from ..frontend.trace.autocast import check_casts
from ..frontend.trace.outputs import first_part
from ..lang.ir import Graph, Node, Program, Shard, outputs_of
from ..lang.ir.graph import map_refs
from ..lang.plan_file import Plan
from .calls import Calls, by_size
from .comm import Comm
from .first_rank import from_first_rank
from .original import traceable

HINT = (
    "plan again with the model as it is: mixmesh.plan(...), or mixmesh plan JOB ... --out X.plan",
    "parallelize(..., check_model=False) trains what was planned",
)


@dataclass
class PlannedModel:
    """The model that was handed to ``parallelize``; it is compared with its plan at the first batch."""

    original: nn.Module
    plan: Plan

    def check(self, args: tuple, kwargs: Mapping[str, Any], comm: Comm) -> None:
        """Raises PlanError on all ranks if the model computes anything other than what was planned.
        Collective."""
        group = comm.groups.get(("data", comm.everyone))  # a single rank has no group
        difference = from_first_rank(lambda: self._difference(args, kwargs), group)
        if difference is not None:
            raise difference

    def _difference(self, args: tuple, kwargs: Mapping[str, Any]) -> PlanError | None:
        with traceable(self.original):
            names = dict.fromkeys(first_part(name) for name in outputs_of(self.plan.program))
            batch, autocast = self._batch(args, kwargs), self.plan.autocast
            current = trace(self.original, batch, outputs=names, autocast=autocast).graph
        if current.fingerprint == self.plan.graph_fingerprint or digest(current) == digest(
            self.plan.program.graph
        ):
            return None
        expected, got = first_difference(self.plan.program.graph, current)
        return PlanError(
            "the model is not the one that was planned: its forward pass computes something else",
            expected=expected,
            got=got,
            hint=HINT,
        )

    def _batch(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        inputs = {i.args[0]: i.type.value.shape for i in self.plan.program.batch_inputs}
        return batch_of_shapes(Calls.of(self.original, self.plan), self.plan.program, inputs, args, kwargs)


def check_can_compare(model: nn.Module, plan: Plan | Program, is_wanted: bool) -> None:
    """Raises InputError, if it ``is_wanted`` to compare the model with a plan, where that plan's autocast
    casts nothing of it."""
    if is_wanted and isinstance(plan, Plan):
        check_casts(model, plan.autocast)


def batch_of_shapes(
    calls: Calls,
    program: Program,
    shapes: Mapping[str, tuple[int, ...]],
    args: tuple,
    kwargs: Mapping[str, Any],
    *,
    evaluates: bool = False,
) -> Any:
    """The arguments of a call in the form used in planning, with tensors of other ``shapes``, which are given
    by the program's names for its inputs. Tensors that are no inputs, as the model reads their shapes alone
    or nothing of them, get the sizes that these have where they had the same."""
    inputs = {i.args[0]: i.type for i in program.batch_inputs}
    tensors = calls.tensors(args, kwargs, evaluates=evaluates)
    whole = {
        id(t): torch.empty(shapes[name], dtype=TORCH_DTYPE[inputs[name].value.dtype], device=t.device)
        for name, t in tensors.items()
    }
    # inputs that are cut are preferred
    alike = by_size(tensors, sorted(tensors, key=lambda name: isinstance(inputs[name].placement, Shard)))

    def resized(t: Tensor) -> Tensor:
        return t.new_empty(
            [shapes[alike[dim, n]][dim] if (dim, n) in alike else n for dim, n in enumerate(t.shape)]
        )

    bound = calls.signature.bind(args, kwargs)
    planned = pytree.tree_map_only(Tensor, lambda t: whole[id(t)] if id(t) in whole else resized(t), bound)
    if not any(name.partition(".")[0].isdigit() for name in inputs):
        return planned
    places = {name: n for n, name in enumerate(calls.signature.positions)}
    place_of = lambda name: places[name] if name in places else int(name)  # noqa: E731
    return tuple(planned[name] for name in sorted(planned, key=place_of))


def digest(graph: Graph) -> tuple[str, frozenset[str]]:
    """A digest of everything that decides the loss, the buffers' updates and the outputs, independent of the
    order of operators and the names of results: a value is known by its operator and that operator's
    arguments."""
    number_of: dict[str, str] = {}
    sinks: set[str] = set()
    for node in graph.nodes:
        applied = map_refs((node.args, tuple(v for _, v in node.kwargs)), lambda ref: number_of[ref.name])
        text = repr((node.op, applied, tuple(k for k, _ in node.kwargs), node.types))
        if node.is_sink:
            sinks.add(text)
        for n, result in enumerate(node.results):
            if result is not None:
                number_of[result] = hashlib.sha256(f"{n} {text}".encode()).hexdigest()
    return number_of[graph.loss], frozenset(sinks)


def first_difference(planned: Graph, given: Graph) -> tuple[str, str]:
    """The first line in which two graphs differ: as planned, and as given."""
    ours = [n for n in planned.nodes if not n.is_leaf]
    theirs = [n for n in given.nodes if not n.is_leaf]
    for mine, other in zip(ours, theirs):
        if (mine.plain, mine.types) != (other.plain, other.types):
            return _shown(mine), _shown(other)
    return f"{len(ours)} operators", f"{len(theirs)} operators"


def _shown(node: Node) -> str:
    values = ", ".join(map(str, (*node.args, *(f"{k}={v}" for k, v in node.kwargs))))
    types = ", ".join(map(str, node.types))
    return f"{node.op}({values}) : {types}  {node.location}".rstrip()
