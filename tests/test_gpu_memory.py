"""What a GPU holds beside tensors: the model of the caching allocator against the allocator in small, and the
communicators of a plan against those that its runtime uses."""

from __future__ import annotations

import random
from functools import cache, partial

import pytest
import torch
from gloo_world import assert_passed, run_world

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel, gpu_memory
from mixmesh.cost.communicators import Communicator
from mixmesh.cost.exchanges import cut_shares
from mixmesh.cost.gpu_memory import MIB, POOL_BYTES, allocator_loss, communicator_bytes
from mixmesh.cost.meetings import communicators
from mixmesh.frontend.job import Job
from mixmesh.frontend.job.workloads.images import Bottleneck, Classifier
from mixmesh.frontend.job.workloads.layers import MoeLayer
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import samples_of
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.lang.plan_file import Plan
from mixmesh.measure.profiler import constants
from mixmesh.planner import make_plan
from mixmesh.runtime import comm as runtime_comm
from mixmesh.runtime.comm import Comm
from mixmesh.runtime.parallel import parallelize
from mixmesh.step.memory import Memory, PeakMemory
from tests.gpu import checks
from tests.memory_jobs import adamw, images_job, tokens_job
from tests.support.allocation_traces import Walked, recorded, stored
from tests.support.caching_allocator import (
    OutOfMemory,
    needed_bytes,
    peak_bytes,
    replay,
    scaled,
)

GIB = 2**30
SIZES_GIB = (4.0, 6.1, 11.3, 24.0)  # of the tensors at the peak
MOST_OVER = 1.1


def model_bytes(tensors_bytes: float, loss: float = gpu_memory.GROWING_LOSS) -> float:
    """What the cost model says that the allocator holds for tensors of so many bytes at the peak."""
    return tensors_bytes * (1 + loss) + POOL_BYTES


# --- the allocator in small -------------------------------------------------------------------------------


def allocated(*sizes: int, expandable: bool = False):
    return replay([(True, n, size) for n, size in enumerate(sizes)], expandable=expandable)


def test_segments_are_those_of_pytorch():
    """c10/core/AllocatorConfig.h: 2 MiB up to 1 MiB, 20 MiB up to 10 MiB, then a multiple of 2 MiB."""
    assert allocated(1).reserved == 2 * MIB and allocated(1).allocated == 512
    assert allocated(MIB, MIB).reserved == 2 * MIB
    assert allocated(7 * MIB, 7 * MIB).reserved == 20 * MIB
    assert allocated(7 * MIB, 7 * MIB, 7 * MIB).reserved == 40 * MIB  # what is left takes no third
    assert allocated(10 * MIB).reserved == 10 * MIB and allocated(10 * MIB + 1).reserved == 12 * MIB
    assert allocated(7 * MIB, 7 * MIB, 7 * MIB, expandable=True).reserved == 40 * MIB
    assert allocated(30 * MIB, 30 * MIB, expandable=True).reserved == 60 * MIB


def test_a_freed_block_takes_what_fits_into_it():
    trace = [(True, "a", 30 * MIB), (True, "b", 2 * MIB), (False, "a", 30 * MIB), (True, "c", 32 * MIB)]
    assert replay(trace, expandable=False).reserved == (30 + 20 + 32) * MIB
    assert replay(trace, expandable=True).reserved == 80 * MIB
    again = [*trace[:3], (True, "c", 12 * MIB), (True, "d", 18 * MIB)]
    assert replay(again, expandable=False).reserved == 50 * MIB  # split in two
    assert replay(again, expandable=True).reserved == 40 * MIB


def test_a_rest_of_up_to_one_mib_stays_with_a_large_block():
    trace = [(True, "a", 12 * MIB), (False, "a", 12 * MIB), (True, "b", 11 * MIB), (True, "c", MIB // 2)]
    allocator = replay(trace, expandable=False)
    assert allocator.allocated == 12 * MIB + MIB // 2 and allocator.reserved == 14 * MIB


def test_segments_that_nobody_uses_go_back_before_memory_runs_out():
    trace = [(True, "a", 40 * MIB), (False, "a", 40 * MIB), (True, "b", 60 * MIB)]
    for expandable in (False, True):
        assert replay(trace, expandable=expandable, capacity=60 * MIB).reserved == 60 * MIB
        with pytest.raises(OutOfMemory):
            replay(trace, expandable=expandable, capacity=59 * MIB)
        assert needed_bytes(trace, expandable=expandable) == 60 * MIB


def test_segments_that_grow_lose_less():
    """A block between two that are freed: as one segment they are one place again, but for what is held."""
    sizes = [(True, n, 15 * MIB) for n in range(8)]
    freed = [(False, n, 15 * MIB) for n in range(8) if n != 3]
    trace = [*sizes, *freed, (True, "large", 60 * MIB)]
    assert replay(trace, expandable=False).reserved == (8 * 16 + 60) * MIB
    assert replay(trace, expandable=True).reserved == 120 * MIB


# --- the model of it --------------------------------------------------------------------------------------


def single(job: Job) -> Plan:
    return checks.planned(job, checks.cluster_of(torch.device("cpu")))


def language() -> Job:
    return checks.Size(num_layers=3, width=64, num_heads=4, words=500, seq=32, batch=8).job()


def mixture() -> Job:
    layers = [MoeLayer(32, 2, 64, experts=4, seq=16) for _ in range(2)]
    return tokens_job(layers, 8, 16, 200, 32, adamw)


def convolutions() -> Job:
    body = [torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), Bottleneck(8, 8, 1), Bottleneck(32, 16, 2)]
    head = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 100))
    return images_job(Classifier(torch.nn.Sequential(*body), head), 8, 24, adamw)


@cache
def trace_of_run(make) -> tuple:
    """Three steps of a job on the CPU, from when its model is there."""
    plan = single(make())
    job, steps = make(), []

    def run() -> None:
        steps.append(checks.stepped(job, torch.device("cpu"), plan))
        checks.losses(steps[0], 3)

    return tuple([*stored(plan.program), *recorded(run)])


@pytest.mark.parametrize("make", [language, mixture, convolutions])
def test_the_allocator_holds_what_is_predicted_in_trainings(make):
    """Trainings that ran here, as if their tensors were larger: never under, at most 10 % over, whether the
    card is just large enough or the allocator keeps what it has had."""
    trace = list(trace_of_run(make))
    assert sum(allocates for allocates, _, _ in trace) > 300
    for size_gib in SIZES_GIB:
        larger = scaled(trace, size_gib * GIB / peak_bytes(trace))
        reserved = replay(larger, expandable=True).peak_reserved
        model = model_bytes(peak_bytes(larger))
        assert reserved <= model <= MOST_OVER * needed_bytes(larger, expandable=True), size_gib


@pytest.mark.parametrize("make", [language, convolutions])
def test_segments_that_do_not_grow_hold_more(make):
    """As PyTorch has them without other settings: never under."""
    trace = list(trace_of_run(make))
    for size_gib in SIZES_GIB:
        larger = scaled(trace, size_gib * GIB / peak_bytes(trace))
        reserved = replay(larger, expandable=False).peak_reserved
        assert reserved <= model_bytes(peak_bytes(larger), gpu_memory.FIXED_LOSS)


CLUSTER = """
[network]
bandwidth_gbit_per_s = 1
[[machine]]
devices = [{ name = "fast", tflop_per_s = 2, memory_gib = 40, memory_gbyte_per_s = 200 }]
[[machine]]
devices = [{ name = "slow", tflop_per_s = 1, memory_gib = 40, memory_gbyte_per_s = 80, count = 2 }]
"""
PLANNERS = ("ddp-even", "ddp-proportional", "fsdp-even", "hap", "pipeline")


@cache
def planned(planner: str) -> Plan:
    job = language()
    return make_plan(trace(job.model, job.batch), Cluster.parse(CLUSTER), planner=planner, search_s=0.5)


@pytest.mark.parametrize("planner", PLANNERS[:4])
@pytest.mark.parametrize("seed", range(3))
def test_a_card_needs_what_is_predicted_in_steps_of_plans(planner, seed):
    """Steps in the order of the liveness walk, whose tensors are drawn: a card of what is predicted is large
    enough, and one of a tenth less is not."""
    draw, program = random.Random(f"{planner} {seed}"), planned(planner).program
    moments = Memory(program, ADAM, cuda=True).moments
    rank = draw.choice(program.working_ranks)

    def share(cut) -> float:
        return cut_shares(cut, program.ratio(cut.ratio), program.world_size)[rank]

    walked = Walked(seed)
    walked.store(program, share, kept=ADAM.kept)
    for _ in range(2):
        walked.step(moments, share)
    factor = draw.uniform(4, 16) * GIB / peak_bytes(walked.trace)
    larger = scaled(walked.trace, factor)
    needed = needed_bytes(larger, expandable=True)
    assert 1.0 <= model_bytes(peak_bytes(larger)) / needed <= MOST_OVER


def test_peaks_have_what_the_allocator_loses(monkeypatch):
    program = planned("ddp-even").program
    costs = CostModel(Cluster.parse(CLUSTER))
    known, memory = PeakMemory(costs), Memory(program, ADAM, cuda=True)
    held = (memory.held_bytes(program).max(axis=0) - POOL_BYTES) / (1 + gpu_memory.FIXED_LOSS)
    fixed = [known.constants(program)[r] + model_bytes(held[r], gpu_memory.FIXED_LOSS) for r in range(3)]
    assert known.peaks(program) == pytest.approx(fixed, abs=2)
    assert all(most >= peak for most, peak in zip(PeakMemory(costs).at_most(program), fixed))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    growing = [known.constants(program)[r] + model_bytes(held[r]) for r in range(3)]
    assert PeakMemory(costs).peaks(program) == pytest.approx(growing, abs=2)


def test_the_users_settings_of_the_allocator_count(monkeypatch):
    """They are read as PyTorch reads them."""
    for name in gpu_memory.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    assert allocator_loss() == gpu_memory.FIXED_LOSS
    assert allocator_loss({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments: True"}) == gpu_memory.GROWING_LOSS
    assert allocator_loss({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}) == gpu_memory.FIXED_LOSS
    both = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:False",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    assert allocator_loss(both) == gpu_memory.FIXED_LOSS
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert allocator_loss() == gpu_memory.GROWING_LOSS


def test_pytorch_takes_the_setting():
    """The name of the setting is PyTorch's: it knows which values it has."""
    with pytest.raises(Exception, match="True.*False"):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:Perhaps")
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    assert "expandable_segments:True" in torch._C._accelerator_getAllocatorSettings()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


# --- communicators ----------------------------------------------------------------------------------------


def cards(text: str, nic_gbit: float = 200) -> Cluster:
    return Cluster.parse(f"[network]\nbandwidth_gbit_per_s = {nic_gbit}\n{text}")


def machine(device: str, count: int, link_gbit: float) -> str:
    devices = f'[{{ device = "{device}", count = {count} }}]'
    return f"[[machine]]\nlink_gbit_per_s = {link_gbit}\ndevices = {devices}\n"


def everyone(cluster: Cluster, is_pairwise: bool = False) -> Communicator:
    return Communicator("data", tuple(range(cluster.world_size)), is_pairwise)


@pytest.mark.parametrize(
    ("cluster", "is_pairwise", "measured_mib"),
    [
        # NVIDIA/nccl issue 964: A100 with NVLink, a group of two, and of four
        (cards(machine("A100-40GB", 2, 2400)), False, 544),
        (cards(machine("A100-40GB", 4, 2400)), False, 688),
        # NVIDIA/nccl issue 1685: what the first all_to_all of eight H100 adds
        (cards(machine("H100-80GB", 8, 3600)), True, 3.28e9 / MIB),
    ],
)
def test_communicators_hold_no_less_than_was_measured(cluster, is_pairwise, measured_mib):
    size = communicator_bytes(cluster, everyone(cluster, is_pairwise), 0) / MIB
    if is_pairwise:
        size -= communicator_bytes(cluster, everyone(cluster), 0) / MIB
    assert measured_mib <= size <= 1.35 * measured_mib


def test_communicators_hold_less_on_slower_wires():
    """PCIe has fewer channels, TCP has its buffers in the host's memory, two ranks have one neighbour."""
    nvlink = cards(machine("V100-32GB", 4, 1200))
    pcie = cards(machine("V100-32GB", 4, 100))
    sizes = [communicator_bytes(c, everyone(c), 0) for c in (nvlink, pcie)]
    assert sizes[0] > 3 * sizes[1]
    rdma, tcp = (cards(2 * machine("V100-32GB", 2, 100), nic) for nic in (100, 10))
    assert communicator_bytes(rdma, everyone(rdma), 0) > communicator_bytes(tcp, everyone(tcp), 0)
    pair = Communicator("data", (0, 1))
    assert communicator_bytes(pcie, pair, 0) < sizes[1]


def test_a_plan_counts_its_own_communicators():
    """Sums alone need fewer than gathers and exchanges between stages."""
    counts = {planner: own(planner, 0) for planner in ("ddp-even", "fsdp-even", "pipeline")}
    assert {c.purpose for c in counts["ddp-even"]} == {"data", "gradient"}
    assert {c.purpose for c in counts["fsdp-even"]} >= {"data", "parameter"}
    assert any(c.is_pairwise for c in counts["pipeline"])
    costs = CostModel(Cluster.parse(CLUSTER))
    program = planned("fsdp-even").program
    constants_bytes = PeakMemory(costs).constants(program)
    for rank in range(3):
        alone = costs.memory_constant_bytes(rank, ())
        more = sum(
            communicator_bytes(costs.cluster, c, rank) for c in communicators(program) if rank in c.ranks
        )
        assert constants_bytes[rank] == alone + more and more > 100 * MIB


def own(planner: str, rank: int) -> list[Communicator]:
    plan = planned(planner)
    samples = samples_of(plan.program) if plan.order else None
    return [c for c in communicators(plan.program, samples) if rank in c.ranks]


def test_a_profile_has_a_communicators_own_bytes():
    """What was measured of one, times the plan's own; a profile without counts as it did."""
    known = gpu_memory.measured_bytes(1000, (100, 50), 3, (Communicator("data", (0, 1, 2), True),), 0)
    assert known == 1000 + 100 + 50
    pair = (Communicator("data", (0, 1), True), Communicator("gradient", (1, 2)))
    assert gpu_memory.measured_bytes(1000, (100, 50), 3, pair, 0) == 1000 + 100 + 25
    assert gpu_memory.measured_bytes(1000, (100, 50), 3, None, 0) == 1000 + 2 * 100
    assert gpu_memory.measured_bytes(1000, (), 3, pair, 0) == 1000


def test_constants_of_all_ranks_are_those_of_each():
    """Machines and cards of several kinds, communicators of some ranks, idle ones among them."""
    cluster = Cluster.parse(
        'name = "x"\n[network]\nbandwidth_gbit_per_s = 25\n'
        '[[machine]]\ndevices = [{ device = "A100-40GB", count = 2 }, { device = "T4-16GB" }]\n'
        '[[machine]]\ndevices = [{ device = "A100-40GB", count = 2 }]\n'
        '[[machine]]\nlink_gbit_per_s = 2400\ndevices = [{ device = "A100-40GB", count = 2 }]\n'
    )
    costs = CostModel(cluster)
    several = (
        Communicator("data", (0, 1, 2, 3), True), Communicator("sums", (1, 5, 6)), Communicator("x", (4,)),
    )  # fmt: skip
    for meetings in (None, (), several):
        for working in (None, (), (0, 1, 4, 6)):
            expected = [
                costs.memory_constant_bytes(r, meetings, idle=working is not None and r not in working)
                for r in range(7)
            ]
            assert costs.memory_constants_bytes(meetings, working=working) == expected
    assert len(set(expected)) > 4


def used_groups(planner: str, _: None) -> None:
    """A training step uses the groups that are counted, and no other, on this rank."""
    plan, used = planned(planner), set()
    start = runtime_comm.Channel.start

    def counting(channel, call, *args, **kwargs):
        used.add(next(key for key, group in channel.comm.groups.items() if group is channel.group))
        return start(channel, call, *args, **kwargs)

    runtime_comm.Channel.start = counting
    try:
        job = language()
        optimizer = job.optimizer(job.model.parameters())
        model, optimizer = parallelize(job.model, optimizer, plan, device="cpu", timeout_s=60, heartbeat_s=0)
        for _ in range(2):
            model(**job.batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        runtime_comm.Channel.start = start
    rank = model.comm.rank
    counted = {(c.purpose, c.ranks) for c in own(planner, rank)}
    # the shapes of batches travel through the host's memory, by groups of their own
    used = {(purpose, ranks) for purpose, ranks in used if not purpose.startswith("shapes")}
    assert used == counted, (rank, used ^ counted)
    model.comm.close()


@cache
def used_in_a_world() -> dict[str, list[str | None]]:
    """One world for all planners: its start takes longer than its steps."""
    for planner in PLANNERS:
        planned(planner)
    return run_world(3, {planner: partial(used_groups, planner) for planner in PLANNERS})


@pytest.mark.parametrize("planner", PLANNERS)
def test_communicators_are_the_groups_that_a_training_uses(planner):
    assert_passed(used_in_a_world()[planner])


def use_a_channel(comm: Comm) -> None:
    """The calls that make a communicator's connections, as `mixmesh profile` measures them, are right."""
    channel = comm.channel(comm.everyone, "memory")
    constants._sum(channel)
    constants._exchange(channel)


def two_ranks() -> Comm:
    return Comm.of_sets(2, (), device="cpu", timeout_s=30)


def test_communicators_are_measured_by_collectives_that_run():
    assert_passed(run_world(2, {"use": use_a_channel}, two_ranks)["use"])


def test_a_process_on_a_gpu_holds_gigabytes():
    """Others measured 3 to 5 GB for contexts, workspaces and NCCL's buffers on cards with NVLink."""
    for device, link_gbit in (("A100-80GB", 2400), ("H100-80GB", 3600)):
        cluster = cards(machine(device, 8, link_gbit))
        plan_of_three = (
            everyone(cluster),
            Communicator("gradient", tuple(range(8))),
            Communicator("parameter", tuple(range(8))),
        )
        size = gpu_memory.process_bytes(cluster, 0, plan_of_three, idle=False)
        assert 3e9 < size < 6e9, size
    alone = cards(machine("T4-16GB", 1, 100))
    assert gpu_memory.process_bytes(alone, 0, idle=False) < 1e9
    assert gpu_memory.process_bytes(alone, 0, idle=True) == gpu_memory.CONTEXT_BYTES


def test_workspaces_go_by_the_card():
    """PyTorch's CublasHandlePool.cpp."""
    hopper, before, mi300 = map(gpu_memory.workspace_bytes, ("H100-80GB", "A100-40GB", "MI300X-192GB"))
    assert (hopper, before, mi300) == (4 * 32 * MIB, 4 * 8320 * 1024, 4 * 128 * MIB)
    assert gpu_memory.workspace_bytes("a card of tomorrow") == hopper
    assert gpu_memory.workspace_bytes("RTX5090-32GB") == hopper
