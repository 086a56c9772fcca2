"""The page of a bench's results, or of two of them side by side: a table of all figures, and bars for one of
them."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

from .page import Page, asset, filled, section_html, table_html
from .recognise import Bench

Row = dict[str, str | float | bool]
LIKED = ("speedup", "times", "step_s", "total_s", "best_s")  # figures that are drawn first, by preference
SAME = 0.02  # share of a figure: smaller differences do not count
CHANGED = 5  # number of rows in the summary


def bench_page(benches: Sequence[Bench]) -> Page:
    """The page of one or two results. Two must be of one bench, with rows in common (``pair``)."""
    first = benches[0]
    flat = [[dict(flattened(row)) for row in bench.rows] for bench in benches]
    labels = [labels_of(rows) for rows in flat]
    figures = figures_of(flat[0])
    words = [text for bench in benches for text in sentences(bench, benches)]
    if len(benches) > 1:
        words = [*differences(benches, flat, labels, figures), *words]
    tables = [
        section_html(f"table-{n}", f"All figures of {bench.name}", rows_html(rows))
        for n, (bench, rows) in enumerate(zip(benches, flat))
    ]
    options = "".join(f"<option>{html.escape(name)}</option>" for name in figures)
    main = filled(asset("bench.html"), {"FIGURES": options, "TABLES": "\n".join(tables)})
    data = {
        "labels": labels[0],
        "figures": figures,
        "benches": [
            {"name": bench.name, "values": values_of(rows, own, labels[0], figures)}
            for bench, rows, own in zip(benches, flat, labels)
        ],
    }
    title = f"python -m benchmarks {first.made['bench']}"
    return Page(title, " and ".join(bench.name for bench in benches), words, main, data, "bench.js")


def flattened(row: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the fields of a row, with those of inner objects as ``outer inner``; lists are left out."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{above}{name} ")
        elif isinstance(value, str | bool | int | float):
            yield f"{above}{name}", value


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def figures_of(rows: Sequence[Row]) -> list[str]:
    """The names of numbers that differ between rows, the preferred ones first."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if is_number(value))
    numbers = [n for n in names if len(rows) == 1 or len({row.get(n) for row in rows}) > 1]
    return sorted(numbers or names, key=lambda n: LIKED.index(n) if n in LIKED else len(LIKED))


def labels_of(rows: Sequence[Row]) -> list[str]:
    """A label for every row: enough of its first texts and integers to distinguish the rows."""
    names = dict.fromkeys(n for row in rows for n, value in row.items() if isinstance(value, str | int))
    used: list[str] = []
    count = 0
    for name in names:
        told = len({tuple(row.get(n) for n in (*used, name)) for row in rows})
        if told > count:
            used, count = [*used, name], told
        if count == len(rows):
            break
    return [", ".join(f"{row[n]}" for n in used if n in row) or f"row {k}" for k, row in enumerate(rows)]


def values_of(
    rows: Sequence[Row], labels: Sequence[str], wanted: Sequence[str], figures: Sequence[str]
) -> dict[str, list[float | None]]:
    """For each figure, its values in the rows whose labels are ``wanted``."""
    by_label = dict(zip(labels, rows))

    def value(label: str, figure: str) -> float | None:
        figure_value = by_label.get(label, {}).get(figure)
        return figure_value if is_number(figure_value) else None

    return {figure: [value(label, figure) for label in wanted] for figure in figures}


def sentences(bench: Bench, benches: Sequence[Bench]) -> list[str]:
    """The source of the results, and how many targets were met."""
    header = bench.made
    begin = f"{bench.name}: " if len(benches) > 1 else ""
    source = (
        f"{begin}{len(bench.rows)} rows, made by {header.get('command', 'a command that is not known')}, "
    )
    lines = [f"{source}revision {header.get('revision', 'not known')}."]
    if "targets" in header and "targets_met" in header:
        lines.append(f"{begin}{header['targets_met']} of {header['targets']} targets are met.")
    return lines


def differences(
    benches: Sequence[Bench],
    flat: Sequence[Sequence[Row]],
    labels: Sequence[Sequence[str]],
    figures: Sequence[str],
) -> list[str]:
    """The differences of two results in the figure that is drawn first, in words."""
    one, two = (dict(zip(own, rows)) for own, rows in zip(labels, flat))
    figure = figures[0]
    pairs: list[tuple[str, float, float]] = []
    for label, row in one.items():
        a, b = row.get(figure), two[label].get(figure) if label in two else None
        if is_number(a) and is_number(b):
            pairs.append((label, a, b))
    changed = [(abs(b / a - 1), label, a, b) for label, a, b in pairs if a and abs(b / a - 1) > SAME]
    lines = [
        f"Of {len(pairs)} rows that both have, {len(changed)} differ in {figure} by more than {SAME:.0%} "
        f"from {benches[0].name} to {benches[1].name}."
    ]
    for _, label, a, b in sorted(changed, reverse=True)[:CHANGED]:
        lines.append(f"{label}: {figure} {a:.4g}, then {b:.4g} ({b / a:.2f}x).")
    return lines


def rows_html(rows: Sequence[Row]) -> str:
    """All rows as a table: texts first, then numbers."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    texts = [n for n in names if not any(is_number(row.get(n)) for row in rows)]
    names = [*texts, *(n for n in names if n not in texts)]
    cells = [[text_of(row.get(n)) for n in names] for row in rows]
    return table_html(names, cells, words=range(len(texts)))


def text_of(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
