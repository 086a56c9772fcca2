"""A preparation says what it does and decides, and the warnings of a plan reach who wrote the script."""

from __future__ import annotations

import io
import os
import tempfile
import warnings
from contextlib import redirect_stderr

import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed
from plans import named
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mixmesh
from mixmesh.base.progress import AGAIN_S, lines_of
from mixmesh.runtime.parallel import parallelize

TWO_MACHINES = """
name = "two"
[network]
bandwidth_gbit_per_s = 100
latency_us = 1
[[machine]]
name = "a"
devices = [{ cpu_share = 0.6 }, { cpu_share = 0.3 }]
[[machine]]
name = "b"
devices = [{ cpu_share = 0.3 }]
"""


class Counts(nn.Module):
    """A forward pass that changes a number that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 3), 0

    def forward(self, x, y):
        self.calls += 1
        return F.cross_entropy(self.layer(x), y)


def example() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(12, 4, generator=g), torch.randint(3, (12,), generator=g)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def told(caught: list[warnings.WarningMessage]) -> list[warnings.WarningMessage]:
    return [w for w in caught if "the forward pass changes the number calls" in str(w.message)]


def check_warnings_of_a_plan_are_told_once(_) -> None:
    model = Counts()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        model, optimizer, loader = prepared(model)
        for x, y in loader:
            model(x, y).backward()
            optimizer.step()
    assert [w.filename for w in told(caught)] == ([__file__] if dist.get_rank() == 0 else [])


def check_warnings_of_a_plan_made_before_are_told(_) -> None:
    torch.manual_seed(0)
    cluster = mixmesh.Cluster.parse(TWO_MACHINES)
    plan = mixmesh.plan(Counts(), example(), cluster, planner="ddp-even")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        mine = Counts()
        parallelize(mine, sgd(mine), plan, device="cpu", timeout_s=60)
    assert [w.filename for w in told(caught)] == ([__file__] if dist.get_rank() == 0 else [])


class Classifier(nn.Sequential):
    def forward(self, x, y):
        return F.cross_entropy(super().forward(x), y)


def check_a_batch_of_fewer_rows_than_ranks_says_so(_) -> None:
    torch.manual_seed(0)
    mine = Classifier(nn.Linear(4, 3))
    plan = mixmesh.plan(mine, example(), mixmesh.Cluster.parse(TWO_MACHINES), planner="ddp-even")
    x, y = example()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        expected = mine(x[:1], y[:1]).item()
        model, _ = parallelize(mine, sgd(mine), plan, device="cpu", timeout_s=60)
        loss = model(x[:1], y[:1])
        loss.backward()
    assert abs(loss.item() - expected) < 1e-6
    texts = [str(w.message) for w in caught if "data parallelism" in str(w.message)]
    is_told = ["1 row, fewer than the 3 ranks" in text and "the same results" in text for text in texts]
    assert is_told == ([True] if dist.get_rank() == 0 else [])


def prepared(model: nn.Module, cache: str = "warnings"):
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(TWO_MACHINES)
        file.flush()
        rows = list(zip(*example()))
        return mixmesh.prepare(
            model, sgd(model), DataLoader(rows, 12), profile_s=0, cluster=file.name, timeout_s=60,
            cache=os.path.join(tempfile.gettempdir(), f"mixmesh-told-{cache}-{os.environ['MASTER_PORT']}"),
        )  # fmt: skip


def check_phases_say_what_they_decided(_) -> None:
    torch.manual_seed(1)
    lines = []
    for _ in range(2):
        text = io.StringIO()
        with redirect_stderr(text), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prepared(Counts(), "phases")
        lines.append(text.getvalue().splitlines())
    first, second = lines
    if dist.get_rank():
        assert not first and not second
        return
    assert all(line.startswith("mixmesh: ") for line in first), first
    assert any("one model, one code and the same versions on 3 ranks" in line for line in first)
    assert any(line.startswith("mixmesh: tracing: 6 operators with the loss, 60 B") for line in first), first
    assert any(" that fit (" in line for line in first)
    assert first[-1].startswith("mixmesh: 3 devices in 2 machines: ")
    assert any("plan: " in line and "kept from an earlier start" in line for line in second)
    assert second[-1] == first[-1]


def test_a_long_stage_is_told_again():
    now, lines = [0.0], []
    say = lines_of("profiling", lines.append, lambda: now[0])
    for number in range(30):
        say(f"operators {number}/30: aten.mm")
        now[0] += AGAIN_S / 7.5
    # what is told again comes with the first step that is that late
    assert lines[0] == "profiling: operators" and len(lines) == 1 + 29 // 8
    assert lines[1] == "profiling: operators 8/30: aten.mm"


IDIOMS = named(
    check_warnings_of_a_plan_are_told_once,
    check_warnings_of_a_plan_made_before_are_told,
    check_a_batch_of_fewer_rows_than_ranks_says_so,
    check_phases_say_what_they_decided,
)


@pytest.mark.parametrize("name", IDIOMS)
def test_told(outcomes, name):
    assert_passed(outcomes[name])
