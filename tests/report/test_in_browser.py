"""Pages in Chromium, at the widths of a phone and a laptop, light and dark: nothing is cut off, nothing
overlaps, all can be read, zooming and searching work, and nobody is asked for anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import PAGES
from test_report import made

from mixmesh.explain.report import save_page
from tests.support.looking import wrong_with
from tools.browser import LAPTOP, PHONE, SCHEMES, Browser, Tab


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """Files of all pages, by name."""
    folder, facts = tmp_path_factory.mktemp("pages"), made()
    for name, page in PAGES.items():
        save_page(page(facts), folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in PAGES}


def text_of(tab: Tab, selector: str) -> str:
    return tab.evaluate(f"document.querySelector({selector!r}).textContent")


def shown(tab: Tab) -> list[float]:
    """The part of the timeline that is seen, from 0 to 100."""
    return tab.evaluate("shown()")


def use_plan(tab: Tab) -> None:
    """Zooms by wheel, buttons and keys, searches, and picks a line of the program."""
    assert shown(tab) == [0, 100]
    tab.wheel("#timeline", -200, down=0.25)
    begin, end = shown(tab)
    assert 0 < begin < end < 100
    tab.evaluate("document.getElementById('timeline').focus()")
    tab.press("0")
    assert shown(tab) == [0, 100]
    tab.press("+")
    assert shown(tab) == [25, 75]
    tab.click("#left")
    assert shown(tab) == [0, 50]
    tab.click("#all")
    every = tab.evaluate("document.querySelectorAll('#program tbody tr').length")
    tab.click("#search")
    tab.type("aten.linear")
    count = tab.evaluate("document.querySelectorAll('#program tbody tr:not([hidden])').length")
    assert 0 < count < every and text_of(tab, "#found") == f"{count} of {every} lines"
    tab.click("#program tr:not([hidden]) button")
    assert " from " in text_of(tab, "#picked") and shown(tab) != [0, 100]
    assert "computes" in tab.evaluate("document.querySelector('#timeline-keys').textContent")
    tab.click("#timeline-keys button")
    assert tab.evaluate("charts.timeline.getOption().legend[0].selected.computes") is False
    tab.click("#timeline-keys button")


def use_two_plans(tab: Tab) -> None:
    """Chooses the other plan."""
    tab.click("#variants label:nth-of-type(2)")
    assert tab.evaluate("plan.name") == "b.plan"
    assert tab.evaluate("document.querySelector('[data-variant=\"0\"]').checkVisibility()") is False


def use_bench(tab: Tab) -> None:
    """Chooses another figure by the keyboard."""
    label = "document.getElementById('bars').getAttribute('aria-label')"
    before = tab.evaluate(label)
    tab.evaluate("document.getElementById('figure').focus()")
    tab.evaluate("select.selectedIndex = 1, select.onchange()")
    assert tab.evaluate(label) != before


def use_run(tab: Tab) -> None:
    """Turns the wheel over the curve of losses, which zooms it."""
    tab.wheel("#loss", -200)
    zoom = tab.evaluate("charts.loss.getOption().dataZoom[0]")
    assert zoom["start"] > 0 or zoom["end"] < 100


USES = {"plan": use_plan, "two-plans": use_two_plans, "bench": use_bench, "two-benches": use_bench,
        "run": use_run, "two-runs": use_run}  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", (PHONE, LAPTOP))
@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_wrong(pages, browser: Browser, name, width, scheme):
    assert wrong_with(browser, pages[name], width, scheme, name, USES[name]) == []


SPOILED = {
    "wide": ("document.querySelector('h1').style.width = '2000px'", "the page is 2"),
    "overlap": ("document.querySelector('h2').style.marginTop = '-3rem'", "overlap in the page"),
    "pale": ("document.querySelector('main p').style.color = 'rgb(200, 200, 200)'", "contrast"),
    "cut": (
        "Object.assign(document.querySelector('h1').style, {overflow: 'hidden', width: '3rem', "
        "overflowWrap: 'normal', whiteSpace: 'nowrap'})",
        "cut off: H1",
    ),
    "canvas": (
        "charts.timeline.setOption({yAxis: plan.ranks.map(() => 0).slice(0, 1).map(() => "
        "({axisLabel: {width: 30, overflow: 'truncate'}}))})",
        "shortened in timeline",
    ),
    "canvas, beyond": ("charts.timeline.setOption({title: [{left: -30}]})", "cut off in timeline"),
    "canvas, on another": (
        "charts.timeline.setOption({title: [{top: 36, left: 60}]})",
        "overlap in timeline",
    ),
    "nothing": ("charts.busy.dispose()", "nothing is drawn in busy"),
}


@pytest.mark.parametrize("what", SPOILED)
def test_what_is_wrong_is_seen(pages, browser: Browser, what):
    """A page that is spoiled is no longer right: none of the checks says yes to everything."""
    script, told = SPOILED[what]
    page = pages["two-plans"]

    def spoil(tab: Tab) -> None:
        tab.evaluate(f"void ({script})")
        tab.settle()

    wrong = wrong_with(browser, page, PHONE, "light", "spoiled", spoil)
    assert wrong and all(text.startswith("after use: ") for text in wrong)
    assert any(told in text for text in wrong), wrong


def test_errors_and_requests_are_seen(pages, browser: Browser):
    def spoil(tab: Tab) -> None:
        tab.evaluate("setTimeout(() => { throw new Error('spoiled') }), new Promise(r => setTimeout(r, 50))")
        tab.evaluate("fetch('https://example.invalid/x').catch(() => 0)")

    wrong = wrong_with(browser, pages["bench"], LAPTOP, "light", "spoiled", spoil)
    assert any("Error: spoiled" in text for text in wrong) and any("example.invalid" in w for w in wrong)
