"""The parts that integrations share: planning in a launched process, and keeping random numbers, batches and
learning rates the same on all ranks."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...errors import InputError
from ...lang.plan_file import Plan
from ...runtime.first_rank import everyones
from ...runtime.parallel import ParallelModel
from ...runtime.scaler import unscaled_text
from ..preparation.alike import check_digests, digest
from ..preparation.refusals import OneBatch, check_last_batch
from ..preparation.script import prepare


@dataclass(frozen=True)
class Epochs:
    """Training over a ``loader``, which ends after ``num_batches`` of an epoch; None stands for all of them.
    ``drop_last`` is what to write in a script to leave out a smaller last batch."""

    loader: Any
    drop_last: str
    num_batches: int | None = None

    def check(self, plan: Plan) -> None:
        """Raises InputError for a pipeline that cannot take the loader's smaller last batch."""
        other = 'planning={"planner": "ddp-tuned"}, which takes batches of any size'
        check_last_batch(self.loader, plan, num_batches=self.num_batches, hint=(self.drop_last, other))


def prepare_for(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    example: Any,
    planning: Mapping[str, Any],
    epochs: Epochs | None,
    num_passes: int = 1,
) -> tuple[ParallelModel, torch.optim.Optimizer]:
    """The parallel model and its optimizer, planned by the batch ``example``; ``planning`` holds arguments of
    ``mixmesh.prepare``. Raises InputError for a plan that the ``epochs``, if they are known, do not fit. With
    several ``num_passes`` per optimizer step, all but the last are within ``no_sync``. In a launched process
    only. Collective."""
    planning = {"accumulate": "no_sync" if num_passes > 1 else "", **planning}
    # the optimizer stays the same object
    return parallel_for(model, optimizer, example, planning, epochs), optimizer


def parallel_for(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    example: Any,
    planning: Mapping[str, Any],
    epochs: Epochs | None = None,
) -> ParallelModel:
    """Like ``prepare_for``, if the optimizer may be missing, or may also have parameters of other models."""
    one = OneBatch(example) if epochs is None else OneBatch(example, epochs.check)
    parallel, _, _ = prepare(model, optimizer, one, **planning)
    assert isinstance(parallel, ParallelModel)  # a launched process always gets one
    parallel._runtime.followed = None  # trainers set modes on the script's own model for reasons of theirs
    return parallel


def check_scaled(model: ParallelModel, scaler: Any, float16: str) -> None:
    """Raises InputError if devices compute bf16 in float16 and no ``scaler`` scales the loss; ``float16`` is
    what to write in a script to get one."""
    if text := unscaled_text(model.program, scaler):
        raise InputError(
            text,
            expected="float16 on all ranks, with a scaled loss, or float32",
            got="bf16",
            hint=(f"{float16} in place of bf16", "or these devices left out: planning={'cluster': FILE}"),
        )


def check_not_spread(model: Any) -> None:
    """Raises InputError for a model that transformers has already spread over devices."""
    marks = ("hf_device_map", "is_distributed_loading_by_transformers")
    if any(getattr(model, mark, None) for mark in marks):
        raise InputError(
            "the model is spread over devices already",
            expected="a model as on a single device",
            got="from_pretrained(..., device_map=...) or distributed_config=...",
            hint="from_pretrained(...) without them: the plan places the model",
        )


def keep_metrics_apart() -> None:
    """Makes every metric of torchmetrics compute from the data that this rank has seen, which is all of it:
    joining the states of all ranks would count every sample once per rank."""
    if importlib.util.find_spec("torchmetrics"):
        metric = importlib.import_module("torchmetrics").Metric
        metric.sync = lambda self, *args, **kwargs: None


def learning_rates(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    """The learning rate of each group of an optimizer."""
    return tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)


def check_alike(batch: Any, rates: tuple[float, ...] = (), *hints: str) -> None:
    """Raises InputError, on all ranks, if the tensors of ``batch`` or the learning rates differ between
    ranks; ``hints`` say what else may be done about the batch. Collective."""
    digests, rates_of_ranks = zip(*everyones((digest(batch), rates)))
    check_digests(
        digests,
        "draw by torch, random or numpy.random, seeded alike, not from a generator without a seed",
        "the same data set, in the same order, on every rank",
        *hints,
    )
    if len(set(rates_of_ranks)) > 1:
        raise InputError(
            "the ranks have other learning rates",
            expected="the same scheduler on every rank, stepped by the same numbers",
            got=" and ".join(str(list(each)) for each in sorted(set(rates_of_ranks))),
            hint="a metric that a scheduler steps by: that of the first rank, as devices may round otherwise",
        )


def unlike_in_steps(method: str, name: str, hint: str) -> InputError:
    """The error for a ``method`` that uses ``name``, whose value changes from step to step."""
    return InputError(
        f"{method} uses {name}, and is traced once for all steps",
        expected="a loss of the batch, the weights and the buffers",
        got=name,
        hint=hint,
    )
