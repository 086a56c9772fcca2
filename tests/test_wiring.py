"""Links of a machine, figures of cards, and the kind of network in a cluster file."""

from dataclasses import replace

import pytest

from mixmesh.cluster import Cluster, DeviceLink, with_faster_inside, without_device
from mixmesh.cluster.cluster import BRIDGE_GBIT_PER_S
from mixmesh.cost.profile import links_fingerprint
from mixmesh.errors import ClusterError

FOUR = """\
[network]
bandwidth_gbit_per_s = 100
kind = "rdma"
[[machine]]
devices = [{ device = "RTX3090-24GB", count = 4 }]
link_gbit_per_s = 100
p2p = false
links = [{ devices = [0, 1], gbit_per_s = 448, latency_us = 3 }, { devices = [2, 3], gbit_per_s = 448 }]
[[machine]]
devices = [{ device = "T4-16GB", issue_us = 12.5, efficiency = [["product", "half", 0.5, 4, 1.1]] }]
"""
PLAIN = """\
[network]
bandwidth_gbit_per_s = 100
[[machine]]
devices = [{ name = "a", tflop_per_s = 2, memory_gib = 4, memory_gbyte_per_s = 200, count = 2 }]
[[machine]]
devices = [{ name = "a", tflop_per_s = 2, memory_gib = 4, memory_gbyte_per_s = 200 }]
"""


def test_what_a_file_says():
    cluster = Cluster.parse(FOUR)
    first, second = cluster.machines
    assert cluster.network_kind == "rdma"
    assert first.links == (DeviceLink((0, 1), 56e9, 3e-6), DeviceLink((2, 3), 56e9, 10e-6))
    assert first.bridge_bytes_per_s == float(BRIDGE_GBIT_PER_S) / 8 * 1e9 and not first.p2p
    assert cluster.bandwidth_between(0, 1) == 56e9 and cluster.latency_between(0, 1) == 3e-6
    assert cluster.bandwidth_between(1, 2) == 3e9 and cluster.latency_between(1, 2) == 10e-6
    (card,) = second.devices
    assert (card.issue_s, card.sustained) == (12.5e-6, 0.6)
    assert card.efficiency == (("product", "half", 0.5, 4e-6, 1.1),)
    assert second.p2p and second.bridge_bytes_per_s is None


def test_it_reads_back_and_has_a_fingerprint_of_its_own():
    cluster = Cluster.parse(FOUR)
    assert Cluster.parse(cluster.to_toml()) == cluster
    others = {
        FOUR.replace(old, new)
        for old, new in (
            ('"rdma"', '"tcp"'), ("p2p = false", "p2p = false\nbridge_gbit_per_s = 40"), ("[2, 3]", "[1, 2]"),
            ("latency_us = 3", "latency_us = 4"), ("12.5", "13"), ("0.5, 4", "0.5, 5"),
        )
    }  # fmt: skip
    assert len({Cluster.parse(text).fingerprint for text in (FOUR, *others)}) == 7


def test_files_without_such_figures_have_the_fingerprints_that_they_had():
    """Plans and profiles are kept by them."""
    cluster = Cluster.parse(PLAIN)
    assert cluster.fingerprint == "bb1280659454"
    assert links_fingerprint(cluster) == "daac4694653d"


def test_links_join_devices_that_are_there_once():
    for text, words in (
        ("links = [{ devices = [0, 4], gbit_per_s = 1 }]", "0 to 3"),
        ("links = [{ devices = [1, 1], gbit_per_s = 1 }]", "itself"),
        (
            "links = [{ devices = [0, 1, 2], gbit_per_s = 1 }, { devices = [2, 1], gbit_per_s = 2 }]",
            "1 and 2",
        ),
        ("links = [{ devices = [0], gbit_per_s = 1 }]", "links"),
        ('links = [{ devices = [0, 1], gbit_per_s = "fast" }]', "gbit_per_s"),
    ):
        with pytest.raises(ClusterError, match=words):
            Cluster.parse("[[machine]]\ndevices = [{ device = 'A100-40GB', count = 4 }]\n" + text)


@pytest.mark.parametrize(
    "row", ['["product"]', '["produce", "half", 0.5, 4]', '["product", "any", 0.5, 4]',
            '["product", "half", 0, 4]', '["product", "half", 0.5, -1]', '["product", "half", true, 4]']
)  # fmt: skip
def test_rows_of_efficiencies_are_checked(row):
    with pytest.raises(ClusterError, match="efficiency"):
        Cluster.parse(f"[[machine]]\ndevices = [{{ device = 'A100-40GB', efficiency = [{row}] }}]\n")


def test_faster_and_fewer():
    machine = Cluster.parse(FOUR).machines[0]
    faster = with_faster_inside(machine, 2.0)
    assert [link.bytes_per_s for link in faster.links] == [112e9, 112e9] and faster.bridge_bytes_per_s == 6e9
    fewer = without_device(machine, 1)  # its partner has no link left; the others' numbers move
    assert len(fewer.devices) == 3 and [link.devices for link in fewer.links] == [(1, 2)]
    assert replace(fewer, links=()).wiring != fewer.wiring
