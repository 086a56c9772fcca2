"""The scripts of examples/scripts as one device runs them, and with mixmesh by two ranks under torchrun: few
lines change, and what they print and write stays the same.

One process runs all scripts of a kind, one after the other (``script_runs.py``)."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils import _pytree as pytree
from warm_python import python

from benchmarks.scripts import changed_lines
from benchmarks.vision import has_torchvision
from mixmesh.measure.testbed.device import COMPUTE_VARIABLE, FREE_VARIABLE

SCRIPTS = Path(__file__).parent.parent / "examples" / "scripts"
GUIDE = Path(__file__).parent.parent / "docs" / "guide" / "scripts.md"
RANKS, MOST_LINES = 2, 5
NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]\d+)?|nan")
IN_FLOAT64 = ["--dtype", "float64"]
OF_IMAGES = ["--image-size", "32", "--samples", "21", "--num-classes", "5"]
OF_TIMM = ["--model-kwargs", "dims=(8,16,24,32)", "depths=(1,1,1,1)", *OF_IMAGES, "--batch-size", "6"]
MOBILENET = {"inverted_residual_setting": [[1, 8, 1, 1], [6, 16, 2, 2]], "dropout": 0}
OF_MOBILENET = ["--model", "mobilenet_v2", "--model-kwargs", json.dumps(MOBILENET), "--num-classes", "10"]


@dataclass(frozen=True)
class Case:
    """A script with the arguments of a small run, and the planner that the ranks ask."""

    script: str
    arguments: list[str]
    planner: str
    tolerance: float = 1e-9


OF_POINTS = ["--width", "16", "--samples", "41", "--batch-size", "13", "--epochs", "2"]
SIZES = ["--width", "16", "--depth", "2", "--length", "8", "--samples", "41", "--batch-size", "13"]
CASES = {
    "plain": Case("plain", [*SIZES, *IN_FLOAT64], "tensor-parallel"),
    "timm": Case("timm_recipe", [*OF_TIMM, *IN_FLOAT64], "ddp-even"),
    # sums in bfloat16 are rounded on every rank
    "timm in bfloat16": Case("timm_recipe", [*OF_TIMM, "--amp"], "ddp-even", tolerance=5e-3),
    "torchvision": Case(
        "torchvision_reference", [*OF_IMAGES[:4], *OF_MOBILENET, "--batch-size", "9", *IN_FLOAT64], "ddp-even"
    ),
    # transformers computes the loss in float32
    "lora": Case("lora", [*SIZES, "--length", "32", *IN_FLOAT64], "fsdp-even", tolerance=2e-6),
    "unet": Case(
        "unet",
        ["--channels", "8", "16", "--image-size", "8", "--samples", "20", "--batch-size", "7", *IN_FLOAT64],
        "fsdp-even",
    ),
    "hf trainer": Case("hf_trainer", [*SIZES, *IN_FLOAT64], "fsdp-even", tolerance=2e-6),
    "accelerate": Case("accelerate_loop", [*OF_POINTS, *IN_FLOAT64], "tensor-parallel"),
    "lightning": Case("lightning_module", [*OF_POINTS, *IN_FLOAT64], "fsdp-even"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    """The folders in which the scripts of one device and those of the ranks have printed and written."""
    if not has_torchvision():
        pytest.fail("make setup puts torchvision and timm where they are found")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    started = []
    for how, suffix in (([], ""), (launcher, "_mixmesh")):
        folder = tmp_path_factory.mktemp(f"runs{suffix}")
        wanted = [
            [name, str(SCRIPTS / f"{case.script}{suffix}.py"), case.arguments, case.planner]
            for name, case in CASES.items()
        ]
        command = [python(), *how, "-m", "tests.script_runs", str(folder), json.dumps(wanted)]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MIXMESH_CACHE": str(folder / "cache"),
            COMPUTE_VARIABLE: str(folder / "in the device"),  # as in the testbed
            FREE_VARIABLE: str(folder / "outside"),
        }
        with open(folder / "errors", "w") as errors:
            process = subprocess.Popen(
                command, env=environment, stdout=errors, stderr=errors, cwd=SCRIPTS.parent.parent
            )
        started.append((folder, process))
    for folder, process in started:
        assert process.wait(timeout=400) == 0, (folder / "errors").read_text()[-4000:]
    return started[0][0], started[1][0]


@pytest.mark.parametrize("script", sorted({case.script for case in CASES.values()}))
def test_at_most_five_lines_change(script):
    before, after = (SCRIPTS / f"{script}{suffix}.py" for suffix in ("", "_mixmesh"))
    assert "mixmesh" not in before.read_text() and "mixmesh" in after.read_text()
    removed, written = changed_lines(before, after)
    assert 0 < len(written) <= MOST_LINES and len(removed) <= MOST_LINES
    shown = GUIDE.read_text().splitlines()
    assert [x for x in removed if f"-{x}" not in shown] == [x for x in written if f"+{x}" not in shown] == []


def test_changed_lines_are_those_of_the_diff(tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    before.write_text("a\n-b\nc\nd\n")
    after.write_text("a\n\n+b\n++b\nd\ne\n")
    assert changed_lines(before, after) == (["-b", "c"], ["+b", "++b", "e"])
    assert changed_lines(before, before) == ([], [])


@pytest.mark.parametrize("name", CASES)
def test_every_rank_prints_what_one_device_prints(runs, name):
    single, ranks = runs
    expected = (single / f"{name}.0.txt").read_text()
    assert expected.count("loss") >= 4
    for rank in range(RANKS):
        printed = (ranks / f"{name}.{rank}.txt").read_text()
        if CASES[name].tolerance > 1e-3:  # a metric of few samples is a step function
            expected, printed = (
                "\n".join(x for x in text.splitlines() if "loss" in x) for text in (expected, printed)
            )
        assert NUMBER.sub("", printed) == NUMBER.sub("", expected)
        numbers, wanted = ([float(x) for x in NUMBER.findall(text)] for text in (printed, expected))
        assert numbers == pytest.approx(wanted, rel=CASES[name].tolerance, abs=1e-12)


def written_values(path: Path) -> dict[str, torch.Tensor]:
    """All tensors and numbers of a file, or of the only model file in a folder, by their path in it."""
    if path.is_dir():
        (file,) = path.glob("*.safetensors")
        return load_file(file)
    leaves = pytree.tree_flatten_with_path(torch.load(path, weights_only=False))[0]
    values = {str(place): torch.as_tensor(x) for place, x in leaves if isinstance(x, torch.Tensor | float)}
    # mixmesh has optimizers step by their fused kernels
    return {place: value for place, value in values.items() if "fused" not in place}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.tolerance < 1e-3])
def test_the_file_is_that_of_one_device(runs, name):
    expected, written = (written_values(folder / name) for folder in runs)
    assert set(written) == set(expected) and len(written) >= 4
    for place, value in expected.items():
        # fused kernels count their steps in float32
        dtype = torch.float32 if "'step'" in place else value.dtype
        assert written[place].dtype == dtype, place
        torch.testing.assert_close(written[place], value.to(dtype), rtol=1e-7, atol=1e-8, msg=place)


def test_only_the_adapter_of_lora_is_written(runs):
    for folder in runs:
        assert all("lora_" in place for place in written_values(folder / "lora"))


def test_ranks_train_within_the_quota_of_their_emulated_device(runs):
    moves = [runs[1] / name for name in ("outside", "in the device")]
    left_ns, entered_ns = (move.stat().st_mtime_ns for move in moves)
    assert entered_ns > left_ns
    assert all(move.read_text().isdigit() for move in moves)  # the thread that moved last
