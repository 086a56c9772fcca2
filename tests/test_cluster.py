import dataclasses
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixmesh.cluster import Cluster, Device, Machine
from mixmesh.cluster.catalogue import CATALOGUE
from mixmesh.errors import ClusterError

TWO_BOXES = """
name = "two boxes"
[network]
bandwidth_gbit_per_s = 10.4
latency_us = 30
[[machine]]
name = "a"
devices = ["V100-16GB", "V100-16GB"]
link_gbit_per_s = 160
[[machine]]
name = "b"
nic_gbit_per_s = 8
devices = [{ name = "slow", tflop_per_s = 4.3, memory_gib = 12, memory_gbyte_per_s = 500, cpu_share = 0.35 }]
"""
ONE = '[[machine]]\nname = "a"\ndevices = ["T4-16GB"]\n'
NETWORK = "[network]\nbandwidth_gbit_per_s = 10\nlatency_us = 30\n"


def with_device(table: str) -> str:
    return f"{NETWORK}{ONE}[[machine]]\nname = 'b'\ndevices = [{table}]\n"


def test_the_form_in_the_documentation():
    cluster = Cluster.parse(TWO_BOXES)
    assert cluster.name == "two boxes"
    assert cluster.world_size == 3
    assert cluster.bandwidth_bytes_per_s == 1.3e9
    assert cluster.latency_s == 30e-6
    assert [d.name for d in cluster.devices] == ["V100-16GB", "V100-16GB", "slow"]
    slow = cluster.devices[2]
    assert slow == Device("slow", 4.3e12, 12 * 2**30, 500e9, cpu_share=0.35, kind="cpu")
    assert slow.half_flop_per_s == 4.3e12
    assert cluster.machines[0].link_bytes_per_s == 20e9
    assert cluster.machines[0].nic_bytes_per_s == 1.3e9  # default: the network's
    assert cluster.machines[1].link_bytes_per_s == 2.5e9  # default of a machine with emulated devices
    assert pickle.loads(pickle.dumps(cluster)) == cluster


def test_ranks_and_links():
    cluster = Cluster.parse(TWO_BOXES)
    assert cluster.ranks_of(0) == (0, 1) and cluster.ranks_of(1) == (2,)
    assert cluster.machine_of(2).name == "b"
    assert cluster.bandwidth_between(0, 1) == 20e9
    assert cluster.bandwidth_between(0, 2) == cluster.bandwidth_between(2, 0) == 1e9  # the smaller nic
    assert cluster.bandwidth_between(1, 1) == math.inf and cluster.latency_between(1, 1) == 0
    assert cluster.latency_between(0, 1) == 10e-6
    assert cluster.latency_between(1, 2) == 30e-6
    with pytest.raises(IndexError):
        cluster.machine_of(-1)


def test_equal_machines_are_not_one_machine():
    machine = Machine("m", (Device("d", 1e12, 2**30, 1e9),), 10e9, 1e-6, 1e9)
    cluster = Cluster("c", (machine, machine), 1e9, 1e-5)
    assert cluster.bandwidth_between(0, 1) == 1e9
    assert cluster.latency_between(0, 1) == 1e-5


def test_fingerprint_is_of_what_affects_a_plan():
    cluster = Cluster.parse(TWO_BOXES)
    assert len(cluster.fingerprint) == 12 and int(cluster.fingerprint, 16) >= 0
    assert dataclasses.replace(cluster, name="other").fingerprint == cluster.fingerprint
    changes = [("10.4", "10.5"), ("latency_us = 30", "latency_us = 31"), ("= 160", "= 150"), ("0.35", "0.4")]
    changes += [('"V100-16GB", ', ""), ("= 12", "= 13"), ('"slow"', '"slower"'), ("nic_gbit_per_s = 8", "")]
    prints = {Cluster.parse(TWO_BOXES.replace(old, new)).fingerprint for old, new in changes}
    assert len(prints) == len(changes) and cluster.fingerprint not in prints


def test_describe_names_every_rank():
    text = Cluster.parse(TWO_BOXES).describe()
    assert "3 devices in 2 machines" in text and "10.4 Gbit/s" in text
    assert "rank 2  slow" in text and "0.35 of a CPU core" in text


def test_overrides_counts_and_emulated_defaults():
    cluster = Cluster.parse(
        with_device('{ device = "T4-16GB", cpu_share = 0.5, count = 2 }, { cpu_share = 0.2, memory_gib = 1 }')
    )
    _, t4, again, cpu = cluster.devices
    assert t4 == again and t4.name == "T4-16GB@0.5" and t4.flop_per_s == 8.1e12 and t4.kind == "cpu"
    assert cpu.name == "cpu@0.2" and cpu.memory_bytes == 2**30 and cpu.flop_per_s == 1e10


def test_one_machine_needs_no_network():
    cluster = Cluster.parse(ONE)
    assert cluster.bandwidth_bytes_per_s == cluster.machines[0].link_bytes_per_s


def test_catalogue_rows_are_dense_peaks_with_a_source():
    assert len(CATALOGUE) >= 49
    for name, row in CATALOGUE.items():
        assert name == row.name and row.source and name.endswith(f"-{row.memory_gib}GB")
        assert row.half_tflop_per_s >= row.tflop_per_s
        assert (
            Cluster.parse(f'[[machine]]\ndevices = ["{name}"]').devices[0].supports_bf16 is row.supports_bf16
        )


def test_a_network_needs_no_latency():
    text = NETWORK.replace("latency_us = 30\n", "") + ONE + ONE.replace('"a"', '"b"')
    assert Cluster.parse(text).latency_s == 50e-6


def test_devices_may_have_the_names_that_pytorch_reports():
    given = ["NVIDIA GeForce RTX 3060", "Tesla V100-SXM2-32GB", "NVIDIA H100 PCIe", "AMD Instinct MI210"]
    cluster = Cluster.parse(f"[[machine]]\ndevices = {given}")
    assert [d.name for d in cluster.devices] == ["RTX3060-12GB", "V100-32GB", "H100PCIe-80GB", "MI210-64GB"]
    with pytest.raises(ClusterError) as caught:  # two cards have this name
        Cluster.parse("[[machine]]\ndevices = ['NVIDIA GeForce RTX 3080']")
    assert '"RTX3080-10GB" or "RTX3080-12GB"' in str(caught.value)


@pytest.mark.parametrize(
    "reported, name",
    [
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),  # the catalogue has a row of this form for 80 GB alone
        ("NVIDIA A100 80GB PCIe", "A100PCIE-80GB"),
        ("Tesla V100-DGXS-32GB", "V100-32GB"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),  # 480 GB belong to its CPU
    ],
)
def test_names_of_nvidia_smi_with_a_form_and_a_size(reported, name):
    assert Cluster.parse(f"[[machine]]\ndevices = ['{reported}']").devices[0].name == name


@pytest.mark.parametrize("size", ["24 GB", "24GiB", "24G", "(24 GB)", "24gb"])
def test_sizes_of_cards_are_spelt_in_several_ways(size):
    assert Cluster.parse(f"[[machine]]\ndevices = ['RTX 4090 {size}']").devices[0].name == "RTX4090-24GB"
    with pytest.raises(ClusterError, match="unknown device"):
        Cluster.parse(f"[[machine]]\ndevices = ['RTX 4080 {size}']")


def test_devices_may_have_the_names_that_people_use():
    given = ["RTX 4090", "rtx3060", "V100 32GB", "v100-16gb", "P100 SXM2", "T4"]
    cluster = Cluster.parse(f"[[machine]]\ndevices = {given}")
    names = ["RTX4090-24GB", "RTX3060-12GB", "V100-32GB", "V100-16GB", "P100SXM2-16GB", "T4-16GB"]
    assert [d.name for d in cluster.devices] == names


# what is wrong, the key path, words that help
BAD = [
    ("", "machine", ["no machines", "[[machine]]"]),
    ("machine = []", "machine", ["no machines"]),
    ("[machine]\nname = 'a'", "machine", ["not a list", "[[machine]]"]),
    ("[[machine]]\nname = 'a'", "machine[0].devices", ["no devices"]),
    ("[[machine]]\ndevices = []", "machine[0].devices", ["no devices"]),
    ("[[machine]]\ndevices = 'T4-16GB'", "machine[0].devices", ["not a list"]),
    ("[[machine]]\nname = ''\ndevices = ['T4-16GB']", "machine[0].name", ["a string"]),
    ("[[machine]]\nname = 3\ndevices = ['T4-16GB']", "machine[0].name", ["a string", "3"]),
    ("network = 3\n" + ONE, "network", ["[network]"]),
    (ONE + ONE.replace('"a"', '"b"'), "network", ["no [network]", "bandwidth_gbit_per_s"]),
    (NETWORK + ONE + ONE, "machine[1].name", ["two machines", '"a"', "machine[0]"]),
    (NETWORK.replace("10", "0") + ONE, "network.bandwidth_gbit_per_s", ["above 0", "got      0"]),
    (NETWORK.replace("10", "-1") + ONE, "network.bandwidth_gbit_per_s", ["above 0", "-1"]),
    (NETWORK.replace("10", "nan") + ONE, "network.bandwidth_gbit_per_s", ["finite", "NaN"]),
    (NETWORK.replace("10", "inf") + ONE, "network.bandwidth_gbit_per_s", ["finite", "Inf"]),
    (NETWORK.replace("10", "1e999999999") + ONE, "network.bandwidth_gbit_per_s", ["finite"]),
    (NETWORK.replace("10", "true") + ONE, "network.bandwidth_gbit_per_s", ["number", "true"]),
    (NETWORK.replace("10", '"10"') + ONE, "network.bandwidth_gbit_per_s", ["number", '"10"', "per_s = 10"]),
    (
        NETWORK.replace("10", "'10 Gbit/s'") + ONE,
        "network.bandwidth_gbit_per_s",
        ["try      bandwidth_gbit_per_s = 10"],
    ),
    (NETWORK.replace("10", "'500Mbps'") + ONE, "network.bandwidth_gbit_per_s", ["gbit_per_s = 0.5"]),
    (NETWORK.replace("10", "'1.25 GB/s'") + ONE, "network.bandwidth_gbit_per_s", ["gbit_per_s = 10"]),
    (NETWORK.replace("30", "'0.05 ms'") + ONE, "network.latency_us", ["latency_us = 50"]),
    (NETWORK + "kind = 'InfiniBand'\n" + ONE, "network.kind", ['kind = "rdma"']),
    ("[network]\nbandwidth = '10 Gbit/s'\n" + ONE, "network.bandwidth", ["mean bandwidth_gbit_per_s = 10?"]),
    (ONE + "p2p = 'false'", "machine[0].p2p", ["p2p = false"]),
    (ONE + "host = 'x'", "machine[0].host", ["mean name?"]),
    (
        with_device("{ device = 'T4', memory_gib = '12 GiB' }"),
        "machine[1].devices[0].memory_gib",
        ["_gib = 12"],
    ),
    (with_device("{ device = 'T4', vram = 12 }"), "machine[1].devices[0].vram", ["mean memory_gib?"]),
    (with_device("{ device = 'T4', num = 2 }"), "machine[1].devices[0].num", ["mean count?"]),
    (with_device("{ device = 'T4', count = '2' }"), "machine[1].devices[0].count", ["try      count = 2"]),
    (with_device("'2x RTX 3090'"), "machine[1].devices[0]", ['{ device = "RTX3090-24GB", count = 2 }']),
    (with_device("'A6000'"), "machine[1].devices[0]", ['did you mean "RTXA6000-48GB"?']),
    (NETWORK.replace("30", "-30") + ONE, "network.latency_us", ["0 or more", "-30"]),
    ("[network]\nlatency_us = 1\n" + ONE, "network.bandwidth_gbit_per_s", ["missing", "above 0"]),
    (
        NETWORK.replace("bandwidth", "bandwith") + ONE,
        "network.bandwith_gbit_per_s",
        ["bandwidth_gbit_per_s?"],
    ),
    (ONE + "link_gbit = 10", "machine[0].link_gbit", ["unknown key", "link_gbit_per_s?"]),
    ("nam = 'x'\n" + ONE, "nam", ["unknown key", "did you mean name?"]),
    (NETWORK.replace("latency_us", "latency_ms") + ONE, "network.latency_ms", ["latency_us = 30000?"]),
    (NETWORK.replace("_gbit_", "_mbit_") + ONE, "network.bandwidth_mbit_per_s", ["gbit_per_s = 0.01?"]),
    (NETWORK.replace("10", "1e20") + ONE, "network.bandwidth_gbit_per_s", ["above 0, of 1e-15 to 1e15"]),
    (
        NETWORK.replace("10", "1e10") + ONE,
        "network.bandwidth_gbit_per_s",
        ["at most 1000000, in the unit", "try      bandwidth_gbit_per_s = 10"],
    ),
    (
        with_device("{ device = 'T4-16GB', memory_gib = 17179869184 }"),
        "machine[1].devices[0].memory_gib",
        ["try      memory_gib = 16"],
    ),
    (ONE + "\nbandwidth_gbit_per_s = 10", "machine[0].bandwidth_gbit_per_s", ["is a key of [network]"]),
    (
        ONE + "\nlinks = [{ devices = [0, 1], gbyte_per_s = 56 }]",
        "machine[0].links[0].gbyte_per_s",
        ["mean gbit_per_s = 448?"],
    ),
    (ONE + "\nlinks = [{ devices = [0] }]", "machine[0].links[0].devices", ["two or more", "got      [0]"]),
    (ONE + "\nlinks = [{ devices = [0, -1] }]", "machine[0].links[0].devices[1]", ["[0, 1]", "got      -1"]),
    (
        with_device("{ device = 'T4-16GB', memory_gb = 8 }"),
        "machine[1].devices[0].memory_gb",
        ["memory_gib = 8?"],
    ),
    (
        with_device("{ device = 'T4-16GB', fp16_tflops = 8 }"),
        "machine[1].devices[0].fp16_tflops",
        ["mean half_"],
    ),
    (with_device("{ efficiency = ['product'] }"), "machine[1].devices[0].efficiency[0]", ["a list of rows"]),
    (with_device("'V100-16'"), "machine[1].devices[0]", ["unknown device", '"V100-16GB"']),
    (with_device("'v100'"), "machine[1].devices[0]", ["several devices", '"V100-16GB" or "V100-32GB"']),
    (with_device("'abacus'"), "machine[1].devices[0]", ["unknown device", "tflop_per_s = ..."]),
    (with_device("{ device = 'T416GB' }"), "machine[1].devices[0]", ["unknown device", '"T4-16GB"']),
    (with_device("3"), "machine[1].devices[0]", ["catalogue", "got      3"]),
    (with_device("{ name = 'x' }"), "machine[1].devices[0]", ["missing tflop_per_s, memory_gib"]),
    (with_device("{ cpu_share = 0 }"), "machine[1].devices[0].cpu_share", ["above 0", "at most 1"]),
    (with_device("{ cpu_share = 1.5 }"), "machine[1].devices[0].cpu_share", ["at most 1", "1.5"]),
    (with_device("{ cpu_share = 0.5, memory_gib = 0 }"), "machine[1].devices[0].memory_gib", ["above 0"]),
    (with_device("{ cpu_share = 0.5, memry_gib = 4 }"), "machine[1].devices[0].memry_gib", ["memory_gib?"]),
    (with_device("{ cpu_share = 0.5, count = 0 }"), "machine[1].devices[0].count", ["whole number"]),
    (with_device("{ cpu_share = 0.5, kind = 'tpu' }"), "machine[1].devices[0].kind", ['"gpu" or "cpu"']),
    (
        with_device("'T4-16GB', { device = 'T4-16GB', memory_gib = 12 }"),
        "machine[1].devices[1]",
        [
            "differ in memory_gib",
            "memory_gib = 16, as machine[0].devices[0]",
            "got      memory_gib = 12",
            "name = ",
        ],
    ),
]


@pytest.mark.parametrize("text, path, words", BAD)
def test_errors_point_at_the_key(text, path, words):
    with pytest.raises(ClusterError) as caught:
        Cluster.parse(text, "c.toml")
    assert caught.value.where == f"c.toml: {path}"
    assert caught.value.expected
    message = str(caught.value)
    for word in words:
        assert word in message
    assert "pydantic" not in message


def test_a_merge_that_was_not_finished():
    text = TWO_BOXES.replace("[network]", "<<<<<<< HEAD\nname = 'a'\n=======\n>>>>>>> other\n[network]")
    with pytest.raises(ClusterError, match="nobody has chosen") as caught:
        Cluster.parse(text, "c.toml")
    assert caught.value.where.startswith("c.toml, line ") and caught.value.got == "<<<<<<< HEAD"


@pytest.mark.parametrize(
    "text, place",
    [
        ("name = \n", "line 1, column 8"),
        ("name = 'a'\nname = 'b'", "line 2, column 11"),
        ("name = 'a'\n[[machine]]\ndevices = [", "line 3, column 12"),
        ("x = " + "1" * 5000, "c.toml"),
        ("x = " + "[" * 5000, "c.toml"),
    ],
)
def test_bad_toml(text, place):
    with pytest.raises(ClusterError, match="not valid TOML") as caught:
        Cluster.parse(text, "c.toml")
    assert place in caught.value.where and "c.toml" in caught.value.where


def test_files_that_cannot_be_read(tmp_path):
    missing, binary = tmp_path / "none.toml", tmp_path / "binary.toml"
    binary.write_bytes(b"name = '\xff'")
    for path, words in [
        (missing, "No such file"),
        (tmp_path, "directory"),
        (binary, "UTF-8"),
        ("a\0b", "null"),
    ]:
        with pytest.raises(ClusterError, match=words) as caught:
            Cluster.load(path)
        assert caught.value.where == str(path) and caught.value.exit_status == 2


def test_load_reads_a_file(tmp_path):
    (tmp_path / "c.toml").write_bytes(b"\xef\xbb\xbf" + TWO_BOXES.encode())  # some editors write the mark
    assert Cluster.load(tmp_path / "c.toml") == Cluster.parse(TWO_BOXES)


@pytest.mark.parametrize("bad", [{"flop_per_s": 0.0}, {"memory_bytes": -1}, {"cpu_share": 1.5}])
def test_values_made_in_code_are_checked_too(bad):
    with pytest.raises(ClusterError, match=next(iter(bad))):
        Device(**{"name": "d", "flop_per_s": 1e12, "memory_bytes": 1, "memory_bytes_per_s": 1e9, **bad})
    with pytest.raises(ClusterError, match="no devices"):
        Machine("m", (), 1.0, 0.0, 1.0)
    with pytest.raises(ClusterError, match="no machines"):
        Cluster("c", (), 1.0, 0.0)


rates = st.floats(1e3, 1e14)
latencies = st.floats(0, 1) | st.just(0.0)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
device_lists = st.lists(
    st.builds(
        Device,
        name=names,
        flop_per_s=rates,
        memory_bytes=st.integers(10**3, 2**44),
        memory_bytes_per_s=rates,
        cpu_share=st.none() | st.floats(1e-6, 1),
        kind=st.sampled_from(["gpu", "cpu"]),
        half_flop_per_s=rates,
        supports_bf16=st.booleans(),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda d: d.name,
).map(tuple)
machines = st.builds(
    Machine, names, device_lists, rates, latencies.filter(lambda x: x == 0 or x > 1e-15), rates
)


@settings(deadline=None)
@given(names, st.lists(machines, min_size=1, max_size=2, unique_by=lambda m: m.name), rates)
def test_a_printed_cluster_reads_back_as_itself(name, machine_list, bandwidth):
    used: set[str] = set()
    for index, machine in enumerate(machine_list):  # device names are types: make them unique
        devices = tuple(dataclasses.replace(d, name=f"{index}{d.name}") for d in machine.devices)
        machine_list[index] = dataclasses.replace(machine, devices=devices)
        used.update(d.name for d in devices)
    cluster = Cluster(name, tuple(machine_list), bandwidth, 3e-5)
    again = Cluster.parse(cluster.to_toml())
    assert again == cluster
    assert again.fingerprint == cluster.fingerprint
    assert again.to_toml() == cluster.to_toml()
