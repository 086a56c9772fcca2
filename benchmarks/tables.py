"""The tables of docs/benchmarks.md out of a bench's file of rows: ``python -m benchmarks.tables FILE``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

Row = dict


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|--:" * (len(header) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in rows)])


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def papers(made: dict) -> str:
    """HAP's models: our and published seconds, and gains over each kind of baseline."""

    def cells(r: Row) -> list[str]:
        def marked(name: str) -> str:
            return number(r[f"{name.replace('-', '_')}_ratio"]) + ("\\*" if name in r["differs"] else "")

        unfit = r["ddp_even_s"] is None
        baselines = ["does not fit", "-", "-"] * 2 if unfit else [
            number(r["ddp_even_s"]), number(r["published_ddp_even_s"]), marked("ddp-even"),
            number(r["ddp_proportional_s"]), number(r["published_ddp_proportional_s"]),
            marked("ddp-proportional"),
        ]  # fmt: skip
        return [
            f"{r['workload']}, {r['gpus']} GPUs, {r['links']}", *baselines,
            *(number(r[name]) for name in ("single_s", "machine_alone_s", "ddp_tuned_s", "best_s")),
            number(r["published_hap_s"]), number(r["over_data_parallel"]), number(r["published_speedup"]),
            number(r["speedup"]), r["baseline"] or "-", number(r["over_tuned"]), number(r["bound_s"]),
        ]  # fmt: skip

    header = (
        "model, GPUs, links", "DP-EV", "paper", "ratio", "DP-CP", "paper", "ratio", "single", "machine",
        "tuned", "best plan", "HAP", "over DP", "HAP's", "over best", "which is", "over tuned", "bound",
    )  # fmt: skip
    return markdown(header, map(cells, made["rows"]))


def placement(made: dict) -> str:
    """Synthesis over three kinds of data parallelism, a row per case and method, and the geometric means."""
    bars = ("exact DDP", "local DDP", "tuned DDP", "best by hand")
    rows = [
        [
            f"{r['workload']}, {r['global_batch']}, {r['cluster']}, {r['links']}", r["method"],
            *(number(r[name], 4) for name in ("data_parallel_s", "local_s", "tuned_s", "bound_s", "step_s")),
            *(number(r["over"][bar]) for bar in bars),
        ]
        for r in made["rows"]
        if r["role"] == "heterog"
    ]  # fmt: skip
    header = (
        "model, batch, cluster, links", "method", "exact DDP, s", "local DDP, s", "tuned DDP, s", "bound, s",
        "step, s", *(f"over {bar}" for bar in bars),
    )  # fmt: skip
    means = [
        [f"{name}, {where}", *(number(over[bar]) for bar in bars)]
        for name, groups in made["heterog_speedup_over"].items()
        for where, over in groups.items()
    ]
    heads = ("geometric means", *(f"over {bar}" for bar in bars))
    return markdown(heads, means) + "\n\n" + markdown(header, rows)


TABLES: dict[str, Callable[[dict], str]] = {"papers": papers, "placement": placement}


def main(path: str) -> None:
    made = json.loads(Path(path).read_text())
    print(TABLES[made["bench"]](made))
    print(f"\nRevision {made['revision']}, `{made['command']}`.")


if __name__ == "__main__":
    main(sys.argv[1])
