"""Memory of the optimizer's step."""

from __future__ import annotations

from ...lang.ir import EVERYWHERE
from .collectives import land_all
from .moments import OPTIMIZER, Sizes
from .state import State


def optimizer(state: State) -> None:
    """Adds the temporaries of the optimizer's step: on a CPU for one parameter at a time, on a GPU for all at
    once."""
    land_all(state)
    setting, ledger = state.setting, state.ledger
    program, cuda = setting.program, setting.cuda
    trained = [
        setting.owned.get(i.result, i.type) for i in program.params if i.result in program.requires_grad
    ]
    temporary: Sizes = {}
    for t in trained if setting.states.beside else ():
        size, cut = float(t.value.size_bytes), t.cut
        temporary[cut] = temporary.get(cut, 0.0) + size if cuda else max(temporary.get(cut, 0.0), size)
    if cuda:
        ledger.moment("the optimizer", *((size, cut) for cut, size in temporary.items()), event=OPTIMIZER)
        return
    # tensors of the backward pass are freed, but the heap still has the losses that they left
    smalls = [m.small for m in ledger.moments]
    # the next moment often has the same values
    unlike = [b for a, b in zip([None, *smalls], smalls) if a is not b]
    lost = {cut: max(small.get(cut, 0.0) for small in unlike) for cut in ledger.small}
    # one after the other; a moment without any if the optimizer makes none
    for cut, size in temporary.items() or [(EVERYWHERE, 0.0)]:
        now = ledger.now("the optimizer", (setting.states.beside * size, cut), event=OPTIMIZER)
        ledger.moments.append(now._replace(small=lost))
