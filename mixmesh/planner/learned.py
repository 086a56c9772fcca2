"""HeteroG and TAG: searches over placements that a network guides, limited in seconds.

They use the estimate of groups; the simulator judges the best of what they find, like all other proposals.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from ..cluster.device import HEADROOM
from ..errors import InputError
from ..lang.ir import support
from ..search.evaluate import Evaluator, Measure, placed_of
from .passes import SHARES
from .placed import JUDGED, cuts, judged
from .proposal import Proposal
from .spaces import space_of
from .task import Task

MAX_CALLS = 20_000  # calls of the estimate: for a small model more seconds are of no use


def tag(task: Task) -> Iterator[Proposal]:
    """TAG: tree search whose choices are weighed by a network that was trained on other models and
    clusters."""
    need_torch_geometric("tag")
    if task.world_size == 1:
        return  # there is only one placement
    from ..search.learned.features import Facts
    from ..search.learned.mcts import Tree
    from ..search.learned.seeds import judged_seeds
    from ..search.learned.settings import own_settings
    from ..search.learned.tag import TagPriors, load

    evaluate = evaluator(task, "partition")
    with task.timed("placement"), own_settings():
        _, base_s = judged_seeds(evaluate, cuts(evaluate.space, task))
        facts = Facts(evaluate.space, task.optimizer_states, HEADROOM)
        Tree(evaluate, base_s, TagPriors(load(), facts)).run()
    yield from best_of(task, "tag", evaluate)


def heterog(task: Task) -> Iterator[Proposal]:
    """HeteroG: a network that is trained for this model on this cluster."""
    need_torch_geometric("heterog")
    if task.world_size == 1:
        return
    from ..search.learned.features import Facts
    from ..search.learned.heterog import Training
    from ..search.learned.settings import own_settings

    evaluate = evaluator(task, "centres")
    with task.timed("placement"), own_settings():
        facts = Facts(evaluate.space, task.optimizer_states, HEADROOM)
        Training(evaluate, facts, cuts(evaluate.space, task)).run()
    yield from best_of(task, "heterog", evaluate)


def evaluator(task: Task, method: str) -> Evaluator:
    space = space_of(task, method)
    measure = Measure(space, task.optimizer_states, task.usable_bytes, levels=task.levels)
    return Evaluator(space, measure, MAX_CALLS, task.budget.search_s)


def best_of(task: Task, planner: str, evaluate: Evaluator, count: int = JUDGED) -> Iterator[Proposal]:
    """The best strategies of a search, and data parallelism even if the estimate ranks it low. If all groups
    of a strategy run with the same shares, the best such strategy is also tried with the LP's shares."""
    from ..search.learned.seeds import data_parallel

    everyone = [placed_of(strategy) for strategy in data_parallel(evaluate.space)]
    plain = [strategy for strategy in everyone if all(p.sync == "allreduce" for p in strategy)]
    strategies = dict.fromkeys((*evaluate.ranked()[:count], *plain))
    proposals = [judged(task, planner, evaluate.space, strategy) for strategy in strategies]
    yield from proposals
    alike = [p for p in proposals if len(p.program.ratios) == 1]
    if alike:  # empty if nothing is cut: a program that every rank runs whole has no shares
        yield from with_best_shares(task, min(alike, key=lambda p: p.key))


def with_best_shares(task: Task, made: Proposal) -> Iterator[Proposal]:
    ranks = support(made.program.shares)
    better = task.ratio(made.simulation, made.program, ranks)
    if better is not None:
        program = made.program.with_shares(better)
        best = task.best_buckets(made.planner, program, made.simulation)
        yield SHARES(task, best, task.budget)


def has_torch_geometric() -> bool:
    return importlib.util.find_spec("torch_geometric") is not None


def need_torch_geometric(planner: str) -> None:
    if not has_torch_geometric():
        raise InputError(
            f"the planner {planner} needs torch_geometric",
            expected="torch_geometric 2.6 or newer",
            got="none installed",
            hint="pip install 'mixmesh[learned]'",
        )
