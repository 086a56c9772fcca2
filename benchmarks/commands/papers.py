"""python -m benchmarks papers"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mixmesh.cli.output import Json, print_json, table
from mixmesh.errors import InputError

from .common import Out, app, command_line, progress_bar, write_rows

if TYPE_CHECKING:
    from ..papers import Floor, Row


@app.command()
def papers(
    model: Annotated[list[str] | None, typer.Option("--model", help="Only this model; repeat.")] = None,
    gpus: Annotated[list[int] | None, typer.Option("--gpus", help="Only on so many; repeat.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="On 8 devices only.")] = False,
    out: Out = Path("out/bench/papers.json"),
    as_json: Json = False,
) -> None:
    """Simulated seconds per iteration beside those that HAP published for its mixed cluster."""
    from ..papers import LINKS, QUICK_GPUS, cases, floors, report, run

    if quick and gpus:
        raise InputError("--quick chooses the number of devices", expected="--quick, or --gpus N")
    chosen = cases(model or (), QUICK_GPUS if quick else gpus or ())
    rows: list[Row] = []
    with progress_bar(len(chosen) * len(LINKS)) as (say, advance):
        for row in run(chosen, say):
            rows.append(row)
            advance()
    below = floors(rows)
    made = report(rows, command_line(), below)
    write_rows(made, out)
    if as_json:
        print_json(made)
        return
    print(shown(rows))
    print(f"\n{shown_floors(below)}")
    print(f"\nwritten to {out}")


def shown(rows: list[Row]) -> str:
    from ..revision import revision

    header = ("model", "gpus", "links", "DP-EV", "paper", "ratio", "DP-CP", "paper", "ratio",
              "single", "machine", "tuned", "ours", "HAP", "ratio", "over DP", "HAP's", "over best", "of",
              "over tuned", "bound", "most", "by", "plan")  # fmt: skip
    lines = [
        table(
            header,
            [
                (
                    r.workload, str(r.gpus), r.links,
                    _s(r.ddp_even_s), _s(r.published_ddp_even_s), _mark(r, "ddp-even", r.ddp_even_ratio),
                    _s(r.ddp_proportional_s), _s(r.published_ddp_proportional_s),
                    _mark(r, "ddp-proportional", r.ddp_proportional_ratio),
                    _s(r.single_s), _s(r.machine_alone_s), _s(r.ddp_tuned_s),
                    _s(r.best_s), _s(r.published_hap_s), _s(r.best_ratio),
                    _s(r.over_data_parallel), _s(r.published_speedup), _s(r.speedup), r.baseline or "-",
                    _s(r.over_tuned), _s(r.bound_s), _s(r.most),
                    r.best_planner or "-", f"{r.planning_s:.1f} s",
                )
                for r in rows
            ],
        ),
        "",
        f"Seconds per iteration, simulated from datasheets, revision {revision()}.",
        "single: the fastest device alone; machine: the best data parallelism on one machine alone; tuned:",
        "data parallelism with our sums, shares and devices, without a search.",
        "over DP: over the better of DP-EV and DP-CP, as HAP's figure; over best: over the fastest of these",
        "two, FSDP, single and machine.",
        "bound: all devices computing all the time, at the peaks of their datasheets;",
        "most: what that is over the best.",
        "links wire: collectives at the published 10.4 Gbit/s; measured: at what its authors measured.",
    ]  # fmt: skip
    for links in sorted({r.links for r in rows}, reverse=True):
        told = [
            x for r in rows if r.links == links for x in (r.ddp_even_ratio, r.ddp_proportional_ratio) if x
        ]
        off = sum(len(r.differs) for r in rows if r.links == links)
        if told:
            lines.append(
                f"{links}: {off} of {len(told)} baselines differ by more than 25 % from the paper (marked *)"
            )
    lines.append("Why they differ: docs/benchmarks.md")
    for name, claim in dict.fromkeys((r.workload, r.claim) for r in rows if r.published_hap_s is None):
        lines.append(f"{name}: no bars known to us; the paper says {claim}")
    unfit = dict.fromkeys((r.workload, r.gpus, r.does_not_fit) for r in rows if r.does_not_fit)
    lines += [f"{name} on {gpus}: {', '.join(them)} does not fit in memory" for name, gpus, them in unfit]
    return "\n".join(lines)


def shown_floors(below: Sequence[Floor]) -> str:
    """The table of bounds and published steps, and whether a bound is above its published step."""
    rows = [(f.case, f"{f.bound_s:.3f}", f"{f.published_s:.2f}", f.source) for f in below]
    above = [f.case for f in below if not f.is_below]
    verdict = f"above a published step: {', '.join(above)}" if above else "no bound is above a published step"
    return "\n".join([table(("bound of", "bound, s", "shortest published, s", "source"), rows), verdict])


def _s(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _mark(row: Row, name: str, ratio: float | None) -> str:
    return _s(ratio) + ("*" if name in row.differs else "")
