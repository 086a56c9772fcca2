"""Memory of steps that begin with gradients of earlier passes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from small_graphs import GRAPHS, TWO, cluster, graph
from torch import nn

import mixmesh as mm
from mixmesh.cluster.device import HEADROOM
from mixmesh.cost import CostModel
from mixmesh.errors import Infeasible, InputError, PlanError
from mixmesh.lang.ir import even_ratio
from mixmesh.lang.optimizer_states import ADAM, Earlier
from mixmesh.lang.plan_file import Plan
from mixmesh.planner import make_plan
from mixmesh.runtime.shapes.room import earlier_gradients_over
from mixmesh.search.baselines import data_parallel, fully_sharded
from mixmesh.step.memory import ALLOWANCE, PeakMemory
from mixmesh.training.preparation.script import prepare

CPUS = """
name = "cpus"
[[machine]]
link_gbit_per_s = 10
[[machine.devices]]
name = "a"
kind = "cpu"
count = 2
tflop_per_s = 1
memory_gib = {memory_gib}
memory_gbyte_per_s = 100
"""
# many samples have more bytes of activations than there are parameters
WIDTH, FEW, MANY = 2000, 4, 16_000
GRADIENTS = 2 * 4 * WIDTH * WIDTH  # bytes


class Wide(nn.Module):
    """More parameters than activations."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
        if is_tied:
            self.layers[1].weight = self.layers[0].weight

    def forward(self, x):
        return self.layers(x).square().mean()


def plan(
    accumulate: str = "", planner: str = "ddp-even", samples: int = FEW, memory_gib: float = 4, **how: bool
) -> Plan:
    where = mm.Cluster.parse(CPUS.format(memory_gib=memory_gib))
    batch = {"x": torch.zeros(samples, WIDTH)}
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    return mm.plan(Wide(**how), batch, where, planner=planner, optimizer=sgd, accumulate=accumulate)


def needed(made: Plan) -> tuple[int, ...]:
    """Bytes per rank on devices that are no larger than they must be."""
    where = mm.Cluster.parse(CPUS.format(memory_gib=4))
    return PeakMemory(CostModel(where), made.optimizer_states).peaks(made.program)


def more(accumulate: str, planner: str, samples: int, **kind: bool) -> float:
    """The gradients' bytes that rank 0 needs besides what it needs without accumulation."""
    peaks = [needed(plan(how, planner, samples, **kind))[0] for how in ("", accumulate)]
    return (peaks[1] - peaks[0]) / (1 + ALLOWANCE) / GRADIENTS


def test_gradients_that_ranks_sum_are_held_once_within_no_sync_and_twice_without():
    """With few samples the peak is at the end of the backward pass, when all gradients are there anyway."""
    for samples, within, without in ((FEW, 0, 1), (MANY, 1, 1)):
        assert more("no_sync", "ddp-even", samples) == pytest.approx(within, abs=0.05)
        assert more("every pass", "ddp-even", samples) == pytest.approx(without, abs=0.05)


def test_gradients_of_all_uses_of_a_parameter_add_up_before_they_are_added():
    """As autograd adds them: their sum, and one more of them, while that of the pass before is held."""
    assert 2 * more("no_sync", "ddp-even", FEW, is_tied=True) == pytest.approx(1, abs=0.05)


def test_gradients_of_cut_parameters_are_handed_over_in_every_pass():
    for accumulate, samples in product(("no_sync", "every pass"), (FEW, MANY)):
        assert more(accumulate, "fsdp-even", samples) == pytest.approx(0.5, abs=0.05)


def test_a_device_without_room_for_them_is_refused():
    least = [max(needed(plan(how, samples=MANY))) for how in ("", "no_sync")]
    room = sum(least) / 2 / 2**30 / (1 - HEADROOM)
    assert plan(samples=MANY, memory_gib=room).planner == "ddp-even"
    with pytest.raises(Infeasible):
        plan("no_sync", samples=MANY, memory_gib=room)


@pytest.mark.parametrize("planner", ["ddp-even", "fsdp-even"])
@pytest.mark.parametrize("samples", [FEW, MANY])
def test_where_a_heap_keeps_everything_no_less_is_promised_with_them(planner, samples):
    alone, *others = (plan(how, planner, samples) for how in ("", "no_sync", "every pass"))
    for made in others:
        assert made.predicted_peak_memory_bytes[0] >= alone.predicted_peak_memory_bytes[0]
        assert made.predicted_peak_memory_bytes[0] > needed(made)[0]


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("earlier", Earlier)
def test_the_upper_bound_of_a_step_is_no_less_than_its_peak(name, earlier):
    where = cluster(TWO)
    costs, traced = CostModel(where), graph(GRAPHS[name], 64)
    replicated = data_parallel(traced, costs, even_ratio(where.world_size))
    for program in (replicated, fully_sharded(replicated)):
        memory = PeakMemory(costs, ADAM._replace(earlier=earlier))
        most, peaks = memory.at_most(program), memory.peaks(program)
        assert most is None or all(a >= b for a, b in zip(most, peaks))
        before = PeakMemory(costs, ADAM).peaks(program)
        assert all(a <= b for a, b in zip(before, peaks))


def test_a_plan_file_says_which_gradients_it_counts():
    where, states = cluster(TWO), ADAM._replace(earlier=Earlier.ADDENDS)
    made = make_plan(graph(GRAPHS["mlp"], 64), where, planner="ddp-even", optimizer_states=states)
    text = str(made)
    assert "optimizer_states = [2, 0, 1]" in text and "gradients of earlier passes, before they" in text
    read = Plan.parse(text)
    assert read == made and mm.simulate(read, where).peak_memory_bytes == made.predicted_peak_memory_bytes
    for wrong in ("[2, 0, 0]", "[2, 0, 3]", "[2, 0, 1, 1]"):
        with pytest.raises(PlanError, match="optimizer_states"):
            Plan.parse(text.replace("[2, 0, 1]", wrong))


def test_no_warning_of_what_a_plan_counts():
    def warned(accumulate: str, samples: int = MANY, **how: bool) -> bool:
        made = plan(accumulate, samples=samples)
        tight = replace(made, usable_bytes=made.predicted_peak_memory_bytes)
        return earlier_gradients_over(tight, cuda=False, **how) is not None

    for is_unsummed in (False, True):
        assert warned("", is_unsummed=is_unsummed, are_added=True)
        assert not warned("every pass", is_unsummed=is_unsummed, are_added=True)
    assert not warned("no_sync", is_unsummed=True, are_added=False)
    assert warned("no_sync", FEW, is_unsummed=False, are_added=True)


def test_other_ways_to_accumulate_are_refused(monkeypatch):
    with pytest.raises(InputError, match="unknown accumulation 'twice'"):
        plan("twice")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = Wide()
    with pytest.raises(InputError, match="unknown accumulation"):
        prepare(model, None, [torch.zeros(FEW, WIDTH)], accumulate="no sync")
