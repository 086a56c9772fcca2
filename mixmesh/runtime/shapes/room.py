"""Checks, by the memory model, that a batch of another shape fits in the memory that the plan was made for.

The predicted peak of the planned step is compared with that of the other one; their difference counts. A plan
knows the memory of each device. A bare program does not: then no shape may hold more than the planned one.
"""

from __future__ import annotations

import numpy as np

from ...base.units import size_text
from ...cost.micro_steps import costed_micro_step, largest_parts
from ...errors import Infeasible
from ...lang.ir import Program, local_bytes
from ...lang.optimizer_states import Earlier, OptimizerStates
from ...lang.plan_file import Plan, accumulation, schedule
from ...step.memory import ALLOWANCE, SMALL_ALLOWANCE, Held, Memory, Walked, flight_of

SLACK_BYTES = 2**20  # tolerated excess over the plan: scalars and rounding


def check_room(planned: Plan, made: Plan, *, learns: bool, cuda: bool) -> None:
    """Raises Infeasible, naming the rank, if ``made`` holds more than its device has, with gradients if it
    ``learns``."""
    states = planned.optimizer_states
    before = _peaks(planned, states, cuda)
    if learns:
        after = _peaks(made, states, cuda)
    else:
        least = Memory(planned.program, states, cuda=cuda).held_bytes(planned.program).min(axis=0)
        lost = 0.0 if cuda else ALLOWANCE + SMALL_ALLOWANCE
        after = np.minimum(least, before) + np.array(live_bytes(made.program)) * (1 + lost)
    allowed = before + SLACK_BYTES
    if planned.usable_bytes and planned.predicted_peak_memory_bytes:
        spare = np.array(planned.usable_bytes) - np.array(planned.predicted_peak_memory_bytes)
        allowed = allowed + np.maximum(spare, 0)
    rank = int((after - allowed).argmax())
    if after[rank] > allowed[rank]:
        raise Infeasible(
            "a batch of this shape needs more memory than the plan was made for",
            expected=f"at most {size_text(float(allowed[rank]))} of tensors on rank {rank}",
            got=f"{size_text(float(after[rank]))}, by the memory model",
            hint=(
                "a smaller batch, or a shorter one",
                "plan with the largest batch that will come: the others are served by the same plan",
            ),
        )


def earlier_gradients_over(planned: Plan, *, cuda: bool, is_unsummed: bool, are_added: bool) -> str | None:
    """A warning if a device has no room for the gradients of an earlier pass during a step of ``planned``;
    None if all have, or if their memory is unknown.

    Unsummed gradients are whole where their sums have owners. ``are_added``: those of this pass are complete
    before they are added, so that both are held at its end. Nothing is told of what the plan counts.
    """
    if not (planned.usable_bytes and planned.predicted_peak_memory_bytes):
        return None
    states = planned.optimizer_states
    before = _peaks(planned, states, cuda)
    if is_unsummed:
        after = _peaks(planned, states._replace(earlier=Earlier.ADDENDS), cuda)
    elif are_added:
        after = _peaks(planned, states._replace(earlier=Earlier.SUMS), cuda)
    else:
        after = _peaks(planned, states._replace(earlier=Earlier.NOTHING), cuda, Held.SUMS)
    lacks = _lacks(planned, np.maximum(after - before, 0))
    way = "no_sync" if is_unsummed else "every pass"
    return lacks and (
        "gradients of the pass before are held during this one, which the plan does not count: with them "
        f"{lacks}. optimizer.zero_grad() right after optimizer.step() frees "
        "them early; instead of accumulating, let the loader give the batches of all passes as one, which a "
        f"plan takes in micro-batches where memory is short, or mixmesh.prepare(..., accumulate={way!r}) "
        "plans with them"
    )


def whole_model_over(planned: Plan, more_bytes: int, *, cuda: bool) -> str | None:
    """A warning if a device has no room for the whole model, ``more_bytes`` than its pieces, beside what is
    stored between two steps; None if all have, or if their memory is unknown."""
    if not (planned.usable_bytes and planned.predicted_peak_memory_bytes):
        return None
    states, program = planned.optimizer_states, planned.program
    stored = Memory(program, states, cuda=cuda).held_bytes(program).min(axis=0)
    lacks = _lacks(planned, stored + more_bytes - _peaks(planned, states, cuda))
    return lacks and (
        "within whole(), and while a model is copied, every rank holds the whole model: then "
        f"{lacks}. Without it, model.eval() and calls without gradients evaluate the parallel model itself, "
        "and model.full_state_dict() collects the weights on the CPU"
    )


def _lacks(planned: Plan, more_bytes: np.ndarray) -> str | None:
    """Says which rank lacks memory, if one does that holds so much more than its peak in a step."""
    needed = np.array(planned.predicted_peak_memory_bytes) + more_bytes
    rank = int((needed - planned.usable_bytes).argmax())
    needs, has = float(needed[rank]), planned.usable_bytes[rank]
    if needs <= has + SLACK_BYTES:
        return None
    return f"rank {rank} needs {size_text(needs)}, and has {size_text(has)}"


def live_bytes(program: Program) -> tuple[int, ...]:
    """Per rank, the most bytes of values that live at once in a forward pass without gradients, not counting
    parameters and buffers."""
    last = {name: n for n, i in enumerate(program.instructions) for name in i.inputs}
    ranks = range(program.world_size)
    now, most = [0] * program.world_size, [0] * program.world_size
    held: dict[str, list[int]] = {}
    for n, i in enumerate(program.instructions):
        for name, t in zip(i.results, i.types):
            if name is not None and i.op not in ("param", "buffer"):
                ratio = program.ratio(t.ratio)
                held[name] = [local_bytes(t.value, t.placement, ratio, r) for r in ranks]
                now = [a + b for a, b in zip(now, held[name])]
        most = [max(a, b) for a, b in zip(most, now)]
        for name in {*i.inputs, *(r for r in i.results if r is not None)}:
            if last.get(name, n) <= n and name in held:
                now = [a - b for a, b in zip(now, held.pop(name))]
    return tuple(most)


def _peaks(plan: Plan, states: OptimizerStates, cuda: bool, held: Held = Held.NOTHING) -> np.ndarray:
    """The most bytes of tensors in a step, per rank, which begins with these gradients ``held``. In
    micro-batches those after the first hold some anyway."""
    samples = accumulation(plan)
    if samples is None or plan.micro_batches is None:
        walked = Walked(plan.program, states, cuda=cuda, held=held)
        return np.array(Memory(plan.program, states, walked=walked).peaks(plan.program))
    planned = schedule(plan.program, plan.micro_batches, samples)
    step = costed_micro_step(plan.program, samples)
    flight = flight_of(plan.program, samples, planned)
    walked = Walked(step, states, cuda=cuda, held=Held.of(planned.scatters), flight=flight)
    return np.array(Memory(step, states, cuda=cuda, walked=walked).peaks(step, largest_parts(planned)))
