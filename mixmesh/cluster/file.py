"""The TOML form of a cluster: its schema, and errors that point at the user's own key.

``read_tables`` turns text into checked tables; ``mixmesh.cluster`` turns those into values. Numbers stay
exact decimals until the one rounding in the change of units, so a printed cluster reads back as itself.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from ..base.files import merge_mark
from ..errors import ClusterError, unmerged
from .catalogue import CATALOGUE
from .classes import ROWS
from .devices_folder import files, names_meant
from .spelling import MOST, closest, device_hint, is_close, key_hint, meaning, value_hint

T = TypeVar("T", bound=BaseModel)
_FIGURES = ("tflop_per_s", "memory_gib", "memory_gbyte_per_s")


def _problem(expected: str, message: str = "", hint: str = "") -> PydanticCustomError:
    return PydanticCustomError("mixmesh", "problem", {"expected": expected, "message": message, "hint": hint})


def _number(
    accepts: Callable[[Decimal], bool], expected: str, most: Decimal | None = None
) -> BeforeValidator:
    def check(value: Any) -> Decimal:
        if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
            raise _problem(expected)
        number = Decimal(value)
        if not number.is_finite() or not accepts(number):
            raise _problem(expected)
        # the bounds keep a mistyped exponent from becoming an infinite rate
        if number and not -15 <= number.adjusted() <= 15:
            raise _problem(f"{expected}, of 1e-15 to 1e15")
        if most is not None and number > most:
            raise _problem(f"{expected} and at most {most}, in the unit that the key names")
        return number

    return BeforeValidator(check)


Positive = Annotated[Decimal, _number(lambda x: x > 0, "a finite number above 0")]
# no device or link has more: such a number is in bits, bytes or operations, not in billions of them
Amount = Annotated[Decimal, _number(lambda x: x > 0, "a finite number above 0", MOST)]
NotNegative = Annotated[Decimal, _number(lambda x: x >= 0, "a finite number, 0 or more")]
Share = Annotated[Decimal, _number(lambda x: 0 < x <= 1, "a share of one CPU core, above 0 and at most 1")]
Part = Annotated[Decimal, _number(lambda x: 0 < x <= 1, "a share of the peaks, above 0 and at most 1")]
Name = Annotated[str, Field(min_length=1)]
EfficiencyRow = Annotated[
    list[Any], AfterValidator(lambda row: _efficiency_row(row))  # class, dtype, share, ramp in us, backward
]


def _efficiency_row(row: list[Any]) -> list[Any]:
    numbers = [Decimal(x) for x in row[2:] if isinstance(x, int | Decimal) and not isinstance(x, bool)]
    if not 4 <= len(row) <= 5 or len(numbers) != len(row) - 2 or not all(isinstance(x, str) for x in row[:2]):
        raise _problem('rows of a class, a dtype, a share and a ramp in us: ["product", "tf32", 0.7, 5]')
    if tuple(row[:2]) not in ROWS:
        raise _problem(
            "one of " + ", ".join(f"{name} {dtype}" for name, dtype in ROWS),
            hint='efficiency = [["product", "tf32", 0.7, 5]]: class, dtype, share of the peak, ramp in us',
        )
    share, ramp_us, backward = (*numbers, Decimal(1))[:3]
    if not (0 < share <= 2 and 0 <= ramp_us <= 10**6 and 0 < backward <= 100):
        raise _problem("a share above 0 and at most 2, a ramp of 0 us or more, a factor above 0")
    return [*row[:2], share, ramp_us, backward]


class Table(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class DeviceTable(Table):
    device: Name | None = None
    name: Name | None = None
    kind: Literal["gpu", "cpu"] | None = None
    tflop_per_s: Amount | None = None
    half_tflop_per_s: Amount | None = None
    tf32_tflop_per_s: NotNegative | None = None
    supports_bf16: bool | None = None
    memory_gib: Amount | None = None
    memory_gbyte_per_s: Amount | None = None
    cpu_share: Share | None = None
    issue_us: Positive | None = None
    backward_issue_us: Positive | None = None
    sustained: Part | None = None
    efficiency: list[EfficiencyRow] | None = None
    optimizer_ps_per_byte: Positive | None = None
    context_mib: Positive | None = None
    kernels_mib: NotNegative | None = None
    calibrated: Name | None = None
    count: Annotated[int, Field(ge=1, le=1024)] = 1

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"device": value}
        if not isinstance(value, dict):
            raise _problem("the name of a device in the catalogue, or a table")
        device = value.get("device")
        if not isinstance(device, str):
            return value
        names = names_meant(device)
        if len(names) != 1:
            raise _problem(
                "a device of the catalogue: " + ", ".join(names or CATALOGUE),
                f'several devices are called "{device}"' if names else f'unknown device "{device}"',
                device_hint(device, [path.stem for path in files()])
                or f"give its figures instead: {{ name = ..., {' = ..., '.join(_FIGURES)} = ... }}",
            )
        return {**value, "device": names[0]}

    @model_validator(mode="after")
    def _has_figures(self) -> DeviceTable:
        missing = [key for key in _FIGURES if getattr(self, key) is None]
        if self.device is None and self.cpu_share is None and (missing or self.name is None):
            missing = (["name"] if self.name is None else []) + missing
            raise _problem(
                "name, " + ", ".join(_FIGURES),
                "a device without cpu_share needs its figures: missing " + ", ".join(missing),
                'or start from a catalogue device: { device = "V100-16GB", ... }',
            )
        return self


class LinkTable(Table):
    devices: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2)]
    gbit_per_s: Amount
    latency_us: NotNegative | None = None


class MachineTable(Table):
    name: Name | None = None
    devices: Annotated[list[DeviceTable], Field(min_length=1)]
    link_gbit_per_s: Amount | None = None
    link_latency_us: NotNegative | None = None
    links: list[LinkTable] | None = None
    p2p: bool = True
    bridge_gbit_per_s: Amount | None = None
    nic_gbit_per_s: Amount | None = None
    price_per_hour: NotNegative | None = None


class NetworkTable(Table):
    bandwidth_gbit_per_s: Amount
    latency_us: NotNegative = Decimal(50)  # for TCP over one switch
    kind: Literal["tcp", "rdma"] = "tcp"


class ClusterTable(Table):
    name: Name | None = None
    network: NetworkTable | None = None
    machine: Annotated[list[MachineTable], Field(min_length=1)]


def read_tables(text: str, where: str) -> ClusterTable:
    """The checked tables of a cluster file. Raises ``ClusterError``."""
    tables = checked(ClusterTable, text, where)
    _check_together(tables, where)
    return tables


def checked(schema: type[T], text: str, where: str) -> T:
    """The tables of TOML text by a schema; ``where`` names the text in errors. Raises ``ClusterError``."""
    mark = merge_mark(text)
    if mark is not None:
        raise unmerged(
            "the file",
            f"{where}, line {mark[0]}",
            mark[1],
            ClusterError,
            expected="one version of every line",
            hint="git checkout --ours FILE, or --theirs, or edit it",
        )
    try:
        raw = tomllib.loads(text, parse_float=Decimal)
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise _toml_error(text, where, error) from None
    try:
        return schema.model_validate(raw)
    except ValidationError as error:
        raise _schema_error(error, where, schema) from None


def _check_together(tables: ClusterTable, where: str) -> None:
    """Checks conditions that involve several tables of the file."""
    if tables.network is None and len(tables.machine) > 1:
        raise ClusterError(
            "no [network] table, which a cluster of more than one machine needs",
            expected="[network] with bandwidth_gbit_per_s and latency_us",
            got=f"{len(tables.machine)} machines and no network between them",
            where=f"{where}: network",
            hint=("[network]", "bandwidth_gbit_per_s = 10", "latency_us = 30"),
        )
    seen: dict[str, int] = {}
    for index, machine in enumerate(tables.machine):
        name = machine_name(machine, index)
        if name in seen:
            raise ClusterError(
                f'two machines have the name "{name}"',
                expected="a name of its own for every machine",
                got=f'"{name}", also the name of machine[{seen[name]}]',
                where=f"{where}: machine[{index}].name",
                hint=f'name = "{name}-2"',
            )
        seen[name] = index
        _check_links(machine, f"{where}: machine[{index}]")


def _check_links(machine: MachineTable, where: str) -> None:
    """Links join devices that the machine has, and no two devices have two links."""
    count = sum(table.count for table in machine.devices)
    pairs: set[tuple[int, int]] = set()
    for number, link in enumerate(machine.links or ()):
        place = f"{where}.links[{number}].devices"
        absent = [n for n in link.devices if n >= count]
        if absent or len(set(link.devices)) < len(link.devices):
            raise ClusterError(
                "a link joins devices that are not there" if absent else "a link joins a device with itself",
                expected=f"numbers of the machine's devices, 0 to {count - 1}, each once",
                got=str(link.devices),
                where=place,
            )
        mine = {(a, b) for a in link.devices for b in link.devices if a < b}
        if mine & pairs:
            raise ClusterError(
                "two links join the same devices",
                expected="one link between two devices",
                got=f"another one between {' and '.join(map(str, min(mine & pairs)))}",
                where=place,
            )
        pairs |= mine


def machine_name(machine: MachineTable, index: int) -> str:
    return machine.name if machine.name is not None else f"machine{index}"


def _toml_error(text: str, where: str, error: Exception) -> ClusterError:
    place = re.search(r"^(.*?) \(at (?:line (\d+), column (\d+)|end of document)\)$", str(error), re.DOTALL)
    lines = text.splitlines() or [""]
    if place is None:
        return ClusterError(f"not valid TOML: {error}", expected="a TOML file", where=where)
    line = int(place[2]) if place[2] else len(lines)
    column = int(place[3]) if place[3] else len(lines[-1]) + 1
    source = lines[line - 1].strip() if line <= len(lines) else ""
    return ClusterError(
        f"not valid TOML: {place[1]}",
        expected="TOML, for example  bandwidth_gbit_per_s = 10.4",
        got=source or "the end of the file",
        where=f"{where}, line {line}, column {column}",
    )


def _schema_error(error: ValidationError, where: str, schema: type[BaseModel]) -> ClusterError:
    # a mistyped key also leaves the right one missing: report the mistyped one first
    problems = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    first, more = problems[0], len(problems) - 1
    message, expected, hint = _explain(first, schema)
    missing = first["type"] == "missing"
    return ClusterError(
        message + (f" (and {more} more)" if more else ""),
        expected=expected,
        got="nothing" if missing else _show(first["input"]),
        where=f"{where}: {key_path(first['loc'])}",
        hint=hint,
    )


def _explain(problem: ErrorDetails, schema: type[BaseModel]) -> tuple[str, str, str]:
    """The message, what was expected and what to try, for one of pydantic's errors."""
    kind, path, context = problem["type"], key_path(problem["loc"]), problem.get("ctx", {})
    names = [part for part in problem["loc"] if isinstance(part, str)]
    last, owner = names[-1] if names else "", names[-2] if len(names) > 1 else ""
    if kind == "mixmesh":
        hint = context["hint"] or value_hint(last, problem["input"])
        return context["message"] or f"{path} is not usable", context["expected"], hint
    if kind == "extra_forbidden":
        keys = _keys_at(problem["loc"], schema)
        hint = _meant(last, problem["input"], keys, schema)
        return f'unknown key "{last}"', "one of " + ", ".join(keys), hint
    if last == "machine" or (last == "devices" and owner != "links"):
        return _explain_list(path, last, is_list=kind != "list_type")
    known = [_EXPECTED[key] for key in (path, f"{owner}.{last}", last) if key in _EXPECTED]
    if kind == "missing":
        return f"{path} is missing", known[0] if known else "a value", ""
    hint = value_hint(last, problem["input"])
    return f"{path} is not usable", known[0] if known else problem["msg"], hint


def _explain_list(path: str, key: str, *, is_list: bool) -> tuple[str, str, str]:
    """The same for machines, or for the devices of one, that are no list or an empty one."""
    if key == "machine":
        message = "no machines" if is_list else "machine is not a list of tables"
        return message, "at least one [[machine]] table", '[[machine]] with devices = ["V100-16GB"]'
    message = f"{path[:-8]} has no devices" if is_list else f"{path} is not a list"
    return message, "a list of at least one device", 'devices = ["V100-16GB"]'


def _meant(key: str, value: Any, keys: tuple[str, ...], schema: type[BaseModel]) -> str:
    """The hint for an unknown key: the key of this table that is spelt almost like it, or that takes the same
    quantity in another unit; or the table that this key belongs to."""
    hint = key_hint(key, value, keys)
    if hint:
        return hint
    near = closest(key, keys)
    place = next((place for table, place in _PLACES.items() if key in table.model_fields), "")
    if place and schema is ClusterTable and not (near and is_close(key, near[0])):
        return f"{key} is a key of {place}"
    return meaning(near[0], value) if near else ""


_PLACES: dict[type[BaseModel], str] = {
    NetworkTable: "[network]",
    MachineTable: "[[machine]]",
    DeviceTable: "a table in devices: { device = ..., ... }",
    LinkTable: "a table in links: { devices = [0, 1], ... }",
}

_EXPECTED = {
    "links.devices": "numbers of two or more of the machine's devices: [0, 1]",
    "links.gbit_per_s": "a finite number above 0",
    "efficiency": 'a list of rows: [["product", "tf32", 0.7, 5]]',
    "calibrated": "a date, as mixmesh detect writes it",
    "bandwidth_gbit_per_s": "a finite number above 0",
    "latency_us": "a finite number, 0 or more",
    "name": "a string that is not empty",
    "device": "the name of a device in the catalogue",
    "network": "a [network] table",
    "network.kind": '"tcp" or "rdma"',
    "kind": '"gpu" or "cpu"',
    "links": "a list of { devices = [0, 1], gbit_per_s = 400 }",
    "p2p": "true or false",
    "supports_bf16": "true or false",
    "count": "a whole number from 1 to 1024",
    "figures": "a [figures] table, as mixmesh calibrate writes it",
    "measured": "a [measured] table, as mixmesh calibrate writes it",
    "fit": "a list of [[fit]] tables",
}


def _keys_at(loc: tuple[int | str, ...], schema: type[BaseModel]) -> tuple[str, ...]:
    """The keys that could stand in the place of a key: those of the schema, or of the tables that its fields
    hold."""
    table = schema
    for name in (part for part in loc[:-1] if isinstance(part, str)):
        table = _table_within(table.model_fields[name].annotation)
    return tuple(table.model_fields)


def _table_within(annotation: Any) -> type[BaseModel]:
    """The table in an annotation such as ``Annotated[list[Table], ...] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(_table_within(a) for a in get_args(annotation) if _holds_table(a))


def _holds_table(annotation: Any) -> bool:
    is_table = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return is_table or any(map(_holds_table, get_args(annotation)))


def key_path(loc: tuple[int | str, ...]) -> str:
    """Formats a key for people: ``("machine", 1, "name")`` as ``machine[1].name``."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or "the file"


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        shown = f'"{value}"'
    elif isinstance(value, dict):
        shown = "{ " + ", ".join(f"{k} = {_show(v)}" for k, v in value.items()) + " }"
    elif isinstance(value, list):
        shown = "[" + ", ".join(map(_show, value)) + "]"
    else:
        shown = str(value)
    return shown if len(shown) <= 100 else shown[:97] + "..."
