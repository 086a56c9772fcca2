"""``examples/own_loop.py``: stopped by SIGTERM, it goes on as if it had not been."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import time
from pathlib import Path

import launches
import pytest
import torch
from own_loop_script import EXAMPLE, NUM_SAMPLES, RUN_OF, SLOW
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from mixmesh import checkpoint
from mixmesh.checkpoint.manifest import Manifest, checkpoints_in
from mixmesh.errors import InputError

SCRIPT = Path(__file__).parents[1] / "own_loop_script.py"
MARK = "# survives"
NAMES = "stopped", "whole"
TOLD = re.compile(r"step (\d+): loss (\S+)")
SAVED_EVERY, TOLD_EVERY, STEPS = 20, 5, 160
EPOCHS = 5


def losses_in(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in TOLD.findall(text)}


def newest_step(folder: Path) -> int:
    return Manifest.read(checkpoints_in(folder)[0]).step


def expect_to_go_on(
    first: dict[int, float], rest: dict[int, float], whole: dict[int, float], step: int
) -> None:
    """Every loss once, and to the last digit that of a run that nothing has stopped."""
    assert 0 < step < STEPS and step % SAVED_EVERY  # saved when it was stopped
    assert [*first] == [n for n in whole if n <= step] and [*rest] == [n for n in whole if n > step]
    assert first | rest == whole and [*whole] == [*range(TOLD_EVERY, STEPS + 1, TOLD_EVERY)]


def test_ten_lines_are_for_it():
    marked = [line for line in EXAMPLE.read_text().splitlines() if MARK in line]
    assert 0 < len(marked) <= 10
    words = ("checkpoint.", "preemption", "found", "parts", "step +=")
    others = [line for line in EXAMPLE.read_text().splitlines() if MARK not in line]
    assert not [line for line in others if any(word in line for word in words)]


def test_two_ranks_under_torchrun(tmp_path):
    stopped = launches.start(SCRIPT, 2, tmp_path, SLOW, "stopped")
    try:
        deadline = time.monotonic() + 200
        while not checkpoints_in(tmp_path / "stopped"):
            assert time.monotonic() < deadline and stopped.poll() is None, printed(tmp_path)
            time.sleep(0.05)
        stopped.send_signal(signal.SIGTERM)  # torchrun, which sends it to its processes
        assert stopped.wait(timeout=100) != 0
    finally:
        stopped.kill()
    step, first = newest_step(tmp_path / "stopped"), losses_in(printed(tmp_path)["stopped"])
    launches.wait(launches.start(SCRIPT, 2, tmp_path, "stopped", "whole"), tmp_path)
    rest, whole = (losses_in(printed(tmp_path)[name]) for name in NAMES)
    expect_to_go_on(first, rest, whole, step)
    ends = [checkpoint.export(tmp_path / name, tmp_path / f"{name}.safetensors") for name in NAMES]
    assert [end.step for end in ends] == [STEPS] * 2
    assert ends[0].files[0].read_bytes() == ends[1].files[0].read_bytes()


def notes(folder: Path) -> list[dict]:
    """The steps of all ranks and starts with their samples, in their order."""
    lines = [line for file in folder.glob("samples-*") for line in file.read_text().splitlines()]
    return sorted((json.loads(line) for line in lines if line.endswith("}")), key=lambda row: row["at"])


def test_a_rank_that_is_killed_under_torchrun_with_restarts(tmp_path):
    """The loop goes on by itself, and every sample of an epoch is trained with once in what counts."""
    launched = launches.start(SCRIPT, 2, tmp_path, SLOW, "stopped", max_restarts=2)
    try:
        deadline = time.monotonic() + 200
        while not (made := notes(tmp_path)) or made[-1]["step"] < 2 * SAVED_EVERY + 5:
            assert time.monotonic() < deadline and launched.poll() is None, printed(tmp_path)
            time.sleep(0.05)
        os.kill(next(row["pid"] for row in made if row["rank"] == 1), signal.SIGKILL)
        launches.wait(launched, tmp_path)
    finally:
        launched.kill()
    history: dict[int, dict[int, list[int]]] = {}
    for row in notes(tmp_path):  # the last execution of a step counts
        history.setdefault(row["step"], {})[row["rank"]] = row["samples"]
    assert len({row["pid"] for row in notes(tmp_path)}) == 4  # two starts
    assert [*sorted(history)] == [*range(1, STEPS + 1)]
    for epoch in range(EPOCHS):
        steps = range(epoch * STEPS // EPOCHS + 1, (epoch + 1) * STEPS // EPOCHS + 1)
        seen = [n for step in steps for samples in history[step].values() for n in samples]
        assert sorted(seen) == list(range(NUM_SAMPLES)), epoch


def printed(folder: Path) -> dict[str, str]:
    """What the first rank printed, by run."""
    runs = (folder / "printed").read_text().split(RUN_OF)[1:]
    return {
        name: "".join(run.partition("\n")[2] for run in runs if run.startswith(f"{name}\n")) for name in NAMES
    }


def test_one_device(tmp_path, capsys, monkeypatch):
    main = runpy.run_path(str(EXAMPLE))["main"]
    main(tmp_path / "whole")
    whole = losses_in(capsys.readouterr().out)
    ask, asked = checkpoint.Preemption.is_requested, []

    def stop(preemption: checkpoint.Preemption) -> bool:
        asked.append(1)
        if len(asked) == 53:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # for the thread that reads it
        return ask(preemption)

    monkeypatch.setattr(checkpoint.Preemption, "is_requested", stop)
    with pytest.raises(SystemExit) as ended:
        main(tmp_path / "stopped")
    monkeypatch.undo()
    assert ended.value.code == 128 + signal.SIGTERM
    first, step = losses_in(capsys.readouterr().out), newest_step(tmp_path / "stopped")
    main(tmp_path / "stopped")
    expect_to_go_on(first, losses_in(capsys.readouterr().out), whole, step)


# --- what the loop needs on one device: a loader that goes on ----------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.randperm(11)


def loaders() -> dict[str, DataLoader]:
    rows = TensorDataset(torch.arange(11))
    return {
        "shuffled": DataLoader(rows, 2, shuffle=True),
        "by a generator": DataLoader(rows, 2, shuffle=True, generator=torch.Generator().manual_seed(3)),
        "a stream": DataLoader(Stream(), 2),
        "in order": DataLoader(rows, 2, drop_last=True),
    }


def values(batches) -> list:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch[0].tolist() for batch in batches]


@pytest.mark.parametrize("name", loaders())
def test_a_loader_on_one_device_goes_on(name):
    torch.manual_seed(0)
    plain = loaders()[name]
    expected = [values(plain) for _ in range(3)], torch.rand(2).tolist()
    torch.manual_seed(0)
    loader = checkpoint.resumable(loaders()[name])
    assert ([values(loader) for _ in range(3)], torch.rand(2).tolist()) == expected
    torch.manual_seed(0)
    loader, seen = checkpoint.resumable(loaders()[name]), []
    batches = iter(loader)
    seen += values(next(batches) for _ in range(3))
    state, numbers = loader.state_dict(), torch.get_rng_state()
    torch.manual_seed(7)
    again = checkpoint.resumable(loaders()[name])
    again.load_state_dict(state)
    torch.set_rng_state(numbers)
    assert seen + values(again) == expected[0][0]
    assert [values(again) for _ in range(2)] == expected[0][1:]


def test_what_is_resumable_stays_and_an_iterator_is_refused():
    loader = checkpoint.resumable([[1], [2]])
    assert checkpoint.resumable(loader) is loader
    with pytest.raises(InputError, match="an iterator of batches"):
        checkpoint.resumable(iter([1]))
