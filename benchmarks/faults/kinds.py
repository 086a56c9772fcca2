"""The kinds of faults: how each is made, when it is over, and how it is noticed."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mixmesh.measure.testbed.cgroups import MIN_QUOTA_US, PERIOD_US

from .scene import Scene

NOT_WRITTEN = "could not be written"  # a part of the warning where a disk is full
LEFT_BYTES = 16 * 2**10  # free space of a full disk


@dataclass
class Fault:
    """One fault of a training: its victim, a description, and the observed times in seconds."""

    kind: str
    machine: int
    step: int
    what: str = ""
    noticed_s: float | None = None
    saved_s: float | None = None  # until the requested checkpoint was finished
    again_s: float | None = None
    whole_s: float | None = None  # until all machines trained again
    problem: str = ""
    said: str = ""  # the last lines of all machines, if it was noticed late

    @property
    def is_survived(self) -> bool:
        return not self.problem and self.again_s is not None


@dataclass(frozen=True)
class Kind:
    """A kind of fault. ``make`` makes it and returns a description. If it ``ends_ranks`` the others notice it
    and a new start should continue; otherwise this start should. ``undo`` is called when the others have
    noticed it (``"noticed"``), or train again (``"again"``). ``press`` strengthens a fault that takes a while
    to end its victim, until the victim is gone."""

    name: str
    text: str
    make: Callable[[Scene, int, random.Random], str]
    needs_testbed: bool = False
    ends_ranks: bool = True
    undo: Callable[[Scene, int], None] = lambda scene, machine: None
    undo_when: str = "noticed"
    has_alive_victim: bool = False  # its rank should itself notice the fault
    press: Callable[[Scene, int], None] | None = None
    is_saved: bool = False  # all ranks write a checkpoint before they end, so that no step is lost
    warning: str = ""  # the warning by which a fault that does not end ranks is noticed


def kill_rank(scene: Scene, machine: int, rng: random.Random) -> str:
    line = scene.running()[machine]
    os.kill(line.pid, signal.SIGKILL)
    return f"SIGKILL to rank {line.rank}"


def stop_rank(scene: Scene, machine: int, rng: random.Random) -> str:
    line = scene.running()[machine]
    os.kill(line.pid, signal.SIGSTOP)
    return f"SIGSTOP to rank {line.rank}"


def preempt_rank(scene: Scene, machine: int, rng: random.Random) -> str:
    line = scene.running()[machine]
    os.kill(line.pid, signal.SIGTERM)
    return f"SIGTERM to rank {line.rank}"


def kill_agent(scene: Scene, machine: int, rng: random.Random) -> str:
    scene.kill_agent(machine)
    return f"SIGKILL to the agent of machine {machine}"


def cut_link(scene: Scene, machine: int, rng: random.Random) -> str:
    scene.bed.set_link(machine, False)
    return f"eth0 of machine {machine} down"


def join_link(scene: Scene, machine: int) -> None:
    scene.bed.set_link(machine, True)


def rank_of(scene: Scene, machine: int) -> int:
    """The device of a machine, by its number in the bed."""
    return scene.bed.cluster.ranks_of(machine)[0]


def halve_share(scene: Scene, machine: int, rng: random.Random) -> str:
    device = scene.bed.cluster.devices[rank_of(scene, machine)]
    half = max((device.cpu_share or 1.0) / 2, MIN_QUOTA_US / PERIOD_US)
    scene.bed.set_share(rank_of(scene, machine), half)
    return f"{half:g} of a core for machine {machine}"


def return_share(scene: Scene, machine: int) -> None:
    device = scene.bed.cluster.devices[rank_of(scene, machine)]
    scene.bed.set_share(rank_of(scene, machine), device.cpu_share or 1.0)


def take_memory(scene: Scene, machine: int, rng: random.Random) -> str:
    take_freed_memory(scene, machine)
    return f"no more memory for machine {machine}"


def take_freed_memory(scene: Scene, machine: int) -> None:
    """Lowers the limit to current use, so that no memory is left over from checkpoints deleted since."""
    scene.bed.take_memory(rank_of(scene, machine))


def return_memory(scene: Scene, machine: int) -> None:
    scene.bed.return_memory(rank_of(scene, machine))


def ballast(scene: Scene) -> Path:
    """The file that a full disk is full of."""
    return scene.checkpoints / "ballast"


def fill_disk(scene: Scene, machine: int, rng: random.Random) -> str:
    room = os.statvfs(scene.checkpoints)
    size_bytes = max(0, room.f_bavail * room.f_frsize - LEFT_BYTES)
    with ballast(scene).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
    return f"{LEFT_BYTES // 2**10} KiB left for checkpoints"


def empty_disk(scene: Scene, machine: int) -> None:
    ballast(scene).unlink()


def damaged_file(scene: Scene, rng: random.Random) -> Path:
    """Some file of the newest checkpoint, which is counted as damaged from now on."""
    folder = scene.good_checkpoints()[0]
    scene.damaged.add(folder.name)
    return rng.choice(sorted(path for path in folder.iterdir() if path.stat().st_size))


def cut_file(scene: Scene, machine: int, rng: random.Random) -> str:
    path = damaged_file(scene, rng)
    size_bytes = rng.randrange(path.stat().st_size)
    os.truncate(path, size_bytes)
    return f"{path.parent.name}/{path.name} cut to {size_bytes} bytes, {kill_rank(scene, machine, rng)}"


def flip_bit(scene: Scene, machine: int, rng: random.Random) -> str:
    path = damaged_file(scene, rng)
    data = bytearray(path.read_bytes())
    at, bit = rng.randrange(len(data)), rng.randrange(8)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    told = f"bit {bit} of byte {at} of {path.parent.name}/{path.name} flipped"
    return f"{told}, {kill_rank(scene, machine, rng)}"


KINDS = (
    Kind("kill", "SIGKILL of a rank", kill_rank),
    Kind("stop", "SIGSTOP of a rank", stop_rank),
    Kind("preempt", "SIGTERM of a rank", preempt_rank, has_alive_victim=True, is_saved=True),
    Kind("agent", "SIGKILL of an agent of torchrun", kill_agent, has_alive_victim=True),
    Kind("truncate", "newest checkpoint cut short, then kill", cut_file),
    Kind("flip", "a bit of the newest checkpoint flipped, then kill", flip_bit),
    Kind("link", "the link of a machine down", cut_link, True, undo=join_link, undo_when="again"),
    Kind("memory", "memory limit lowered", take_memory, True, undo=return_memory,
         press=take_freed_memory),
    Kind("share", "half of a device's CPU share", halve_share, True, ends_ranks=False, undo=return_share),
    Kind("disk", "disk of the checkpoints full", fill_disk, True, ends_ranks=False, undo=empty_disk,
         warning=NOT_WRITTEN),
)  # fmt: skip
KIND_NAMES = tuple(kind.name for kind in KINDS)


def kind_of(name: str) -> Kind:
    """The kind of this name."""
    return next(kind for kind in KINDS if kind.name == name)
