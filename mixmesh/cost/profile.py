"""A measured profile: op times on each distinct device, and collectives on the real links.

The file is JSON; ``Profile.load`` refuses anything else and names the place that is wrong.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import pydantic

from ..base.files import first_problem, merge_mark, read_text, write_text
from ..base.lazy import lazy
from ..cluster import Cluster, Device, Machine
from ..errors import InputError, unmerged, unreadable
from ..lang.ir import Placement, Shard, refs
from ..lang.ir.bounds import MAX_RANKS
from ..lang.rules import Call
from .cold import ALWAYS_WARM, Cold
from .collectives import COLLECTIVES, CollectiveFit
from .curve import Curve
from .links import LinkMeasurement, measurement_of_fit

T = TypeVar("T")
if TYPE_CHECKING:
    _Collective = str
else:
    _Collective = Literal[COLLECTIVES]  # the collectives that a file may name
FORMAT = 2
EXPECTED = "the JSON file that `mixmesh profile` writes"
AGAIN = "mixmesh profile JOB --cluster C.toml --out P.json"
MAX_BYTES = 256 * 2**20  # limit on the size of a file, which has one line per operator and kind of device
FIRST_SIZES_BYTES = (2**12, 2**24)  # sizes to which the lines of version 1 were fitted
# limits far beyond any real device or link, yet small enough that sums and products of them stay finite
_NotNegative = Annotated[float, pydantic.Field(ge=0, le=1e9, allow_inf_nan=False)]
_Positive = Annotated[float, pydantic.Field(ge=1e-12, le=1e15, allow_inf_nan=False)]
_Factor = Annotated[float, pydantic.Field(ge=1e-3, le=1e3, allow_inf_nan=False)]
_Share = Annotated[float, pydantic.Field(gt=0, le=1, allow_inf_nan=False)]
_Count = Annotated[int, pydantic.Field(ge=0, le=2**62)]


def _at_different_places(points: list) -> list:
    if len({x for x, _ in points}) < len(points):
        raise ValueError("two points at one place")
    return points


# one point or more, all at different x
_Points = Annotated[list[T], pydantic.Field(min_length=1), pydantic.AfterValidator(_at_different_places)]


def _of_readable_numbers(key: str) -> str:
    if re.search(r"[0-9]{19}", key):
        raise ValueError("a number of more than 18 digits in the name of an operator")
    return key


_OpKey = Annotated[str, pydantic.AfterValidator(_of_readable_numbers)]
_Curve = _Points[tuple[_Share, _NotNegative]]


class _Curves(pydantic.BaseModel, extra="forbid"):
    forward: _Curve
    backward: _Curve


class _Op(_Curves):
    cuts: dict[Annotated[str, pydantic.Field(pattern="^[01]+$")], _Curves] = {}
    flop: _Count
    moved_bytes: _Count


class _Device(pydantic.BaseModel, extra="forbid"):
    ops: dict[_OpKey, _Op]
    optimizer_s_per_byte: _NotNegative
    memory_constant_bytes: _Count
    step_scale: _Factor = 1.0
    slowdown: float = pydantic.Field(default=0.0, ge=0, le=1)
    exchange_s_per_byte: _NotNegative = 0.0  # older files: one value for all collectives
    host_s: dict[str, tuple[_NotNegative, _NotNegative]] = {}
    host_scale: _Factor = 1.0
    idle_constant_bytes: _Count | None = None
    largest_micro_batch: list[_Count] = []
    rested_s: _NotNegative = 0.0
    rested_speed: float = pydantic.Field(default=1.0, ge=1, le=1e3)
    beside_s: dict[str, tuple[_NotNegative, _NotNegative]] = {}
    communicator_bytes: list[_Count] = pydantic.Field(default=[], max_length=2)
    join_s: list[tuple[_Positive, _NotNegative]] = []
    cold_s: tuple[_NotNegative, _NotNegative, _Positive, _NotNegative] | None = None
    redistribution_s: _NotNegative = 0.0
    overhead_s: _NotNegative = 0.0
    cold: float = 1.0  # in files of one day, a factor without the seconds since the last call; not used


class _Fit(pydantic.BaseModel, extra="forbid"):
    latency_s: _NotNegative
    s_per_byte: _NotNegative


class _Link(pydantic.BaseModel, extra="forbid"):
    collective: _Collective
    algorithm: str = ""
    ranks: list[Annotated[int, pydantic.Field(ge=0, lt=MAX_RANKS)]]
    skew: float = pydantic.Field(default=1.0, ge=1, le=1e6)
    points: _Points[tuple[_Positive, _Positive]]
    source: str = ""


class _File(pydantic.BaseModel, extra="forbid"):
    mixmesh_profile: Literal[2]
    provenance: dict[str, str | int | float | list[str]]
    devices: dict[str, _Device]
    collectives: list[_Link]


class _FirstFile(pydantic.BaseModel, extra="forbid"):
    """A file of version 1: a line per collective between all ranks."""

    mixmesh_profile: Literal[1]
    provenance: dict[str, str | int | float | list[str]]
    devices: dict[str, _Device]
    collectives: dict[str, _Fit]


@dataclass(frozen=True)
class OpMeasurement:
    """Curves over the share of an operator's work, and the amount of that work.

    ``cuts`` has further curves of a product, for other inputs cut than in data parallelism. A key has a digit
    per input, 1 if it is cut (``cut_inputs``).
    """

    forward: Curve
    backward: Curve
    flop: int
    moved_bytes: int
    cuts: dict[str, tuple[Curve, Curve]] = field(default_factory=dict)

    def curves(self, cut: str = "") -> tuple[Curve, Curve]:
        """The forward and backward curves, for these cut inputs if that was measured; at one share only, they
        have the shape of the usual ones."""
        if cut not in self.cuts:
            return self.forward, self.backward
        forward, backward = self.cuts[cut]
        return forward.shaped(self.forward), backward.shaped(self.backward)

    @lazy
    def calmed(self) -> OpMeasurement:
        """The operator with ``Curve.calmed`` seconds, except for parts of a weight: these are products of
        other shapes, whose seconds form no line."""
        return replace(self, forward=self.forward.calmed, backward=self.backward.calmed)


@dataclass(frozen=True)
class DeviceProfile:
    """Measurements of one kind of device. ``ops`` maps ``op_key`` to the measurement of an operator.

    ``step_scale`` is the time of a whole measured step divided by the sum of its ops measured alone; it
    captures the effect of caches and of the allocator on consecutive ops. ``slowdown`` is the extra time, per
    second of computing, while a collective is under way. ``host_s`` maps ``host_key`` of a collective to the
    seconds for which it occupies the computing thread (issuing, copying), fixed and per byte of the whole
    tensor, while nothing else is computed. While the device computes, both are ``host_scale`` times as long:
    the real seconds for each second of CPU time, under a quota.
    ``cold`` has the extra seconds of a call after computing, and of computing after a wait. ``join_s`` has,
    for sizes in bytes, the seconds of joining gradients into a buffer of that size. Both are also to be
    scaled by ``host_scale``.
    ``redistribution_s`` is what a redistribution of a program costs the computing thread besides its
    collective, in the forward or the backward pass, and ``overhead_s`` what the runtime costs it in a step
    besides operators, collectives of the program and the optimizer. Both are also to be scaled.
    ``beside_s`` is like ``host_s``, of communicating threads: a device with burst credit does not save up the
    CPU time that they use.

    ``memory_constant_bytes`` is the memory of a process besides tensors, ``idle_constant_bytes`` that of a
    process that computes nothing. On a GPU ``communicator_bytes`` are what a first sum and a first all_to_all
    between all ranks add to the memory of a process, and its constants then exclude them.
    ``largest_micro_batch`` is, by ZeRO stage, the largest number of samples that was seen to fit in a
    micro-batch with even shard owners; empty if that was not tried.

    After a rest the device works at ``rested_speed`` times its usual pace until it is ``rested_s`` ahead of
    it; each second of rest adds a second of lead, up to that limit.
    """

    ops: dict[str, OpMeasurement]
    optimizer_s_per_byte: float
    memory_constant_bytes: int
    step_scale: float = 1.0
    slowdown: float = 0.0
    host_s: dict[str, tuple[float, float]] = field(default_factory=dict)
    host_scale: float = 1.0
    idle_constant_bytes: int = 0
    largest_micro_batch: tuple[int, ...] = ()
    rested_s: float = 0.0
    rested_speed: float = 1.0
    beside_s: dict[str, tuple[float, float]] = field(default_factory=dict)
    communicator_bytes: tuple[int, ...] = ()
    join_s: tuple[tuple[float, float], ...] = ()
    cold: Cold = ALWAYS_WARM
    redistribution_s: float = 0.0
    overhead_s: float = 0.0

    @lazy
    def calmed(self) -> DeviceProfile:
        """The profile with ``OpMeasurement.calmed`` operators."""
        return replace(self, ops={key: op.calmed for key, op in self.ops.items()})


@dataclass(frozen=True)
class Profile:
    """A whole profile; ``devices`` are by ``device_key``. In the provenance, ``cluster`` is the fingerprint
    of the measured cluster, ``links`` that of its links, and ``backend`` the library that ran the
    collectives."""

    devices: dict[str, DeviceProfile]
    collectives: tuple[LinkMeasurement, ...]
    provenance: dict[str, str | int | float | list[str]] = field(default_factory=dict)

    def without_links(self) -> Profile:
        """The profile without its links, for a cluster whose links were not measured."""
        return replace(self, collectives=())

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        try:
            text = read_text(path, MAX_BYTES)
        except (OSError, ValueError) as err:
            raise unreadable("the profile", path, err, expected=EXPECTED, hint=AGAIN) from None
        mark = merge_mark(text)
        if mark is not None:
            raise unmerged(
                "the profile",
                f"{path}:{mark[0]}",
                mark[1],
                expected="one version of every measurement",
                hint=("git checkout --ours FILE, or --theirs", f"or measure again: {AGAIN}"),
            )
        version = _version(text, path)
        try:
            file = (_FirstFile if version == 1 else _File).model_validate_json(text)
        except pydantic.ValidationError as err:
            where, got = first_problem(path, err)
            raise InputError(
                "this is not a profile", where=where, expected=EXPECTED, got=got, hint=AGAIN
            ) from None
        devices = {
            name: DeviceProfile(
                {
                    key: OpMeasurement(
                        _curve(op.forward),
                        _curve(op.backward),
                        op.flop,
                        op.moved_bytes,
                        {cut: (_curve(c.forward), _curve(c.backward)) for cut, c in op.cuts.items()},
                    )
                    for key, op in d.ops.items()
                },
                d.optimizer_s_per_byte,
                d.memory_constant_bytes,
                d.step_scale,
                d.slowdown,
                d.host_s or _host_s_before(d.exchange_s_per_byte),
                d.host_scale,
                d.memory_constant_bytes if d.idle_constant_bytes is None else d.idle_constant_bytes,
                tuple(d.largest_micro_batch),
                d.rested_s,
                d.rested_speed,
                d.beside_s,
                tuple(d.communicator_bytes),
                tuple(d.join_s),
                Cold(*d.cold_s) if d.cold_s else ALWAYS_WARM,
                d.redistribution_s,
                d.overhead_s,
            )
            for name, d in file.devices.items()
        }
        return cls(devices, _links(file), file.provenance)

    def describes_links_of(self, cluster: Cluster) -> bool:
        """Whether rank numbers mean the same devices in the profile and in ``cluster``; a profile without
        this information is assumed to match."""
        links = self.provenance.get("links")
        if links is not None:
            return links == links_fingerprint(cluster)
        return self.provenance.get("cluster", cluster.fingerprint) == cluster.fingerprint

    def save(self, path: str | Path) -> None:
        data = {
            "mixmesh_profile": FORMAT,
            "provenance": self.provenance,
            "devices": {
                name: {
                    "ops": {
                        key: {
                            "forward": list(op.forward.points),
                            "backward": list(op.backward.points),
                            "flop": op.flop,
                            "moved_bytes": op.moved_bytes,
                            "cuts": {
                                cut: {"forward": list(forward.points), "backward": list(backward.points)}
                                for cut, (forward, backward) in op.cuts.items()
                            },
                        }
                        for key, op in d.ops.items()
                    },
                    "optimizer_s_per_byte": d.optimizer_s_per_byte,
                    "memory_constant_bytes": d.memory_constant_bytes,
                    "step_scale": d.step_scale,
                    "slowdown": d.slowdown,
                    "host_s": d.host_s,
                    "host_scale": d.host_scale,
                    "idle_constant_bytes": d.idle_constant_bytes,
                    "largest_micro_batch": d.largest_micro_batch,
                    "rested_s": d.rested_s,
                    "rested_speed": d.rested_speed,
                    "beside_s": d.beside_s,
                    "communicator_bytes": d.communicator_bytes,
                    "join_s": d.join_s,
                    "cold_s": astuple(d.cold) if d.cold else None,
                    "redistribution_s": d.redistribution_s,
                    "overhead_s": d.overhead_s,
                }
                for name, d in self.devices.items()
            },
            "collectives": [
                {
                    "collective": m.collective,
                    "algorithm": m.algorithm,
                    "ranks": list(m.ranks),
                    "skew": m.skew,
                    "points": list(m.points),
                    "source": m.source,
                }
                for m in self.collectives
            ],
        }
        write_text(path, json.dumps(data, indent=1))


def _host_s_before(s_per_byte: float) -> dict[str, tuple[float, float]]:
    """``host_s`` from a file that has one figure for all collectives."""
    return {name: (0.0, s_per_byte) for name in COLLECTIVES} if s_per_byte else {}


def _version(text: str, path: str | Path) -> int:
    """The version given in a file; the current one if the file has none, for the error that follows."""
    try:
        version = json.loads(text).get("mixmesh_profile", FORMAT)
    except (ValueError, AttributeError, RecursionError):
        return FORMAT
    if type(version) is int and version > FORMAT:
        raise InputError(
            "the profile was written by a later mixmesh",
            where=str(path),
            expected=f"version {FORMAT} or 1",
            got=f"version {version}",
            hint=AGAIN,
        )
    return version


def _links(file: _File | _FirstFile) -> tuple[LinkMeasurement, ...]:
    if isinstance(file, _FirstFile):
        return tuple(
            measurement_of_fit(name, CollectiveFit(f.latency_s, f.s_per_byte), FIRST_SIZES_BYTES, "a fit")
            for name, f in file.collectives.items()
        )
    return tuple(
        LinkMeasurement(m.collective, m.algorithm, tuple(m.ranks), tuple(sorted(m.points)), m.skew, m.source)
        for m in file.collectives
    )


def links_fingerprint(cluster: Cluster) -> str:
    """12 hex digits of everything on which a measurement of links depends: positions of devices, links, and
    the share of a core of each process. Names and memories do not count."""
    facts = [cluster.bandwidth_bytes_per_s, cluster.latency_s] + [
        [*m.wiring[:3], [(d.kind, d.cpu_share) for d in m.devices], *_more_wiring(m)]
        for m in cluster.machines
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def _more_wiring(machine: Machine) -> tuple[str, ...]:
    """The wiring of a machine whose devices do not all share one link; empty for any other machine, as in old
    files."""
    return machine.wiring[3:] if machine.links or machine.bridge_bytes_per_s is not None else ()


def _curve(points: list[tuple[float, float]]) -> Curve:
    return Curve(tuple(sorted((float(x), float(y)) for x, y in points)))


def device_key(device: Device) -> str:
    """A key of everything declared about a device that matters to the profiler."""
    share = "" if device.cpu_share is None else f" x{device.cpu_share:g}"
    return f"{device.name}{share} {device.flop_per_s / 1e12:g}TF {device.memory_bytes_per_s / 1e9:g}GB/s"


def op_key(call: Call) -> str:
    """The key under which the profiler merges calls: operator, types and plain arguments."""
    plain = [repr(a) for a in call.args if not _has_ref(a)] + [
        f"{k}={v!r}" for k, v in call.kwargs if not _has_ref(v)
    ]
    return f"{call.op}({', '.join(map(str, call.inputs))}; {', '.join(plain)})"


def cut_inputs(placements: Iterable[Placement]) -> str:
    """The cut inputs of a call, as a digit for each: 1 if it is cut."""
    return "".join(["1" if isinstance(p, Shard) else "0" for p in placements])


def host_key(collective: str, algorithm: str | None) -> str:
    return f"{collective} {algorithm}" if algorithm else collective


def _has_ref(arg) -> bool:
    return next(refs(arg), None) is not None
