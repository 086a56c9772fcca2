"""Plans and trains two jobs on emulated mixed clusters, beside what people would write by hand, and prints
what it measured.

Needs root and control groups for the emulation; without them it runs plain processes and says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.demo.cases import EVENLY, GPT, PLAN, PLANNERS, PROPORTIONAL, WORDS, Case
from benchmarks.torch_baselines import batch_size
from benchmarks.training import single_device_losses
from mixmesh.cluster import Cluster
from mixmesh.cost import Profile
from mixmesh.errors import MixmeshError
from mixmesh.explain.report import Facts, facts_of, plan_page, save_page
from mixmesh.explain.report.measured import read_trace
from mixmesh.frontend.trace import trace
from mixmesh.lang.plan_file import Plan
from mixmesh.measure import testbed
from mixmesh.planner import make_plan

SHOWN_LINES = 40
TABLE_WIDTH = 110
WORKER = (sys.executable, "-m", "benchmarks.demo.worker")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """The results of a case. ``seconds`` and ``losses`` are those of every step, by variant;
    ``samples_per_s`` of all devices when computing alone, in every round; ``reference`` are the losses of a
    single device."""

    case: Case
    cluster: Cluster
    profile: Profile
    plans: dict[str, Plan]
    seconds: dict[str, list[float]]
    losses: dict[str, list[float]]
    samples_per_s: list[float]
    reference: list[float]
    emulation: str

    @property
    def medians_s(self) -> dict[str, float]:
        return {name: statistics.median(times) for name, times in self.seconds.items()}

    @property
    def best_baseline(self) -> str:
        """The fastest variant other than the plan of ``auto``."""
        return min((name for name in self.medians_s if name != PLAN), key=self.medians_s.__getitem__)

    @property
    def ideal_s(self) -> float:
        """Seconds of a step at the sum of all devices' speeds, with free communication."""
        return batch_size(self.case.make()) / statistics.median(self.samples_per_s)

    def loss_difference(self, name: str) -> float:
        """The largest difference to the single device's loss, relative to it."""
        return max(abs(a - b) / abs(b) for a, b in zip(self.losses[name], self.reference))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--out", default="out/demo", help="folder for profile, plans and results")
    parser.add_argument("--steps", type=int, default=GPT.steps, help="of the first job, by each variant")
    parser.add_argument("--profile", metavar="P.json", help="only profile the first job, into this file")
    args = parser.parse_args()
    try:
        if args.profile:
            profile_case(GPT, Path(args.out), Path(args.profile))
            return 0
        return run(Path(args.out), args.steps)
    except MixmeshError as error:
        print(error, file=sys.stderr)
        return error.exit_status


def run(out: Path, steps: int) -> int:
    console = Console(stderr=True, soft_wrap=True)
    started = time.perf_counter()

    def say(text: str) -> None:
        console.print(f"[dim]{time.perf_counter() - started:5.0f} s[/dim]  {text}", highlight=False)

    gpt = compare(GPT, steps, out, say)
    page = out / "report.html"
    save_page(plan_page(pages(gpt, out)), page)
    words = compare(WORDS, WORDS.steps, out / WORDS.name, say)
    summary = summarise(gpt, words)
    results = {**summary, **details(gpt), "search": details(words)}
    (out / "results.json").write_text(json.dumps(results, indent=1))
    Console(width=TABLE_WIDTH).print(table(gpt, words))
    print(f"the first plan as a page to look at: {page}")
    say("done")
    print(json.dumps({**summary, "report": str(page)}))
    return 0


def profile_case(case: Case, out: Path, profile_path: Path) -> tuple[Cluster, Profile]:
    """The emulated cluster of a case, whose file goes to ``out``, and the profile of its devices and
    links."""
    out.mkdir(parents=True, exist_ok=True)
    cluster_path = out / "cluster.toml"
    cluster_path.write_text(case.cluster)
    cluster = Cluster.load(cluster_path)
    testbed.run(cluster, [*WORKER, "profile", case.name, str(cluster_path), str(profile_path)])
    return cluster, Profile.load(profile_path)


def compare(case: Case, steps: int, out: Path, say: Say) -> Outcome:
    """Profiles a case, plans it, and trains it by every variant."""
    say(f"{case.about}: profiling operators and links on every device")
    cluster, profile = profile_case(case, out, out / "profile.json")

    say("tracing and planning")
    made = case.make()
    traced = trace(made.model, made.batch)
    plans = {
        name: make_plan(traced, cluster, planner=planner, profile=profile)
        for name, planner in PLANNERS.items()
    }
    paths = {name: str(out / f"{name}.plan") for name in plans}
    for name, plan in plans.items():
        plan.save(paths[name])
    show(plans[PLAN], paths[PLAN])

    say(f"training {steps} steps by each of {', '.join((*case.baselines, *plans))}")
    lines: list[str] = []

    def on_output(rank: int, stream: str, text: str) -> None:
        if stream == "stdout" and rank == 0:
            lines.append(text)
        else:
            sys.stderr.write(text)

    words = [*WORKER, "compare", case.name, str(steps), json.dumps(paths), str(out)]
    emulation = testbed.run(cluster, words, on_output=on_output).emulation
    found = json.loads("".join(lines).strip().splitlines()[-1])
    say("training the same steps on one device, for the losses")
    reference = single_device_losses(case.make(), steps)
    return Outcome(case, cluster, profile, plans, **found, reference=reference, emulation=emulation)


def pages(outcome: Outcome, folder: Path) -> list[Facts]:
    """The variants, predicted and measured: the plan, then the variants that it is compared with."""
    return [
        facts_of(
            outcome.plans[name],
            outcome.cluster,
            profile=outcome.profile,
            measured=read_trace(folder / f"{name}-measured.json", outcome.cluster.world_size),
            name=name,
            is_compared=name == PLAN,
            asks_what_if=name == PLAN,
        )
        for name in (PLAN, EVENLY, PROPORTIONAL)
    ]


def show(plan: Plan, path: str) -> None:
    text = str(plan)
    lines = text[text.index("program ") :].splitlines()
    print("\n".join(lines[:SHOWN_LINES]))
    print(f"  … {len(lines) - SHOWN_LINES} lines more in {path}\n", flush=True)


def summarise(gpt: Outcome, words: Outcome) -> dict:
    """The result in figures: those of the first case, and prefixed with ``search_`` those of the case made
    for the search."""
    median, searched = gpt.medians_s, words.medians_s
    return {
        "speedup_over_ddp_even": median[EVENLY] / median[PLAN],
        "speedup_over_ddp_proportional": median[PROPORTIONAL] / median[PLAN],
        "fraction_of_ideal": gpt.ideal_s / median[PLAN],
        "max_loss_difference": gpt.loss_difference(PLAN),
        "predicted_step_s": gpt.plans[PLAN].predicted_step_s,
        "step_s_median": median[PLAN],
        "planner": gpt.plans[PLAN].planner,
        "search_speedup_over_best_baseline": searched[words.best_baseline] / searched[PLAN],
        "search_speedup_over_ddp_even": searched[EVENLY] / searched[PLAN],
        "search_best_baseline": words.best_baseline,
        "search_max_loss_difference": words.loss_difference(PLAN),
        "search_predicted_step_s": words.plans[PLAN].predicted_step_s,
        "search_step_s_median": searched[PLAN],
        "search_planner": words.plans[PLAN].planner,
        "emulation": gpt.emulation,
        "torch_threads_of_reference": torch.get_num_threads(),
    }


def details(outcome: Outcome) -> dict:
    """Everything that was measured."""
    return {
        "seconds": outcome.seconds,
        "losses": outcome.losses,
        "samples_per_s": outcome.samples_per_s,
        "reference": outcome.reference,
    }


def table(*outcomes: Outcome) -> Table:
    """A table of every variant of every case, with its speed-up over even batches, and the plan's speed-up
    over it."""
    made = Table(title=f"s per step, {outcomes[0].emulation}")
    headings = ("", "s per step", "spread", "over even batches", "the plan is faster by", "loss difference")
    for heading in headings:
        made.add_column(heading, justify="right" if heading else "left")
    for outcome in outcomes:
        median = outcome.medians_s
        made.add_section()
        made.add_row(f"[bold]{outcome.case.about}[/bold]")
        for name, times in outcome.seconds.items():
            made.add_row(
                f"  {name}",
                f"{median[name]:.3f}",
                f"{min(times):.3f} - {max(times):.3f}",
                f"{median[EVENLY] / median[name]:.2f}x",
                "" if name == PLAN else f"{median[name] / median[PLAN]:.2f}x",
                f"{outcome.loss_difference(name):.1e}",
            )
        made.add_row("  ideal", f"{outcome.ideal_s:.3f}", "", f"{median[EVENLY] / outcome.ideal_s:.2f}x")
    return made


if __name__ == "__main__":
    sys.exit(main())
