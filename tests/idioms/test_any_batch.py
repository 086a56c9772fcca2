"""A plan serves a family of shapes: the smaller last batch, padded lengths, evaluation, as on one device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from gloo_world import assert_passed
from plans import PLANS, Mlp, build, named, output_plan, plan_of, program
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import graph_module

from mixmesh.base.patch import patched
from mixmesh.errors import Infeasible, InputError, MixmeshError
from mixmesh.lang.ir import Shard, shard_sizes
from mixmesh.lang.plan_file import MicroBatch
from mixmesh.runtime.calls import Calls
from mixmesh.runtime.data import shard_batches
from mixmesh.runtime.interpret import interpret
from mixmesh.runtime.parallel import parallelize
from mixmesh.runtime.random import RandomPolicy
from mixmesh.runtime.shapes import traces
from mixmesh.runtime.shapes.agree import check_kinds

SIZES = (5, 12, 1, 7, 3)  # of batches planned for 12: 2, 2, 1 samples; 6, 4, 2; 1, 0, 0; ...
WORDS = 11


def close(a, b, what="") -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m: f"{what}: {m}")


def same_step(single: nn.Module, model: nn.Module, batch: dict, call=None) -> None:
    """The loss, every gradient and every buffer of one step."""
    single.zero_grad()
    model.zero_grad()
    expected, loss = single(**batch), model(**(batch if call is None else call))
    close(loss, expected, "loss")
    expected.backward()
    loss.backward()
    whole = dict(model.named_parameters())
    for name, p in single.named_parameters():
        if p.grad is not None:
            got = whole[name].grad
            got = got.full_tensor() if hasattr(got, "full_tensor") else got
            close(got, p.grad, name)
    state = model.full_state_dict()
    for name, buffer in single.named_buffers():
        close(state[name], buffer, name)


class Words(nn.Module):
    """Attention over padded lengths; labels to be ignored; a mean over what counts."""

    def __init__(self, dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, WORDS)
        self.dropout = nn.Dropout(dropout)
        self.double()

    def forward(self, ids, labels):
        x = self.embedding(ids)
        n, t, _ = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mask = (ids != 0)[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.norm(x + self.dropout(self.out(y.transpose(1, 2).reshape(n, t, 8))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=0)


def words(size: int, length: int, seed: int = 0) -> dict:
    g = torch.Generator().manual_seed(seed + 100 * size + length)
    ids = torch.randint(1, WORDS, (size, length), generator=g)
    ids[:, length // 2 + 1 :] *= torch.rand(size, 1, generator=g) > 0.5  # what is padded differs
    return {"ids": ids, "labels": ids.roll(-1, 1)}


class Counted(Words):
    """Reads nothing of its labels but their number."""

    def forward(self, ids, labels):
        size, length = labels.shape
        h = self.head(self.norm(self.embedding(ids.flatten()).view(size, length, -1)))
        return F.cross_entropy(h.flatten(0, 1), ids.flatten(), reduction="sum") / labels.numel()


class Norms(nn.Module):
    """Batch norm, whose running statistics evaluation takes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.fc, self.last = nn.Linear(4 * 16, 8), nn.BatchNorm1d(8)
        self.double()

    def forward(self, x, y):
        h = self.bn(self.conv(x)).relu().flatten(1)
        return F.cross_entropy(self.last(self.fc(h)), y)


def images(size: int, seed: int = 0) -> dict:
    g = torch.Generator().manual_seed(seed + size)
    return {
        "x": torch.randn(size, 3, 6, 6, generator=g, dtype=torch.float64),
        "y": torch.randint(8, (size,), generator=g),
    }


def numbers(size: int) -> dict:
    g = torch.Generator().manual_seed(size)
    return {k: torch.randn(size, n, generator=g, dtype=torch.float64) for k, n in (("x", 6), ("y", 4))}


def rows(plan, batch: dict, rank: int) -> dict:
    """A rank's own part of a batch, as the plan deals samples out."""
    of = getattr(plan, "program", plan)
    sizes = shard_sizes(len(next(iter(batch.values()))), of.ratios[0][1])
    return {k: v.split(sizes)[rank] for k, v in batch.items()}


def check_any_size_under_any_plan(_) -> None:
    for name in PLANS:
        single, _, model, _ = build(name)
        for size in SIZES:
            expected, loss = single(**numbers(size)), model(**numbers(size))
            close(loss, expected, f"{name} {size}")
            for m, value in ((single, expected), (model, loss)):
                m.zero_grad()
                value.backward()
            for key, p in model.named_parameters():
                wanted = single.get_parameter(key).grad
                if wanted is not None:
                    got = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                    close(got, wanted, f"{name} {size} {key}")


def check_lengths(_) -> None:
    for stage in (0, 3):
        single, plan = Words(), plan_of(Words(), words(12, 6), stage)
        model, _ = parallelize(Words(), None, plan, device="cpu", timeout_s=60)
        assert "mixmesh" not in str(plan.warnings)
        rank = model.comm.rank
        for size, length in ((12, 6), (12, 4), (5, 3), (7, 6), (1, 5), (2, 1)):
            batch = words(size, length)
            same_step(single, model, batch)
        model, _ = parallelize(Words(), None, plan, device="cpu", timeout_s=60)
        for size, length in ((7, 5), (12, 6), (11, 6), (12, 4), (1, 5)):
            batch = words(size, length)
            same_step(single, model, batch, rows(plan, batch, rank))
        made = [f.program for f in model._runtime.forms.kept.values()]
        ops = [i.op for i in plan.program.instructions]
        assert sum([i.op for i in p.instructions] == ops for p in made) >= 3, "the planned placements"


def check_sizes_of_what_is_not_read(_) -> None:
    """A rank's own rows of a tensor whose shape alone is read stand for those of the whole batch."""
    single, plan = Counted(), plan_of(Counted(), words(12, 6), 0)
    model, _ = parallelize(Counted(), None, plan, device="cpu", timeout_s=60)
    for size, length in ((7, 5), (11, 6), (12, 4), (7, 3), (9, 8), (8, 7)):
        batch = words(size, length)
        same_step(single, model, batch, rows(plan, batch, model.comm.rank))


class Weighed(Words):
    """Reads nothing of a mask but its length."""

    def forward(self, ids, labels, mask):
        return super().forward(ids, labels) * mask.shape[1]


def check_other_sizes_of_what_is_not_read_alone(_) -> None:
    """The inputs of the program are as planned, or as in a batch before."""
    batches = [
        words(12, length) | {"mask": torch.ones(12, other)}
        for length, other in ((6, 4), (6, 6), (6, 9), (5, 6), (5, 5), (5, 8), (6, 6), (6, 9))
    ]
    for first in (0, 1):  # where the first batch is another one than the planned one, too
        single, plan = Weighed(), plan_of(Weighed(), batches[1], 3)
        model, _ = parallelize(Weighed(), None, plan, device="cpu", timeout_s=60, check_model=False)
        for batch in batches[first:]:
            same_step(single, model, batch)
        made = [form.program for form in model._runtime.forms.kept.values()]
        assert len(made) == 4 + (first == 0)


def check_statistics_of_the_short_batch(_) -> None:
    for stage in (0, 3):
        single, plan = Norms(), plan_of(Norms(), images(12), stage)
        model, _ = parallelize(Norms(), None, plan, device="cpu", timeout_s=60)
        for size in (12, 5, 2):
            same_step(single, model, images(size))


def check_evaluation(_) -> None:
    for stage in (0, 3):
        single, plan = Norms(), plan_of(Norms(), images(12), stage)
        model, _ = parallelize(Norms(), None, plan, device="cpu", timeout_s=60)
        same_step(single, model, images(12))
        single.eval()
        model.eval()
        before = model.full_state_dict()
        with torch.no_grad():
            for size in (12, 1, 7, 8, 30):
                close(model(**images(size)), single(**images(size)), f"evaluation of {size}")
            batch = images(11)
            close(model(**rows(plan, batch, model.comm.rank)), single(**batch), "own rows")
        for name, value in model.full_state_dict().items():
            assert torch.equal(value, before[name]), name
        single.train()
        model.train()
        same_step(single, model, images(12, seed=1))


def check_dropout(_) -> None:
    plan = plan_of(Words(0.5), words(12, 6), 0)
    model, _ = parallelize(Words(0.5), None, plan, device="cpu", timeout_s=60, seed=3, random_exact=True)
    batch = words(5, 4)
    loss = model(**batch)
    (form,) = model._runtime.forms.kept.values()
    random = RandomPolicy(3, exact=True)
    random.step = 1
    expected = interpret(form.program, dict(Words(0.5).named_parameters()), batch, random=random).loss
    close(loss, expected.to(loss.dtype), "the single device's numbers")
    model._runtime.forms.original.eval()  # as a script may leave it after model.whole()
    model(**words(7, 4))
    assert "native_dropout" in str(list(model._runtime.forms.kept.values())[-1].program)
    single = Words(0.5).eval()
    model.eval()
    with torch.no_grad():
        for size, length in ((12, 6), (5, 4), (3, 6)):
            close(model(**words(size, length)), single(**words(size, length)), "no dropout")


def check_accumulation_and_schedules(_) -> None:
    """Batches of several sizes between two optimizer steps, with and without ``no_sync``."""
    for name in ("data_parallel", "fsdp", "levels_to_owners"):
        single, adam, model, mine = build(name)
        schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (adam, mine)]
        for step in range(3):
            for size in (12, 5, 1):
                (single(**numbers(size)) / 3).backward()
                if size == 1 or step == 1:
                    (model(**numbers(size)) / 3).backward()
                else:
                    with model.no_sync():
                        (model(**numbers(size)) / 3).backward()
            for optimizer, schedule in zip((adam, mine), schedules):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        state = model.full_state_dict()
        for key, value in single.state_dict().items():
            if key != "count":
                close(state[key], value, f"{name} {key}")


def check_micro_steps(_) -> None:
    plan = plan_of(Mlp(0), numbers(12), 0)
    rows = (MicroBatch(2, 3, 2), MicroBatch(2, 2, 2), MicroBatch(2, 1, 2))
    plan = replace(plan, micro_batches=rows)
    single, (model, _) = Mlp(0), parallelize(Mlp(0), None, plan, device="cpu", timeout_s=60)
    for size in (12, 7, 5):
        same_step(single, model, numbers(size))
    assert [f.steps is None for f in model._runtime.forms.kept.values()] == [False, True]
    rows = (MicroBatch(3, 2, 3), MicroBatch(2, 2, 2), MicroBatch(1, 2, 1))
    together = replace(plan_of(Mlp(0), numbers(12), 3), micro_batches=rows)
    model, _ = parallelize(Mlp(0), None, together, device="cpu", timeout_s=60)
    with pytest.raises(MixmeshError, match="micro-batches cannot be cut out of it"):
        model(**numbers(7))
    same_step(single, model, numbers(12))


def check_limits(_) -> None:
    """Few programs are kept, nothing of those that are gone, and none that needs more memory than the planned
    one."""
    plan = plan_of(Mlp(0), numbers(12), 0)
    single = Mlp(0)
    model, _ = parallelize(Mlp(0), None, plan, device="cpu", timeout_s=60, kept_shapes=2)
    run = model._runtime
    same_step(single, model, numbers(6))
    sources, types = len(graph_module._loader.eval_cache), len(FakeTensorMode.cache)
    for size in (3, 4, 3, 5, 4):
        same_step(single, model, numbers(size))
    assert len(graph_module._loader.eval_cache) == sources and len(FakeTensorMode.cache) <= types
    assert [key[2][0][0] for key in run.forms.kept] == [5, 4]
    assert {key[0] for key in run.compiled} == {*run.forms.kept}
    with pytest.raises(Infeasible, match="more memory than the plan was made for"):
        model(**numbers(120000))
    same_step(single, model, numbers(12))


def check_that_many_shapes_cost_time_is_told(_) -> None:
    model, _ = parallelize(Mlp(0), None, plan_of(Mlp(0), numbers(12), 0), device="cpu", timeout_s=60)
    told: list[str] = []
    each_alone = patched(traces, "OWN", 100)
    with each_alone, patched(traces, "TOLD_S", 0.0), patched(traces, "warn_once", told.append):
        for size in (3, 4, 5, 6, 7):
            model(**numbers(size))
        assert not told
        for size in (8, 9):
            model(**numbers(size))
    # the first rank traces
    assert ["6 shapes of batches have been traced" in text for text in told] == [True] * (not model.comm.rank)


class Bags(nn.Module):
    """Takes all words of a batch in one dim, which every rank needs whole, and a label of each bag."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.embedding, self.last = nn.EmbeddingBag(WORDS, 8, mode="mean"), nn.Linear(8, 4)
        self.double()

    def forward(self, ids, starts, labels):
        return F.cross_entropy(self.last(self.embedding(ids, starts)), labels)


def bags(size: int) -> dict:
    g = torch.Generator().manual_seed(size)
    lengths = torch.randint(1, 5, (size,), generator=g)
    return {
        "ids": torch.randint(WORDS, (int(lengths.sum()),), generator=g),
        "starts": lengths.cumsum(0) - lengths,
        "labels": torch.randint(4, (size,), generator=g),
    }


def check_values_that_all_ranks_need(_) -> None:
    """They are the same whatever else a rank was given: three ranks have a row each, of three."""
    example = bags(12)
    traced = output_plan("even", Bags(), example)
    single, (model, _) = Bags(), parallelize(Bags(), None, traced, device="cpu", timeout_s=60)
    cut = [i.args[0] for i in traced.program.batch_inputs if isinstance(i.type.placement, Shard)]
    assert cut == ["labels"]
    for size in (12, 3):
        batch = bags(size)
        (own,) = shard_batches([batch], traced, model.comm.rank)
        assert len(own["labels"]) == size // 3
        same_step(single, model, batch, own)


class Halves(nn.Module):
    """Pairs each sample with one of the other half of its batch: rows are cut in units of half of it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.double()

    def forward(self, x, y):
        h = self.first(x).tanh()
        spread = h.view(2, -1, 8).var(0, unbiased=False).mean(1, keepdim=True)
        return F.mse_loss(self.last(h + spread.repeat(2, 1)), y)


def check_other_units(_) -> None:
    """Rows are dealt out in the planned units of 6, or one by one; the model takes units of 5, 3 and 1."""
    for stage in (0, 3):
        single, plan = Halves(), plan_of(Halves(), numbers(12), stage)
        (units,) = {i.type.placement.unit for i in plan.program.batch_inputs}
        assert units == 6
        model, _ = parallelize(Halves(), None, plan, device="cpu", timeout_s=60)
        for size in (12, 10, 6, 2):
            batch = numbers(size)
            same_step(single, model, batch)
            (own,) = shard_batches([batch], plan, model.comm.rank)
            same_step(single, model, batch, own)


def check_what_is_no_batch(_) -> None:
    _, _, model, _ = build("data_parallel")
    rank = model.comm.rank
    with pytest.raises(InputError, match="neither one whole batch nor each its own part"):
        model(**{k: v[: 3 + rank] for k, v in numbers(12).items()})
    with pytest.raises(InputError, match="no tensor 'y'"):
        model(x=numbers(12)["x"])
    model.eval()
    with pytest.raises(InputError, match="no tensor 'y'"):
        model(numbers(12)["x"], None)


def check_even_shares(_) -> None:
    """Four rows on each of three ranks: a whole batch of four, or each its own of twelve."""
    even = program("data_parallel").changed(ratios=(("r0", (0.333334, 0.333333, 0.333333)),))
    single, (model, _) = Mlp(0), parallelize(Mlp(0), None, even, device="cpu", timeout_s=20)
    rank = model.comm.rank
    same_step(single, model, numbers(4))
    batch = numbers(6)
    same_step(single, model, batch, {k: v[2 * rank : 2 * rank + 2] for k, v in batch.items()})
    same_step(single, model, numbers(2))


def check_a_batch_that_others_do_not_have(_) -> None:
    """Ranks that passed whole batches, one of which passes another one: an error on all of them."""
    single, _, model, _ = build("data_parallel")
    for size in (12, 5, 5, 12):
        model(**numbers(size))
    with pytest.raises(InputError, match="neither one whole batch"):
        model(**numbers(5 if model.comm.rank == 1 else 12))
    close(model(**numbers(5)), single(**numbers(5)))


IDIOMS = named(
    check_any_size_under_any_plan, check_lengths, check_sizes_of_what_is_not_read,
    check_other_sizes_of_what_is_not_read_alone,
    check_statistics_of_the_short_batch,
    check_evaluation,
    check_dropout, check_accumulation_and_schedules, check_micro_steps, check_limits,
    check_that_many_shapes_cost_time_is_told, check_other_units,
    check_values_that_all_ranks_need, check_what_is_no_batch, check_even_shares,
    check_a_batch_that_others_do_not_have,
)  # fmt: skip


@pytest.mark.parametrize("name", IDIOMS)
def test_any_batch(outcomes, name):
    assert_passed(outcomes[name])


def test_labels_that_are_missing_are_named():
    """Training without labels: no word on dtypes or plans."""
    plan = replace(plan_of(Words(), words(12, 6), 0), arguments=(("ids", "tensor"), ("labels", "tensor")))
    calls = Calls.of(Words(), plan)
    for given in ({"labels": None}, {}):
        with pytest.raises(InputError, match="no tensor 'labels', and the planned loss is made of it"):
            tensors = calls.tensors((words(3, 6)["ids"],), given)
            check_kinds(plan.program, tensors, 0)


def test_a_loss_of_the_script_is_planned_without_labels():
    """A loop that keeps the labels of a tuple for itself: the error names what to write, and where."""
    plan = plan_of(Words(), tuple(words(12, 6).values()), 0)
    with pytest.raises(InputError, match="no input 2 of the model") as raised:
        check_kinds(plan.program, {"0": words(3, 6)["ids"]}, 0)
    assert raised.value.got == "input 1 of the model" and "test_any_batch.py" in raised.value.where
    assert any("inputs=lambda x, y: (x,)" in hint for hint in raised.value.hint)
