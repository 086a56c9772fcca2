"""The host memory that saving and loading take: no rank holds the whole model or optimizer for it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed, run_world, shared_folder
from torch import nn

import mixmesh
from mixmesh import checkpoint
from mixmesh.cluster import Cluster
from mixmesh.errors import InputError
from mixmesh.runtime.allocator import trim_heap
from mixmesh.runtime.comm import initialise

WORLD, LAYERS, WIDTH = 4, 13, 2000
TENSOR_BYTES = WIDTH * WIDTH * 4
MODEL_BYTES = LAYERS * TENSOR_BYTES
SLACK_BYTES = 12 * 2**20
EMPTY = partial(nn.utils.skip_init, nn.Linear)
FOUR = """
name = "four"
[[machine]]
devices = [{ cpu_share = 0.4 }, { cpu_share = 0.2, count = 3 }]
"""


class Wide(nn.Module):
    def __init__(self, linear=EMPTY) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        for number, layer in enumerate(self.layers):
            nn.init.constant_(layer.weight, 1e-4 * (number + 1))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def status_bytes(field: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0]) * 1024


class Peak:
    """The memory that a block takes above what was there before, at most, in ``size_bytes``."""

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")
        self.before = status_bytes("VmRSS")
        return self

    def __exit__(self, *_) -> None:
        self.size_bytes = status_bytes("VmHWM") - self.before


def check_peak(_) -> None:
    folder = shared_folder()
    with torch.device("meta"):
        plan = mixmesh.plan(Wide(), (torch.ones(8, WIDTH),), Cluster.parse(FOUR), planner="fsdp-even")
    start = partial(mixmesh.parallelize, plan=plan, device="cpu", timeout_s=120, check_model=False)

    def make():
        model = Wide()
        return start(model, torch.optim.AdamW(model.parameters()))

    model, optimizer = make()
    model(torch.ones(8, WIDTH)).backward()
    optimizer.step()
    optimizer.zero_grad()
    with Peak() as saving:
        checkpoint.save(folder, step=1, model=model, optimizer=optimizer)
    trim_heap()
    with Peak() as in_background:  # copies of the shard's parameters and both states of AdamW
        checkpoint.save_async(folder, step=2, model=model, optimizer=optimizer).result()
    with Peak() as in_background_again:  # into the same memory
        checkpoint.save_async(folder, step=3, model=model, optimizer=optimizer).result()
    expected = [float(p.to_local().double().sum()) for p in model.parameters()]
    del model, optimizer
    model, optimizer = make()
    with Peak() as loading:
        checkpoint.load(folder, model=model, optimizer=optimizer)
    assert [float(p.to_local().double().sum()) for p in model.parameters()] == expected
    with Peak() as exporting:
        if not int(os.environ["RANK"]):
            checkpoint.export(folder, folder / "weights.safetensors")
    dist.barrier()
    del optimizer
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    trim_heap()  # what is free would be used again, and not be seen
    with Peak() as reading:
        checkpoint.load_weights(model, folder / "weights.safetensors")
    assert [float(p.to_local().double().sum()) for p in model.parameters()] == expected
    del model
    trim_heap()
    with Peak() as on_meta:
        with torch.device("meta"):
            empty = Wide(nn.Linear)
        model, optimizer = start(empty, torch.optim.AdamW(empty.parameters()))
        for use in (lambda: model(torch.ones(8, WIDTH)), model.full_state_dict, model.whole().__enter__):
            with pytest.raises(InputError, match="13 of 13 tensors without values, the first is layers.0"):
                use()
        checkpoint.load_weights(model, folder / "weights.safetensors")
    assert [float(p.to_local().double().sum()) for p in model.parameters()] == expected
    model(torch.ones(8, WIDTH)).backward()
    optimizer.step()
    assert all(not p.is_meta for p in model.parameters())
    shard_bytes = 2 * MODEL_BYTES // WORLD  # the optimizer's state, which was not there
    peaks = {
        "saving": saving,
        "saving in the background": in_background,
        "saving in the background again": in_background_again,
        "loading": loading,
        "exporting": exporting,
        "weights": reading,
        "on meta": on_meta,
    }
    told = ", ".join(f"{name} {peak.size_bytes / 2**20:.0f} MiB" for name, peak in peaks.items())
    assert exporting.size_bytes < TENSOR_BYTES + SLACK_BYTES, told
    assert reading.size_bytes < SLACK_BYTES, told  # the shard is there, and less than a tensor comes beside
    assert on_meta.size_bytes < MODEL_BYTES // WORLD + TENSOR_BYTES + SLACK_BYTES, told
    assert saving.size_bytes < TENSOR_BYTES + SLACK_BYTES, told
    copies_bytes = 3 * MODEL_BYTES // WORLD
    assert copies_bytes // 2 < in_background.size_bytes < copies_bytes + TENSOR_BYTES + SLACK_BYTES, told
    assert in_background_again.size_bytes < TENSOR_BYTES + SLACK_BYTES, told
    assert loading.size_bytes < shard_bytes + TENSOR_BYTES + SLACK_BYTES, told
    if "SHOW_PEAK" in os.environ:
        print(f"rank {os.environ['RANK']}: {told}", flush=True)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux resets a peak")
def test_peak():
    assert MODEL_BYTES > 200e6
    assert_passed(
        run_world(WORLD, {"peak": check_peak}, partial(initialise, WORLD, torch.device("cpu"), 120))["peak"]
    )
