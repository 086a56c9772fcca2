"""Two plans side by side: their differences, in words and as a table."""

from __future__ import annotations

from ...base.units import number_text, plural, seconds_text, size_text
from .facts import Facts
from .page import section_html, table_html
from .parts import WAITS

SAME = 0.01  # share of a step
MOST_TOLD = 4  # ranks listed whose samples differ
TOLD = 0.2  # share of a difference: smaller parts of it are not mentioned


def differences(one: Facts, two: Facts) -> list[str]:
    """The differences of two plans: in the step and its parts, in shares, in memory."""
    return [step_words(one, two), *share_words(one, two), memory_words(one, two)]


def step_words(one: Facts, two: Facts) -> str:
    a_s, b_s = one.timeline.step_s, two.timeline.step_s
    if abs(a_s - b_s) <= SAME * min(a_s, b_s):
        return f"{one.name} and {two.name} take equally long: {seconds_text(a_s)} a step."
    fast, slow = (one, two) if a_s < b_s else (two, one)
    more_s = slow.timeline.step_s - fast.timeline.step_s
    parts = [
        (slow.parts.busy_s - fast.parts.busy_s,
         f"are computing of the busiest device (rank {slow.parts.busiest})"),
        *((b - a, f"are waiting for {kind}")
          for a, b, kind in zip(fast.parts.waits_s, slow.parts.waits_s, WAITS)),
    ]  # fmt: skip
    told = [f"{seconds_text(s)} {text}" for s, text in sorted(parts, reverse=True) if s >= TOLD * more_s]
    return (
        f"{fast.name} is {number_text(slow.timeline.step_s / fast.timeline.step_s)}x as fast as {slow.name}: "
        f"{seconds_text(fast.timeline.step_s)} a step, and {seconds_text(slow.timeline.step_s)} there. Of "
        f"the {seconds_text(more_s)} between them {', '.join(told) or 'no part makes most'}."
    )


def share_words(one: Facts, two: Facts) -> list[str]:
    """Names the ranks whose samples differ."""
    if len(one.samples) != len(two.samples):
        return [f"{one.name} is for {len(one.samples)} devices, {two.name} for {len(two.samples)}."]
    moved = sorted(
        ((abs(a - b), rank, a, b) for rank, (a, b) in enumerate(zip(one.samples, two.samples)) if a != b),
        reverse=True,
    )
    if not moved:
        return [f"Every device has as many samples in {one.name} as in {two.name}."]
    told = [f"rank {rank} has {a} and {b}" for _, rank, a, b in moved[:MOST_TOLD]]
    rest = f"; {plural(len(moved) - len(told), 'other rank')} differ less" if len(moved) > len(told) else ""
    return [f"Samples in {one.name} and in {two.name}: {', '.join(told)}{rest}."]


def memory_words(one: Facts, two: Facts) -> str:
    """Names the device with the fullest memory in each plan."""

    def fullest(facts: Facts) -> str:
        used = [c.peak_bytes / d.memory_bytes for c, d in zip(facts.memory, facts.cluster.devices)]
        rank = max(range(len(used)), key=used.__getitem__)
        size = size_text(facts.memory[rank].peak_bytes)
        return f"{facts.name} fills rank {rank} most, {used[rank]:.0%} of its memory ({size})"

    return f"{fullest(one)}; {fullest(two)}."


def side_by_side(one: Facts, two: Facts) -> str:
    """The ranks of two plans as a table: samples, computing, peak memory of both."""
    header = [
        "",
        *(f"{what}, {f.name}" for what in ("samples", "computes", "peak memory") for f in (one, two)),
    ]
    rows = []
    for rank in range(max(f.cluster.world_size for f in (one, two))):
        row = [f"rank {rank}"]
        for figure in (samples_text, computes_text, memory_text):
            row += [figure(f, rank) if rank < f.cluster.world_size else "-" for f in (one, two)]
        rows.append(row)
    rows.append(["step", "", "", *(seconds_text(f.timeline.step_s) for f in (one, two)), "", ""])
    return section_html("side", "Side by side", table_html(header, rows))


def samples_text(facts: Facts, rank: int) -> str:
    return str(facts.samples[rank])


def computes_text(facts: Facts, rank: int) -> str:
    return seconds_text(facts.timeline.compute_s[rank])


def memory_text(facts: Facts, rank: int) -> str:
    return size_text(facts.memory[rank].peak_bytes)
