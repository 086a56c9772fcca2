"""Pages as a person sees them: opened in Chromium at a width and in a scheme, and looked at."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tools.browser import PHONE, SCHEMES, Browser, Tab

LOOK = Path(__file__).with_name("look.js").read_text()
SHOTS = os.environ.get("REPORT_SHOTS")
PIECE = 1400  # the height of a picture in which a person can read, in pixels
Use = Callable[[Tab], None]


def look(tab: Tab) -> list[str]:
    """What is wrong with the page as it stands."""
    return list(tab.evaluate(LOOK))


def wrong_with(
    browser: Browser, page: Path, width: int, scheme: str, shot: str, use: Use | None = None
) -> list[str]:
    """What is wrong with a page, at first and after it was ``used``: its look, its errors, and all that it
    asked for. With REPORT_SHOTS pictures of it go to that folder."""
    with browser.tab(width, scheme) as tab:
        tab.open(page)
        assert tab.evaluate("innerWidth") == width
        assert tab.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") == (scheme == SCHEMES[1])
        wrong = look(tab)
        if SHOTS:
            picture(tab, Path(SHOTS), f"{shot}-{width}-{scheme}")
        if use is not None:
            use(tab)
            wrong += [f"after use: {text}" for text in look(tab)]
        away = [url for url in tab.requests if not url.startswith(("file:", "data:", "blob:"))]
        return [*wrong, *tab.problems, *(f"asked for {url}" for url in away)]


def picture(tab: Tab, folder: Path, name: str) -> None:
    """The whole page, in pieces as high as can be read."""
    for old in folder.glob(f"{name}-*.png"):
        old.unlink()
    height = tab.evaluate("document.documentElement.scrollHeight")
    for n in range(-(-height // PIECE)):
        tab.picture(folder / f"{name}-{n}.png", top=n * PIECE, height=min(PIECE, height - n * PIECE))


def is_phone(width: int) -> bool:
    return width == PHONE
