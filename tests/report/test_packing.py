"""Events as few letters: all are there, and a page of 24 layers on 8 devices stays below its limit."""

from __future__ import annotations

import json
import random
import re

import pytest
from unpack import unpacked

from mixmesh.__main__ import execute
from mixmesh.base.timeline import STREAMS, Event, Timeline
from mixmesh.explain.report.packing import leb128, packed_timeline, zigzag
from mixmesh.explain.report.parts import COMPUTES, EXCHANGES, KINDS

LIMIT_BYTES = 2_000_000
PLAN_BERT = ["plan", "workload:bert-large:32", "--cluster", "hap-8", "--planner", "pipeline"]
KIND = dict(zip(STREAMS, (COMPUTES, EXCHANGES)))


def kind_of(event: Event) -> str:
    return KIND[event.stream]


def test_numbers_of_every_size():
    for number in (0, 1, 127, 128, 16383, 16384, 2**40 + 3):
        assert sum((byte & 127) << 7 * n for n, byte in enumerate(leb128(number))) == number
    assert [zigzag(n) for n in (0, -1, 1, -2, 2)] == [0, 1, 2, 3, 4]


def test_all_events_are_there():
    """Also those that overlap in a lane, as collectives do, and those that begin in the same moment."""
    draw = random.Random(1)
    events = []
    for _ in range(500):
        start_s = draw.choice([0.0, 0.5, draw.uniform(0, 100)])
        size = draw.choice([None, 0, 123])
        name = draw.choice(["a", "b <", "c again"])
        ends_s = start_s + draw.uniform(1e-6, 5)
        events.append(Event(draw.randrange(3), draw.choice(STREAMS), name, start_s, ends_s, "op", size))
    events += [Event(0, "compute", "no time", 1, 1), Event(0, "compute", "never", 1, float("inf"))]
    critical = draw.sample(range(500), 20)
    read = unpacked(packed_timeline(Timeline(105.0, (), (1.0,) * 3, 0.0, tuple(events)), critical, kind_of))
    wanted = [
        (e.rank, STREAMS.index(e.stream), e.name, e.op, pytest.approx(e.start_s, abs=1e-9),
         pytest.approx(e.end_s, abs=1e-9), -1 if e.size_bytes is None else e.size_bytes,
         KINDS.index(kind_of(e)), n in critical)
        for n, e in sorted(enumerate(events[:500]), key=lambda pair: (
            pair[1].rank, STREAMS.index(pair[1].stream), pair[1].start_s, pair[1].end_s))
    ]  # fmt: skip
    assert read == wanted


def test_a_page_of_24_layers_on_8_devices(tmp_path, capsys):
    """A pipeline of BERT-Large with 32 micro-batches, as ``auto`` plans it there too: 33 thousand events."""
    plan, page = tmp_path / "x.plan", tmp_path / "r.html"
    assert execute([*PLAN_BERT, "--out", str(plan)]) == 0
    bound = re.search(r"no plan can be faster than (.+?) \(all devices", capsys.readouterr().out)[1]
    assert execute(["report", str(plan), "--cluster", "hap-8", "--out", str(page)]) == 0
    text = page.read_text()
    (variant,) = json.loads(re.search(r'<script id="data" [^>]*>(.*?)</script>', text)[1])["variants"]
    assert len(unpacked(variant["predicted"])) > 30_000
    assert f"<b>The bound is {bound}</b>: no plan" in text
    assert page.stat().st_size < LIMIT_BYTES
