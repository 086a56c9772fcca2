"""The order of computations in a pass, and where gradients are complete."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..cost import VIEWS
from ..cost.memory.repeats import Repeat, repeats
from ..cost.placed import (
    Exchange,
    Sheet,
    is_resharded,
    is_stored,
    purpose_of,
    summed_params,
)
from ..ir import (
    Instruction,
    Program,
    beside_points,
    release_points,
    returned,
    weight_points,
    wgrad_of,
)
from ..rules import RULES
from ..timeline import factors_name, gradient_name, product_name, repeated_name, wgrad_name
from .values import Call, Step

if TYPE_CHECKING:
    from .simulation import Simulation


def counts_of(steps: list[Step], sheet: Sheet) -> np.ndarray:
    """How often each work stands in each step that has any."""
    busy = [step for step in steps if step.works]
    counts = np.zeros((len(busy), len(sheet.works)))
    for row, step in zip(counts, busy):
        for work in step.works:
            row[work] += 1
    return counts


class Order:
    """The steps of a pass. ``counts`` is how often each work stands in each step that has any."""

    def __init__(self, simulation: Simulation, sheet: Sheet) -> None:
        self.simulation, self.sheet, self.program = simulation, sheet, sheet.program
        self.steps: list[Step] = []
        self.works: list[int] = []
        self.at: list[int] = []
        self.started: list[Exchange] = []  # kept alive, as calls are found by their identity
        self.calls: dict[tuple[int, str], Call] = {}  # by the identity of exchanges, and purpose
        self.make()
        self.close()
        self.counts = counts_of(self.steps, sheet)
        del self.simulation  # which holds this: in a circle both would outlive their plan

    def on(self, simulation: Simulation, sheet: Sheet) -> Order:
        """The same for the same instructions on other ranks, those of ``sheet``, all of which meet in every
        collective."""
        made = copy(self)
        made.sheet, made.program = sheet, sheet.program
        renewed: dict[int, Call] = {}
        for (_, purpose), call in self.calls.items():
            renewed[id(call)] = simulation.call(replace(call.exchange, ranks=sheet.ranks), purpose)
        made.calls = {key: renewed[id(call)] for key, call in self.calls.items()}
        made.steps = [s if s.call is None else s._replace(call=renewed[id(s.call)]) for s in self.steps]
        return made

    def make(self) -> None:
        raise NotImplementedError

    def event(self, at: int) -> tuple[str, str]:
        """The name of a computation in an event, and its operator."""
        i = self.program.instructions[at]
        return next((r for r in i.results if r is not None), i.op), i.op

    def close(self, *what, **named) -> None:
        """Ends a run of computations, with what comes after it as ``Step`` has it."""
        if what or named or self.works:
            self.steps.append(Step(tuple(self.works), tuple(self.at), *what, **named))
            self.works.clear()
            self.at.clear()

    def start(
        self,
        name: str,
        exchange: Exchange,
        value: str = "",
        taken_in: tuple[int, str] | None = None,
        *,
        purpose: str = "data",
    ) -> None:
        call = self.calls.get((id(exchange), purpose))
        if call is None:
            self.started.append(exchange)
            call = self.calls[id(exchange), purpose] = self.simulation.call(exchange, purpose)
        self.close("", call, name, value, taken_in)

    def finish_of(self, i: Instruction, n: int) -> int:
        """Where the runtime waits for a redistribution, and makes autograd's node for it: at its first use;
        the loss at the end; what nobody uses at once (as ``ir.returned`` has it)."""
        end = len(self.program.instructions) if i.result == self.program.loss else n
        return self.sheet.uses.get(i.result, (end,))[0]


class Forward(Order):
    def make(self) -> None:
        program, work_of = self.program, self.sheet.work_of
        coming: dict[int, list[str]] = {}  # by where they are awaited
        brought: dict[int, list[str]] = {}  # owned parameters, by where they are used first
        for name in program.owned:
            if name in self.sheet.uses:
                brought.setdefault(self.sheet.uses[name][0], []).append(name)
        for n, i in enumerate(program.instructions):
            if n in brought:
                for name in sorted(brought[n], key=i.inputs.index):
                    self.close(used=name)
            if n in coming:
                for name in [name for name in dict.fromkeys(i.inputs) if name in coming[n]]:
                    self.close(name)
            if n in work_of:
                self.works.append(work_of[n])
                self.at.append(n)
            exchange = self.sheet.exchanges.get((i.result, False)) if i.is_redistribution else None
            if exchange is not None:
                self.start(i.result, exchange, i.result, purpose=purpose_of(program, i))
                at = self.finish_of(i, n)
                if at == n:
                    self.close(awaited=i.result)
                else:
                    coming.setdefault(at, []).append(i.result)
        for name in coming.get(len(program.instructions), ()):
            self.close(awaited=name)


class Backward(Order):
    """Autograd runs nodes in the reverse of the order in which they were made."""

    def event(self, at: int) -> tuple[str, str]:
        count = len(self.program.instructions)
        if at < -count:  # a weight's, as far below
            name, op = super().event(~at - count)
            return wgrad_name(name), op
        if at < 0:  # a second run, by the complement of the instruction's index
            name, op = super().event(~at)
            return repeated_name(name), op
        name, op = super().event(at)
        return gradient_name(name), op

    def make(self) -> None:
        program, sheet = self.program, self.sheet
        self.points = {point for groups in self.simulation.points.values() for point, _ in groups}
        self.later = weight_points(program)
        self.returning: set[str] = set()  # values that go back to a place that is still to come
        self.gathered: set[str] = set()  # factors
        self.coming: set[str] = set()  # values that are gathered again, and not awaited yet
        again, regions, moved = self._repeated(), repeats(program), returned(program)
        beside: dict[str, list[int]] = {}  # products, by the collective that travels meanwhile
        for n, at in beside_points(program).items():
            beside.setdefault(at.collective, []).append(n)
        for n in range(len(program.instructions), -1, -1):
            i = program.instructions[n] if n < len(program.instructions) else None
            if i is not None and i.is_leaf:
                continue
            for gather in again.get(n, ()):
                self._gather_again(gather)
            if i is not None:
                self._compute(n, i, regions.get(n))
            if n in self.points and not self._computes_weight_here(n):
                self.close(point=n)
            for redistribution in moved.get(n, ()):
                self._gradient(redistribution)
                for product in beside.get(redistribution.result, ()):
                    self._weight(product, self.later[product])
        for n in sorted(sheet.wgrad_work_of, reverse=True):
            if wgrad_of(program.instructions[n]) == "last":
                self._weight(n, self.later[n])

    def _gather_again(self, gather: Instruction) -> None:
        name = repeated_name(gather.result)
        exchange = self.sheet.exchanges[gather.result, False]
        self.start(name, exchange, name, purpose=purpose_of(self.program, gather))
        self.coming.add(gather.result)

    def _compute(self, n: int, i: Instruction, region: Repeat | None) -> None:
        """The gradients of an instruction's inputs, once its own has come back, its region has run again, and
        all that autograd kept is there."""
        if i.is_redistribution and i.result in self.returning:
            self.close(awaited=gradient_name(i.result))
        if region is not None:
            self._compute_again(region)
        if not self.sheet.flows[n] or n not in self.sheet.work_of:
            return
        if not self.coming.isdisjoint(i.inputs):
            for name in dict.fromkeys(i.inputs):
                if name in self.coming and keeps(self.program, i, name):
                    self.coming.remove(name)
                    self.close(awaited=repeated_name(name))
        if n in self.sheet.factor_work_of:
            self._factors(n, i)
        if self._computes_weight_here(n):
            self._weight(n, n)
        self.works.append(self.sheet.work_of[n])
        self.at.append(n)

    def _computes_weight_here(self, n: int) -> bool:
        """Whether the gradient of an instruction's weight is computed apart, and before its input's."""
        return n in self.sheet.wgrad_work_of and n not in self.later

    def _weight(self, n: int, point: float) -> None:
        """The gradient of a weight, apart, which may be the last one at ``point``."""
        self.works.append(self.sheet.wgrad_work_of[n])
        self.at.append(~n - len(self.program.instructions))
        if point in self.points:
            self.close(point=point)

    def _compute_again(self, region: Repeat) -> None:
        """A region's second run, which awaits what is gathered again and read there."""
        for name in [name for name in region.inputs if name in self.coming]:
            self.coming.remove(name)
            self.close(awaited=repeated_name(name))
        for n in region.members:
            self.works.append(self.sheet.again_work_of[n])
            self.at.append(~n)

    def _repeated(self) -> dict[int, list[Instruction]]:
        """Gathers that are repeated, by the instruction before whose backward they start, last first."""
        program = self.program
        out: dict[int, list[Instruction]] = {}
        gathers = [
            i
            for i in program.instructions
            if i.op == "all_gather" and is_resharded(program, i) and self.sheet.exchanges[i.result, False]
        ]
        points = release_points(program, [i.result for i in gathers])
        for i in gathers:
            if i.result in program.requires_grad and i.result in points:
                last = program.instructions[points[i.result]]
                plain = not (last.is_redistribution or last.is_leaf or last.is_sink)
                if plain and last.results[0] in program.requires_grad:
                    out.setdefault(points[i.result], []).insert(0, i)
        return out

    def _gradient(self, i: Instruction) -> None:
        exchange = self.sheet.exchanges[i.result, True]
        if exchange is None:
            return
        name = gradient_name(i.result)
        if is_stored(self.program, i):
            self.start(name, exchange, taken_in=(-1, name), purpose=purpose_of(self.program, i))
        else:
            self.start(name, exchange, name)
            self.returning.add(i.result)

    def _factors(self, n: int, i: Instruction) -> None:
        """With ``sfb``: what the weight's gradient is made of is gathered before the input's is computed."""
        program = self.program
        if len(ranks := program.participants(i.type)) < 2:
            return
        name = factors_name(i.result)
        product = (self.sheet.factor_work_of[n], product_name(i.result))
        needed = [i.type]
        if i.inputs[1] in program.requires_grad and i.inputs[0] not in self.gathered:
            self.gathered.add(i.inputs[0])  # by the first product that needs it, for all of them
            needed.append(program.types[i.inputs[0]])
        for k, factor in enumerate(needed, 1):
            last = product if k == len(needed) and i.inputs[1] in program.requires_grad else (-1, name)
            self.start(name, Exchange("all_gather", factor.value.size_bytes, ranks), taken_in=last)


KEEPS_NO_PARAMETER = VIEWS | {"aten.add.Tensor", "aten.sub.Tensor", "aten._to_copy", "aten.embedding"}


def keeps(program: Program, user: Instruction, name: str) -> bool:
    """Whether autograd needs an input of an instruction again, for the gradients of the others."""
    if user.op in KEEPS_NO_PARAMETER:
        return False
    rule = RULES.get(user.op)
    if rule is None or not rule.flops:
        return True
    factors = user.inputs[:2]  # a third one is a bias
    return name in factors and any(f != name and f in program.requires_grad for f in factors)


Points = tuple[tuple[float, tuple[int, ...]], ...]


def ready_points(program: Program, sheet: Sheet) -> dict[str, Points]:
    """For each parameter whose gradient is summed: where in the backward pass it is complete, by ranks.

    A point is the instruction after whose backward that is, or where a weight's gradient is computed apart
    (``weight_points``). A rank that makes no use of a parameter is in none: it sends its zeros when its pass
    ends.
    """
    out: dict[str, Points] = {}
    later = weight_points(program)
    for first in summed_params(program):
        found: list[tuple[float, tuple[int, ...]]] = []
        if first.args[0] in program.late:
            out[first.result] = ()
            continue
        for p in program.copies.get(first.args[0], (first,)):
            everyone = program.participants(p.type)
            left = set(everyone)
            for n in sheet.uses.get(p.result, ()):
                user = program.instructions[n]
                if not sheet.flows[n]:
                    continue
                types = (p.type,) if user.is_redistribution else user.types
                taking = [program.participants(t) for t in types]
                if len(left) == len(everyone) and taking.count(everyone) == len(taking):
                    late = n in later and p.result == user.inputs[1]
                    found.append((later[n] if late else n, everyone))  # nearly always
                    break
                who = left.intersection(*taking)
                if who:
                    found.append((n, tuple(sorted(who))))
                    left -= who
        out[first.result] = tuple(found)
    return out
