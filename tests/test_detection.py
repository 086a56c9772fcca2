"""Detecting devices and links, and starting a job with nothing made by hand."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed, run_world
from launches import cluster_file
from warm_python import python

from mixmesh.base.units import GIB
from mixmesh.cluster import Cluster
from mixmesh.cluster.catalogue import catalogue_row
from mixmesh.cluster.detection import links as measured
from mixmesh.cluster.detection.assemble import assemble
from mixmesh.cluster.detection.cache import Cache, default_folder
from mixmesh.cluster.detection.inventory import (
    NO_LIMIT_BYTES,
    FoundDevice,
    Inventory,
    memory_limit,
    threads_asked,
)
from mixmesh.cluster.detection.links import Link, Links, machine_pairs
from mixmesh.cluster.detection.speed import Speed
from mixmesh.cluster.devices_folder import devices_folder

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("reported", "memory_gib", "name"),
    [
        ("NVIDIA GeForce RTX 3090", 23.7, "RTX3090-24GB"),
        ("NVIDIA GeForce RTX 3080", 9.6, "RTX3080-10GB"),
        ("NVIDIA GeForce RTX 3080", 11.6, "RTX3080-12GB"),
        ("NVIDIA GeForce RTX 4070 SUPER", 11.6, "RTX4070SUPER-12GB"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 15.6, "RTX4070TiSUPER-16GB"),
        ("NVIDIA GeForce RTX 3060", 11.6, "RTX3060-12GB"),
        ("NVIDIA GeForce RTX 5060 Ti", 15.5, "RTX5060Ti-16GB"),
        ("NVIDIA GeForce RTX 5090", 31.4, "RTX5090-32GB"),
        ("NVIDIA RTX A5000", 23.6, "RTXA5000-24GB"),
        ("NVIDIA RTX 6000 Ada Generation", 47.4, "RTX6000Ada-48GB"),
        ("NVIDIA A40", 44.4, "A40-48GB"),
        ("AMD Instinct MI250X", 63.9, "MI250X-64GB"),
        ("AMD Instinct MI300X", 191.5, "MI300X-192GB"),
        ("AMD Radeon RX 7900 XTX", 23.9, "RX7900XTX-24GB"),
        ("AMD Radeon RX 6800 XT", 15.9, None),  # not in the catalogue: measured
        ("Tesla V100-SXM2-32GB", 31.7, "V100-32GB"),
        ("Tesla T4", 14.6, "T4-16GB"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", 79.1, "A100PCIE-80GB"),
        ("NVIDIA A100-SXM4-80GB", 79.1, "A100-80GB"),
        ("NVIDIA TITAN Xp", 11.9, "TITANXp-12GB"),
        ("Quadro RTX 8000", 47.4, "QUADRORTX8000-48GB"),
        ("NVIDIA GeForce RTX 2080 SUPER", 7.8, "RTX2080SUPER-8GB"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100-80GB"),
        ("NVIDIA H100 PCIe", 79.1, "H100PCIe-80GB"),
        ("AMD Instinct MI210", 63.9, "MI210-64GB"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", 9.6, None),  # another chip
        ("NVIDIA A10G", 22.0, "A10G-24GB"),
        ("NVIDIA A16", 14.6, None),  # neither an A10 nor an A2
        ("NVIDIA GeForce RTX 3090", 12.0, None),  # no card of that name has this memory
    ],
)
def test_cards_are_known_by_the_names_that_pytorch_reports(reported, memory_gib, name):
    row = catalogue_row(reported, int(memory_gib * GIB))
    assert (row and row.name) == name


def found(host: str, kind="cpu", name="x86_64", memory_gib=16.0, pool="") -> FoundDevice:
    return FoundDevice(host, kind, name, int(memory_gib * GIB), pool or host, False, 1)


def test_threads_are_read_as_openmp_reads_them():
    """An empty variable, and one number for each level, ended the start in a ValueError."""
    assert [threads_asked(text) for text in ("", "3", " 4,2", "many")] == [0, 3, 4, 0]


def test_measured_devices_of_one_speed_are_one_type():
    inventory = Inventory((found("a"), found("a"), found("b"), found("b")))
    speeds = (Speed(50e9, 50e9, 9e9), Speed(48e9, 48e9, 8e9), Speed(20e9, 20e9, 8e9), Speed(49e9, 49e9, 8e9))
    links = Links({0: Link(2e9, 1e-5), 1: Link(2e9, 1e-5)}, {(0, 1): Link(1.25e8, 1e-4)})
    cluster = assemble(inventory, speeds, links)
    assert [d.name for d in cluster.devices] == ["cpu", "cpu", "cpu-2", "cpu"]
    assert [d.flop_per_s for d in cluster.devices] == [48e9, 48e9, 20e9, 48e9]
    assert [d.memory_bytes for d in cluster.devices] == [8 * GIB] * 4  # two ranks share a host's memory
    assert [m.name for m in cluster.machines] == ["a", "b"]
    assert cluster.bandwidth_bytes_per_s == 1.25e8 and cluster.latency_s == 1e-4
    assert Cluster.parse(cluster.to_toml()) == cluster


def test_a_start_is_known_by_its_devices_and_not_by_its_cgroup():
    one = Inventory((found("a", pool="job 1"), found("a", pool="job 1"), found("b", pool="job 1, b")))
    other = Inventory((found("a", pool="job 2"), found("a", pool="job 2"), found("b", pool="job 2, b")))
    apart = Inventory((found("a", pool="job 1"), found("a", pool="job 2"), found("b", pool="job 1, b")))
    emulated = Inventory(tuple(replace(device, emulated="quota") for device in one.devices))
    assert one.fingerprint == other.fingerprint
    assert len({one.fingerprint, apart.fingerprint, emulated.fingerprint}) == 3


def test_a_card_of_the_catalogue_has_its_figures_and_the_memory_that_is_there():
    card = found("a", "gpu", "Tesla T4", 14.6, "gpu 0")
    other = found("a", "gpu", "Quadro X", 8.0, "gpu 1")
    cluster = assemble(
        Inventory((card, other)), (None, Speed(5e12, 9e12, 3e11)), Links({0: Link(1e10, 1e-5)}, {})
    )
    known, unknown = cluster.devices
    assert (known.name, known.flop_per_s, known.half_flop_per_s) == ("T4-16GB", 8.1e12, 65e12)
    assert abs(known.memory_bytes / GIB - 14.6) < 0.11
    assert (unknown.name, unknown.flop_per_s) == ("Quadro X", 5e12)


def test_the_slow_network_card_of_a_machine_is_seen():
    inventory = Inventory((found("a"), found("b"), found("c")))
    rates = {(0, 1): Link(1e9, 1e-4), (0, 2): Link(1e8, 1e-4), (1, 2): Link(1e8, 1e-4)}
    cluster = assemble(inventory, (Speed(1e9, 1e9, 1e9),) * 3, Links({}, rates))
    assert [m.nic_bytes_per_s for m in cluster.machines] == [1e9, 1e9, 1e8]
    assert cluster.bandwidth_between(0, 1) == 1e9 and cluster.bandwidth_between(1, 2) == 1e8


def test_every_machine_of_many_is_measured_with_others():
    assert machine_pairs(3) == ((0, 1), (0, 2), (1, 2))
    pairs = machine_pairs(40)
    assert len(pairs) == 80 and {m for pair in pairs for m in pair} == set(range(40))


def check_one_rank_decides_how_long_messages_get(_) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    if dist.get_rank() == 1:  # by its clock every message takes a thousand times as long

        class Slow:
            perf_counter = staticmethod(lambda: time.perf_counter() * 1000)

        measured.time = Slow
    link = measured.measure_pair(0, 1, torch.device("cpu"))
    assert 1e6 < link.bytes_per_s < 1e12 and 0 < link.latency_s < 1
    told = [None, None]
    dist.all_gather_object(told, link)
    assert told[0] == told[1]


def test_ranks_agree_on_the_messages_that_measure_a_link():
    checks = {"links": check_one_rank_decides_how_long_messages_get}
    assert_passed(run_world(2, checks)["links"])


def test_the_lowest_limit_of_memory_above_a_process_counts(tmp_path):
    memberships = tmp_path / "cgroup"
    memberships.write_text("0::/user/job\n")
    for path, text in (("user/job", "max"), ("user", f"{3 * GIB}"), (".", "max")):
        folder = tmp_path / "mount" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(text)
    assert memory_limit(memberships, tmp_path / "mount") == (3 * GIB, str(tmp_path / "mount/user"))
    memberships.write_text("4:cpu,cpuacct:/x\n7:memory:/bed/rank0\n")
    folder = tmp_path / "mount/memory/bed/rank0"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{GIB}")
    assert memory_limit(memberships, tmp_path / "mount")[0] == GIB
    assert memory_limit(tmp_path / "nothing", tmp_path)[0] == NO_LIMIT_BYTES


def test_a_spoiled_file_of_the_cache_is_as_good_as_none(tmp_path):
    cache = Cache(tmp_path)
    cache.save("clusters/c.toml", lambda path: path.write_text("name = 3"))
    assert cache.load("clusters/c.toml", Cluster.load) is None
    assert cache.load("clusters/c.toml", Path.read_text) == "name = 3"
    assert Cache(None).load("clusters/c.toml", Path.read_text) is None


def test_a_cache_that_cannot_be_written_is_warned_about(tmp_path):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "cache")
    with pytest.warns(
        UserWarning, match=r"nothing can be kept in .*file/cache \(Not a directory\).*MIXMESH_CACHE"
    ):
        cache.save("clusters/c.toml", lambda path: path.write_text("name = 3"))
    assert cache.load("clusters/c.toml", Path.read_text) is None


def test_a_cache_that_cannot_be_looked_into_is_as_good_as_none(tmp_path):
    cache = Cache(tmp_path / ("c" * 300))  # fails like the home of another user
    assert cache.load("clusters/c.toml", Path.read_text) is None
    with pytest.warns(UserWarning, match="nothing can be kept in .*File name too long"):
        cache.save("clusters/c.toml", lambda path: path.write_text("name = 3"))


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("MIXMESH_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MIXMESH_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert default_folder() == Path("/.cache/mixmesh")
    assert devices_folder() == Path("/.config/mixmesh/devices")


def launch(arguments: list[str], world_size: int, cache: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "MIXMESH_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    command = [python(), "-m", "torch.distributed.run", "--nproc-per-node", str(world_size)]
    return subprocess.run(
        [*command, "-m", "mixmesh", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def small_job(folder: Path, loss: str) -> str:
    """A file with a job of one layer, ``self.w``, whose ``loss`` is of its inputs ``x``."""
    file = folder / "small.py"
    file.write_text(
        "import torch, mixmesh\n"
        "from torch.nn import functional as F\n"
        "class M(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.w = torch.nn.Linear(4, 4)\n"
        "    def forward(self, x):\n"
        f"        return {loss}\n"
        "def job():\n"
        "    torch.manual_seed(0)\n"
        "    return mixmesh.Job(M(), {'x': torch.ones(8, 4)})\n"
    )
    return str(file)


def test_the_cluster_file_of_this_machine_is_written(tmp_path):
    file = tmp_path / "c.toml"
    done = launch(["detect", "--out", str(file), "--json"], 2, tmp_path)
    assert done.returncode == 0, done.stderr
    cluster = Cluster.load(file)
    assert cluster.world_size == 2 and len(cluster.machines) == 1
    assert json.loads(done.stdout.splitlines()[-1])["toml"] == file.read_text()


def test_a_job_trains_without_any_other_file_and_starts_from_what_was_kept(tmp_path):
    job = small_job(tmp_path, "F.mse_loss(self.w(x), torch.zeros_like(x))")
    arguments = ["run", job, "--steps", "3", "--profile-seconds", "1", "--json"]
    first, second = launch(arguments, 2, tmp_path), launch(arguments, 2, tmp_path)
    for done in (first, second):
        assert done.returncode == 0, done.stderr
    assert "2 devices in 1 machine" in first.stderr and "kept" not in first.stderr
    assert second.stderr.count("kept from an earlier start") == 3
    losses = [json.loads(done.stdout.splitlines()[-1])["losses"] for done in (first, second)]
    assert losses[0] == losses[1] and losses[0][2] < losses[0][0]


def test_an_error_of_the_first_rank_is_every_ranks(tmp_path):
    job = small_job(tmp_path, "self.w(x).sum() if x.sum() > 0 else x.sum()")
    done = launch(["run", job, "--steps", "1"], 2, tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("TraceError: ") == 1 and "small.py:8" in done.stderr  # said by one for all


def test_a_cluster_file_takes_the_place_of_what_would_be_detected(tmp_path):
    file, cut = cluster_file(tmp_path), tmp_path / "cut.toml"
    cut.write_text(file.read_text().replace('  { name = "slow"', "# "))
    command = ["run", small_job(tmp_path, "self.w(x).sum()"), "--steps", "2", "--profile-seconds", "0"]
    done = launch([*command, "--cluster", str(file)], 2, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 devices in 1 machine" in done.stderr and "devices and links" not in done.stderr
    assert not (tmp_path / "clusters").exists()
    refused = launch([*command, "--cluster", str(cut)], 2, tmp_path)
    assert refused.returncode != 0
    assert refused.stderr.count("describes another number of devices") == 1 and str(cut) in refused.stderr
