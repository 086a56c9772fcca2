"""Scripts that run as one process and under torchrun, and the rows of results that each rank tells.

Every rank writes a file of its own: what ranks print to one file at a time may be cut into each other."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from warm_python import python

Told = tuple[Path, list[dict]]
TORCHRUN = "-m", "torch.distributed.run", "--nproc-per-node"


def cluster_text(**tflop_per_s: float) -> str:
    """A cluster of one machine with these devices: parameters are cut, and unequally, whatever else the
    machine is doing."""
    devices = "".join(
        f'  {{ name = "{name}", tflop_per_s = {speed}, memory_gib = 4, memory_gbyte_per_s = {500 * speed:g}, '
        'kind = "cpu" },\n'
        for name, speed in tflop_per_s.items()
    )
    return f"""
name = "unequal"
[network]
bandwidth_gbit_per_s = 100
latency_us = 1
[[machine]]
name = "host"
link_gbit_per_s = 100
devices = [
{devices}]
"""


CLUSTER = cluster_text(fast=0.04, slow=0.02)
WITHOUT_BF16 = '[[machine]]\ndevices = ["V100-16GB", "A100-40GB"]\n'


if "MIXMESH_TEST_GPU" in os.environ:  # several at a time on a machine of many cores
    TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"
    CLUSTER = CLUSTER.replace('kind = "cpu"', 'kind = "gpu", supports_bf16 = true')


def cluster_file(folder: Path, text: str = CLUSTER) -> Path:
    """A file in ``folder`` that describes two unequal devices, so that nothing depends on measured speeds."""
    path = folder / f"cluster{rank()}.{len(text)}.toml"
    path.write_text(text)
    return path


def rank() -> int:
    """This process's rank; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def tell(folder: Path, name: str, **values) -> None:
    """Adds a row to this rank's file in ``folder``."""
    with open(folder / f"told.{rank()}", "a") as file:
        file.write(json.dumps({"name": name, "rank": rank(), **values}) + "\n")


def told(folder: Path) -> list[dict]:
    """The rows of all ranks, each rank's in their order, by rank."""
    files = sorted(folder.glob("told.*"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def start(
    script: Path,
    world_size: int,
    folder: Path,
    *arguments: str,
    max_restarts: int = 0,
    imports: tuple[str, ...] = (),
) -> subprocess.Popen:
    """Starts ``script`` with ``folder`` and ``arguments``: without torchrun for a world of 0. Its processes
    are forked from one that has done the ``imports``."""
    launcher = [*TORCHRUN, str(world_size), f"--max-restarts={max_restarts}"] if world_size else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(folder / "printed", "w") as printed:
        return subprocess.Popen(
            [python(*imports), *launcher, str(script), str(folder), *arguments],
            env=environment, stdout=printed, stderr=printed,
        )  # fmt: skip


def wait(process: subprocess.Popen, folder: Path, timeout_s: float = 400) -> None:
    """Waits for the end of a process that was started with ``folder``, and fails with what it printed."""
    try:
        status = process.wait(timeout=timeout_s)
    finally:
        process.kill()
    assert status == 0, (folder / "printed").read_text()[-4000:]


def run_each(
    script: Path, worlds: dict[str, int], make_folder: Callable[[str], Path], imports: tuple[str, ...] = ()
) -> dict[str, Told]:
    """By name the folder of a run and the rows that its ranks told. All run at a time: ``script`` with the
    name as its argument, in a world of so many."""
    folders = {name: make_folder(name.replace(".", "_")) for name in worlds}
    started = {
        name: start(script, size, folders[name], name, imports=imports) for name, size in worlds.items()
    }
    for name, process in started.items():
        wait(process, folders[name])
    return {name: (folder, told(folder)) for name, folder in folders.items()}


def plans_with_earlier_gradients(folder: Path) -> set[bool]:
    """Whether the plans that scenarios kept count gradients of earlier passes: alike, or some of them."""
    headers = (path.read_text().partition("\n---")[0] for path in (folder / "cache" / "plans").iterdir())
    return {"gradients of earlier passes" in header for header in headers}
