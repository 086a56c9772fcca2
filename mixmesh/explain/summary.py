"""Puts the answer into plain words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..base.units import seconds_text, size_text
from .changes import Collective
from .explanation import SAME, Alternative

SHOWN = 3  # kinds of collectives listed in a sentence


def summary_of(alternatives: Sequence[Alternative], planned_s: float, num_tensors: int) -> str:
    """Explains a placement by comparing it with the next best one: the changes that the other one needs, and
    the seconds that it would save."""
    own = next(a for a in alternatives if a.is_plan)
    others = [a for a in alternatives if a.program is not None and not a.is_plan]
    out = []
    where = f" in all {num_tensors} places" if num_tensors > 1 else ""
    if not others:
        out.append(f"Nothing but {own.placement} is possible{where}.")
    else:
        best = min(others, key=lambda a: (not a.fits, a.step_s))
        out.append(f"{best.placement}{where} {_exchanged(best)}{_effect(best, own)}.")
        if best.fits and best.step_s < min(planned_s, own.step_s) * (1 - SAME):
            out.append(f"The plan can be improved by {best.placement}.")
    if own.step_s < planned_s * (1 - SAME):
        out.append(
            f"The plan can be improved with {own.placement} as it is: a new search finds a step of "
            f"{seconds_text(own.step_s)}, {seconds_text(planned_s - own.step_s)} less than the plan's."
        )
    return " ".join(out)


def _exchanged(a: Alternative) -> str:
    needs, saves = _listed(a.added), _listed(a.removed)
    if needs and saves:
        return f"would need {needs}, and saves {saves}"
    if needs:
        return f"would need {needs}"
    return f"would save {saves}" if saves else "would need no other communication"


def _effect(a: Alternative, own: Alternative) -> str:
    more = a.step_s - own.step_s
    if not a.fits and own.fits:
        return "; it does not fit in memory"
    if abs(more) < SAME * own.step_s:
        return ": the step takes as long"
    word = "longer" if more > 0 else "less"
    return f": the step takes {seconds_text(abs(more))} {word}"


def _listed(collectives: Iterable[Collective]) -> str:
    parts = kinds(collectives)
    shown = [text for text, _ in parts[:SHOWN]]
    if len(parts) > SHOWN:
        rest_s = sum(seconds for _, seconds in parts[SHOWN:])
        shown.append(f"others ({seconds_text(rest_s)})")
    return ", ".join(shown[:-1]) + " and " + shown[-1] if len(shown) > 1 else "".join(shown)


PHASES = {
    "forward": "forward",
    "backward": "backward",
    "again": "repeated in the backward pass",
    "gradient": "of gradients",
    "stepped": "of stepped parameters",
}


def kinds(collectives: Iterable[Collective]) -> list[tuple[str, float]]:
    """Groups collectives by name and phase. Returns each group in words, with its seconds, the longest
    first."""
    groups: dict[tuple[str, str], list[Collective]] = {}
    for c in collectives:
        groups.setdefault((c.name, c.phase), []).append(c)
    out = []
    for (name, phase), members in groups.items():
        seconds = sum(c.time_s for c in members)
        size = size_text(sum(c.size_bytes for c in members))
        article = "an" if name[0] in "aeiou" else "a"
        count = f"{article} {name}" if len(members) == 1 else f"{len(members)} {name}s"
        out.append((f"{count} of {size} {PHASES[phase]} ({seconds_text(seconds)})", seconds))
    return sorted(out, key=lambda part: -part[1])
