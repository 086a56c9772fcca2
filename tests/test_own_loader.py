"""Loaders of ``mixmesh.prepare``: workers that are others on other ranks, iterations beside each other, and
iterators that begin anew."""

from __future__ import annotations

import os
import random
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed, run_world
from launches import cluster_file
from test_resuming import BATCH, FOLDER, LOADERS, Rows, Stream, plan_of_world, rows_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, Sampler, TensorDataset

import mixmesh
from mixmesh import InputError
from mixmesh.errors import Infeasible
from mixmesh.runtime.data import shard_batches
from mixmesh.training.preparation.loading import from_first_batch, own_loader

MANY = 70  # batches, more than one message has


class Long(Rows):
    def __len__(self) -> int:
        return BATCH * MANY


def loader_of(seed: int, num_workers: int = 0, **options) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(Long(), BATCH, shuffle=True, generator=generator, num_workers=num_workers, **options)


def first_columns(batches) -> list[list[float]]:
    return [x[:, 0].tolist() for x, _ in batches]


def check_other_workers_on_other_ranks(plan) -> None:
    """Those of the second rank load more than a message ahead, or are missing, or are alone."""
    of_ranks = (
        ({"num_workers": 1}, {"num_workers": 1, "prefetch_factor": MANY - 2}),
        ({"num_workers": 1}, {}),
        ({}, {"num_workers": 1, "timeout": 60}),
    )
    loaders = [own_loader(loader_of(n, **of[dist.get_rank()]), plan) for n, of in enumerate(of_ranks)]
    seen = [[] for _ in loaders]
    for step, batches in enumerate(zip(*loaders, strict=True)):
        total = torch.tensor([float(step), 1.0])  # as a training step exchanges, between the indices
        dist.all_reduce(total)
        assert total.tolist() == [2.0 * step, 2.0]
        for samples, (x, _) in zip(seen, batches):
            samples.append(x.clone())
    for n, samples in enumerate(seen):
        assert rows_of(samples) == first_columns(loader_of(n)), n


def check_other_workers_for_a_stream_are_refused(plan) -> None:
    """They decide the order of its samples. Nothing is loaded before."""
    loader = DataLoader(Stream(), BATCH, num_workers=1 + dist.get_rank())
    with pytest.raises(InputError, match="other numbers of workers") as caught:
        own_loader(loader, plan)
    assert "1 on rank 0, 2 on rank 1" in str(caught.value)


def check_iterations_beside_each_other(plan) -> None:
    """One begins in the middle of another; each gives its own batches, and the state is that of the last."""
    for num_workers in (0, 1):
        plain, loader = loader_of(3), own_loader(loader_of(3, num_workers), plan)
        begun = iter(plain)
        begins = first_columns([next(begun)])  # before the order of the second is drawn
        expected = [first_columns(plain), begins + first_columns(begun)][::-1]
        first = iter(loader)
        seen = [[next(first)[0]], []]
        second = iter(loader)
        for _ in range(MANY - 1):
            seen[1].append(next(second)[0])
            assert loader.state_dict()["num_yielded"] == len(seen[1])
            seen[0].append(next(first)[0])
            assert loader.state_dict()["num_yielded"] == len(seen[0])
        seen[1].append(next(second)[0])
        assert next(first, None) is None and next(second, None) is None
        assert [rows_of(samples) for samples in seen] == expected


def check_the_next_epoch_after_one_that_was_left(plan) -> None:
    """It is shuffled as on one device: PyTorch's sampler draws once more at its end, which is not reached.
    So is one that begins beside another."""

    def few(num_workers: int = 0) -> DataLoader:
        generator = torch.Generator().manual_seed(3)
        data = TensorDataset(torch.arange(4.0 * BATCH)[:, None], torch.ones(4 * BATCH))
        return DataLoader(data, BATCH, shuffle=True, generator=generator, num_workers=num_workers)

    for num_workers in (0, 1):
        for taken in (1, 3, 4):
            plain, loader = few(num_workers), own_loader(few(num_workers), plan)
            for batches in (plain, loader):
                for _ in zip(range(taken), batches):  # asks for no batch more
                    pass
            for _ in range(2):
                assert rows_of([x.clone() for x, _ in loader]) == first_columns(plain)
    plain, loader = few(), own_loader(few(), plan)
    expected = [first_columns(pair) for pair in zip(*zip(plain, plain))]
    seen = zip(*[(first.clone(), second.clone()) for (first, _), (second, _) in zip(loader, loader)])
    assert [rows_of(list(samples)) for samples in seen] == expected


class AsItGoes(Sampler):
    """Batches of which each is drawn when it is asked for, from numbers of the process."""

    def __len__(self) -> int:
        return 8

    def __iter__(self):
        for _ in range(8):
            yield random.sample(range(50), BATCH)


def check_samplers_that_draw_batch_by_batch(plan) -> None:
    """They draw no batch before the loop asks for it, and so the loop's own numbers are those of one device,
    and the next epoch, where one was left."""

    def drawn(loader, rows) -> tuple[list, list[float]]:
        random.seed(5)
        batches, numbers = [], []
        for _ in range(2):
            for n, (x, _) in enumerate(loader):
                batches.append(x.clone())
                numbers.append(random.random())
                if n == 5:
                    break
        return rows(batches), numbers

    def repeated(is_replacing: bool) -> DataLoader:
        generator = torch.Generator().manual_seed(3)
        sampler = RandomSampler(Rows(), replacement=is_replacing, num_samples=96, generator=generator)
        return DataLoader(Rows(), BATCH, sampler=sampler)

    own = lambda: DataLoader(Rows(), batch_sampler=AsItGoes())  # noqa: E731
    for make in (own, lambda: repeated(True), lambda: repeated(False)):
        alone = drawn(make(), lambda batches: [x[:, 0].tolist() for x in batches])
        assert drawn(own_loader(make(), plan), rows_of) == alone


def check_iterations_with_one_set_of_workers(plan) -> None:
    # the second rank's own loader would not keep its workers
    options = {"num_workers": 1, "persistent_workers": dist.get_rank() == 0}
    loader = own_loader(DataLoader(Rows(), BATCH, **options), plan)
    first = iter(loader)
    next(first)
    assert len(list(loader)) == 9
    with pytest.raises(InputError, match="goes on after another one has begun"):
        next(first)


class BeginsAnew:
    """As readers that hold their place: ``iter`` goes back to the start. It shuffles there, if it has a
    generator."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.batches, self.generator, self.begun = LOADERS["a list"](0), generator, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        self.begun += 1
        count = len(self.batches)
        self.left = (
            list(range(count))
            if self.generator is None
            else torch.randperm(count, generator=self.generator).tolist()
        )
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.batches[self.left.pop(0)]


def prepared(loader, plan):
    """What ``prepare`` makes of a loader."""
    _, loader = from_first_batch(loader)
    return own_loader(loader, plan)


def pieces(batches) -> list[torch.Tensor]:
    return [x.clone() for x, _ in batches]


def check_a_class_that_begins_anew(plan) -> None:
    for made in (BeginsAnew, lambda: BeginsAnew(torch.Generator().manual_seed(1))):
        plain = made()
        own = prepared(made(), plan)
        assert own.begun == 1 and len(own) == 9
        for _ in range(3):  # epochs
            assert rows_of(pieces(own)) == first_columns(plain)
        for loader, taken in ((plain, first_columns), (own, lambda batches: rows_of(pieces(batches)))):
            for _ in zip(range(2), loader):  # an epoch that is left
                pass
            assert loader.begun == 4
            left = taken(loader)
            assert len(left) == 9 and loader.begun == 5
        assert own.begun == plain.begun


def check_a_generator_goes_on(plan) -> None:
    plain, own = (iter(LOADERS["a list"](0)) for _ in range(2))
    own = prepared(own, plan)
    for count in (2, 3):
        assert rows_of([x for _, (x, _) in zip(range(count), own)]) == first_columns(
            batch for _, batch in zip(range(count), plain)
        )
    assert rows_of(pieces(own)) == first_columns(plain)
    assert pieces(own) == []


class ChangesAnew:
    """Not an iterator: a loader whose ``iter`` draws random numbers."""

    def __iter__(self):
        self.order = torch.randperm(3).tolist()
        return iter([LOADERS["a list"](0)[n] for n in self.order])


def check_no_numbers_are_drawn_by_a_look_at_a_loader(plan) -> None:
    before = torch.get_rng_state()
    prepared(ChangesAnew(), plan)
    assert torch.equal(torch.get_rng_state(), before)


def prepared_on_two(optimizer, loader: DataLoader, planner: str, model: nn.Module | None = None):
    """What ``prepare`` makes for two unequal devices."""
    folder = Path(os.environ[FOLDER])
    model = model or nn.Linear(3, 3)
    return mixmesh.prepare(
        model, optimizer(model.parameters()), loader, loss=F.mse_loss, profile_s=0, planner=planner,
        cluster=cluster_file(folder), cache=folder / "cache of two",
    )  # fmt: skip


def check_ranks_draw_the_same_numbers_after_the_order(plan) -> None:
    """Whatever the first rank's sampler draws of the process's numbers, and in which message."""
    samplers = (
        None,
        torch.utils.data.RandomSampler(Long()),
        torch.utils.data.SubsetRandomSampler(range(BATCH * MANY)),
    )
    for n, sampler in enumerate(samplers):
        torch.manual_seed(n)
        expected = [torch.rand(1).item() for _ in DataLoader(Long(), BATCH, sampler=sampler)]
        torch.manual_seed(n)
        loader = own_loader(DataLoader(Long(), BATCH, sampler=sampler), plan)
        assert [torch.rand(1).item() for _ in loader] == expected, n


def check_what_the_model_does_not_take_goes_with_its_rows(plan) -> None:
    """In batches that are loaded whole and cut, the smaller last one too."""
    batches = []
    for size in (BATCH, 5):
        rows = [Rows()[n] for n in range(size)]
        x, y = (torch.stack(column) for column in zip(*rows))
        names = [f"{value:g}" for value in x[:, 0].tolist()]
        batches.append((x, y, names, tuple(names), torch.arange(size), torch.ones(()), "all"))
    for (whole, *_), (x, _, names, same, numbers, scale, word) in zip(batches, own_loader(batches, plan)):
        assert names == list(same) == [f"{value:g}" for value in x[:, 0].tolist()]
        assert torch.equal(whole[numbers], x) and scale.ndim == 0 and word == "all"
        assert len(names) < len(whole)


def check_a_batch_that_one_rank_alone_skips(plan) -> None:
    """It is refused in the next call, also long after the first steps; one that all ranks skip is not."""
    data = DataLoader(TensorDataset(torch.ones(48, 3), torch.ones(48, 3)), 4)
    model, optimizer, loader = prepared_on_two(torch.optim.SGD, data, "ddp-even")
    ends = pytest.raises(InputError, match="rows of different batches")
    for is_skipped, caught in ((lambda _: True, nullcontext()), (lambda rank: rank == 1, ends)):
        with caught:
            for number, (x, y) in enumerate(loader):
                if number == 6 and is_skipped(dist.get_rank()):
                    continue
                model(x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert number == 11
    assert number == 6 + dist.get_rank()
    assert "batch 7 of the epoch on rank 0; batch 8 of the epoch on rank 1" in str(ends.excinfo.value)


def check_a_call_from_another_thread_is_told(plan) -> None:
    data = DataLoader(TensorDataset(torch.ones(8, 3), torch.ones(8, 3)), 4)
    model, _, loader = prepared_on_two(torch.optim.SGD, data, "ddp-even")
    x, y = next(iter(loader))
    ends = pytest.raises(InputError, match="in the thread that reads the loader: rank 1 read nothing")
    with ThreadPoolExecutor(1) as pool, ends:
        pool.submit(model, x, y).result() if dist.get_rank() else model(x, y)


def check_a_loader_that_another_thread_reads_is_told(plan) -> None:
    data = DataLoader(TensorDataset(torch.ones(8, 3), torch.ones(8, 3)), 4)
    _, _, loader = prepared_on_two(torch.optim.SGD, data, "ddp-even")
    with warnings.catch_warnings(record=True) as caught, ThreadPoolExecutor(1) as pool:
        warnings.simplefilter("always")
        assert len(list(loader)) == 2
        assert not any("in another thread" in str(w.message) for w in caught)
        assert len(pool.submit(lambda: list(loader)).result()) == 2
    told = [str(w.message) for w in caught if "in another thread" in str(w.message)]
    assert len(told) == 1 and "into the loader before prepare" in told[0]


class Noisy(Rows):
    """Draws from a generator that is found nowhere, so that a sample comes out otherwise each time."""

    def __getitem__(self, n: int):
        x, y = super().__getitem__(n)
        return x + random.Random(os.urandom(8)).random(), y


def check_other_data_on_one_rank_is_refused(plan) -> None:
    """The first rank's indices would mean other samples there. Noise that differs is no other data."""
    rank, rows = dist.get_rank(), [Rows()[n] for n in range(BATCH * 2)]
    fewer = rows[: len(rows) - rank]
    of_other_samples = rows[rank::2]
    for data, words in ((fewer, "other lengths"), (of_other_samples, "the ranks have other data")):
        with pytest.raises(InputError, match=words) as caught:
            own_loader(DataLoader(data, BATCH), plan)
        assert "on rank 1" in str(caught.value) and "give every rank the whole data set" in str(caught.value)
    own_loader(DataLoader([(x * (1 + 1e-6 * rank), y) for x, y in rows], BATCH), plan)
    own_loader(DataLoader([(x / 0, y) for x, y in rows], BATCH), plan)  # not finite, but the same
    own_loader(DataLoader(Noisy(), BATCH), plan)


class AroundClass(torch.optim.Optimizer):
    """As SAM is written: it cannot be made of parameters alone, and asks for a norm of them all."""

    def __init__(self, parameters, base_class) -> None:
        super().__init__(parameters, {})
        self.base = base_class(self.param_groups, lr=0.1)


def check_an_optimizer_that_is_not_made_again_keeps_parameters_whole(_) -> None:
    """A plan that cuts them is not chosen, where it would be refused when the optimizer is handed over."""
    data = DataLoader(TensorDataset(torch.ones(8, 3), torch.ones(8, 3)), 4)
    with pytest.raises(Infeasible, match="the job's optimizer steps whole ones only"):
        prepared_on_two(lambda p: AroundClass(p, torch.optim.SGD), data, "fsdp-even")


def check_a_last_batch_that_a_pipeline_cannot_cut(_) -> None:
    """It is refused before training."""
    for rows, fits in ((23, False), (22, True)):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
        data = DataLoader(TensorDataset(torch.ones(rows, 16), torch.ones(rows, 16)), 8)
        with nullcontext() if fits else pytest.raises(InputError, match="which the last batch cannot be cut"):
            model, _, loader = prepared_on_two(torch.optim.SGD, data, "pipeline", model)
            for x, y in loader:
                model(x, y).backward()


SIZES = 4, 4, 4, 4, 8, 8, 4, 2


def check_batches_that_grow(_) -> None:
    """A rank's rows of a batch twice as large are as many as a whole planned one: they are no batch by
    themselves, neither while batches are compared nor later, and from ``shard_batches`` neither."""
    starts = [sum(SIZES[:n]) for n in range(len(SIZES))]
    indices = [list(range(start, start + size)) for start, size in zip(starts, SIZES)]
    x, y = torch.randn(2, sum(SIZES), 3, generator=torch.Generator().manual_seed(1))
    for batches in (indices, indices[3:]):
        data = DataLoader(TensorDataset(x, y), batch_sampler=batches)
        for is_sharded in (False, True):
            torch.manual_seed(0)
            single, model = nn.Linear(3, 3), nn.Linear(3, 3)
            single.load_state_dict(model.state_dict())
            steps = torch.optim.SGD(single.parameters())
            model, optimizer, loader = prepared_on_two(torch.optim.SGD, data, "ddp-even", model)
            if is_sharded:
                loader = shard_batches(data, loader._plan, dist.get_rank())
            for (a, b), whole in zip(loader, data, strict=True):
                steps.zero_grad()
                optimizer.zero_grad()
                expected, loss = F.mse_loss(single(whole[0]), whole[1]), model(a, b)
                torch.testing.assert_close(loss, expected)
                expected.backward()
                loss.backward()
                steps.step()
                optimizer.step()


WORLD = (
    check_other_workers_on_other_ranks,
    check_other_workers_for_a_stream_are_refused,
    check_other_data_on_one_rank_is_refused,
    check_iterations_beside_each_other,
    check_the_next_epoch_after_one_that_was_left,
    check_samplers_that_draw_batch_by_batch,
    check_iterations_with_one_set_of_workers,
    check_a_class_that_begins_anew,
    check_a_generator_goes_on,
    check_no_numbers_are_drawn_by_a_look_at_a_loader,
    check_what_the_model_does_not_take_goes_with_its_rows,
    check_a_batch_that_one_rank_alone_skips,
    check_a_loader_that_another_thread_reads_is_told,
    check_a_call_from_another_thread_is_told,
    check_ranks_draw_the_same_numbers_after_the_order,
    check_an_optimizer_that_is_not_made_again_keeps_parameters_whole,
    check_a_last_batch_that_a_pipeline_cannot_cut,
    check_batches_that_grow,
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("loaders")))
        return run_world(2, {check.__name__: check for check in WORLD}, plan_of_world)


@pytest.mark.parametrize("name", [check.__name__ for check in WORLD])
def test_two_ranks(results, name):
    assert_passed(results[name])
