"""Pipelines of stages in micro-batches: in one process and between four, training equals the single device's;
delays anywhere stop nobody; a stage that is missing is named."""

from __future__ import annotations

import itertools
import os
import random
import re
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from gloo_world import assert_passed, run_world
from pipelines import (
    COSTS,
    FOUR_STAGES,
    THREE_STAGES,
    WORLD,
    batch,
    chain,
    model_of,
    pipelined,
)
from torch import nn

from mixmesh.errors import CollectiveError, MixmeshError, PlanError
from mixmesh.frontend.job import Job
from mixmesh.frontend.trace import trace
from mixmesh.lang.check import check_plan
from mixmesh.lang.ir import (
    in_flight,
    micro_step_program,
    once_program,
    parse_program,
    passes_of,
    samples_of,
    separable,
    with_wgrads,
)
from mixmesh.lang.plan_file import MicroBatch, Plan
from mixmesh.measure.verification import verify
from mixmesh.runtime.data import shard_batches
from mixmesh.runtime.interpret import interpret
from mixmesh.runtime.parallel import parallelize
from mixmesh.runtime.passes import code_of
from mixmesh.runtime.random import RandomPolicy
from mixmesh.runtime.train import train
from mixmesh.simulator import simulate

PAIR = ((0.0, 1.0, 1.0, 0.0), (1.0, 0.0, 0.0, 0.0))  # rank 3 has nothing to do
PLANS = {
    "three stages, 2": (THREE_STAGES, 2, ()),
    "three stages, 4": (THREE_STAGES, 4, ()),
    "four stages, 2": (FOUR_STAGES, 2, ()),
    "four stages, 12": (FOUR_STAGES, 12, ()),
    "two stages, 3, with owners": (PAIR, 3, ("sharded", "allreduce")),
}
COUNTED = "three stages, 2, labels counted elsewhere"  # which of them count is moved once per step
PLANS[COUNTED] = (THREE_STAGES, 2, ())
APART = "three stages, 2, weight gradients apart"  # at once, as a stage's passes end in no sums of their own
PLANS[APART] = (THREE_STAGES, 2, ())
DROPOUT = 0.3
DROPPING = {"three stages, 4, dropout": (THREE_STAGES, 4, ())}


FOLDER = "PIPELINES"  # where processes find the plans, which they need not make: tracing takes seconds


@cache
def plan_of(name: str) -> Plan:
    if FOLDER in os.environ:
        return Plan.load(Path(os.environ[FOLDER], name))
    stages, micro_steps, syncs = (PLANS | DROPPING)[name]
    model = model_of(dropout=DROPOUT if "dropout" in name else 0.0)
    last = ("cross_entropy_loss.sum",) if name == COUNTED else ()
    program = chain(model, batch(), stages, syncs=syncs, last=last)
    if name == APART:
        program = with_wgrads(
            program, dict(zip(separable(program), itertools.cycle(("last", "first", "beside"))))
        )
    return pipelined(program, micro_steps)


def close(a, b, what="") -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m: f"{what}: {m}")


def same_gradients(single, model) -> None:
    for name, p in model.named_parameters():
        whole = model._runtime.by_param[p].whole(
            torch.zeros_like(p) if p.grad is None else p.grad, model.comm
        )
        close(whole, single.get_parameter(name).grad, name)


# --- the order ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", range(1, 6))
@pytest.mark.parametrize("micro_steps", (1, 2, 5, 9))
def test_passes(stages, micro_steps):
    for stage in range(stages):
        passes = passes_of(stage, stages, micro_steps)
        for backward in (False, True):
            assert [k for b, k in passes if b == backward] == list(range(micro_steps))
        kept = [sum(1 if not b else -1 for b, _ in passes[:n]) for n in range(len(passes) + 1)]
        assert max(kept) == in_flight(stage, stages, micro_steps) <= stages - stage
        assert all(passes.index((False, k)) < passes.index((True, k)) for k in range(micro_steps))


# --- plans -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_plan_is_text(name):
    plan = plan_of(name)
    assert plan.order == "1f1b" and 'order = "1f1b"' in str(plan)
    assert Plan.parse(str(plan)) == plan
    check_plan(plan)


def test_what_moves_once_per_step_is_in_no_micro_step():
    program = plan_of(COUNTED).program
    samples = samples_of(program)
    once, step = once_program(program, samples), micro_step_program(program, samples)
    moved = {i.result for i in once.instructions if i.op == "move"} & samples.transfers
    assert moved and moved.isdisjoint(step.producers)
    timeline = simulate(program, COSTS, micro_batches=plan_of(COUNTED).micro_batches)
    assert min(timeline.peak_memory_bytes) > 0


def test_one_micro_step_has_no_order():
    plan = pipelined(chain(model_of(), batch(), THREE_STAGES), 1)
    assert plan.order is None and "order" not in str(plan).partition("program")[0]


def test_order_must_be_of_the_program():
    text = str(plan_of("four stages, 2"))
    with pytest.raises(PlanError, match="this order"):
        Plan.parse(text.replace('order = "1f1b"', 'order = "gpipe"'))
    with pytest.raises(PlanError, match="this order"):
        Plan.parse(re.sub(r"micro_batches = .*\n", "", text))


def test_stages_and_samples():
    samples = samples_of(chain(model_of(), batch(), THREE_STAGES))
    assert samples.stages == ((0,), (1, 2), (3,))
    assert samples.counts == (12, 8, 4, 12) and not samples.meets
    # in the second of four micro-batches samples 3 to 5 of the batch are in every stage
    first = [samples.first_sample(rank, n // 4, 4) for rank, n in enumerate(samples.counts)]
    assert first == [3, 3, 5, 3]


HEAD = """program p world=3 {
  ratio a = [1, 0, 0] ratio b = [0, 1, 0] ratio c = [0, 0, 1] ratio ab = [0.5, 0.5, 0] ratio d = [0, 0.5, 0.5]
  %x = input("x") : f64[12, 6] S(0)@a
  %w = param("w") : f64[6, 6] R
  %h = aten.linear(%x, %w) : f64[12, 6] S(0)@a
"""
TAIL = """
  %s = aten.square(%o) : f64[12, 6] S(0)@b
  %loss = aten.sum(%s) : f64[] P(sum)@b
  return %loss
}"""
REFUSED = {
    "come back": """%m = move(%h) : f64[12, 6] S(0)@b
      %g = aten.relu(%m) : f64[12, 6] S(0)@b
      %n = move(%g) : f64[12, 6] S(0)@a
      %k = aten.relu(%n) : f64[12, 6] S(0)@a
      %o = move(%k) : f64[12, 6] S(0)@b""",
    "share a rank": """%m = move(%h) : f64[12, 6] S(0)@d
      %n = move(%m) : f64[12, 6] S(0)@a
      %p = move(%h) : f64[12, 6] S(0)@b
      %o = aten.relu(%p) : f64[12, 6] S(0)@b""",
    "depends on parameters": """%m = move(%h) : f64[12, 6] S(0)@b
      %v = aten.relu(%w) : f64[6, 6] R@a
      %u = move(%v) : f64[6, 6] R@b
      %o = aten.linear(%m, %u) : f64[12, 6] S(0)@b""",
    "needs the samples of all micro-batches": """%m = move(%h) : f64[12, 6] S(0)@b
      %t = aten.sum.dim_IntList(%m, [0]) : f64[6] P(sum)@b
      %u = all_reduce(%t) : f64[6] R@b
      %o = aten.add.Tensor(%m, %u) : f64[12, 6] S(0)@b""",
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why):
    with pytest.raises(PlanError, match=why) as caught:
        samples_of(parse_program(HEAD + REFUSED[why] + TAIL))
    assert "%" in str(caught.value)  # the instruction


def test_micro_batches_must_be_alike():
    plan = plan_of("four stages, 2")
    rows = list(plan.micro_batches)
    for row in (MicroBatch(7, 2, 5), MicroBatch(4, 3, 4)):
        with pytest.raises(PlanError, match="not alike"):
            check_plan(replace(plan, micro_batches=(*rows[:3], row)))


# --- in one process ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_interpreted(name):
    model = model_of()
    traced = trace(model, batch())
    plan = replace(plan_of(name), graph_fingerprint=traced.graph.fingerprint)
    report = verify(model, batch(), plan, steps=2, traced=traced)
    assert report.ok and report.max_gradient_error_f64 < 1e-12, report


# --- between processes -------------------------------------------------------------------------------------


def adam(params):
    return torch.optim.Adam(params, lr=0.02)


class Training:
    """A class, since closures do not pickle. ``delays`` is a seed."""

    def __init__(self, name: str, delays: int | None = None) -> None:
        self.name, self.delays = name, delays

    def __call__(self, _) -> None:
        single, mine = model_of(), model_of()
        optimizer = adam(single.parameters())
        model, sharded = parallelize(
            mine, adam(mine.parameters()), plan_of(self.name), device="cpu", timeout_s=60
        )
        if self.delays is not None:
            delay(model, random.Random(100 * self.delays + model.comm.rank))
        started = counted_sums(model)
        for step in range(4):
            expected, loss = single(**batch(step)), model(**batch(step))
            close(loss, expected, "loss")
            expected.backward()
            # sums do not wait for ``backward``, but for those of owners
            before = len(started)
            plain = [n for n, b in enumerate(model._runtime.reducer._own) if not b.owned]
            assert started[-len(plain) :] == plain if plain else not before
            loss.backward()
            assert len(started) == before
            same_gradients(single, model)
            for o in (optimizer, sharded):
                o.step()
                o.zero_grad()
        whole = single.state_dict()
        for name, value in model.full_state_dict().items():
            close(value, whole[name], name)


def counted_sums(model) -> list[int]:
    """The buckets that are summed from now on, as they start."""
    reducer, started = model._runtime.reducer, []
    start = reducer._sum

    def counted(index, flat):
        started.append(index)
        return start(index, flat)

    reducer._sum = counted
    return started


def delay(model, draw: random.Random) -> None:
    """Every pass of a rank is late by chance, now and then by a lot."""
    steps = model._runtime.forms.planned.steps
    stage = steps.stage
    form = model._runtime.forms.planned
    run = code_of(model._runtime, form, steps.sizes[0], training=model.training)

    def late(*args, **kwargs):
        time.sleep(draw.choice((0.0, 0.002, 0.03)))
        return type(run).run(run, *args, **kwargs)

    object.__setattr__(run, "run", late)
    if stage is not None:
        backward = stage._backward

        def late_back(*args, **kwargs):
            time.sleep(draw.choice((0.0, 0.002, 0.03)))
            return backward(*args, **kwargs)

        object.__setattr__(stage, "_backward", late_back)


def check_any_loop(_) -> None:
    """A loss that is scaled, passes under no_sync, evaluation, a loss that nobody differentiates."""
    single, mine = model_of(), model_of()
    model, _ = parallelize(mine, None, plan_of("three stages, 4"), device="cpu", timeout_s=60)
    for scale in (0.25, 8.0, 8.0):
        (single(**batch(1)) * scale).backward()
        (model(**batch(1)) * scale).backward()
        same_gradients(single, model)
    with torch.no_grad():
        close(model(**batch(2)), single(**batch(2)))
    model(**batch(5))
    same_gradients(single, model)
    with model.no_sync():
        model(**batch(3)).backward()
    model(**batch(4)).backward()
    (single(**batch(3)) + single(**batch(4))).backward()
    same_gradients(single, model)
    for pair in ((single, model), (single, model)):  # what is there is zero, not nothing
        for one in pair:
            one.zero_grad(set_to_none=False)
            one(**batch(6)).backward()
    same_gradients(single, model)
    for one in (single, model):  # two losses, in one backward pass and in two
        one.zero_grad()
        (one(**batch(1)) + one(**batch(2))).backward()
        first, second = one(**batch(3)), one(**batch(4))
        first.backward()
        second.backward()
    same_gradients(single, model)
    for one in (single, model):  # sums that are on their way already, and a loss that is not to be summed
        one.zero_grad()
        loss = one(**batch(5))
        with one.no_sync() if one is model else nullcontext():
            loss.backward()
        one(**batch(6)).backward()
    same_gradients(single, model)
    with model.no_sync():
        loss = model(**batch(1))
    (loss + model(**batch(2))).backward()
    (single(**batch(1)) + single(**batch(2))).backward()
    same_gradients(single, model)
    norm = nn.utils.clip_grad_norm_(single.parameters(), 1.0)
    torch.testing.assert_close(model.clip_grad_norm_(1.0).double(), norm.double(), rtol=1e-6, atol=0)


def check_parts(_) -> None:
    """What shard_batches gives is cut for a pipeline."""
    single, mine, plan = model_of(), model_of(), plan_of("two stages, 3, with owners")
    model, _ = parallelize(mine, None, plan, device="cpu", timeout_s=60)
    (own,) = shard_batches([batch()], plan, model.comm.rank)
    close(model(**own), single(**batch()))


def check_part_alone(_) -> None:
    """A part of a batch is refused, and the ranks that have whole ones do not wait for long."""
    plan = plan_of("two stages, 3, with owners")
    model, _ = parallelize(model_of(), None, plan, device="cpu", timeout_s=60)
    rows = {1: slice(6), 2: slice(6, 12)}.get(model.comm.rank, slice(12))
    started = time.monotonic()
    with pytest.raises(MixmeshError, match="whole batches" if rows != slice(12) else "rank (1|2) has failed"):
        model(**{name: x[rows] for name, x in batch().items()})
    assert time.monotonic() - started < 30
    time.sleep(3)  # the others hear it too: processes of a test end without the last words of a watch


def check_dropout(_) -> None:
    """Numbers drawn exactly are the single device's, whatever the micro-batch."""
    plan = plan_of("three stages, 4, dropout")
    single, mine = model_of(dropout=DROPOUT), model_of(dropout=DROPOUT)
    model, _ = parallelize(mine, None, plan, device="cpu", timeout_s=60, seed=3, random_exact=True)
    for step in (1, 2):
        policy = RandomPolicy(3, exact=True)
        policy.step = step
        single.zero_grad()
        expected = interpret(plan.program, dict(single.named_parameters()), batch(), random=policy)
        expected.loss.backward()
        model.zero_grad()
        loss = model(**batch())
        close(loss, expected.loss, "loss")
        loss.backward()
        same_gradients(single, model)


def check_train(_) -> None:
    """The plain loop and its recording take the same path."""
    single = model_of()
    optimizer = adam(single.parameters())
    expected = []
    for _step in range(6):
        loss = single(**batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    plan = plan_of("three stages, 4")
    report = train(
        Job(model_of(), batch(), optimizer=adam), plan, steps=6, device="cpu", timeout_s=60, record=True
    )
    close(torch.tensor(report.losses), torch.tensor(expected), "losses")
    names = {e.name for timeline in report.timelines for e in timeline.events}
    moved = samples_of(plan.program).transfers
    assert moved <= names, moved - names


def check_other_sizes(_) -> None:
    """As many micro-batches of fewer samples; evaluation of any size, at once."""
    single = model_of()
    model, _ = parallelize(model_of(), None, plan_of("three stages, 2"), device="cpu", timeout_s=60)
    expected, loss = single(**batch(1, 6)), model(**batch(1, 6))
    close(loss, expected)
    expected.backward()
    loss.backward()
    same_gradients(single, model)
    with pytest.raises(PlanError, match="number of micro-batches does not divide"):
        model(**batch(1, 8))
    model.eval()
    with torch.no_grad():
        close(model(**batch(2, 5)), single(**batch(2, 5)))


def check_stuck(_) -> None:
    """A stage that never comes is a timeout that names the rank and the message."""
    plan = replace(plan_of("four stages, 2"), graph_fingerprint="")  # rank 1 is late already for the check
    model, _ = parallelize(model_of(), None, plan, device="cpu", timeout_s=2)
    rank = model.comm.rank
    if rank == 1:
        time.sleep(9)  # for longer than the others ask why: then it makes its next call
        return
    with pytest.raises(CollectiveError) as caught:
        model(**batch())
    said = str(caught.value)
    # the first steps compare their batches, and the rank that never comes is missed there
    is_own = "timed out" in said or "lost a peer" in said
    if "rank 1 has not come within 2 s" in said:
        assert "shapes" in said
    else:
        assert f"rank {rank}: " in said and ("nothing from rank 1" in said or ("shapes" in said and is_own))


CHECKS = {
    **{f"training, {name}": Training(name) for name in PLANS},
    **{f"delays, {name}": Training(name, seed) for seed, name in enumerate(PLANS) if name != APART},
    "any loop": check_any_loop,
    "parts": check_parts,
    "dropout": check_dropout,
    "train": check_train,
    "other sizes": check_other_sizes,
    "stuck": check_stuck,  # the last: its groups are lost
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    for name in PLANS | DROPPING:
        plan_of(name).save(folder / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        return run_world(WORLD, CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_between_processes(results, name):
    assert_passed(results[name])


def test_a_part_of_a_batch_is_refused_at_once(tmp_path, monkeypatch):
    """In a world of its own: ranks that made different numbers of calls cannot go on together."""
    plan_of("two stages, 3, with owners").save(tmp_path / "two stages, 3, with owners")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    (failures,) = run_world(WORLD, {"a part": check_part_alone}).values()
    assert_passed(failures)
