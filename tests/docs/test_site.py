"""The site: it builds without a warning, its links lead somewhere, its pages ask no other host for anything,
and they look right in a browser."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.support.looking import wrong_with
from tools.browser import LAPTOP, PHONE, SCHEMES

ROOT = Path(__file__).parents[2]
SHOWN = (
    "index", "guide/launching", "concepts/placements", "reference/commands", "reference/operators",
    "decisions/index", "gallery/mixed-pair", "benchmarks", "search",
)  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A site built from the pages; a warning, such as one of a link, fails it."""
    target = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "tools.site", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return target


class Page(HTMLParser):
    """What a page links to, what it loads, and the anchors in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.anchors |= {values[key] for key in ("id", "name") if values.get(key)}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        elif tag in ("script", "img", "link", "iframe", "source"):
            self.loaded += [values[key] for key in ("src", "href") if values.get(key)]


def test_all_links_lead_somewhere(site):
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 100
    lost = []
    for path, page in pages.items():
        for link in {*page.links, *page.loaded}:
            address, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", address):
                continue
            target = (path.parent / unquote(address.partition("?")[0])).resolve() if address else path
            target = target / "index.html" if target.is_dir() else target
            found = target.is_file() and (
                not anchor or target not in pages or anchor in pages[target].anchors
            )
            if not found:
                lost.append(f"{path.relative_to(site)}: {link}")
    assert not lost, lost


def test_pages_load_nothing_from_another_host(site):
    for path in site.rglob("*.html"):
        away = [link for link in Page(path).loaded if re.match(r"(https?:)?//", link)]
        assert not away, (path, away)
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(https?:)?//|@import", path.read_text()), path


def test_links_in_files_beside_the_pages_lead_somewhere():
    """Those of the README, the changelog, and the places in docs/ that code and errors name."""
    lost = []
    for name in ("README.md", "CHANGELOG.md"):
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / name).read_text()):
            if not link.startswith("http") and not (ROOT / link).exists():
                lost.append(f"{name}: {link}")
    for folder in ("mixmesh", "tests", "examples", "tools"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml", ".toml", ".sbatch") and path != Path(__file__):
                named = re.findall(r"docs/[\w./-]+\.md", path.read_text())
                lost += [f"{path.relative_to(ROOT)}: {page}" for page in named if not (ROOT / page).is_file()]
    assert not lost, lost


def test_files_that_pages_name_are_there():
    """A page named a module that had moved."""
    lost = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        if path.parent.name != "decisions" and path.name != "changelog.md":  # these tell of earlier days
            named = re.findall(r"`((?:mixmesh|tests|examples|benchmarks|tools)/[\w./-]+)", path.read_text())
            lost += [f"{path.relative_to(ROOT)}: {name}" for name in named if not (ROOT / name).exists()]
    assert not lost, lost


# --- in a browser ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", (PHONE, LAPTOP))
def test_pages_in_a_browser(site, browser, width, scheme):
    for name in SHOWN if width == PHONE and scheme == "dark" else SHOWN[:3]:
        shot = f"site-{name.replace('/', '-')}"
        assert wrong_with(browser, site / f"{name}.html", width, scheme, shot) == [], name


def test_search_works_without_a_server(site, browser):
    with browser.tab() as tab:
        tab.open(site / "search.html", "?q=micro-batch")
        tab.until("document.querySelector('ul.search a[href=\"concepts/pipelines.html\"]') !== null")
        assert tab.problems == []
