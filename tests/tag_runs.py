"""TAG's policy against uniform search on models and clusters that neither training nor the bench has:
``python tests/tag_runs.py [--seeds 7] [--sets 2] [--without-advice]``.

A set is fourteen of ``tools.tag.problems`` and ten real models on random clusters, of both the first ones in
which uniform search finds 1 % in the median and that no set before it has. The search is set up by the first
set; the others, and the cases of ``benchmarks placement``, say what that is worth. A search of TAG's ends
where it is level, as only its calls are asked for. Printed are median calls, of TAG's search first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
import typer

from benchmarks.placement_calls import (
    BETTER,
    EQUAL,
    Trace,
    better_after,
    level_after,
    level_of,
    median,
    race,
)
from mixmesh.cluster.device import HEADROOM
from mixmesh.cost import CostModel
from mixmesh.frontend.job.workloads import make
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import Graph
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.planner.placed import cuts
from mixmesh.planner.spaces import space_of
from mixmesh.planner.task import Task
from mixmesh.search.evaluate import Evaluator, measure_with
from mixmesh.search.learned.features import Facts
from mixmesh.search.learned.mcts import Tree
from mixmesh.search.learned.seeds import judged_seeds
from mixmesh.search.learned.tag import TagPriors, load
from tools.tag.problems import random_cluster, random_model

CALLS = 1000
IN_A_SET = {"random": 14, "real": 10}
OFFSET = 7_000_001  # of the numbers of chance: training has others
MODELS = (
    "xlnet-large:32", "bert-large:64", "vit:256", "inception-v3:128", "nasnet:128", "vgg19-224:128",
    "llama-0.5b:32", "vgg19:512",
)  # fmt: skip


@dataclass(frozen=True)
class Unseen:
    name: str
    kind: str
    task: Task


def unseen() -> Iterator[Unseen]:
    """Problems without end: a random one, a real one, and so on."""
    n = 0
    while True:
        rng = random.Random(OFFSET + n)
        model = random_model(rng)
        yield Unseen(f"random-{n}", "random", _task(model.graph, model.need_bytes, rng))
        name = MODELS[n % len(MODELS)]
        job = make(name)
        graph = trace(job.model, job.batch).graph
        kept = sum(t.size_bytes for value, t in graph.types.items() if value in graph.requires_grad)
        params = 4 * sum(p.numel() for p in job.model.parameters())
        yield Unseen(f"{name}-{n}", "real", _task(graph, (1 + ADAM.kept) * params + kept, rng))
        n += 1


def _task(graph: Graph, need_bytes: float, rng: random.Random) -> Task:
    return Task(graph, CostModel(random_cluster(rng, need_bytes)), ADAM, lambda _: None)


class Searches:
    """Tree searches of one problem."""

    def __init__(self, problem: Unseen) -> None:
        self.space = space_of(problem.task)
        self.cuts = list(cuts(self.space, problem.task))
        self.facts = Facts(self.space, ADAM, HEADROOM)

    def uniform(self, seeds: int) -> tuple[list[Trace], float]:
        """What each seed found, and the step of the best seed strategy."""
        found = []
        for seed in range(seeds):
            evaluate, base_s, seeded = self._begun()
            Tree(evaluate, base_s, None, seed).run()
            found.append(_trace(evaluate, seeded))
        return found, base_s

    def tag(self, seeds: int, level_s: float, advised: bool) -> list[Trace]:
        found = []
        for seed in range(seeds):
            evaluate, base_s, seeded = self._begun(level_s)
            priors = TagPriors(load(), self.facts) if advised else lambda *_: None
            Tree(evaluate, base_s, priors, seed).run()
            found.append(_trace(evaluate, seeded))
        return found

    def _begun(self, level_s: float = 0.0) -> tuple[Evaluator, float, int]:
        evaluate = Evaluator(self.space, measure_with(self.space, ADAM, HEADROOM))
        _, base_s = judged_seeds(evaluate, self.cuts)
        seeded, judge = evaluate.calls, evaluate.judge
        evaluate.max_calls = seeded + CALLS

        def until_level(strategy):
            outcome = judge(strategy)
            if outcome.fits and outcome.step_s <= min(level_s * EQUAL, base_s / BETTER):
                evaluate.max_calls = 0
            return outcome

        evaluate.judge = until_level
        return evaluate, base_s, seeded


def _trace(evaluate: Evaluator, seeded: int) -> Trace:
    return tuple((n - seeded, o.step_s) for n, o in evaluate.improved if o.fits and n > seeded)


def main(
    seeds: Annotated[int, typer.Option("--seeds", help="Of each search.")] = 7,
    sets: Annotated[int, typer.Option("--sets", help="Of problems.")] = 1,
    without_advice: Annotated[
        bool, typer.Option("--without-advice", help="TAG's search, no network.")
    ] = False,
) -> None:
    """Calls of TAG's search and of the uniform one, in the median over seeds."""
    torch.set_num_threads(1)
    level: list[list] = [[] for _ in range(sets)]
    better: list[list] = [[] for _ in range(sets)]
    room = {kind: [count] * sets for kind, count in IN_A_SET.items()}
    problems = unseen()
    while any(map(any, room.values())):
        problem = next(problems)
        if problem.task.world_size == 1 or not any(room[problem.kind]):
            continue
        searches = Searches(problem)
        uniform, base_s = searches.uniform(seeds)
        level_s = level_of(uniform, base_s)
        if level_s is None:
            continue
        n = next(n for n, left in enumerate(room[problem.kind]) if left)
        room[problem.kind][n] -= 1
        both = searches.tag(seeds, level_s, not without_advice), uniform
        better[n].append([median(better_after(traces, base_s), CALLS) for traces in both])
        level[n].append([median(level_after(traces, level_s), CALLS) for traces in both])
        print(f"set {n}, {problem.name}: better {better[n][-1]}, level {level[n][-1]}", flush=True)
    for n in range(sets):
        for name, rows in (("better", better[n]), ("level", level[n])):
            print(f"set {n}, {name}: {race([(tag, uniform, CALLS) for tag, uniform in rows])}")


if __name__ == "__main__":
    typer.run(main)
