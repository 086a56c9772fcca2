"""Gradient reductions with their calls."""

from __future__ import annotations

from dataclasses import dataclass

from ..step import Reductions
from .channels import Channels
from .values import Call


@dataclass(frozen=True, slots=True)
class Sums:
    """Gradient reductions, and gathers of parameters that shard owners stepped, with a call for each."""

    reductions: Reductions
    calls: tuple[Call, ...]
    gathers: tuple[tuple[str, Call], ...]


NO_SUMS = Sums(Reductions(), (), ())


def sums_of(reductions: Reductions, network: Channels) -> Sums:
    """Adds the calls of these reductions, on their process groups."""
    calls = tuple([network.call(exchange, "gradient") for exchange in reductions.exchanges])
    gathers = tuple([(name, network.call(exchange, "gradient")) for name, exchange in reductions.gathers])
    return Sums(reductions, calls, gathers)
