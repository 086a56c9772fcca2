"""A plan: one program with everything that belongs to it, as one value and one text file.

The file is a TOML header and the program text. It can be read, compared and edited; what is read back is
checked against the cluster and the model before it runs.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from ..base.files import read_text
from ..errors import PlanError
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
from .plan_devices import PlannedDevice, devices_of_rows, rows_text
from .plan_header import check_per_rank, read_header

FORMAT = 1
PIPELINE = "1f1b"  # the one order in which a chain of stages runs its micro-steps


@dataclass(frozen=True)
class PassResult:
    """The cost and the gain of a pass of planning: seconds of planning, and seconds of the plan's step."""

    name: str
    about: str
    spent_s: float
    gained_s: float


@dataclass(frozen=True)
class Candidate:
    """One plan that was considered, as the simulator saw it."""

    planner: str
    feasible: bool
    predicted_step_s: float


@dataclass(frozen=True)
class MicroBatch:
    """How one rank takes its share of the batch: ``steps - 1`` times ``micro_batch`` samples, then ``last``.
    All three are 0 for a rank without samples."""

    micro_batch: int
    steps: int
    last: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of every micro-step."""
        return (self.micro_batch,) * (self.steps - 1) + (self.last,) if self.steps else ()


@dataclass(frozen=True)
class Plan:
    """A program, what it is predicted to cost, and where it comes from.

    ``predicted_peak_memory_bytes`` has one entry per rank. ``cluster_fingerprint`` and ``graph_fingerprint``
    tie the plan to the devices and the model that it was made for. ``timings_s``: the steps of planning.
    ``gap``: by how much, as a share, the program may be dearer than the cheapest under the search's own cost;
    None where that is not known. ``bound_s``: seconds that no plan for the job on these devices is faster
    than, if that is known; ``ideal_s``: those of all devices computing all the time, as the cost model
    estimates them. ``micro_batches``: per rank, how it accumulates gradients within a step; None
    where everyone takes its share at once. A chain of stages that accumulates is a pipeline, and says so by
    its ``order``. ``measured_step_s``: of a trial on the cluster, where ``mixmesh tune`` held one.
    ``arguments`` are those of the model's call, by name: "tensor", or the text of a constant; None where that
    is not known. ``returned`` says what the model returns where it does not return the loss itself.
    ``devices``: what was planned for, per rank; None where that is not known, and then nothing is compared at
    the start. ``usable_bytes``: per rank, the memory that the plan may use, if that is known; batches of
    other shapes may take no more. ``autocast``: a type of device and a dtype, of the context that the model
    is called under; None for none. ``tf32``: matrix products of float32 may run in TF32, and costs and bounds
    count on it. ``edited``: the program was read from a file and is not as mixmesh wrote
    it, so that its types are not known to be those that PyTorch gives.
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
    edited: bool = field(default=False, compare=False)
    notes: dict[int, str] = field(default_factory=dict, compare=False, repr=False)
    passes: tuple[PassResult, ...] = field(default=(), compare=False, repr=False)  # where it was just made

    @property
    def is_bound_measured(self) -> bool:
        """Whether ``bound_s`` rests on a profile of all devices. Elsewhere it rests on the peaks of their
        figures, which no kernel reaches in whole."""
        return is_measured(self.cost_source)

    def __str__(self) -> str:
        program = print_program(self.program, self.notes)
        return _header(self, digest(program)) + "\n" + program

    @property
    def order(self) -> str | None:
        """``PIPELINE`` if stages run their micro-steps in that order, None for a plan without."""
        if not accumulates(self.micro_batches) or not any(transfers_of(self.program)):
            return None
        return PIPELINE

    @property
    def batch_norm(self) -> str:
        """The statistics that batch norm takes: "exact", over the whole batch, or "local", over each rank's
        own samples. The program says so."""
        return batch_norm_of(self.program)

    def save(self, path: str | Path) -> None:
        """Writes the plan; the file is either whole or not there."""
        path = Path(path)
        partial = path.with_name(f"{path.name}.partial{os.getpid()}")
        try:
            partial.write_text(str(self))
            partial.replace(path)
        except OSError as err:
            partial.unlink(missing_ok=True)
            raise PlanError(f"cannot write the plan: {err.strerror}", where=str(path)) from None

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan. Raises PlanError or ParseError with the line that is wrong."""
        try:
            text = read_text(path, MAX_TEXT_BYTES)
        except (OSError, ValueError) as err:
            reason = getattr(err, "strerror", None) or str(err)
            raise PlanError(
                f"cannot read the plan: {reason}",
                where=str(path),
                hint="mixmesh plan JOB --cluster C.toml --out X.plan",
            ) from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, where: str = "<plan>") -> Plan:
        lines = text.split("\n")
        start = next((n for n, line in enumerate(lines) if line.startswith("program ")), None)
        if start is None:
            raise PlanError(
                "this is not a plan",
                where=where,
                expected="a header and a line that begins with 'program'",
                hint="mixmesh plan JOB --cluster C.toml --out X.plan",
            )
        above, below = "\n".join(lines[:start]), "\n".join(lines[start:])
        header = read_header(above, where, FORMAT)
        # blank lines keep the line numbers of the file
        program = parse_program("\n" * start + below, where)
        check_per_rank(header, above, where, program.world_size)
        return _from_header(header, program, where, edited=header.get("program_digest") != digest(below))


_KEYS = (
    "planner", "predicted_step_s", "cluster_fingerprint", "cluster_name", "graph_fingerprint",
    "output_has_loss", "feasible", "planning_s", "states_expanded", "cost_source",
)  # fmt: skip


def _header(plan: Plan, program_digest: str) -> str:
    lines = [f"mixmesh_plan = {FORMAT}"]
    for key in _KEYS:
        value = getattr(plan, key)
        lines.append(f"{key} = {_toml(value)}")
    lines.append(f"predicted_peak_memory_bytes = {list(plan.predicted_peak_memory_bytes)}")
    if plan.usable_bytes:
        lines.append(f"usable_bytes = {list(plan.usable_bytes)}  # of memory, per rank")
    if plan.gap is not None:
        lines.append(f"gap = {_toml(plan.gap)}")
    if plan.bound_s is not None:
        basis = "as measured" if plan.is_bound_measured else "at the peaks of the devices' figures"
        lines.append(f"bound_s = {_toml(plan.bound_s)}  # no plan is faster, {basis}")
    if plan.ideal_s is not None:
        lines.append(f"ideal_s = {_toml(plan.ideal_s)}  # all devices computing all the time, as estimated")
    if plan.measured_step_s is not None:
        lines.append(f"measured_step_s = {_toml(plan.measured_step_s)}  # in a trial on the cluster")
    if plan.timings_s:
        steps = ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in plan.timings_s.items())
        lines.append(f"timings_s = {{ {steps} }}")
    if plan.micro_batches is not None:
        rows = ", ".join(f"[{m.micro_batch}, {m.steps}, {m.last}]" for m in plan.micro_batches)
        lines.append(f"micro_batches = [{rows}]  # per rank: samples, steps, samples of the last step")
    if plan.order is not None:
        lines.append(f"order = {_toml(plan.order)}  # of forward and backward passes, from stage to stage")
    if plan.arguments is not None:
        pairs = ", ".join(f"[{json.dumps(name)}, {json.dumps(text)}]" for name, text in plan.arguments)
        lines.append(f"arguments = [{pairs}]  # of the model's call")
    if plan.devices is not None:
        lines.append(
            f"devices = {rows_text(plan.devices)}  # per rank: machine, its like, device, kind, bytes"
        )
    if plan.returned.names:
        lines.append(f"returns = [{', '.join(map(json.dumps, plan.returned.names))}]  # by the model")
        lines.append(f"loss_name = {_toml(plan.returned.loss)}  # of these")
        lines.append(f"returns_tuple = {_toml(plan.returned.is_tuple)}")
    if plan.autocast is not None:
        lines.append(f"autocast = {_toml(list(plan.autocast))}  # around the model's call")
    if plan.tf32:
        lines.append("tf32 = true  # in matrix products of float32")
    if not plan.edited:  # an edited program stays one when it is saved again
        lines.append(f"program_digest = {_toml(program_digest)}  # of the program below")
    if plan.batch_norm == LOCAL:
        lines.append(
            f"batch_norm = {_toml(LOCAL)}  # each rank's own samples: not the single device's numbers"
        )
    if plan.warnings:
        lines.append(f"warnings = [{', '.join(map(json.dumps, plan.warnings))}]")
    for c in plan.candidates:
        lines += ["[[candidates]]", f"planner = {_toml(c.planner)}", f"feasible = {_toml(c.feasible)}"]
        lines.append(f"predicted_step_s = {_toml(c.predicted_step_s)}")
    return "\n".join(lines) + "\n"


def _toml(value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)


def is_measured(cost_source: str) -> bool:
    """Whether costs rest on a profile of all devices, by the text of their source."""
    return cost_source.startswith("profile") and "roofline" not in cost_source


def digest(text: str) -> str:
    """12 hex digits of a program's text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _from_header(header: dict, program: Program, where: str, *, edited: bool) -> Plan:
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
        micro_batches=_micro_batches(header.get("micro_batches")),
        arguments=_arguments(header.get("arguments")),
        devices=devices_of_rows(header.get("devices")),
        returned=Returned(
            tuple(header.get("returns", ())),
            header.get("loss_name", "loss"),
            header.get("returns_tuple", False),
        ),
        usable_bytes=tuple(header.get("usable_bytes", ())),
        autocast=tuple(header["autocast"]) if "autocast" in header else None,
        tf32=header.get("tf32", False),
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
            "the plan's micro-steps cannot run in this order",
            where=where,
            expected=f"order = {_toml(PIPELINE)} for a chain of stages with micro_batches, none for others",
            got=f"order = {json.dumps(header['order'])}"
            + ("" if plan.order else ", and a program that is no such chain"),
        )
    return plan


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)


def _arguments(pairs: list | None) -> tuple[tuple[str, str], ...] | None:
    return None if pairs is None else tuple((name, text) for name, text in pairs)


def _micro_batches(rows: list | None) -> tuple[MicroBatch, ...] | None:
    if rows is None:
        return None
    return tuple(MicroBatch(*row) for row in rows)


def accumulation(plan: Plan) -> Samples | None:
    """The samples that the micro-steps of a plan take; None if no rank takes more than one.

    Raises PlanError if they do not fit the shares of the program, or the program cannot run in micro-steps.
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
            got=", ".join(
                f"{m.steps} steps of {m.micro_batch}, the last of {m.last}" for m in plan.micro_batches
            ),
        )
    counts = {m.steps for m in plan.micro_batches if m.steps}
    without = any(not plan.micro_batches[r].steps for ranks in samples.stages for r in ranks)
    uneven = any(m.micro_batch != m.last for m in plan.micro_batches)
    if samples.stages and (len(counts) > 1 or uneven or without):
        raise PlanError(
            "the micro-batches of a pipeline are not alike",
            expected="one number of steps, and as many samples of a rank in each",
            got=", ".join(
                f"{m.steps} steps of {m.micro_batch}, the last of {m.last}" for m in plan.micro_batches
            ),
            hint="shares of whole multiples of the number of steps",
        )
    if samples.meets and len(counts) > 1:
        raise PlanError(
            "the ranks meet in every micro-step of this program, so all take as many",
            expected="one number of steps, of all ranks that take part",
            got=", ".join(str(m.steps) for m in plan.micro_batches),
            hint="a number of steps of one's own needs ZeRO stage 0, 1 or 2",
        )
    return samples


def accumulates(micro_batches: tuple[MicroBatch, ...] | None) -> bool:
    """Whether any rank takes more than one micro-step."""
    return micro_batches is not None and any(m.steps > 1 for m in micro_batches)


@dataclass(frozen=True)
class Schedule:
    """Samples of every micro-step, per rank. ``scatters``: gradients of ZeRO stage 2 are summed in every one
    of them, so that no whole gradient lives in between."""

    sizes: tuple[tuple[int, ...], ...]
    scatters: bool


def schedule(program: Program, micro_batches: tuple[MicroBatch, ...], samples: Samples) -> Schedule:
    """Where ranks meet in every micro-step all take as many, those without samples too; so they do in stage 2
    if their numbers are equal. Otherwise each takes those that have samples, and at least one. Stages of
    a pipeline sum when all micro-steps are through."""
    counts = {m.steps for m in micro_batches if m.steps}
    scattered = any(stage_of(i) == 2 and owned_type(program, i) is not None for i in program.params)
    together = samples.meets or (scattered and len(counts) == 1 and not samples.stages)
    if together:
        sizes = (m.sizes or (0,) * max(counts) for m in micro_batches)
    else:
        sizes = (tuple(n for n in m.sizes if n) or (0,) for m in micro_batches)
    return Schedule(tuple(sizes), together and scattered)
