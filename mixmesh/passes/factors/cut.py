"""Chooses the products to repeat from gathered factors: a minimum cut, solved as a linear program.

With ``x_i`` for repeating product i on every rank, and ``b_t`` for gathering tensor t,

    minimise    sum_t gather_s(t) b_t - sum_i saved_s(i) x_i
    subject to  b_t >= x_i    for every product i and tensor t that it needs
                0 <= x_i <= 1,  0 <= b_t

All are seconds of a rank, so that summing, gathering and repeating can be compared: ``saved_s`` is the sum
that becomes unnecessary, minus the additional computing of the slowest rank. A tensor is gathered once,
however many products need it. (TAG adds compute over all devices to the time of one link, and gathers once
per product.)

Every row has one 1 and one -1: the matrix is totally unimodular, so the vertices of the linear program are
integral, and the problem is a project selection (Picard, 1976), a minimum cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from ...base.solver import quiet_solver


@dataclass(frozen=True, slots=True)
class Product:
    """The gradient of a weight: the seconds saved by repeating it, without gathering the tensors it needs."""

    weight: str
    saved_s: float
    needed: tuple[str, ...]


def cheapest_cut(products: Sequence[Product], gather_s: Mapping[str, float]) -> frozenset[str]:
    """The weights whose products to repeat; any of several equally good sets."""
    if not products:
        return frozenset()
    column = {name: len(products) + n for n, name in enumerate(gather_s)}
    h = quiet_solver()
    count = len(products) + len(gather_s)
    h.addVars(count, np.zeros(count), np.ones(count))
    cost = np.array([-p.saved_s for p in products] + list(gather_s.values()))
    h.changeColsCost(count, np.arange(count, dtype=np.int32), cost)
    for n, product in enumerate(products):
        for name in product.needed:
            columns = np.array([n, column[name]], dtype=np.int32)
            h.addRow(0.0, highspy.kHighsInf, 2, columns, np.array([-1.0, 1.0]))
    h.run()
    x = h.getSolution().col_value
    return frozenset(p.weight for p, value in zip(products, x) if value > 0.5)
