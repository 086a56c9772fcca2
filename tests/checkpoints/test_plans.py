"""Checkpoints saved under one plan and gone on with under the same, another, or on one device."""

from __future__ import annotations

import math
import os
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed, run_world, shared_folder
from idioms.plans import PLANS, named, same_weights
from safetensors.torch import load_file, save_file
from test_gloo import Mlp, adamw, batch, build, close
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from mixmesh import checkpoint
from mixmesh.errors import InputError, PlanError
from mixmesh.runtime.comm import initialise
from mixmesh.runtime.first_rank import everyones
from mixmesh.runtime.parallel import load_full_optimizer_state_dict
from mixmesh.runtime.scaler import GradScaler
from mixmesh.runtime.shard_tensor import plain

WORLD = 3


def scheduler_of(optimizer):
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2, 2], gamma=0.5)


def train(model, optimizer, scheduler, steps) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(**batch(step))
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses


def make_sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def pieces(model, optimizer) -> dict[str, torch.Tensor]:
    """All values that this rank holds, and computes with."""
    held = {n: p for n, p in model.named_parameters() if plain(p).numel()}
    state = {f"{key} of {n}": v for n, p in held.items() for key, v in optimizer.state.get(p, {}).items()}
    return {name: plain(t).clone() for name, t in (model.state_dict() | state).items()}


def expect_equal(mine: dict[str, torch.Tensor], its: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == its.keys()
    for name, value in mine.items():
        assert torch.equal(value, its[name]), (name, value, its[name])


@contextmanager
def file_limit(size_bytes: int | None) -> Iterator[None]:
    """Within it this process may write no file beyond ``size_bytes``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size_bytes is None else size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def check_the_same_plan_goes_on_to_the_last_digit(_) -> None:
    for name in PLANS:
        folder = shared_folder()
        _, _, model, optimizer = build(name)
        scheduler = scheduler_of(optimizer)
        train(model, optimizer, scheduler, range(2))
        checkpoint.save(folder, step=2, model=model, optimizer=optimizer, scheduler=scheduler)
        expected = train(model, optimizer, scheduler, range(2, 5))
        _, _, other, resumed = build(name)
        again = scheduler_of(resumed)
        found = checkpoint.load(folder, model=other, optimizer=resumed, scheduler=again)
        assert found.step == 2
        assert train(other, resumed, again, range(2, 5)) == expected, name
        expect_equal(pieces(model, optimizer), pieces(other, resumed))


def train_scaled(model, optimizer, scheduler, scaler, steps) -> list[float]:
    """Steps of a loop with a GradScaler; in the one after next its scale is too large, and none is made."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(**batch(step))
        scaler.scale(loss).backward()
        if step == 1:
            for grad in [p.grad for p in model.parameters() if p.grad is not None][:1]:
                grad.mul_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses


def check_a_scaler_and_a_scheduler_go_on_to_the_last_digit(_) -> None:
    """The scale fell at an overflow and rises after two steps without one, which are counted across the
    stop."""
    make_scaler = partial(GradScaler, "cpu", init_scale=64.0, growth_interval=2)
    for name in PLANS:
        folder = shared_folder()
        _, _, model, optimizer = build(name)
        kept = scheduler_of(optimizer), make_scaler()
        train_scaled(model, optimizer, *kept, range(3))
        state = dict(scheduler=kept[0], scaler=kept[1])
        checkpoint.save(folder, step=3, model=model, optimizer=optimizer, **state)
        assert kept[1].get_scale() == 32.0, name
        expected = train_scaled(model, optimizer, *kept, range(3, 6))
        _, _, other, resumed = build(name)
        again = scheduler_of(resumed), make_scaler()
        checkpoint.load(folder, model=other, optimizer=resumed, scheduler=again[0], scaler=again[1])
        assert again[1].get_scale() == 32.0 and again[0].state_dict() != scheduler_of(resumed).state_dict()
        assert train_scaled(other, resumed, *again, range(3, 6)) == expected, name
        assert [s.state_dict() for s in again] == [s.state_dict() for s in kept]
        assert again[1].get_scale() == 128.0, name
        expect_equal(pieces(model, optimizer), pieces(other, resumed))


def check_another_plan_goes_on_alike(_) -> None:
    for saves, loads in zip(PLANS, PLANS[1:] + PLANS[:1]):
        for make in ({}, {"make": make_sgd}):
            folder = shared_folder()
            single, own, model, optimizer = build(saves, **make)
            schedulers = scheduler_of(own), scheduler_of(optimizer)
            train(single, own, schedulers[0], range(2))
            train(model, optimizer, schedulers[1], range(2))
            checkpoint.save(folder, step=2, model=model, optimizer=optimizer, scheduler=schedulers[1])
            _, _, other, resumed = build(loads, **make)
            train(other, resumed, scheduler_of(resumed), range(7, 8))  # what it has is replaced
            again = scheduler_of(resumed)
            checkpoint.load(folder, model=other, optimizer=resumed, scheduler=again)
            expected = train(single, own, schedulers[0], range(2, 5))
            got = train(other, resumed, again, range(2, 5))
            for one, two in zip(expected, got):
                assert abs(one - two) < 1e-9, (saves, loads)
            same_weights(single, other)


def check_a_whole_state_of_momentum_goes_on_under_every_plan(_) -> None:
    """Also where a rank holds some parameters and nothing of others."""
    for name in PLANS:
        single, own, model, optimizer = build(name, make=make_sgd)
        train(single, own, scheduler_of(own), range(2))
        model.load_full_state_dict(single.state_dict())
        load_full_optimizer_state_dict(model, optimizer, own.state_dict())
        losses = [train(m, o, scheduler_of(o), range(2, 4)) for m, o in ((single, own), (model, optimizer))]
        assert all(abs(one - two) < 1e-9 for one, two in zip(*losses)), name
        same_weights(single, model)


def check_weights_go_out_and_in_under_every_plan(_) -> None:
    for name, other_name in zip(PLANS, PLANS[1:] + PLANS[:1]):
        folder = shared_folder()
        _, _, model, optimizer = build(name)
        train(model, optimizer, scheduler_of(optimizer), range(1))
        checkpoint.save(folder / "run", step=1, model=model, optimizer=optimizer)
        whole = model.full_state_dict()
        if dist.get_rank() == 0:
            checkpoint.export(folder / "run", folder)
            expect_equal(load_file(folder / "model.safetensors"), whole)
            checkpoint.export(folder / "run", folder / "many", max_shard_bytes=200)
        dist.barrier()
        for place in (folder, folder / "model.safetensors", folder / "many"):
            _, _, other, other_optimizer = build(other_name)
            train(other, other_optimizer, scheduler_of(other_optimizer), range(7, 8))
            checkpoint.load_weights(other, place)
            expect_equal(other.full_state_dict(), whole)
        losses = [float(m.eval()(**batch(5)).detach()) for m in (model, other)]
        assert abs(losses[0] - losses[1]) < 1e-9, (name, other_name)


def check_ranks_that_cannot_read_the_same_weights_end_all(_) -> None:
    folder, rank = shared_folder(), dist.get_rank()
    single, _, model, _ = build("fsdp")
    before = model.full_state_dict()
    own = folder / f"{rank}.safetensors"
    with pytest.raises(InputError, match="cannot be read"):
        checkpoint.load_weights(model, own)
    # the last rank has a file of its own
    save_file({f"{name}{'x' * (rank // 2)}": x for name, x in single.state_dict().items()}, own)
    with pytest.raises(InputError, match="the ranks see different weights"):
        checkpoint.load_weights(model, own)
    if rank == 1:
        own.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        checkpoint.load_weights(model, own)
    expect_equal(model.full_state_dict(), before)


def check_a_loader_of_whole_batches_goes_on(_) -> None:
    """In the order of the first rank, whatever the others would draw."""
    rows = TensorDataset(torch.arange(11))
    torch.manual_seed(dist.get_rank())
    loader = checkpoint.resumable(DataLoader(rows, 2, shuffle=True))
    batches = iter(loader)
    seen = [next(batches)[0].tolist() for _ in range(3)]
    state = loader.state_dict()
    again = checkpoint.resumable(DataLoader(rows, 2, shuffle=True))
    again.load_state_dict(state)
    seen += [batch[0].tolist() for batch in again]
    assert sorted(sum(seen, [])) == [*range(11)] and everyones(seen) == (seen,) * WORLD


def check_what_one_device_saved_goes_on(_) -> None:
    """And is saved again for ``test_one_device_goes_on``."""
    single, own, model, optimizer = build("fsdp")
    checkpoint.load(Path(os.environ["OF_ONE_DEVICE"]), model=model, optimizer=optimizer)
    train(single, own, scheduler_of(own), range(2))
    for key, value in model.full_state_dict().items():
        assert torch.equal(value, single.state_dict()[key]), key
    got = train(model, optimizer, scheduler_of(optimizer), range(2, 3))
    expected = train(single, own, scheduler_of(own), range(2, 3))
    assert abs(got[0] - expected[0]) < 1e-9
    checkpoint.save(os.environ["OF_ALL"], step=3, model=model, optimizer=optimizer)
    with pytest.raises(InputError, match="of one parallel model"):
        checkpoint.load(os.environ["OF_ALL"], model=single, optimizer=own)
    with pytest.raises(InputError, match=r"model=m\.module, where m is the AveragedModel"):
        checkpoint.load(os.environ["OF_ALL"], model=AveragedModel(model))


def check_what_is_of_another_job_is_refused_and_changes_nothing(_) -> None:
    folder = shared_folder()
    _, _, model, optimizer = build("fsdp")
    train(model, optimizer, scheduler_of(optimizer), range(1))
    checkpoint.save(folder, step=1, model=model, optimizer=optimizer)
    _, _, other, resumed = build("tensor_parallel", make=make_sgd)
    before = pieces(other, resumed)
    with pytest.raises(PlanError, match="another optimizer"):
        checkpoint.load(folder, model=other, optimizer=resumed)
    with pytest.raises(PlanError, match="no scheduler"):
        checkpoint.load(folder, model=other, scheduler=scheduler_of(resumed))
    expect_equal(before, pieces(other, resumed))
    checkpoint.load(folder, model=other)
    close(other.full_state_dict()["fc1.weight"], model.full_state_dict()["fc1.weight"])


def check_a_rank_that_cannot_write_stops_nobody(_) -> None:
    """The file of one rank grows beyond what its process may write; then it may again."""
    folder = shared_folder()
    _, _, model, optimizer = build("fsdp")
    train(model, optimizer, scheduler_of(optimizer), range(1))
    first = checkpoint.save(folder, step=1, model=model, optimizer=optimizer)
    with file_limit(1000 if dist.get_rank() == 1 else None):
        assert checkpoint.save(folder, step=2, model=model, optimizer=optimizer) is None
    dist.barrier()
    assert sorted(os.listdir(folder)) == [first.name]
    train(model, optimizer, scheduler_of(optimizer), range(1, 2))
    third = checkpoint.save(folder, step=3, model=model, optimizer=optimizer, keep=1)
    dist.barrier()
    assert sorted(os.listdir(folder)) == [third.name]
    assert checkpoint.latest(folder) == third
    dist.barrier()


def check_ranks_that_do_not_share_the_folder_are_refused(_) -> None:
    """At the first save, whichever ranks have something to write."""
    folder = shared_folder()
    _, _, model, optimizer = build("fsdp")
    own = folder / f"at-{time.time()}"  # another name on each rank
    if dist.get_rank():
        own.mkdir()
    for save in (checkpoint.save, lambda *args, **kwargs: checkpoint.save_async(*args, **kwargs).result()):
        with pytest.raises(InputError, match="rank 1 does not see the folder") as refused:
            save(own, step=1, model=model, optimizer=optimizer)
        assert "a folder that all machines share" in str(refused.value)
    dist.barrier()
    assert not [path for path in folder.rglob("*") if path.is_file()]


def check_ranks_that_save_different_checkpoints_are_refused(_) -> None:
    """The others' pieces would be missing, or of another step."""
    folder, last = shared_folder(), bool(dist.get_rank())
    _, _, model, optimizer = build("fsdp")
    for different, said in (
        ({"step": 1 + last, "optimizer": optimizer}, "step 2, model, optimizer on"),
        ({"step": 1, "optimizer": None if last else optimizer}, "step 1, model on"),
    ):
        with pytest.raises(InputError, match="the ranks save different checkpoints") as refused:
            checkpoint.save(folder, model=model, **different)
        assert said in str(refused.value)
    dist.barrier()
    assert not checkpoint.latest(folder)


def check_a_folder_that_one_rank_loses_stops_nobody(_) -> None:
    """Once all ranks have seen the folder, a rank that no longer does has a fault of its file system."""
    folder = shared_folder()
    _, _, model, optimizer = build("fsdp")
    first = checkpoint.save(folder, step=1, model=model, optimizer=optimizer)
    seen = folder / "gone" if dist.get_rank() else folder
    assert checkpoint.save(seen, step=2, model=model, optimizer=optimizer) is None
    assert checkpoint.latest(folder) == first
    dist.barrier()


def check_saving_while_the_training_goes_on(_) -> None:
    """What is written is what was trained when it was begun."""
    for name, other in zip(PLANS, PLANS[1:] + PLANS[:1]):
        folder = shared_folder()
        single, own, model, optimizer = build(name)
        schedulers = scheduler_of(own), scheduler_of(optimizer)
        train(single, own, schedulers[0], range(2))
        train(model, optimizer, schedulers[1], range(2))
        first = checkpoint.save_async(folder, step=2, model=model, optimizer=optimizer)
        train(model, optimizer, schedulers[1], range(2, 4))
        second = checkpoint.save_async(folder, step=4, model=model, optimizer=optimizer)
        train(model, optimizer, schedulers[1], range(4, 5))
        assert (first.result().name, second.result().name) == ("000001-step-2", "000002-step-4")
        _, _, model, optimizer = build(other)
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "000002-step-4")
        dist.barrier()
        checkpoint.load(folder, model=model, optimizer=optimizer)
        same_weights(single, model)
        got = train(model, optimizer, scheduler_of(optimizer), range(2, 3))
        expected = train(single, own, scheduler_of(own), range(2, 3))
        assert abs(got[0] - expected[0]) < 1e-9


def check_a_failure_of_one_rank_in_the_background(_) -> None:
    """As of ``save``; and the next call waits for the one before."""
    folder = shared_folder()
    _, _, model, optimizer = build("fsdp")
    first = checkpoint.save_async(folder, step=1, model=model, optimizer=optimizer)
    assert checkpoint.load(folder, model=model, optimizer=optimizer).step == 1
    with file_limit(100 if dist.get_rank() == 1 else None):
        failing = checkpoint.save_async(folder, step=2, model=model, optimizer=optimizer)
        model(**batch(0)).backward()
        assert failing.result() is None
    third = checkpoint.save_async(folder, step=3, model=model, optimizer=optimizer)
    fourth = checkpoint.save(folder, step=4, model=model, optimizer=optimizer)
    dist.barrier()
    assert {p.name for p in folder.iterdir()} == {p.name for p in (first.result(), third.result(), fourth)}


def check_a_file_that_is_damaged_for_one_rank_is_passed_over_by_all(_) -> None:
    folder = shared_folder()
    _, _, model, optimizer = build("fsdp")
    checkpoint.save(folder, step=1, model=model, optimizer=optimizer)
    second = checkpoint.save(folder, step=2, model=model, optimizer=optimizer)
    if dist.get_rank() == 0:
        path = second / "rank-00001.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(bytes(data))
    dist.barrier()
    assert checkpoint.load(folder, model=model, optimizer=optimizer).step == 1
    if dist.get_rank() == 0:
        (folder / "000001-step-1" / "manifest.json").unlink()
    dist.barrier()
    with pytest.raises(InputError, match="no checkpoint can be resumed"):
        checkpoint.load(folder, model=model, optimizer=optimizer)
    assert checkpoint.load(folder / "none", model=model) is None


CHECKS = named(
    check_the_same_plan_goes_on_to_the_last_digit,
    check_a_scaler_and_a_scheduler_go_on_to_the_last_digit,
    check_another_plan_goes_on_alike,
    check_a_whole_state_of_momentum_goes_on_under_every_plan,
    check_weights_go_out_and_in_under_every_plan,
    check_ranks_that_cannot_read_the_same_weights_end_all,
    check_a_loader_of_whole_batches_goes_on,
    check_what_one_device_saved_goes_on,
    check_what_is_of_another_job_is_refused_and_changes_nothing,
    check_a_rank_that_cannot_write_stops_nobody,
    check_ranks_that_do_not_share_the_folder_are_refused,
    check_ranks_that_save_different_checkpoints_are_refused,
    check_a_folder_that_one_rank_loses_stops_nobody,
    check_saving_while_the_training_goes_on,
    check_a_failure_of_one_rank_in_the_background,
    check_a_file_that_is_damaged_for_one_rank_is_passed_over_by_all,
)


def join() -> None:
    initialise(WORLD, torch.device("cpu"), 60)


@pytest.fixture(scope="module")
def of_all(tmp_path_factory):
    """A folder into which a world saves that goes on with what this process has saved."""
    folders = {name: tmp_path_factory.mktemp(name.lower()) for name in ("OF_ONE_DEVICE", "OF_ALL")}
    os.environ.update({name: str(folder) for name, folder in folders.items()})
    model = Mlp(0)
    optimizer = adamw(model.parameters())
    train(model, optimizer, scheduler_of(optimizer), range(2))
    assert checkpoint.save(folders["OF_ONE_DEVICE"], step=2, model=model, optimizer=optimizer)
    return folders["OF_ALL"]


@pytest.fixture(scope="module")
def outcomes(of_all):
    return run_world(WORLD, CHECKS, join)


@pytest.mark.parametrize("name", CHECKS)
def test_plans(outcomes, name):
    assert_passed(outcomes[name])


def test_one_device_goes_on(outcomes, of_all):
    model, expected = Mlp(3), Mlp(0)
    resumed, own = adamw(model.parameters()), adamw(expected.parameters())
    train(expected, own, scheduler_of(own), range(2))
    train(expected, own, scheduler_of(own), range(2, 3))
    assert checkpoint.load(of_all, model=model, optimizer=resumed).step == 3
    losses = [train(m, o, scheduler_of(o), range(3, 5)) for m, o in ((model, resumed), (expected, own))]
    assert all(abs(one - two) < 1e-9 for one, two in zip(*losses))
