"""A bound that no plan is faster than: all devices compute all the time, and nothing else takes any.

For all of operator k, device class c would take ``t_kc`` seconds, at the best rate measured there for any
share of it. If it was not measured, these are the seconds at the full peaks of the device's figures
(``at_peaks``): published steps were faster than bounds at the usual share of them. Communication is free,
nothing is computed twice, memory is no limit, and every operator is divided between the ``n_c`` devices of
each class in the way that is best for the step:

    minimise    T
    subject to  sum_k t_kc x_kc <= n_c T    for every class c
                sum_c x_kc = 1              for every operator k
                x_kc >= 0

The optimizer's work counts as one more operator. A program computes every operator at least once, in shares
that sum to 1 or more, a share x takes ``t_kc x`` at least, and no step is shorter than its busiest device
works: this holds for any placement, pipeline or ZeRO stage. The duals of the rows of classes are prices of a
second, ``y_c`` with ``sum_c n_c y_c = 1``, and by weak duality ``sum_k min_c y_c t_kc`` is at most T for any
prices. That sum is returned, so the result does not depend on a solver's tolerance.

For a device with burst credit (a measured ``rested_s``) the bound holds for steps that follow each other: a
single step may be shorter by the credit saved before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import highspy
import numpy as np

from ..base.solver import quiet_solver
from ..cost import CostModel
from ..cost.peaks import peak_op_s, peak_optimizer_s
from ..lang.ir import Node
from ..lang.optimizer_states import ADAM, OptimizerStates
from ..lang.rules import Call, call_of
from ..search.synthesis import Choices

DIGITS = 4  # rows whose relative seconds agree to this many digits share one price


def ideal_s(seconds: np.ndarray, class_of: Sequence[int], ranks: Sequence[int]) -> float:
    """A lower bound, in seconds, of the step of any plan on ``ranks``. ``seconds`` are ``seconds_by_class``
    of the graph, ``class_of`` is the class of every rank."""
    counts = Counter(class_of[r] for r in ranks)
    classes = sorted(counts)
    return bound_s(np.ascontiguousarray(seconds[:, classes]), np.array([counts[c] for c in classes]))


def seconds_by_class(
    choices: Choices, states: OptimizerStates = ADAM, *, at_peaks: bool = True
) -> np.ndarray:
    """Seconds that each class of devices takes for the whole of everything that a step computes: a row for
    every kind of operator, and one for the optimizer. Values that were not measured are computed ``at_peaks``
    of the devices, or else estimated by the cost model, which good kernels may undercut."""
    return np.array([*operator_s(choices, at_peaks), optimizer_s(choices, states, at_peaks)])


def operator_s(choices: Choices, at_peaks: bool) -> list[list[float]]:
    """For each kind of operator the seconds of all its operators, by class of devices."""
    costs, graph = choices.costs, choices.graph
    parts = has_parts(costs)

    def least_s(call: Call, grads: int, device_class: int) -> float:
        device = costs.classes[device_class]
        if at_peaks and costs.measured_op(call, device) is None:
            return peak_op_s(call, grads, device, tf32=costs.tf32)
        return costs.least_op_s(call, grads, device_class, parts=parts)

    # by kind, and by whether the backward pass comes through: it does not through running statistics
    weights: dict[tuple[int, bool], float] = {}
    firsts: dict[tuple[int, bool], Node] = {}
    for node, kind, weight in zip(choices.steps, choices.kind_of_step, choices.fold.weights):
        if kind is not None:
            key = kind, any(r in graph.requires_grad for r in node.results)
            weights[key] = weights.get(key, 0.0) + weight
            firsts.setdefault(key, node)
    out = []
    for key, node in firsts.items():
        call = call_of(node, graph.types)
        flowing = dict.fromkeys(node.inputs) if key[1] else ()
        grads = sum(1 for name in flowing if name in graph.requires_grad)
        out.append([weights[key] * least_s(call, grads, c) for c in range(len(costs.classes))])
    return out


def has_parts(costs: CostModel) -> bool:
    """Whether a plan may give each machine a program for its part of the batch (``two_level``)."""
    machines = costs.cluster.machines
    return len(machines) > 1 and any(len(m.devices) > 1 for m in machines)


def optimizer_s(choices: Choices, states: OptimizerStates, at_peaks: bool) -> list[float]:
    """Seconds of the optimizer's step over all parameters, by class of devices."""
    costs, size_bytes = choices.costs, choices.fold.whole.trained_bytes
    return [
        peak_optimizer_s(states, size_bytes, device)
        if at_peaks and not costs.has_profile_of(device)
        else costs.optimizer_s(costs.class_of.index(c), size_bytes)
        for c, device in enumerate(costs.classes)
    ]


def bound_s(seconds: np.ndarray, counts: np.ndarray) -> float:
    """The linear program's optimum or a little less; ``seconds`` of (operator, class), ``counts`` of
    classes."""
    seconds = seconds[seconds.any(axis=1)]
    if not len(seconds):
        return 0.0
    prices = np.ones(len(counts)) if len(counts) == 1 else prices_of(seconds, counts)
    prices = np.maximum(prices, 0.0)
    return float((seconds * prices / (counts @ prices)).min(axis=1).sum())


def prices_of(seconds: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Prices of a second of each class: duals of the rows of classes."""
    alike: dict[bytes, np.ndarray] = {}
    for row in seconds:
        key = np.round(row / row.sum(), DIGITS).tobytes()
        alike[key] = alike.get(key, 0.0) + row
    table = np.array(list(alike.values()))
    # scaled so that the fastest class alone would take 1: T then suits the solver's tolerances
    table /= (table.sum(axis=0) / counts).min()
    rows, classes = table.shape
    h = quiet_solver()
    inf = highspy.kHighsInf
    h.addVars(1 + rows * classes, np.zeros(1 + rows * classes), np.full(1 + rows * classes, inf))
    h.changeColCost(0, 1.0)
    for c in range(classes):
        columns = np.arange(1 + c, 1 + rows * classes, classes)
        index = np.array([0, *columns], dtype=np.int32)
        h.addRow(0.0, inf, len(index), index, np.array([counts[c], *-table[:, c]], dtype=float))
    for k in range(rows):
        index = np.arange(1 + k * classes, 1 + (k + 1) * classes, dtype=np.int32)
        h.addRow(1.0, 1.0, classes, index, np.ones(classes))
    h.run()
    return np.array(h.getSolution().row_dual[:classes])
