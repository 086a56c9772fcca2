"""mixmesh detect"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..base.files import write_text
from ..base.launched import rank_and_world_size
from ..base.progress import telling
from ..errors import unwritable
from .output import Json, check_folder_of, print_json


def detect(
    out: Annotated[
        Path | None, typer.Option("--out", metavar="C.toml", help="Write the cluster file here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the devices and links of a cluster: one process per device, under torchrun or in the testbed."""
    check_folder_of(out, "the cluster file")
    rank, world_size = rank_and_world_size()
    from ..cluster.detection import detect as find
    from ..measure.testbed import enter_device, leave_device
    from ..runtime.comm import default_device, initialise, leave

    device = default_device()
    initialise(world_size, device, timeout_s=300.0)
    with telling(rank, "detecting") as say:
        cluster = find(device, on_start=enter_device, on_end=leave_device, progress=say)
    leave()
    if rank:
        return
    text = cluster.to_toml()
    if out is not None:
        try:
            write_text(out, text)
        except OSError as error:
            raise unwritable("the cluster file", out, error) from None
    if as_json:
        machines = [
            {"name": machine.name, "devices": [device.name for device in machine.devices]}
            for machine in cluster.machines
        ]
        print_json({"out": None if out is None else str(out), "machines": machines, "toml": text})
        return
    print(cluster.describe())
    print(text if out is None else f"written to {out}")
