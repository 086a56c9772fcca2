"""Profiles of kinds of devices: with fewer devices, or more devices of known kinds, no operator is measured
again.

A kind is identified by PyTorch's report about a device, and by its speed. Each machine keeps the kinds of the
whole cluster, so that the remaining machines know them, whichever one is lost. Collectives depend on the
ranks that take part, and are measured for each set of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath

import torch

from ...cluster import Cluster, Device
from ...cluster.detection import Cache
from ...cluster.detection.assemble import SAME_SPEED
from ...cluster.detection.cache import key_of
from ...cluster.detection.inventory import read_device
from ...cost import DeviceProfile, Profile, device_key
from ...measure.profiler.constants import KeptProcess, ProcessMemory
from ...runtime.first_rank import everyones
from ...runtime.versions import package_version


@dataclass(frozen=True)
class Kinds:
    """The profiles of kinds of devices that this machine has for one job. ``key`` identifies the job and
    everything else on which a profile depends, except devices; ``own`` identifies PyTorch's report about this
    rank's device."""

    cache: Cache
    key: str
    own: str

    @classmethod
    def of(cls, cache: Cache, key: str, where: torch.device) -> Kinds:
        """The kinds seen from this rank, whose device is ``where``."""
        facts = read_device(where)
        return cls(cache, key, key_of(facts.kind, facts.name, facts.num_threads, facts.emulated))

    def load_all(self, cluster: Cluster, rank: int) -> dict[str, DeviceProfile] | None:
        """The profiles of all devices of ``cluster`` by ``device_key``; None if no machine has one for some
        device. Collective."""
        own = cluster.devices[rank]
        profiles: dict[str, DeviceProfile] = {}
        for key, one in everyones((device_key(own), self._load(own))):
            if one is not None:
                profiles.setdefault(key, one)
        return profiles if all(device_key(device) in profiles for device in cluster.devices) else None

    def save_all(self, profile: Profile, cluster: Cluster, rank: int, is_first_here: bool) -> None:
        """Keeps the profiles of all devices of ``cluster``; the first rank of each machine writes.
        Collective."""
        reported = everyones(self.own)
        written = dict(zip(zip(reported, cluster.devices), range(cluster.world_size)))
        for own, device in written if is_first_here else ():
            devices = {key: p for key, p in profile.devices.items() if key == device_key(device)}
            one = Profile(devices, (), profile.provenance)
            self.cache.save(f"{self._folder(own)}/{device.flop_per_s:.6g}.json", one.save)

    def process(self) -> KeptProcess:
        """The memory of a process without tensors, which does not depend on the job, as kept on this
        machine."""
        file = f"process/{key_of(package_version(), torch.__version__, sys.version, self.own)}.json"

        def read(path: Path) -> ProcessMemory | None:
            with suppress(ValueError, TypeError):
                idle, working = json.loads(path.read_text())
                return ProcessMemory(int(idle), int(working))
            return None

        return KeptProcess(
            lambda: self.cache.load(file, read),
            lambda memory: self.cache.save(
                file, lambda path: path.write_text(json.dumps([memory.idle, memory.working]))
            ),
        )

    def _load(self, device: Device) -> DeviceProfile | None:
        """The profile for the kind of ``device``: the nearest in speed, if it is near enough."""
        folder = self._folder(self.own)
        for name in names_of_speed(self.cache.names(folder), device.flop_per_s):
            profile = self.cache.load(f"{folder}/{name}", Profile.load)
            if profile is not None and len(profile.devices) == 1:
                return next(iter(profile.devices.values()))
        return None

    def _folder(self, reported: str) -> str:
        return f"kinds/{key_of(self.key, reported)}"


def names_of_speed(names: Iterable[str], flop_per_s: float) -> list[str]:
    """The names that are numbers about as large as ``flop_per_s``, the nearest first."""
    speeds: dict[str, float] = {}
    for name in names:
        with suppress(ValueError):
            speeds[name] = float(PurePath(name).stem)
    near = [n for n, s in speeds.items() if abs(s - flop_per_s) <= SAME_SPEED * max(s, flop_per_s)]
    return sorted(near, key=lambda name: abs(speeds[name] - flop_per_s))
