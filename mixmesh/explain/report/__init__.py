"""Reports: pages of one HTML file each, which request nothing from other hosts.

Reading order: ``facts`` (the content of a plan's page), ``parts`` (the parts of a step), ``candidates`` (why
the other plans lost), ``path`` (the events that a step waits for), ``words`` (sentences), ``drawing`` (the
cluster), ``packing`` (compact events), ``plan_page``, ``pair`` (two plans); ``recognise`` (the kind of a
given file), ``run_page``, ``bench_page``; ``page`` (the file).

Charts are drawn by Apache ECharts, which is embedded in the page: it draws and zooms timelines with a hundred
thousand bars, describes charts to screen readers, and fits into a page of less than 2 MB, while plotly.js
alone takes 4.
"""

from __future__ import annotations

from .bench_page import bench_page
from .facts import Facts, facts_of
from .page import Page, page_text, save_page
from .plan_page import plan_page
from .run_page import run_page

__all__ = ["Facts", "Page", "bench_page", "facts_of", "page_text", "plan_page", "run_page", "save_page"]
