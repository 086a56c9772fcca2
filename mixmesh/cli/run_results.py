"""The results of a training, as ``mixmesh run`` prints them."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.timeline import Comparison, Timeline, compare, save_trace, to_chrome_trace
from ..base.units import plural
from ..cluster import Cluster
from ..errors import JobError
from .output import seconds, size, table
from .run_training import RunOptions, Trained

if TYPE_CHECKING:
    from ..runtime.train import RunReport


@dataclass(frozen=True)
class Results:
    """The results of a training. ``is_stopped``: a signal ended it."""

    options: RunOptions
    trained: Trained
    compared: Comparison | None
    is_stopped: bool

    def object(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        plan, report = self.trained.plan, self.trained.report
        keeper, balancer = self.trained.keeper, self.trained.balancer
        return {
            "step_s_median": report.step_s_median if report.step_s else None,
            "predicted_step_s": plan.predicted_step_s,
            "losses": list(report.losses),
            "peak_memory_bytes": list(report.peak_memory_bytes),
            "step_s": list(report.step_s),
            "world_size": plan.program.world_size,
            "skipped_steps": report.num_skipped,
            "emulation": os.environ.get("MIXMESH_EMULATION"),
            **({} if keeper is None else keeper.figures()),
            **({} if balancer is None else balancer.figures()),
            **({} if self.compared is None else {"comparison": asdict(self.compared)}),
        }

    def lines(self) -> list[str]:
        """The lines that are printed for people."""
        report, keeper, save = self.trained.report, self.trained.keeper, self.options.save
        lines = [] if keeper is None else [keeper.summary()]
        if not report.losses:
            return lines
        made = plural(len(report.losses), "step")
        lines.append(f"{made}, loss {report.losses[0]:.5g} -> {report.losses[-1]:.5g}")
        if not self.is_stopped and self.trained.num_steps < (self.options.num_steps or 0):
            lines.append(f"the job's data ended before step {self.options.num_steps}")
        if report.num_skipped:
            lines.append(
                f"{plural(report.num_skipped, 'step')} left out, whose loss or gradients were not finite"
            )
        median_s, predicted_s = report.step_s_median, self.trained.plan.predicted_step_s
        lines.append(f"step {seconds(median_s)} (median), predicted {seconds(predicted_s)}")
        if save is not None and not self.is_stopped:
            lines.append(f"weights written to {save}")
        elif keeper is None and not self.is_stopped:
            lines.append("the weights are not kept: --save FILE")
        lines.append("peak memory " + ", ".join(size(b) if b else "-" for b in report.peak_memory_bytes))
        return lines + self._trace_lines()

    def _trace_lines(self) -> list[str]:
        if self.options.trace is None:
            return []
        written = f"timeline of one step written to {self.options.trace}"
        if self.compared is None:
            return [written, "its prediction needs the cluster: --cluster C.toml"]
        return [written, comparison_table(self.compared)]


def save_measured(
    report: RunReport, trace: Path, cluster: Cluster | None, predicted: Timeline | None
) -> Comparison | None:
    """Writes the measured step to ``trace``, and compares it with the predicted one, if there is one."""
    measured = measured_step(report, trace)
    devices = [] if cluster is None else [device.name for device in cluster.devices]
    save_trace(to_chrome_trace(measured, name="measured", devices=devices), trace)
    return None if predicted is None else compare(predicted, measured)


def measured_step(report: RunReport, trace: Path) -> Timeline:
    from ..runtime.recording import typical

    if not report.timelines:
        raise JobError("the job's data ended before a step was measured", where=str(trace))
    return typical(report.timelines)


def comparison_table(compared: Comparison) -> str:
    """A table of the step, the streams, and the events that differ most."""
    rows = []
    for d in (compared.step, *compared.streams, *compared.largest):
        one, two = d.predicted_s, d.measured_s
        factor = f"{two / one:.2f}" if one and two is not None else "-"
        times = ("-" if s is None else seconds(s) for s in (one, two))
        rows.append((d.what, "all" if d.rank is None else str(d.rank), *times, factor))
    return table(("one step", "rank", "predicted", "measured", "measured/predicted"), rows)
