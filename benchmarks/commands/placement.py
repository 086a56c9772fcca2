"""python -m benchmarks placement"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mixmesh.cli.output import Json, print_json, table
from mixmesh.cli.plan import Unmeasured

from .common import Only, Out, app, command_line, progress_bar, write_rows

if TYPE_CHECKING:
    from ..placement import Row


@app.command()
def placement(
    only: Only = None,
    quick: Annotated[bool, typer.Option("--quick", help="The small cases only.")] = False,
    method: Annotated[
        list[str] | None, typer.Option("--method", metavar="NAME", help="These methods only (repeatable).")
    ] = None,
    calls: Annotated[int, typer.Option("--calls", min=1, help="Strategies that each search tries.")] = 1000,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Of the chance of a tree search.")] = 5,
    unmeasured: Unmeasured = None,
    out: Out = Path("out/bench/placement.json"),
    as_json: Json = False,
) -> None:
    """Placements of op groups found by tree search, TAG's and HeteroG's policies and local search."""
    from mixmesh.planner.learned import need_torch_geometric

    from ..placement import cases, methods_of, report, run

    methods = methods_of(method or ())
    if {"tag", "heterog"} & {*methods}:
        need_torch_geometric("tag")
    chosen = cases(only or (), quick)
    rows: list[Row] = []
    with progress_bar(len(chosen) * len(methods)) as (say, advance):
        for row in run(chosen, say, calls, methods, seeds, unmeasured or ()):
            rows.append(row)
            advance()
            write_rows(report(rows, command_line()), out)
    made = report(rows, command_line())
    if as_json:
        print_json(made)
        return
    print(shown(rows))
    print(summed_up(made))
    print(f"\nwritten to {out}")


def shown(rows: list[Row]) -> str:
    from ..revision import revision

    header = (
        "model", "batch", "cluster", "links", "best DP", "baseline", "bound", "most", "by", "step",
        "over DP", "over local", "over tuned", "over best by hand", "over weakest", "better after",
        "as uniform after", "cpu",
    )  # fmt: skip
    lines = [
        (
            r.workload, str(r.global_batch), r.cluster, r.links, _s(r.data_parallel_s, 4),
            _s(r.baseline_s, 4), _s(r.bound_s, 4), _s(r.most), r.method, _s(r.step_s, 4),
            *(_s(value) for value in r.over.values()), _s(r.over_weakest), _n(r.better_after),
            _n(r.level_after), f"{r.cpu_s:.1f} s",
        )
        for r in rows
    ]  # fmt: skip
    return table(header, lines) + (
        f"\n\nSeconds per step, simulated, revision {revision()}; - in memory: does not fit."
        "\nover DP: over exact data parallelism; over local: over that whose batch norm is each rank's own;"
        "\nover tuned: over data parallelism with our sums, shares and devices, without a search; over best"
        "\nby hand: over the fastest of exact, local, one device and one machine alone."
        "\nbound: no plan is faster; most: its"
        "\nspeed-up over DP. The weakest: the slowest of even and proportional data parallelism by AllReduce"
        "\nor parameter servers. Calls of the estimate, the median over seeds, until it was 1 % faster than"
        "\nall that the search begins with, and until it was as good as what the uniform search ends with."
    )


def summed_up(made: dict) -> str:
    def mean(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    def listed(where: str, means: dict[str, float | None]) -> str:
        return f"{where}: " + ", ".join(f"{name} {mean(value)}" for name, value in means.items())

    lines = []
    for over in list(made["heterog_speedup_over"].values())[:1]:
        lines.append(f"over {', '.join(over['all'])}:")
    for name, groups in made["heterog_speedup_over"].items():
        each = (f"{where} {', '.join(map(mean, over.values()))}" for where, over in groups.items())
        lines.append(f"  {name}: " + "; ".join(each))
    for links, means in made["heterog_speedup"].items():
        lines.append(listed(f"links {links}", means))
        by_cluster = made["heterog_speedup_by_cluster"][links]
        lines += [listed(f"  on {cluster}", m) for cluster, m in by_cluster.items() if len(by_cluster) > 1]
    for name, found in made["pipelines"].items():
        lines.append(
            f"a pipeline is faster than what {name} found in {found['faster']} of {found['cases']} cases: "
            f"over the best data parallelism {mean(found['alone'])} without them, "
            f"{mean(found['together'])} with them"
        )
    best = made["tag_best_case"]
    if best:
        lines.append(
            f"TAG at its best ({best['case']}): {best['over_weakest']:.2f} over the weakest scheme, "
            f"{best['over_baseline']:.2f} over the best"
        )
    for name, what in (("better", "better than all seeds"), ("level", "as good as uniform search ends")):
        found = made["tag_calls_over_uniform"][name]
        if found["cases"]:
            lines.append(
                f"TAG is {what} after {found['ratio']:.2f} of the calls of uniform search (geometric mean), "
                f"at most half of them in {found['halved']} of {found['cases']} cases"
            )
    return (
        "\nHeteroG's cases, over the best data parallelism, geometric means "
        f"(the paper: {made['claim']:.2f})\n" + "\n".join(lines)
    )


def _s(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _n(value: int | None) -> str:
    return "-" if value is None else str(value)
