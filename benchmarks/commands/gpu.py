"""python -m benchmarks gpu"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mixmesh.base.units import size_text
from mixmesh.cli.output import Json, print_json, seconds, table

from .common import Keep, Only, Out, app, command_line, progress_bar, write_rows
from .order import Quick


@app.command()
def gpu(
    only: Only = None,
    quick: Quick = False,
    device: Annotated[str, typer.Option("--device", help="cuda, or cpu for a try of the bench.")] = "cuda",
    keep: Keep = None,
    out: Out = Path("out/bench/gpu.json"),
    as_json: Json = False,
) -> None:
    """Models on one GPU: ours beside PyTorch alone, and the predictions of their time and memory."""
    import torch

    from mixmesh.errors import InputError
    from mixmesh.runtime.accelerator import device_count

    from ..gpu import CASES, FULL, OURS, QUICK, SMALL, Row, report, run

    if device != "cpu" and not device_count():
        raise InputError("no GPU here", expected="a machine with one", hint="--device cpu tries the bench")
    every = SMALL if device == "cpu" else CASES
    cases = [case for case in every if not only or case.name in only]
    if not cases:
        raise InputError("no such case", expected=", ".join(case.name for case in every), got=str(only))
    where, found = torch.device(device, 0), []
    with progress_bar(len(cases) + 1) as (say, advance):
        for made in run(where, cases, QUICK if quick else FULL, say, keep):
            found.append(made)
            advance()
            write_rows(report(found, command_line()), out)
    written = report(found, command_line())
    if as_json:
        print_json(written)
        return
    print(f"{written['device']}, PyTorch {written['torch']}")
    rows = [row for row in found if isinstance(row, Row)]
    names = list(dict.fromkeys(name for row in rows for name in row.step_s))
    others = [name for name in names if name != OURS]
    print(
        table(
            ("", *names, *(f"ours / {name}" for name in others), "loss"),
            [
                (row.name, *(seconds(row.median_s(n)) if n in row.step_s else "-" for n in names),
                 *(f"{row.over(OURS, n):.3f}" if n in row.step_s else "-" for n in others),
                 f"{row.error:.1e}")
                for row in rows
            ],
        )
    )  # fmt: skip
    kinds = list(rows[0].predicted_step_s)
    print(
        table(
            ("predicted / measured", *kinds, *(f"{kind}, memory" for kind in kinds), "held"),
            [
                (row.name, *(f"{row.predicted_step_s[kind] / row.median_s(OURS):.2f}" for kind in kinds),
                 *(f"{row.predicted_bytes[kind] / row.measured_bytes:.2f}" for kind in kinds),
                 size_text(row.measured_bytes))
                for row in rows
            ],
        )
    )  # fmt: skip
    print(f"written to {out}")
