"""Figures in words, files that are written whole or not at all, and lines for people that may be lost."""

from __future__ import annotations

import errno
import os
import sys

import pytest
import torch
from torch import nn

from mixmesh import checkpoint
from mixmesh.base.callers import is_script, line_of_script, shown_path
from mixmesh.base.files import write_text, write_to_disk, written_whole
from mixmesh.base.progress import flush_output, tell, telling
from mixmesh.base.units import (
    GBIT,
    flop_rate_text,
    link_text,
    memory_rate_text,
    number_text,
    seconds_text,
    size_text,
)
from mixmesh.runtime import processes
from mixmesh.runtime.processes import is_gone, is_stopped


def test_a_line_of_the_script_is_named_where_the_working_directory_is_gone(tmp_path, monkeypatch):
    assert shown_path(__file__).endswith("test_base.py")
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert shown_path(__file__) == "test_base.py"
    assert line_of_script().startswith("test_base.py:")
    assert is_script("train.py")
    monkeypatch.undo()


def test_a_process_that_cannot_be_looked_at_does_not_count_as_gone(monkeypatch):
    assert not is_gone(os.getpid())
    assert is_gone(2**22 + 1)  # more than Linux gives

    def at_the_limit(*args, **kwargs):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(processes.Path, "read_text", at_the_limit)
    assert not is_gone(os.getpid())
    assert not is_stopped(os.getpid())


@pytest.mark.parametrize(
    ("text", "expected"),
    (
        (link_text(10.4 * float(GBIT)), "10.4 Gbit/s"),
        (link_text(1000 * float(GBIT)), "1000 Gbit/s"),  # no exponent
        (link_text(10**6), "0.008 Gbit/s"),
        (flop_rate_text(15.7e12), "15.7 TFLOP/s"),
        (flop_rate_text(4e10), "40 GFLOP/s"),
        (memory_rate_text(549.2e9), "549 GB/s"),
    ),
)
def test_rates_in_words(text, expected):
    assert text == expected


def test_a_file_is_there_whole_or_as_it_was(tmp_path):
    path = tmp_path / "x.json"
    write_text(path, "before")
    with pytest.raises(KeyboardInterrupt), written_whole(path) as partial:
        partial.write_text("a half")
        assert path.read_text() == "before" and partial.parent == tmp_path
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["x.json"] and path.read_text() == "before"
    write_text(path, "after")
    assert os.listdir(tmp_path) == ["x.json"] and path.read_text() == "after"
    with pytest.raises(OSError, match="nowhere"):
        write_text(tmp_path / "nowhere" / "x.json", "after")


def test_two_that_write_one_file_at_once_do_not_meet(tmp_path):
    """Processes of the same number, as containers that share a cache have them: the last one counts."""
    path = tmp_path / "x.json"
    with written_whole(path) as later:
        later.write_text("of the later one")
        write_text(path, "of the other")
        assert path.read_text() == "of the other"
    assert os.listdir(tmp_path) == ["x.json"] and path.read_text() == "of the later one"


def test_blocks_are_let_go_one_by_one(tmp_path):
    """A block that is a view of a large buffer must not keep it while the next one is made."""
    held: list[bytearray] = []

    def blocks():
        for n in range(3):
            # raises BufferError where a view of it is left
            for buffer in held:
                buffer.clear()
            held.append(bytearray([n] * 4))
            yield memoryview(held[-1])

    write_to_disk(tmp_path / "x", blocks())
    assert (tmp_path / "x").read_bytes() == bytes([0] * 4 + [1] * 4 + [2] * 4)


def test_no_text_for_people_has_an_exponent():
    """Just below a unit, far above the largest, and next to nothing."""
    assert [seconds_text(s) for s in (999.7e-6, 0.9997, 3600.0, 0.0)] == [
        "1000 us",
        "1000 ms",
        "3600 s",
        "0 us",
    ]
    assert [size_text(s) for s in (999.7 * 2**20, 1018 * 2**20)] == ["1000 MiB", "1018 MiB"]
    assert [number_text(x) for x in (5540.0, 1.5e9, 4.34e-5, 1.5)] == [
        "5540",
        "1500000000",
        "0.0000434",
        "1.5",
    ]


def test_links_and_devices_stay(tmp_path):
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    write_text(file, "before")
    link.symlink_to(file)
    write_text(link, "after")
    assert link.is_symlink() and file.read_text() == "after"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "through")
    assert os.read(reader, 99) == b"through" and pipe.is_fifo()
    os.close(reader)


@pytest.fixture(params=("a full disk", "a pipe without a reader", "closed by the shell", "closed"))
def lost_stderr(request, monkeypatch):
    """Makes standard error one that cannot be written."""
    if request.param == "closed by the shell":
        return monkeypatch.setattr(sys, "stderr", None)
    if request.param == "a pipe without a reader":
        read_end, write_end = os.pipe()
        os.close(read_end)
        stream = os.fdopen(write_end, "w", buffering=1)
    else:
        stream = open("/dev/full", "w", buffering=1)
    if request.param == "closed":
        stream.close()
    return monkeypatch.setattr(sys, "stderr", stream)


@pytest.mark.usefixtures("lost_stderr")
def test_a_line_that_cannot_be_written_is_lost(capsys):
    with telling(0, "planning") as teller:
        teller("tracing")
        teller.line("done")
    tell("a notice")
    flush_output()
    assert not capsys.readouterr().out


@pytest.mark.usefixtures("lost_stderr")
def test_a_training_outlives_a_disk_that_is_full_for_its_checkpoint_and_its_log(tmp_path, monkeypatch):
    def no_space(*args):
        raise OSError(28, "No space left on device")

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr("mixmesh.checkpoint.storage.write_to_disk", no_space)
    assert checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer) is None
