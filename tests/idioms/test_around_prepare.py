"""What a script does around ``mixmesh.prepare``: several models, data without indices, evaluation before the
first step, a loss that is not finite."""

from __future__ import annotations

import math
import os
import random
import tempfile
import warnings
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator, MutableMapping
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed
from plans import close, named
from test_shared_modules import CriticLoss, GeneratorLoss, given, optimizers, pair, trained
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset
from transformers import BatchEncoding

import mixmesh
from mixmesh.cli.launch import launched_plan
from mixmesh.errors import InputError, PlanError, TraceError
from mixmesh.runtime.data import shard_batches
from mixmesh.training.preparation.loading import own_loader


def prepare(model, optimizer, loader, *, planner: str = "ddp-even", **options):
    cache = os.path.join(tempfile.gettempdir(), f"mixmesh-idioms-{os.environ['MASTER_PORT']}")
    return mixmesh.prepare(
        model, optimizer, loader, planner=planner, profile_s=0, cache=cache, timeout_s=60, **options
    )


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = (nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    return nn.Sequential(*layers).double()


def rows(count: int = 14, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=g, dtype=torch.float64)
    return list(zip(x, torch.randint(3, (count,), generator=g)))


class Stream(IterableDataset):
    """Rows in order, of which one may be another on a rank, or missing."""

    def __init__(self, other: int | None = None, missing: bool = False) -> None:
        self.other, self.missing = other, missing

    def __iter__(self):
        end = 13 if self.missing and dist.get_rank() == 1 else 14
        for n, (x, y) in enumerate(rows()[:end]):
            yield (x + dist.get_rank() if n == self.other else x), y


def check_a_generator_and_its_critic(_) -> None:
    """Two models over the same modules, two optimizers, two calls of ``prepare``."""
    single, mine = pair(), pair()
    ours = optimizers(mine)
    batches = given(CriticLoss)
    models = []
    for n in range(2):
        model, ours[n], _ = prepare(mine[n], ours[n], [batches[n]])
        models.append(model)
    trained(CriticLoss, single, optimizers(single))
    trained(CriticLoss, models, ours)
    for model, reference in zip(models, single):
        for key, value in model.full_state_dict().items():
            close(value, reference.state_dict()[key], key)


def check_a_generator_and_its_critic_held_otherwise(_) -> None:
    models = pair(GeneratorLoss)
    noise = given(GeneratorLoss)[0]
    first = prepare(models[0], None, [noise], planner="fsdp-even")[0]
    with pytest.raises(InputError, match="share a parameter") as caught:
        prepare(models[1], None, [noise])
    assert "ddp-proportional" in str(caught.value) and first.training


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@lru_cache
def prepared():
    """A model that several checks use one after the other, and what ``prepare`` gives beside it. Its loader
    is an iterator, which runs once."""
    mine = network()
    return mine, *prepare(mine, sgd(mine), iter(whole_batches()), loss=F.cross_entropy, planner="fsdp-even")


def whole_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(DataLoader(Stream(), 6))


def check_evaluation_before_the_first_step(_) -> None:
    """The modes of the lent model are its own: the first step trains as it was planned."""
    mine, model, optimizer, _ = prepared()
    batch, reference = whole_batches()[0], network().eval()
    with mixmesh.whole(model) as m, torch.no_grad():
        m.eval()
        close(m(batch[0]), reference(batch[0]))
        assert model.training
    assert model.training and mine.training
    model.eval()
    with torch.no_grad():
        close(model(*batch), F.cross_entropy(reference(batch[0]), batch[1]).detach())
    model.train()
    optimizer.zero_grad()
    model(*batch).backward()
    optimizer.step()
    with mixmesh.whole(model) as m:
        assert int(m[1].num_batches_tracked) == 1


def check_an_iterator_loses_no_batch(_) -> None:
    """Asked by ``next`` and by a loop, one after the other."""
    _, model, _, own = prepared()
    first = next(own)
    mine = [first, *((x, y) for x, y in own)]
    assert next(own, None) is None
    for number, whole in enumerate(zip(*whole_batches())):
        close(gathered([batch[number] for batch in mine]), torch.cat(whole))


def drawn() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches drawn by the random numbers of all, as language models often have them."""
    while True:
        start = torch.randint(8, (6,))
        x, y = (torch.stack([rows()[n][k] for n in start]) for k in range(2))
        yield x, y


def check_a_generator_draws_as_on_one_device(_) -> None:
    torch.manual_seed(5)
    expected = torch.cat([x for x, _ in islice(drawn(), 3)])
    after = torch.rand(1)
    mine = network()
    torch.manual_seed(5)
    _, _, own = prepare(mine, sgd(mine), drawn(), loss=F.cross_entropy)
    close(gathered([next(own)[0] for _ in range(3)]), expected)
    assert torch.equal(torch.rand(1), after)


def gathered(pieces: list[torch.Tensor]) -> torch.Tensor:
    """The rows of all ranks, in the order of the batches."""
    everyones: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, pieces)
    return torch.cat([piece for batch in zip(*everyones) for piece in batch])


def check_a_loop_that_takes_some_of_a_batch(_) -> None:
    """The plan is made for what the loader gives: refused, with what to write, which is right."""
    numbered = [(n, x, y) for n, (x, y) in enumerate(rows())]
    mine = network()
    with pytest.raises(TraceError) as caught:
        prepare(mine, sgd(mine), DataLoader(numbered, 6), loss=F.cross_entropy)
    assert "inputs=lambda a, b, c: (a, ...)" in str(caught.value)
    named = [{"x": x, "y": y, "n": n} for n, x, y in numbered]
    with pytest.raises(TraceError) as caught:
        prepare(mine, sgd(mine), DataLoader(named, 6), loss=F.cross_entropy)
    assert "inputs=lambda x, y, n: (x, ...)" in str(caught.value)
    options = {"loss": F.cross_entropy, "inputs": lambda n, x, y: (x, y)}
    model, _, loader = prepare(mine, sgd(mine), DataLoader(numbered, 6), **options)
    model.eval()
    with torch.no_grad():
        for _, x, y in loader:
            close(model(x, y), F.cross_entropy(network().eval()(x), y))


def check_a_batch_keeps_its_class(_) -> None:
    plan = prepared()[3]._plan
    (x, y), pair = whole_batches()[0], namedtuple("Pair", "x y")
    (share,) = shard_batches([pair(x, y)], plan, dist.get_rank())
    (expected,) = shard_batches([(x, y)], plan, dist.get_rank())
    assert type(share) is pair and torch.equal(share.x, expected[0])
    batch = BatchEncoding({"0": x})
    (share,) = shard_batches([batch], plan, dist.get_rank())
    assert type(share) is BatchEncoding and share is not batch and batch["0"] is x
    assert torch.equal(share["0"], expected[0])


class Holder(MutableMapping):
    """A mapping whose ``copy.copy`` holds the same dict."""

    def __init__(self, values):
        self.values_by_name = values

    def __getitem__(self, name):
        return self.values_by_name[name]

    def __setitem__(self, name, value):
        self.values_by_name[name] = value

    def __delitem__(self, name):
        del self.values_by_name[name]

    def __iter__(self):
        return iter(self.values_by_name)

    def __len__(self):
        return len(self.values_by_name)


class Attributes(dict):
    """A dict that shows its values as attributes."""

    def __init__(self, **values):
        super().__init__(**values)
        self.__dict__ = self


class Closed(OrderedDict):
    """A dict that refuses to be changed by ``update``, as outputs of transformers do."""

    def update(self, *_):
        raise Exception("no update")


def check_a_loop_that_computes_its_loss(_) -> None:
    """It keeps its loader, and the model gets what its forward takes of a batch."""
    single, mine = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
    mine.load_state_dict(single.state_dict())
    both = [sgd(single), sgd(mine)]
    loader = whole_batches()
    model, both[1], same = prepare(mine, both[1], loader, planner="fsdp-even")
    assert same is loader
    for x, y in loader:
        losses = []
        for m, optimizer in zip((single, model), both):
            optimizer.zero_grad()
            losses.append(F.cross_entropy(m(x), y))
            losses[-1].backward()
            optimizer.step()
        close(losses[1], losses[0])


def check_the_scripts_own_batch_is_not_cut(_) -> None:
    plan = prepared()[3]._plan
    x, _ = whole_batches()[0]
    ((expected, _),) = shard_batches([whole_batches()[0]], plan, dist.get_rank())
    assert len(expected) < len(x)
    counted = defaultdict(int, {"0": x})
    for batch, kind in ((Holder({"0": x}), dict), (Closed({"0": x}), Closed), (counted, defaultdict)):
        (share,) = shard_batches([batch], plan, dist.get_rank())
        assert type(share) is kind and batch["0"] is x and torch.equal(share["0"], expected)
    batch = Attributes(**{"0": x, "name": "first"})
    (share,) = shard_batches([batch], plan, dist.get_rank())
    assert type(share) is Attributes and share.name == "first"
    assert torch.equal(getattr(share, "0"), expected) and torch.equal(share["0"], expected)
    assert getattr(batch, "0") is x


class OfOneDict(nn.Module):
    """Takes a whole dict, as ``model(batch)``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.net[2].p = 0.0

    def forward(self, batch):
        return F.cross_entropy(self.net(batch["x"]), batch["labels"]["y"])


class OfNested(OfOneDict):
    """Takes a list of tensors and a dict, as ``model(views, labels)``."""

    def forward(self, views, labels):
        return F.cross_entropy(self.net(views[0]) + self.net(views[1]), labels["y"])


def drawing_collate(samples):
    """Draws a random number, so that ranks load whole batches and cut them."""
    torch.rand(())
    return torch.utils.data.default_collate(samples)


def check_batches_with_containers(_) -> None:
    as_dicts = [{"x": x, "labels": {"y": y}} for x, y in rows()]
    as_pairs = [([x, -x], {"y": y}) for x, y in rows()]
    for make, data in ((OfOneDict, as_dicts), (OfNested, as_pairs)):
        for collate in (None, drawing_collate):
            loader = DataLoader(data, 6, collate_fn=collate)
            single, mine = make(), make()
            model, optimizer, own = prepare(mine, sgd(mine), loader)
            steps = sgd(single)
            for batch, its_rows in zip(loader, own, strict=True):
                losses = [m(*b) if isinstance(b, list | tuple) else m(b)
                          for m, b in ((single, batch), (model, its_rows))]  # fmt: skip
                close(losses[1].detach(), losses[0].detach(), f"{make.__name__}, {collate}")
                for loss, stepper in zip(losses, (steps, optimizer)):
                    loss.backward()
                    stepper.step()
                    stepper.zero_grad()


def check_a_row_that_is_not_trained_brings_no_warning(_) -> None:
    """As reinforcement learning asks for an action, in training mode."""
    torch.manual_seed(0)
    mine, single = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double() for _ in range(2))
    single.load_state_dict(mine.state_dict())
    x = torch.stack([x for x, _ in rows()[:6]])
    model, _, _ = prepare(mine, sgd(mine), [x], planner="fsdp-even")
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for n in (1, 2):
            close(model(x[:n]), single(x[:n]))
    assert not caught, caught[0].message


class IgnoresNumber(OfOneDict):
    def forward(self, x, number):
        return self.net(x).square().mean()


def check_a_kept_plan_is_of_the_same_call(_) -> None:
    """Another number leaves the graph as it is, but not the calls that the plan can answer."""
    x = rows()[0][0].repeat(6, 1)
    for number in (3, 4):
        mine = IgnoresNumber()
        model, _, _ = prepare(mine, sgd(mine), [(x, number)])
        assert model(x, number).isfinite()


def check_synced_batch_norm(_) -> None:
    """It is left over from a script for DistributedDataParallel."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()

    reference, mine = made(), nn.SyncBatchNorm.convert_sync_batchnorm(made())
    model, optimizer, loader = prepare(mine, sgd(mine), DataLoader(rows(), 6), loss=F.cross_entropy)
    own, plain = sgd(reference), DataLoader(rows(), 6)
    for (x, y), (all_x, all_y) in zip(loader, plain, strict=True):
        expected = F.cross_entropy(reference(all_x), all_y)
        loss = model(x, y)
        close(loss.detach(), expected.detach())
        for each, its in ((loss, optimizer), (expected, own)):
            its.zero_grad()
            each.backward()
            its.step()
    for key, value in model.full_state_dict().items():
        close(value, reference.state_dict()[key], key)


def check_data_without_indices(_) -> None:
    _, model, _, own = prepared()
    for loader in (DataLoader(Stream(), 6), whole_batches()):
        mine = list(own_loader(loader, own._plan))
        close(gathered([x for x, _ in mine]), torch.cat([x for x, _ in whole_batches()]))


def check_data_that_differs(_) -> None:
    for data in (Stream(other=7), Stream(missing=True)):
        seen = 0
        with pytest.raises(InputError, match="did not make the same batch") as caught:
            for _ in own_loader(DataLoader(data, 6), prepared()[3]._plan):
                seen += 1
        assert seen == (1 if data.other else 2) and "torch.manual_seed" in str(caught.value)
    shorter = whole_batches()[: 2 + (dist.get_rank() == 0)]
    with pytest.raises(InputError, match="did not make the same batch") as caught:
        list(own_loader(shorter, prepared()[3]._plan))
    assert "the end of the data on rank 1" in str(caught.value)


def check_noise_for_own_rows_is_noticed(_) -> None:
    """Numbers drawn between the loader and the model, at the first batch of which a rank draws some, by
    PyTorch, NumPy or Python, or by a generator of the loop's own."""
    of_torch, of_numpy = torch.Generator(), np.random.default_rng(0)
    draws = (
        lambda shape: torch.randn(shape),
        lambda shape: torch.randn(shape, generator=of_torch),
        lambda shape: torch.from_numpy(np.random.randn(*shape)),
        lambda shape: torch.from_numpy(of_numpy.normal(size=shape)),
        lambda shape: torch.full(shape, random.random()),
    )
    for draw in draws:
        mine = network()
        model, _, loader = prepare(mine, sgd(mine), DataLoader(rows(), 6), loss=F.cross_entropy)
        for has_noise, draws_late, wanted in ((False, True, 0), (True, False, 1), (True, False, 0)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for x, y in loader:
                    loss = model(x + draw(x.shape[1:]) if has_noise else x, y)
                    draw((1 + draws_late,))  # after the call nothing depends on it
                    loss.backward()
            noticed = [w for w in caught if "inputs=function" in str(w.message)]
            assert len(noticed) == (wanted if dist.get_rank() == 0 else 0)


def check_a_model_within_a_wrapper_is_refused(_) -> None:
    with pytest.raises(InputError, match="DataParallel is around the model") as caught:
        prepare(nn.DataParallel(network()), None, whole_batches())
    assert "model.module" in str(caught.value)


def check_a_parallel_model_is_not_prepared_again(_) -> None:
    _, model, optimizer, _ = prepared()
    for of in (model, torch.compile(model)):
        with pytest.raises(InputError, match="parallel already") as caught:
            prepare(of, optimizer, DataLoader(rows(6), 6), loss=F.cross_entropy)
        assert "to evaluate: model.eval()" in str(caught.value)


def check_a_plan_file_that_cannot_be_read(_) -> None:
    """Without one on the first rank, and with a spoilt one on the last."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.plan")
        with pytest.raises(PlanError, match="^cannot read the plan"):
            launched_plan("job.py", path, None, 60)
        prepared()[3]._plan.save(path)
        if dist.get_rank() == 2:
            path.write_text("no plan")
        with pytest.raises(PlanError, match="^rank 2: this is not a plan"):
            launched_plan("job.py", path, None, 60)


def check_a_loss_that_is_not_finite_is_so_on_all_ranks(_) -> None:
    """A script's own check decides alike on all ranks."""
    _, model, _, _ = prepared()
    x, y = whole_batches()[0]
    spoilt = x.clone()
    spoilt[5] = math.nan  # a row of the last rank
    assert not model(spoilt, y).isfinite()


IDIOMS = named(
    check_a_generator_and_its_critic,
    check_a_generator_and_its_critic_held_otherwise,
    check_evaluation_before_the_first_step,
    check_an_iterator_loses_no_batch,
    check_a_generator_draws_as_on_one_device,
    check_a_loop_that_takes_some_of_a_batch,
    check_a_batch_keeps_its_class,
    check_a_loop_that_computes_its_loss,
    check_the_scripts_own_batch_is_not_cut,
    check_batches_with_containers,
    check_a_row_that_is_not_trained_brings_no_warning,
    check_a_kept_plan_is_of_the_same_call,
    check_synced_batch_norm,
    check_data_without_indices,
    check_data_that_differs,
    check_noise_for_own_rows_is_noticed,
    check_a_model_within_a_wrapper_is_refused,
    check_a_parallel_model_is_not_prepared_again,
    check_a_plan_file_that_cannot_be_read,
    check_a_loss_that_is_not_finite_is_so_on_all_ranks,
)


@pytest.mark.parametrize("name", IDIOMS)
def test_around_prepare(outcomes, name):
    assert_passed(outcomes[name])
