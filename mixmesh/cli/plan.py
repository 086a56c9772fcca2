"""mixmesh plan"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..cluster import Cluster
from ..cost import UNMEASURED, check_unmeasured
from ..cost.calls import is_computation
from ..errors import PlanError
from ..lang.ir import Program, print_program, regions, stages_of
from ..lang.plan_file import Plan
from ..passes.zero import zero_stage
from .output import Json, check_folder_of, print_json, seconds, size, table, working

if TYPE_CHECKING:
    from ..frontend.job import Job
    from ..frontend.trace import Traced

JobName = Annotated[
    str,
    typer.Argument(metavar="JOB", help="path/to/file.py:function, by default :job; or workload:NAME:SAMPLES"),
]
ClusterFile = Annotated[
    Path, typer.Option("--cluster", metavar="C.toml", help="The cluster file, or a preset: hap-32.")
]
PlannerName = Annotated[
    str, typer.Option("--planner", help="auto, hap, or one of the baselines; a wrong name lists them.")
]
ProfileFile = Annotated[
    Path | None, typer.Option("--profile", metavar="P.json", help="Measured costs, from mixmesh profile.")
]
SearchSeconds = Annotated[
    float | None,
    typer.Option(
        "--search-seconds",
        metavar="S",
        min=0,
        help="How long heterog, tag and placed search (20 s). If given, auto asks all slow planners too.",
    ),
]
ExactSeconds = Annotated[
    float | None,
    typer.Option(
        "--exact",
        metavar="S",
        help="Let HiGHS prove, in up to S seconds, how far the chosen program is from the cheapest.",
    ),
]
Unmeasured = Annotated[
    list[str] | None,
    typer.Option(
        "--unmeasured",
        metavar="NAME",
        help=f"Count on a mechanism never measured on a GPU: {', '.join(UNMEASURED)}; repeatable.",
    ),
]
BatchNorm = Annotated[
    str,
    typer.Option(
        "--batch-norm",
        metavar="KIND",
        help="Statistics of the whole batch (exact), or of each rank's own samples, as under DDP (local).",
    ),
]


def plan(
    job: JobName,
    cluster: ClusterFile,
    planner: PlannerName = "auto",
    profile: ProfileFile = None,
    search_s: SearchSeconds = None,
    exact_s: ExactSeconds = None,
    unmeasured: Unmeasured = None,
    batch_norm: BatchNorm = "exact",
    out: Annotated[Path | None, typer.Option("--out", metavar="X.plan", help="Write the plan here.")] = None,
    with_program: Annotated[bool, typer.Option("--program", help="Print the program too.")] = False,
    with_passes: Annotated[
        bool, typer.Option("--passes", help="Print the passes, with the seconds that each took and gained.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Find the fastest program for a job on a cluster, and print what it does and what it would take."""
    check_folder_of(out, "the plan", PlanError)
    described = Cluster.load(cluster)
    options = PlanOptions(planner, profile, search_s, exact_s, tuple(unmeasured or ()), batch_norm)
    _, _, planned = plan_job(job, described, options, weights=False)
    if out is not None:
        planned.save(out)
    if as_json:
        print_json(plan_object(planned))
        return
    from ..explain.headline import headline

    print(headline(planned, described))
    print(summary(planned, described))
    if with_passes:
        print(f"\n{passes(planned)}")
    if with_program:
        print(f"\n{print_program(planned.program, planned.notes)}")
    if out is not None:
        print(f"\nwritten to {out}")


@dataclass(frozen=True)
class PlanOptions:
    """The options of ``mixmesh plan`` that decide which plan it finds."""

    planner: str = "auto"
    profile: Path | None = None
    search_s: float | None = None
    exact_s: float | None = None
    unmeasured: tuple[str, ...] = ()
    batch_norm: str = "exact"


def plan_job(
    job: str, cluster: Cluster, options: PlanOptions, *, weights: bool = True
) -> tuple[Job, Traced, Plan]:
    """Loads, traces and plans a job, after checks that take little time."""
    from ..api import load_profile, plan_traced
    from ..planner import check_limits, check_planner

    check_planner(options.planner)
    check_limits(options.exact_s, options.search_s)
    check_unmeasured(options.unmeasured)
    costs = load_profile(options.profile)
    with working("loading the job") as say:
        from ..frontend.job import load_job, needs_whole_parameters, optimizer_states
        from ..frontend.trace import check_batch_norm, trace

        check_batch_norm(options.batch_norm)
        loaded = load_job(job, weights=weights)
        say("tracing the model")
        traced = trace(loaded.model, loaded.batch, batch_norm=options.batch_norm, outputs=loaded.outputs)
        states = optimizer_states(loaded.optimizer, loaded.model)
        planned = plan_traced(
            traced,
            cluster,
            planner=options.planner,
            profile=costs,
            optimizer_states=states,
            whole_parameters=needs_whole_parameters(loaded.optimizer),
            search_s=options.search_s,
            exact_s=options.exact_s,
            unmeasured=options.unmeasured,
            progress=say,
        )
    return loaded, traced, planned


def plan_object(plan: Plan) -> dict[str, Any]:
    return {
        "planner": plan.planner,
        "feasible": plan.feasible,
        "predicted_step_s": plan.predicted_step_s,
        "measured_step_s": plan.measured_step_s,
        "predicted_peak_memory_bytes": list(plan.predicted_peak_memory_bytes),
        "planning_s": plan.planning_s,
        "zero_stage": zero_stage(plan.program),
        "recomputed_regions": len(regions(plan.program)),
        "dtypes": {name: list(row) for name, row in plan.program.dtypes},
        "micro_batches": None
        if plan.micro_batches is None
        else [
            {"micro_batch": m.micro_batch, "accumulation_steps": m.steps, "last_micro_batch": m.last}
            for m in plan.micro_batches
        ],
        "order": plan.order,
        "batch_norm": plan.batch_norm,
        "ratios": {name: list(ratio) for name, ratio in plan.program.ratios},
        "candidates": [
            {"planner": c.planner, "feasible": c.feasible, "predicted_step_s": c.predicted_step_s}
            for c in plan.candidates
        ],
        "states_expanded": plan.states_expanded,
        "timings_s": plan.timings_s,
        "passes": [vars(row) for row in plan.passes],
        "gap": plan.gap,
        "bound_s": plan.bound_s,
        "is_bound_measured": plan.is_bound_measured,
        "ideal_s": plan.ideal_s,
        "cost_source": plan.cost_source,
        "warnings": list(plan.warnings),
    }


def summary(plan: Plan, cluster: Cluster | None = None) -> str:
    """Formats a plan without its program, for people."""
    lines = [
        f"{plan.program.name} on {plan.cluster_name or 'a cluster'}: planned by {plan.planner} "
        f"in {seconds(plan.planning_s)}, costs from {plan.cost_source or 'nowhere'}",
        f"predicted step {seconds(plan.predicted_step_s)}"
        + ("" if plan.measured_step_s is None else f", measured {seconds(plan.measured_step_s)}"),
        *([bound(plan)] if plan.bound_s else []),
        *([effort(plan)] if plan.timings_s else []),
        *([f"ZeRO stage {stage}"] if (stage := zero_stage(plan.program)) else []),
        *([text] if (text := recomputation(plan.program)) else []),
        *([f"{len(stages_of(plan.program))} stages in {plan.order} order"] if plan.order else []),
    ]
    if plan.batch_norm == "local":
        lines.append("batch norm takes each rank's own samples: the numbers are not those of a single device")
    if plan.candidates:
        rows = [
            ("*" if c.planner == plan.planner else "", c.planner, seconds(c.predicted_step_s),
             "yes" if c.feasible else "no")
            for c in plan.candidates
        ]  # fmt: skip
        lines += ["", table(("", "candidate", "step", "fits"), rows)]
    lines += ["", ranks(plan, cluster)]
    lines += [f"warning: {text}" for text in plan.warnings]
    return "\n".join(lines)


def bound(plan: Plan) -> str:
    """A sentence about the bound of a plan; empty if it has none."""
    assert plan.bound_s is not None
    peaks = "" if plan.is_bound_measured else ", at the peaks of their figures"
    return f"no plan can be faster than {seconds(plan.bound_s)} (all devices computing all the time{peaks})"


def recomputation(program: Program) -> str:
    """A line about rematerialised computations; empty without any."""
    parts = regions(program)
    if not parts:
        return ""
    count, every = sum(map(len, parts.values())), sum(map(is_computation, program.instructions))
    return f"activation checkpointing: {count} of {every} computations run again, in {len(parts)} regions"


def effort(plan: Plan) -> str:
    """A line about the steps of planning with their times, and the gap that the search left."""
    steps = ", ".join(f"{name} {seconds(spent)}" for name, spent in plan.timings_s.items())
    gap = "" if plan.gap is None else f"; at most {plan.gap:.1%} above the cheapest by the search's own cost"
    return f"{plan.states_expanded} states expanded; {steps}{gap}"


def passes(plan: Plan) -> str:
    """A row for each pass of planning, in order; empty for a plan from a file."""
    rows = [
        (row.name, seconds(row.spent_s), seconds(row.gained_s) if row.gained_s else "0", row.about)
        for row in plan.passes
    ]
    return table(("pass", "spent on all proposals", "gained in this plan's step", ""), rows)


def ranks(plan: Plan, cluster: Cluster | None) -> str:
    """A row for each rank: its share under every ratio, its micro-batches, and its memory."""
    names = [name for name, _ in plan.program.ratios] + [name for name, _ in plan.program.dtypes]
    if plan.micro_batches is not None:
        names += ["micro-batch", "accumulation", "last"]
    rows = []
    for rank in range(plan.program.world_size):
        shares = [f"{ratio[rank]:.4f}" for _, ratio in plan.program.ratios]
        shares += [row[rank] for _, row in plan.program.dtypes]
        if plan.micro_batches is not None:
            m = plan.micro_batches[rank]
            shares += [str(m.micro_batch), str(m.steps), str(m.last)]
        peak = plan.predicted_peak_memory_bytes
        memory = size(peak[rank]) if rank < len(peak) else "-"
        row = [str(rank), *shares, memory]
        if cluster is not None:
            device = cluster.devices[rank]
            row = [str(rank), device.name, *shares, memory, size(device.memory_bytes)]
        rows.append(row)
    if cluster is not None:
        return table(("rank", "device", *names, "predicted memory", "of"), rows)
    return table(("rank", *names, "predicted memory"), rows)
