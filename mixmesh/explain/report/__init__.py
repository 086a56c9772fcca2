"""Pages to look at: one file of HTML each, which asks no other host for anything.

Reading order: ``facts`` (what the page of a plan is made from), ``parts`` (what a step is the sum of),
``candidates`` (why the other plans lost), ``path`` (the events that a step waits for), ``words`` (sentences),
``drawing`` (the cluster), ``packing`` (events as few letters), ``plan_page``, ``pair`` (two plans);
``recognise`` (what was given), ``run_page``, ``bench_page``; ``page`` (the file).

Charts are drawn by Apache ECharts, which is a part of the page: it draws timelines with a hundred thousand
bars, zooms them, describes charts to screen readers, and fits into a page of less than 2 MB, where plotly.js
alone takes 4.
"""

from __future__ import annotations

from .bench_page import bench_page
from .facts import Facts, facts_of
from .page import Page, page_text, save_page
from .plan_page import plan_page
from .run_page import run_page

__all__ = ["Facts", "Page", "bench_page", "facts_of", "page_text", "plan_page", "run_page", "save_page"]
