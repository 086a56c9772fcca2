"""Finds the shares for a program under the observed speeds of its devices.

Every rank becomes a kind of device of its own: the planned kind, slower by the observed factor. Under these
costs the ratio LP is solved again (``ratios``); if a program has several ratios, each of them is scaled by
speed. The simulator gives the seconds of a step under the old and the new shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import add

from ...cluster import Cluster, Device
from ...cluster.device import HEADROOM
from ...cost import CostModel, Profile, device_key
from ...cost.profile import links_fingerprint
from ...errors import Infeasible, PlanError
from ...lang.ir import Program, Shard, batch_size_of, make_ratio, shard_sizes, support
from ...lang.optimizer_states import OptimizerStates
from ...lang.plan_file import MicroBatch, Plan, accumulation
from ...measure.tuning.correct import corrected
from ...search.ratios import optimal_ratio, usable_bytes, with_ratio
from ...simulator import Simulation, Timeline

MOST_MOVED = 32  # limit on the single samples moved one after the other
LEAST_FACTOR, MOST_FACTOR = 0.05, 50.0  # beyond these, the cause is not the device's computing


@dataclass(frozen=True)
class Solved:
    """New shares for a plan: the ``plan`` with them, its simulated step relative to the old one, and every
    rank's own seconds. Changing to them moves ``moved_bytes`` between ranks."""

    plan: Plan
    relative_step: float
    own_s: tuple[float, ...]
    moved_bytes: int


class Solver:
    """The expected seconds of a plan on its cluster, and the right shares if devices take longer."""

    def __init__(self, cluster: Cluster, profile: Profile | None, optimizer_states: OptimizerStates) -> None:
        self.cluster, self.profile, self.optimizer_states = cluster, profile, optimizer_states

    def planned_own_s(self, plan: Plan) -> tuple[float, ...]:
        """For each rank, the planned seconds in a step that are not waits: of computing, and of the runtime's
        own work."""
        return own_seconds(*self._simulated(plan, CostModel(self.cluster, self.profile, tf32=plan.tf32)))

    def factors(self, plan: Plan, own_s: Sequence[float]) -> tuple[float, ...]:
        """For each rank, ``own_s`` over the planned seconds. A rank that does not compute, or was not
        measured, gets the smallest factor of the others."""
        pairs = list(zip(own_s, self.planned_own_s(plan)))
        ratios = [own / planned if own > 0 and planned > 0 else 0.0 for own, planned in pairs]
        least = min((f for f in ratios if f), default=1.0)
        return tuple(min(max(f or least, LEAST_FACTOR), MOST_FACTOR) for f in ratios)

    def solve(self, plan: Plan, own_s: Sequence[float]) -> Solved:
        """The best shares found. Raises Infeasible if only the old ones fit."""
        costs = self.costs(plan, own_s)
        simulation, before = self._simulated(plan, costs)
        room = plan.usable_bytes or [usable_bytes(costs, r, HEADROOM) for r in range(len(own_s))]
        best: tuple[Plan, Timeline] | None = None
        for candidate in self._proposed(plan, costs, simulation):
            timeline = simulation.run(candidate.program, candidate.micro_batches)
            fits = all(peak <= limit for peak, limit in zip(timeline.peak_memory_bytes, room))
            if fits and (best is None or timeline.step_s < best[1].step_s):
                best = candidate, timeline
        if best is None:
            raise Infeasible("no other shares fit in memory, or in the plan's micro-batches")
        candidate, timeline = best
        candidate = replace(
            candidate,
            predicted_step_s=timeline.step_s,
            predicted_peak_memory_bytes=simulation.process_bytes(
                candidate.program, candidate.micro_batches, room
            ),
        )
        moved = moved_bytes(plan.program, candidate.program, self.optimizer_states)
        own = own_seconds(simulation, timeline)
        return Solved(candidate, timeline.step_s / before.step_s, own, moved)

    def costs(self, plan: Plan, own_s: Sequence[float]) -> CostModel:
        """The costs of the cluster at the observed speeds of its devices."""
        return corrected_costs(self.cluster, self.profile, self.factors(plan, own_s), tf32=plan.tf32)

    def balanced_step_s(self, plan: Plan, own_s: Sequence[float]) -> tuple[float, float]:
        """Seconds of a step of ``plan`` at the devices' present speeds, and of a step as close to perfect
        balance as was planned. In perfect balance all devices compute all the time, and communication is
        free."""
        planned = self._simulated(plan, CostModel(self.cluster, self.profile, tf32=plan.tf32))[1]
        now_s = self._simulated(plan, self.costs(plan, own_s))[1].step_s
        speeds = [device.flop_per_s for device in self.cluster.devices]
        slowed = [v / f for v, f in zip(speeds, self.factors(plan, own_s))]
        return now_s, planned.step_s * sum(speeds) / sum(slowed)

    def pause_s(self, moved_bytes: int) -> float:
        """A rough estimate of the seconds to move ``moved_bytes`` between ranks, over the slowest link."""
        ranks = range(self.cluster.world_size)
        slowest = min(self.cluster.bandwidth_between(a, b) for a in ranks for b in ranks)
        return moved_bytes / slowest

    def _simulated(self, plan: Plan, costs: CostModel) -> tuple[Simulation, Timeline]:
        accumulating = accumulation(plan) is not None
        simulation = Simulation(plan.program, costs, self.optimizer_states, accumulating=accumulating)
        return simulation, simulation.run(plan.program, plan.micro_batches)

    def _proposed(self, plan: Plan, costs: CostModel, simulation: Simulation) -> Iterator[Plan]:
        program = plan.program
        scaled = program.changed(ratios=tuple(_by_speed(program, costs, self.cluster)))
        proposed = [scaled]
        name = sample_ratio(program)
        if name is not None and program.main_ratio == name:
            ranks = support(program.ratio_of[name])
            ratio = optimal_ratio(
                program, costs, ranks, optimizer_states=self.optimizer_states, headroom=HEADROOM
            )
            proposed.append(with_ratio(program, name, _all_take_part(ratio, ranks, program)))
        for proposal in proposed:
            if plan.micro_batches is None and name is not None:
                proposal = polished(proposal, name, simulation)
            if (fitted := with_micro_batches(plan, proposal)) is not None:
                yield fitted


def own_seconds(simulation: Simulation, timeline: Timeline) -> tuple[float, ...]:
    """For each rank, the simulated seconds in a step that are not waits."""
    return tuple(map(add, timeline.compute_s, simulation.overhead_s))


def corrected_costs(
    cluster: Cluster, profile: Profile | None, factors: Sequence[float], *, tf32: bool = False
) -> CostModel:
    """The costs of a cluster in which each rank computes ``factors`` times as long as measured or
    declared."""
    devices = [_slower(d, r, f, profile) for r, (d, f) in enumerate(zip(cluster.devices, factors))]
    left = iter(devices)
    machines = tuple(replace(m, devices=tuple(next(left) for _ in m.devices)) for m in cluster.machines)
    slower = replace(cluster, machines=machines)
    if profile is None:
        return CostModel(slower, tf32=tf32)
    profiled = {
        device_key(new): (profile.devices[device_key(old)], factor)
        for old, new, factor in zip(cluster.devices, devices, factors)
        if device_key(old) in profile.devices
    }
    provenance = dict(profile.provenance)
    if profile.describes_links_of(cluster):
        provenance["links"] = links_fingerprint(slower)
    spread = replace(profile, devices={key: d for key, (d, _) in profiled.items()}, provenance=provenance)
    slowed = corrected(spread, {key: factor for key, (_, factor) in profiled.items()})
    return CostModel(slower, slowed, tf32=tf32)


def _slower(device: Device, rank: int, factor: float, profile: Profile | None) -> Device:
    """A device that only ``rank`` has. Its share of a core changes only without measurements, where it gives
    the time of a launch: measured links belong to processes with the old share."""
    share = device.cpu_share
    if profile is None and share is not None:
        share = min(1.0, share / factor)
    return replace(
        device,
        name=f"{device.name} (rank {rank})",
        flop_per_s=device.flop_per_s / factor,
        half_flop_per_s=device.half_flop_per_s / factor,
        memory_bytes_per_s=device.memory_bytes_per_s / factor,
        cpu_share=share,
    )


def sample_ratio(program: Program) -> str | None:
    """The only ratio by which computations are cut; None if there are several."""
    names = computed_ratios(program)
    return names.pop() if len(names) == 1 else None


def computed_ratios(program: Program) -> set[str | None]:
    """The ratios by which computations are cut, without those that cut only stored values."""
    computed = (i for i in program.instructions if not (i.is_leaf or i.is_sink or i.is_redistribution))
    return {t.ratio for i in computed for t in i.types if isinstance(t.placement, Shard)}


def _by_speed(
    program: Program, costs: CostModel, cluster: Cluster
) -> Iterator[tuple[str, tuple[float, ...]]]:
    """For each ratio of computations, its shares divided by the factors of ``costs``."""
    computed, pairs = computed_ratios(program), zip(cluster.devices, costs.cluster.devices)
    factors = [planned.flop_per_s / now.flop_per_s for planned, now in pairs]
    for name, ratio in program.ratios:
        yield name, make_ratio([s / f for s, f in zip(ratio, factors)]) if name in computed else ratio


def _all_take_part(ratio: Sequence[float], ranks: Sequence[int], program: Program) -> tuple[float, ...]:
    """``ratio`` with at least one sample for every one of ``ranks``, so that the same ranks take part."""
    least = 1 / samples_of_batch(program)
    return make_ratio([max(s, least) if r in ranks else 0.0 for r, s in enumerate(ratio)])


def samples_of_batch(program: Program) -> int:
    """The size of dim 0 of the inputs, in which shares are counted."""
    return batch_size_of(i.type.value for i in program.batch_inputs) or 1000


def polished(program: Program, name: str, simulation: Simulation) -> Program:
    """``program`` after moving single samples between ranks as long as that shortens the simulated step."""
    total, ranks = samples_of_batch(program), support(program.ratio_of[name])
    counts = list(shard_sizes(total, program.ratio_of[name]))
    if any(not counts[r] for r in ranks):
        return program
    at = partial(_with_counts, program, name)
    best_s = simulation.step_s(program)
    for _ in range(MOST_MOVED):
        load = simulation.run(at(counts)).compute_s
        givers = sorted((r for r in ranks if counts[r] > 1), key=lambda r: -load[r])[:2]
        takers = sorted(ranks, key=lambda r: load[r])[:2]
        moves = [_moved(counts, giver, taker) for giver in givers for taker in takers if giver != taker]
        step_s, moved = min(((simulation.step_s(at(m)), m) for m in moves), default=(best_s, counts))
        if step_s >= best_s:
            break
        best_s, counts, program = step_s, moved, at(moved)
    return program


def _with_counts(program: Program, name: str, counts: Sequence[int]) -> Program:
    return with_ratio(program, name, make_ratio(counts))


def _moved(counts: Sequence[int], giver: int, taker: int) -> list[int]:
    return [n - (r == giver) + (r == taker) for r, n in enumerate(counts)]


def with_micro_batches(plan: Plan, program: Program) -> Plan | None:
    """``plan`` with the shares of ``program``. A rank that accumulates keeps its largest micro-batch, for
    which its memory was planned, and takes more or fewer micro-batches; None if the program does not allow
    that."""
    changed = replace(plan, program=program)
    if plan.micro_batches is None:
        return changed
    name = sample_ratio(program)
    if name is None or plan.order is not None:
        return None
    counts = shard_sizes(samples_of_batch(program), program.ratio_of[name])
    rows = []
    for old, count in zip(plan.micro_batches, counts):
        size = min(old.micro_batch, count)
        steps = -(-count // size) if size else 0
        rows.append(MicroBatch(size, steps, count - size * (steps - 1) if steps else 0))
    changed = replace(changed, micro_batches=tuple(rows))
    try:
        accumulation(changed)
    except PlanError:
        return None
    return changed


def moved_bytes(old: Program, new: Program, states: OptimizerStates) -> int:
    """The bytes of parameters and their optimizer state that are on another rank under ``new``."""
    total = 0.0
    for i in old.params:
        held = old.owned.get(i.result, i.type)
        if held.ratio is None or not isinstance(held.placement, Shard):
            continue
        one, two = old.ratio_of[held.ratio], new.ratio_of[held.ratio]
        total += sum(max(b - a, 0.0) for a, b in zip(one, two)) * i.type.value.size_bytes
    return round(total * (1 + states.kept))
