"""``mixmesh doctor`` on four gloo processes: it measures, trains by every plan, and names what is wrong, on
which rank, and what to type."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed, run_world
from launches import TORCHRUN
from warm_python import python

from mixmesh.cluster import Cluster
from mixmesh.cluster.detection.inventory import FoundDevice, Inventory
from mixmesh.cluster.detection.links import Link, Links
from mixmesh.errors import InputError
from mixmesh.frontend.trace import trace
from mixmesh.lang.plan_devices import planned_devices
from mixmesh.measure.doctor import (
    Asked,
    Ground,
    card_checks,
    cards,
    checks,
    examine,
    ladder,
    link_checks,
    uneven,
)
from mixmesh.measure.doctor.file_checks import misfits
from mixmesh.measure.doctor.meeting import Meeting, open_store
from mixmesh.measure.doctor.report import Check, Report, tried
from mixmesh.planner import make_plan

ROOT = Path(__file__).parents[1]
WORLD = 4
FOLDER = "MIXMESH_TEST_FOLDER"
CLUSTER = """
name = "two boxes"
[network]
bandwidth_gbit_per_s = {network}
latency_us = 30
[[machine]]
name = "a"
link_gbit_per_s = {network}
devices = [{{ cpu_share = 0.5, memory_gib = 1, count = 2 }}]
[[machine]]
name = "b"
link_gbit_per_s = {network}
nic_gbit_per_s = {nic}
devices = [{{ cpu_share = 0.5, memory_gib = 1 }}, {{ cpu_share = 0.3, memory_gib = {memory} }}]
"""


def rank() -> int:
    return int(os.environ["RANK"])


def open_world() -> dist.Store:
    return open_store(rank(), 60)


def meeting(store: dist.Store, name: str, timeout_s: float = 60.0) -> Meeting:
    return Meeting(dist.PrefixStore(name, store), rank(), WORLD, timeout_s)


def folder(name: str) -> Path:
    """A folder of this rank alone."""
    made = Path(os.environ[FOLDER], f"{name}{rank()}")
    made.mkdir(exist_ok=True)
    return made


def report(store: dist.Store, name: str, is_quick: bool = True, **asked: Path) -> Report:
    """The report of a meeting of its own."""
    where = Asked(is_quick=is_quick, **asked)
    return examine(Ground(60.0, where, folder(name) / "cache", meeting(store, name)))


def check(made: Report, name: str) -> Check:
    return next(check for check in made.checks if check.name == name)


def wrong(made: Report) -> set[str]:
    return {check.name for check in made.checks if check.status != "ok"}


def cluster_path(name: str, **figures: float) -> Path:
    path = folder(name) / "cluster.toml"
    path.write_text(CLUSTER.format(**{"network": 20, "nic": 20, "memory": 1, **figures}))
    return path


def check_all_is_well(store) -> None:
    made = report(store, "well", is_quick=False)
    assert made.ok, made.checks
    assert check(made, "ladder").found.startswith("15 planners: loss and gradients as on one device")
    assert "cases right on cpu tensors by gloo" in check(made, "uneven pieces").found
    assert check(made, "clocks and power").found == check(made, "peer to peer").found == card_checks.NO_GPU
    assert [made.verdict(r) for r in range(WORLD)] == ["ok"] * WORLD
    assert all(float(rate) > 0.1 for rate in made.columns["Gbit/s"])
    assert set(made.columns["driver"]) == {"not there"} and len(made.columns["torch"]) == WORLD


def check_another_torch(store) -> None:
    usual = torch.__version__
    if rank() == 2:
        torch.__version__ = "9.9.9+cu1"
    made = report(store, "torch")
    torch.__version__ = usual
    told = check(made, "versions")
    assert wrong(made) == {"versions"} and told.ranks == (2,)
    assert told.got == "rank 2: torch 9.9.9+cu1" and str(usual) in told.expected
    assert told.hint[0].startswith(f"pip install torch=={str(usual).partition('+')[0]}")
    assert [made.verdict(r) for r in range(WORLD)] == ["ok", "ok", "versions", "ok"]


def check_half_the_memory(store) -> None:
    """The file has twice of what one device has."""
    ground = Ground(60.0, Asked(is_quick=True), folder("memory"), meeting(store, "memory0"))
    examine(ground)
    there_gib = ground.inventory.memory_bytes(3) / 2**30
    made = report(store, "memory", cluster_file=cluster_path("memory", memory=f"{2 * there_gib:.2f}"))
    told = check(made, "cluster file")
    assert wrong(made) == {"cluster file"} and told.ranks == (3,)
    assert 'GiB) of machine "b"' in told.expected and told.got.startswith("rank 3: ")
    assert "memory_gib = " in told.hint[0] and made.verdict(3) == "cluster file"
    assert not wrong(
        report(store, "memory1", cluster_file=cluster_path("memory1", memory=f"{there_gib:.2f}"))
    )


def check_another_cluster_file(store) -> None:
    made = report(store, "cluster", cluster_file=cluster_path("cluster", nic=20 + (rank() == 1)))
    assert check(made, "cluster file").ranks == (1,)
    assert check(made, "cluster file").found == "the ranks have another cluster file: rank 1"


def check_another_plan(store) -> None:
    def plans() -> list[str]:
        batch = {k: torch.zeros(8, 4, dtype=torch.int64) for k in ("words", "targets")}
        traced = trace(ladder.Small(), batch)
        cluster = Cluster.parse(CLUSTER.format(network=20, nic=20, memory=1))
        return [str(make_plan(traced, cluster, planner=name)) for name in ("ddp-even", "fsdp-even")]

    usual, other = meeting(store, "plans").gather("the plans", lambda: [] if rank() else plans())[0]
    path = folder("plan") / "X.plan"
    path.write_text(other if rank() == 1 else usual)
    if rank() == 3:
        path.unlink()  # the first rank sends it
    made = report(store, "plan", plan_file=path)
    told = check(made, "plan")
    assert wrong(made) == {"plan"} and told.ranks == (1,) and "the ranks have another plan" in told.found
    assert told.hint[0].startswith("scp ")
    if rank() == 1:
        path.write_text(usual.replace("planning_s = ", "planning_s = 1"))  # planned once more
    made = report(store, "plan1", plan_file=path)
    assert not wrong(made) and check(made, "plan").found.endswith(
        "rank 3: not there, the first rank sends it"
    )


def opened(store, name: str, **asked: Path) -> Ground:
    """The findings of a meeting whose ranks have a process group."""
    ground = Ground(60.0, Asked(**asked), folder(name), meeting(store, name))
    for function in (checks.rendezvous, checks.devices, checks.collectives):
        function(ground)
    return ground


def check_a_wrong_rate(store) -> None:
    """The card of one machine is a hundred times slower, then faster, in the file than it is."""
    path = cluster_path("rate", nic=0.1, network=20)
    ground = opened(store, "rate", cluster_file=path)
    ground.cluster = Cluster.load(path)
    told = tried("links", lambda: link_checks.links(ground))
    assert told.status == "wrong" and 'machine "b" nic_gbit_per_s 0.1' in told.expected
    assert any(line.startswith("nic_gbit_per_s = ") and '"b"' in line for line in told.hint)
    assert {2, 3} <= set(told.ranks) and told.where == str(path)
    ground.cluster = Cluster.load(cluster_path("rate", network=90000, nic=90000))
    told = tried("links", lambda: link_checks.links(ground))
    assert told.status == "wrong" and told.ranks == (0, 1, 2, 3) and "ethtool" in told.hint[-1]
    dist.destroy_process_group()


def check_a_sum_that_is_wrong(store) -> None:
    """Collectives and training see it, each by itself."""
    ground, usual, planners = opened(store, "sum"), dist.all_reduce, ladder.NAMES
    ladder.NAMES = ("ddp-even",)
    right = tried("ladder", lambda: ladder.ladder(ground))
    if rank() == 1:
        dist.all_reduce = lambda x, *args, **kwargs: usual(x.add_(1), *args, **kwargs)
    pieces = tried("uneven", lambda: uneven.uneven(ground))
    steps = tried("ladder", lambda: ladder.ladder(ground))
    dist.all_reduce, ladder.NAMES = usual, planners
    assert right.status == "ok", right
    assert pieces.status == "wrong" and "all_reduce" in pieces.found and pieces.ranks == (0, 1, 2, 3)
    assert steps.status == "wrong" and "a step by the plan of ddp-even" in steps.found
    dist.destroy_process_group()


def check_a_rank_that_is_late(store) -> None:
    """In code of its own, and in a phase in which all wait for it."""
    ranks = meeting(store, "late", timeout_s=1.5)
    started = time.monotonic()
    with pytest.raises(InputError, match="rank 2: the batches is not over within 1.5 s") as caught:
        ranks.gather_here("the batches", lambda: time.sleep(60) if rank() == 2 else 0)
    assert caught.value.ranks == (2,)
    with pytest.raises(InputError, match="rank 3: the sum is not over within 1.5 s"):
        ranks.gather("the sum", lambda: time.sleep(30) if rank() == 3 else 0)
    assert time.monotonic() - started < 25 and ranks.is_abandoned == (rank() == 3)
    with pytest.raises(InputError, match="is not over within 1.5 s"):
        ranks.gather_together("the sum", lambda: time.sleep(30))


CHECKS = [
    check_all_is_well,
    check_another_torch,
    check_half_the_memory,
    check_another_cluster_file,
    check_another_plan,
    check_a_wrong_rate,
    check_a_sum_that_is_wrong,
    check_a_rank_that_is_late,
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("doctor")))
        return run_world(WORLD, {check.__name__: check for check in CHECKS}, open_world)


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_four_ranks(results, name):
    assert_passed(results[name])


KILLED = """
import os, time

def job():
    if os.environ["RANK"] == "2":
        os.kill(os.getpid(), 9)
    while True:
        time.sleep(0.1)
"""


def test_a_rank_that_is_killed_is_named_in_the_first_ones_table(tmp_path):
    """torchrun ends all others as soon as it sees it."""
    job = tmp_path / "job.py"
    job.write_text(KILLED)
    command = [
        python(),
        *TORCHRUN,
        "4",
        "-m",
        "mixmesh",
        "doctor",
        "--quick",
        "--json",
        "--timeout",
        "8",
    ]
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MIXMESH_CACHE": str(tmp_path)}
    started = time.monotonic()
    done = subprocess.run(
        [*command, "--job", str(job)],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0 and time.monotonic() - started < 60
    made = json.loads(done.stdout.splitlines()[-1])
    (told,) = (check for check in made["checks"] if check["status"] == "wrong")
    assert told["found"].startswith("rank 2 has ended in the loading of the job") and told["ranks"] == [2]
    assert [row["verdict"] for row in made["ranks"]] == ["ok", "ok", "job code", "ok"]


CARDS = """GPU-aa, 550.54.15, 1410, 1980, 300.00, 700.00
GPU-bb, 550.54.15, 345, 1980, [N/A], [N/A]
"""


def test_cards_are_read_from_nvidia_smi(tmp_path, monkeypatch):
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\ncat <<'END'\n{CARDS}END\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    cards.read_cards.cache_clear()
    lowered, other = cards.read_cards()
    assert cards.driver_version() == "550.54.15"
    assert card_checks.clock_text(lowered) == "1410 of 1980 MHz"
    assert card_checks.power_text(lowered) == "300 of 700 W" and card_checks.is_lowered(lowered)
    assert card_checks.power_text(other) == "not there" and not card_checks.is_lowered(other)
    command.write_text("#!/bin/sh\nexit 9\n")
    cards.read_cards.cache_clear()
    assert cards.read_cards() == () and cards.driver_version() is None
    cards.read_cards.cache_clear()


def test_cards_are_held_against_the_file_by_name_and_memory():
    cluster = Cluster.parse(
        '[[machine]]\ndevices = [{ device = "V100-16GB", count = 3 }, { cpu_share = 0.5 }]\n'
    )
    names = ("Tesla V100-SXM2-16GB", 15.8), ("Tesla T4", 14.6), ("Tesla V100-SXM2-16GB", 7.9)
    found = [FoundDevice("h", "gpu", n, int(g * 2**30), f"{n}{g}", False, 0) for n, g in names]
    found.append(FoundDevice("h", "gpu", "Tesla T4", 2**34, "t", False, 0))
    wrong = misfits(planned_devices(cluster), Inventory(tuple(found)))
    assert [misfit.rank for misfit in wrong] == [1, 2, 3]
    assert "a CPU" in wrong[-1].expected and "7.9 GiB" in wrong[1].got


def test_a_slow_path_is_told_of_machines_and_not_of_a_partner():
    text = CLUSTER.format(network=10, nic=1, memory=1)
    cluster, gbit = Cluster.parse(text), 1e9 / 8

    def keys(rate: float, inside: float = 10) -> list[tuple[int, str]]:
        links = Links({0: Link(inside * gbit, 0), 1: Link(10 * gbit, 0)}, {(0, 1): Link(rate * gbit, 0)})
        return [(w.machine, w.key) for w in link_checks.wrong_rates(cluster, links)]

    assert keys(0.9) == []
    assert keys(9) == [(1, "nic_gbit_per_s")]
    assert keys(0.1) == [(0, "nic_gbit_per_s"), (1, "nic_gbit_per_s")]
    assert keys(1, inside=3) == [(0, "link_gbit_per_s")]
