"""Ranks on other devices than were planned for: refused on all of them, with what to type."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed, run_world

from mixmesh.api import plan
from mixmesh.cluster import Cluster
from mixmesh.errors import PlanError
from mixmesh.lang.plan_devices import planned_devices
from mixmesh.lang.plan_file import Plan
from mixmesh.runtime.comm import initialise
from mixmesh.runtime.devices import FoundDevice, device_mismatch, find_device
from mixmesh.runtime.start import Planned, compare_start
from mixmesh.runtime.watch import watch_of_process

GIB = 2**30
TEXT = """\
name = "three kinds"
[network]
bandwidth_gbit_per_s = 10
[[machine]]
name = "a"
devices = ["V100-16GB", "V100-16GB"]
[[machine]]
name = "b"
devices = [{ device = "T4-16GB", count = 2 }]
[[machine]]
name = "c"
devices = [{ device = "T4-16GB", count = 2 }]
[[machine]]
name = "d"
devices = [{ name = "mine", tflop_per_s = 9, memory_gib = 12, memory_gbyte_per_s = 500, count = 2 }]
"""
PLANNED = planned_devices(Cluster.parse(TEXT))


def v100(host="a"):
    return FoundDevice(host, "gpu", "Tesla V100-SXM2-16GB", int(15.77 * GIB))


def t4(host="b"):
    return FoundDevice(host, "gpu", "Tesla T4", int(14.56 * GIB))


def own(host="d", gib=11.9, name="Foo 9000"):
    return FoundDevice(host, "gpu", name, int(gib * GIB))


def cpu(host="a"):
    return FoundDevice(host, "cpu", "a CPU", 0)


def each_twice(*found):
    return [f for f in found for _ in range(2)]


AS_PLANNED = each_twice(v100("a"), t4("b"), t4("c"), own("d"))


def changed(rank, device):
    return [*AS_PLANNED[:rank], device, *AS_PLANNED[rank + 1 :]]


RIGHT = {
    "as planned": AS_PLANNED,
    "names of hosts are not those of machines": [replace(f, host="x" + f.host) for f in AS_PLANNED],
    "machines that are equal changed places": each_twice(v100("a"), t4("c"), t4("b"), own("d")),
    "a form that the catalogue does not have": changed(0, replace(v100(), name="Tesla V100-FHHL-16GB")),
    "only CPUs": [cpu(f.host) for f in AS_PLANNED],
    "more memory than a device of one's own name needs": each_twice(*AS_PLANNED[:6:2], own("d", 24)),
}
WRONG = {
    "swapped": (each_twice(t4("b"), v100("a"), t4("c"), own("d")), 0, "another device", "rank 2 has a V100"),
    "another card": (changed(3, own("b", 14.6)), 3, "another device", "Foo 9000"),
    "another card of the catalogue": (changed(3, v100("b")), 3, "another device", "V100"),
    "other memory": (changed(0, replace(v100(), memory_bytes=32 * GIB)), 0, "another device", "32 GiB"),
    "too small": (changed(6, own(gib=8)), 6, "a larger device", "8 GiB"),
    "a slice of a card": (
        changed(0, replace(v100(), name="V100 MIG 1g", memory_bytes=8 * GIB)), 0, "a larger device", "8 GiB"
    ),
    "no driver": (changed(5, cpu("c")), 5, "another device", "a CPU"),
    "one name, two cards": (changed(7, own(name="Bar 1")), 7, "another device", "Bar 1"),
    "on two hosts": (changed(1, v100("e")), 1, "another machine", '"e"'),
}  # fmt: skip


@pytest.mark.parametrize("case", RIGHT)
def test_the_planned_devices_are_accepted(case):
    assert device_mismatch(PLANNED, (), RIGHT[case]) is None


@pytest.mark.parametrize("case", WRONG)
def test_others_are_refused(case):
    found, rank, reason, got = WRONG[case]
    error = device_mismatch(PLANNED, (), found)
    assert f"rank {rank} was planned for {reason}" == error.message
    assert PLANNED[rank].device in error.expected and f'"{PLANNED[rank].machine}"' in error.expected
    assert got in error.got
    assert "a, b, c, d" in error.hint[0] and "mixmesh detect" in error.hint[1]


def test_hosts_are_compared_where_machines_have_their_names():
    two = Cluster.parse(TEXT.replace('name = "c"\n', 'name = "c"\nnic_gbit_per_s = 1\n'))
    moved = each_twice(v100("a"), t4("c"), t4("b"), own("d"))
    assert (
        device_mismatch(planned_devices(two), (), moved).message == "rank 2 was planned for another machine"
    )


def test_names_of_detection_are_those_that_pytorch_reports():
    names = ("Foo 9000", "Bar 1", "RTX3090-24GB", "RTX3090-24GB-2")
    cards = [own("h", 24, name) for name in ("Foo 9000", "Bar 1", *["NVIDIA GeForce RTX 3090"] * 2)]
    planned = [
        replace(PLANNED[0], machine="h", like="h", device=name, memory_bytes=23 * GIB) for name in names
    ]
    assert device_mismatch(planned, (), cards) is None
    swapped = device_mismatch(planned, (), [cards[1], cards[0], *cards[2:]])
    assert swapped.message == "rank 0 was planned for another device"


@pytest.mark.parametrize("planned", [None, ()])
def test_without_devices_only_memory_is_compared(planned):
    swapped = each_twice(t4(), v100(), t4(), own())
    assert device_mismatch(planned, (GIB,) * 8, swapped) is None
    error = device_mismatch(planned, (GIB,) * 6 + (12 * GIB,) * 2, swapped)
    assert "rank 6 was planned for a larger device" in error.message and error.hint


class Mean(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x).mean()


def test_plans_hold_their_devices_and_old_ones_load():
    made = plan(Mean(), {"x": torch.zeros(8, 4)}, Cluster.parse(TEXT), planner="ddp-even")
    assert made.devices == PLANNED
    text = str(made)
    assert Plan.parse(text).devices == PLANNED
    old = "\n".join(line for line in text.split("\n") if not line.startswith("devices ="))
    assert Plan.parse(old).devices is None
    for row in ('["a", "a", "V100", "gpu"]', '["a", "a", "V100", "gpu", 0]', '["a", "a", 3, "gpu", 1]'):
        with pytest.raises(PlanError, match="devices"):
            Plan.parse(text.replace("devices = [[", f"devices = [{row}, ["))
    with pytest.raises(PlanError, match="devices"):
        Plan.parse(text.replace('devices = [["a", "a", "V100-16GB", "gpu", 17179869184], ', "devices = ["))


def refusal(found):
    """What a rank raises that was given the same as the other and has this device; None if nothing."""
    watch = watch_of_process(300.0, 300.0)  # a busy machine
    try:
        with watch.call("parallelize"):
            compare_start(watch, {"plan": "one"}, Planned(PLANNED[1:3], ()), found, 300.0)
    except PlanError as error:
        return str(error)
    return None


def ranks_refuse_together(_):
    initialise(2, torch.device("cpu"), 300.0)
    rank = dist.get_rank()
    texts = [None, None]
    dist.all_gather_object(texts, refusal((t4("a"), v100("b"))[rank]))
    assert texts[0] == texts[1] and "rank 0 was planned for another device" in texts[0], texts


def ranks_start_together(_):
    rank = dist.get_rank()
    assert refusal((v100("a"), t4("b"))[rank]) is None
    assert refusal(find_device(torch.device("cpu"))) is None


def test_all_ranks_refuse_or_none():
    checks = (ranks_refuse_together, ranks_start_together)
    for failures in run_world(2, {check.__name__: check for check in checks}).values():
        assert_passed(failures)
