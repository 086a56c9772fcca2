"""The memory that ranks hold before the first pass: while initial values are handed out, and from then on."""

from __future__ import annotations

from ...lang.ir import EVERYWHERE, Shard
from ...lang.optimizer_states import Earlier
from .ledger import Storage, View
from .moments import BEFORE, Moment, Sizes
from .state import Held, State
from .views import contiguous

BROADCAST_BYTES = 32 * 2**20  # initial values are sent in groups of this size (``runtime.shards``)


def set_up(state: State) -> None:
    """Adds the setting-up, in which every process makes the whole model and batch, receives rank 0's values
    in groups, and cuts them."""
    program, moments = state.setting.program, state.ledger.moments
    leaves = [i for i in program.instructions if i.op in ("param", "buffer")]
    # a parameter with copies appears once in the model
    model = sum(i.type.value.size_bytes for i in {i.args[0]: i for i in leaves}.values())
    batch = sum(i.type.value.size_bytes for i in program.instructions if i.op == "input")
    largest = max((i.type.value.size_bytes for i in leaves), default=0)
    # tensors larger than a group are sent in pieces of its size
    group = min(model, BROADCAST_BYTES + min(largest, BROADCAST_BYTES)) if program.world_size > 1 else 0
    cut = max(leaves, key=lambda i: i.type.value.size_bytes, default=None)
    if state.setting.cuda:
        held: Sizes = {EVERYWHERE: 2.0 * group}
        for i in leaves:
            held[i.type.cut] = held.get(i.type.cut, 0.0) + i.type.value.size_bytes
        moments.append(Moment("the initial values", held, event=BEFORE))
        return
    moments.append(Moment("the initial values", {EVERYWHERE: float(model + batch + group)}, event=BEFORE))
    if cut is not None and isinstance(cut.type.placement, Shard):
        held = {EVERYWHERE: float(model + batch), cut.type.cut: float(largest)}
        moments.append(Moment("cutting the model", held, event=BEFORE))


def stored(state: State) -> None:
    """Adds everything that is held between steps, and the batch, which each rank holds whole."""
    program, ledger = state.setting.program, state.ledger
    for i in program.instructions:
        if i.op in ("param", "buffer", "input", "const"):
            # a rank holds its whole share of the batch, however small its micro-batches are
            cut = i.type.cut.of_step if i.op == "input" else i.type.cut
            ledger.take(i.type.value.size_bytes, cut, stays=True)
            if i.op == "param" and i.result in program.requires_grad:
                _trained(state, i)
            storage = Storage(0.0, i.type.cut, references=2)  # never freed
            state.values[i.result] = View(storage, contiguous(i.type.value.shape))
    for i in program.instructions:
        if i.op == "output":  # a training loop keeps the outputs of the step before until it gets new ones
            shown = program.types[i.inputs[0]]
            ledger.take(shown.value.size_bytes, shown.cut.of_step, stays=True)
    inputs = [i.type for i in program.instructions if i.op == "input"]
    if not state.setting.cuda:
        ledger.moment("the batch", *((float(t.value.size_bytes), EVERYWHERE) for t in inputs))


def _trained(state: State, param) -> None:
    """Adds the optimizer's state of a parameter, and gradients of earlier micro-batches and passes."""
    setting, size = state.setting, param.type.value.size_bytes
    cut = setting.owned.get(param.result, param.type).cut
    state.ledger.take(setting.states.kept * size, cut, stays=True)
    if setting.held is Held.ADDENDS or (setting.held is Held.SUMS and param.result not in setting.owned):
        state.gradients[param.result] = state.new(param.type)
    elif setting.held is Held.SUMS:
        state.ledger.take(size, cut)
    if param.result in setting.added_to:
        state.gradients[param.result] = state.new(param.type)
    elif setting.states.earlier == Earlier.ADDENDS:
        state.ledger.take(size, param.type.cut, stays=True)
    elif setting.states.earlier == Earlier.SUMS:
        state.ledger.take(size, cut, stays=True)
