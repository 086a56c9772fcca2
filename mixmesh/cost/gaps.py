"""Lists the parts of a program's predicted time that do not rest on a measurement of exactly that part.

Only for a cluster with a profile: without one everything is an estimate, and the plan says so itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..lang.ir import Program
from ..lang.ir.packed import packed_sums
from ..lang.rules import call_of
from .calls import is_computation, work_type
from .exchanges import Exchange, exchange_of, held_share
from .links import MeasuredCollective
from .model import CostModel
from .profile import Profile, device_key
from .sums import gradient_sums
from .work import VIEWS

NAMED = 3  # operators that a warning names


def gaps(program: Program, costs: CostModel) -> Iterator[str]:
    """Yields a line for each kind of gap, with their number and the worst of them."""
    if costs.profile is None:
        return
    yield from _foreign(costs, costs.profile)
    yield from _operators(program, costs, costs.profile)
    yield from _collectives(program, costs)


def _foreign(costs: CostModel, profile: Profile) -> Iterator[str]:
    """A line if the profile is of another cluster, or lacks some of this one's devices."""
    cluster = costs.cluster
    made_on = profile.provenance.get("cluster", cluster.fingerprint)
    missing = [d.name for d in costs.classes if device_key(d) not in profile.devices]
    if made_on != cluster.fingerprint:
        name = profile.provenance.get("cluster_name")
        links = "its links are alike and used too" if profile.describes_links_of(cluster) else "not its links"
        yield (
            f"the profile is of another cluster{f' ({name})' if name else ''}: "
            f"{made_on}, this is {cluster.fingerprint}; "
            f"{len(costs.classes) - len(missing)} of {len(costs.classes)} kinds of device are used, {links}"
        )
    if missing and profile.devices:
        source = "the figures of the cluster file and the catalogue"
        yield f"the profile has no {', '.join(missing)}: estimated from {source}"


def _operators(program: Program, costs: CostModel, profile: Profile) -> Iterator[str]:
    estimated: dict[str, float] = {}  # operator -> seconds of the slowest call
    beyond: dict[int, tuple[float, str]] = {}  # instruction -> (times the measured range, text)
    estimated_calls = 0
    # planning packs small sums itself, a few kilobytes, so no profile of the model has their sizes
    packing = {packed.cat.result for packed in packed_sums(program)}
    for n, i in enumerate(program.instructions):
        if not is_computation(i) or i.op in VIEWS or i.results[0] in packing:
            continue
        call, t = call_of(i, program.types), work_type(program, i)
        cut = costs.cut(call, [program.types[name].placement for name in i.inputs])
        is_estimated = False
        for rank in program.participants(t):
            share, device_class = held_share(program, t, rank), costs.class_of[rank]
            device = profile.devices.get(device_key(costs.classes[device_class]))
            if device is None or share == 0:
                continue
            measured = costs.measured_op(call, costs.classes[device_class])
            if measured is None:
                is_estimated = True
                seconds = costs.op(call, 1, device_class).forward.at(share)
                estimated[i.op] = max(estimated.get(i.op, 0.0), seconds)
            elif not (curve := measured.curves(cut)[0]).covers(share):
                largest = curve.points[-1][0]
                text = f"%{i.results[0]} = {i.op} on rank {rank}, a share of {share:.3g} above {largest:.3g}"
                beyond[n] = max(beyond.get(n, (0.0, "")), (share / largest, text))
        estimated_calls += is_estimated
    if estimated:
        worst = sorted(estimated, key=lambda op: -estimated[op])
        rest = ", ..." if len(worst) > NAMED else ""
        yield (
            f"{_counted(estimated_calls, 'operator')} not measured but estimated from others of "
            f"{'its' if estimated_calls == 1 else 'their'} class: {', '.join(worst[:NAMED])}{rest}"
        )
    if beyond:
        yield (
            f"{_counted(len(beyond), 'operator')} beyond the measured range, the most: "
            f"{max(beyond.values())[1]}"
        )


def _collectives(program: Program, costs: CostModel) -> Iterator[str]:
    estimated: set[Exchange] = set()
    beyond: list[tuple[float, Exchange, float]] = []
    for exchange in exchanges(program):
        name, ranks, size_bytes = exchange.as_measured(costs.cluster)
        cost = costs.collective(name, ranks)
        if not isinstance(cost, MeasuredCollective):
            estimated.add(exchange)
            continue
        if not cost.is_measured:
            estimated.add(exchange)
        if not cost.covers(size_bytes):
            times = size_bytes / cost.largest_bytes
            beyond.append((times, exchange, cost.largest_bytes))
    if estimated:
        worst = max(estimated, key=lambda e: (e.size_bytes, e.name))
        yield (
            f"{_counted(len(estimated), 'collective')} not measured between just these ranks but estimated "
            f"from the links: {worst.name} between {list(worst.ranks)}"
        )
    if beyond:
        _, worst, largest = max(beyond, key=lambda b: b[0])
        yield (
            f"{_counted(len(beyond), 'collective')} beyond the measured range, the most: {worst.name} of "
            f"{worst.size_bytes / 1e6:.3g} MB, measured up to {largest / 1e6:.3g} MB"
        )


def exchanges(program: Program) -> Iterator[Exchange]:
    """The collectives of a step: of redistributions, of their gradients, and of buckets of gradients."""
    for i in program.instructions:
        if i.is_redistribution:
            for backward in (False, True):
                if not backward or i.result in program.requires_grad:
                    exchange = exchange_of(program, i, backward=backward)
                    if exchange is not None:
                        yield exchange
    yield from (s.exchange for s in gradient_sums(program))


def _counted(count: int, noun: str) -> str:
    return f"1 {noun} is" if count == 1 else f"{count} {noun}s are"
