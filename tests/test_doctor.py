"""``mixmesh doctor``: each check finds what is wrong, on all ranks, and no rank waits for one that failed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fuzz.ports import free_port
from gloo_world import assert_passed, run_world
from torch import nn
from warm_python import python

from mixmesh.errors import InputError, PlanError
from mixmesh.frontend.job import Job
from mixmesh.measure.doctor import Asked, Check, Ground, checks, examine, ground, reach
from mixmesh.measure.doctor.meeting import Meeting, open_store
from mixmesh.measure.doctor.reach import Address, Listener, call, look_up_s
from mixmesh.runtime.versions import source_digest
from mixmesh.training.preparation import prepare_job

ROOT = Path(__file__).parents[1]
JOB = """
import os, torch, mixmesh
from helper import WIDTH

def job():
    torch.manual_seed(0)
    batch = (torch.randn(4, 3),)
    return mixmesh.Job(torch.nn.Sequential(torch.nn.Linear(3, WIDTH), torch.nn.Flatten(0)), batch,
                       data=[(torch.randn(4, 3),) for _ in range(2)])

def unseeded():
    made = job()
    torch.seed()
    return mixmesh.Job(made.model, made.batch, data=[made.batch, (torch.randn(4, 3),)])

def wider():
    torch.manual_seed(0)
    width = 2 + int(os.environ["RANK"])
    return mixmesh.Job(torch.nn.Linear(3, width), (torch.randn(4, 3),))

def failing():
    return job() if os.environ["RANK"] == "0" else missing
"""
FOLDER = "MIXMESH_TEST_FOLDER"


def open_world() -> dist.Store:
    return open_store(int(os.environ["RANK"]), 60)


def rank() -> int:
    return int(os.environ["RANK"])


def report(store, name: str, job: str | None = None, timeout_s: float = 60.0, helper: str = "WIDTH = 2"):
    """The checks by name, of a meeting of its own, each rank being a machine. Every rank has its own folder,
    in which helper.py may differ."""
    folder = Path(os.environ[FOLDER], f"{name}{rank()}")
    folder.mkdir(exist_ok=True)
    (folder / "job.py").write_text(JOB)
    (folder / "helper.py").write_text(helper)
    sys.modules.pop("helper", None)
    os.environ["GROUP_RANK"] = str(rank())
    meeting = Meeting(dist.PrefixStore(name, store), rank(), 2, timeout_s)
    asked = Asked(job and f"{folder}/job.py:{job}", is_quick=True)
    made = examine(Ground(timeout_s, asked, folder / "cache", meeting))
    return {check.name: check for check in made.checks}


def statuses(made: dict[str, Check]) -> dict[str, str]:
    return {name: check.status for name, check in made.items() if check.status != "ok"}


def check_all_is_well(store) -> None:
    made = report(store, "well", "job")
    assert not statuses(made), statuses(made)
    assert made["rendezvous"].found == "2 ranks on 1 host"
    assert made["reachable"].found.startswith("1 pair of machines, both ways")
    assert made["collectives"].found == "a sum over 2 ranks by gloo"
    assert made["job code"].found == "2 files alike" and made["data"].found == "3 batches alike"


def check_another_file(store) -> None:
    made = report(store, "file", "job", helper="WIDTH = 2" + "  # new" * rank())
    assert statuses(made) == {"job code": "wrong", "model": "not tried", "data": "not tried"}
    assert made["job code"].found == "the ranks have other versions of helper.py"


def check_another_batch(store) -> None:
    made = report(store, "batch", "unseeded")
    assert statuses(made) == {"data": "wrong"}
    assert made["data"].found == "batch 2 of the job's data is not the same on all ranks"
    assert "manual_seed" in made["data"].hint[0]


def check_another_model(store) -> None:
    made = report(store, "model", "wider")
    assert made["model"].status == "wrong" and "the same model" in made["model"].found


def check_a_job_that_fails_on_one_rank(store) -> None:
    started = time.monotonic()
    made = report(store, "fails", "failing")
    assert made["job code"].status == "wrong" and time.monotonic() - started < 30
    assert made["job code"].found.startswith("rank 1: failing() failed: NameError")


def check_a_job_that_ends_one_rank(store) -> None:
    """By data that call ``sys.exit`` when they are asked for."""
    meeting = Meeting(dist.PrefixStore("ends", store), rank(), 2, 60.0)
    for gather in (meeting.gather, meeting.gather_together):
        with pytest.raises(InputError, match="rank 1: SystemExit: 3"):
            gather("the batches", lambda: sys.exit(3) if rank() else 0)
    assert not meeting.is_abandoned


def check_a_missing_rank(store) -> None:
    if rank() == 0:
        started = time.monotonic()
        made = report(store, "missing", timeout_s=1.5)
        assert 1.5 <= time.monotonic() - started < 45
        assert made["rendezvous"].got == "nothing from rank 1"
        assert {check.status for check in list(made.values())[1:]} == {"not tried"}


def check_a_rank_that_fails_while_others_wait(store) -> None:
    meeting = Meeting(dist.PrefixStore("waits", store), rank(), 2, 60.0)

    def make() -> int:
        if rank():
            raise InputError("no such card")
        threading.Event().wait(60)

    started = time.monotonic()
    with pytest.raises(InputError, match="rank 1: no such card"):
        meeting.gather_together("a sum", make)
    assert time.monotonic() - started < 45 and meeting.is_abandoned == (rank() == 0)


def check_a_rank_that_makes_no_group(store) -> None:
    """While the others wait for its address in the store that tells them of its failure."""
    dist.destroy_process_group()  # of the check before
    meeting = Meeting(dist.PrefixStore("group", store), rank(), 2, 60.0)
    tried = Ground(60.0, Asked(), Path(os.environ[FOLDER]), meeting)
    if rank():
        tried.backend = "none"
    started = time.monotonic()
    with pytest.raises(InputError, match="rank 1: "):
        checks.collectives(tried)
    assert time.monotonic() - started < 45 and meeting.is_abandoned == (rank() == 0)
    meeting.close()  # the first rank holds the store


def check_no_such_interface(store) -> None:
    if rank():
        os.environ["GLOO_SOCKET_IFNAME"] = "none0"
    made = report(store, "interface")
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    assert made["reachable"].status == "wrong" and made["collectives"].found == "needs reachable"
    assert made["reachable"].found == "rank 1: there is no network interface none0 with an address"


def check_another_machine_of_that_name(store) -> None:
    """Another boot of Linux, as a machine with a copy of the first one's disk has it."""
    place = checks.process_place
    if rank():
        checks.process_place = lambda: "another-boot pid:[1]"
    made = report(store, "name")
    checks.process_place = place
    assert (
        made["rendezvous"].status == "wrong" and "two machines have the host name" in made["rendezvous"].found
    )
    assert "hostnamectl" in made["rendezvous"].hint[0]


def check_another_backend(store) -> None:
    """As a rank without a GPU takes it, where the others have one each."""
    backend = ground.backend_for
    if rank():
        ground.backend_for = lambda device: "nccl"
    made = report(store, "backend")
    ground.backend_for = backend
    assert statuses(made) == {"devices": "wrong", "collectives": "not tried"}
    assert made["devices"].got == "rank 0: gloo; rank 1: nccl"


class Deaf(Listener):
    """Names a port at which nobody answers, as behind a firewall."""

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self.close()


def check_an_unreachable_machine(store) -> None:
    if rank():
        checks.Listener = Deaf
    made = report(store, "deaf")
    checks.Listener = Listener
    assert made["reachable"].status == "wrong"
    assert "rank 0 on" in made["reachable"].found and "does not reach rank 1" in made["reachable"].found
    assert statuses(made).keys() == {"reachable", "collectives"}


def check_a_name_server_that_does_not_answer(store) -> None:
    reach.look_up_s = lambda host: 5.0
    made = report(store, "names")
    reach.look_up_s = look_up_s
    assert statuses(made) == {"names": "note"} and made["names"].ranks == (0,)
    assert "takes 5.0 s to look up the name of 127.0.0.1" in made["names"].found
    assert '"::ffff:127.0.0.1 NAME" in its /etc/hosts' in made["names"].hint[0]


def check_a_full_disk_and_little_shared_memory(store) -> None:
    least = checks.LEAST_SHARED_BYTES, checks.LEAST_CACHE_BYTES
    checks.LEAST_SHARED_BYTES = checks.LEAST_CACHE_BYTES = 2**60
    made = report(store, "full")
    checks.LEAST_SHARED_BYTES, checks.LEAST_CACHE_BYTES = least
    assert statuses(made) == {"shared memory": "wrong", "cache": "wrong"}
    assert "--shm-size" in made["shared memory"].hint[0]


def check_a_start_with_other_models(store) -> None:
    """Before anything is measured."""
    dist.init_process_group("gloo", store=dist.PrefixStore("start", store), rank=rank(), world_size=2)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh() if rank() else nn.ReLU(), nn.Flatten(0))
    phases = []
    with pytest.raises(PlanError, match="not given the same model"):
        prepare_job(Job(model, (torch.ones(4, 3),)), 2, progress=phases.append)
    assert phases == ["comparison of the ranks"]


WORLD = [
    check_all_is_well,
    check_another_file,
    check_another_batch,
    check_another_model,
    check_a_job_that_fails_on_one_rank,
    check_a_job_that_ends_one_rank,
    check_a_missing_rank,
    check_a_rank_that_fails_while_others_wait,
    check_no_such_interface,
    check_an_unreachable_machine,
    check_another_machine_of_that_name,
    check_another_backend,
    check_a_name_server_that_does_not_answer,
    check_a_full_disk_and_little_shared_memory,
    check_a_start_with_other_models,
    check_a_rank_that_makes_no_group,  # the last one: a thread still waits
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("doctor")))
        return run_world(2, {check.__name__: check for check in WORLD}, open_world)


@pytest.mark.parametrize("name", [check.__name__ for check in WORLD])
def test_two_ranks(results, name):
    assert_passed(results[name])


def test_calls_tell_who_answers():
    listener = Listener("127.0.0.1")
    try:
        assert call(listener.address)[1] == ""
        other = Address("127.0.0.1", listener.address.port, "00" * 8)
        assert call(other)[1] == "another process answers there"
    finally:
        listener.close()
    assert "refused" in call(listener.address, 2)[1]


def doctor(*arguments: str, package: Path = ROOT, **environment: str) -> subprocess.Popen:
    """``mixmesh doctor`` of the package in a folder."""
    settings = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1", **environment}
    command = [python(), "-m", "mixmesh", "doctor", *arguments]
    return subprocess.Popen(
        command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=package
    )


def test_another_version_of_the_package_on_one_rank(tmp_path):
    shutil.copytree(ROOT / "mixmesh", tmp_path / "mixmesh", ignore=shutil.ignore_patterns("__pycache__"))
    assert source_digest(tmp_path / "mixmesh") == source_digest(ROOT / "mixmesh")
    with open(tmp_path / "mixmesh" / "units.py", "a") as file:
        file.write("# a comment\n")
    launch = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        doctor("--quick", "--json", package=package, RANK=str(n), **launch)
        for n, package in enumerate((ROOT, tmp_path))
    ]
    printed = [process.communicate(timeout=240) for process in ranks]
    assert [process.returncode for process in ranks] == [1, 1], printed
    made = json.loads(printed[0][0].splitlines()[-1])
    (wrong,) = (check for check in made["checks"] if check["status"] != "ok")
    assert wrong["name"] == "versions" and "digest" in wrong["got"] and not made["ok"]
    assert wrong["hint"][0].startswith("install the same mixmesh") and wrong["ranks"] == [1]


def test_nobody_at_the_first_machine():
    process = doctor(
        "--timeout", "2", RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
    )
    _, told = process.communicate(timeout=240)
    assert process.returncode == 1 and "rank 1 does not reach the store of the launch within 2 s" in told
    assert "--rdzv-endpoint" in told


def test_one_process_alone(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    from mixmesh.__main__ import execute

    job = ROOT / "examples" / "gpt.py"
    assert execute(["doctor", str(job), "--quick", "--cache", str(tmp_path), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["ok"] and made["world_size"] == 1 and len(made["devices"]) == 1
    assert [check["name"] for check in made["checks"]][-3:] == ["job code", "model", "data"]
    (tmp_path / "file").write_text("")
    assert execute(["doctor", "--quick", "--cache", str(tmp_path / "file" / "cache")]) == 1
    text = capsys.readouterr().out
    assert "1 of 8 checks wrong" in text and "--cache DIR" in text
