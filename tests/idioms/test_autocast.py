"""``torch.autocast`` around the call: planned under, called under, and no other one."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from gloo_world import assert_passed
from plans import named, plan_of
from small_graphs import TWO, cluster
from torch import nn

import mixmesh
from mixmesh.errors import InputError
from mixmesh.frontend.trace.autocast import autocast_for, check_casts
from mixmesh.lang.plan_file import Plan
from mixmesh.runtime.parallel import parallelize

BF16 = torch.bfloat16


class Tagger(nn.Module):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.embedding, self.inner = nn.Embedding(11, 8), nn.Linear(8, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 11)

    def forward(self, x, y):
        h = self.norm(F.gelu(self.inner(self.embedding(x))))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def tokens(size: int) -> dict:
    g = torch.Generator().manual_seed(size)
    return {k: torch.randint(11, (size, 5), generator=g) for k in ("x", "y")}


def casting() -> torch.autocast:
    return torch.autocast("cpu", BF16)


def check_training_under_autocast(_) -> None:
    for stage in (0, 3):
        plan = plan_of(Tagger(), tokens(12), stage, autocast=("cpu", "bf16"))
        assert any(t.value.dtype == "bf16" for t in plan.program.types.values())
        single, (model, _) = Tagger(), parallelize(Tagger(), None, plan, device="cpu", timeout_s=60)
        for size in (12, 5):
            with casting():
                expected, loss = single(**tokens(size)), model(**tokens(size))
            torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)
            single.zero_grad()
            model.zero_grad()
            expected.backward()
            loss.backward()
            for name, p in model.named_parameters():
                got = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                torch.testing.assert_close(got, single.get_parameter(name).grad, rtol=0.05, atol=1e-3)
        model.eval()
        single.eval()
        with torch.no_grad(), casting():
            torch.testing.assert_close(model(**tokens(7)), single(**tokens(7)), rtol=1e-3, atol=1e-3)


def check_the_program_alone_casts(_) -> None:
    """What the program keeps in float32 stays so: the caller's context does not cast within it."""
    plan = plan_of(Tagger(), tokens(12), 0, autocast=("cpu", "bf16"))
    model, _ = parallelize(Tagger(), None, plan, device="cpu", timeout_s=60)
    seen = []
    run = type(model)._pass

    def watched(self, *args, **kwargs):
        seen.append(torch.is_autocast_enabled("cpu"))
        return run(self, *args, **kwargs)

    type(model)._pass = watched
    try:
        with casting():
            model(**tokens(12))
            assert torch.is_autocast_enabled("cpu")
    finally:
        type(model)._pass = run
    assert seen == [False]


def check_another_context_is_refused(_) -> None:
    plan = plan_of(Tagger(), tokens(12), 0, autocast=("cpu", "bf16"))
    model, _ = parallelize(Tagger(), None, plan, device="cpu", timeout_s=60)
    with pytest.raises(InputError, match="not called under the autocast") as caught:
        model(**tokens(12))
    assert "with torch.autocast('cpu', torch.bfloat16): around the call" in str(caught.value)
    with pytest.raises(InputError, match="not called"), torch.autocast("cpu", torch.float16):
        model(**tokens(12))
    plain, _ = parallelize(Tagger(), None, plan_of(Tagger(), tokens(12), 0), device="cpu", timeout_s=60)
    with pytest.raises(InputError, match="not called") as caught, casting():
        plain(**tokens(12))
    assert "autocast=torch.bfloat16" in str(caught.value)


IDIOMS = named(check_training_under_autocast, check_the_program_alone_casts, check_another_context_is_refused)


@pytest.mark.parametrize("name", IDIOMS)
def test_autocast(outcomes, name):
    assert_passed(outcomes[name])


def test_a_plan_under_autocast_is_the_single_device_s():
    plan = mixmesh.plan(Tagger(), tokens(8), cluster(TWO), planner="ddp-proportional", autocast=BF16)
    assert plan.autocast == ("cpu", "bf16") and Plan.parse(str(plan)).autocast == plan.autocast
    assert mixmesh.verify(Tagger(), tokens(8), plan).ok
    with casting():
        inside = mixmesh.plan(Tagger(), tokens(8), cluster(TWO), planner="ddp-proportional")
        none = mixmesh.plan(Tagger(), tokens(8), cluster(TWO), planner="ddp-proportional", autocast=False)
    assert inside.program == plan.program and inside.autocast == plan.autocast
    assert none.autocast is None and none.program != plan.program


class Island(Tagger):
    """Computes its scores in single precision, as many losses and routers do."""

    def forward(self, x, y):
        h = self.norm(F.gelu(self.inner(self.embedding(x))))
        with torch.autocast("cpu", enabled=False):
            scores = h.float() @ self.inner.weight
            with torch.no_grad():
                largest = (scores @ scores.transpose(1, 2)).amax()
        return F.cross_entropy(self.head(h * (scores.mean() + largest)).flatten(0, 1), y.flatten())


def test_a_block_that_casts_nothing_within_one_that_does():
    """Nor does it with another block within it: the loss is that of PyTorch."""
    single, batch = Island(), tokens(6)
    plan = mixmesh.plan(Island(), batch, cluster(TWO), planner="ddp-proportional", autocast=BF16)
    dtypes = {i.op: i.types[0].value.dtype for i in plan.program.instructions}
    assert dtypes["aten.matmul"] == "f32" and dtypes["aten.linear"] == "bf16"
    assert mixmesh.verify(single, batch, plan).ok


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("wanted", [torch.autocast, "bf16"])
def test_what_is_no_context_for_the_model(wanted):
    wanted = torch.autocast("cuda", BF16) if wanted is torch.autocast else wanted
    with pytest.raises(InputError, match="autocast"):
        mixmesh.plan(Tagger(), tokens(8), cluster(TWO), autocast=wanted)


def test_a_model_where_the_planned_context_casts_nothing():
    plan = mixmesh.plan(Tagger(), tokens(8), cluster(TWO), planner="ddp-proportional", autocast=BF16)
    plan = replace(plan, autocast=("cuda", "bf16"))
    with pytest.raises(InputError, match="casts nothing of a model on cpu") as refused:
        mixmesh.parallelize(Tagger(), None, plan, device="cpu")
    assert "model.to('cuda')" in str(refused.value)
    check_casts(Tagger().to("meta"), plan.autocast)  # has no values yet


def test_an_empty_context_casts_nothing():
    with casting():
        assert (
            autocast_for(Tagger(), nullcontext()) is None
            and autocast_for(Tagger(), suppress(ValueError)) is None
        )
        assert autocast_for(Tagger()) == ("cpu", "bf16")
