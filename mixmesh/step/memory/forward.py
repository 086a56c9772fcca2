"""Memory in the forward pass: results of computations, and what autograd keeps of them."""

from __future__ import annotations

from ...base.timeline import repeated_name
from ...lang.ir import Instruction, region_of
from .footprints import Footprint, copies_matrices
from .ledger import Storage, View
from .moments import result_name
from .state import State


def compute_forward(state: State, n: int) -> None:
    """Runs a computation. One that will be recomputed keeps nothing yet, except the inputs of its region."""
    i = state.setting.program.instructions[n]
    region = region_of(i) if i.attrs else None
    if region is not None:
        _keep_inputs(state, n, region)
    compute(state, n, i, keeps=region is None)


def _keep_inputs(state: State, n: int, region: int) -> None:
    """Keeps the inputs of a recomputed region, except those that are gathered again as well."""
    repeat = state.setting.regions.get(region)
    if repeat is None:
        return
    kept_inputs = state.kept_inputs[repeat.at]
    for name in state.setting.inputs[n]:
        if name in repeat.inputs and name not in kept_inputs and name not in state.setting.resharded:
            kept_inputs[name] = state.values[name].storage
            kept_inputs[name].references += 1


def compute(state: State, n: int, i: Instruction, *, keeps: bool = True, again: bool = False) -> None:
    """Runs a computation, for the first time or ``again``. If it will run again, it ``keeps`` nothing."""
    kind = state.setting.kinds[n]
    assert kind is not None  # it is a computation
    footprint = state.footprint(kind)
    views = [state.values[name] for name in i.inputs]
    results = footprint.results_of(tuple([view.strides for view in views]))
    created = [
        state.new(t, strides) if source is None else state.alias(views[source], strides)
        for t, (source, strides) in zip(i.types, results)
    ]
    for name, view in zip(i.results, created):
        if name is not None:
            state.values[name] = view
    kept = _keep(state, i, footprint, views, created) if state.setting.step.outline.flows[n] else []
    if keeps:
        state.saved[n] = kept
    name = result_name(i)
    event = repeated_name(name) if again else name
    what = f"%{i.results[0] or i.op}" + " again" * again
    state.ledger.moment(what, *footprint.forward, event=event)
    if not keeps:
        state.ledger.drop(*kept)
    for result, view in zip(i.results, created):
        if result is None:
            state.ledger.drop(view.storage)


def _keep(
    state: State, i: Instruction, footprint: Footprint, views: list[View], created: list[View]
) -> list[Storage]:
    """The storages that autograd keeps for the backward pass of a computation."""
    kept = []
    for what, position in footprint.keeps:
        if what == "result":
            storage = created[position].storage
        else:
            storage = _factor(state, footprint, i, position, views)
        if what == "result" or i.inputs[position] not in state.setting.resharded:
            storage.references += 1
            kept.append(storage)
    if footprint.extra:
        kept.append(state.ledger.take(footprint.extra, footprint.cut))
    return kept


def _factor(state: State, footprint: Footprint, i: Instruction, position: int, views: list[View]) -> Storage:
    """The storage that is kept for an input: a product of many matrices keeps the copy that it had to
    make."""
    view = views[position]
    if copies_matrices(footprint.call, position, view.strides):
        storage = state.new(state.setting.program.types[i.inputs[position]]).storage
        storage.references -= 1  # only autograd keeps it
        return storage
    return view.storage
