"""The list of planners: what they propose, when ``auto`` asks them, and what they need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from . import simple
from .hap import DDP_TUNED, synthesised, tuned
from .learned import heterog, tag
from .pipelines import hopeful, least_pipeline_s, pipelines
from .placed import cut, model_parallel, placed
from .poplar import poplar
from .proposal import BASELINES, Proposal
from .segments import segments
from .task import Task
from .two_level import least_two_level_s, promising, two_level

Propose = Callable[[Task], Iterator[Proposal]]


class When(Enum):
    """When ``auto`` asks a planner."""

    ALWAYS = "always"
    IN_NEED = "where nothing else fits, or only much slower, or with seconds to search"
    IN_A_SEARCH = "with seconds to search"


@dataclass(frozen=True)
class OnSets:
    """How ``auto`` asks a planner for sets of machines. ``least_s`` is a rough lower bound of a step on a
    set, or None if the set is not worth asking for; all sets together get ``share`` of the budget."""

    least_s: Callable[[Task], float | None]
    share: float


@dataclass(frozen=True)
class Planner:
    """One row of the list.

    ``propose`` yields all proposals, ``briefly`` only the most hopeful. ``is_open_ended``: it searches as
    long as it may; its placements have no micro-batches, so pipelines are tried after it. ``is_learned``: it
    needs torch_geometric. ``needs`` says what it requires besides several devices.
    """

    name: str
    propose: Propose
    asked: When = When.ALWAYS
    briefly: Propose | None = None
    on_sets: OnSets | None = None
    is_open_ended: bool = False
    is_learned: bool = False
    needs: str = ""

    @property
    def is_usual(self) -> bool:
        """Whether it is neither a baseline nor a last resort."""
        return self.name not in BASELINES and self.asked is not When.IN_NEED


PIPELINE = Planner(
    "pipeline",
    pipelines,
    briefly=hopeful,
    on_sets=OnSets(least_pipeline_s, 0.0417),
    needs="several devices, a model that can run in micro-batches, and a batch that they divide",
)
# in the order in which they are asked: baselines first, as the others have to be faster
ROWS = (
    Planner("single", simple.single),
    Planner("ddp-even", simple.ddp_even),
    Planner("ddp-proportional", simple.ddp_proportional),
    Planner("fsdp-even", simple.fsdp_even),
    Planner(DDP_TUNED, tuned),
    Planner("hap", synthesised),
    Planner(
        "two-level",
        two_level,
        briefly=promising,
        on_sets=OnSets(least_two_level_s, 0.0667),
        needs="two machines or more, one of them with several devices, and a batch to be dealt out",
    ),
    PIPELINE,
    Planner("poplar", poplar, When.IN_NEED),
    Planner("model-parallel", model_parallel, When.IN_NEED, briefly=cut),
    Planner("segments", segments, When.IN_A_SEARCH),
    Planner("tensor-parallel", simple.tensor_parallel_proportional, When.IN_NEED),
    Planner("placed", placed, When.IN_A_SEARCH, is_open_ended=True),
    Planner("heterog", heterog, When.IN_A_SEARCH, is_open_ended=True, is_learned=True),
    Planner("tag", tag, When.IN_A_SEARCH, is_open_ended=True, is_learned=True),
)
BY_NAME = {row.name: row for row in ROWS}
PLANNERS = ("auto", *BY_NAME)
