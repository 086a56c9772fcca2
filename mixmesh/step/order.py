"""The order of events in a pass, as the runtime and autograd run them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ..base.timeline import factors_name, gradient_name, repeated_name
from ..cost.exchanges import Exchange
from ..cost.outline import (
    Outline,
    is_factored,
    is_stored,
    purpose_of,
)
from ..lang.ir import (
    Instruction,
    beside_points,
    returned,
)
from .again import gathers_again
from .events import (
    BACKWARD,
    FORWARD,
    LOCAL,
    PRODUCT,
    REPEATED,
    WEIGHT,
    Await,
    Compute,
    Event,
    Pass,
    Ready,
    Script,
    Sink,
    Start,
    Use,
    computes_of,
)
from .kept import kept
from .repeats import Repeat


class Writer:
    """The events so far, and the collectives among them. Equal collectives of one instruction share a
    number."""

    def __init__(self, outline: Outline) -> None:
        self.outline = outline
        self.events: list[Event] = []
        self.exchanges: list[tuple[Exchange, str]] = []
        self.numbers: dict[tuple[Exchange, str], int] = {}

    def start(
        self,
        name: str,
        exchange: Exchange | None,
        part: str,
        at: int,
        value: str = "",
        *,
        purpose: str = "data",
        product: Compute | None = None,
    ) -> None:
        number = LOCAL
        if exchange is not None:
            number = self.numbers.setdefault((exchange, purpose), len(self.exchanges))
            if number == len(self.exchanges):
                self.exchanges.append((exchange, purpose))
        self.events.append(Start(name, number, part, at, value, product))

    def end(self) -> Pass:
        return Pass(self.outline.program, Script(tuple(self.events)), tuple(self.exchanges))


def forward_pass(outline: Outline, owned: Collection[str] | None = None) -> Pass:
    """The forward pass: a redistribution starts at its place and is awaited at its first use. ``owned`` are
    the parameters that an owner stepped; by default the program's."""
    program, writer = outline.program, Writer(outline)
    events, computes = writer.events, computes_of(FORWARD, len(program.instructions))
    arriving: dict[int, dict[str, int]] = {}  # redistributions, by the index at which they are awaited
    owned = program.owned if owned is None else owned
    used = {outline.uses[name][0] for name in owned if name in outline.uses}  # first uses
    for n, i in enumerate(program.instructions):
        if n in arriving or n in used:
            here = arriving.get(n, {})
            for name in dict.fromkeys(i.inputs):
                if name in here:
                    events.append(Await(name, FORWARD, here[name]))
                elif name in owned and outline.uses[name][0] == n:
                    events.append(Use(name))
        if outline.kinds[n] is not None:
            events.append(computes[n])
        elif i.is_redistribution:
            exchange = outline.exchanges[i.result, False]
            writer.start(i.result, exchange, FORWARD, n, i.result, purpose=purpose_of(program, i))
            at = _awaited_at(outline, i, n)
            if at == n:
                events.append(Await(i.result, FORWARD, n))
            else:
                arriving.setdefault(at, {})[i.result] = n
        elif i.is_sink:
            events.append(Sink(n))
    rest = arriving.get(len(program.instructions), {})
    events += [Await(name, FORWARD, n) for name, n in rest.items()]
    return writer.end()


def _awaited_at(outline: Outline, i: Instruction, n: int) -> int:
    """The point at which the runtime waits for a redistribution and creates autograd's node for it: its first
    use. The loss is awaited at the end, and unused values immediately (as in ``ir.returned``)."""
    end = len(outline.program.instructions) if i.result == outline.program.loss else n
    return outline.uses.get(i.result, (end,))[0]


def backward_pass(
    outline: Outline, points: Iterable[float], later: Mapping[int, float], regions: Mapping[int, Repeat]
) -> Pass:
    """The backward pass, in autograd's order: the reverse of the order in which nodes were made. It has a
    ``Ready`` at each of ``points``, delays the weight gradients in ``later`` (``weight_points``) and runs
    ``regions`` again (``repeats``)."""
    writer = _Backward(outline, frozenset(points), later, regions)
    writer.write()
    return writer.end()


class _Backward(Writer):
    """Writes the backward pass."""

    def __init__(
        self,
        outline: Outline,
        points: frozenset[float],
        later: Mapping[int, float],
        regions: Mapping[int, Repeat],
    ) -> None:
        super().__init__(outline)
        self.program, self.points, self.later, self.regions = outline.program, points, later, regions
        self.computes = computes_of(BACKWARD, len(self.program.instructions))
        # products with split weight gradients
        self.weights = frozenset(n for n in self.program.wgrads if not self._is_factored(n))
        self.places = {i.result: n for n, i in enumerate(self.program.instructions) if i.is_redistribution}
        self.returning: set[str] = set()  # values whose gradients go to a place that is still to come
        self.gathered: set[str] = set()  # factors whose gathers have started
        self.coming: set[str] = set()  # values that are gathered again but not awaited yet

    def _is_factored(self, n: int) -> bool:
        return is_factored(self.program.instructions[n])

    def write(self) -> None:
        program = self.program
        again, moved = gathers_again(program), returned(program)
        # for each collective, the products that are computed while it travels
        overlapped: dict[str, list[int]] = {}
        for n, at in beside_points(program).items():
            overlapped.setdefault(at.collective, []).append(n)
        for n in range(len(program.instructions), -1, -1):
            i = program.instructions[n] if n < len(program.instructions) else None
            if i is not None and i.is_leaf:
                continue
            for gather in reversed(again.get(n, ())):  # autograd reaches the last one first
                self._gather_again(gather)
            if i is not None:
                self._compute(n, i, self.regions.get(n))
            if n in self.points and not self._computes_weight_here(n):
                self.events.append(Ready(n))
            for redistribution in moved.get(n, ()):
                self._gradient(redistribution)
                for product in overlapped.get(redistribution.result, ()):
                    self._weight(product, self.later[product])
        for n in sorted(self.weights, reverse=True):
            if program.wgrads[n] == "last":
                self._weight(n, self.later[n])

    def _gather_again(self, gather: Instruction) -> None:
        name = repeated_name(gather.result)
        exchange, place = self.outline.exchanges[gather.result, False], self.places[gather.result]
        self.start(name, exchange, REPEATED, place, name, purpose=purpose_of(self.program, gather))
        self.coming.add(gather.result)

    def _compute(self, n: int, i: Instruction, region: Repeat | None) -> None:
        """Computes the gradients of an instruction's inputs, after its own has arrived, its region has run
        again, and everything that autograd kept has arrived."""
        if i.is_redistribution and i.result in self.returning:
            self.events.append(Await(gradient_name(i.result), BACKWARD, n))
        if region is not None:
            self._compute_again(region)
        kind = self.outline.kinds[n]
        if not self.outline.flows[n] or kind is None:
            return
        if self.coming and not self.coming.isdisjoint(i.inputs):
            needed = [i.inputs[k] for what, k in kept(kind.call, kind.takes) if what == "input"]
            for name in dict.fromkeys(needed):
                if name in self.coming:
                    self._await_again(name)
        if is_factored(i):
            self._factors(n, i)
        if self._computes_weight_here(n):
            self._weight(n, n)
        self.events.append(self.computes[n])

    def _await_again(self, name: str) -> None:
        self.coming.remove(name)
        self.events.append(Await(repeated_name(name), REPEATED, self.places[name]))

    def _computes_weight_here(self, n: int) -> bool:
        """Whether an instruction's weight gradient is split and comes before its input's."""
        return n in self.weights and n not in self.later

    def _weight(self, n: int, point: float) -> None:
        """Computes a split weight gradient, which may complete gradients at ``point``."""
        self.events.append(Compute(WEIGHT, n))
        if point in self.points:
            self.events.append(Ready(point))

    def _compute_again(self, region: Repeat) -> None:
        """Runs a region again, after awaiting the repeated gathers that it reads."""
        for name in [name for name in region.inputs if name in self.coming]:
            self._await_again(name)
        self.events += [Compute(REPEATED, n) for n in region.members]

    def _gradient(self, i: Instruction) -> None:
        """Sends the gradient of a redistribution back; that of a stored parameter is awaited at the end."""
        exchange, place = self.outline.exchanges[i.result, True], self.places[i.result]
        name = gradient_name(i.result)
        if is_stored(self.program, i):
            self.start(name, exchange, BACKWARD, place, purpose=purpose_of(self.program, i))
        else:
            self.start(name, exchange, BACKWARD, place, name)
            self.returning.add(i.result)

    def _factors(self, n: int, i: Instruction) -> None:
        """With ``sfb``: starts to gather the factors of the weight gradient before the input's gradient is
        computed."""
        program = self.program
        if len(ranks := program.participants(i.type)) < 2:
            return
        product = Compute(PRODUCT, n) if i.inputs[1] in program.requires_grad else None
        needed = [i.type]
        if product is not None and i.inputs[0] not in self.gathered:
            self.gathered.add(i.inputs[0])  # the first product that needs the factor gathers it for all
            needed.append(program.types[i.inputs[0]])
        for k, factor in enumerate(needed, 1):
            exchange = Exchange("all_gather", factor.value.size_bytes, ranks)
            last = product if k == len(needed) else None
            self.start(factors_name(i.result), exchange, PRODUCT, n, product=last)
