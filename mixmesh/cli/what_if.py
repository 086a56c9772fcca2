"""mixmesh what-if"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.units import number_text
from ..cluster import Cluster
from ..errors import InputError
from .output import Json, print_json, seconds, table, working
from .plan import ClusterFile, JobName, PlannerName, ProfileFile

if TYPE_CHECKING:
    from ..explain.whatif.answers import Answer
    from ..frontend.job import Job

MILLION = 1_000_000


def what_if(
    job: JobName,
    cluster: ClusterFile,
    planner: PlannerName = "auto",
    profile: ProfileFile = None,
    swaps: Annotated[
        list[str] | None,
        typer.Option(
            "--swap",
            metavar="DEVICE",
            help="Ask about this device of the catalogue in place of one of each other type; repeatable. "
            "Default: the fastest of the cluster.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="KIND", help="device, machine, network, link, swap, memory, batch."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Rank changes by their effect on the step: a device or a machine left out, faster links, another device,
    more memory, twice the batch."""
    from ..explain.whatif import Change, answers, changes
    from ..explain.whatif.answers import advice, ranked
    from ..explain.whatif.changes import KINDS
    from ..frontend.job import load_job, samples_of_data
    from ..planner import check_planner

    described = Cluster.load(cluster)
    check_planner(planner)
    kinds = (*KINDS, "batch")
    if unknown := [kind for kind in only or () if kind not in kinds]:
        raise InputError("no such kind of change", expected=", ".join(kinds), got=unknown[0])
    asked = [c for c in changes(described, swaps or ()) if not only or c.kind in only]
    now = Change("now", "as it is", described)
    with working("loading the job") as say:
        loaded = load_job(job, weights=False)
        sources = prepared(loaded, planner, profile)
        rows = list(answers(now, asked, *sources, progress=say, epoch_samples=samples_of_data(loaded.data)))
    if as_json:
        print_json(what_if_object(rows))
        return
    print(what_if_table(rows, ranked(rows)))
    print()
    for line in advice(rows):
        print(line)
    if profile is not None:
        print("links are taken from the cluster file, not from the profile")


def prepared(loaded: Job, planner: str, profile: Path | None) -> tuple[Any, int, Any, Any]:
    """Returns a function that traces the model for a multiple of the batch, the samples of a batch, a
    function that plans with the job's optimizer, and the profile."""
    from ..api import load_profile, plan_traced
    from ..frontend.job import batch_size, needs_whole_parameters, optimizer_states
    from ..frontend.trace import trace

    states = optimizer_states(loaded.optimizer, loaded.model)
    whole = needs_whole_parameters(loaded.optimizer)

    @cache
    def traced(times: int) -> Any:
        return trace(loaded.model, repeated(loaded, times), outputs=loaded.outputs)

    def planned(model: Any, cluster: Cluster, costs: Any) -> Any:
        return plan_traced(
            model, cluster, profile=costs, planner=planner, optimizer_states=states, whole_parameters=whole
        )

    return traced, batch_size(loaded.batch) or 1, planned, load_profile(profile)


def repeated(job: Job, times: int) -> Any:
    """Repeats the samples of the job's batch."""
    if times == 1:
        return job.batch
    import torch
    from torch.utils import _pytree as pytree

    return pytree.tree_map(
        lambda x: torch.cat([x] * times) if isinstance(x, torch.Tensor) and x.ndim else x, job.batch
    )


def what_if_table(answers: list[Answer], rows: list[Answer]) -> str:
    now = answers[0]
    is_priced = now.price_per_hour is not None
    header = ["change", "step", "per sample", "samples/s", "planned by"]
    is_epoch_known = is_priced and now.epoch_samples is not None
    if is_priced:
        header.append("a million samples")
    if is_epoch_known:
        header.append("an epoch")
    cells = []
    for answer in (now, *rows):
        gain = answer.speedup(now)
        row = [answer.change.text, seconds(answer.step_s), seconds(answer.sample_s)]
        row += [f"{gain:.2f}x" if 0 < gain < math.inf else "-", answer.planner]
        if is_priced:
            price = answer.sample_price
            row.append("-" if price is None else number_text(MILLION * price))
        if is_epoch_known:
            row.append("-" if answer.epoch_price is None else number_text(answer.epoch_price))
        cells.append(row)
    return table(header, cells)


def what_if_object(answers: list[Answer]) -> dict[str, Any]:
    from ..explain.whatif.answers import advice

    now = answers[0]
    rows = [
        {
            "kind": a.change.kind,
            "change": a.change.text,
            "step_s": a.step_s,
            "samples": a.samples,
            "sample_s": a.sample_s,
            "speedup": a.speedup(now),
            "planner": a.planner,
            "price_per_hour": a.price_per_hour,
            "price_per_million_samples": None if a.sample_price is None else MILLION * a.sample_price,
            "price_per_epoch": a.epoch_price,
        }
        for a in answers
    ]
    return {"now": rows[0], "changes": rows[1:], "advice": advice(answers)}
