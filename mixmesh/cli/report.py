"""mixmesh report"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..cost import Profile
from ..errors import InputError
from ..lang.check import check_loaded
from ..lang.plan_file import Plan
from .explain import cluster_of
from .output import Json, check_folder_of, print_json
from .plan import ProfileFile

if TYPE_CHECKING:
    from ..explain.report import Page

KINDS = {"Plan": "a plan", "Run": "a training", "Bench": "the results of a bench"}


def report(
    given: Annotated[
        list[Path],
        typer.Argument(
            metavar="WHAT",
            help="A plan, a folder of checkpoints, the log of a training, the results of a bench; or two of "
            "one kind, side by side.",
        ),
    ],
    clusters: Annotated[
        list[Path] | None,
        typer.Option(
            "--cluster", metavar="C.toml", help="The cluster that the plan was made for; of two plans, twice."
        ),
    ] = None,
    profile: ProfileFile = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            "--measured", metavar="T.json", help="Also show this timeline of `mixmesh run --trace`."
        ),
    ] = None,
    asks_what_if: Annotated[
        bool,
        typer.Option("--what-if", help="Also plan for the cluster after each change, like mixmesh what-if."),
    ] = False,
    out: Annotated[Path, typer.Option("--out", metavar="R.html", help="Write the page here.")] = Path(
        "report.html"
    ),
    as_json: Json = False,
) -> None:
    """Write a page in a single file that needs no network. For a plan: the cluster, the step's timeline, why
    it is fast, the program. For a training: losses, throughput and events. For a bench: its figures."""
    from ..api import load_profile
    from ..explain.report import bench_page, run_page, save_page
    from ..explain.report.recognise import EXPECTED, Bench, Run, recognise

    check_folder_of(out, "the report")
    if len(given) > 2:
        raise InputError("a page shows one or two", expected=EXPECTED, got=f"{len(given)} of them")
    recognised = [recognise(path) for path in given]
    kinds = [KINDS[type(each).__name__] for each in recognised]
    if len(set(kinds)) > 1:
        raise InputError(
            "only two of one kind are shown side by side",
            expected=f"two times {kinds[0]}",
            got=" and ".join(kinds),
        )
    names = names_of(given)
    if plans := [each for each in recognised if isinstance(each, Plan)]:
        options = PageOptions(clusters or [], load_profile(profile), measured, asks_what_if)
        page = page_of_plans(given, names, plans, options)
    else:
        check_no_options(kinds[0], clusters, profile, measured, asks_what_if)
        named = list(zip(recognised, names))
        runs = [replace(each, name=name) for each, name in named if isinstance(each, Run)]
        benches = [replace(each, name=name) for each, name in named if isinstance(each, Bench)]
        page = run_page(runs) if runs else bench_page(benches)
    save_page(page, out)
    if as_json:
        print_json({"report": str(out), "size_bytes": out.stat().st_size, "sentences": list(page.sentences)})
        return
    for text in page.sentences:
        print(text)
    print(f"\nwritten to {out}")


def names_of(paths: list[Path]) -> list[str]:
    """The names of files, or their paths if the names are equal."""
    names = [path.resolve().name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def check_no_options(kind: str, *options: Any) -> None:
    """Raises InputError for options that are only for plans."""
    if any(options):
        raise InputError(
            f"--cluster, --profile, --measured and --what-if belong to a plan, and this is {kind}",
            expected=f"{kind} without them",
        )


@dataclass(frozen=True)
class PageOptions:
    """The options for pages of plans."""

    clusters: list[Path]
    profile: Profile | None
    measured: Path | None
    asks_what_if: bool


def page_of_plans(paths: list[Path], names: list[str], plans: list[Plan], options: PageOptions) -> Page:
    """The page of a plan, or of two side by side."""
    from ..explain.report import facts_of, plan_page
    from ..explain.report.measured import read_trace
    from ..explain.report.pair import differences, side_by_side

    clusters, measured = options.clusters, options.measured
    if len(clusters) > len(plans):
        raise InputError("more clusters than plans", expected="--cluster once for each plan")
    if measured is not None and len(plans) > 1:
        raise InputError("a measured timeline is of one plan", expected="one plan with --measured")
    shown = []
    for n, (path, plan) in enumerate(zip(paths, plans)):
        check_loaded(plan, str(path))
        cluster = clusters[min(n, len(clusters) - 1)] if clusters else None
        described = cluster_of(plan, path, cluster, f"report {' '.join(map(str, paths))}")
        timeline = None if measured is None else read_trace(measured, described.world_size)
        is_first = n == 0
        shown.append(
            facts_of(
                plan,
                described,
                profile=options.profile,
                measured=timeline,
                name=names[n] if len(plans) > 1 else "",
                is_compared=is_first,
                asks_what_if=options.asks_what_if and is_first,
            )
        )
    if len(shown) == 1:
        return plan_page(shown)
    return plan_page(shown, differences(*shown), side_by_side(*shown))
