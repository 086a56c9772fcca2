"""Memory of the backward of computations: gradients are added, and everything that autograd kept is freed."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.timeline import gradient_name, wgrad_name
from ...cost.outline import is_factored
from ...lang.ir import Cut, Instruction
from .footprints import Footprint
from .ledger import View
from .moments import result_name
from .state import State
from .views import is_dense


def compute_backward(state: State, n: int) -> None:
    """Makes the gradients of a computation's inputs, except for a weight gradient that is made later."""
    setting = state.setting
    i, kind = setting.program.instructions[n], setting.kinds[n]
    assert kind is not None  # it is a computation
    footprint, outgoing = state.footprint(kind), state.outgoing(i)
    is_late = n in setting.step.later
    arriving = [
        (i.inputs[position], _gradient(state, footprint, position, kind.inputs[position], outgoing))
        for position, takes in enumerate(kind.takes)
        if takes and not (position == 1 and is_late)
    ]
    buffers = (*footprint.backward, *_factors(i, footprint))
    event = gradient_name(result_name(i))
    state.ledger.moment(f"gradient of %{i.results[0] or i.op}", *buffers, event=event)
    over = *(g.storage for g in outgoing), *state.saved.pop(n, ())
    if is_late:
        state.late[n] = over
    else:
        state.ledger.drop(*over)
    for name, view in arriving:
        accumulate(state, name, view)


def _gradient(state: State, footprint: Footprint, position: int, t, outgoing: list[View]) -> View:
    """The gradient of an input: a view of the result's, or a new tensor."""
    g, row = outgoing[0] if outgoing else None, footprint.row
    if row.passes and g is not None:
        strides = footprint.gradient_of(position, g.strides)
        if strides is not None:
            return state.alias(g, strides)
    laid_out = None
    if row.strided and g is not None and t.value.shape == footprint.call.outputs[0].shape:
        laid_out = g.strides if is_dense(t.value.shape, g.strides) else None
    return state.new(t, laid_out)


def _factors(i: Instruction, footprint: Footprint) -> Iterator[tuple[float, Cut]]:
    """Adds, with ``sfb``, the factors of all ranks."""
    if is_factored(i):
        call = footprint.call
        yield float(call.inputs[0].size_bytes + call.outputs[0].size_bytes), i.type.cut.whole


def compute_weight(state: State, n: int) -> None:
    """Makes a weight gradient from the values held until now. If it comes first, it is already part of the
    computation's backward."""
    if n not in state.late:
        return
    setting = state.setting
    i, kind = setting.program.instructions[n], setting.kinds[n]
    assert kind is not None  # it is a computation
    weight = i.inputs[1]
    gradient = state.new(setting.program.types[weight])
    buffers, event = state.footprint(kind).backward, wgrad_name(i.result)
    state.ledger.moment(f"gradient of %{weight}", *buffers, event=event)
    state.ledger.drop(*state.late.pop(n))
    accumulate(state, weight, gradient)


def accumulate(state: State, name: str, view: View) -> None:
    """Adds the gradients of several uses as they arrive, in place if nothing else holds the sum."""
    if name not in state.gradients:
        state.gradients[name] = view
        return
    held, t = state.gradients[name], state.setting.program.types[name]
    if held.storage.references > 1 or not is_dense(t.value.shape, held.strides):
        total = state.new(t)
        state.ledger.moment(f"gradient of %{name}")
        state.ledger.drop(held.storage)
        state.gradients[name] = total
    else:
        state.ledger.moment(f"gradient of %{name}")
    state.ledger.drop(view.storage)
