"""The time that a device takes for a share of an operator's work: seconds as a curve over the share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..base.lazy import lazy

AROUND = (0.75, 1.25)
SMALLEST = 1e-4  # few clusters have enough devices for a smaller share
# a CPU's seconds for a few calls differ by up to this factor from one second to the next; results that need
# new pages, and inputs that leave a cache, bend an operator's curve by more
NOISE = 1.5


@dataclass(frozen=True)
class Curve:
    """Measured ``(share, seconds)`` points, shares ascending; linear between them.

    More work never takes less time: points that say otherwise are noise, and are averaged (``rising``). Below
    the first point the line goes to the fixed cost of the affine fit. Above the last it rises as steeply as
    the fit or the last segment, whichever is steeper, so that unmeasured work does not look free. ``covers``
    tells whether a share is within the measured range.
    """

    points: tuple[tuple[float, float], ...]

    @lazy
    def affine(self) -> tuple[float, float]:
        """``(a, b)`` of the fit ``a + b * share``, a and b not negative.

        Least squares on relative errors, so that small shares count as much as large ones.
        """
        if len(self.points) == 1:
            share, seconds = self.points[0]
            return (0.0, seconds / share) if share else (seconds, 0.0)
        weights = [1.0 / max(t, 1e-12) ** 2 for _, t in self.points]
        total = sum(weights)
        mean_x = sum(w * x for w, (x, _) in zip(weights, self.points)) / total
        mean_y = sum(w * y for w, (_, y) in zip(weights, self.points)) / total
        sxx = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, self.points))
        sxy = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, self.points))
        slope = max(sxy / sxx, 0.0) if sxx else 0.0
        offset = mean_y - slope * mean_x
        if offset < 0:  # a line through the origin
            num = sum(w * x * y for w, (x, y) in zip(weights, self.points))
            return 0.0, num / sum(w * x * x for w, (x, _) in zip(weights, self.points))
        return offset, slope

    @lazy
    def rising(self) -> tuple[tuple[float, float], ...]:
        """The points with seconds that never fall: the least squares fit of that kind (pool adjacent
        violators; Barlow et al., "Statistical Inference under Order Restrictions", 1972)."""
        pools: list[list[float]] = []  # mean, count
        for _, seconds in self.points:
            pools.append([seconds, 1])
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                mean, count = pools.pop()
                other = pools[-1]
                pools[-1] = [(other[0] * other[1] + mean * count) / (other[1] + count), other[1] + count]
        fitted = [mean for mean, count in pools for _ in range(int(count))]
        return tuple((share, seconds) for (share, _), seconds in zip(self.points, fitted))

    def at(self, share: float) -> float:
        """Seconds for a share of the work; 0 for a share of 0."""
        if share <= 0:
            return 0.0
        points = self.rising
        if len(points) == 1 or share < points[0][0]:
            a, b = self.affine
            if share < points[0][0] and len(points) > 1:
                # from the first measured point down to the fixed cost
                first_share, first = points[0]
                return min(a, first) + (first - min(a, first)) * share / first_share
            return a + b * share
        for (x0, y0), (x1, y1) in zip(points, points[1:]):
            if share <= x1:
                return y0 + (y1 - y0) * (share - x0) / (x1 - x0)
        (x0, y0), (x1, y1) = points[-2:]
        return y1 + max((y1 - y0) / (x1 - x0), self.affine[1]) * (share - x1)

    def line_at(self, share: float) -> tuple[float, float]:
        """``(a, b)`` of the line ``a + b * share`` that approximates the curve near ``share``: through the
        seconds at ``AROUND`` times it. ``a`` may be negative if the curve bends upwards."""
        if len(self.points) == 2 or share <= 0:
            return self.affine  # it is a line already, or there is no slope to take
        low, high = (share * factor for factor in AROUND)
        slope = (self.at(high) - self.at(low)) / (high - low)
        return self.at(share) - slope * share, slope

    def chord(self, share: float) -> tuple[float, float]:
        """``(a, b)`` of the line ``a + b * share`` through the seconds at ``share``, less than 1, and of all
        of the work; a and b not negative."""
        part, whole = self.at(share), self.at(1.0)
        slope = (whole - part) / (1 - share)
        return (whole - slope, slope) if slope <= whole else (0.0, whole)

    @lazy
    def least_s(self) -> float:
        """The least over all shares of the seconds for that share, scaled to the whole work. It is found at a
        measured share or at 1, because the curve is linear in between and costs something at share 0."""
        shares = [share for share, _ in self.points if 0 < share < 1] if len(self.points) > 1 else []
        return min(self.at(share) / share for share in (*shares, 1.0))

    def covers(self, share: float) -> bool:
        return share <= self.points[-1][0] * 1.0001

    @lazy
    def calmed(self) -> Curve:
        """The curve without the noise of a device whose pace changes between measurements: seconds within
        ``NOISE`` times those of the affine fit are the fit's, and others are as many times nearer to it. Two
        points have no fit to differ from."""
        if len(self.points) < 3:
            return self
        a, b = self.affine
        return Curve(tuple((x, max(t / NOISE, min(a + b * x, t * NOISE))) for x, t in self.points))

    def scaled(self, factor: float) -> Curve:
        return Curve(tuple((s, t * factor) for s, t in self.points))

    def joined(self, other: Curve) -> Curve:
        """The points of both, and of two at the same share that of this curve."""
        return Curve(tuple(sorted((dict(other.points) | dict(self.points)).items())))

    def shaped(self, other: Curve) -> Curve:
        """This curve, or if it has one point only, the ``other`` one with the factor that leads through that
        point."""
        if len(self.points) > 1 or len(other.points) == 1:
            return self
        share, seconds = self.points[0]
        usual_s = other.at(share)
        return other.scaled(seconds / usual_s) if usual_s > 0 else self


def affine_curve(fixed_s: float, full_s: float) -> Curve:
    """The curve ``fixed_s + full_s * share``."""
    if not (math.isfinite(fixed_s) and math.isfinite(full_s)) or fixed_s < 0 or full_s < 0:
        raise ValueError(f"a cost must be finite and not negative, got {fixed_s} + {full_s} * share")
    return Curve(((1e-3, fixed_s + 1e-3 * full_s), (1.0, fixed_s + full_s)))


def issued_curve(issue_s: float, fixed_s: float, full_s: float) -> Curve:
    """The curve ``max(issue_s, fixed_s + full_s * share)`` up to a share of 1, for a device that works while
    the next operators are issued to it."""
    knee = (issue_s - fixed_s) / full_s if full_s > 0 else math.inf
    if knee <= SMALLEST:
        return affine_curve(fixed_s, full_s)
    if knee >= 1:
        return affine_curve(max(issue_s, fixed_s), 0.0)
    return Curve(((SMALLEST, issue_s), (knee, issue_s), (1.0, fixed_s + full_s)))


ZERO = affine_curve(0.0, 0.0)
