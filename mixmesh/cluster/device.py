"""One device of a cluster: its figures, taken from a table of the cluster file and from the catalogue."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

from ..base.units import GBYTE, MIB, MICRO, ONE, PICO, TFLOP, in_gib, in_unit, si, si_bytes
from ..errors import ClusterError
from .calibration import calibration_of, with_calibration
from .catalogue import CATALOGUE, CatalogueRow
from .file import DeviceTable
from .toml import efficiency_toml, toml_string

# One core of a current server CPU with AVX2, as a matrix product in PyTorch uses it.
CPU_CORETFLOP_PER_S = Decimal("0.05")
CPU_CORE_MEMORYGBYTE_PER_S = Decimal(10)
CPU_DEVICE_MEMORY_GIB = Decimal(2)

HEADROOM = 0.05  # share of a device's memory that a plan leaves free


@dataclass(frozen=True)
class Device:
    """One accelerator. Devices of equal ``name`` are of one type: a measurement of one holds for all.

    ``flop_per_s`` is the fp32 peak without TF32, ``half_flop_per_s`` the fp16/bf16 peak, ``tf32_flop_per_s``
    that of fp32 on tensor cores, 0 without them. ``cpu_share`` is set on devices that the testbed emulates;
    ``kind`` says where the computing happens. ``issue_s`` is the host's time to issue an operator, None if
    unknown; ``sustained`` the share of the arithmetic peaks that its power limit allows under load.
    ``efficiency`` has rows that replace those of ``mixmesh.cost.efficiency`` for a card with its own: class,
    dtype, share of the peak, ramp in seconds, factor on the usual backward pass.

    ``calibrated`` is the date on which ``mixmesh calibrate`` measured the card, empty without. Only a
    calibration gives ``backward_issue_s`` (the host's time to issue a kernel of the backward pass),
    ``optimizer_s_per_byte`` (of the parameters), ``context_bytes`` (of the card's memory held by a process
    before it computes) and ``kernel_bytes`` (added by computing).
    """

    name: str
    flop_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    cpu_share: float | None = None
    kind: Literal["gpu", "cpu"] = "gpu"
    half_flop_per_s: float = 0.0  # 0: as flop_per_s
    supports_bf16: bool = False
    tf32_flop_per_s: float = 0.0
    issue_s: float | None = None
    sustained: float = 1.0
    efficiency: tuple[tuple[str, str, float, float, float], ...] = ()
    backward_issue_s: float | None = None
    optimizer_s_per_byte: float | None = None
    context_bytes: int | None = None
    kernel_bytes: int | None = None
    calibrated: str = ""

    def __post_init__(self) -> None:
        if not self.half_flop_per_s:
            object.__setattr__(self, "half_flop_per_s", self.flop_per_s)
        rates = ("flop_per_s", "half_flop_per_s", "memory_bytes", "memory_bytes_per_s")
        require_positive(self, *rates, "cpu_share", "sustained")
        if self.cpu_share is not None and self.cpu_share > 1:
            raise ClusterError("cpu_share is above 1", expected="at most one core", got=str(self.cpu_share))


def device_of(table: DeviceTable) -> Device:
    """The device of a table. Missing values come from its calibration, or else from its row of the
    catalogue."""
    return plain_device_of(with_calibration(table))


def catalogue_device(name: str) -> Device:
    """A card with the figures of the catalogue, even if it was calibrated."""
    return plain_device_of(DeviceTable(device=name))


def plain_device_of(table: DeviceTable) -> Device:
    """The device of a table whose ``device`` is a row of the catalogue, if it names one."""
    row = CATALOGUE[table.device] if table.device is not None else None
    share = table.cpu_share if table.cpu_share is not None else Decimal(1)
    tflop_per_s = first(table.tflop_per_s, row and row.tflop_per_s, CPU_CORETFLOP_PER_S * share)
    half = first(
        table.half_tflop_per_s, row.half_tflop_per_s if row and table.tflop_per_s is None else tflop_per_s
    )
    memory_gib = first(table.memory_gib, row and row.memory_gib, CPU_DEVICE_MEMORY_GIB)
    memory_gbyte_per_s = first(
        table.memory_gbyte_per_s, row and row.memory_gbyte_per_s, CPU_CORE_MEMORYGBYTE_PER_S * share
    )
    kind = first(table.kind, "gpu" if table.cpu_share is None else "cpu")
    # a card's row also gives figures other than rates; those do not apply if the card is emulated or has its
    # own rates
    card = row if kind == "gpu" and table.tflop_per_s is None else None
    return Device(
        name=first(table.name, _default_name(row, table.cpu_share)),
        flop_per_s=si(tflop_per_s, TFLOP),
        memory_bytes=si_bytes(memory_gib),
        memory_bytes_per_s=si(memory_gbyte_per_s, GBYTE),
        cpu_share=None if table.cpu_share is None else float(table.cpu_share),
        kind=kind,
        half_flop_per_s=si(half, TFLOP),
        supports_bf16=first(table.supports_bf16, row is not None and row.supports_bf16),
        tf32_flop_per_s=si(first(table.tf32_tflop_per_s, card.tf32_tflop_per_s if card else 0), TFLOP),
        sustained=float(first(table.sustained, card.sustained if card else 1)),
        **measured_fields(table),
    )


def _default_name(row: CatalogueRow | None, cpu_share: Decimal | None) -> str:
    name = row.name if row else "cpu"
    return name if cpu_share is None else f"{name}@{cpu_share}"


def measured_fields(table: DeviceTable) -> dict[str, Any]:
    """The fields of a device that no datasheet has, from a table."""
    efficiency = tuple(
        (name, dtype, float(share), si(ramp_us, MICRO), float(backward))
        for name, dtype, share, ramp_us, backward in table.efficiency or ()
    )
    return {
        "issue_s": _seconds(table.issue_us, MICRO),
        "efficiency": efficiency,
        "backward_issue_s": _seconds(table.backward_issue_us, MICRO),
        "optimizer_s_per_byte": _seconds(table.optimizer_ps_per_byte, PICO),
        "context_bytes": _mib(table.context_mib),
        "kernel_bytes": _mib(table.kernels_mib),
        "calibrated": table.calibrated or "",
    }


def calibrated_device(name: str) -> Device | None:
    """The device of this name as calibrated on this machine; None if it was not. Raises ClusterError."""
    table = calibration_of(name)
    return None if table is None else device_of(table)


def _seconds(number: Decimal | None, unit: Fraction) -> float | None:
    return None if number is None else si(number, unit)


def _mib(number: Decimal | None) -> int | None:
    return None if number is None else round(si(number, MIB))


def device_toml(device: Device) -> str:
    """The table of a device in a cluster file, every figure written out."""
    return "{ " + ", ".join(f"{key} = {value}" for key, value in device_pairs(device).items()) + " }"


def device_pairs(device: Device) -> dict[str, str]:
    """The keys of a device's table and their values as TOML."""
    pairs = {
        "name": toml_string(device.name),
        "kind": toml_string(device.kind),
        "tflop_per_s": in_unit(device.flop_per_s, TFLOP),
        "half_tflop_per_s": in_unit(device.half_flop_per_s, TFLOP),
        "supports_bf16": json.dumps(device.supports_bf16),
        "memory_gib": in_gib(device.memory_bytes),
        "memory_gbyte_per_s": in_unit(device.memory_bytes_per_s, GBYTE),
    }
    if device.cpu_share is not None:
        pairs["cpu_share"] = in_unit(device.cpu_share, ONE)
    if device.tf32_flop_per_s:
        pairs["tf32_tflop_per_s"] = in_unit(device.tf32_flop_per_s, TFLOP)
    if device.issue_s is not None:
        pairs["issue_us"] = in_unit(device.issue_s, MICRO)
    if device.sustained != 1.0:
        pairs["sustained"] = in_unit(device.sustained, ONE)
    if device.efficiency:
        pairs["efficiency"] = f"[{', '.join(map(efficiency_toml, device.efficiency))}]"
    if device.backward_issue_s is not None:
        pairs["backward_issue_us"] = in_unit(device.backward_issue_s, MICRO)
    if device.optimizer_s_per_byte is not None:
        pairs["optimizer_ps_per_byte"] = in_unit(device.optimizer_s_per_byte, PICO)
    if device.context_bytes is not None:
        pairs["context_mib"] = in_unit(device.context_bytes, MIB)
    if device.kernel_bytes is not None:
        pairs["kernels_mib"] = in_unit(device.kernel_bytes, MIB)
    if device.calibrated:
        pairs["calibrated"] = toml_string(device.calibrated)
    return pairs


def first(*values):
    """The first value that is not None."""
    return next(value for value in values if value is not None)


def require_positive(owner: Any, *names: str) -> None:
    """Raises ClusterError for a field of ``owner`` that is not finite and above 0; None is allowed."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ClusterError(
                f'{name} of {type(owner).__name__.lower()} "{owner.name}" is not usable',
                expected="a finite number above 0",
                got=str(value),
            )
