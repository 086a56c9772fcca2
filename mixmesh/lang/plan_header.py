"""The TOML header of a plan file: a table of its keys and of the values that each allows.

Lists with one entry per rank are checked once the program, and with it the number of ranks, has been read.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import PlanError
from .ir.bounds import MAX_ELEMENTS, MAX_INTEGER, MAX_MICRO_STEPS
from .plan_devices import is_row

# types of devices that PyTorch casts on and has collectives for; "cuda" stands for ROCm too
DEVICE_TYPES = ("cpu", "cuda", "xpu")
SHOWN = 60  # characters of a value that an error shows
AGAIN = "mixmesh plan JOB --cluster C.toml --out X.plan"
UNDO = (f"undo the edit, or plan again: {AGAIN}",)


class Row(NamedTuple):
    """The values that a key allows: a test, its description in words, and whether the key may be absent."""

    accepts: Callable[[Any], bool]
    expected: str
    optional: bool = False


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INTEGER


def _is_seconds(value: Any) -> bool:
    """Whether a value is a number of seconds; a candidate that was not simulated has infinity."""
    return type(value) in (int, float) and not math.isnan(value) and 0 <= value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MAX_INTEGER


def _is_list(value: Any, accepts: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(accepts, value))


def _is_micro_batch(value: Any) -> bool:
    if not _is_list(value, _is_count) or len(value) != 3:
        return False
    samples, steps, last = value
    return steps <= MAX_MICRO_STEPS and last <= samples <= MAX_ELEMENTS


def _is_argument(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_text, value))


def _is_candidate(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and _is_text(value.get("planner"))
        and _is_flag(value.get("feasible"))
        and _is_seconds(value.get("predicted_step_s"))
    )


TEXT = Row(_is_text, "a string")
FLAG = Row(_is_flag, "true or false")
COUNT = Row(_is_count, "a whole number, 0 or more")
SECONDS = Row(_is_seconds, "seconds, 0 or more")
ROWS: dict[str, Row] = {
    "planner": TEXT,
    "predicted_step_s": SECONDS,
    "cluster_fingerprint": TEXT,
    "cluster_name": TEXT,
    "graph_fingerprint": TEXT,
    "output_has_loss": FLAG,
    "feasible": FLAG,
    "planning_s": SECONDS,
    "states_expanded": COUNT,
    "cost_source": TEXT,
    "predicted_peak_memory_bytes": Row(lambda v: _is_list(v, _is_count), "a list of bytes, one per rank"),
    "usable_bytes": Row(lambda v: _is_list(v, _is_count), "a list of bytes, one per rank", optional=True),
    "gap": Row(_is_number, "a number", optional=True),
    "bound_s": SECONDS._replace(optional=True),
    "ideal_s": SECONDS._replace(optional=True),
    "measured_step_s": SECONDS._replace(optional=True),
    "timings_s": Row(
        lambda v: isinstance(v, dict) and all(map(_is_seconds, v.values())),
        "a table of seconds",
        optional=True,
    ),
    "micro_batches": Row(
        lambda v: _is_list(v, _is_micro_batch),
        f"[samples, steps, samples of the last step] per rank, at most {MAX_MICRO_STEPS} steps",
        optional=True,
    ),
    "order": TEXT._replace(optional=True),
    "arguments": Row(lambda v: _is_list(v, _is_argument), "pairs of a name and a text", optional=True),
    "devices": Row(
        lambda v: _is_list(v, is_row),
        "[machine, machine like it, device, kind, bytes] per rank",
        optional=True,
    ),
    "returns": Row(lambda v: _is_list(v, _is_text), "a list of names", optional=True),
    "loss_name": TEXT._replace(optional=True),
    "returns_tuple": FLAG._replace(optional=True),
    "left": Row(lambda v: _is_list(v, _is_text), "a list of names", optional=True),
    "autocast": Row(
        lambda v: _is_argument(v) and v[0] in DEVICE_TYPES and v[1] in ("bf16", "f16"),
        'a type of device and a dtype: ["cuda", "bf16"]',
        optional=True,
    ),
    "tf32": FLAG._replace(optional=True),
    "optimizer_states": Row(
        lambda v: _is_list(v, _is_number) and len(v) in (2, 3) and min(v) >= 0 and v[2:] in ([], [1], [2]),
        "two counts of tensors, and 1 or 2 if gradients of earlier passes count",
        optional=True,
    ),
    "batch_norm": TEXT._replace(optional=True),
    "program_digest": TEXT._replace(optional=True),
    "warnings": Row(lambda v: _is_list(v, _is_text), "a list of strings", optional=True),
    "candidates": Row(
        lambda v: _is_list(v, _is_candidate),
        "tables of planner, feasible and predicted_step_s",
        optional=True,
    ),
}  # fmt: skip
FORMAT_KEY = "mixmesh_plan"
PER_RANK = ("predicted_peak_memory_bytes", "usable_bytes", "micro_batches", "devices")


def read_header(text: str, where: str, file_format: int) -> dict[str, Any]:
    """Reads a header and checks its values. Raises PlanError with the line and the key."""
    try:
        header = tomllib.loads(text)
    except (ValueError, RecursionError) as err:
        raise _no_toml(text, where, err) from None
    if header.get(FORMAT_KEY) != file_format:
        got = f"{FORMAT_KEY} = {_shown(header[FORMAT_KEY])}" if FORMAT_KEY in header else "nothing"
        raise PlanError(
            "this plan was written in another format",
            where=f"{where}{_line_of(text, FORMAT_KEY)}",
            expected=f"{FORMAT_KEY} = {file_format}",
            got=got,
            hint=AGAIN,
        )
    unknown = next((key for key in header if key not in ROWS and key != FORMAT_KEY), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, ROWS, 1)
        raise PlanError(
            f"unknown key in the plan's header: {unknown!r}",
            where=f"{where}{_line_of(text, unknown)}",
            expected="one of " + ", ".join(ROWS),
            got=unknown,
            hint=(f"did you mean {near[0]}?",) if near else UNDO,
        )
    for key, row in ROWS.items():
        if key not in header and row.optional:
            continue
        if key not in header or not row.accepts(header[key]):
            raise _refusal(text, where, key, row.expected, header.get(key))
    return header


def check_per_rank(header: dict[str, Any], text: str, where: str, world_size: int) -> None:
    """Raises PlanError for a list without one entry per rank. All but ``micro_batches`` may be empty, which
    means that the values are unknown."""
    for key in PER_RANK:
        entries = header.get(key)
        least = world_size if key == "micro_batches" else 0
        if entries is not None and len(entries) not in (world_size, least):
            raise _refusal(text, where, key, f"{world_size} entries, one per rank", f"{len(entries)} entries")


def _refusal(text: str, where: str, key: str, expected: str, value: Any) -> PlanError:
    return PlanError(
        f"missing or invalid field in the plan's header: {key!r}",
        where=f"{where}{_line_of(text, key)}",
        expected=f"{key} = {expected}",
        got="nothing" if value is None else _shown(value),
        hint=UNDO,
    )


def _line_of(text: str, key: str) -> str:
    """The line of a key, as places name it; empty where the header does not have it."""
    match = re.search(rf"^\s*(\[\[)?{re.escape(key)}\b", text, re.MULTILINE)
    return "" if match is None else f":{text.count(chr(10), 0, match.end()) + 1}"


def _no_toml(text: str, where: str, error: Exception) -> PlanError:
    reason, _, place = (str(error).partition("\n")[0] or type(error).__name__).partition(" (at ")
    at_line = re.match(r"line (\d+)", place)
    lines = text.split("\n")
    got = lines[int(at_line[1]) - 1] if at_line and int(at_line[1]) <= len(lines) else ""
    return PlanError(
        f"the plan's header cannot be read: {reason}",
        where=f"{where}:{at_line[1]}" if at_line else where,
        expected='TOML, for example  planner = "hap"',
        got=_shown(got),
        hint=UNDO,
    )


def _shown(value: Any) -> str:
    try:
        text = str(value)
    except ValueError:  # a number with thousands of digits
        text = "a number of too many digits"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
