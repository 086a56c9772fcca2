"""The largest micro-batch: searched for by few passes, rehearsed alone, and memory that runs out survived."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time

import pytest
import torch
from torch import nn

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.errors import InputError, MixmeshError
from mixmesh.frontend.job import Job
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import even_ratio
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.measure import testbed
from mixmesh.measure.profiler.children import Outcome, in_child
from mixmesh.measure.profiler.micro_batches import (
    MAX_PASSES,
    Plans,
    Search,
    largest_micro_batches,
    largest_within,
    rehearse,
)
from mixmesh.runtime.allocator import resident_bytes
from mixmesh.runtime.train import peak_memory_bytes
from mixmesh.search.baselines import data_parallel

CPU = torch.device("cpu")
WORLD, BATCH, TOKENS, WIDTH = 3, 32, 2048, 64
CLUSTER = """\
name = "three"
[[machine]]
devices = [{{ name = "cpu", cpu_share = 0.3, memory_gib = {memory_gib}, count = 3 }}]
"""


def limit_memory(more_bytes: int) -> None:
    """Of this process: allocations fail beyond what it has and this."""
    has = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (has + more_bytes,) * 2)


def allocate(size_bytes: int) -> int:
    limit_memory(2**28)
    return torch.ones(size_bytes // 4).numel()


def test_a_child_may_run_out_of_memory():
    assert in_child(lambda: allocate(2**20), 20) == Outcome(2**18)
    failed = in_child(lambda: allocate(2**30), 20)
    assert failed.out_of_memory and "can't allocate memory" in failed.error and not failed.done
    killed = in_child(lambda: os.kill(os.getpid(), signal.SIGKILL), 20)
    assert killed.out_of_memory and killed.value is None


def test_a_child_may_fail_otherwise():
    assert in_child(lambda: 1 // 0, 20).error == "ZeroDivisionError: integer division or modulo by zero"
    assert "status 3" in in_child(lambda: os._exit(3), 20).error
    late = in_child(lambda: time.sleep(20), 0.1)
    assert "did not end" in late.error and not late.out_of_memory


@pytest.mark.parametrize("room", [0, 99, 100, 101, 455, 1e9])
def test_the_largest_within(room):
    sizes = [n for n in range(41) if n == 0 or 10 * n + 90 <= room]
    assert largest_within(lambda n: 10 * n + 90, room, 40) == max(sizes)


@pytest.mark.parametrize("error", [-0.3, -0.1, 0.0, 0.1, 0.3])
@pytest.mark.parametrize("killed", [True, False])
def test_search_confirms_what_runs(error, killed):
    """The truth differs from the prediction by a part of what grows with the size, and is 100 + 10 n."""
    tried = []

    def run(size: int) -> Outcome:
        tried.append(size)
        needed = 100 + 10 * size
        return Outcome(error="killed", out_of_memory=True) if killed and needed > 600 else Outcome(needed)

    search = Search(room_bytes=600)
    found = search.largest(lambda n: 100 + 10 * (1 - error) * n, 200, run)
    assert len(tried) == search.passes <= MAX_PASSES and found in tried
    assert (0.5 if killed else 0.8) * 50 <= found <= 50  # one that is killed does not say how much it lacked
    assert search.excess_bytes == pytest.approx(10 * error * found)
    if error == 0:
        assert tried == [50]


def test_search_of_what_never_fits():
    def run(size: int) -> Outcome:
        return Outcome(error="killed", out_of_memory=True)

    search = Search(room_bytes=600)
    assert search.largest(lambda n: 100 + n, 200, run) == 0
    assert search.passes == search.out_of_memory == MAX_PASSES and search.excess_bytes is None
    assert search.largest(lambda n: 10_000 + n, 200, run) == 0 and search.passes == MAX_PASSES
    with pytest.raises(MixmeshError, match="micro-batch of 200"):
        search.largest(lambda n: n, 200, lambda size: Outcome(error="ValueError: no"))


class Wide(nn.Module):
    """Little but activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def job() -> Job:
    torch.manual_seed(0)
    return Job(Wide(), {"x": torch.randn(BATCH, TOKENS, WIDTH)})


def cluster(memory_gib: float) -> Cluster:
    return Cluster.parse(CLUSTER.format(memory_gib=memory_gib))


def plans(made: Job, stage: int) -> Plans:
    costs = CostModel(cluster(4))
    graph = trace(made.model, made.batch).graph
    return Plans(data_parallel(graph, costs, even_ratio(WORLD)), costs, 1, stage, ADAM)


@pytest.mark.parametrize("size", [1, 10, 15, 16, 30])
def test_plans_give_one_rank_its_micro_batches(size):
    plan = plans(job(), 0)(size)
    assert sum(sum(m.sizes) for m in plan.micro_batches) == BATCH
    assert set(plan.micro_batches[1].sizes) == {size}
    assert plan.micro_batches[1].steps == (2 if size <= 15 else 1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_larger_micro_batches_are_predicted_to_take_more(stage):
    """Also from those that are accumulated to those that are the rank's all."""
    plan_of = plans(job(), stage)
    sizes = [plan_of.tensor_bytes(size) for size in (14, 1, 15, 16, 30)]
    assert sizes[1] < sizes[0] < sizes[2] and sizes[1] < sizes[3] < sizes[4]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rehearsal_holds_what_the_micro_batch_takes(stage):
    made = job()
    before = {name: p.clone() for name, p in made.model.named_parameters()}
    plan_of = plans(made, stage)
    small, large = (
        in_child(lambda size=size: rehearse(made, plan_of(size), 1, CPU), 60).value for size in (2, 14)
    )
    activation = 12 * TOKENS * WIDTH * 4  # of one layer, for so many samples more
    # at least the samples of both micro-batches and the layers' results of one; a heap loses some in between
    assert 6 * activation < large - small < 60 * activation
    assert all(torch.equal(p, before[name]) for name, p in made.model.named_parameters())
    assert not torch.distributed.is_initialized()


def test_what_is_free_in_the_heap_hides_nothing():
    """Of what a child takes, whose largest resident size begins with what its parent holds."""
    rows = [torch.ones(2**14) for _ in range(4800)]  # 300 MiB within the heap
    last = torch.ones(2**14)  # they lie before it, and so are not at the heap's end
    del rows
    hidden = in_child(lambda: peak_memory_bytes(CPU) - resident_bytes(), 60).value
    assert hidden < 16 * 2**20 and last.numel()


def test_largest_micro_batches_of_a_small_device():
    made = job()
    costs = CostModel(cluster(0.45))
    program = data_parallel(trace(made.model, made.batch).graph, costs, even_ratio(WORLD))
    found = largest_micro_batches(made, program, costs, 1, device=CPU, largest_share=0.4)
    assert all(1 <= n <= 13 for n in found.samples)
    assert found.passes <= 4 * MAX_PASSES and abs(found.excess_bytes) < 200 * 2**20
    torch.distributed.init_process_group("fake", rank=0, world_size=1)
    try:
        with pytest.raises(InputError, match="before torch.distributed"):
            largest_micro_batches(made, program, costs, 1, device=CPU)
    finally:
        torch.distributed.destroy_process_group()


LIMITED = """\
import json, torch
from mixmesh.measure.profiler.children import in_child
outcomes = [in_child(lambda n=n: torch.ones(n * 2**20 // 4).numel(), 60) for n in (16, 2048, 16)]
print(json.dumps([(o.value, o.out_of_memory) for o in outcomes]))
"""


@pytest.mark.skipif(not testbed.probe().possible, reason="needs root and control groups")
def test_a_device_over_its_memory_limit_lives_on():
    lines: list[str] = []
    one = Cluster.parse("[[machine]]\ndevices = [{ cpu_share = 0.5, memory_gib = 0.5 }]\n")
    result = testbed.run(
        one, [sys.executable, "-c", LIMITED], on_output=lambda rank, stream, text: lines.append(text)
    )
    assert result.ok and json.loads("".join(lines).splitlines()[-1]) == [
        [2**22, False],
        [None, True],
        [2**22, False],
    ]
