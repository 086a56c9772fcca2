"""A dtype per device: bf16 as f16 where there is none, in the plan, in one process and between processes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from gloo_world import assert_passed, run_world
from torch import nn

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.errors import ParseError, VerificationError
from mixmesh.frontend.trace import trace
from mixmesh.lang.check import check_program
from mixmesh.lang.ir import make_ratio, parse_program
from mixmesh.lang.ir.dtypes import half_dtypes, on_rank
from mixmesh.lang.plan_file import Plan
from mixmesh.measure.verification import verify
from mixmesh.passes.recomputation import recomputed
from mixmesh.passes.zero import with_stage
from mixmesh.planner import make_plan
from mixmesh.runtime.parallel import parallelize
from mixmesh.search.baselines import data_parallel

BATCH, WIDTH = 12, 16
CLUSTER = Cluster.parse("""\
name = "mixed"
[[machine]]
devices = ["V100-16GB", "RTX3090-24GB", "V100-16GB"]
""")
ROW = ("f16", "bf16", "f16")


class Model(nn.Module):
    """Casts of its own, as autocast's: products in bf16, the loss in f32."""

    def __init__(self, largest: float = 1e4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, 4)
        self.largest = largest

    def forward(self, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            h = nn.functional.gelu(self.up(x))
            h = h.masked_fill(h < -self.largest, -self.largest)
            return nn.functional.cross_entropy(self.down(h).float(), y)


def job(largest: float = 1e4):
    torch.manual_seed(0)
    return Model(largest), {"x": torch.randn(BATCH, WIDTH), "y": torch.arange(BATCH) % 4}


@cache
def traced(largest: float = 1e4):
    return trace(*job(largest))


@cache
def program():
    made = data_parallel(traced().graph, CostModel(CLUSTER), make_ratio([0.25, 0.5, 0.25]))
    return replace(made, dtypes=(("bf16", ROW),))


def test_the_plan_says_who_computes_what():
    plan = make_plan(traced(), CLUSTER, planner="ddp-proportional")
    assert plan.program.dtypes == (("bf16", ROW),)
    assert Plan.parse(str(plan)) == plan and "dtype bf16 = [f16, bf16, f16]" in str(plan)
    assert any("GradScaler" in text for text in plan.warnings)
    check_program(plan.program)
    dtypes = [
        {t.value.dtype for i in on_rank(plan.program, r).instructions for t in i.types} for r in range(3)
    ]
    assert ["bf16" in d for d in dtypes] == [False, True, False]
    assert ["f16" in d for d in dtypes] == [True, False, True]
    assert verify(*job(), plan, steps=2, traced=traced()).ok


@pytest.mark.parametrize("stage", range(4))
def test_every_stage(stage):
    report = verify(*job(), with_stage(recomputed(program()), stage, (0.5, 0.5, 0.0)), traced=traced())
    assert report.ok and report.max_gradient_error_f64 < 1e-9
    # as computed: half types round at about a hundredth
    assert 1e-5 < report.max_gradient_error < 0.05


def test_what_nobody_can_do_is_refused():
    text = str(program())
    for row, message in (
        ("[f16, bf16]", "2 dtypes for 3 ranks"),
        ("[f16, bf16, half]", "there is no dtype half"),
    ):
        with pytest.raises(ParseError, match=message):
            parse_program(text.replace("[f16, bf16, f16]", row))
    for line, message in (
        ("dtype bf16 = [f16, bf16, f32]", "not given for every rank"),
        ("dtype f32 = [f32, f32, f16]", "same on all ranks"),
    ):
        with pytest.raises(VerificationError, match=message):
            check_program(parse_program(text.replace("dtype bf16 = [f16, bf16, f16]", line)))
    moved = """program p world=3 { ratio r0 = [0.25, 0.5, 0.25] dtype bf16 = [f16, bf16, f16]
      %x = input("x") : f32[12, 4] S(0)@r0
      %h = aten._to_copy(%x, dtype=bf16) : bf16[12, 4] S(0)@r0
      %g = all_gather(%h) : bf16[12, 4] R
      %f = aten._to_copy(%g, dtype=f32) : f32[12, 4] R
      %l = aten.mean(%f) : f32[] R
      %t = as_partial(%l) : f32[] P(sum)
      return %t }"""
    with pytest.raises(VerificationError, match="ranks that meet hold bf16 in different dtypes"):
        check_program(parse_program(moved))
    check_program(parse_program(moved.replace("[f16, bf16, f16]", "[f16, f16, f16]")))


@pytest.mark.parametrize("largest", [1e30, 100_000])
def test_no_stand_in_for_what_f16_cannot_hold(largest):
    plan = make_plan(traced(largest), CLUSTER, planner="ddp-even")
    assert plan.program.dtypes == () and any("emulated" in text for text in plan.warnings)
    edited = replace(plan.program, dtypes=(("bf16", ROW),))
    with pytest.raises(VerificationError, match="more than f16 can hold"):
        check_program(edited)
    assert half_dtypes(traced().graph, (True, True)) == ()


class Trained:
    """Pickled: between processes every rank computes as in one process."""

    def __init__(self, stage: int) -> None:
        self.stage = stage

    def __call__(self, _) -> None:
        text = str(with_stage(program(), self.stage, (0.5, 0.5, 0.0)))
        (single, batch), (mine, _) = job(), job()
        model, optimizer = parallelize(mine, sgd(mine), parse_program(text), device="cpu", timeout_s=60)
        stepper = sgd(single)
        seen: set[torch.dtype] = set()
        for _step in range(2):
            with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.add(x.dtype) or x, lambda x: x):
                loss = model(**batch)
            expected = single(**batch)
            torch.testing.assert_close(loss, expected, rtol=0.02, atol=0.02)
            for o, x in ((optimizer, loss), (stepper, expected)):
                o.zero_grad()
                x.backward()
                o.step()
        other = {"f16": torch.bfloat16, "bf16": torch.float16}[ROW[model.comm.rank]]
        assert other not in seen and seen & {torch.bfloat16, torch.float16}
        for name, value in model.full_state_dict().items():
            torch.testing.assert_close(value, single.state_dict()[name], rtol=0.02, atol=0.02)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


STAGED = {f"stage {stage}": Trained(stage) for stage in (0, 2)}


@pytest.fixture(scope="module")
def results():
    return run_world(3, STAGED)


@pytest.mark.parametrize("name", STAGED)
def test_between_processes(results, name):
    assert_passed(results[name])
