"""mixmesh report"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..check import check_loaded
from ..plan_file import Plan
from .explain import cluster_of
from .output import Json, print_json
from .plan import ProfileFile
from .show import PlanFile


def report(
    plan: PlanFile,
    cluster: Annotated[
        Path | None,
        typer.Option("--cluster", metavar="C.toml", help="The cluster that the plan was made for."),
    ] = None,
    profile: ProfileFile = None,
    measured: Annotated[
        Path | None,
        typer.Option("--measured", metavar="T.json", help="A timeline of `mixmesh run --trace`, below."),
    ] = None,
    asks_what_if: Annotated[
        bool,
        typer.Option("--what-if", help="Also plan for the cluster after each change, as mixmesh what-if."),
    ] = False,
    out: Annotated[Path, typer.Option("--out", metavar="R.html", help="Write the page here.")] = Path(
        "report.html"
    ),
    as_json: Json = False,
) -> None:
    """Write a plan as a page to look at: the cluster, the step's timeline, why it is fast, the program. One
    file, which asks no other host for anything."""
    from ..api import load_profile
    from ..report import facts_of, plan_page, save_page
    from ..report.measured import read_trace
    from ..report.words import sentences

    loaded = Plan.load(plan)
    described = cluster_of(loaded, plan, None, cluster)
    check_loaded(loaded, str(plan))
    timeline = None if measured is None else read_trace(measured, described.world_size)
    facts = facts_of(
        loaded, described, profile=load_profile(profile), measured=timeline, asks_what_if=asks_what_if
    )
    save_page(plan_page([facts]), out)
    if as_json:
        print_json({"report": str(out), "size_bytes": out.stat().st_size, "sentences": sentences(facts)})
        return
    for text in sentences(facts):
        print(text)
    print(f"\nwritten to {out}")
