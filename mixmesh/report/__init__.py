"""A plan as a page to look at: one file of HTML, which asks no other host for anything.

Reading order: ``facts`` (what the page is made from), ``path`` (the events that a step waits for), ``words``
(sentences), ``page`` (the file). Charts are drawn by Apache ECharts, which is a part of the page: it draws
timelines with a hundred thousand bars, zooms them, describes charts to screen readers, and fits into a page
of less than 2 MB, where plotly.js alone takes 4.
"""

from __future__ import annotations

from .facts import Facts, facts_of
from .page import page_text, save_page

__all__ = ["Facts", "facts_of", "page_text", "save_page"]
