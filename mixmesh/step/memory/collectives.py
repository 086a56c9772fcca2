"""Memory of redistributions, of gradient sums, and of gathering parameters that their owners have stepped."""

from __future__ import annotations

from collections.abc import Iterable

from ...base.timeline import bucket_name, gradient_name, repeated_name
from ...cost.outline import is_stored
from ...cost.sums import IN_FLIGHT_BYTES, GradientSum
from ...lang.ir import Cut, Instruction
from .gradients import accumulate
from .ledger import Storage
from .moments import BUCKET
from .staging import Transfer
from .state import Held, State

# --- forward ----------------------------------------------------------------------------------------------


def move(state: State, i: Instruction) -> None:
    """Starts a redistribution. Its source is held until it arrives at its first use."""
    setting, view = state.setting, state.values[i.inputs[0]]
    if i.op == "local_slice":
        state.values[i.result] = state.alias(view, view.strides)
        return
    state.values[i.result] = state.new(i.type)
    if i.op == "all_gather":
        state.unordered.add(i.result)
    transfer = Transfer.forward(i, setting.program.types[i.inputs[0]])
    buffers = transfer.staging(setting.program.world_size, setting.cuda)
    state.ledger.moment(f"%{i.result}", *buffers, event=i.result)


def arrive(state: State, name: str) -> None:
    """Puts a gathered value in memory order, if rank order is another order."""
    state.unordered.discard(name)
    program = state.setting.program
    i = program.producers[name]
    transfer = Transfer("all_gather", program.types[i.inputs[0]], i.type)
    state.ledger.moment(f"%{name}", *transfer.ordering(state.setting.cuda))


def fetch(state: State) -> None:
    """Starts to gather parameters that their owners have stepped, each bucket into its own buffer."""
    while state.to_fetch and sum(s.size_bytes for s, _ in state.fetching) < IN_FLIGHT_BYTES:
        s = state.to_fetch.pop(0)
        state.fetching.append((s, state.ledger.take(s.size_bytes, s.params[0].type.cut.whole)))
    state.ledger.moment("the gathers of parameters that owners have stepped")


def land_parameter(state: State, name: str) -> None:
    """Lands an owned parameter in its place, after everything that was under way before it."""
    while any(p.result == name for s, _ in state.fetching for p in s.params):
        state.ledger.drop(state.fetching.pop(0)[1])
        fetch(state)


# --- backward ---------------------------------------------------------------------------------------------


def gather_again(state: State, i: Instruction) -> None:
    """Gathers a parameter that was freed after the forward pass."""
    program = state.setting.program
    state.again[i.result] = state.ledger.take(i.type.value.size_bytes, i.type.cut.whole)
    transfer = Transfer("all_gather", program.types[i.inputs[0]], i.type)
    buffers = transfer.staging(program.world_size, state.setting.cuda)
    state.ledger.moment(f"%{i.result} again", *buffers, event=repeated_name(i.result))


def move_back(state: State, i: Instruction) -> None:
    """Starts the redistribution of a gradient. That of a stored parameter is added on arrival; others are
    awaited where the redistribution started."""
    setting, outgoing = state.setting, state.outgoing(i)
    source = setting.program.types[i.inputs[0]]
    if i.op == "pad_partial" and outgoing:
        accumulate(state, i.inputs[0], state.alias(outgoing[0], outgoing[0].strides))
        state.ledger.drop(outgoing[0].storage)
        return
    transfer, goes_to_parameter = Transfer.back(i, source), is_stored(setting.program, i)
    buffers: Iterable[tuple[float, Cut]] = transfer.staging(setting.program.world_size, setting.cuda)
    if goes_to_parameter and transfer.op != "reduce_scatter":
        buffers = [(float(i.type.value.size_bytes), i.type.cut.whole)]
    carried = [state.ledger.take(size_bytes, cut, stays=True) for size_bytes, cut in buffers]
    leaving = [g.storage for g in outgoing]
    if transfer.op == "reduce_scatter" and transfer.is_sent_as_it_is(setting.cuda):
        carried, leaving = carried + leaving, []
    arriving = None if goes_to_parameter else state.new(source)
    state.ledger.moment(f"gradient of %{i.result}", event=gradient_name(i.result))
    state.ledger.drop(*leaving)
    if arriving is not None:
        state.returning[i.result] = arriving, carried
        return
    _fly(state, float(i.type.value.size_bytes), *carried)
    accumulate(state, i.inputs[0], state.new(source))


def come_back(state: State, i: Instruction) -> None:
    """Receives the gradient of a redistribution."""
    if i.result not in state.returning:
        return
    arriving, carried = state.returning.pop(i.result)
    transfer = Transfer.back(i, state.setting.program.types[i.inputs[0]])
    state.ledger.moment(f"gradient of %{i.result}", *transfer.ordering(state.setting.cuda))
    state.ledger.drop(*carried)
    accumulate(state, i.inputs[0], arriving)


def scatter_complete(state: State, names: set[str]) -> None:
    """Notes that the gradients of these parameters are complete; buckets that lack no more of them go to
    their owners."""
    owned_names = names.intersection(state.setting.owned)
    for s, missing in state.scatters if owned_names else ():
        if missing & owned_names:
            missing -= owned_names
            if not missing:
                _scatter(state, s)


def _scatter(state: State, s: GradientSum) -> None:
    """Sends a bucket to its owners: in one buffer, and the whole gradients are freed."""
    setting, ledger = state.setting, state.ledger
    flat = ledger.take(s.size_bytes, s.params[0].type.cut.whole) if len(s.params) > 1 else None
    ledger.moment(BUCKET, event=bucket_name([p.result for p in s.params]))
    leaving = [state.gradients.pop(p.result).storage for p in s.params if p.result in state.gradients]
    if flat is not None:
        ledger.drop(*leaving)
        leaving = [flat]
    world_size = setting.program.world_size
    addends = [
        ledger.take(world_size * p.type.value.size_bytes, setting.owned[p.result].cut)
        for p in s.params
        if not setting.cuda
    ]
    _fly(state, s.size_bytes, *leaving, *addends)
    if setting.held is not Held.SUMS:  # otherwise they are added to existing gradients
        for p in s.params:
            ledger.take(p.type.value.size_bytes, setting.owned[p.result].cut)


def _fly(state: State, size_bytes: float, *storages: Storage) -> None:
    """Puts a sum in flight. Earlier ones land until at most ``IN_FLIGHT_BYTES`` are in flight besides this
    one."""
    flying = state.flying
    flying.append((size_bytes, storages))
    while flying and sum(size for size, _ in flying) - flying[-1][0] > IN_FLIGHT_BYTES:
        state.ledger.drop(*flying.popleft()[1])


def land_all(state: State) -> None:
    """Lets all sums arrive."""
    while state.flying:
        state.ledger.drop(*state.flying.popleft()[1])
