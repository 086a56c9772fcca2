"""Arguments are bound by the forward's own names, and none that the plan does not know is ignored."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from gloo_world import assert_passed, run_world
from small_graphs import TWO, cluster
from torch import nn

from mixmesh.api import plan_traced
from mixmesh.errors import InputError
from mixmesh.frontend.job import Job
from mixmesh.frontend.trace import trace
from mixmesh.lang.plan_file import Plan
from mixmesh.measure.verification import verify
from mixmesh.runtime.calls import Calls, Signature
from mixmesh.runtime.data import shard_batches
from mixmesh.runtime.job_data import own_batches
from mixmesh.runtime.parallel import parallelize

A = torch.randint(0, 9, (8, 5), generator=torch.Generator().manual_seed(0))
B = torch.randint(0, 9, (8, 5), generator=torch.Generator().manual_seed(1))


class Tokens(nn.Module):
    """Uses ``targets`` before ``tokens``: in the program they stand in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)

    def forward(self, tokens, targets, scale=1.0, *more, weight=None, **options):
        labels = targets.flatten() * 1
        h = self.embedding(tokens).flatten(0, 1) * scale
        loss = F.cross_entropy(self.head(h), labels, reduction="sum")
        if weight is not None:
            loss = loss * weight
        for other in more:
            loss = loss + other.sum()
        return loss / options.get("num_items", targets.numel())


def model() -> Tokens:
    torch.manual_seed(0)
    return Tokens().double()


def plan_for(batch: dict | tuple) -> Plan:
    return plan_traced(trace(model(), batch), cluster(TWO), planner="ddp-proportional")


BY_NAME, BY_POSITION = {"tokens": A, "targets": B}, (A, B)
W = torch.tensor(0.5, dtype=torch.float64)
# the batch that is planned with -> calls that give what the module gives
BATCHES = {
    "by name": (
        BY_NAME,
        [((A, B), {}), ((A,), {"targets": B}), ((), BY_NAME), ((B, A), {}), ((A, B, 1.0), {})],
    ),
    "by position": (BY_POSITION, [((A, B), {}), ((), BY_NAME), ((B,), {"targets": A})]),
    "a keyword": ({**BY_NAME, "weight": W}, [((A, B), {"weight": W * 3}), ((), {**BY_NAME, "weight": W})]),
    "a tensor in **options": (
        {**BY_NAME, "num_items": torch.tensor(7)},
        [((), {**BY_NAME, "num_items": torch.tensor(3)}), ((A, B), {"num_items": torch.tensor(7)})],
    ),
    "a number in **options": ({**BY_NAME, "num_items": 7}, [((A, B), {"num_items": 7})]),
    "lists of words, which are not read": (
        {**BY_NAME, "names": ["a", "b"]},
        [((), {**BY_NAME, "names": ["c"]}), ((A, B), {}), ((A, B), {"names": ("d", "e", "f")})],
    ),
    "more positions": ((A, B, 1.0, W), [((A, B, 1.0, W * 2), {})]),
}


class Check:
    def __init__(self, name: str, plan: Plan) -> None:
        self.calls, self.plan = BATCHES[name][1], plan

    def __call__(self, _: None) -> None:
        single, (parallel, _) = model(), parallelize(model(), None, self.plan, device="cpu", timeout_s=60)
        for args, kwargs in self.calls:
            torch.testing.assert_close(parallel(*args, **kwargs), single(*args, **kwargs), rtol=1e-12, atol=0)


def refusing(_: None) -> None:
    parallel, _ = parallelize(
        model(), None, plan_for({**BY_NAME, "num_items": 7}), device="cpu", timeout_s=60
    )
    with pytest.raises(InputError, match="num_items is a constant"):
        parallel(**BY_NAME, num_items=8)


@pytest.fixture(scope="module")
def failures():
    plans = {name: plan_for(batch) for name, (batch, _) in BATCHES.items()}
    return run_world(2, {**{name: Check(name, plan) for name, plan in plans.items()}, "refusing": refusing})


@pytest.mark.parametrize("name", [*BATCHES, "refusing"])
def test_calls_give_what_the_module_gives(failures, name):
    assert_passed(failures[name])


REFUSED = {
    "num_items": (BY_NAME, (A, B), {"num_items": 7}, "made without the argument num_items"),
    "a tensor that is not known": (BY_NAME, (A, B), {"weight": W}, "weight is a constant in the plan"),
    "a tensor in **options": (BY_NAME, (A, B), {"other": W}, "made without the argument other"),
    "another number": ({**BY_NAME, "num_items": 7}, (A, B), {"num_items": 8}, "num_items is a constant"),
    "a number that is missing": ({**BY_NAME, "num_items": 7}, (A, B), {}, "num_items is a constant"),
    "other words": (
        {**BY_NAME, "words": "a"},
        (A, B),
        {"words": "b"},
        "leave words out of the call",
    ),
    "a default that was another": ({**BY_NAME, "scale": 2.0}, (A, B), {}, "scale is a constant"),
    "another default": (BY_NAME, (A, B, 2.0), {}, "scale is a constant"),
    "a number for a tensor": ({**BY_NAME, "weight": W}, (A, B), {"weight": 0.5}, "weight is a tensor in"),
    "twice": (BY_NAME, (A, B), {"targets": B}, "targets twice"),
    "more positions": (BY_NAME, (A, B, 1.0, W), {}, "made without the argument 3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_plan_does_not_know_is_refused(name):
    batch, args, kwargs, message = REFUSED[name]
    calls = Calls.of(model(), Plan.parse(str(plan_for(batch))))  # it is written down
    with pytest.raises(InputError) as caught:
        calls.tensors(args, kwargs)
    assert message in str(caught.value)
    plain = replace(plan_for(batch), arguments=None)  # of a plan that says nothing of its call
    if name != "twice":
        Calls.of(model(), plain).tensors(args, kwargs)


def test_a_forward_that_takes_no_more():
    signature = Signature.of(nn.Linear(2, 2))
    assert signature.positions == ("input",) and signature.named("0.key") == "input.key"
    for args, kwargs in (((A, B), {}), ((), {"x": A})):
        with pytest.raises(InputError, match="as its forward is written"):
            signature.bind(args, kwargs)


@pytest.mark.parametrize("planned", [BY_NAME, BY_POSITION])
@pytest.mark.parametrize("verified", [BY_NAME, BY_POSITION])
def test_verify_takes_either_form(planned, verified):
    assert verify(model(), verified, plan_for(planned)).ok


def test_batches_are_cut_by_their_names():
    """One input is needed whole and comes second in the tuple, first in the program."""
    text = str(plan_for(BY_NAME))
    plan = Plan.parse(text)
    program = plan.program
    first = next(i for i in program.instructions if i.op == "input")
    assert first.args[0] == "targets"
    rows = {rank: next(own_batches(Job(model(), BY_POSITION), plan, rank)) for rank in (0, 1)}
    assert torch.equal(torch.cat([rows[0][0], rows[1][0]]), A)
    assert torch.equal(torch.cat([rows[0][1], rows[1][1]]), B)
    wide = plan_for({"tokens": A, "targets": B, "weight": W})
    (share,) = shard_batches([(A, B, 1.0)], wide, 0, model=model())
    assert share[0].shape == share[1].shape and share[2] == 1.0
    with pytest.raises(InputError, match="a tuple has no names"):
        list(shard_batches([(A, B, W)], wide, 0))
    with pytest.raises(InputError, match="and the script's own loader: all ranks skip alike"):
        list(shard_batches([None], wide, 0, model=model()))  # of a collate_fn that leaves a batch out


def test_number_of_items_of_transformers():
    """A keyword that vanishes in ``**kwargs`` and divides the loss."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2, n_positions=8,
        bos_token_id=1, eos_token_id=1, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)  # fmt: skip
    torch.manual_seed(0)
    gpt = transformers.GPT2LMHeadModel(config).train()
    batch = {"input_ids": A, "labels": A}
    calls = Calls.of(gpt, plan_traced(trace(gpt, batch), cluster(TWO), planner="single"))
    with pytest.raises(InputError, match="made without the argument num_items_in_batch"):
        calls.tensors((), {**batch, "num_items_in_batch": torch.tensor(96)})
    counted = {**batch, "num_items_in_batch": torch.tensor(96)}
    traced = trace(gpt, counted)
    plan = plan_traced(traced, cluster(TWO), planner="ddp-proportional")
    assert "num_items_in_batch" in {i.args[0] for i in plan.program.instructions if i.op == "input"}
    report = verify(gpt, {**counted, "num_items_in_batch": torch.tensor(32)}, plan, traced=traced)
    assert report.ok, "the plan divides by the number that is passed, not by the one it was traced with"
