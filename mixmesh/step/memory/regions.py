"""Memory of regions that the backward pass rematerialises."""

from __future__ import annotations

from ...lang.ir import region_of
from .forward import compute
from .ledger import View
from .state import State
from .views import contiguous


def compute_again(state: State, n: int) -> None:
    """Runs a computation a second time, this time keeping the values that its backward needs."""
    setting = state.setting
    i = setting.program.instructions[n]
    number = region_of(i)
    assert number is not None  # only regions run again
    repeat = setting.regions[number]
    if n == repeat.members[0]:
        state.rerun = set()
        for name in repeat.inputs:
            if name in state.again:
                shape = setting.program.types[name].value.shape
                state.values[name] = View(state.again[name], contiguous(shape))
    compute(state, n, i, again=True)
    state.rerun.update(r for r in i.results if r is not None)
    # values that the region reads but does not make are held elsewhere
    own = [name for name in (*setting.inputs[n], *i.results) if name in state.rerun]
    state.forget(n, own, setting.last_reruns[number])


def end_of_backward(state: State, n: int) -> None:
    """Frees everything that is not needed after the backward of instruction ``n``: the inputs of the region
    that begins with it, and the repeated gathers whose first use it is."""
    setting = state.setting
    repeat = setting.ends.get(n)
    if repeat is not None:
        state.ledger.drop(*state.kept_inputs.pop(repeat.at).values())
    for name in setting.inputs[n] if state.again else ():
        if name in state.again and setting.step.outline.uses[name][0] == n:
            state.ledger.drop(state.again.pop(name))
