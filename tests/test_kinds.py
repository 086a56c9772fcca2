"""Profiles of kinds of devices: another cluster of known kinds needs no measurement of operators."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from gloo_world import assert_passed, run_world
from torch import nn

import mixmesh
from mixmesh.cluster.detection import Cache
from mixmesh.cost import device_key
from mixmesh.training.preparation import Options, prepare_job
from mixmesh.training.preparation.kinds import names_of_speed

SPEEDS = {"fast": 0.04, "slow": 0.02}
CLUSTER = """
name = "unequal"
[network]
bandwidth_gbit_per_s = 100
latency_us = 1
[[machine]]
name = "host"
link_gbit_per_s = 100
devices = [{devices}]
"""
DEVICE = '{{ name = "{name}", tflop_per_s = {speed}, memory_gib = 4, memory_gbyte_per_s = 20, kind = "cpu" }}'


class Model(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()


def prepare(folder: Path, *devices: str, faster: float = 1.0, compiles: bool = False):
    """What a start on these devices prepares, and what it told of its progress. Collective."""
    rows = [DEVICE.format(name=name, speed=SPEEDS[name.split("-")[0]] * faster) for name in devices]
    file = folder / f"{'+'.join(devices)} {faster}.toml"
    file.write_text(CLUSTER.format(devices=", ".join(rows)))
    torch.manual_seed(0)
    job = mixmesh.Job(Model(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (torch.randn(16, 8),))
    said: list[str] = []
    options = Options(profile_s=0.5, planner="ddp-even", compiles=compiles)
    made = prepare_job(
        job, len(devices), options=options, cache=Cache(folder / "cache"), cluster_file=file,
        progress=said.append,
    )  # fmt: skip
    return made, said


def check_all_is_measured(folder: Path, _) -> None:
    prepared, said = prepare(folder, "fast", "slow")
    assert any(line.startswith("operators 1/") for line in said)
    assert "devices_kept" not in prepared.profile.provenance


def check_a_larger_cluster(folder: Path, _) -> None:
    """Of the same kinds under other names, a little slower than before, and a plan of its own."""
    prepared, said = prepare(folder, "fast-2", "slow", "slow", faster=0.95)
    keys = {device_key(device) for device in prepared.cluster.devices}
    assert set(prepared.profile.devices) == keys == set(prepared.profile.provenance["devices_kept"])
    assert not any(line.startswith(("operators 1/", "whole steps")) for line in said)
    assert {m.ranks for m in prepared.profile.collectives} == {(0, 1, 2)}
    assert [phase.was_kept for phase in prepared.phases if phase.name in ("profile", "plan")] == [False] * 2
    assert prepared.plan.program.world_size == 3


def check_a_compiled_job(folder: Path, _) -> None:
    """Nothing that was measured of the job as it is stands for it compiled."""
    prepared, said = prepare(folder, "fast", "slow", compiles=True)
    assert any(line.startswith("operators 1/") for line in said)
    assert prepared.profile.provenance["compiled"]
    assert not any(phase.was_kept for phase in prepared.phases)


def test_devices_of_another_speed_are_of_another_kind():
    names = ["4e+10.json", "2.1e+10.json", "2e+10.json", "2e+10.json.77"]
    assert names_of_speed(names, 2.08e10) == ["2.1e+10.json", "2e+10.json"]
    assert names_of_speed(names, 2.6e10) == names_of_speed([], 2e10) == []


def test_operators_are_measured_once_for_each_kind(tmp_path):
    checks = {"two": check_all_is_measured, "compiled": check_a_compiled_job}
    for failures in run_world(2, {name: partial(check, tmp_path) for name, check in checks.items()}).values():
        assert_passed(failures)
    then = {"three": partial(check_a_larger_cluster, tmp_path)}
    assert_passed(run_world(3, then)["three"])
