"""The site: it builds without a warning, its links lead somewhere, its pages ask no other host for anything,
and, where there is a Chromium, how they look in it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SHOWN = (
    "index", "concepts/placements", "reference/commands", "reference/operators", "decisions/index",
    "guide/launching", "gallery/mixed-pair", "benchmarks", "search",
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


# --- in a browser ------------------------------------------------------------------------------------------

LOOK = """
<script>
const wrong = [];
addEventListener('error', e => wrong.push(String(e.message || e.target.src || e.target.href)), true);
addEventListener('unhandledrejection', e => wrong.push(String(e.reason)));
document.addEventListener('securitypolicyviolation', e => wrong.push('asked for ' + e.blockedURI));
const look = () => {
  const wide = document.documentElement;
  if (wide.scrollWidth > wide.clientWidth) wrong.push(`cut off: ${wide.scrollWidth} of ${wide.clientWidth}`);
  const numbers = text => text.match(/[\\d.]+/g).map(Number);
  const linear = x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const part = (c, n) => linear(c[n] / 255);
  const luminance = c => 0.2126 * part(c, 0) + 0.7152 * part(c, 1) + 0.0722 * part(c, 2);
  const ground = luminance(numbers(getComputedStyle(document.body).backgroundColor));
  if ((ground < 0.2) !== SCHEME_IS_DARK) wrong.push('the other colour scheme');
  for (const each of document.querySelectorAll('article h1, article h2, article p, article li, article a')) {
    const text = luminance(numbers(getComputedStyle(each).color));
    const contrast = (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
    if (contrast < 4.5) wrong.push(`contrast ${contrast.toFixed(1)} of ${each.tagName}`);
  }
  for (const each of document.querySelectorAll('article pre, article .table-wrapper, article img')) {
    const box = each.getBoundingClientRect();
    if (box.right > wide.clientWidth + 1) wrong.push('beyond the edge: ' + each.tagName);
  }
  document.body.insertAdjacentHTML('beforeend', `<pre id="seen">${JSON.stringify(wrong)}</pre>`);
};
setTimeout(look, 300);
</script>"""
POLICY = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'self\' file: data: '
    "'unsafe-inline' 'unsafe-eval'\">"
)


def chromium(tmp_path: Path, width: int, scheme: str) -> list[str]:
    dark = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    return [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", *dark,
        f"--user-data-dir={tmp_path / 'user'}", "--hide-scrollbars", "--virtual-time-budget=2500",
        f"--window-size={width},900",
    ]  # fmt: skip


def dom(command: list[str], page: Path, query: str = "") -> str:
    done = subprocess.run(
        [*command, "--dump-dom", f"file://{page}{query}"], capture_output=True, text=True, timeout=90
    )
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("scheme", ("light", "dark"))
@pytest.mark.parametrize("width", (500, 1280))
def test_pages_in_a_browser(site, tmp_path, width, scheme):
    command = chromium(tmp_path, width, scheme)
    look = LOOK.replace("SCHEME_IS_DARK", str(scheme == "dark").lower())
    for name in SHOWN if width == 500 and scheme == "dark" else SHOWN[:3]:
        page = site / f"{name}.html"
        shots = os.environ.get("DOCS_SHOTS")
        if shots:
            target = Path(shots, f"{name.replace('/', '-')}-{width}-{scheme}.png")
            subprocess.run(
                [*command, f"--screenshot={target}", f"file://{page}"], capture_output=True, timeout=90
            )
        looked_at = page.with_name(f"{page.stem}-{width}-{scheme}.look.html")
        text = page.read_text().replace("<head>", f"<head>{POLICY}", 1)
        looked_at.write_text(text.replace("<body>", f"<body>{look}", 1))
        seen = re.findall(r'<pre id="seen">(\[.*?\])</pre>', dom(command, looked_at))
        looked_at.unlink()
        assert seen, name
        assert json.loads(seen[-1].replace("&gt;", ">")) == [], name


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_search_works_without_a_server(site, tmp_path):
    found = dom(chromium(tmp_path, 1280, "light"), site / "search.html", "?q=micro-batch")
    assert "concepts/pipelines.html" in found
