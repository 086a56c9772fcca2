"""mixmesh calibrate"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.progress import tell
from ..cluster.device_file import Calibration, Fit
from ..errors import InputError
from .output import Json, check_folder_of, print_json, seconds, size, table

if TYPE_CHECKING:
    import torch

    from ..measure.calibration import Measured, Steps


def calibrate(
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="TYPE",
            help="cpu, cuda or xpu. By default the accelerator, if any.",
        ),
    ] = None,
    budget: Annotated[
        float, typer.Option("--seconds", min=1, metavar="SECONDS", help="Measure for this long.")
    ] = 120,
    name: Annotated[
        str | None,
        typer.Option("--name", help="The device's name in cluster files; by default the catalogue's."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Write the device file here, instead of where device files are read.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure one device of a kind, independent of any job: plans on clusters with such devices then use the
    measurement. The device should be idle."""
    check_folder_of(out, "the device file")
    from ..measure.calibration import calibrate as measure

    with telling_steps() as steps:
        measured = measure(device_named(device), seconds=budget, name=name, steps=steps)
    calibration = measured.calibration
    path = calibration.save(out)
    if as_json:
        print_json({"out": str(path), **calibration_object(measured)})
        return
    print(described(calibration))
    print(f"written to {path}" + ("" if out is None else ", which is not where device files are read"))


def device_named(kind: str | None) -> torch.device:
    """The device of a type. Raises InputError if there is no such device."""
    import torch

    from ..runtime.accelerator import accelerator_type, local_device

    if kind is None or kind == accelerator_type():
        return local_device()
    if kind != "cpu":
        types = " or ".join(filter(None, ("cpu", accelerator_type())))
        raise InputError("there is no such device here", expected=f"--device {types}", got=f"--device {kind}")
    return torch.device(kind)


@contextmanager
def telling_steps() -> Iterator[Steps]:
    """Callbacks that report progress on standard error: one line with the result of each group, and on a
    terminal a bar while it is measured."""
    from ..measure.calibration import Steps

    if not sys.stderr.isatty():
        group = ""

        def begin(name: str, num: int) -> None:
            nonlocal group
            group = name

        yield Steps(begin, end=lambda number, text: tell(f"{group}: {text}"))
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        yield Steps(
            lambda name, num: bars.add_task(name, total=num, text=""),
            lambda number, text: bars.update(bars.task_ids[-1], completed=number, text=text),
            lambda number, text: bars.update(bars.task_ids[-1], completed=number, text=text),
        )


def described(calibration: Calibration) -> str:
    """Formats the fitted constants and the errors of the fit for people."""
    device = calibration.device
    lines = [f"{device.name} ({calibration.reported}), measured in {seconds(calibration.took_s)}"]
    header = (
        "class",
        "dtype",
        "direction",
        "kernels",
        "share of peak",
        "ramp",
        "error",
        "largest",
        "datasheet's",
    )
    lines.append(table(header, (fit_cells(calibration, fit) for fit in calibration.fits)))
    if device.issue_s is not None and device.backward_issue_s is not None:
        host = seconds(device.issue_s), seconds(device.backward_issue_s)
        lines.append(f"the host takes {host[0]} to issue a kernel, {host[1]} in the backward pass")
    if device.optimizer_s_per_byte is not None:
        rate = 1e-9 / device.optimizer_s_per_byte
        lines.append(f"the optimizer goes over {rate:.3g} GB of parameters in a second")
    if device.context_bytes is not None:
        held = size(device.context_bytes), size(device.kernel_bytes or 0)
        lines.append(f"a process holds {held[0]} before it computes, and {held[1]} more when it does")
    return "\n".join(lines)


def fit_cells(calibration: Calibration, fit: Fit) -> tuple[str, ...]:
    """A row of the table; the constants are shown only in the row of the forward pass."""
    rows = {(name, dtype): figures for name, dtype, *figures in calibration.device.efficiency}
    own = rows.get((fit.kernels, fit.dtype)) if fit.direction == "forward" else None
    constants = (f"{own[0]:.0%}", seconds(own[1])) if own else ("", "")
    errors = (f"{e:.0%}" for e in (fit.mean_error, fit.largest_error, fit.datasheet_error))
    return fit.kernels, fit.dtype, fit.direction, str(fit.num), *constants, *errors


def calibration_object(measured: Measured) -> dict[str, Any]:
    """The object that ``--json`` prints: the calibration and the timings that it rests on."""
    calibration = measured.calibration
    return {
        "device": asdict(calibration.device),
        "datasheet": asdict(measured.plain),
        "date": calibration.date,
        "reported": calibration.reported,
        "torch": calibration.torch,
        "seconds": calibration.took_s,
        "fits": [asdict(fit) for fit in calibration.fits],
        "timings": [asdict(timing) for timing in measured.timings],
        "optimizer_steps": [list(step) for step in measured.optimizer_steps],
    }
