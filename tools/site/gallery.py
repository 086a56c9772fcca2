"""The plans of the gallery: ``python -m tools.site.gallery [NAME ...]`` makes each with its report in
``out/gallery`` and writes what was found into its page; with ``--reports`` of plans that are there.

The report of the demo is taken along if ``make demo`` has made it. With a Chromium a picture of each report
goes beside the pages.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from mixmesh.__main__ import execute
from mixmesh.cli.output import seconds, table
from mixmesh.cli.plan import PlanOptions, bound, plan_job
from mixmesh.cluster import Cluster
from mixmesh.explain.headline import headline
from mixmesh.lang.plan_file import Plan
from tools.browser import browser, chromium

ROOT = Path(__file__).parents[2]
PAGES, OUT = ROOT / "docs" / "gallery", ROOT / "out" / "gallery"
REPORTS = OUT / "reports"
BEGIN, END = "<!-- made by `make gallery` -->\n", "<!-- until here -->"
SIZE = 1000  # width and height of a picture, in pixels


@dataclass(frozen=True)
class Entry:
    """A page of the gallery: what is planned, and for which cluster."""

    name: str
    job: str
    cluster: str

    @property
    def command(self) -> str:
        return f"mixmesh plan {self.job} --cluster {self.cluster} --out {self.name}.plan"


FOLDER = "examples/gallery"
ENTRIES = (
    Entry("mixed-pair", "workload:bert-large:32", f"{FOLDER}/mixed-pair.toml"),
    Entry("slow-ethernet", "workload:vgg19-224:256", f"{FOLDER}/slow-ethernet.toml"),
    Entry("seventy-billion", f"{FOLDER}/llama_70b.py", f"{FOLDER}/four-kinds.toml"),
    Entry("experts", "workload:bert-moe:256", f"{FOLDER}/experts.toml"),
)


def plan_file(entry: Entry) -> Path:
    """The file that the entry's plan is written to."""
    return OUT / f"{entry.name}.plan"


def new_plan(entry: Entry, cluster: Cluster) -> Plan:
    """The plan that ``mixmesh plan`` makes."""
    job = entry.job if entry.job.startswith("workload:") else str(ROOT / entry.job)
    _, _, plan = plan_job(job, cluster, PlanOptions(), weights=False)
    return plan


def make_plan(entry: Entry) -> None:
    """Plans as ``mixmesh plan`` does, and writes the plan."""
    plan = new_plan(entry, Cluster.load(ROOT / entry.cluster))
    OUT.mkdir(parents=True, exist_ok=True)
    plan.save(plan_file(entry))


def show_plan(entry: Entry) -> None:
    """Writes the report of a plan that is there, its picture, and the made part of its page."""
    plan, cluster = Plan.load(plan_file(entry)), Cluster.load(ROOT / entry.cluster)
    REPORTS.mkdir(parents=True, exist_ok=True)
    report = REPORTS / f"{entry.name}.html"
    words = [
        "report",
        str(plan_file(entry)),
        "--cluster",
        str(ROOT / entry.cluster),
        "--out",
        str(report),
        "--json",
    ]
    printed = io.StringIO()
    with redirect_stdout(printed):
        status = execute(words)
    if status:
        raise SystemExit(status)
    page = PAGES / f"{entry.name}.md"
    before, _, rest = page.read_text().partition(BEGIN)
    made = block(entry, plan, cluster, json.loads(printed.getvalue().splitlines()[-1])["sentences"])
    page.write_text(before + BEGIN + made + END + rest.partition(END)[2])
    picture(report, PAGES / "pictures" / f"{entry.name}.png")


def block(entry: Entry, plan: Plan, cluster: Cluster, words: list[str]) -> str:
    """The command, what it says, and the sentences of the report."""
    said = "\n".join(f"- {text}" for text in words)
    shown = output(plan, cluster)
    return f"\n```sh\n{entry.command}\n```\n\n```text\n{shown}\n```\n\nThe report says:\n\n{said}\n\n"


def output(plan: Plan, cluster: Cluster) -> str:
    """The first lines of ``mixmesh plan``, and the candidates."""
    rows = [
        ("*" if c.planner == plan.planner else "", c.planner, seconds(c.predicted_step_s),
         "yes" if c.feasible else "no")
        for c in plan.candidates
    ]  # fmt: skip
    ideal = f"all devices computing all the time, as estimated, would take {seconds(plan.ideal_s)}"
    head = [headline(plan, cluster), bound(plan), *([] if plan.is_bound_measured else [ideal])]
    return "\n".join([*head, "", table(("", "candidate", "step", "fits"), rows)])


def picture(report: Path, target: Path) -> None:
    """The upper part of a report as a browser shows it; nothing without a Chromium."""
    if chromium() is None:
        return
    with browser() as running, running.tab(SIZE, height=SIZE) as tab:
        tab.open(report)
        tab.picture(target)


def take_the_demo() -> None:
    """Copies the demo's report, if there is one, beside those of the gallery."""
    demo = ROOT / "out" / "demo" / "report.html"
    if demo.is_file():
        REPORTS.mkdir(parents=True, exist_ok=True)
        shutil.copy(demo, REPORTS / "demo.html")


if __name__ == "__main__":
    asked = [word for word in sys.argv[1:] if word != "--reports"]
    for entry in ENTRIES:
        if entry.name in (asked or [e.name for e in ENTRIES]):
            print(entry.command, flush=True)
            if "--reports" not in sys.argv:
                make_plan(entry)
            show_plan(entry)
    take_the_demo()
