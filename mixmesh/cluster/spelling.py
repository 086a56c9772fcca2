"""Hints for cluster files with other keys, units and names of devices than ours."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable
from decimal import Decimal
from typing import Any

from .catalogue import CATALOGUE, NUMBER_OF_CARDS, rows_ending_in, rows_named

# endings of keys in other units than ours: our ending, and how many of our units one is. GB of memory are GiB
UNITS_OF_KEYS = {
    unit: (ours, Decimal(factor))
    for unit, ours, factor in (
        ("_mbit_per_s", "_gbit_per_s", "0.001"),
        ("_mbps", "_gbit_per_s", "0.001"),
        ("_gbps", "_gbit_per_s", "1"),
        ("_gb_per_s", "_gbyte_per_s", "1"),
        ("_gbyte_per_s", "_gbit_per_s", "8"),
        ("_mbyte_per_s", "_gbit_per_s", "0.008"),
        ("_tb_per_s", "_gbyte_per_s", "1000"),
        ("_tbyte_per_s", "_gbyte_per_s", "1000"),
        ("_gb", "_gib", "1"),
        ("_mb", "_gib", "0.0009765625"),
        ("_mib", "_gib", "0.0009765625"),
        ("_ms", "_us", "1000"),
        ("_ns", "_us", "0.001"),
        ("_tflops", "_tflop_per_s", "1"),
        ("_gflop_per_s", "_tflop_per_s", "0.001"),
    )
}
# by the ending of our key: units that stand behind a number, and how many of our units one is. A small b is a
# bit in "Gb/s" and a capital one a byte in "GB/s"
UNITS_OF_VALUES = {
    "gbit_per_s": {
        "Gbit/s": "1", "Gbps": "1", "Gb/s": "1", "Gbit": "1", "Gbe": "1", "Tbit/s": "1000", "Tbps": "1000",
        "Mbit/s": "0.001", "Mbps": "0.001", "Mb/s": "0.001", "Mbit": "0.001",
        "GB/s": "8", "GBps": "8", "MB/s": "0.008", "MBps": "0.008",
    },
    "gib": {"GiB": "1", "GB": "1", "G": "1", "MiB": "0.0009765625", "MB": "0.0009765625"},
    "mib": {"MiB": "1", "MB": "1", "GiB": "1024", "GB": "1024"},
    "us": {"us": "1", "µs": "1", "μs": "1", "ms": "1000", "ns": "0.001"},
    "tflop_per_s": {"TFLOPS": "1", "TFLOP/s": "1", "GFLOPS": "0.001", "GFLOP/s": "0.001"},
    "gbyte_per_s": {"GB/s": "1", "GBps": "1", "TB/s": "1000", "TBps": "1000"},
    "share": {"%": "0.01"},
    "count": {"x": "1"},
}  # fmt: skip
MOST = Decimal(10**6)  # in the units that our keys of rates and memory name
BASE_UNITS = {"gbit_per_s": 10**9, "gbyte_per_s": 10**9, "tflop_per_s": 10**12, "gib": 2**30}
ALIASES = {
    "tflops": ("tflop_per_s",),
    "fp32_tflops": ("tflop_per_s",),
    "fp32_tflop_per_s": ("tflop_per_s",),
    "fp16_tflops": ("half_tflop_per_s",),
    "fp16_tflop_per_s": ("half_tflop_per_s",),
    "bf16_tflops": ("half_tflop_per_s",),
    "bf16_tflop_per_s": ("half_tflop_per_s",),
    "bf16": ("supports_bf16",),
    "gpu": ("device",),
    "gpus": ("devices",),
    "card": ("device",),
    "cards": ("devices",),
    "model": ("device",),
    "type": ("device",),
    "vram": ("memory_gib",),
    "vram_gb": ("memory_gib",),
    "vram_gib": ("memory_gib",),
    "num": ("count",),
    "number": ("count",),
    "node": ("machine",),
    "nodes": ("machine",),
    "host": ("name", "machine"),
    "hosts": ("machine",),
    "hostname": ("name",),
    "server": ("machine",),
    "servers": ("machine",),
}
# other words for the two kinds of networks
KINDS = {"infiniband": "rdma", "ib": "rdma", "roce": "rdma", "ethernet": "tcp", "tcp/ip": "tcp"}
QUANTITY = re.compile(r"([0-9][0-9_]*(?:[.,][0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*(\D*)")


def closest(word: str, words: Iterable[str], num: int = 1) -> list[str]:
    """The ``num`` closest of ``words``: those that begin with ``word``, then those of similar letters."""
    lower = {w.lower(): w for w in words}
    near = [w for w in lower if w.startswith(word.lower())]
    near += difflib.get_close_matches(word.lower(), lower, n=num, cutoff=0.5)
    return [lower[w] for w in dict.fromkeys(near)][:num]


def is_close(key: str, other: str) -> bool:
    """Whether one key is part of the other, or is spelt almost like it."""
    is_part = other.startswith(key) or key.endswith(other)
    return is_part or difflib.SequenceMatcher(None, key, other).ratio() >= 0.8


def key_hint(key: str, value: Any, keys: Collection[str]) -> str:
    """The hint for an unknown key that is one of ``keys`` in another unit, or by another name that people
    use; empty for other keys."""
    written = f"_{key.lower()}"  # a key may be a unit alone, as the gbit_per_s of a link
    for unit, (ours, factor) in UNITS_OF_KEYS.items():
        known = (written.removesuffix(unit) + ours)[1:]
        if written.endswith(unit) and known in keys:
            is_number = isinstance(value, int | Decimal) and not isinstance(value, bool)
            return f"did you mean {known}" + (f" = {_plain(value * factor)}?" if is_number else "?")
    meant = next((name for name in ALIASES.get(key.lower(), ()) if name in keys), "")
    return meaning(meant, value) if meant else ""


def meaning(key: str, value: Any) -> str:
    """The question whether ``key`` was meant, with the number if ``value`` is text that has a unit."""
    number = number_in(key, value) if isinstance(value, str) else ""
    return f"did you mean {key}{f' = {number}' if number else ''}?"


def value_hint(key: str, value: Any) -> str:
    """The line to write in place of text that stands where a number, a truth value or a known word belongs,
    or of a number in bits, bytes or operations; empty if it is not clear what is meant."""
    if isinstance(value, int | Decimal):
        base = next((base for end, base in BASE_UNITS.items() if key.endswith(end)), 0)
        is_plain = base and Decimal(value).is_finite() and MOST < value < MOST * base
        return f"{key} = {_plain(round(Decimal(value) / base, 3))}" if is_plain else ""
    if not isinstance(value, str):
        return ""
    if key == "kind" and value.lower() in (*KINDS, *KINDS.values()):
        return f'kind = "{KINDS.get(value.lower(), value.lower())}"'
    if value.lower() in ("true", "false"):
        return f"{key} = {value.lower()}"
    number = number_in(key, value)
    return f"{key} = {number}" if number else ""


def number_in(key: str, text: str) -> str:
    """The number of ``text`` in the unit of ``key``: "10" for ``bandwidth_gbit_per_s`` and "10 Gbit/s". Empty
    if it has no number, or a unit that is not known."""
    units = next((units for end, units in UNITS_OF_VALUES.items() if key.endswith(end)), {})
    match = QUANTITY.fullmatch(text.strip())
    if match is None:
        return ""
    number, unit = Decimal(match[1].replace(",", ".").replace("_", "")), match[2].strip()
    if not unit:
        return _plain(number)
    exact = [factor for name, factor in units.items() if name == unit]
    alike = {factor for name, factor in units.items() if name.lower() == unit.lower()}
    factors = exact or sorted(alike)
    return _plain(number * Decimal(factors[0])) if len(factors) == 1 else ""


def _plain(number: int | Decimal) -> str:
    return f"{Decimal(number).normalize():f}"


def devices_like(name: str, calibrated: Iterable[str] = ()) -> list[str]:
    """The full names of devices that ``name`` may mean, or that are spelt almost like it. ``calibrated`` are
    names of device files."""
    bare = " ".join(word for word in name.split() if not NUMBER_OF_CARDS.fullmatch(word.upper()))
    meant = [row.name for row in rows_named(bare) or rows_ending_in(bare)]
    return meant or closest(bare, [*CATALOGUE, *calibrated], num=3)


def device_hint(name: str, calibrated: Iterable[str]) -> str:
    """The hint for the name of a device that is not known, or is that of several; empty if nothing is like
    it."""
    near = devices_like(name, calibrated)
    counts = [match for word in name.upper().split() if (match := NUMBER_OF_CARDS.fullmatch(word))]
    if len(counts) == 1 and len(near) == 1:
        return f'{{ device = "{near[0]}", count = {counts[0][1] or counts[0][2]} }}'
    return "did you mean " + " or ".join(f'"{each}"' for each in near) + "?" if near else ""
