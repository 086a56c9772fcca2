"""Checkpoints that are not as they were written: never loaded wrongly, never in the way of an older one."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from fuzz import damage
from torch import nn

from mixmesh import checkpoint
from mixmesh.checkpoint import manifest, storage
from mixmesh.checkpoint.values import decode, encode
from mixmesh.errors import InputError, PlanError


def test_damaged_folders():
    """``python -m tests.fuzz --kind damage --minutes 1`` tries thousands."""
    report = damage.Report(damage.KIND)
    for case_seed in range(120):
        damage.try_case(case_seed, report)
    assert not report.failures, "\n".join(f.what for f in report.failures)
    assert {"an older one", "refused", "the newest one"} <= set(report.outcomes), report.outcomes


@pytest.mark.parametrize("check", ["check_files", "digest_of"])
def test_the_generator_notices_a_check_that_is_off(monkeypatch, check):
    """Without checksums of files, or of the manifest, something is loaded wrongly."""
    damage.made()
    if check == "check_files":
        monkeypatch.setattr("mixmesh.checkpoint.loading.check_files", lambda *_: None)
    else:
        reading = manifest.Manifest.read.__globals__
        monkeypatch.setitem(reading, "digest_of", lambda _: Anything())
    report = damage.Report(damage.KIND)
    for case_seed in range(120):
        damage.try_case(case_seed, report)
    assert report.failures


class Anything(str):
    def __eq__(self, _other: object) -> bool:
        return True

    def __ne__(self, _other: object) -> bool:
        return False

    __hash__ = str.__hash__


def training():
    model = nn.Linear(300, 300)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 300)).square().mean().backward()
    optimizer.step()


def test_a_process_that_is_killed_leaves_whole_checkpoints(tmp_path):
    """At any time while it writes one after the other; what is cut off is removed by the next one."""
    rng = random.Random(0)
    torch.set_num_threads(1)  # no threads, which a fork has not
    model, optimizer = training()
    step_of(model, optimizer)
    checkpoint.save(tmp_path, step=0, model=model, optimizer=optimizer)
    newest = cut_off = 0
    for kill in range(15):
        pid = os.fork()
        if pid == 0:
            try:
                for step in range(newest + 1, newest + 1000):
                    checkpoint.save(tmp_path, step=step, model=model, optimizer=optimizer, keep=2)
            finally:
                os._exit(1)
        if kill % 3 == 1:
            wait_for_a_newer_one(tmp_path)
        time.sleep(rng.uniform(0.005, 0.08))
        if kill % 3 == 0:
            stop_within_a_write(pid, tmp_path)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found = checkpoint.load(tmp_path, model=model, optimizer=optimizer)
        assert found.step >= newest
        cut_off += has_unfinished(tmp_path)
        newest = found.step
    assert newest >= 5 and cut_off >= 5
    checkpoint.save(tmp_path, step=newest, model=model, optimizer=optimizer, keep=2)
    assert not has_unfinished(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def has_unfinished(folder: Path) -> bool:
    return any(path.name.startswith(".") for path in folder.iterdir())


def wait_for_a_newer_one(folder: Path) -> None:
    """Waits until one more checkpoint is written; on a slow disk that takes longer than the test sleeps."""
    before, deadline_s = manifest.checkpoints_in(folder)[0], time.monotonic() + 60
    while manifest.checkpoints_in(folder)[0] == before:
        assert time.monotonic() < deadline_s, "no checkpoint was written in a minute"
        time.sleep(0.001)


def stop_within_a_write(pid: int, folder: Path) -> None:
    """Stops process ``pid``, which writes checkpoints to ``folder``, at a time when one is half-written.

    At a random time none may be, on a machine that does much else.
    """
    for _ in range(10_000):
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED)
        if has_unfinished(folder):
            return
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.001)
    raise AssertionError("no half-written checkpoint was seen")


def test_a_crash_before_the_rename_leaves_the_previous_one(tmp_path, monkeypatch):
    model, optimizer = training()
    first = checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer)
    num_files = len(list(first.iterdir()))
    for function, call in [("sync", 0), *(("write_to_disk", n) for n in range(num_files))]:
        with monkeypatch.context() as patch:
            patch.setattr(storage, function, crashing_at(call, getattr(storage, function)))
            with pytest.raises(InputError, match="a crash"):
                checkpoint.save(tmp_path, step=2, model=model, optimizer=optimizer, keep=1)
        assert checkpoint.latest(tmp_path) == first, (function, call)


def crashing_at(call: int, function):
    """``function``, which crashes when it is called for that time, from 0 on."""
    calls = itertools.count()
    return lambda *args: crash() if next(calls) == call else function(*args)


def crash(*_):
    raise InputError("a crash")


def test_a_folder_that_is_none(tmp_path):
    model, optimizer = training()
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="cannot be written there"):
        checkpoint.save(tmp_path / "file", step=1, model=model)
    for read in (checkpoint.latest, partial(checkpoint.load, model=model)):
        with pytest.raises(InputError, match="is a folder"):
            read(tmp_path / "file")
        assert read(tmp_path / "none") is None
    for wrong in ({"step": -1}, {"step": True}, {"step": 1, "keep": 0}):
        with pytest.raises(InputError):
            checkpoint.save(tmp_path, model=model, **wrong)


def copied_from_before(older, newer):
    """Whole files of an older checkpoint, in the folder of a newer one."""
    shutil.rmtree(newer)
    shutil.copytree(older, newer)


def with_a_number_without_end(_older, newer):
    file = newer / manifest.MANIFEST
    file.write_text(file.read_text().replace('"step":3', '"step":1e999'))


def test_a_path_of_one_checkpoint_is_loaded_and_nothing_is_written_within(tmp_path, monkeypatch):
    model, optimizer = training()
    saved = [checkpoint.save(tmp_path, step=n, model=model, optimizer=optimizer) for n in (1, 2)]
    found = checkpoint.load(saved[0], model=model, optimizer=optimizer)
    assert (found.path, found.step) == (saved[0], 1) and checkpoint.latest(saved[0]) == saved[0]
    with pytest.raises(InputError, match="within a checkpoint") as caught:
        checkpoint.save(saved[0], step=3, model=model)
    assert str(tmp_path) in caught.value.expected
    monkeypatch.chdir(tmp_path)
    saving = checkpoint.save_async("relative", step=3, model=model)
    monkeypatch.chdir("/")
    assert saving.result().parent == tmp_path / "relative"


@pytest.mark.parametrize("harm", [copied_from_before, with_a_number_without_end])
def test_what_damage_was_found_once_is_passed_over(tmp_path, harm):
    """By ``python -m tests.fuzz --kind damage``, a few times in 180,000 cases."""
    model, optimizer = training()
    for step in (1, 2, 3):
        step_of(model, optimizer)
        checkpoint.save(tmp_path, step=step, model=model, optimizer=optimizer)
    newest, _, oldest = manifest.checkpoints_in(tmp_path)
    harm(oldest, newest)
    found = checkpoint.load(tmp_path, model=model, optimizer=optimizer)
    assert found is not None and found.step == 2


def test_a_folder_that_another_training_writes_to_is_refused_at_the_next_save(tmp_path):
    """In a loop of its own too: each would remove the checkpoints of the other, and resume from them."""
    folder = tmp_path / "run"
    model, optimizer = training()
    parts = {"model": model, "optimizer": optimizer}
    assert checkpoint.load(folder, **parts) is None
    own = checkpoint.save(folder, step=1, **parts)
    assert own is not None
    shutil.copytree(own, folder / "000002-step-9")  # as another process does
    with pytest.raises(InputError, match="another training writes checkpoints to the same folder") as caught:
        checkpoint.save(folder, step=2, keep=1, **parts)
    assert caught.value.got == "checkpoint 2" and own.is_dir()
    checkpoint.load(folder, **parts)  # now it goes on from there
    assert checkpoint.save(folder, step=2, **parts) == folder / "000003-step-2"


def test_a_folder_saved_to_by_two_names_is_of_one_training(tmp_path):
    model, optimizer = training()
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    for step, name in enumerate(["run", "link", "run", "run/../run"], 1):
        assert checkpoint.save(tmp_path / name, step=step, model=model, optimizer=optimizer) is not None


def test_other_models_and_optimizers_are_refused_before_anything_is_changed(tmp_path):
    model, optimizer = training()
    checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer)
    others = {
        "another name": nn.Sequential(nn.Linear(300, 300)),
        "another shape": nn.Linear(300, 299),
        "another dtype": nn.Linear(300, 300).double(),
        "fewer": nn.Linear(300, 300, bias=False),
    }
    for name, other in others.items():
        before = [p.clone() for p in other.parameters()]
        with pytest.raises(PlanError, match="another model"):
            checkpoint.load(tmp_path, model=other)
        assert all(torch.equal(a, b) for a, b in zip(before, other.parameters())), name
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 1.0}]
    for other in (torch.optim.SGD(model.parameters(), 0.1), torch.optim.AdamW(groups, 0.1)):
        with pytest.raises(PlanError, match="another optimizer"):
            checkpoint.load(tmp_path, model=model, optimizer=other)
    with pytest.raises(InputError, match="loader does not know how far"):
        checkpoint.save(tmp_path, step=2, model=model, loader=torch.utils.data.DataLoader([1]))
    with pytest.raises(InputError, match="scheduler has no state"):
        checkpoint.save(tmp_path, step=2, model=model, scheduler=3)
    with pytest.raises(InputError, match="not the model's"):
        checkpoint.save(tmp_path, step=2, model=nn.Linear(2, 2), optimizer=optimizer)


def test_values_come_back_as_they_were():
    random_state = random.Random(0).getstate()
    value = {
        1: [None, True, -3, 0.1, float("inf"), "ü", b"\x00\xff"],
        "a": (1, (2,), {"b": torch.tensor([[1.5, float("nan")]], dtype=torch.bfloat16)}),
        ("c", 2): random_state,
        "empty": [torch.empty(0, 3), {}, (), []],
    }
    again = decode(encode(value, "value"))
    assert repr(again) == repr(value) and again[("c", 2)] == random_state
    for refused in (object(), {1, 2}, torch.nn.Parameter(torch.ones(1)), len):
        with pytest.raises(InputError, match="cannot be kept in a checkpoint"):
            encode({"x": [refused]}, "state")
