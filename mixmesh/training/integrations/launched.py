"""Keeps alike what must be so in a script that every rank runs: random numbers, batches, learning rates."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch

from ...errors import InputError
from ...runtime.first_rank import everyones
from ..preparation.alike import check_digests, digest


def is_launched() -> bool:
    """Whether torchrun, or another launcher, started this process as one of several."""
    return "RANK" in os.environ


def keep_metrics_apart() -> None:
    """Has every metric of torchmetrics compute from what this rank has seen, which is all of the data: states
    of all ranks together would count every sample once per rank."""
    if importlib.util.find_spec("torchmetrics"):
        metric = importlib.import_module("torchmetrics").Metric
        metric.sync = lambda self, *args, **kwargs: None


def learning_rates(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    """The learning rate of each group of an optimizer."""
    return tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)


def check_alike(batch: Any, rates: tuple[float, ...] = ()) -> None:
    """Raises InputError, on all ranks, if the tensors of ``batch`` or the learning rates differ between
    ranks. Collective."""
    digests, rates_of_ranks = zip(*everyones((digest(batch), rates)))
    check_digests(
        digests,
        "draw by torch, random or numpy.random, seeded alike, not from a generator without a seed",
        "the same data set, in the same order, on every rank",
    )
    if len(set(rates_of_ranks)) > 1:
        raise InputError(
            "the ranks have other learning rates",
            expected="the same scheduler on every rank, stepped by the same numbers",
            got=" and ".join(str(list(each)) for each in sorted(set(rates_of_ranks))),
            hint="a metric that a scheduler steps by: that of the first rank, as devices may round otherwise",
        )


def unlike_in_steps(method: str, name: str, hint: str) -> InputError:
    """The error for a ``method`` that uses ``name``, which is not alike in every step."""
    return InputError(
        f"{method} uses {name}, and is traced once for all steps",
        expected="a loss of the batch, the weights and the buffers",
        got=name,
        hint=hint,
    )
