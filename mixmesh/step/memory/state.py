"""The state of a fold over one step: what every rank holds so far, and why."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ...cost.calls import Kind
from ...cost.outline import Outline, is_resharded
from ...cost.sums import GradientSum, gradient_sums
from ...lang.ir import Instruction, Program, TensorType, owned_type, region_of
from ...lang.optimizer_states import Earlier, OptimizerStates
from ..repeats import Repeat
from ..step import Step
from .flight import NO_FLIGHT, Flight
from .footprints import Footprint, Strides
from .ledger import Ledger, Storage, View
from .moments import Moment
from .views import contiguous


class Held(Enum):
    """Which gradients of earlier micro-batches are held when a micro-batch begins."""

    NOTHING = "it is the first"
    ADDENDS = "what was not summed, whole"
    SUMS = "of owned parameters the owners' rows"

    @classmethod
    def of(cls, scatters: bool) -> Held:
        return cls.SUMS if scatters else cls.ADDENDS


@dataclass(frozen=True, slots=True)
class Setting:
    """The facts of a step that decide its memory. ``held`` are the gradients at the start of a micro-batch,
    ``flight`` the other micro-batches of a pipeline."""

    program: Program
    step: Step
    states: OptimizerStates
    cuda: bool
    held: Held
    flight: Flight
    kinds: Sequence[Kind | None]
    inputs: tuple[tuple[str, ...], ...]  # for each instruction, its inputs without repetition
    last: dict[str, int]  # index of the last instruction that uses a value in the forward pass
    resharded: frozenset[str]  # gathered parameters that are freed between the passes
    owned: dict[str, TensorType]  # for each owned parameter, how its owners hold its gradient
    # parameters whose gradients of earlier passes are those that this pass adds to, one by one
    added_to: frozenset[str]
    regions: dict[int, Repeat]  # recomputed regions by number
    ends: dict[int, Repeat]  # regions by the computation whose backward ends them
    last_reruns: dict[int, dict[str, int]]  # for each region, like ``last`` for its second run

    @classmethod
    def of(
        cls,
        program: Program,
        step: Step,
        states: OptimizerStates,
        *,
        cuda: bool = False,
        held: Held = Held.NOTHING,
        flight: Flight = NO_FLIGHT,
    ) -> Setting:
        """The setting of a ``program`` that may have other buckets and owners than the step's."""
        outline, instructions = step.outline, program.instructions
        last = {name: uses[-1] for name, uses in outline.uses.items()}
        last[program.loss] = len(instructions)
        last |= {i.inputs[0]: len(instructions) for i in instructions if i.op == "output"}
        owned = {p.result: t for p in program.params if (t := owned_type(program, p)) is not None}
        inputs = tuple(
            [i.inputs if len(i.inputs) < 2 else tuple(dict.fromkeys(i.inputs)) for i in instructions]
        )
        regions = {
            number: repeat
            for repeat in step.repeats.values()
            if (number := region_of(instructions[repeat.at])) is not None
        }
        return cls(
            program,
            step,
            states,
            cuda,
            held,
            flight,
            outline.kinds,
            inputs,
            last,
            frozenset(i.result for i in instructions if is_resharded(program, i)),
            owned,
            added_to(outline, states) if held is Held.NOTHING else frozenset(),
            regions,
            {repeat.first: repeat for repeat in regions.values()},
            {number: {name: n for n in r.members for name in inputs[n]} for number, r in regions.items()},
        )


def added_to(outline: Outline, states: OptimizerStates) -> frozenset[str]:
    """The parameters whose gradients of earlier passes autograd adds to while a pass runs: on a single rank,
    and those that ``no_sync`` leaves unsummed within the model. The gradients of others are handed over when
    all are complete; and autograd adds up the gradients of all uses of a parameter before it adds their sum.
    """
    program = outline.program
    if states.earlier == Earlier.NOTHING:
        return frozenset()
    sums = gradient_sums(program) if states.earlier == Earlier.ADDENDS else ()
    names = {p.result for s in sums for p in s.params} if program.world_size > 1 else program.requires_grad
    return frozenset(name for name in names if len(outline.uses.get(name, ())) < 2)


def _once(names: tuple[str, ...]) -> tuple[str, ...]:
    return names if len(names) < 2 else tuple(dict.fromkeys(names))


@dataclass(slots=True)
class State:
    """Everything that is held at one point of the fold."""

    setting: Setting
    ledger: Ledger
    values: dict[str, View] = field(default_factory=dict)
    gradients: dict[str, View] = field(default_factory=dict)
    footprints: dict[Kind, Footprint] = field(default_factory=dict)
    saved: dict[int, list[Storage]] = field(default_factory=dict)  # by the instruction that keeps them
    unordered: set[str] = field(default_factory=set)  # gathered values that have not been used yet
    fetching: list[tuple[GradientSum, Storage]] = field(default_factory=list)  # owned parameters under way
    to_fetch: list[GradientSum] = field(default_factory=list)
    # in the backward pass
    late: dict[int, tuple[Storage, ...]] = field(default_factory=dict)  # factors of weight gradients
    again: dict[str, Storage] = field(default_factory=dict)  # values that were gathered once more
    kept_inputs: dict[int, dict[str, Storage]] = field(default_factory=dict)  # for regions, by ``Repeat.at``
    rerun: set[str] = field(default_factory=set)  # values made by a second run
    # each with the storages that were sent
    returning: dict[str, tuple[View, list[Storage]]] = field(default_factory=dict)
    # sums under way to the ranks that keep pieces: bytes, and the storages held meanwhile
    flying: deque[tuple[float, tuple[Storage, ...]]] = field(default_factory=deque)
    # buckets that still lack gradients
    scatters: list[tuple[GradientSum, set[str]]] = field(default_factory=list)
    # by point of the backward pass, the moment when a parameter's gradient is complete
    complete: dict[float, Moment] = field(default_factory=dict)

    @classmethod
    def of(cls, setting: Setting) -> State:
        program = setting.program
        state = cls(setting, Ledger(program.world_size, has_heap=not setting.cuda))
        if setting.owned:
            sums = [s for s in gradient_sums(program) if s.owned is not None]
            state.scatters = [(s, {p.result for p in s.params}) for s in sums]
            if setting.held is Held.NOTHING:  # the first micro-batch has them
                state.to_fetch = sums[::-1]
        state.kept_inputs = {repeat.at: {} for repeat in setting.regions.values()}
        return state

    def new(self, t: TensorType, strides: Strides | None = None) -> View:
        storage = self.ledger.take(t.value.size_bytes, t.cut)
        return View(storage, strides or contiguous(t.value.shape))

    def alias(self, view: View, strides: Strides) -> View:
        view.storage.references += 1
        return View(view.storage, strides)

    def footprint(self, kind: Kind) -> Footprint:
        if kind not in self.footprints:
            self.footprints[kind] = Footprint.of(kind)
        return self.footprints[kind]

    def outgoing(self, i: Instruction) -> list[View]:
        """Takes out the gradients of an instruction's results; for the loss they are zeros."""
        out = []
        for name, t in zip(i.results, i.types):
            if name is not None and name in self.gradients:
                out.append(self.gradients.pop(name))
            elif name == self.setting.program.loss:
                out.append(self.new(t))
        return out

    def forget(self, n: int, names: Iterable[str | None], last: Mapping[str, int]) -> None:
        """Frees the values whose ``last`` use is instruction ``n``."""
        for name in names:
            if name is not None and last.get(name, n) <= n and name in self.values:
                self.ledger.drop(self.values[name].storage)
