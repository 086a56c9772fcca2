"""Ranks that do not agree, or are not there any more: an error on all ranks within seconds, and why."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from traceback import StackSummary

import pytest
import torch.distributed as dist
from torch._utils import ExceptionWrapper
from torch.distributed.checkpoint.api import CheckpointException
from warm_python import python

from mixmesh.base.files import PACKAGE
from mixmesh.errors import CollectiveError
from mixmesh.runtime import peers as peers_module
from mixmesh.runtime.lost import Waiting
from mixmesh.runtime.peers import Peers, Seen
from mixmesh.runtime.processes import memory_kills, process_place
from mixmesh.runtime.verdicts import START_OF_EPOCH, different_calls
from mixmesh.runtime.watch import Watch

WORKER = Path(__file__).parent / "watch_worker.py"
SECONDS = 60.0  # from the trouble to the end of all ranks, side by side with all others on a busy machine


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its output, its exit status (None if it did not end), and how many seconds after the
    trouble began."""

    text: str
    status: int | None
    after_s: float


# scenario: what the message says, on which ranks (of two, the last one being the odd one)
AGREED = {
    "plan": "the ranks were not given the same plan",
    "code": "the ranks were not given the same model code",
    "versions": "the ranks were not given the same versions",
    "data": "the ranks were not given the same batch",
    "data in another order": "the ranks were not given the same batch",
    "shape": "x: the ranks were given neither one whole batch nor each its own part of one",
    "evaluates": "modules train on some ranks that evaluate on others",
    "saves": "in full_state_dict",
    "leaves an epoch": "rank 1 in the start of an epoch",
}
# what the first rank asks for alone, in the middle of a step: the name of its call
ALONE = {
    "prints a norm": "the norm of tensors that are cut",
    "clips by torch": "the norm of tensors that are cut",
    "takes a full tensor": "full_tensor of layer.weight",
    "compares a piece": "the min of tensors that are cut",
    "unscales": "whether gradients are finite",
    "takes the optimizer's state": "full_optimizer_state_dict",
    "saves by one line": "save",
    "waits for all": "a barrier",
    "asks all": "messages of all ranks",
}
# on the rank whose data it is; the others are told as much
OF_DATA = {
    "data raises": ("rank 1: the job's data raised ValueError: no such file", "raise ValueError("),
    "a worker raises": ("rank 1: the job's data raised ValueError: row 50 is spoilt", "raise ValueError("),
}
ENDING = ("data ends", "data ends and begins anew")
FIRST_ONLY = {
    "no input": "rank 1 has ended",
    "killed": "rank 1 has ended without a message",
    "stopped": "rank 1 is stopped",
}
# at the start: what the rank that has reached a limit of its system is told, and what it is to type
LIMITS = {
    "no threads": (
        "rank 1: watching the other ranks failed: its process has reached a limit of",
        "ulimit -u",
    ),
    "no files": (
        "rank 1: making process groups failed: its process has reached a limit of",
        "ulimit -n 65536",
    ),
}
LAST_ONLY = {"stopped first": "rank 0 is stopped", "stopped before a beat": "rank 0 is stopped"}


@pytest.fixture(scope="module")
def ends(tmp_path_factory) -> dict[str, list[Ended]]:
    """All scenarios side by side: they wait most of the time."""
    scenarios = [*AGREED, *OF_DATA, *ENDING, *FIRST_ONLY, *LAST_ONLY, *LIMITS, "slow", "too slow"]
    return ends_of(scenarios, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def ends_alone(tmp_path_factory) -> dict[str, list[Ended]]:
    return ends_of([*ALONE], tmp_path_factory.mktemp("alone"))


def ends_of(scenarios: list[str], folder: Path) -> dict[str, list[Ended]]:
    """How the ranks of each scenario ended."""
    paths = os.pathsep.join([str(WORKER.parent.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    subprocess.run([python(), str(WORKER), str(folder), *scenarios], env=env, check=True)
    found = {
        (s, rank): (status, at) for s, rank, status, at in json.loads((folder / "ends.json").read_text())
    }
    return {
        s: [
            Ended((folder / f"{s}-{rank}.txt").read_text(), *found.get((s, rank), (None, 0.0)))
            for rank in range(2)
        ]
        for s in scenarios
    }


def test_the_error_of_a_loaders_worker_is_told_without_its_traceback():
    """The text of such an error begins with the frames of PyTorch, and ends with what others should know."""
    store = dist.HashStore()
    watch = Watch(store, 0, 1, heartbeat_s=30.0)
    try:
        raise ValueError("no such image")
    except ValueError:
        error = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(ValueError, match="Caught ValueError in DataLoader worker") as caught:
        error.reraise()
    watch.leave(caught.value)
    watch.close()
    told = json.loads(store.get("mixmesh/watch/0"))["ended"]
    assert told.startswith("ValueError: no such image (") and "test_watch.py:" in told


def test_an_error_of_a_checkpoint_is_told_too():
    store = dist.HashStore()
    watch = Watch(store, 0, 1, heartbeat_s=30.0)
    with pytest.raises(CheckpointException), watch.call("save"):
        raise CheckpointException("save", {0: (OSError("no space left"), StackSummary())})
    watch.close()
    assert "no space left" in json.loads(store.get("mixmesh/watch/0"))["failed"]


def told_by(store: dist.Store) -> dict:
    """The state that the first rank wrote last."""
    return json.loads(store.get("mixmesh/watch/0"))


def test_the_others_are_told_the_line_of_a_call_that_failed_and_of_the_last_one():
    store = dist.HashStore()
    watch = Watch(store, 0, 1, heartbeat_s=30.0)
    with pytest.raises(ValueError), watch.call("step"):
        raise ValueError("negative rate")
    watch.close()
    told = told_by(store)
    assert re.fullmatch(r"ValueError: negative rate \((.*/)?test_watch.py:\d+\)", told["failed"])
    last = r"its script is over; its last call was step \((.*/)?test_watch.py:\d+\)"
    assert re.fullmatch(last, told["ended"])


def test_an_error_is_told_with_its_line_although_a_thread_of_the_script_keeps_the_process(monkeypatch):
    """Python waits for such a thread before it runs what is registered for the end."""
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("in evaluation")
    monkeypatch.setattr(sys, "last_value", caught.value, raising=False)
    store = dist.HashStore()
    watch = Watch(store, 0, 1, heartbeat_s=0.2)
    time.sleep(0.2)
    assert not told_by(store)["ended"], "while the script may go on, in a notebook"
    monkeypatch.setattr(threading, "main_thread", lambda: threading.Thread())
    time.sleep(0.2)
    told = told_by(store)["ended"]
    watch.close()
    assert re.fullmatch(r"after RuntimeError: in evaluation \((.*/)?test_watch.py:\d+\)", told)


def test_the_process_that_holds_the_store_ends_when_the_others_know_why():
    store = dist.HashStore()
    first, second = (Watch(store, rank, 2, heartbeat_s=30.0) for rank in range(2))
    second.begin("step")
    second.waiting = Waiting.now("the sum of gradients")
    with pytest.raises(ValueError), first.call("step"):
        raise ValueError("negative rate")
    first.close()
    with pytest.raises(CollectiveError, match="negative rate"):
        second.raise_verdict()
    second.close()


def test_a_first_rank_that_ends_with_the_store_is_not_said_to_be_killed():
    """After ``sys.exit()`` there, without a launcher, nobody can read that its script is over."""
    store = dist.HashStore()
    over = subprocess.Popen(["true"])
    over.wait()
    for rank, pid in ((0, over.pid), (1, os.getpid())):
        Peers(store, rank, 3, 30.0).write(Seen(1, process_place(), pid, 0, "", 0.0, ""))
    peers = Peers(store, 2, 3, 30.0)
    peers.read()
    assert peers.why_lost(0, 30.0) == "", "its last word may come"
    assert peers.why_lost(0, 30.0).startswith("has ended without a message")
    peers.store_is_lost = True
    assert "its script was over early, or it was killed" in peers.why_lost(0, 30.0)


@pytest.mark.parametrize(
    "before, after, reason",
    [
        (3, 3, "it crashed or was killed, and not by the kernel for lack of memory"),
        (3, 4, "it was killed for lack of memory"),
        (None, None, "it was killed, perhaps for taking too much memory, or it crashed"),
    ],
)
def test_the_kernel_knows_whether_it_has_killed_for_memory(monkeypatch, before, after, reason):
    """A rank that ends by a segmentation fault was said to have taken too much memory."""
    kills = [before, after]
    monkeypatch.setattr(peers_module, "memory_kills", lambda: kills.pop(0))
    store = dist.HashStore()
    over = subprocess.Popen(["true"])
    over.wait()
    peers = Peers(store, 0, 2, 30.0)
    peers._store.set("mixmesh/watch/1", json.dumps(vars(Seen(1, process_place(), over.pid, 0, "", 0.0, ""))))
    peers.read()
    assert peers.why_lost(1, 30.0) == "", "its last word may come"
    assert reason in peers.why_lost(1, 30.0)


def test_the_kernels_count_of_kills_for_memory_is_read(tmp_path):
    counters = tmp_path / "vmstat"
    assert memory_kills(counters) is None
    counters.write_text("pgfault 7\noom_kill 15\n")
    assert memory_kills(counters) == 15


@pytest.mark.parametrize(
    "kind, hint",
    [
        (
            "backward",
            "leave out the same batches",
        ),  # `if loss > 2: continue`, `except RuntimeError: continue`
        ("the order of the data", "leave out the same batches"),
        ("whole", "take the call out of `if rank == 0:`"),
    ],
)
def test_a_part_of_a_step_that_one_rank_leaves_out_is_no_call_of_one_rank_alone(kind, hint):
    states = {1: Seen(1, process_place(), 1, 0, "", 0.0, "", calls={"7": kind}, lines={"7": "a.py:2"})}
    error = different_calls(0, {7: "train forward"}, {7: "a.py:1"}, states, "all_gather")
    assert error is not None and hint in str(error) and "a.py:2" in str(error)


@pytest.mark.parametrize("kind", ["evaluation forward", "whole", "checkpoint.save"])
def test_one_rank_alone_after_an_epoch_is_told_to_take_the_call_out_of_the_condition(kind):
    """``if rank == 0: evaluate(model)`` at the end of an epoch, when the others begin the next one."""
    states = {1: Seen(1, process_place(), 1, 0, "", 0.0, "", calls={"7": START_OF_EPOCH}, lines={})}
    error = different_calls(0, {7: kind}, {7: "a.py:1"}, states, "all_gather")
    assert error is not None and "take the call out of `if rank == 0:`" in str(error)


def test_a_loop_over_a_loader_that_one_rank_leaves_early_is_told_so():
    states = {1: Seen(1, process_place(), 1, 0, "", 0.0, "", calls={"7": START_OF_EPOCH}, lines={})}
    error = different_calls(0, {7: "train forward"}, {7: "a.py:1"}, states, "all_gather")
    assert error is not None and "leave the loop over a loader after the same batch" in str(error)


@pytest.mark.parametrize("scenario", AGREED)
def test_all_ranks_are_told(ends, scenario):
    for rank, ended in enumerate(ends[scenario]):
        assert ended.status == 3 and AGREED[scenario] in ended.text, f"rank {rank}: {ended.text}"
        assert "rank 0" in ended.text and "rank 1" in ended.text
        assert ended.after_s < SECONDS


@pytest.mark.parametrize("scenario", ALONE)
def test_what_one_rank_asks_for_alone_ends_all(ends_alone, scenario):
    for rank, ended in enumerate(ends_alone[scenario]):
        assert ended.status == 3, f"rank {rank}: {ended.text}"
        assert f"rank 0 in {ALONE[scenario]}, rank 1 in train forward: call" in ended.text, ended.text
        assert "watch_worker.py:" in ended.text, "the line of the script"  # of the rank that asks
        assert "take the call out of `if rank == 0:`" in ended.text
        assert ended.after_s < SECONDS


@pytest.mark.parametrize("scenario", OF_DATA)
def test_an_error_of_the_data_of_one_rank_ends_all(ends, scenario):
    message, code = OF_DATA[scenario]
    for rank, ended in enumerate(ends[scenario]):
        assert ended.status == 3 and message in ended.text, f"rank {rank}: {ended.text}"
        assert ended.after_s < SECONDS
    assert "watch_worker.py" in ends[scenario][1].text and code in ends[scenario][1].text


@pytest.mark.parametrize("scenario", ENDING)
def test_data_that_ends_early_on_one_rank_ends_all(ends, scenario):
    first, last = ends[scenario]
    assert first.status == last.status == 3, first.text + last.text
    assert "rank 1 in the end of the data" in first.text
    assert "data of as many batches on every rank" in first.text
    assert "rank 1 has ended its training after 4 steps" in last.text or "end of the data" in last.text
    assert max(first.after_s, last.after_s) < SECONDS


@pytest.mark.parametrize("scenario", FIRST_ONLY)
def test_who_waits_is_told(ends, scenario):
    first, last = ends[scenario]
    assert first.status == 3 and FIRST_ONLY[scenario] in first.text, first.text + last.text
    assert "rank 1" in first.text
    assert first.after_s < SECONDS


@pytest.mark.parametrize("scenario", LAST_ONLY)
def test_the_rank_that_holds_the_store_is_stopped(ends, scenario):
    _, last = ends[scenario]
    assert last.status in (1, 3) and LAST_ONLY[scenario] in last.text, last.text
    assert last.after_s < SECONDS


@pytest.mark.parametrize("scenario", LIMITS)
def test_a_rank_without_threads_or_files_ends_all_and_says_which_limit(ends, scenario):
    first, last = ends[scenario]
    message, hint = LIMITS[scenario]
    assert last.status == 3 and message in last.text and hint in last.text, last.text
    assert first.status in (1, 3) and message in first.text, first.text


def test_a_rank_that_is_busy_between_two_calls_is_waited_for(ends):
    for ended in ends["slow"]:
        assert ended.status == 0 and "DONE" in ended.text, ended.text
    notice = ends["slow"][0].text
    assert "rank 1 has been outside of mixmesh" in notice and "watch_worker.py:" in notice


def test_a_rank_that_does_not_come_in_time_is_named(ends):
    first, _ = ends["too slow"]
    assert first.status == 3 and "rank 1 has not come within 20 s" in first.text, first.text
    assert "outside of mixmesh for" in first.text and "watch_worker.py:" in first.text


def test_collectives_are_started_where_the_watch_knows_of_them():
    """Whatever starts one of all ranks goes through a channel or ``first_rank``: each is a call by itself, or
    a part of one. Who starts them by ``torch.distributed`` is in this list, with the reason."""
    known = {
        "runtime/first_rank.py": "messages",
        "runtime/messages.py": "within a call, or before a training",
        "runtime/collectives.py": "given to a channel",
        "runtime/levels.py": "given to a channel",
        "runtime/shapes/agree.py": "given to a channel",
        "training/rebalance/balancer.py": "given to a channel",
        "checkpoint/vote.py": "within a meeting",
        "training/preparation/own_rows.py": "starts none: recognises the script's own",
    }
    before_training = ("measure/", "cluster/detection/")  # a script calls none of it
    pattern = re.compile(r"\bdist\.(all_\w+|broadcast\w*|barrier|reduce\w*|gather\w*|scatter\w*)\b(?!_)")
    used = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if pattern.search(path.read_text()) and not str(path.relative_to(PACKAGE)).startswith(before_training)
    }
    assert used == set(known)
