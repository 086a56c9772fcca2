"""Which architectures of ``transformers`` are traced, planned and trained as on a single device.

For each: export it, list the operators that have no sharding rule, plan it for three unequal devices with
every planner, and hold the plan of HAP's search against the module (loss and every gradient, in float32 and
float64).
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath

from mixmesh.cluster import Cluster
from mixmesh.errors import InputError, MixmeshError
from mixmesh.frontend.trace import Traced, trace
from mixmesh.lang.ir import support
from mixmesh.lang.rules import RULES
from mixmesh.measure.verification import verify
from mixmesh.planner import make_plan

from .architectures import ARCHITECTURES, FAMILIES, Architecture, build
from .inputs import SAMPLES

# slow devices on a fast network, so that models of this size are worth distributing
CLUSTER = """
name = "three unequal devices"
[network]
bandwidth_gbit_per_s = 40
latency_us = 1
[[machine]]
link_gbit_per_s = 100
link_latency_us = 1
devices = [
  { name = "big", tflop_per_s = 0.002, memory_gib = 8, memory_gbyte_per_s = 2 },
  { name = "middle", tflop_per_s = 0.001, memory_gib = 4, memory_gbyte_per_s = 1 },
]
[[machine]]
link_gbit_per_s = 100
link_latency_us = 1
devices = [{ name = "small", tflop_per_s = 0.0005, memory_gib = 2, memory_gbyte_per_s = 0.5 }]
"""


@dataclass(frozen=True)
class Row:
    """One architecture. ``reason`` is why it stopped, in one line with the user's file and line, empty if it
    did not; fields of later phases are None. Errors are relative, and ``error_f64`` is the larger one of loss
    and gradients. ``devices`` take part in the verified plan; ``planner`` made the fastest one."""

    name: str
    family: str
    model: str
    exports: bool = False
    num_operators: int | None = None
    without_rule: tuple[str, ...] = ()
    verified: bool | None = None
    devices: int | None = None
    loss_error: float | None = None
    gradient_error: float | None = None
    error_f64: float | None = None
    planner: str | None = None
    seconds: float = 0.0
    reason: str = ""

    @property
    def ok(self) -> bool:
        return bool(self.verified) and self.planner is not None


def chosen(names: Sequence[str] = ()) -> tuple[Architecture, ...]:
    """The architectures of these names or families; without names, all of them. Raises InputError."""
    known = {a.name.lower(): a.name for a in ARCHITECTURES} | {f: f for f in FAMILIES}
    for name in names:
        if name.lower() not in known:
            close = difflib.get_close_matches(name.lower(), known, 3)
            raise InputError(
                f"no architecture {name!r} in the table",
                expected=f"one of {len(ARCHITECTURES)} names, or a family: {', '.join(FAMILIES)}",
                got=name,
                hint=tuple(f'--only "{known[c]}"' for c in close),
            )
    wanted = {known[n.lower()] for n in names}
    return tuple(a for a in ARCHITECTURES if not wanted or wanted & {a.name, a.family})


def run(
    architectures: Sequence[Architecture], progress: Callable[[str], None] = lambda _: None
) -> Iterator[Row]:
    """Yields a row per architecture; an error in one ends only that one. Raises InputError if
    ``transformers`` is not installed."""
    import_transformers()
    cluster = Cluster.parse(CLUSTER)
    for architecture in architectures:
        yield cover(architecture, cluster, lambda text, name=architecture.name: progress(f"{name}: {text}"))


def import_transformers() -> str:
    """Its version. Raises InputError."""
    try:
        import transformers
    except ImportError:
        raise InputError(
            "the models are those of transformers, which is not installed",
            hint="pip install 'transformers>=5,<6'",
        ) from None
    return transformers.__version__


def cover(architecture: Architecture, cluster: Cluster, progress: Callable[[str], None]) -> Row:
    started = time.perf_counter()
    row = Row(architecture.name, architecture.family, architecture.model)
    try:
        for known in _stages(row, architecture, cluster, progress):
            row = known
    except Exception as error:
        row = replace(row, reason=reason_of(error))
    return replace(row, seconds=time.perf_counter() - started)


def _stages(
    row: Row, architecture: Architecture, cluster: Cluster, progress: Callable[[str], None]
) -> Iterator[Row]:
    """Yields the row after each stage."""
    progress("building")
    model, batch = build(architecture)
    progress("tracing")
    traced = trace(model, batch)
    row = replace(row, exports=True, **_operators(traced))
    yield row
    fastest = make_plan(traced, cluster, progress=progress)
    row = replace(row, planner=fastest.planner)
    yield row
    own = fastest.planner == "hap"
    plan = fastest if own else make_plan(traced, cluster, planner="hap", progress=progress)
    report = verify(model, batch, plan, traced=traced, progress=progress)
    yield replace(
        row,
        verified=report.ok,
        devices=len(support(plan.program.ratios[0][1])),
        loss_error=report.max_loss_error,
        gradient_error=report.max_gradient_error,
        error_f64=max(report.max_loss_error_f64, report.max_gradient_error_f64),
        reason="" if report.ok else f"results differ, most in {report.worst}",
    )


def _operators(traced: Traced) -> dict:
    operators = [n.op for n in traced.graph.nodes if "." in n.op]
    without = dict.fromkeys(op for op in operators if op not in RULES)
    return dict(num_operators=len(operators), without_rule=tuple(without))


def reason_of(error: Exception) -> str:
    """One line with the error and its place in the user's file."""
    if not isinstance(error, MixmeshError):
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        return f"{type(error).__name__}: {first.strip()[:160]}"
    where = f" at `{error.where}`" if error.where else ""
    got = error.got if len(error.got) <= 120 else error.got[:117] + "..."
    return f"{error.message}{where}" + (f"; {got}" if got else "")


# --- the report ----------------------------------------------------------------------------------------


def report(rows: Sequence[Row], command: str) -> dict:
    """The object that ``--json`` prints."""
    return {
        "bench": "coverage",
        "command": command,
        "transformers": import_transformers(),
        "samples": SAMPLES,
        "exported": sum(r.exports for r in rows),
        "verified": sum(bool(r.verified) for r in rows),
        "planned": sum(r.planner is not None for r in rows),
        "rows": [asdict(r) for r in rows],
    }


HEADER = ("model", "exports", "operators", "without a rule", "verified", "devices",
          "loss", "gradients", "float64", "auto", "seconds")  # fmt: skip


def cells(row: Row) -> tuple[str, ...]:
    def number(value: float | None) -> str:
        return "-" if value is None else "0" if value == 0 else f"{value:.0e}"

    return (
        row.name,
        "yes" if row.exports else "no",
        "-" if row.num_operators is None else str(row.num_operators),
        ", ".join(op.removeprefix("aten.") for op in row.without_rule) or ("none" if row.exports else "-"),
        "-" if row.verified is None else "yes" if row.verified else "NO",
        "-" if row.devices is None else str(row.devices),
        number(row.loss_error),
        number(row.gradient_error),
        number(row.error_f64),
        row.planner or "-",
        f"{row.seconds:.1f}",
    )


def summary(rows: Sequence[Row]) -> str:
    exported = [r for r in rows if r.exports]
    return (
        f"{len(exported)} of {len(rows)} architectures export, {sum(bool(r.verified) for r in exported)} of "
        f"those are equal to one device, {sum(r.planner is not None for r in exported)} are planned by auto, "
        f"{sum(not r.without_rule for r in exported)} have a rule for every operator."
    )


def markdown(rows: Sequence[Row], command: str) -> str:
    """docs/reference/architectures.md: a table per family, and why rows stopped."""
    import torch

    words = command.split()
    command = " ".join([PurePath(words[0]).name, *words[1:]]) if words else command
    lines = [
        "# Architectures",
        "",
        f"Made by `{command}` with transformers {import_transformers()} and torch {torch.__version__}.",
        summary(rows),
        "",
        ABOUT,
    ]
    for family in FAMILIES:
        held = [r for r in rows if r.family == family]
        if held:
            lines += ["", f"## {family.capitalize()}", "", "| " + " | ".join(HEADER) + " |"]
            lines += ["|---" * len(HEADER) + "|"]
            lines += ["| " + " | ".join(cells(r)) + " |" for r in held]
    stopped = [r for r in rows if r.reason]
    if stopped:
        lines += ["", "## Models that stopped", ""]
        lines += [f"- {r.name} (`{r.model}`): {r.reason}" for r in stopped]
    return "\n".join(lines) + "\n"


ABOUT = f"""\
Each model is small, has random weights, one or two layers of each kind and no dropout, is in training mode,
and gets a global batch of {SAMPLES} samples (`benchmarks/architectures.py`, `inputs.py`). Columns:

- exports: `torch.export` takes the model with its loss; operators: how many there are then.
- without a rule: operators that run whole on every device.
- verified: the plan that HAP's search finds for three unequal devices (speeds 4 : 2 : 1), all ranks in one
  process, against the module on one device: the loss, every gradient and every updated buffer.
- devices: how many of the three take part in that plan.
- loss, gradients: the largest relative errors in float32, rounding included, which decide nothing; float64:
  the larger of both there, which decides. For that the module runs in float64, whatever dtypes it names.
- auto: the planner whose plan is the fastest in simulation.
- seconds: for all of that, on one CPU core.

Three models have settings that were chosen after they had failed with others, in float32 only. MobileNet v1
and v2 differ by 1e-2 to 3e-2 on images of 64 pixels (float64: 3e-14), where one device differs from its own
float64 by as much; the table has 32 pixels, where the last batch norms see 10 values. Kinks of ReLU6 are the
likely cause, which was not isolated. MobileViT differs by 1e-2 with weights of the default size (float64:
3e-11); the table has an `initializer_range` of 0.2."""
