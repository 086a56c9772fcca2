"""The pages of the gallery: as the planner of today makes them, for the cluster files that they name."""

from __future__ import annotations

import re

import pytest

from mixmesh.cluster import Cluster
from tools.site.gallery import BEGIN, END, ENTRIES, PAGES, ROOT, new_plan, output

STALE = "the gallery is stale; make its pages again: make gallery"
FORM = re.compile(
    r"(?P<devices>\d+) devices in (?P<machines>\d+) machines?: .*\n"
    r"no plan can be faster than [\d.]+ \w+ \(all devices computing all the time, at the peaks .*\)\n"
    r"all devices computing all the time, as estimated, would take [\d.]+ \w+\n"
)


def made_part(name: str) -> str:
    """The part of a page that ``make gallery`` writes."""
    return (PAGES / f"{name}.md").read_text().partition(BEGIN)[2].partition(END)[0]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_pages_are_of_their_commands_and_clusters(entry):
    cluster = Cluster.load(ROOT / entry.cluster)
    text = made_part(entry.name)
    assert f"```sh\n{entry.command}\n```" in text, STALE
    form = FORM.search(text)
    assert form is not None, STALE
    assert int(form["devices"]) == cluster.world_size and int(form["machines"]) == len(cluster.machines), (
        STALE
    )


def test_the_plan_of_a_page_is_that_of_today():
    """One stands for all: the others take too long to plan in a test."""
    entry = next(entry for entry in ENTRIES if entry.name == "slow-ethernet")
    cluster = Cluster.load(ROOT / entry.cluster)
    assert f"```text\n{output(new_plan(entry, cluster), cluster)}\n```" in made_part(entry.name), STALE
