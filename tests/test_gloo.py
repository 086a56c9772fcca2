"""Training between real processes equals training in one: losses, gradients, optimizers, clipping,
accumulation, checkpoints; and failures that say where they happened."""

from __future__ import annotations

import copy
import datetime
import os
import time

import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed, run_world
from torch import nn

from mixmesh.errors import CollectiveError, InputError, MixmeshError, PlanError
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import parse_program
from mixmesh.runtime import collectives
from mixmesh.runtime.agreement import COMPARED_STEPS
from mixmesh.runtime.comm import Comm
from mixmesh.runtime.data import shard_batches
from mixmesh.runtime.interpret import interpret
from mixmesh.runtime.parallel import (
    full_optimizer_state_dict,
    load_full_optimizer_state_dict,
    parallelize,
)
from mixmesh.runtime.random import RandomPolicy
from mixmesh.runtime.reshard import Keeper

WORLD = 3
LATE_S = 9  # the time-out of 2 s, and the five in which others ask why: later it makes its next call
TAIL = """
  %d = aten.sub.Tensor(%o, %y) : f64[12, 4] S(0)@r0
  %s = aten.mul.Tensor(%d, %d) : f64[12, 4] S(0)@r0
  %loss = aten.mean(%s) : f64[] P(sum)@r0
  return %loss
}
"""
BATCH = """
  %x = input("x") : f64[12, 6] S(0)@r0
  %y = input("y") : f64[12, 4] S(0)@r0
"""
BODY = """
  %h = aten.linear(%x, %w1, %b1) : f64[12, 8] S(0)@r0
  %a = aten.gelu(%h) : f64[12, 8] S(0)@r0
  %o = aten.linear(%a, %w2, %b2) : f64[12, 4] S(0)@r0
"""


def stored(held: str, used: str = "", attrs: str = "", names=("w1", "b1", "w2", "b2")) -> str:
    """Parameters held one way and gathered to be used another."""
    module = {"w1": "fc1.weight", "b1": "fc1.bias", "w2": "fc2.weight", "b2": "fc2.bias"}
    shape = {"w1": "[8, 6]", "b1": "[8]", "w2": "[4, 8]", "b2": "[4]"}
    lines = []
    for n in names:
        kept = f"p_{n}" if used else n
        lines.append(f'  %{kept} = param("{module[n]}") : f64{shape[n]} {held}')
        if used:
            lines.append(f"  %{n} = all_gather(%{kept}) {attrs} : f64{shape[n]} {used}")
    return "\n".join(lines)


UNEVEN = "ratio r0 = [0.5, 0.333333, 0.166667]"
ZERO = "ratio r0 = [0.6, 0, 0.4]"
COUNT = """
  %n = buffer("count") : f64[] R
  %m = aten.add.Tensor(%n, 1.5) : f64[] R
  update("count", %m)
"""
PROGRAMS = {
    "data_parallel": f"{UNEVEN} {BATCH} {stored('R')} {COUNT} {BODY} {TAIL}",
    "data_parallel_buckets": f"""{UNEVEN} {BATCH}
      %w1 = param("fc1.weight") {{bucket=1}} : f64[8, 6] R
      %b1 = param("fc1.bias") {{bucket=1}} : f64[8] R
      %w2 = param("fc2.weight") {{bucket=0}} : f64[4, 8] R
      %b2 = param("fc2.bias") {{bucket=0}} : f64[4] R
      {BODY} {TAIL}""",
    "levels": f"""{UNEVEN} levels = [2, 1] from 100 {BATCH} {stored("R")} {COUNT} {BODY} {TAIL}""",
    "levels_in_buckets": f"""{UNEVEN} levels = [1, 2] from 0 {BATCH}
      %w1 = param("fc1.weight") {{bucket=1}} : f64[8, 6] R
      %b1 = param("fc1.bias") {{bucket=1}} : f64[8] R
      %w2 = param("fc2.weight") {{bucket=0}} : f64[4, 8] R
      %b2 = param("fc2.bias") {{bucket=2}} : f64[4] R
      {BODY} {TAIL}""",
    "levels_to_owners": f"""{UNEVEN} ratio z = [0.4, 0, 0.6] levels = [2, 1] from 0 {BATCH}
      %w1 = param("fc1.weight") {{bucket=1, owned="z", stage=1}} : f64[8, 6] R
      %b1 = param("fc1.bias") {{bucket=0}} : f64[8] R
      %w2 = param("fc2.weight") {{bucket=1, owned="z", stage=1}} : f64[4, 8] R
      %b2 = param("fc2.bias") {{bucket=2, owned="z", stage=1}} : f64[4] R
      {BODY} {TAIL}""",
    "zero_share": f"{ZERO} {BATCH} {stored('R@r0')} {COUNT} {BODY} {TAIL}",
    "zero_share_replica": f"{ZERO} {BATCH} {stored('R')} {BODY} {TAIL}",
    "fsdp": f"{UNEVEN} {BATCH} {stored('S(0)@r0', 'R')} {BODY} {TAIL}",
    "fsdp_other_ratio": f"""{UNEVEN} ratio m = [0.1, 0.2, 0.7] {BATCH}
      {stored("S(0)@m", "R@r0", '{algorithm="padded", gradient_algorithm="all_to_all"}')} {BODY} {TAIL}""",
    "parameter_server": f"{ZERO} ratio root = [0, 1, 0] {BATCH} {stored('S(0)@root', 'R')} {BODY} {TAIL}",
    "tensor_parallel": """ratio t = [0.5, 0.25, 0.25]
      %x = input("x") : f64[12, 6] R
      %y = input("y") : f64[12, 4] R
      %w1 = param("fc1.weight") : f64[8, 6] S(0)@t
      %b1 = param("fc1.bias") : f64[8] S(0)@t
      %w2 = param("fc2.weight") : f64[4, 8] S(1)@t
      %b2 = param("fc2.bias") : f64[4] R
      %h = aten.linear(%x, %w1, %b1) : f64[12, 8] S(1)@t
      %a = aten.gelu(%h) : f64[12, 8] S(1)@t
      %q = aten.linear(%a, %w2) : f64[12, 4] P(sum)@t
      %u = all_reduce(%q) : f64[12, 4] R
      %o = aten.add.Tensor(%u, %b2) : f64[12, 4] R
      %d = aten.sub.Tensor(%o, %y) : f64[12, 4] R
      %s = aten.mul.Tensor(%d, %d) : f64[12, 4] R
      %mean = aten.mean(%s) : f64[] R
      %loss = as_partial(%mean) : f64[] P(sum)
      return %loss
    }""",
    "gathered_early": f"""{UNEVEN} ratio m = [0.1, 0.2, 0.7] {BATCH}
      {stored("S(0)@m", "R", names=("w1", "b1", "w2"))} %b2 = param("fc2.bias") : f64[4] R
      {BODY} {TAIL}""",
    "fsdp_reshard": f"""{UNEVEN} ratio m = [0.1, 0, 0.9] {BATCH}
      {stored("S(0)@m", "R", "{reshard=true}")} {BODY} {TAIL}""",
    "sufficient_factors": f"""{UNEVEN} {BATCH} {stored("R")}
      %h = aten.linear(%x, %w1, %b1) {{sfb=true}} : f64[12, 8] S(0)@r0
      %a = aten.gelu(%h) : f64[12, 8] S(0)@r0
      %o = aten.linear(%a, %w2, %b2) {{sfb=true}} : f64[12, 4] S(0)@r0
      {TAIL}""",
    "one_stage_each": """ratio r0 = [0.25, 0.75, 0] ratio r1 = [0, 0, 1]
      %x = input("x") : f64[12, 6] S(0)@r0
      %y = input("y") : f64[12, 4] S(0)@r1
      %w1 = param("fc1.weight") : f64[8, 6] R@r0
      %b1 = param("fc1.bias") : f64[8] R@r0
      %w2 = param("fc2.weight") : f64[4, 8] R@r1
      %b2 = param("fc2.bias") : f64[4] R@r1
      %h = aten.linear(%x, %w1, %b1) : f64[12, 8] S(0)@r0
      %a = aten.gelu(%h) : f64[12, 8] S(0)@r0
      %v = move(%a) : f64[12, 8] S(0)@r1
      %o = aten.linear(%v, %w2, %b2) : f64[12, 4] S(0)@r1
      %d = aten.sub.Tensor(%o, %y) : f64[12, 4] S(0)@r1
      %s = aten.mul.Tensor(%d, %d) : f64[12, 4] S(0)@r1
      %loss = aten.mean(%s) : f64[] P(sum)@r1
      return %loss
    }""",
    "one_listens": f"ratio r0 = [0, 0.75, 0.25] {BATCH} {stored('R@r0')} {BODY} {TAIL}",
    "two_listen": f"ratio r0 = [0, 1, 0] {BATCH} {stored('R@r0')} {BODY} {TAIL}",
    "counted": f"""{UNEVEN} {BATCH} {stored("R")} {BODY}
      %d = aten.sub.Tensor(%o, %y) : f64[12, 4] S(0)@r0
      %s = aten.mul.Tensor(%d, %d) : f64[12, 4] S(0)@r0
      %ones = aten.ones_like(%y) : f64[12, 4] S(0)@r0
      %c = aten.sum(%ones) : f64[] P(sum)@r0
      %count = all_reduce(%c) : f64[] R
      %sum = aten.sum(%s) : f64[] P(sum)@r0
      %loss = aten.div.Tensor(%sum, %count) : f64[] P(sum)@r0
      return %loss
    }}""",
}


def program(name: str):
    return parse_program(f"program {name} world={WORLD} {{ {PROGRAMS[name]}")


class Mlp(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.fc1 = nn.Linear(6, 8, dtype=torch.float64)
        self.fc2 = nn.Linear(8, 4, dtype=torch.float64)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x, y):
        return (self.fc2(nn.functional.gelu(self.fc1(x))) - y).square().mean()


def batch(step: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(12, 6, generator=g, dtype=torch.float64),
        "y": torch.randn(12, 4, generator=g, dtype=torch.float64),
    }


def adamw(params):
    return torch.optim.AdamW(params, lr=0.05)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adafactor(params):
    return torch.optim.Adafactor(params, lr=0.1)


def build(name: str, make=adamw, **kwargs):
    """A single-device model with its optimizer, and the same in parallel."""
    single = Mlp(0)
    other = Mlp(int(os.environ["RANK"]))  # ranks must agree on rank 0's values by themselves
    made = make(other.parameters())
    model, optimizer = parallelize(other, made, program(name), device="cpu", timeout_s=20, **kwargs)
    return single, make(single.parameters()), model, optimizer


def close(a, b, what="") -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m: f"{what}: {m}")


def whole_gradients(model) -> dict[str, torch.Tensor]:
    """Gradients as the single device has them, checked to agree between replicas."""
    out = {}
    for name, p in model.named_parameters():
        s = model._runtime.by_param[p]
        assert p.grad is None or p.grad.shape == p.shape
        if name != "unused":
            out[name] = s.whole(torch.zeros_like(p) if p.grad is None else p.grad, model.comm)
    return out


def same_gradients(single, model, factor=1.0) -> None:
    for name, g in whole_gradients(model).items():
        close(g, single.get_parameter(name).grad * factor, name)


def check_training(name: str, make) -> None:
    single, optimizer, model, sharded = build(name, make)
    for step in range(3):
        expected = single(**batch(step))
        loss = model(**batch(step))
        close(loss, expected, "loss")
        expected.backward()
        loss.backward()
        same_gradients(single, model)
        optimizer.step()
        sharded.step()
        optimizer.zero_grad()
        sharded.zero_grad()
    state, reference = model.full_state_dict(), single.state_dict()
    assert list(state) == list(reference)
    for key in reference:
        if key != "count":
            close(state[key], reference[key], key)
    if "count" in PROGRAMS[name] and "update" in PROGRAMS[name]:
        assert state["count"] == 4.5
    with torch.no_grad():
        close(model(**batch(9)), single(**batch(9)))


def check_calls_are_counted_alike(_) -> None:
    """A rank that tells the others a loss makes no call more than they do: a watch compares their numbers."""
    for name in ("one_listens", "two_listen", "data_parallel"):
        _, _, model, _ = build(name)
        for step in range(3):
            model(**batch(step)).backward()
        numbers = [None] * WORLD
        dist.all_gather_object(numbers, model.comm.watch.number)
        assert len(set(numbers)) == 1, (name, numbers)


def check_names_and_sizes(_) -> None:
    _, _, model, optimizer = build("fsdp")
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in Mlp().named_parameters()]
    rank = model.comm.rank
    weight = model.get_parameter("fc1.weight")
    assert weight.to_local().shape == ([4, 3, 1][rank], 6) and weight.shape == (8, 6)
    assert model.get_parameter("unused").shape == (2,)
    assert optimizer.param_groups[0]["params"][1] is model.get_parameter("fc1.weight")
    assert "all_gather" not in model.source and "move" in model.source  # readable: one line a step
    _, _, model, _ = build("parameter_server")
    assert model.get_parameter("fc1.weight").to_local().numel() == (48 if rank == 1 else 0)


def check_local_inputs(_) -> None:
    single, _, model, _ = build("data_parallel")
    whole = batch(0)
    rank = model.comm.rank
    own = {k: v.split([6, 4, 2])[rank] for k, v in whole.items()}
    close(model(**own), single(**whole))
    close(model(whole["x"], own["y"]), single(**whole))
    with pytest.raises(InputError, match="neither a whole batch"):
        model(x=whole["x"][0], y=whole["y"])
    with pytest.raises(InputError, match="x and y are of batches of other sizes"):
        model(x=whole["x"][:11], y=whole["y"])
    with pytest.raises(InputError, match="no tensor 'y'"):
        model(x=whole["x"])
    with pytest.raises(InputError, match="another dtype"):
        model(x=whole["x"].float(), y=whole["y"])
    parts = list(shard_batches([whole], model.program, rank))
    assert torch.equal(parts[0]["x"], own["x"])
    (part,) = shard_batches([{k: v[:5] for k, v in whole.items()}], model.program, rank)
    assert torch.equal(part["x"], whole["x"][:5].split([2, 2, 1])[rank])


def check_reshard(_) -> None:
    """Nothing gathered is kept between the passes; each parameter is gathered once more."""
    gathers: list[tuple] = []
    original = collectives.all_gather

    def counted(channel, x, *args, **kwargs):
        gathers.append(tuple(x.shape))
        return original.start(channel, x, *args, **kwargs)

    collectives.all_gather = collectives.Collective(counted)
    try:
        _, _, model, _ = build("fsdp_reshard")
        saved: list[object] = []
        pack = Keeper._pack
        Keeper._pack = lambda self, x: saved.append(pack(self, x)) or saved[-1]
        loss = model(**batch(0))
        Keeper._pack = pack
        assert len(gathers) == 4
        weights = [s for s in saved if isinstance(s, tuple)]
        assert len(weights) == 1 and weights[0][0].handle is None  # the first layer saves none
        loss.backward()
        assert len(gathers) == 8
    finally:
        collectives.all_gather = original


def check_dropout(_) -> None:
    text = PROGRAMS["data_parallel"].replace("%h = aten.linear(%x", "%h = aten.linear(%e").replace(
        "%h =", "%e, _ = aten.native_dropout(%x, 0.5, true) : f64[12, 6] S(0)@r0, bool[12, 6] S(0)@r0\n %h ="
    )  # fmt: skip
    text = text.replace('update("count", %m)', "")  # an update is for training only
    dropping = parse_program(f"program dropping world=3 {{ {text}")
    model, _ = parallelize(Mlp(), None, dropping, device="cpu", seed=3, random_exact=True)
    losses = [model(**batch(0)).item() for _ in range(2)]
    for step, loss in enumerate(losses, start=1):
        random = RandomPolicy(3, exact=True)
        random.step = step
        tensors = {**dict(Mlp().named_parameters()), **dict(Mlp().named_buffers())}
        close(
            torch.tensor(loss).double(),
            interpret(dropping, tensors, batch(0), random=random).loss.float().double(),
        )
    assert losses[0] != losses[1]
    model.eval()
    close(model(**batch(0)), Mlp()(**batch(0)))
    updating, _ = parallelize(Mlp(), None, program("data_parallel"), device="cpu")
    updating.eval()
    close(updating(**batch(0)), Mlp()(**batch(0)))
    assert updating.full_state_dict()["count"] == 0


def check_clipping(_) -> None:
    for name in ("data_parallel", "fsdp", "tensor_parallel", "parameter_server", "one_stage_each"):
        for norm_type in (2.0, 1.0, float("inf")):
            single, _, model, _ = build(name)
            single(**batch(0)).backward()
            model(**batch(0)).backward()
            expected = nn.utils.clip_grad_norm_(single.parameters(), 0.1, norm_type)
            total = model.clip_grad_norm_(0.1, norm_type)
            close(total, expected, "norm")
            same_gradients(single, model)


def check_accumulation(_) -> None:
    for name in ("data_parallel", "fsdp", "zero_share_replica", "one_stage_each", "sufficient_factors"):
        single, _, model, sharded = build(name)
        for _again in range(2):
            for step in range(3):
                (single(**batch(step)) / 3).backward()
            with model.no_sync():
                (model(**batch(0)) / 3).backward()
                (model(**batch(1)) / 3).backward()
            (model(**batch(2)) / 3).backward()
            same_gradients(single, model)  # the second time on top of sums of the first
        for step in range(3):
            single(**batch(step)).backward()
            model(**batch(step)).backward()  # summed every time
        same_gradients(single, model)
        (single(**batch(7)) + single(**batch(8))).backward()
        (model(**batch(7)) + model(**batch(8))).backward()
        same_gradients(single, model)
        sharded.zero_grad(set_to_none=False)
        single.zero_grad()
        single(**batch(0)).backward()
        model(**batch(0)).backward()
        same_gradients(single, model)


def check_local_loss(_) -> None:
    single, _, model, _ = build("data_parallel")
    local, handle = model.forward_local(**batch(0))
    local.backward()
    expected = single(**batch(0))
    expected.backward()
    close(handle.wait(), expected.detach())
    same_gradients(single, model)


def check_checkpoints(_) -> None:
    single, optimizer, model, sharded = build("fsdp")
    for step in range(2):
        single(**batch(step)).backward()
        model(**batch(step)).backward()
        optimizer.step()
        sharded.step()
        optimizer.zero_grad()
        sharded.zero_grad()
    state, packed = model.full_state_dict(), full_optimizer_state_dict(model, sharded)
    with pytest.raises(InputError, match="has parameters that are none of this model's"):
        full_optimizer_state_dict(model, optimizer)
    assert full_optimizer_state_dict(single, optimizer)["state"].keys() == packed["state"].keys()
    assert bool(model.full_state_dict(rank0_only=True)) == (model.comm.rank == 0)
    reference = optimizer.state_dict()
    assert packed["state"].keys() == reference["state"].keys()
    for n, entries in reference["state"].items():
        for key, value in entries.items():
            close(packed["state"][n][key], value, f"{n} {key}")
    for name in ("tensor_parallel", "zero_share", "one_stage_each"):  # resumed under other programs
        _, _, other, resumed = build(name)
        other.load_full_state_dict(state)
        load_full_optimizer_state_dict(other, resumed, packed)
        other(**batch(5)).backward()
        resumed.step()
        twin = Mlp(1)
        twin.load_state_dict(state)
        twin_optimizer = adamw(twin.parameters())
        twin_optimizer.load_state_dict(copy.deepcopy(packed))
        twin(**batch(5)).backward()
        twin_optimizer.step()
        for key, value in other.full_state_dict().items():
            if key != "count":
                close(value, twin.state_dict()[key], f"{name} {key}")
    with pytest.raises(PlanError, match="not of this model"):
        model.load_full_state_dict({"fc1.weight": torch.zeros(1)})


def check_a_warm_optimizer(_) -> None:
    """State that exists before parallelize is cut like its parameter; schedulers stay attached."""
    single = Mlp(0)
    optimizer = sgd(single.parameters())
    single(**batch(0)).backward()
    optimizer.step()
    warm = Mlp(0)
    warm_optimizer = sgd(warm.parameters())
    warm(**batch(0)).backward()
    warm_optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(warm_optimizer, 1, 0.5)
    model, same = parallelize(warm, warm_optimizer, program("fsdp"), device="cpu")
    assert same is warm_optimizer
    optimizer.zero_grad()
    single(**batch(1)).backward()
    model(**batch(1)).backward()
    optimizer.step()
    same.step()
    scheduler.step()
    assert same.param_groups[0]["lr"] == 0.05
    for key, value in model.full_state_dict().items():
        close(value, single.state_dict()[key], key)


def check_state_of_an_optimizer_of_whole_parameters(_) -> None:
    """It is where the parameters are, and is given to all ranks, and taken from a single device."""
    for name in ("zero_share", "parameter_server"):
        single, optimizer, model, mine = build(name, adafactor)
        for step in range(3):
            for m, o in ((single, optimizer), (model, mine)):
                m(**batch(step)).backward()
                o.step()
                o.zero_grad()
            packed = full_optimizer_state_dict(model, mine)
            for n, state in optimizer.state_dict()["state"].items():
                for key, value in state.items():
                    close(packed["state"][n][key], value, f"{name}, step {step}: {key} of {n}")
            load_full_optimizer_state_dict(model, mine, (packed, optimizer.state_dict())[step % 2])
        for key, value in model.full_state_dict().items():
            if key != "count":
                close(value, single.state_dict()[key], f"{name}: {key}")


class Scaled(nn.Module):
    """A parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, x):
        return (x * self.scale).square().mean()


def check_state_of_a_parameter_without_dims(_) -> None:
    """Ranks that hold nothing of it have a state of nothing, from the start (Adagrad) and out of a
    checkpoint."""
    text = """program scaled world=3 {
      ratio r0 = [0, 0.5, 0.5]
      %x = input("x") : f64[12, 6] S(0)@r0
      %w = param("scale") : f64[] R@r0
      %y = aten.mul.Tensor(%x, %w) : f64[12, 6] S(0)@r0
      %s = aten.square(%y) : f64[12, 6] S(0)@r0
      %loss = aten.mean(%s) : f64[] P(sum)@r0
      return %loss
    }"""
    for make in (torch.optim.Adagrad, torch.optim.AdamW, torch.optim.NAdam, torch.optim.ASGD):
        single, other = Scaled(), Scaled()
        optimizer = make(single.parameters(), lr=0.1)
        model, mine = parallelize(
            other, make(other.parameters(), lr=0.1), parse_program(text), device="cpu", timeout_s=20
        )
        for n in range(4):
            if n == 2:
                packed = full_optimizer_state_dict(model, mine)
                load_full_optimizer_state_dict(model, mine, packed)
            if n == 3:
                mine.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            for m, o in ((single, optimizer), (model, mine)):
                m(x=batch(n)["x"]).backward()
                o.step()
                o.zero_grad()
            close(model.full_state_dict()["scale"], single.scale.detach(), f"{make.__name__}, step {n}")


def check_nobody_waits_for_ranks_that_compute_nothing(_) -> None:
    """Rank 0 begins its last step when the others have ended theirs. It has the same losses."""
    assert program("one_listens").working_ranks == (1, 2)
    single, optimizer, model, mine = build("one_listens")
    store, last = dist.distributed_c10d._get_default_store(), COMPARED_STEPS + 2
    for n in range(last + 1):
        if n == last and model.comm.rank == 0:
            store.wait(["stepped without rank 0"], datetime.timedelta(seconds=20))
        expected, loss = single(**batch(n)), model(**batch(n))
        for value, o in ((expected, optimizer), (loss, mine)):
            value.backward()
            o.step()
            o.zero_grad()
        if n == last and model.comm.rank == 1:
            store.set("stepped without rank 0", "")
        close(loss, expected, f"step {n}")
    for name, value in model.full_state_dict().items():
        if name != "count":
            close(value, single.state_dict()[name], name)


class Gained(Mlp):
    gain = 1.0

    def forward(self, x, y):
        return super().forward(self.gain * x, y)


def check_a_changed_number_is_refused_where_the_first_rank_has_no_work(_) -> None:
    """It alone knows what was read, and the others do not wait for it."""
    for name in ("data_parallel", "one_listens"):
        model = Gained(0)
        if os.environ["RANK"] == "0":
            trace(model, batch(0))
        planned, _ = parallelize(model, None, program(name), device="cpu", timeout_s=20)
        forms = planned._runtime.forms
        assert forms._values() == 0
        model.gain = 2.0
        if os.environ["RANK"] != "0":
            assert forms._values() == 0
        elif name == "data_parallel":
            assert forms._values()
        else:
            with pytest.raises(InputError, match="gain has changed since the model was traced") as caught:
                forms._values()
            assert "2.0, was 1.0" in str(caught.value)


def check_refusals(_) -> None:
    with pytest.raises(InputError, match="LBFGS"):
        build("data_parallel", lambda p: torch.optim.LBFGS(p))
    with pytest.raises(InputError, match="Adafactor may mix"):
        build("fsdp", lambda p: torch.optim.Adafactor(p))
    build("data_parallel", lambda p: torch.optim.Adafactor(p))
    with pytest.raises(InputError, match="Adafactor may mix.* held by some ranks alone") as caught:
        build("one_stage_each", lambda p: torch.optim.Adafactor(p))
    assert "fc1.weight" in caught.value.got and "ddp-proportional" in caught.value.hint[0]
    other = Mlp()
    other.fc1 = nn.Linear(6, 9, dtype=torch.float64)
    other.fc2 = nn.Linear(9, 4)
    with pytest.raises(PlanError) as caught:
        parallelize(other, None, program("fsdp"), device="cpu")
    assert "fc1.weight f64[8, 6]" in str(caught.value) and "f64[9, 6]" in str(caught.value)
    two = parse_program(str(program("one_stage_each")).replace("world=3", "world=2").replace(
        "[0.25, 0.75, 0]", "[0.25, 0.75]").replace("[0, 0, 1]", "[0, 1]"))  # fmt: skip
    with pytest.raises(PlanError, match="another number of ranks"):
        parallelize(Mlp(), None, two, device="cpu")
    text = PROGRAMS["data_parallel"].replace("aten.sub.Tensor(%o, %y)", "aten.sub.Tensor(%o, %x)")
    broken = parse_program(f"program broken world=3 {{ {text}")
    model, _ = parallelize(Mlp(), None, broken, device="cpu")
    with pytest.raises(MixmeshError, match="aten.sub.Tensor failed") as caught:
        model(**batch(0))
    assert "%d = aten.sub.Tensor" in str(caught.value) and "local inputs" in str(caught.value)


class Training:
    """A check that pickles, unlike a closure."""

    def __init__(self, name, make) -> None:
        self.name, self.make = name, make

    def __call__(self, _) -> None:
        check_training(self.name, self.make)


CHECKS = {
    f"training {name} {make.__name__}": Training(name, make) for name in PROGRAMS for make in (adamw, sgd)
}
# which ranks that hold everything step whole, while the others hold nothing
CHECKS |= {
    f"training {name} adafactor": Training(name, adafactor)
    for name in ("data_parallel", "zero_share", "parameter_server")
}
CHECKS |= {
    f.__name__.removeprefix("check_"): f
    for f in (
        check_names_and_sizes,
        check_local_inputs,
        check_reshard,
        check_dropout,
        check_clipping,
        check_accumulation,
        check_local_loss,
        check_checkpoints,
        check_a_warm_optimizer,
        check_state_of_an_optimizer_of_whole_parameters,
        check_state_of_a_parameter_without_dims,
        check_nobody_waits_for_ranks_that_compute_nothing,
        check_calls_are_counted_alike,
        check_a_changed_number_is_refused_where_the_first_rank_has_no_work,
        check_refusals,
    )
}


@pytest.fixture(scope="module")
def results():
    return run_world(WORLD, CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_between_processes(results, name):
    assert_passed(results[name])


def fails_when_a_rank_never_calls(_) -> None:
    model, _ = parallelize(Mlp(), None, program("fsdp"), device="cpu", timeout_s=2)
    for _ in range(COMPARED_STEPS + 1):  # from then on nothing but collectives finds out
        model(**batch(0)).backward()
    rank = model.comm.rank
    if rank == 2:  # it agrees on the batch, and then is late
        with model.comm.call("train forward"):
            model._runtime.forms.agreement.shapes(batch(0), evaluates=False, modes=model.modes)
            time.sleep(LATE_S)
        return
    started = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        model(**batch(0)).backward()
    assert time.monotonic() - started < 10
    message = str(caught.value)
    assert "%w1 = all_gather(%p_w1)" in message
    is_own = f"rank {rank}: all_gather" in message and ("timed out" in message or "lost a peer" in message)
    # once the late one has left its call, it is known to have come to no other
    assert is_own or "rank 2 has not come within 2 s" in message, message


def fails_in_sends_and_receives(_) -> None:
    collectives.PAIRWISE_BYTES = 0  # this process ends with the test
    fails_when_a_rank_never_calls(_)


def waits_for_gradients(rank: int, late: int) -> str:
    """A pattern of the error on ``rank``, which is about itself, or names the rank that is ``late``."""
    named = f"rank {late} has not come within 2 s, and the others wait for it in"
    return f"(rank {rank}:|{named}) all_reduce of gradients"


def fails_in_the_backward_pass(_) -> None:
    model, _ = parallelize(Mlp(), None, program("data_parallel"), device="cpu", timeout_s=2)
    for _ in range(COMPARED_STEPS + 1):  # in the first steps, ranks meet at the beginning of a backward pass
        model(**batch(0)).backward()
    loss = model(**batch(0))
    if model.comm.rank == 0:
        time.sleep(LATE_S)
        return
    with pytest.raises(CollectiveError, match=waits_for_gradients(model.comm.rank, 0)):
        loss.backward()


def fails_by_levels(_) -> None:
    model, _ = parallelize(Mlp(), None, program("levels"), device="cpu", timeout_s=2)
    for _ in range(COMPARED_STEPS + 1):
        model(**batch(0)).backward()
    loss = model(**batch(0))
    if model.comm.rank == 1:
        time.sleep(LATE_S)
        return
    with pytest.raises(CollectiveError, match=waits_for_gradients(model.comm.rank, 1)):
        loss.backward()


def test_a_rank_that_never_calls_is_an_error_with_a_place():
    failing = (fails_when_a_rank_never_calls, fails_in_the_backward_pass, fails_by_levels)
    for check in failing:  # a world each: ranks that made other calls do not come together again
        for failures in run_world(WORLD, {check.__name__: check}).values():
            assert_passed(failures)
    for failures in run_world(WORLD, {"sends and receives": fails_in_sends_and_receives}).values():
        assert_passed(failures)


def test_without_a_launcher_the_error_says_how_to_start(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match="without a launcher") as caught:
        Comm.create(program("fsdp"), device="cpu")
    assert "torchrun --nproc-per-node 3" in str(caught.value)
