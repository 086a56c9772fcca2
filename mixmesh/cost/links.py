"""Measured collectives: seconds over the bytes of the whole tensor, for each algorithm and group of ranks.

A group that was not measured takes the curve of the most similar measured group, with latency and slope
scaled by the estimates for their links (``ring_fit``). Pieces are measured in proportion to the ranks'
speeds, as in training, and even: algorithms that pad, or send each rank its piece, cost more the more unequal
the pieces are, so seconds are interpolated in the *skew*, the largest piece over the mean one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..base.lazy import lazy
from ..cluster import Cluster
from .collectives import CollectiveFit, ring_fit
from .curve import Curve

SAME_SKEW = 0.02  # pieces are whole rows, so smaller differences of skews are ignored
# Smaller messages are mostly latency, which says nothing about what even pieces save of larger ones. Between
# four emulated devices the seconds for 4 KB differed by a factor of 3 from one profile to the next.
TELLING_BYTES = 2**16


@dataclass(frozen=True)
class LinkMeasurement:
    """One collective by one algorithm between ``ranks`` (empty stands for all of the cluster's).

    ``algorithm`` is empty if the runtime has only one. ``points`` are ``(size_bytes, seconds)`` of the whole
    tensor and the slowest rank, sizes ascending; ``skew`` is the largest piece over the mean one; ``source``
    says how the seconds were obtained.
    """

    collective: str
    algorithm: str
    ranks: tuple[int, ...]
    points: tuple[tuple[float, float], ...]
    skew: float = 1.0
    source: str = ""

    @lazy
    def curve(self) -> Curve:
        return Curve(self.points)


def measurement_of_fit(
    collective: str, fit: CollectiveFit, sizes_bytes: tuple[float, float], source: str = ""
) -> LinkMeasurement:
    """A fitted line as a measurement between all the ranks that it was fitted to, given at the two sizes."""
    points = tuple((float(size), fit.seconds(size)) for size in sizes_bytes)
    return LinkMeasurement(collective, "", (), points, source=source)


@dataclass(frozen=True)
class Way:
    """One algorithm between one group of ranks: its curves by skew, ascending. Beyond the measured sizes a
    byte takes at least ``link_s_per_byte``, because small sizes say nothing about large ones."""

    algorithm: str
    curves: tuple[tuple[float, Curve], ...]
    is_measured: bool
    link_s_per_byte: float

    @property
    def largest_bytes(self) -> float:
        """The largest size that was measured with the most unequal pieces, which are those of training."""
        return self.curves[-1][1].points[-1][0]

    def seconds(self, size_bytes: float, skew: float | None) -> float:
        """Seconds, linear in the skew and never less than for even pieces. Without a skew, or if even pieces
        were measured for small messages only, those for the most unequal pieces that were measured, which are
        in proportion to speed."""
        (high, last), (low, first) = self.curves[-1], self.curves[0]
        seconds, (least, most) = self._at(last, size_bytes), (first.points[0][0], first.points[-1][0])
        if skew is None or high - low < SAME_SKEW or most < TELLING_BYTES:
            return seconds
        # beyond the sizes that were measured with even pieces, these save as much as at the nearest of them
        common = max(min(size_bytes, last.points[-1][0], most), least)
        saved = max(1 - first.at(common) / last.at(common), 0.0)
        return seconds * max(1 - saved * (high - skew) / (high - low), 1 - saved)

    def _at(self, curve: Curve, size_bytes: float) -> float:
        largest, seconds = curve.rising[-1]
        if size_bytes <= largest:
            return curve.at(size_bytes)
        beyond = seconds + self.link_s_per_byte * (size_bytes - largest)
        # one point's seconds do not show which part grows
        return beyond if len(curve.points) < 2 else max(curve.at(size_bytes), beyond)


@dataclass(frozen=True, eq=False)
class MeasuredCollective:
    """Seconds of a collective between some ranks, by the fastest of its measured algorithms at each size."""

    ways: tuple[Way, ...]
    _known: dict[tuple, tuple[float, str]] = field(default_factory=dict, repr=False)

    def seconds(self, size_bytes: float, skew: float | None = None) -> float:
        """The seconds for a whole tensor of ``size_bytes``."""
        return self._fastest(size_bytes, skew)[0]

    def algorithm(self, size_bytes: float, skew: float | None = None) -> str | None:
        """The fastest algorithm; None if the runtime has only one."""
        return self._fastest(size_bytes, skew)[1] or None

    def seconds_by(self, algorithm: str, size_bytes: float, skew: float | None = None) -> float | None:
        """Seconds of one algorithm; None if it was not measured."""
        ways = [way for way in self.ways if way.algorithm == algorithm]
        return ways[0].seconds(size_bytes, skew) if ways else None

    def covers(self, size_bytes: float) -> bool:
        """Whether any algorithm was measured up to this size."""
        return size_bytes <= self.largest_bytes

    @lazy
    def largest_bytes(self) -> float:
        return max(way.largest_bytes for way in self.ways)

    @property
    def is_measured(self) -> bool:
        """Whether it was measured between these very ranks, rather than estimated from another group."""
        return any(way.is_measured for way in self.ways)

    @lazy
    def latency_s(self) -> float:
        return min(way.curves[-1][1].rising[0][1] for way in self.ways)

    @lazy
    def s_per_byte(self) -> float:
        far = [way for way in self.ways if way.largest_bytes == self.largest_bytes]
        return min(way.curves[-1][1].affine[1] for way in far)

    @property
    def affine_lines(self) -> tuple[tuple[float, float], ...]:
        """The latency and the seconds per byte of the fastest, as one line."""
        return ((self.latency_s, self.s_per_byte),)

    def _fastest(self, size_bytes: float, skew: float | None) -> tuple[float, str]:
        key = (size_bytes, skew)
        if key not in self._known:
            # only algorithms measured up to this size, or as far as any: extrapolation must not decide
            enough = min(size_bytes, self.largest_bytes)
            able = [way for way in self.ways if way.largest_bytes >= enough]
            self._known[key] = min((way.seconds(size_bytes, skew), way.algorithm) for way in able)
        return self._known[key]


def measured_collective(
    cluster: Cluster, measurements: tuple[LinkMeasurement, ...], collective: str, ranks: tuple[int, ...]
) -> MeasuredCollective | None:
    """The cost of ``collective`` between ``ranks``; None if it was measured between no ranks at all."""
    everyone = tuple(range(cluster.world_size))
    groups: dict[tuple[str, tuple[int, ...]], list[LinkMeasurement]] = {}
    for m in measurements:
        if m.collective == collective:
            groups.setdefault((m.algorithm, m.ranks or everyone), []).append(m)
    ways = []
    link_s_per_byte = ring_fit(cluster, collective, ranks).s_per_byte
    for algorithm in dict.fromkeys(name for name, _ in groups):
        measured = [group for name, group in groups if name == algorithm]
        group = ranks if ranks in measured else most_alike(cluster, collective, ranks, measured)
        by_skew = sorted(groups[algorithm, group], key=lambda m: m.skew)
        curves = tuple((m.skew, transferred(cluster, m, group, ranks)) for m in by_skew)
        ways.append(Way(algorithm, curves, group == ranks, link_s_per_byte))
    if any(way.is_measured for way in ways):
        ways = [way for way in ways if way.is_measured]
    return MeasuredCollective(tuple(ways)) if ways else None


def most_alike(
    cluster: Cluster, collective: str, ranks: tuple[int, ...], groups: list[tuple[int, ...]]
) -> tuple[int, ...]:
    """The measured group whose links are most like those of ``ranks``: first by whether it is inside one
    machine, then by size, then by estimated seconds per byte."""
    wanted = ring_fit(cluster, collective, ranks)

    def distance(group: tuple[int, ...]) -> tuple:
        ring = ring_fit(cluster, collective, group)
        slopes = sorted((ring.s_per_byte, wanted.s_per_byte))
        ratio = slopes[1] / slopes[0] if slopes[0] > 0 else float("inf")
        return inside(cluster, group) != inside(cluster, ranks), abs(len(group) - len(ranks)), ratio

    return min(groups, key=distance)


def inside(cluster: Cluster, ranks: tuple[int, ...]) -> bool:
    return len({cluster.machine_index_of(r) for r in ranks}) == 1


def transferred(
    cluster: Cluster, measured: LinkMeasurement, group: tuple[int, ...], ranks: tuple[int, ...]
) -> Curve:
    """The curve of ``group`` transferred to ``ranks``: its latency and the rest are scaled by the links."""
    if group == ranks or len(group) < 2:
        return measured.curve
    ours = ring_fit(cluster, measured.collective, ranks)
    theirs = ring_fit(cluster, measured.collective, group)
    latency = ours.latency_s / theirs.latency_s if theirs.latency_s else 1.0
    slope = ours.s_per_byte / theirs.s_per_byte if theirs.s_per_byte else 1.0
    points = measured.curve.rising
    base = points[0][1]
    return Curve(tuple((size, base * latency + (seconds - base) * slope) for size, seconds in points))
