"""A page in one file: words, sections, a script with the data that it draws, and everything else that it
needs."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.files import write_text
from ...errors import unwritable

ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True)
class Page:
    """The parts of a page: ``sentences``, ``main`` with the HTML of its sections, and ``data`` to be drawn by
    ``script``, one of the assets."""

    title: str
    headline: str
    sentences: Sequence[str]
    main: str
    data: dict[str, Any]
    script: str


def save_page(page: Page, path: str | Path) -> None:
    """Writes the page; the file is either whole or not there. Raises InputError."""
    try:
        write_text(path, page_text(page))
    except OSError as error:
        raise unwritable("the report", path, error) from None


def page_text(page: Page) -> str:
    """The HTML of the page."""
    content = {
        "TITLE": html.escape(page.title),
        "HEADLINE": html.escape(page.headline),
        "SENTENCES": list_items(page.sentences),
        "MAIN": page.main,
        "COLOURS": asset("colours.css"),
        "STYLE": asset("page.css"),
        "DATA": script_json(page.data),
        "ECHARTS": asset("echarts.min.js").replace("</script", "<\\/script"),
        "COMMON": asset("common.js"),
        "SCRIPT": asset(page.script),
    }
    return filled(asset("page.html"), content)


def asset(name: str) -> str:
    """The text of a file of the page."""
    return (ASSETS / name).read_text(encoding="utf-8")


def filled(template: str, content: dict[str, str]) -> str:
    """Fills in the ``@@NAME@@`` of a template; what is filled in is not expanded again."""
    pieces = template.split("@@")
    return "".join(content[piece] if n % 2 else piece for n, piece in enumerate(pieces))


def list_items(texts: Iterable[str]) -> str:
    return "\n".join(f"<li>{html.escape(text)}</li>" for text in texts)


def table_html(header: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[int] = (0,)) -> str:
    """A table that scrolls if it is too wide. The columns ``words`` are text, the others numbers. Text in the
    last column is wrapped, as it may be a sentence."""

    def cells(tag: str, row: Sequence[str]) -> str:
        last = len(row) - 1
        kinds = (
            ' class="number"' if n not in words else ' class="words"' if 0 < n == last else ""
            for n in range(len(row))
        )
        return "".join(f"<{tag}{kind}>{html.escape(text)}</{tag}>" for kind, text in zip(kinds, row))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{cells("th", header)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def section_html(name: str, title: str, content: str) -> str:
    """A section with a title."""
    return (
        f'<section aria-labelledby="{name}-title">\n<h2 id="{name}-title">{html.escape(title)}</h2>\n'
        f"{content}\n</section>"
    )


def script_json(value: Any) -> str:
    """JSON for use in a script element, escaped so that nothing in it ends the element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
