"""A loader of ``mixmesh.prepare`` goes on in the middle of an epoch, on as many ranks or on others."""

from __future__ import annotations

import io
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed, run_world
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

import mixmesh
from mixmesh import InputError, prepare
from mixmesh.runtime.first_rank import everyones
from mixmesh.training.preparation.loading import own_loader

ROWS, BATCH, SEEN = 50, 6, 4  # the last batch is smaller
FOLDER = "MIXMESH_TEST_FOLDER"


class Rows(Dataset):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((3,), float(n)), torch.tensor(n % 2)


class Stream(IterableDataset):
    """Rows in an order of its own for every epoch: drawn at its start, or as it goes."""

    def __init__(self, lazily: bool = False, rows: int = ROWS) -> None:
        self.lazily, self.rows = lazily, rows

    def __iter__(self):
        left = torch.randperm(self.rows).tolist()
        while left:
            n = left.pop(int(torch.randint(len(left), ())) if self.lazily else 0)
            yield Rows()[n]


class Shuffled(Sampler):
    """An order by numpy's numbers, or by those of ``draw``: at the start, or as it goes."""

    def __init__(self, lazily: bool = False, draw=np.random.permutation) -> None:
        self.lazily, self.draw = lazily, draw

    def __len__(self) -> int:
        return ROWS

    def __iter__(self):
        if not self.lazily:
            yield from self.draw(ROWS).tolist()
        for _ in range(ROWS if self.lazily else 0):
            yield int(np.random.randint(ROWS))


def mixed(rows: list) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch whose rows depend on each other, so that every rank loads it whole."""
    x, y = (torch.stack(column) for column in zip(*rows))
    return x + 0 * x.sum() if len(x) == BATCH else x + 1e-6 * len(x), y


def shuffled(seed: int, **options) -> DataLoader:
    return DataLoader(Rows(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(seed), **options)


LOADERS = {
    "in order": lambda seed: DataLoader(Rows(), BATCH),
    "shuffled by a generator": shuffled,
    "shuffled by the process": lambda seed: DataLoader(Rows(), BATCH, shuffle=True),
    "with workers": lambda seed: shuffled(seed, num_workers=1),
    "loaded whole": lambda seed: shuffled(seed, collate_fn=mixed),
    "a sampler of numpy": lambda seed: DataLoader(Rows(), BATCH, sampler=Shuffled()),
    "a sampler with epochs": lambda seed: DataLoader(Rows(), BATCH, sampler=DistributedSampler(Rows(), 1, 0)),
    "a stream": lambda seed: DataLoader(Stream(), BATCH),
    "a stream with workers": lambda seed: DataLoader(Stream(), BATCH, num_workers=1),
    "a list": lambda seed: [(torch.full((BATCH, 3), float(n)), torch.ones(BATCH).long()) for n in range(9)],
}
UNSEEDED = random.Random()
REFUSED = {
    "draws as it goes": (lambda: DataLoader(Rows(), BATCH, sampler=Shuffled(lazily=True)), "as it goes"),
    "another order": (
        lambda: DataLoader(
            Rows(), BATCH, sampler=Shuffled(draw=lambda n: torch.tensor(UNSEEDED.sample(range(n), n)))
        ),
        "another order",
    ),
    "a stream that draws as it goes": (lambda: DataLoader(Stream(lazily=True), BATCH), "as it goes"),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def plan_of_world():
    """A plan that deals out samples, of ``prepare`` itself."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Rows(), BATCH)
    own = prepare(
        model, optimizer, loader, loss=F.cross_entropy, profile_s=0, planner="ddp-even",
        cache=Path(os.environ[FOLDER], f"cache{dist_size()}"),
    )[2]  # fmt: skip
    return own._plan


def dist_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def seed(number: int) -> None:
    for draw in (torch.manual_seed, np.random.seed, random.seed):
        draw(number)


def rows_of(pieces: list[torch.Tensor]) -> list[list[float]]:
    """The global batches, as the first column of all ranks' rows."""
    return [torch.cat(batch)[:, 0].tolist() for batch in zip(*everyones(pieces))]


def steps(loader):
    """The samples of an epoch's batches, with a script that draws a number at every step."""
    for x, _ in loader:
        torch.rand(1)
        yield x.clone()


def epoch_of(loader, take: int | None = None) -> list[torch.Tensor]:
    """The samples of an epoch's batches, all or as many as are taken."""
    batches = iter(loader)
    return list(steps(batches)) if take is None else [next(batches)[0].clone() for _ in range(take)]


def through_file(state: dict) -> dict:
    """As ``torch.save`` and a safe ``torch.load`` give it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def save(name: str, plan) -> None:
    """Iterates for three epochs and keeps what was seen after the states that were saved in the second."""
    seed(5)
    has_epochs = name == "a sampler with epochs"
    loader = own_loader(LOADERS[name](7), plan)
    epoch_of(loader)
    if has_epochs:
        loader.set_epoch(1)
    rest, middle = [], None
    for number, x in enumerate(steps(loader), 1):
        if number == SEEN:
            middle, of_process = loader.state_dict(), torch.get_rng_state()
        if number > SEEN:
            rest.append(x)
    between, then = loader.state_dict(), torch.get_rng_state()
    if has_epochs:
        loader.set_epoch(2)
    last = epoch_of(loader)
    kept = {"middle": middle, "between": between, "of_process": of_process, "then": then}
    kept |= {"rest": rows_of(rest), "last": rows_of(last)}
    assert middle["epoch"] == 1 and middle["num_yielded"] == SEEN and len(kept["rest"]) == 9 - SEEN
    assert middle["samples_yielded"] == SEEN * BATCH and between["num_yielded"] == 0 and between["epoch"] == 2
    assert len({repr(each) for each in everyones(middle["digest"])}) == 1
    assert name in ("in order", "a list") or kept["rest"] != kept["last"][SEEN:]
    if dist.get_rank() == 0:
        torch.save(kept, Path(os.environ[FOLDER], name))
    dist.barrier()


def go_on(name: str, plan) -> None:
    """From each state, with a loader that would give another order by itself."""
    kept = torch.load(Path(os.environ[FOLDER], name), weights_only=True)
    has_epochs = name == "a sampler with epochs"
    # workers take long to start here, as a process with threads is not forked
    has_workers = name.endswith("workers")
    for state, of_process in (("middle", "of_process"), ("between", "then"))[: 1 if has_workers else 2]:
        seed(99)
        loader = own_loader(LOADERS[name](99), plan)
        # only the first rank's state counts
        loader.load_state_dict(kept[state] if dist.get_rank() == 0 else loader.state_dict())
        torch.set_rng_state(kept[of_process])  # a script's own
        if state == "middle":
            if has_epochs:
                with pytest.raises(InputError, match="in the middle of another epoch"):
                    (loader if dist.get_rank() == 0 else refusing(kept)).set_epoch(0)
                loader.set_epoch(1)
            rest = rows_of(epoch_of(loader))
            assert rest == kept["rest"], (rest, kept["rest"])
            assert loader.state_dict()["epoch"] == 2
        if has_epochs:
            loader.set_epoch(2)
        if (
            name != "a sampler of numpy" and not has_workers
        ):  # whose next order is of numpy's numbers, which scripts restore
            last = rows_of(epoch_of(loader))
            assert last == kept["last"], (state, last, kept["last"])


def refusing(kept: dict):
    """A loader without data that has loaded the state."""
    from mixmesh.training.preparation.own_loader import OwnLoader

    loader = OwnLoader([], [], None, is_whole=True)
    loader.load_state_dict(kept["middle"])
    return loader


def refuse(name: str, plan) -> None:
    make, why = REFUSED[name]
    seed(5)
    loader = own_loader(make(), plan)
    epoch_of(loader, SEEN)
    state = through_file(loader.state_dict())
    seed(5)
    loader = own_loader(make(), plan)
    loader.load_state_dict(state)
    with pytest.raises(InputError, match="cannot resume in the middle of an epoch") as caught:
        epoch_of(loader)
    assert why in str(caught.value) and "generator" in str(caught.value)


def check_fewer_batches(plan) -> None:
    seed(5)
    loader = own_loader(DataLoader(Stream(), BATCH), plan)
    epoch_of(loader, SEEN)
    state = loader.state_dict()
    loader = own_loader(DataLoader(Stream(rows=BATCH * 2), BATCH), plan)
    loader.load_state_dict(state)
    with pytest.raises(InputError, match="it has 2 batches, and 4 were given"):
        epoch_of(loader)


def check_an_epoch_that_was_left(plan) -> None:
    loader = own_loader(DataLoader(Rows(), BATCH), plan)
    epoch_of(loader, 2)
    assert len(epoch_of(loader)) == 9 and loader.state_dict()["epoch"] == 2
    with pytest.raises(InputError, match="not the state of a loader"):
        loader.load_state_dict({"epoch": 1})
    iterator = own_loader(iter(LOADERS["a list"](0)), plan)
    for refused in (iterator.state_dict, lambda: iterator.load_state_dict(loader.state_dict())):
        with pytest.raises(InputError, match="an iterator of batches cannot be resumed"):
            refused()


def check_a_look_is_no_epoch(plan) -> None:
    loader = own_loader(shuffled(7), plan)
    for _ in range(2):
        epoch_of(loader, 1)
    epoch_of(loader, SEEN)
    state = loader.state_dict()
    assert (state["epoch"], state["num_yielded"]) == (0, SEEN)
    assert len(epoch_of(loader)) == 9 and loader.state_dict()["epoch"] == 2  # the one that was left counts


def check_an_epoch_that_was_set_stays_when_it_is_left(plan) -> None:
    """As the sampler draws its order until another is set."""
    make = LOADERS["a sampler with epochs"]
    loader = own_loader(make(7), plan)
    loader.set_epoch(3)
    for taken in (1, 2):
        epoch_of(loader, taken)
    batches = iter(loader)
    for _ in range(SEEN):
        next(batches)
    state = through_file(loader.state_dict())
    rest = rows_of(list(steps(batches)))
    again = own_loader(make(7), plan)
    again.load_state_dict(state)
    assert state["epoch"] == 3 and rows_of(epoch_of(again)) == rest and len(rest) == 9 - SEEN


def check_a_look_after_a_state_was_loaded(plan) -> None:
    """What remained is given after it, also where the epoch is set between the two."""
    for name in ("shuffled by a generator", "a sampler with epochs", "a list"):
        seed(5)
        loader = own_loader(LOADERS[name](7), plan)
        epoch_of(loader)
        if name == "a sampler with epochs":
            loader.set_epoch(1)
        batches = iter(loader)
        for _ in range(SEEN):
            next(batches)
        state = through_file(loader.state_dict())
        rest = rows_of(list(steps(batches)))
        for looks in ([1], [0]):  # batches that are taken, or none
            again = own_loader(LOADERS[name](99), plan)
            again.load_state_dict(state)
            for taken in looks:
                epoch_of(again, taken)
            if name == "a sampler with epochs":
                with pytest.raises(InputError, match="in the middle of another epoch"):
                    again.set_epoch(0)
                again.set_epoch(1)
            assert rows_of(epoch_of(again)) == rest and len(rest) == 9 - SEEN
            assert again.state_dict()["epoch"] == 2 and len(epoch_of(again)) == 9


def check_a_batch_of_every_iteration_after_a_state_is_refused(plan) -> None:
    loader = own_loader(LOADERS["in order"](7), plan)
    epoch_of(loader, SEEN)
    loader.load_state_dict(loader.state_dict())
    for _ in range(2):
        epoch_of(loader, 1)
    with pytest.raises(InputError, match="left after their first batch") as caught:
        epoch_of(loader, 1)
    assert "before loader.load_state_dict(state)" in str(caught.value)


def check_two_epochs_of_one_set_epoch(plan) -> None:
    """Both have the order that was set, and a state in the second one goes on in it."""
    make = LOADERS["a sampler with epochs"]
    loader = own_loader(make(7), plan)
    loader.set_epoch(3)
    first = rows_of(epoch_of(loader))
    batches = iter(loader)
    assert rows_of([next(batches)[0].clone() for _ in range(SEEN)]) == first[:SEEN]
    state = through_file(loader.state_dict())
    again = own_loader(make(7), plan)
    again.load_state_dict(state)
    assert state["epoch"] == 4 and rows_of(epoch_of(again)) == first[SEEN:]
    again.set_epoch(4)
    assert rows_of(epoch_of(again)) != first and again.state_dict()["epoch"] == 5


def trained(state: dict | None) -> list[float]:
    """The losses of two epochs, with a file that is saved in the second one; or of what remains of them after
    such a file, as the guide has it."""
    seed(5 if state is None else 99)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = DataLoader(Rows(), BATCH, shuffle=True)
    model, optimizer, loader = prepare(
        model, optimizer, loader, loss=F.cross_entropy, profile_s=0, planner="ddp-even",
        cache=Path(os.environ[FOLDER], f"cache{dist_size()}"),
    )  # fmt: skip
    file, start_epoch, losses = Path(os.environ[FOLDER], "training.pt"), 0, []
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
        start_epoch = state["epoch"]
        torch.set_rng_state(state["numbers"])
    for epoch in range(start_epoch, 2):
        for step, (x, y) in enumerate(loader):
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if state is None and (epoch, step) == (1, SEEN - 1):
                numbers = torch.get_rng_state()
                parts = {"model": model, "optimizer": optimizer, "loader": loader}
                mixmesh.save(file, **parts, epoch=epoch, numbers=numbers)
    return losses


def train_and_save(_) -> None:
    losses = trained(None)
    if dist.get_rank() == 0:
        torch.save(losses, Path(os.environ[FOLDER], "losses.pt"))
    dist.barrier()
    train_on(_)


def train_on(_) -> None:
    state = torch.load(Path(os.environ[FOLDER], "training.pt"))
    losses = torch.load(Path(os.environ[FOLDER], "losses.pt"))
    rest = trained(state)
    assert len(losses) == 18 and len(rest) == 9 - SEEN
    torch.testing.assert_close(rest, losses[9 + SEEN :], rtol=1e-5, atol=1e-6)


class Saved:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, plan) -> None:
        save(self.name, plan)
        go_on(self.name, plan)


class Refused(Saved):
    def __call__(self, plan) -> None:
        refuse(self.name, plan)


class GoneOn(Saved):
    def __call__(self, plan) -> None:
        go_on(self.name, plan)


TWO = {name: Saved(name) for name in LOADERS} | {name: Refused(name) for name in REFUSED}
TWO |= {
    check.__name__: check
    for check in (
        check_fewer_batches,
        check_an_epoch_that_was_left,
        check_a_look_is_no_epoch,
        check_an_epoch_that_was_set_stays_when_it_is_left,
        check_a_look_after_a_state_was_loaded,
        check_a_batch_of_every_iteration_after_a_state_is_refused,
        check_two_epochs_of_one_set_epoch,
    )
}
TWO |= {"training": train_and_save}
THREE = {name: GoneOn(name) for name in LOADERS if name != "a stream with workers"} | {"training": train_on}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("states")))
        return run_world(2, TWO, plan_of_world), run_world(3, THREE, plan_of_world)


@pytest.mark.parametrize("name", TWO)
def test_two_ranks(results, name):
    assert_passed(results[0][name])


@pytest.mark.parametrize("name", THREE)
def test_three_ranks_go_on_where_two_stopped(results, name):
    assert_passed(results[1][name])
