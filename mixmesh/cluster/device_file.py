"""A calibration as a value, and its file: measured figures, their origin, and how well they fit."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from ..base.files import write_text
from ..base.units import ONE, in_unit, si
from ..errors import ClusterError
from .calibration import CalibrationTable, parse_calibration, read_calibration
from .device import Device, device_of, device_pairs
from .devices_folder import VARIABLE, devices_folder, file_name
from .toml import toml_string

HEAD = "# written by mixmesh calibrate; a cluster file or mixmesh detect that names the device reads it\n"


@dataclass(frozen=True)
class Fit:
    """The errors of predicted times for a class of kernels: the mean and largest relative error (of the
    shorter time) of ``num`` kernels, and the mean with costs without a calibration (``datasheet_error``)."""

    kernels: str
    dtype: str
    direction: str  # "forward" or "backward"
    num: int
    mean_error: float
    largest_error: float
    datasheet_error: float


@dataclass(frozen=True)
class Calibration:
    """A device as it was measured in ``took_s`` seconds. ``reported`` is PyTorch's name of it."""

    device: Device
    date: str
    reported: str
    torch: str
    took_s: float
    fits: tuple[Fit, ...]

    @property
    def file_name(self) -> str:
        return file_name(self.device.name)

    def to_toml(self) -> str:
        """The device file, every figure written out."""
        pairs = device_pairs(replace(self.device, calibrated=""))
        measured = {
            "date": toml_string(self.date),
            "reported": toml_string(self.reported),
            "torch": toml_string(self.torch),
            "seconds": in_unit(self.took_s, ONE),
        }
        tables = [("[figures]", pairs), ("[measured]", measured)]
        tables += [("[[fit]]", fit_pairs(fit)) for fit in self.fits]
        blocks = ["\n".join([name, *(f"{key} = {value}" for key, value in t.items())]) for name, t in tables]
        return HEAD + "\n\n".join(blocks) + "\n"

    @classmethod
    def parse(cls, text: str, where: str = "<string>") -> Calibration:
        """Reads a device file's text. Raises ClusterError."""
        return _calibration(parse_calibration(text, where))

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Reads a device file. Raises ClusterError."""
        return _calibration(read_calibration(Path(path)))

    def save(self, path: str | Path | None = None) -> Path:
        """Writes the file, by default to its place among the device files, and returns the path. Raises
        ClusterError."""
        if path is None:
            folder = devices_folder()
            if folder is None:
                raise ClusterError(
                    "there is no folder of device files",
                    expected=f"{VARIABLE} as a folder, or not set",
                    got=f"{VARIABLE}=none",
                    hint="mixmesh calibrate --out FILE",
                )
            path = folder / self.file_name
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, self.to_toml())
        except OSError as error:
            raise ClusterError(
                f"cannot write the device file: {error.strerror}", where=str(path), hint="--out FILE"
            ) from None
        return path


def fit_pairs(fit: Fit) -> dict[str, str]:
    """The keys of a fit's table and their values as TOML."""
    return {key: toml_string(x) if isinstance(x, str) else in_unit(x, ONE) for key, x in asdict(fit).items()}


def _calibration(tables: CalibrationTable) -> Calibration:
    measured = tables.measured
    fits = []
    for table in tables.fit:
        values: dict[str, Any] = {key: si(x, ONE) if isinstance(x, Decimal) else x for key, x in table}
        fits.append(Fit(**values))
    device = replace(device_of(tables.figures), calibrated=measured.date)
    took_s = si(measured.seconds, ONE)
    return Calibration(device, measured.date, measured.reported, measured.torch, took_s, tuple(fits))
