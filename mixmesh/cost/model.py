"""The cost model: seconds and bytes of an instruction on a rank, used by search, LP and simulator alike.

Operators in the profile take their measured time. For others the time is a roofline (Williams et al., 2009):
the longer of the multiply-adds at the device's rate and the bytes at the memory's rate, both scaled by the
profile's measurements of the same class on that device, if there are any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ..base.heap import OWN_PIECE_BYTES
from ..base.lazy import lazy
from ..cluster import Cluster, Device
from ..lang.ir import Placement
from ..lang.rules import Call
from . import gpu_memory, lending, scales
from .cold import ALWAYS_WARM, Cold
from .collectives import LEVELLED, USUAL, CollectiveFit, ring_fit
from .communicators import Communicator
from .curve import ZERO, Curve, affine_curve, issued_curve
from .efficiency import ANY, ELEMENTWISE, efficiency
from .kernels import Kernels, kernels
from .links import MeasuredCollective, measured_collective
from .profile import DeviceProfile, OpMeasurement, Profile, cut_inputs, device_key, host_key, op_key
from .resized import Measured
from .unmeasured import check_unmeasured
from .work import HALF, MEMORY_BOUND_OWN, VIEWS, call_flop, is_product, moved_bytes

CPU_PROCESS_BYTES = (340 * 2**20, 316 * 2**20)  # for `mixmesh run` with PyTorch 2.13: working, idle
# Seconds for which the host issues an operator of eager PyTorch to a GPU, unless the cluster file has its own
# (``issue_us``). Plain loops take 5 to 25 us, measured training frameworks 30 to 60 per kernel; our runtime
# interprets a program, without modules and hooks. The GPU computes meanwhile, so an operator takes its issue
# or its run, whichever is longer: measured layers (``python -m benchmarks layer-times``) do not add them up.
# Issued kernels in a queue may hide a slow issue; this does not count on it.
GPU_ISSUE_S = 30e-6
BACKWARD_ISSUE = 0.5  # relative to the forward pass; PyTorch issues backward kernels without Python
VIEW_ISSUE = 0.1  # relative to a kernel: a view runs none
CPU_LAUNCH_S = 4e-6  # dispatch of one operator on one full core
# forward and backward seconds of memory-bound operators on a CPU, relative to reading their inputs and
# writing their results once
MEMORY_BOUND = (1.0, 1.5)
ADAM_ACCESSES = 7  # per byte: reads weight, gradient and two moments; writes weight and moments
SOURCES = PROFILE, CALIBRATION, ROOFLINE = "profile", "calibration", "roofline"
# used for collectives that were not measured: the computing thread joins, issues and cuts for them too
MOST_USUAL = "all_reduce"
CALL_PER_PIECE = ("broadcasts", "reduces")  # algorithms that make one call for every rank of the group


@dataclass(frozen=True)
class OpTime:
    """Curves over the share of the work, forward and backward."""

    forward: Curve
    backward: Curve


class CostModel:
    """Costs on one cluster, from a profile or, without one, from the catalogue's figures.

    ``unmeasured`` names mechanisms of ``UNMEASURED`` to count on although no GPU has shown that they hold.
    ``tf32``: whether the job lets matrix products of fp32 run in TF32
    (``torch.backends.cuda.matmul.allow_tf32``). Raises InputError for another name.
    """

    def __init__(
        self,
        cluster: Cluster,
        profile: Profile | None = None,
        unmeasured: Collection[str] = (),
        *,
        tf32: bool = False,
    ) -> None:
        self.cluster = cluster
        self.profile = profile
        self.tf32 = tf32
        self.unmeasured = check_unmeasured(unmeasured)
        self._ops: dict[tuple, OpTime] = {}
        self._fits: dict[tuple, CollectiveFit | MeasuredCollective] = {}
        self._scales: dict[tuple, float] = {}
        self._issues: dict[Device, float] = {}
        self._books: dict[Device, Measured] = {}
        self._longer: dict[tuple[str, str], tuple[float, float]] = {}  # by operator and cut
        self._paces: dict[tuple[Device, Device, bool], float | None] = {}

    @lazy
    def source(self) -> str:
        """The origin of the figures, for the plan's header."""
        trusted = "".join(f", counting on {name} (never measured)" for name in sorted(self.unmeasured))
        return self._measured_source + trusted

    @property
    def _measured_source(self) -> str:
        sources = [self._source_of(device) for device in self.classes]
        text = " and ".join(source for source in SOURCES if source in sources)
        is_corrected = PROFILE in sources and self.profile and "corrected" in self.profile.provenance
        return text + (", corrected by a trial" if is_corrected else "")

    def _source_of(self, device: Device) -> str:
        if self.has_profile_of(device):
            return PROFILE
        return CALIBRATION if device.calibrated else ROOFLINE

    @lazy
    def classes(self) -> tuple[Device, ...]:
        """The distinct devices, by first appearance."""
        return tuple(dict.fromkeys(self.cluster.devices))

    @lazy
    def class_of(self) -> tuple[int, ...]:
        """For each rank, its class."""
        return tuple(self.classes.index(d) for d in self.cluster.devices)

    def op(self, call: Call, grads: int, device_class: int, cut: str = "") -> OpTime:
        """Times of ``call`` on a device class. ``grads`` is the number of its inputs that take a gradient.
        ``cut`` says which inputs are cut (``cut_inputs``): cutting others than data parallelism does may cost
        more or less."""
        key = (op_key(call), grads, device_class, cut)
        if key not in self._ops:
            self._ops[key] = self._op(call, grads, self.classes[device_class], cut)
        return self._ops[key]

    def least_op_s(self, call: Call, grads: int, device_class: int, *, parts: bool) -> float:
        """The least seconds for all of ``call``, forward and backward, over all shares and cuts that were
        measured on a device class; with ``parts`` also over estimates for a part of the batch, which no
        profile holds."""
        device = self.classes[device_class]
        measured = self.measured_op(call, device)
        measurements = (measured, *self._measured_by_others(call, device).values())
        cuts = dict.fromkeys(cut for op in measurements if op is not None for cut in op.cuts)
        times = [self._op(call, grads, device, cut) for cut in ("", *cuts)]
        if measured and parts:
            times.append(self._estimated(call, grads, device))
        return min(time.forward.least_s for time in times) + min(time.backward.least_s for time in times)

    def cut(self, call: Call, placements: Iterable[Placement]) -> str:
        """Which inputs of a product are cut; empty for other operators, and if no profile distinguishes
        cuts."""
        return cut_inputs(placements) if self._knows_cuts and is_product(call) else ""

    @lazy
    def _knows_cuts(self) -> bool:
        profiles = self.profile.devices.values() if self.profile else ()
        return any(op.cuts for d in profiles for op in d.ops.values())

    def has_profile_of(self, device: Device) -> bool:
        return self._measured(device) is not None

    def _measured(self, device: Device) -> DeviceProfile | None:
        """The profile of a device. A CPU's is calmed, because its pace depends on what else the machine
        does."""
        measured = self.profile.devices.get(device_key(device)) if self.profile else None
        return measured.calmed if measured and device.kind == "cpu" else measured

    def _op(self, call: Call, grads: int, device: Device, cut: str) -> OpTime:
        measured = self._measured_or_lent(call, device, cut)
        if measured is not None and (profile := self._measured(device)) is not None:
            longer = self._longer_if_cut(call, cut) if cut and cut not in measured.cuts else (1.0, 1.0)
            forward, backward = [
                c.scaled(factor * profile.step_scale) for c, factor in zip(measured.curves(cut), longer)
            ]
            return OpTime(forward, backward if grads else ZERO)
        return self._estimated(call, grads, device)

    def _measured_or_lent(self, call: Call, device: Device, cut: str) -> OpMeasurement | None:
        """The measurement of an operator on a device; what it lacks is from another device of its kind."""
        measured = self.measured_op(call, device)
        if measured is not None and not lending.lacks(measured, cut):
            return measured
        lent_by = self._measured_by_others(call, device)
        product = is_product(call)
        if measured is not None:
            for lent in lent_by.values():
                measured = lending.with_shape(measured, lent)
            if len(measured.forward.points) == 1:
                paced = [(lent, self._pace(device, other, product)) for other, lent in lent_by.items()]
                measured = lending.with_others(
                    measured, [lending.slower(lent, pace) for lent, pace in paced if pace]
                )
            lenders = [lent for lent in lent_by.values() if cut in lent.cuts and cut not in measured.cuts]
            return lending.with_cuts(measured, lenders[0]) if lenders else measured
        for other, lent in lent_by.items():
            pace = self._pace(device, other, product)
            if pace is not None:
                return lending.slower(lent, pace)
        return measured

    def _measured_by_others(self, call: Call, device: Device) -> dict[Device, OpMeasurement]:
        """The measurements of an operator on other devices of the kind; those at several shares first."""
        others = [other for other in self.classes if other.kind == device.kind and other != device]
        pairs = [(other, op) for other in others if (op := self.measured_op(call, other)) is not None]
        return dict(sorted(pairs, key=lambda pair: len(pair[1].forward.points) == 1))

    def _longer_if_cut(self, call: Call, cut: str) -> tuple[float, float]:
        name, _, _ = op_key(call).partition("(")
        if (name, cut) not in self._longer:
            devices = self.profile.devices.values() if self.profile else ()
            self._longer[name, cut] = lending.longer_if_cut(name, cut, [d.ops for d in devices])
        return self._longer[name, cut]

    def _pace(self, device: Device, other: Device, product: bool) -> float | None:
        key = (device, other, product)
        if key not in self._paces:
            own, others = self._measured(device), self._measured(other)
            known = own and others and lending.pace(own.ops, others.ops, product=product)
            self._paces[key] = known or None
        return self._paces[key]

    def measured_op(self, call: Call, device: Device) -> OpMeasurement | None:
        """The measurement of an operator on a device, for the same number of samples or resized from
        another."""
        profile = self._measured(device)
        if profile is None:
            return None
        if device not in self._books:
            self._books[device] = Measured(profile.ops)
        return self._books[device].find(op_key(call), call_flop(call))

    def _estimated(self, call: Call, grads: int, device: Device) -> OpTime:
        scale = self._class_scale(device, is_product(call))
        if device.kind == "cpu" and device.issue_s is None and not device.efficiency:
            work = roofline_s(call, device) * scale
            launch_s = CPU_LAUNCH_S / (device.cpu_share or 1)
            ahead, back = passes(call, grads)
            gradient = affine_curve(2 * launch_s, work * back) if grads and back else ZERO
            return OpTime(affine_curve(launch_s, work * ahead), gradient)
        issue_s = self.issue_s(device)
        if call.op in VIEWS:
            view = affine_curve(issue_s * (VIEW_ISSUE if device.kind == "gpu" else 1.0), 0.0)
            return OpTime(view, view if grads else ZERO)

        def curve(made: Kernels, each_s: float) -> Curve:
            if not made.count:
                return ZERO
            if device.kind == "cpu":  # a CPU does nothing else while it issues
                return affine_curve(made.count * each_s + made.ramp_s, made.full_s * scale)
            return issued_curve(made.count * each_s, made.ramp_s, made.full_s * scale)

        forward, backward = kernels(call, grads, device, tf32=self.tf32)
        return OpTime(curve(forward, issue_s), curve(backward, self.backward_issue_s(device)))

    def backward_issue_s(self, device: Device) -> float:
        """Seconds that PyTorch takes to issue a kernel of the backward pass."""
        if device.backward_issue_s is None:
            return BACKWARD_ISSUE * self.issue_s(device)
        return device.backward_issue_s * (self.issue_s(device) / usual_issue_s(device))

    def issue_s(self, device: Device) -> float:
        """Seconds that the host of a GPU takes to issue an operator, or a CPU to begin one."""
        if device not in self._issues:
            usual_s = usual_issue_s(device)
            measured = self._measured(device)
            self._issues[device] = usual_s if measured is None else scales.issue_s(measured, usual_s)
        return self._issues[device]

    def _class_scale(self, device: Device, product: bool) -> float:
        """Measured over estimated seconds of operators of the same class on this device, or of the other
        class if this one was not measured; 1 if neither was."""
        key = (device, product)
        if key not in self._scales:
            of_class = (self._measure_scale(device, kind) for kind in (product, not product))
            self._scales[key] = next((scale for scale in of_class if scale), 1.0)
        return self._scales[key]

    def _measure_scale(self, device: Device, product: bool) -> float | None:
        measured = self._measured(device)
        if measured is None:
            return None
        return scales.slope(measured, device, product=product, tf32=self.tf32)

    def collective(self, name: str, ranks: tuple[int, ...]) -> CollectiveFit | MeasuredCollective:
        """The cost of a collective between ``ranks``, with its fastest algorithm if it was measured."""
        key = (name, ranks)
        if key not in self._fits:
            self._fits[key] = self._collective(name, ranks)
        return self._fits[key]

    def has_measured(self, name: str, ranks: tuple[int, ...]) -> bool:
        """Whether the profile has a collective between ``ranks`` on the links of this cluster."""
        if self.profile is None or not self.profile.describes_links_of(self.cluster):
            return False
        return measured_collective(self.cluster, self.profile.collectives, name, ranks) is not None

    def _collective(self, name: str, ranks: tuple[int, ...]) -> CollectiveFit | MeasuredCollective:
        estimate = ring_fit(self.cluster, name, ranks)
        if self.profile is None or len(ranks) < 2 or not self.profile.describes_links_of(self.cluster):
            return estimate
        measured = measured_collective(self.cluster, self.profile.collectives, name, ranks)
        if measured is None and name in USUAL:
            # a link measured with the library's own algorithm carries other algorithms at the same rate
            flat, usual = self.collective(USUAL[name], ranks), ring_fit(self.cluster, USUAL[name], ranks)
            latency_s = estimate.latency_s * _ratio(flat.latency_s, usual.latency_s)
            return CollectiveFit(latency_s, estimate.s_per_byte * _ratio(flat.s_per_byte, usual.s_per_byte))
        return measured or estimate

    def sum_s_per_byte(self, ranks: tuple[int, ...]) -> float:
        """Seconds that these ranks take to sum a byte of gradients, flat or hierarchically."""
        return min(self.collective(name, ranks).s_per_byte for name in ("all_reduce", LEVELLED["all_reduce"]))

    def optimizer_s(self, rank: int, size_bytes: float) -> float:
        """Seconds of an optimizer step over ``size_bytes`` of parameters on ``rank``."""
        device = self.cluster.devices[rank]
        measured = self._measured(device)
        if measured is not None:
            return measured.optimizer_s_per_byte * size_bytes
        if device.optimizer_s_per_byte is not None:
            return device.optimizer_s_per_byte * size_bytes
        return ADAM_ACCESSES * size_bytes / memory_rate(device)

    def accumulation_s(self, rank: int, size_bytes: float) -> float:
        """Seconds of adding gradients of ``size_bytes`` to those of earlier micro-batches: two values are
        read and one is written, at the speed of memory-bound operators."""
        device = self.cluster.devices[rank]
        return 3 * size_bytes / memory_rate(device) * self._class_scale(device, product=False)

    def slowdown(self, rank: int) -> float:
        """The share by which computing on ``rank`` takes longer while a collective is under way."""
        measured = self._measured(self.cluster.devices[rank])
        return measured.slowdown if measured else 0.0

    def rest(self, rank: int) -> tuple[float, float]:
        """The seconds that ``rank`` gains over its usual pace after a rest, and its speed until then."""
        measured = self._measured(self.cluster.devices[rank])
        return (measured.rested_s, measured.rested_speed) if measured else (0.0, 1.0)

    def exchange_host_s(self, rank: int, name: str, ranks: tuple[int, ...], size_bytes: float) -> float:
        """Seconds for which a collective over ``size_bytes`` in total keeps the computing thread busy."""
        measured = self._measured(self.cluster.devices[rank])
        if measured is None:
            return 0.0
        return self.host_scale(rank) * self._exchange_s(measured.host_s, name, ranks, size_bytes)

    def cold(self, rank: int) -> Cold:
        """The extra seconds of issuing a collective after computing, and of computing after a wait."""
        measured = self._measured(self.cluster.devices[rank])
        return measured.cold.scaled(measured.host_scale) if measured else ALWAYS_WARM

    def redistribution_s(self, rank: int) -> float:
        """Seconds for which a redistribution of a program keeps the computing thread busy besides its
        collective."""
        measured = self._measured(self.cluster.devices[rank])
        return measured.host_scale * measured.redistribution_s if measured else 0.0

    def overhead_s(self, rank: int) -> float:
        """Seconds of the runtime's own work in a step, such as checks; 0 if they were not measured."""
        measured = self._measured(self.cluster.devices[rank])
        return measured.host_scale * measured.overhead_s if measured else 0.0

    def host_scale(self, rank: int) -> float:
        measured = self._measured(self.cluster.devices[rank])
        return measured.host_scale if measured else 1.0

    def exchange_alone_s(self, rank: int, name: str, ranks: tuple[int, ...], size_bytes: float) -> float:
        """Like ``exchange_host_s`` while the device computes nothing else. Collectives were measured like
        that, so these seconds are a part of theirs."""
        measured = self._measured(self.cluster.devices[rank])
        return 0.0 if measured is None else self._exchange_s(measured.host_s, name, ranks, size_bytes)

    def join_s(self, rank: int, size_bytes: float) -> float:
        """Seconds for which joining gradients of ``size_bytes`` keeps the computing thread busy."""
        measured = self._measured(self.cluster.devices[rank])
        if measured is None or not measured.join_s:
            return 0.0
        return self.host_scale(rank) * Curve(measured.join_s).at(size_bytes)

    def new_pages_s(self, rank: int, size_bytes: float) -> float:
        """Seconds for which the computing thread waits for new memory of ``size_bytes``: what a join in new
        pages takes longer than joins of the largest buffer in used ones."""
        measured = self._measured(self.cluster.devices[rank])
        if measured is None or not measured.join_s or size_bytes < OWN_PIECE_BYTES:
            return 0.0
        curve = Curve(measured.join_s)
        used = max((size for size, _ in measured.join_s if size < OWN_PIECE_BYTES), default=size_bytes)
        extra_s = curve.at(size_bytes) - curve.at(used) * size_bytes / used
        return self.host_scale(rank) * max(extra_s, 0.0)

    def exchange_beside_s(self, rank: int, name: str, ranks: tuple[int, ...], size_bytes: float) -> float:
        """Seconds, at a device's usual pace, that its communicating threads take for a collective."""
        measured = self._measured(self.cluster.devices[rank])
        if measured is None:
            return 0.0
        return self.host_scale(rank) * self._exchange_s(measured.beside_s, name, ranks, size_bytes)

    def _exchange_s(
        self,
        known_s: dict[str, tuple[float, float]],
        name: str,
        ranks: tuple[int, ...],
        size_bytes: float,
    ) -> float:
        name = USUAL.get(name, name)
        algorithm = self.collective(name, ranks).algorithm(size_bytes)
        line = known_s.get(host_key(name, algorithm)) or known_s.get(name) or known_s.get(MOST_USUAL)
        if line is None:
            return 0.0
        fixed, per_byte = line
        if algorithm in CALL_PER_PIECE:
            fixed *= len(ranks) / self.cluster.world_size
        return fixed + per_byte * size_bytes

    def largest_micro_batch(self, rank: int, stage: int) -> int | None:
        """Samples of the largest micro-batch that ran on a device like that of ``rank`` in a ZeRO stage; None
        if none was tried."""
        measured = self._measured(self.cluster.devices[rank])
        tried = measured.largest_micro_batch if measured else ()
        return tried[stage] if stage < len(tried) else None

    def memory_constant_bytes(
        self, rank: int, communicators: Sequence[Communicator] | None = None, *, idle: bool = False
    ) -> int:
        """Bytes that a process holds before any tensor: interpreter, libraries, CUDA context, and buffers of
        NCCL for these ``communicators`` (the usual ones by default). An ``idle`` process has not loaded the
        kernels."""
        device = self.cluster.devices[rank]
        measured = self._measured(device)
        if measured is not None:
            constant = measured.idle_constant_bytes if idle else measured.memory_constant_bytes
            one, world_size = measured.communicator_bytes, self.cluster.world_size
            return gpu_memory.measured_bytes(constant, one, world_size, communicators, rank)
        if device.kind == "cpu":
            return _cpu_process_bytes(device, idle)
        return gpu_memory.process_bytes(self.cluster, rank, communicators, idle=idle)

    def memory_constants_bytes(
        self, communicators: Sequence[Communicator] | None = None, *, working: Collection[int] | None = None
    ) -> list[int]:
        """``memory_constant_bytes`` of every rank; ranks outside of ``working`` are idle. Ranks of one class
        hold the same if their machines are alike and they communicate with equally many ranks of their own
        machine."""
        world_size = self.cluster.world_size
        if communicators is None:
            communicators = gpu_memory.usual_communicators(world_size)
        machine_of = [self.cluster.machine_index_of(rank) for rank in range(world_size)]
        counts = [Counter([machine_of[rank] for rank in c.ranks]) for c in communicators]
        met = [{rank: each[machine_of[rank]] for rank in c.ranks} for c, each in zip(communicators, counts)]
        wirings = [machine.wiring for machine in self.cluster.machines]
        size_of: dict[tuple, int] = {}
        sizes = []
        for rank, machine in enumerate(machine_of):
            idle = working is not None and rank not in working
            near = tuple([near_of.get(rank, 0) for near_of in met])
            key = (self.class_of[rank], wirings[machine], idle, near)
            if key not in size_of:
                size_of[key] = self.memory_constant_bytes(rank, communicators, idle=idle)
            sizes.append(size_of[key])
        return sizes


def usual_issue_s(device: Device) -> float:
    """Seconds to issue an operator, assumed without a profile: the device's own figure, or else the usual
    one."""
    if device.issue_s is not None:
        return device.issue_s
    return GPU_ISSUE_S if device.kind == "gpu" else CPU_LAUNCH_S / (device.cpu_share or 1)


def _cpu_process_bytes(device: Device, idle: bool) -> int:
    if device.context_bytes is None:
        return CPU_PROCESS_BYTES[idle]
    return device.context_bytes + (0 if idle else device.kernel_bytes or 0)


def _ratio(a: float, b: float) -> float:
    return a / b if b else 1.0


def roofline_s(call: Call, device: Device) -> float:
    """Seconds of the forward pass of the whole call on ``device`` without launch cost."""
    if call.op in VIEWS:
        return 0.0
    if device.kind == "gpu":
        return kernels(call, 0, device, tf32=False)[0].full_s
    half = any(t.dtype in HALF for t in call.outputs)
    return scales.cpu_work_s(call_flop(call), moved_bytes(call), device, half=half)


def memory_rate(device: Device) -> float:
    """Bytes per second of memory-bound operators."""
    return device.memory_bytes_per_s * efficiency(ELEMENTWISE, ANY, device).share


def passes(call: Call, grads: int) -> tuple[float, float]:
    """Forward and backward time on a CPU relative to the roofline's: a product is repeated once per factor
    that takes a gradient.

    A bias takes a sum and no product, and attention's backward is two to two and a half forward passes (Dao,
    FlashAttention-2, 2023, section 4), so no operator counts more than two.
    """
    if is_product(call):
        return 1.0, float(min(max(grads, 1), 2))
    return MEMORY_BOUND_OWN.get(call.op, MEMORY_BOUND)
