"""python -m benchmarks layer-times"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mixmesh.cli.output import Json, print_json, table

from .common import Out, app, command_line, write_rows

if TYPE_CHECKING:
    from ..layer_times import Row

# next to the repository, unless --data names another folder
DATA = Path(__file__).parents[3] / "shared" / "data" / "layer_times"


@app.command()
def layer_times(
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FOLDER",
            help="Where the measurements are, which are no part of the repository.",
        ),
    ] = None,
    out: Out = Path("out/bench/layer-times.json"),
    as_json: Json = False,
) -> None:
    """Predicted layer times of A100 and V100 beside published measurements: from datasheets alone, and with
    constants fitted to a third of them."""
    from ..layer_fit import chosen, device_lines, predict_fitted
    from ..layer_times import DATASHEET, FITTED, load, predict_all, report

    measured = load(data or DATA)
    known = chosen(measured)
    fitted, devices = predict_fitted(measured, known)
    rows = {DATASHEET: predict_all(measured), FITTED: fitted}
    made = report(rows, len(known), device_lines(devices), command_line())
    write_rows(made, out)
    if as_json:
        print_json(made)
        return
    print(shown(made, rows[DATASHEET]))
    print(f"\nwritten to {out}")


def shown(made: dict, rows: tuple[Row, ...]) -> str:
    """The scores as a table, each with its subject."""
    header = ("constants", "pass", "layers", "number", "mean error", "rank", "predicted / measured", "target")
    lines = [
        (
            s["mode"], s["what"], s["layer"] or s["weights"], str(s["score"]["num"]),
            f"{s['score']['error']:.1%}", f"{s['score']['rank']:.3f}", f"{s['score']['bias']:.2f}",
            {True: "met", False: "missed", None: ""}[s["met"]],
        )
        for s in made["scores"]
    ]  # fmt: skip
    notes = (
        f"{len(rows)} kinds of layers, revision {made['revision']}.",
        "datasheet: nothing is fitted. fitted: constants of the cards (efficiency by class, the host's cost)",
        f"are fitted to {made['fitted_to']} of them, and the others predicted.",
        "every layer: as often as it stands in its model. each kind once: embedding, block, head alike.",
        "rank: Spearman's correlation. predicted / measured: the median.",
        "Backward passes of embeddings were not run in the measurements; their updates are not fused.",
    )
    return "\n".join([table(header, lines), "", *notes])
