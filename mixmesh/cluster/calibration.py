"""Device files: ``mixmesh calibrate``'s measurements of a card, used when a cluster file names the card.

A file has the ``[figures]`` of the device by the keys of a cluster file, when and with what they were
``[measured]``, and for each class of kernels a ``[[fit]]``: how far the fitted costs are from the measured
times. The figures replace the datasheet's.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ..base.files import read_text
from ..errors import ClusterError, unreadable
from .catalogue import CATALOGUE
from .devices_folder import device_file, file_name
from .file import DeviceTable, Name, NotNegative, Table, checked

MOST_BYTES = 2**20
# keys of a cluster file that are valid for the card only at its own rates
CALIBRATED = (
    "issue_us", "backward_issue_us", "sustained", "efficiency", "optimizer_ps_per_byte", "context_mib",
    "kernels_mib", "calibrated",
)  # fmt: skip
RATES = ("tflop_per_s", "half_tflop_per_s", "tf32_tflop_per_s", "memory_gbyte_per_s")


class FitTable(Table):
    """The relative errors of predicted times for a class of kernels."""

    kernels: Literal[
        "product", "thin product", "convolution", "depthwise convolution", "attention", "elementwise",
        "reduction", "lookup", "small kernels", "optimizer",
    ]  # fmt: skip
    dtype: Literal["f32", "tf32", "half", "any"]
    direction: Literal["forward", "backward"]
    num: Annotated[int, Field(ge=1)]
    mean_error: NotNegative
    largest_error: NotNegative
    datasheet_error: NotNegative  # the mean, by costs without a calibration


class MeasuredTable(Table):
    """The circumstances of a device's measurement."""

    date: Name
    reported: Name
    torch: Name
    seconds: NotNegative


class CalibrationTable(Table):
    """A whole device file."""

    figures: DeviceTable
    measured: MeasuredTable
    fit: list[FitTable] = []


def read_calibration(path: Path) -> CalibrationTable:
    """The tables of a device file. Raises ClusterError for a file that cannot be read, or that is of another
    device than its name says."""
    try:
        stat = path.stat()
        return _read(path, stat.st_mtime_ns, stat.st_size)
    except (OSError, ValueError) as error:
        raise unreadable(
            "the device file", path, error, ClusterError, expected="a TOML file", hint=HINT
        ) from None


@lru_cache(maxsize=256)
def _read(path: Path, changed_ns: int, size_bytes: int) -> CalibrationTable:
    return parse_calibration(read_text(path, MOST_BYTES), str(path), path.name)


HINT = ("mixmesh calibrate", "or delete the file: then the catalogue's figures count")


def parse_calibration(text: str, where: str, name_of_file: str | None = None) -> CalibrationTable:
    """The tables of a device file's text. Raises ClusterError."""
    tables = checked(CalibrationTable, text, where)
    name = tables.figures.name
    if name is None or tables.figures.device is not None:
        raise ClusterError(
            "the device file does not say which device it is of",
            expected="figures.name, and no figures.device",
            where=f"{where}: figures",
            hint=HINT,
        )
    if name_of_file is not None and file_name(name) != name_of_file:
        raise ClusterError(
            "the device file has the name of another device",
            expected=file_name(name),
            got=name_of_file,
            where=where,
            hint=f"mv {name_of_file} {file_name(name)}",
        )
    return tables


def calibration_of(name: str) -> DeviceTable | None:
    """The calibrated figures of a device; None if it was not calibrated. Raises ClusterError for a file that
    cannot be used."""
    path = device_file(name)
    if path is None:
        return None
    tables = read_calibration(path)
    return tables.figures.model_copy(update={"calibrated": tables.measured.date})


def with_calibration(table: DeviceTable) -> DeviceTable:
    """The table with the calibration of its device, if there is one, for keys that the table does not give
    itself. A card of the catalogue that is emulated, or has its own rates in the table, is not calibrated."""
    own = None if table.device is None else calibration_of(table.device)
    if own is None:
        return table
    stated = {key: getattr(table, key) for key in table.model_fields_set if key != "device"}
    if any(key in stated for key in (*RATES, "cpu_share")) or stated.get("kind", own.kind) != own.kind:
        if table.device in CATALOGUE:
            return table
        own = own.model_copy(update=dict.fromkeys(CALIBRATED))
        if "cpu_share" in stated:
            own = own.model_copy(update={"kind": "cpu"})
    elif table.efficiency is not None:
        rows = {tuple(row[:2]): row for row in (*(own.efficiency or ()), *table.efficiency)}
        stated["efficiency"] = list(rows.values())
    return own.model_copy(update=stated)
