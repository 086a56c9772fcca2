"""Programs and plans on which the readers of a step are tried: stored, planned, written and random ones."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pipelines
import test_recompute
import test_wgrad
from fuzz.generate import random_source
from fuzz.legal import Walk, with_options
from fuzz.source import build
from fuzz.steps import in_float64
from small_graphs import GRAPHS, ODD, graph
from test_simulated_bytes import all_programs, staged_plans

from mixmesh.cost import CostModel
from mixmesh.errors import MixmeshError
from mixmesh.frontend.trace import trace
from mixmesh.lang.check import check_program
from mixmesh.lang.ir import WGRADS, Program, make_ratio, parse_program, separable, with_wgrads
from mixmesh.lang.plan_file import Plan
from mixmesh.lang.rules import RULES, shard_units
from mixmesh.passes.buckets import with_buckets
from mixmesh.passes.factors import factorable, with_factors
from mixmesh.passes.recomputation import recomputed
from mixmesh.passes.zero import with_stage
from mixmesh.search.baselines import data_parallel, fully_sharded

TESTS = Path(__file__).parent.parent
RANDOM_MODELS = range(900, 912)
PROGRAMS_PER_MODEL = 4
SHARES = {"uneven": (3, 2, 1), "two of three": (1, 0, 1)}


def read(text: str) -> Program | Plan:
    """A program or a plan, by how its text begins."""
    return Plan.parse(text) if text.startswith("mixmesh_plan") else parse_program(text)


def stored_texts() -> Iterator[tuple[str, str]]:
    """The program of every golden file, and of every case of a step."""
    for path in sorted((TESTS / "golden").glob("*.txt")):
        yield f"golden {path.stem}", path.read_text()
    for path in sorted((TESTS / "step" / "cases").glob("*.txt")):
        yield f"case {path.stem}", path.read_text().partition("\nstep ")[0]


def small_programs() -> Iterator[tuple[str, Program]]:
    """Small graphs, each held in several ways."""
    costs = CostModel(test_recompute.COSTS.cluster)
    for (name, body), (how, shares) in itertools.product((GRAPHS | ODD).items(), SHARES.items()):
        made = graph(body, 4)
        program = data_parallel(made, costs, make_ratio(shares), shard_units(made, RULES))
        for way, held in variants(program).items():
            yield f"{name}, {how}, {way}", held


def variants(program: Program) -> dict[str, Program]:
    """A data-parallel program, and what passes make of it."""
    sharded = fully_sharded(program)
    out = {
        "copies": program,
        "shards": sharded,
        "factors": with_factors(program, frozenset(factorable(program))),
        "second runs": recomputed(program),
        "second runs of shards": recomputed(sharded),
        "weights apart, of shards": with_marks(sharded, WGRADS),
    }
    for when in WGRADS:
        out[f"weights {when}"] = with_marks(program, (when,))
    out["weights apart"] = with_marks(program, WGRADS)
    out["second runs, weights apart"] = with_marks(recomputed(program), WGRADS)
    return out


def with_marks(program: Program, marks) -> Program:
    return with_wgrads(program, dict(zip(separable(program), itertools.cycle(marks))))


def language_plans() -> Iterator[tuple[str, Program | Plan]]:
    """A transformer with second runs, in every stage of ZeRO, at once and in micro-batches."""
    spread = with_buckets(test_recompute.spread(), 3000.0)
    for stage in range(4):
        held = with_stage(spread, stage, test_recompute.OWNERS)
        for way, program in variants_in_stages(held).items():
            yield f"language, zero {stage}, {way}", program
            for rows in (test_recompute.COMMON, test_recompute.DIFFERENT):
                if stage < 3 or rows is test_recompute.COMMON:
                    plan = test_recompute.accumulating(program, rows)
                    yield f"language, zero {stage}, {way}, micro-batches {rows}", plan


def variants_in_stages(program: Program) -> dict[str, Program]:
    return {
        "plain": program,
        "second runs": recomputed(program),
        "weights last": with_marks(program, ("last",)),
        "weights apart": with_marks(program, ("first", "beside", "last")),
    }


def pipeline_plans() -> Iterator[tuple[str, Plan]]:
    syncs = {"": (), ", with owners": ("sharded",) * 4}
    stages = {"three": pipelines.THREE_STAGES, "four": pipelines.FOUR_STAGES}
    for (count, ratios), (how, sync) in itertools.product(stages.items(), syncs.items()):
        program = pipelines.chain(pipelines.model_of(), pipelines.batch(), ratios, syncs=sync[: len(ratios)])
        for micro_steps in (2, 4):
            for way, held in (("", program), (", second runs", recomputed(program))):
                yield (
                    f"pipeline of {count}{how}{way} in {micro_steps}",
                    pipelines.pipelined(with_buckets(held, 2000.0), micro_steps),
                )


def random_programs(seeds=RANDOM_MODELS, world_sizes=(2, 3, 4)) -> Iterator[tuple[str, Program]]:
    """Random legal programs of random models, with random options."""
    for seed in seeds:
        rng = random.Random(seed)
        with in_float64(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                made = trace(*build(str(random_source(seed)))).graph
            except Exception:
                continue  # a model of which nothing can be trained
            for number in range(PROGRAMS_PER_MODEL):
                try:
                    program = Walk(made, rng.choice(world_sizes), rng).program()
                    check_program(program)
                    program = with_options(program, rng)
                    check_program(program)
                except (MixmeshError, ValueError):
                    continue  # the checker refuses what this draw came to
                yield f"random {seed}.{number}", program


@cache
def every() -> dict[str, str]:
    """All of them by name, as text; of equal ones the first."""
    texts = dict(stored_texts()) | all_programs() | staged_plans()
    texts["wgrad"] = str(test_wgrad.PlanOf(("first", "last", "beside"))())
    for stage in (1, 2):
        texts[f"wgrad, zero {stage}"] = str(test_wgrad.PlanOf(("first", "last", None), stage=stage)())
    for name, program in itertools.chain(
        small_programs(), language_plans(), pipeline_plans(), random_programs()
    ):
        texts[name] = str(program)
    return {name: text for text, name in {text: name for name, text in reversed(texts.items())}.items()}
