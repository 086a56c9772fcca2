"""Chooses the algorithm of each collective of a program if measurements contradict the runtime's default."""

from __future__ import annotations

from dataclasses import replace

from ..cost import CollectiveFit, CostModel, default_algorithm
from ..cost.exchanges import exchange_of, held_share
from ..lang.ir import Instruction, Program, Shard

MARGIN = 0.05  # share of its seconds that another algorithm must save: less is noise
ATTRIBUTES = (("algorithm", False), ("gradient_algorithm", True))


def with_algorithms(program: Program, costs: CostModel) -> Program:
    """``program`` with ``algorithm`` and ``gradient_algorithm`` on redistributions whose fastest measured
    algorithm is not the runtime's own choice. Algorithms already named in the program stay."""
    return replace(program, instructions=tuple(_annotated(program, i, costs) for i in program.instructions))


def _annotated(program: Program, i: Instruction, costs: CostModel) -> Instruction:
    annotated = []
    for attribute, backward in ATTRIBUTES:
        if not i.is_redistribution or i.attr(attribute) is not None:
            continue
        if backward and i.result not in program.requires_grad:
            continue
        name = _better_algorithm(program, i, costs, backward=backward)
        if name is not None:
            annotated.append((attribute, name))
    return replace(i, attrs=(*i.attrs, *annotated)) if annotated else i


def _better_algorithm(program: Program, i: Instruction, costs: CostModel, *, backward: bool) -> str | None:
    exchange = exchange_of(program, i, backward=backward)
    if exchange is None:
        return None
    skew = skew_of(program, i, exchange.ranks)
    cost = costs.collective(exchange.name, exchange.ranks)
    if skew is None or isinstance(cost, CollectiveFit):
        return None
    fastest = cost.algorithm(exchange.size_bytes, skew)
    backend = str(costs.profile.provenance.get("backend", "")) if costs.profile else ""
    usual = default_algorithm(exchange.name, backend, skew)
    if fastest is None or fastest == usual:
        return None
    usual_s = cost.seconds_by(usual, exchange.size_bytes, skew)
    if usual_s is not None and cost.seconds(exchange.size_bytes, skew) > usual_s * (1 - MARGIN):
        return None
    return fastest


def skew_of(program: Program, i: Instruction, ranks: tuple[int, ...]) -> float | None:
    """The largest piece over the mean one in a gather or scatter between ``ranks``. None if nothing is cut,
    or if one rank holds everything, which makes it a broadcast."""
    cut = [t for t in (program.types[i.inputs[0]], i.type) if isinstance(t.placement, Shard)]
    if len(cut) != 1:
        return None
    shares = [held_share(program, cut[0], r) for r in ranks]
    if sum(share > 0 for share in shares) < 2:
        return None
    return max(shares) * len(shares) / sum(shares)
