"""Plans and trains the demo's job on an emulated mixed cluster, beside DDP, and prints what it measured.

Needs root and control groups for the emulation; without them it runs plain processes and says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from mixmesh import testbed
from mixmesh.cluster import Cluster
from mixmesh.cost import Profile
from mixmesh.demo.job import BATCH, job
from mixmesh.errors import MixmeshError
from mixmesh.plan_file import Plan
from mixmesh.planner import make_plan
from mixmesh.report import Facts, facts_of, plan_page, save_page
from mixmesh.report.measured import read_trace
from mixmesh.trace import trace

CLUSTER = """\
name = "two boxes"
[network]
bandwidth_gbit_per_s = 1
latency_us = 50
[[machine]]
name = "a"
devices = [{ name = "cpu-70", cpu_share = 0.70 }, { name = "cpu-35", cpu_share = 0.35 }]
[[machine]]
name = "b"
devices = [{ name = "cpu-35", cpu_share = 0.35 }, { name = "cpu-18", cpu_share = 0.18 }]
"""
PLAN, EVENLY = "plan", "ddp-even"
VARIANTS = {EVENLY: EVENLY, "ddp-proportional": "ddp-proportional", PLAN: "auto"}  # with their planners
STEPS = 20
SHOWN_LINES = 40
PROFILE_BUDGET_S = 20
TABLE_WIDTH = 96


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mixmesh.demo", description=__doc__)
    parser.add_argument("--out", default="out/demo", help="folder for profile, plans and results")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    try:
        return run(Path(args.out), args.steps)
    except MixmeshError as error:
        print(error, file=sys.stderr)
        return error.exit_status


def run(out: Path, steps: int) -> int:
    console = Console(stderr=True, soft_wrap=True)
    started = time.perf_counter()

    def say(text: str) -> None:
        console.print(f"[dim]{time.perf_counter() - started:5.0f} s[/dim]  {text}", highlight=False)

    out.mkdir(parents=True, exist_ok=True)
    cluster_path, profile_path = out / "two-boxes.toml", out / "profile.json"
    cluster_path.write_text(CLUSTER)
    cluster = Cluster.load(cluster_path)
    worker = [sys.executable, "-m", "mixmesh.demo.worker"]

    say("profiling the job's operators and the links, on every device")
    testbed.run(cluster, [*worker, "profile", str(cluster_path), str(profile_path), str(PROFILE_BUDGET_S)])
    measured = Profile.load(profile_path)

    say("tracing and planning")
    made = job()
    traced = trace(made.model, made.batch)
    plans = {
        name: make_plan(traced, cluster, planner=planner, profile=measured)
        for name, planner in VARIANTS.items()
    }
    paths = {name: str(out / f"{name}.plan") for name in plans}
    for name, plan in plans.items():
        plan.save(paths[name])
    show(plans["plan"], paths["plan"])

    say(f"training {steps} steps each: DDP with even batches, with proportional batches, and the plan")
    lines: list[str] = []

    def on_output(rank: int, stream: str, text: str) -> None:
        if stream == "stdout" and rank == 0:
            lines.append(text)
        else:
            sys.stderr.write(text)

    trained = json.dumps({name: paths[name] for name in paths if name != EVENLY})
    compared = [*worker, "compare", str(steps), trained, str(out)]
    result = testbed.run(cluster, compared, on_output=on_output)
    found = json.loads("".join(lines).strip().splitlines()[-1])

    say("training the same steps on one device, for the losses")
    reference = single_device_losses(steps)
    summary = summarise(found, reference, plans["plan"], result.emulation)
    (out / "results.json").write_text(json.dumps({**summary, **found, "reference": reference}, indent=1))
    report(found, reference, summary)
    page = out / "report.html"
    save_page(plan_page(pages(plans, cluster, measured, out)), page)
    print(f"the plan as a page to look at: {page}")
    say("done")
    print(json.dumps({**summary, "report": str(page)}))
    return 0


def pages(plans: dict[str, Plan], cluster: Cluster, profile: Profile, out: Path) -> list[Facts]:
    """The three variants, predicted and measured: the plan that was found, then what it is compared with."""
    return [
        facts_of(
            plans[name],
            cluster,
            profile=profile,
            measured=read_trace(out / f"{name}-measured.json", cluster.world_size),
            name=name,
            is_compared=name == PLAN,
            asks_what_if=name == PLAN,
        )
        for name in (PLAN, *(name for name in plans if name != PLAN))
    ]


def show(plan: Plan, path: str) -> None:
    text = str(plan)
    lines = text[text.index("program ") :].splitlines()
    print("\n".join(lines[:SHOWN_LINES]))
    print(f"  … {len(lines) - SHOWN_LINES} lines more in {path}\n", flush=True)


def single_device_losses(steps: int) -> list[float]:
    made = job()
    optimizer = made.optimizer(made.model.parameters())
    batches, losses = iter(made.data), []
    for _ in range(steps):
        loss = made.model(**next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def summarise(found: dict, reference: list[float], plan: Plan, emulation: str) -> dict:
    median = {name: statistics.median(times) for name, times in found["seconds"].items()}
    ideal_s = BATCH / statistics.median(found["samples_per_s"])
    return {
        "speedup_over_ddp_even": median["ddp-even"] / median["plan"],
        "speedup_over_ddp_proportional": median["ddp-proportional"] / median["plan"],
        "fraction_of_ideal": ideal_s / median["plan"],
        "max_loss_difference": max(differences(found["losses"]["plan"], reference)),
        "predicted_step_s": plan.predicted_step_s,
        "step_s_median": median["plan"],
        "planner": plan.planner,
        "emulation": emulation,
        "torch_threads_of_reference": torch.get_num_threads(),
    }


def differences(losses: list[float], reference: list[float]) -> list[float]:
    """Relative to the single device's loss, per step."""
    return [abs(a - b) / abs(b) for a, b in zip(losses, reference)]


def report(found: dict, reference: list[float], summary: dict) -> None:
    ideal_s = summary["fraction_of_ideal"] * summary["step_s_median"]
    base = statistics.median(found["seconds"]["ddp-even"])
    table = Table(title=f"{len(reference)} steps on 4 devices in 2 machines ({summary['emulation']})")
    for heading in ("", "s per step", "spread", "speed-up", "of the ideal", "loss difference"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, times in found["seconds"].items():
        low, _, high = statistics.quantiles(times, n=4)
        middle = statistics.median(times)
        table.add_row(
            name,
            f"{middle:.3f}",
            f"{low:.3f} - {high:.3f}",
            f"{base / middle:.2f}x",
            f"{ideal_s / middle:.0%}",
            f"{max(differences(found['losses'][name], reference)):.1e}",
        )
    table.add_row("ideal", f"{ideal_s:.3f}", "", f"{base / ideal_s:.2f}x", "100%", "")
    Console(width=TABLE_WIDTH).print(table)


if __name__ == "__main__":
    sys.exit(main())
