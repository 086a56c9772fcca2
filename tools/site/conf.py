"""The settings of Sphinx. Pages are Markdown (MyST), the theme is furo with the colours of the report."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
GALLERY = ROOT / "out" / "gallery"
REPORT = re.compile(r"<!-- report: (\S+) -->")

project = "mixmesh"
copyright = "the authors of mixmesh"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
nitpicky = False  # links are checked by MyST; types in signatures need no page of their own
suppress_warnings = ["autodoc.import_object"]

myst_enable_extensions = ["colon_fence", "attrs_inline", "attrs_block"]
myst_heading_anchors = 3
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": False}

html_theme = "furo"
html_title = "mixmesh"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_show_search_summary = (
    False  # a summary is fetched from the page, which a browser refuses for local files
)
html_permalinks_icon = "#"
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#0550ae",
        "color-brand-content": "#0550ae",
        "color-background-primary": "#ffffff",
        "color-background-secondary": "#f6f8fa",
        "color-foreground-primary": "#1b1f24",
        "color-foreground-secondary": "#57606a",
        "color-background-border": "#d0d7de",
    },
    "dark_css_variables": {
        "color-brand-primary": "#79c0ff",
        "color-brand-content": "#79c0ff",
        "color-background-primary": "#0d1117",
        "color-background-secondary": "#161b22",
        "color-foreground-primary": "#e6edf3",
        "color-foreground-secondary": "#9da7b3",
        "color-background-border": "#30363d",
    },
}
html_extra_path = [str(GALLERY / "reports")] if (GALLERY / "reports").is_dir() else []
pygments_style = "default"
pygments_dark_style = "github-dark"


def link_reports(app, docname: str, source: list[str]) -> None:
    """Puts a link to a report in the place of its mark, or how to make it where it was not made."""

    def link(found: re.Match[str]) -> str:
        name = found[1]
        if (GALLERY / "reports" / f"{name}.html").is_file():
            return (
                f'<p class="report"><a href="{"../" * docname.count("/")}{name}.html">Open the report</a></p>'
            )
        command = "make demo && make gallery" if name == "demo" else "make gallery"
        return f"`{command}` writes the report and links it here."

    source[0] = REPORT.sub(link, source[0])


def setup(app) -> None:
    app.connect("source-read", link_reports)
