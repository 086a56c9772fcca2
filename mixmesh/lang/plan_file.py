"""A plan: one program with everything that belongs to it, as one value and one text file.

The file is a TOML header and the program text. People can read, compare and edit it; before a plan runs, it
is checked against the cluster and the model.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from ..base.files import merge_mark, read_text, write_text
from ..errors import PlanError, unmerged, unreadable, unwritable
from .ir import (
    Program,
    Returned,
    Samples,
    batch_norm_of,
    owned_type,
    parse_program,
    print_program,
    samples_of,
    stage_of,
    transfers_of,
)
from .ir.bounds import MAX_TEXT_BYTES
from .ir.local_norms import LOCAL
from .optimizer_states import ADAM, Earlier, OptimizerStates
from .plan_devices import PlannedDevice, rows_of
from .plan_header import AGAIN, check_per_rank, read_header

T = TypeVar("T")

FORMAT = 1
PIPELINE = "1f1b"  # the only order of a pipeline's micro-batches


@dataclass(frozen=True)
class PassResult:
    """The result of one pass of planning: the seconds that it took, and the seconds of the plan's step that
    it saved."""

    name: str
    about: str
    spent_s: float
    gained_s: float


@dataclass(frozen=True)
class Candidate:
    """One plan that was considered, with the simulator's result."""

    planner: str
    feasible: bool
    predicted_step_s: float


@dataclass(frozen=True)
class MicroBatch:
    """How one rank splits its share of the batch into micro-batches: ``steps - 1`` of ``micro_batch``
    samples, then one of ``last``. All three are 0 for a rank without samples."""

    micro_batch: int
    steps: int
    last: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The samples of every micro-batch."""
        return (self.micro_batch,) * (self.steps - 1) + (self.last,) if self.steps else ()


@dataclass(frozen=True)
class Plan:
    """A program with its predicted cost and its origin.

    - ``predicted_peak_memory_bytes``: one entry per rank.
    - ``cluster_fingerprint``, ``graph_fingerprint``: the devices and the model that the plan was made for.
    - ``timings_s``: seconds of each phase of planning.
    - ``gap``: the most by which the program may cost more than the cheapest one, as a share, by the search's
      own costs; None if that is unknown.
    - ``bound_s``: seconds that no plan for the job on these devices can beat; None if they are unknown.
    - ``ideal_s``: seconds of all devices computing all the time, as the cost model estimates them.
    - ``micro_batches``: per rank, how it accumulates gradients within a step; None if every rank takes its
      share at once. A chain of stages that accumulates is a pipeline: its ``order`` says so.
    - ``measured_step_s``: measured in a trial by ``mixmesh tune``; None without one.
    - ``arguments``: the arguments of the model's call by name, each "tensor" or the text of a constant; None
      if they are unknown.
    - ``returned``: what the model returns, if that is not the loss itself.
    - ``left``: attributes of the model's modules where its call leaves tensors, which the program does not.
    - ``devices``: the planned device of each rank; None if they are unknown, and then no start compares them.
    - ``usable_bytes``: per rank, the memory that the plan may use, also with batches of other shapes; empty
      if it is unknown.
    - ``autocast``: the type of device and the dtype of the autocast context around the model's call, or None.
    - ``optimizer_states``: the tensors that were counted for the job's optimizer, and for gradients of
      earlier passes.
    - ``tf32``: matrix products of float32 may run in TF32, and costs and bounds count on it.
    - ``edited``: the program comes from a file and differs from what mixmesh wrote, so that its types may not
      be those of PyTorch.
    """

    program: Program
    planner: str
    predicted_step_s: float
    predicted_peak_memory_bytes: tuple[int, ...]
    cluster_fingerprint: str
    cluster_name: str = ""
    graph_fingerprint: str = ""
    output_has_loss: bool = False
    feasible: bool = True
    planning_s: float = 0.0
    states_expanded: int = 0
    gap: float | None = None
    bound_s: float | None = None
    ideal_s: float | None = None
    timings_s: dict[str, float] = field(default_factory=dict)
    cost_source: str = ""
    candidates: tuple[Candidate, ...] = ()
    warnings: tuple[str, ...] = ()
    micro_batches: tuple[MicroBatch, ...] | None = None
    measured_step_s: float | None = None
    arguments: tuple[tuple[str, str], ...] | None = None
    devices: tuple[PlannedDevice, ...] | None = None
    returned: Returned = Returned()
    usable_bytes: tuple[int, ...] = ()
    autocast: tuple[str, str] | None = None
    tf32: bool = False
    optimizer_states: OptimizerStates = ADAM
    left: tuple[str, ...] = ()
    edited: bool = field(default=False, compare=False)
    notes: dict[int, str] = field(default_factory=dict, compare=False, repr=False)
    passes: tuple[PassResult, ...] = field(default=(), compare=False, repr=False)  # known only for a new plan
    text: str = field(default="", compare=False, repr=False)  # the whole file, if the plan was read from one

    @property
    def is_bound_measured(self) -> bool:
        """Whether ``bound_s`` comes from a profile of all devices, rather than from their peak figures, which
        no kernel quite reaches."""
        return is_measured(self.cost_source)

    def __str__(self) -> str:
        program = print_program(self.program, self.notes)
        return _header(self, digest(program)) + "\n" + program

    @property
    def order(self) -> str | None:
        """``PIPELINE`` for a plan whose stages run micro-batches in that order, else None."""
        if not accumulates(self.micro_batches) or not any(transfers_of(self.program)):
            return None
        return PIPELINE

    @property
    def batch_norm(self) -> str:
        """The samples whose statistics the program's batch norms use: "exact" for the whole batch, "local"
        for each rank's own samples."""
        return batch_norm_of(self.program)

    def save(self, path: str | Path) -> None:
        """Writes the plan completely or not at all. Raises PlanError if it cannot be written."""
        try:
            write_text(path, str(self))
        except OSError as err:
            raise unwritable("the plan", path, err, PlanError) from None

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan. Raises PlanError or ParseError with the line that is wrong."""
        try:
            text = read_text(path, MAX_TEXT_BYTES)
        except (OSError, ValueError) as err:
            raise unreadable("the plan", path, err, PlanError, hint=AGAIN) from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, where: str = "<plan>") -> Plan:
        mark = merge_mark(text)
        if mark is not None:
            raise unmerged(
                "the plan",
                f"{where}:{mark[0]}",
                mark[1],
                PlanError,
                expected="one program, and one header that belongs to it",
                hint=("git checkout --ours FILE, or --theirs", f"or plan again: {AGAIN}"),
            )
        lines = text.split("\n")
        start = next((n for n, line in enumerate(lines) if line.startswith("program ")), None)
        if start is None:
            raise PlanError(
                "this is not a plan",
                where=where,
                expected="a header and a line that begins with 'program'",
                hint=AGAIN,
            )
        above, below = "\n".join(lines[:start]), "\n".join(lines[start:])
        header = read_header(above, where, FORMAT)
        # blank lines, so that line numbers are those of the file
        program = parse_program("\n" * start + below, where)
        check_per_rank(header, above, where, program.world_size)
        edited = header.get("program_digest") != digest(below)
        return replace(_from_header(header, program, where, edited=edited), text=text)


# keys that every header has, named as the fields of a plan
_KEYS = (
    "planner", "predicted_step_s", "cluster_fingerprint", "cluster_name", "graph_fingerprint",
    "output_has_loss", "feasible", "planning_s", "states_expanded", "cost_source",
)  # fmt: skip


def _header(plan: Plan, program_digest: str) -> str:
    lines = [f"mixmesh_plan = {FORMAT}"]
    lines += [f"{key} = {_toml(getattr(plan, key))}" for key in _KEYS]
    lines.append(f"predicted_peak_memory_bytes = {_toml(plan.predicted_peak_memory_bytes)}")
    for key, value, comment in _optional_values(plan, program_digest):
        if value is not None:
            lines.append(f"{key} = {_toml(value)}" + (f"  # {comment}" if comment else ""))
    for c in plan.candidates:
        lines += ["[[candidates]]", f"planner = {_toml(c.planner)}", f"feasible = {_toml(c.feasible)}"]
        lines.append(f"predicted_step_s = {_toml(c.predicted_step_s)}")
    return "\n".join(lines) + "\n"


def _optional_values(plan: Plan, program_digest: str) -> tuple[tuple[str, object, str], ...]:
    """The keys that only some headers have, each with its value (None: left out) and a comment."""
    rows = (
        None if plan.micro_batches is None else [[m.micro_batch, m.steps, m.last] for m in plan.micro_batches]
    )
    returned = plan.returned if plan.returned.names else None
    basis = "as measured" if plan.is_bound_measured else "at the peaks of the devices' figures"
    return (
        ("usable_bytes", plan.usable_bytes or None, "of memory, per rank"),
        ("gap", plan.gap, ""),
        ("bound_s", plan.bound_s, f"no plan is faster, {basis}"),
        ("ideal_s", plan.ideal_s, "all devices computing all the time, as estimated"),
        ("measured_step_s", plan.measured_step_s, "in a trial on the cluster"),
        ("timings_s", plan.timings_s or None, ""),
        ("micro_batches", rows, "per rank: samples, steps, samples of the last step"),
        ("order", plan.order, "of forward and backward passes, from stage to stage"),
        ("arguments", plan.arguments, "of the model's call"),
        (
            "devices",
            None if plan.devices is None else rows_of(plan.devices),
            "per rank: machine, its like, device, kind, bytes",
        ),
        ("returns", returned and returned.names, "by the model"),
        ("loss_name", returned and returned.loss, "of these"),
        ("returns_tuple", returned and returned.is_tuple, ""),
        ("left", plan.left or None, "by the model in attributes, and not by the program"),
        ("autocast", plan.autocast, "around the model's call"),
        ("tf32", plan.tf32 or None, "in matrix products of float32"),
        (
            "optimizer_states",
            None if plan.optimizer_states == ADAM else _counts(plan.optimizer_states),
            "of a parameter: tensors kept, and of workspace" + _of_earlier(plan.optimizer_states),
        ),
        # an edited program counts as edited even after the plan is saved again
        ("program_digest", None if plan.edited else program_digest, "of the program below"),
        (
            "batch_norm",
            LOCAL if plan.batch_norm == LOCAL else None,
            "each rank's own samples: not the single device's numbers",
        ),
        ("warnings", plan.warnings or None, ""),
    )


def _counts(states: OptimizerStates) -> tuple[float, ...]:
    return states if states.earlier else states[:2]


def _of_earlier(states: OptimizerStates) -> str:
    """The words for the third number in the header."""
    if not states.earlier:
        return ""
    summed = {Earlier.ADDENDS: "before they are summed", Earlier.SUMS: "summed"}[Earlier(states.earlier)]
    return f"; gradients of earlier passes, {summed}"


def _toml(value: object) -> str:
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    return json.dumps(value).replace(
        "\x7f", "\\u007f"
    )  # the one character that JSON allows and TOML does not


def uses_profile(cost_source: str) -> bool:
    """Whether the text ``cost_source`` means that costs rest on a profile, if only of some devices."""
    return cost_source.startswith("profile")


def is_measured(cost_source: str) -> bool:
    """Whether the text ``cost_source`` means that costs rest on a profile of all devices."""
    return uses_profile(cost_source) and not re.search("roofline|calibration", cost_source)


def digest(text: str) -> str:
    """12 hex digits of a program's text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _from_header(header: dict[str, Any], program: Program, where: str, *, edited: bool) -> Plan:
    values = {key: header[key] for key in _KEYS}
    values["predicted_step_s"] = float(values["predicted_step_s"])
    plan = Plan(
        program=program,
        predicted_peak_memory_bytes=tuple(header["predicted_peak_memory_bytes"]),
        candidates=tuple(
            Candidate(c["planner"], c["feasible"], float(c["predicted_step_s"]))
            for c in header.get("candidates", ())
        ),
        gap=_number(header.get("gap")),
        bound_s=_number(header.get("bound_s")),
        ideal_s=_number(header.get("ideal_s")),
        measured_step_s=_number(header.get("measured_step_s")),
        timings_s={k: float(v) for k, v in header.get("timings_s", {}).items()},
        warnings=tuple(header.get("warnings", ())),
        micro_batches=_rows(MicroBatch, header.get("micro_batches")),
        arguments=_rows(lambda name, text: (name, text), header.get("arguments")),
        devices=_rows(PlannedDevice, header.get("devices")),
        returned=Returned(
            tuple(header.get("returns", ())),
            header.get("loss_name", "loss"),
            header.get("returns_tuple", False),
        ),
        usable_bytes=tuple(header.get("usable_bytes", ())),
        autocast=tuple(header["autocast"]) if "autocast" in header else None,
        tf32=header.get("tf32", False),
        left=tuple(header.get("left", ())),
        optimizer_states=OptimizerStates(*header.get("optimizer_states", ADAM)),
        edited=edited,
        **values,
    )
    if header.get("batch_norm", plan.batch_norm) != plan.batch_norm:
        raise PlanError(
            "the plan's header and its program differ in whose statistics batch norm takes",
            where=where,
            expected=f"batch_norm = {_toml(plan.batch_norm)}, as the program has it",
            got=f"batch_norm = {json.dumps(header['batch_norm'])}",
            hint="mixmesh plan JOB --cluster C.toml --batch-norm " + plan.batch_norm,
        )
    if "order" in header and header["order"] != plan.order:
        raise PlanError(
            "the plan's micro-batches cannot run in this order",
            where=where,
            expected=f"order = {_toml(PIPELINE)} for a chain of stages with micro_batches, none for others",
            got=f"order = {json.dumps(header['order'])}"
            + ("" if plan.order else ", and a program that is no such chain"),
        )
    return plan


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)


def _rows(value_of: Callable[..., T], rows: list[list[Any]] | None) -> tuple[T, ...] | None:
    return None if rows is None else tuple(value_of(*row) for row in rows)


def accumulation(plan: Plan) -> Samples | None:
    """How the micro-batches of a plan take its samples; None if no rank takes more than one micro-batch.

    Raises PlanError if they do not fit the shares of the program, or the program cannot run in micro-batches.
    """
    if plan.micro_batches is None or not accumulates(plan.micro_batches):
        return None
    samples = samples_of(plan.program)
    got = tuple(sum(m.sizes) for m in plan.micro_batches)
    sound = all(0 <= m.last <= m.micro_batch and m.steps >= 0 for m in plan.micro_batches)
    if got != samples.counts or not sound:
        raise PlanError(
            "the micro-batches are not the ranks' shares of the batch",
            expected=f"{', '.join(map(str, samples.counts))} samples, none more in the last step",
            got=_sizes_text(plan.micro_batches),
        )
    counts = {m.steps for m in plan.micro_batches if m.steps}
    without = any(not plan.micro_batches[r].steps for ranks in samples.stages for r in ranks)
    uneven = any(m.micro_batch != m.last for m in plan.micro_batches)
    if samples.stages and (len(counts) > 1 or uneven or without):
        raise PlanError(
            "the micro-batches of a pipeline are not alike",
            expected="one number of steps, and as many samples of a rank in each",
            got=_sizes_text(plan.micro_batches),
            hint="shares of whole multiples of the number of steps",
        )
    if samples.meets and len(counts) > 1:
        raise PlanError(
            "the ranks meet in every micro-batch of this program, so all take as many",
            expected="one number of steps, of all ranks that take part",
            got=", ".join(str(m.steps) for m in plan.micro_batches),
            hint="a number of steps of one's own needs ZeRO stage 0, 1 or 2",
        )
    return samples


def _sizes_text(micro_batches: tuple[MicroBatch, ...]) -> str:
    return ", ".join(f"{m.steps} steps of {m.micro_batch}, the last of {m.last}" for m in micro_batches)


def accumulates(micro_batches: tuple[MicroBatch, ...] | None) -> TypeGuard[tuple[MicroBatch, ...]]:
    """Whether any rank takes more than one micro-batch."""
    return micro_batches is not None and any(m.steps > 1 for m in micro_batches)


@dataclass(frozen=True)
class Schedule:
    """The samples of every micro-batch, per rank. If it ``scatters``, each micro-batch sums the gradients of
    ZeRO stage 2, so that no whole gradient lives between micro-batches."""

    sizes: tuple[tuple[int, ...], ...]
    scatters: bool


def schedule(program: Program, micro_batches: tuple[MicroBatch, ...], samples: Samples) -> Schedule:
    """Returns the sizes of all micro-batches.

    If ranks meet in every micro-batch, all ranks run the same number, including those without samples; the
    same holds for ZeRO stage 2 if their numbers are equal anyway. Otherwise each rank runs only micro-batches
    with samples, but at least one. A pipeline sums its gradients after all of its micro-batches.
    """
    counts = {m.steps for m in micro_batches if m.steps}
    scattered = any(stage_of(i) == 2 and owned_type(program, i) is not None for i in program.params)
    together = samples.meets or (scattered and len(counts) == 1 and not samples.stages)
    if together:
        sizes = (m.sizes or (0,) * max(counts) for m in micro_batches)
    else:
        sizes = (tuple(n for n in m.sizes if n) or (0,) for m in micro_batches)
    return Schedule(tuple(sizes), together and scattered)
