"""Baselines in the form of programs: one device, DDP even and proportional, FSDP, tensor parallel."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ..cost import CostModel
from ..lang.ir import REPLICATE, Graph, Program, Ratio, make_ratio, ratio_of_speeds
from ..lang.rules import Units
from ..passes.zero import stored_by_owners
from .synthesis import Choices, Found, Prices, Problem, emit, search

# free gradients, and as little communication within the passes as possible: the definition of data
# parallelism
DATA_PARALLEL = Prices(gradient_sync=0.0, exchange=1e3)
# gradient sums so expensive that every parameter is cut if possible
TENSOR_PARALLEL = Prices(gradient_sync=1e3)


def data_parallel(
    graph: Graph,
    costs: CostModel,
    ratio: Ratio,
    units: Units | None = None,
    choices: Choices | None = None,
    spell: Callable[[Problem, Found], Program] = emit,
) -> Program:
    """The program in which every rank runs the model on its share of the batch, and parameters are
    replicated. ``spell`` makes the program of the path."""
    problem = Problem(
        graph,
        costs,
        ratio,
        prices=DATA_PARALLEL,
        units=units,
        choices=choices,
        shard_params=False,
        batch_only=True,
    )
    return spell(problem, search(problem, weight=1.05, max_states=2_000))


def tensor_parallel(
    graph: Graph,
    costs: CostModel,
    ratio: Ratio,
    units: Units | None = None,
    choices: Choices | None = None,
) -> Program:
    """The program in which parameters are cut along with their products (Megatron: Shoeybi et al., 2019), and
    activations travel."""
    problem = Problem(graph, costs, ratio, prices=TENSOR_PARALLEL, units=units, choices=choices)
    return emit(problem, search(problem, weight=1.05, max_states=2_000))


def fully_sharded(program: Program, params: Collection[str] | None = None) -> Program:
    """``program`` with every replicated parameter, or those of ``params``, stored S(0) and gathered for use
    (ZeRO-3, FSDP).

    A gather starts one parameter-using operator ahead of its use, and the gathered parameter is freed
    after its last use, to be gathered again where the backward pass needs it.
    """
    stored = {
        i.result
        for i in program.params
        if i.type.placement == REPLICATE
        and i.type.value.shape
        and i.result in program.requires_grad
        and (params is None or i.result in params)
    }
    return stored_by_owners(program, stored, program.main_ratio)


def device_seconds(
    graph: Graph, costs: CostModel, share: float = 1.0, choices: Choices | None = None
) -> tuple[float, ...]:
    """For each rank, the seconds of ``share`` of a step's work, without communication and optimizer.
    ``choices`` of the graph are reused if given."""
    choices = choices or Choices(graph, costs)
    counts: dict[int, float] = {}
    for kind, weight in zip(choices.kind_of_step, choices.fold.weights):
        if kind is not None:
            counts[kind] = counts.get(kind, 0.0) + weight
    by_class = [0.0] * len(costs.classes)
    for kind, count in counts.items():
        for c, time in enumerate(choices.timed[kind]):
            by_class[c] += count * (time.forward.at(share) + time.backward.at(share))
    return tuple(by_class[c] for c in costs.class_of)


def proportional_ratio(graph: Graph, costs: CostModel) -> Ratio:
    """Shares of all devices in proportion to the speeds with which they run equal shares of this model."""
    world_size = costs.cluster.world_size
    return ratio_of_speeds(device_seconds(graph, costs, 1 / world_size), range(world_size))


def only(rank: int, world_size: int) -> Ratio:
    return make_ratio([1.0 if r == rank else 0.0 for r in range(world_size)])
