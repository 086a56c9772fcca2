"""ZeRO stages 0 to 3 between three unequal processes: training equals the single device's, and what a rank
holds of gradients and optimizer state is its share."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from gloo_world import assert_passed, run_world
from programs import make_plan
from torch import nn

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.errors import InputError, MixmeshError, PlanError, VerificationError
from mixmesh.frontend.job import Job
from mixmesh.frontend.trace import trace
from mixmesh.lang.check import check_plan, check_program
from mixmesh.lang.ir import parse_program, samples_of
from mixmesh.lang.plan_file import MicroBatch, Plan
from mixmesh.passes.zero import with_stage
from mixmesh.runtime.interpret import interpret
from mixmesh.runtime.parallel import (
    full_optimizer_state_dict,
    load_full_optimizer_state_dict,
    parallelize,
)
from mixmesh.runtime.random import RandomPolicy
from mixmesh.runtime.scaler import GradScaler
from mixmesh.runtime.shard_tensor import plain
from mixmesh.runtime.train import train
from mixmesh.search.baselines import data_parallel

WORLD, BATCH, TIME, VOCABULARY, WIDTH = 3, 12, 5, 11, 8
CLUSTER = """\
name = "three"
[[machine]]
devices = [{ cpu_share = 0.6 }, { cpu_share = 0.3, count = 2 }]
"""
UNEVEN = (0.5, 0.333333, 0.166667)  # 6, 4 and 2 samples
OWNERS = (0.2, 0.0, 0.8)


class Tied(nn.Module):
    """A small language model: the table is the head's weight too, some labels are ignored."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, dtype=dtype)
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=dtype)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=dtype)
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)
        self.head.weight = self.table.weight

    def forward(self, ids, labels):
        h = self.table(ids)
        h = h + self.scale * self.down(nn.functional.gelu(self.up(self.norm(h))))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten(), ignore_index=-100)


def model_of(seed: int = 0, dtype: torch.dtype = torch.float64) -> Tied:
    torch.manual_seed(seed)
    return Tied(dtype)


def batch(step: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (BATCH, TIME), generator=g)
    labels = ids.roll(-1, 1)
    labels[torch.rand(BATCH, TIME, generator=g) < 0.3] = -100
    return {"ids": ids, "labels": labels}


_traced: dict = {}


def data_parallel_program(dtype=torch.float64, ratio=UNEVEN):
    if (dtype, ratio) not in _traced:
        graph = trace(model_of(dtype=dtype), batch(0)).graph
        _traced[dtype, ratio] = data_parallel(graph, CostModel(Cluster.parse(CLUSTER)), ratio)
    return _traced[dtype, ratio]


def program_of(stage: int, dtype=torch.float64, ratio=UNEVEN, owners=OWNERS):
    return with_stage(data_parallel_program(dtype, ratio), stage, owners)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.05)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def close(a, b, what="", tolerance=1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}")


def same_gradients(single, model, tolerance=1e-9, factor=1.0) -> None:
    for name, p in model.named_parameters():
        whole = model._runtime.by_param[p].whole(
            torch.zeros_like(p) if p.grad is None else p.grad, model.comm
        )
        close(whole, single.get_parameter(name).grad * factor, name, tolerance)


def same_state(single, model, tolerance=1e-9) -> None:
    for name, value in model.full_state_dict().items():
        close(value, single.state_dict()[name], name, tolerance)


class Training:
    """Losses, gradients, the clipped norm and parameters of some steps. A class, since closures do not
    pickle."""

    def __init__(self, plan_of, make, dtype=torch.float64, clip=None) -> None:
        self.plan_of, self.make, self.dtype, self.clip = plan_of, make, dtype, clip

    def __call__(self, _) -> None:
        tolerance = 1e-9 if self.dtype == torch.float64 else 1e-4
        single, mine = model_of(0, self.dtype), model_of(0, self.dtype)
        optimizer = self.make(single.parameters())
        model, sharded = parallelize(
            mine, self.make(mine.parameters()), self.plan_of(), device="cpu", timeout_s=60
        )
        scheduler, same = (torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (optimizer, sharded))
        for step in range(3):
            expected, loss = single(**batch(step)), model(**batch(step))
            close(loss, expected, "loss", tolerance)
            expected.backward()
            loss.backward()
            same_gradients(single, model, tolerance)
            if self.clip is not None:
                norm = nn.utils.clip_grad_norm_(single.parameters(), self.clip)
                close(model.clip_grad_norm_(self.clip).double(), norm.double(), "norm", 1e-6)
            for o in (optimizer, sharded):
                o.step()
                o.zero_grad()
            scheduler.step()
            same.step()
            same_state(single, model, tolerance)
        with torch.no_grad():
            close(model(**batch(9)), single(**batch(9)), "evaluated", tolerance)


class Staged:
    """The program of a stage, or its plan with micro-batches, made where it is used: pickled by value."""

    def __init__(self, *args, micro_batches=None, **kwargs) -> None:
        self.args, self.kwargs, self.micro_batches = args, kwargs, micro_batches

    def __call__(self):
        program = program_of(*self.args, **self.kwargs)
        return program if self.micro_batches is None else accumulating(program, self.micro_batches)


def accumulating(program, micro_batches):
    rows = tuple(MicroBatch(*row) for row in micro_batches)
    return make_plan(program, Cluster.parse(CLUSTER), micro_batches=rows)


def held_elements(tensors) -> int:
    """Elements of distinct memories."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()) // 8


def check_held(_) -> None:
    """After a backward pass and a step, gradients and state are those of the owners' rows."""
    for stage in (0, 1, 2, 3):
        mine = model_of()
        model, optimizer = parallelize(
            mine, adamw(mine.parameters()), program_of(stage), device="cpu", timeout_s=60
        )
        model(**batch(0)).backward()
        used = [o.whole for o in model._runtime.owned.values()]
        gradients = [plain(p.grad) for p in (*model.parameters(), *used) if p.grad is not None]
        optimizer.step()
        state = [plain(t) for s in optimizer.state.values() for t in s.values() if t.ndim]
        whole = sum(p.numel() for p in model_of().parameters()) - 1  # the scale has no rows
        # rows of the table, of up, of down, of their biases and of the norm's two, as owned
        rank = model.comm.rank
        rows = [(2, 3, 2), (0, 0, 0), (9, 13, 6)][rank]
        own = rows[0] * 8 + rows[1] * 9 + rows[2] * 17 + 2 * rows[2]
        expected = own if stage else whole
        assert sum(g.numel() for g in gradients) == expected + 1, (stage, rank)
        assert held_elements(gradients) <= expected + 1 + WIDTH
        assert sum(t.numel() for t in state) == 2 * expected  # and the scale's, without dims


def check_held_between_micro_steps(_) -> None:
    """Stage 2 sums in every micro-batch if all take as many, and keeps no whole gradient between them."""
    for stage, micro_batches in ((1, COMMON), (2, COMMON), (2, DIFFERENT)):
        mine = model_of()
        plan = accumulating(program_of(stage), micro_batches)
        model, _ = parallelize(mine, None, plan, device="cpu", timeout_s=60)
        rank, in_step = model.comm.rank, stage == 2 and micro_batches == COMMON
        take, taken = model._runtime.reducer.take, []
        model._runtime.reducer.take = lambda take=take, taken=taken: taken.append(take()) or taken[-1]
        model(**batch(0))
        _, earlier = taken
        held = sum(g.numel() for _, g in earlier.gradients)
        whole = sum(p.numel() for p in model_of().parameters())
        own = sum(plain(p).numel() for p in model.parameters())
        micro_steps = plan.micro_batches[rank].steps
        assert held == (own if in_step else whole if micro_steps > 1 else 0), (stage, rank)


def check_pauses(_) -> None:
    """Gradients accumulated under no_sync, on top of sums, and of two losses at once."""
    for stage in (1, 2, 3):
        single, mine = model_of(), model_of()
        model, sharded = parallelize(
            mine, sgd(mine.parameters()), program_of(stage), device="cpu", timeout_s=60
        )
        for _again in range(2):
            for step in range(3):
                (single(**batch(step)) / 3).backward()
            with model.no_sync():
                (model(**batch(0)) / 3).backward()
                (model(**batch(1)) / 3).backward()
            (model(**batch(2)) / 3).backward()
            same_gradients(single, model)
        (single(**batch(7)) + single(**batch(8))).backward()
        (model(**batch(7)) + model(**batch(8))).backward()
        same_gradients(single, model)
        with model.no_sync():
            model(**batch(0)).backward()
        model.zero_grad()
        single.zero_grad(set_to_none=False)
        model(**batch(4)).backward()
        single(**batch(4)).backward()
        same_gradients(single, model)


def check_checkpoints(_) -> None:
    single, mine = model_of(), model_of()
    optimizer = adamw(single.parameters())
    model, sharded = parallelize(mine, adamw(mine.parameters()), program_of(2), device="cpu", timeout_s=60)
    for step in range(2):
        for m, o in ((single, optimizer), (model, sharded)):
            m(**batch(step)).backward()
            o.step()
            o.zero_grad()
    state, packed = model.full_state_dict(), full_optimizer_state_dict(model, sharded)
    for n, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            close(packed["state"][n][key], value, f"{n} {key}")
    local = copy.deepcopy(model.state_dict())
    for stage, owners in ((1, (0.6, 0.4, 0.0)), (3, OWNERS), (0, OWNERS)):
        other = model_of(1)
        resumed, stepper = parallelize(
            other, adamw(other.parameters()), program_of(stage, owners=owners), device="cpu"
        )
        resumed.load_full_state_dict(state)
        load_full_optimizer_state_dict(resumed, stepper, packed)
        twin = model_of(1)
        twin.load_state_dict(state)
        twin_optimizer = adamw(twin.parameters())
        twin_optimizer.load_state_dict(copy.deepcopy(packed))
        for m, o in ((resumed, stepper), (twin, twin_optimizer)):
            m(**batch(5)).backward()
            o.step()
        same_state(twin, resumed)
    other = model_of(2)
    again, _ = parallelize(other, None, program_of(2), device="cpu", timeout_s=60)
    again.load_state_dict(local)  # of this rank, under the same plan
    close(again(**batch(3)), single(**batch(3)))


def check_an_optimizer_made_later(_) -> None:
    """What steps the parameters need not be known: the forward pass fetches what was stepped."""
    single, mine = model_of(), model_of()
    model, _ = parallelize(mine, None, program_of(1), device="cpu", timeout_s=60)
    for o, m in ((sgd(single.parameters()), single), (sgd(model.parameters()), model)):
        for step in range(3):
            m(**batch(step)).backward()
            o.step()
            o.zero_grad()
    same_state(single, model)
    close(model(**batch(9)), single(**batch(9)))


class Awkward(nn.Module):
    """Dropout, positions that are no input, a penalty on a parameter, a buffer that counts, a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 8, dtype=torch.float64)
        self.places = nn.Embedding(TIME, 8, dtype=torch.float64)
        self.fc2 = nn.Linear(8, 4, dtype=torch.float64)
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))

    def forward(self, x, y):
        self.steps += 1
        places = torch.arange(TIME).expand(x.shape[0], TIME)
        h = nn.functional.dropout(self.fc1(x) + self.places(places), 0.5)
        return (self.fc2(h) - y).square().mean() + 0.01 * self.fc1.weight.square().sum()


def awkward() -> tuple[Awkward, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    shapes = {"x": (BATCH, TIME, 6), "y": (BATCH, TIME, 4)}
    return Awkward(), {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def check_awkward_models(_) -> None:
    """Numbers drawn exactly are the single device's in every micro-batch; what holds none counts once."""
    single, inputs = awkward()
    graph = trace(single, inputs).graph
    program = data_parallel(graph, CostModel(Cluster.parse(CLUSTER)), UNEVEN)
    for stage, micro_batches in ((0, DIFFERENT), (2, COMMON), (3, COMMON)):
        plan = accumulating(with_stage(program, stage, OWNERS), micro_batches)
        mine, _ = awkward()
        model, _ = parallelize(mine, None, plan, device="cpu", timeout_s=60, seed=3, random_exact=True)
        for step in (1, 2):
            random = RandomPolicy(3, exact=True)
            random.step = step
            single.zero_grad()
            tensors = {**dict(single.named_parameters()), **dict(single.named_buffers())}
            expected = interpret(program, tensors, inputs, random=random)
            expected.loss.backward()
            model.zero_grad()
            loss = model(**inputs)
            loss.backward()
            close(loss, expected.loss, "loss")
            same_gradients(single, model)
            assert model.full_state_dict()["steps"] == step
        sizes = set(plan.micro_batches[model.comm.rank].sizes)
        assert {size for _, _, size, _ in model._runtime.compiled} >= sizes
    mine, _ = awkward()
    model, _ = parallelize(mine, None, accumulating(program, DIFFERENT), device="cpu", timeout_s=60, seed=3)
    rank, drawn = model.comm.rank, []
    for step in (1, 1, 2):
        model._runtime.random.step = step - 1
        model.forward_local(**inputs)
        drawn.append(model(**inputs).item())
    assert drawn[0] == drawn[1] != drawn[2], rank


def check_train(_) -> None:
    """The plain loop and its recording take the same path."""
    single = model_of()
    optimizer = sgd(single.parameters())
    expected = []
    for _step in range(6):
        loss = single(**batch(0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for stage, micro_batches in ((1, DIFFERENT), (2, COMMON), (3, COMMON)):
        plan = accumulating(program_of(stage), micro_batches)
        job = Job(model_of(), batch(0), optimizer=sgd)
        report = train(job, plan, steps=6, device="cpu", timeout_s=60, record=True)
        close(torch.tensor(report.losses), torch.tensor(expected), "losses")
        names = {e.name for timeline in report.timelines for e in timeline.events}
        assert stage == 3 or {"parameters of down.bias +6", "gradients of down.bias +6"} <= names, names


def check_any_loop(_) -> None:
    """A loss that is scaled, passes under no_sync, evaluation, a loss that nobody differentiates."""
    single, mine = model_of(), model_of()
    plan = accumulating(program_of(1), DIFFERENT)
    model, _ = parallelize(mine, None, plan, device="cpu", timeout_s=60)
    for scale in (0.25, 8.0, 8.0):
        (single(**batch(1)) * scale).backward()
        (model(**batch(1)) * scale).backward()
    same_gradients(single, model)
    model(**batch(5))  # and is forgotten
    with torch.no_grad():
        close(model(**batch(2)), single(**batch(2)))
    with model.no_sync():
        (model(**batch(2)) / 2).backward()
    (model(**batch(3)) / 2).backward()
    ((single(**batch(2)) + single(**batch(3))) / 2).backward()
    same_gradients(single, model)
    local, total = model.forward_local(**batch(4))
    local.backward()
    expected = single(**batch(4))
    expected.backward()
    close(total.wait(), expected.detach())
    same_gradients(single, model)
    loss = model(**batch(6))
    loss.backward(retain_graph=True)
    with pytest.raises(MixmeshError, match="one backward pass"):
        loss.backward()


def check_scaler(_) -> None:
    """One rank's overflow is everybody's, for every stage, and by torch's scaler where something is cut."""
    scalers = [(0, GradScaler), *itertools.product((2, 3), (GradScaler, torch.amp.GradScaler))]
    for stage, kind in scalers:
        mine = model_of(dtype=torch.float32)
        model, optimizer = parallelize(
            mine, sgd(mine.parameters()), program_of(stage, torch.float32), device="cpu", timeout_s=60
        )
        scaler = kind("cpu", init_scale=4.0)
        before = model.full_state_dict()
        for overflows in (True, False):
            scaler.scale(model(**batch(0))).backward()
            table = model.get_parameter("table.weight")
            if overflows and model.comm.rank == 2:
                plain(table.grad)[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler.get_scale() == 2.0
            same = all(torch.equal(value, before[name]) for name, value in model.full_state_dict().items())
            assert same == overflows


def check_autocast(_) -> None:
    """Around the model it is refused; within, it is part of the program."""
    mine = model_of(dtype=torch.float32)
    model, _ = parallelize(mine, None, program_of(0, torch.float32), device="cpu", timeout_s=60)
    with torch.autocast("cpu"), pytest.raises(InputError, match="not called under the autocast"):
        model(**batch(0))
    x = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(0))
    for made, inputs in ((Mixed(), x), (Mixed().bfloat16(), x.bfloat16())):
        graph = trace(made, {"x": inputs}).graph
        assert any(t.dtype == "bf16" for t in graph.types.values())
        program = data_parallel(graph, CostModel(Cluster.parse(CLUSTER)), UNEVEN)
        for stage in (0, 2, 3):
            plan = accumulating(with_stage(program, stage, OWNERS), COMMON)
            model, _ = parallelize(copy.deepcopy(made), None, plan, device="cpu", timeout_s=60)
            loss = model(x=inputs)
            loss.backward()
            made.zero_grad()
            expected = made(inputs)
            expected.backward()
            close(loss, expected, "loss", 0.02)
            same_gradients(made, model, 0.05)


class Mixed(nn.Module):
    """Products in bf16, by autocast or because all is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2 = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            out = self.fc2(nn.functional.gelu(self.fc1(x)))
        return out.float().square().mean()


def check_refusals(_) -> None:
    mine = model_of()
    with pytest.raises(InputError, match="Adafactor may mix"):
        parallelize(mine, torch.optim.Adafactor(mine.parameters()), program_of(2), device="cpu", timeout_s=60)


DIFFERENT = ((4, 2, 2), (1, 4, 1), (2, 1, 2))
COMMON = ((2, 3, 2), (2, 3, 0), (1, 3, 0))
IDLE = ((3, 2, 3), (0, 0, 0), (5, 2, 1))
STAGES = {
    f"stage {stage} {make.__name__} {str(dtype)[6:]}": Training(
        Staged(stage, dtype), make, dtype, clip=0.3 if stage % 2 else None
    )
    for stage in range(4)
    for make, dtype in ((adamw, torch.float64), (sgd, torch.float64), (adamw, torch.float32))
}
ACCUMULATIONS = {
    f"accumulation, stage {stage} {make.__name__} {str(dtype)[6:]}": Training(
        Staged(stage, dtype, micro_batches=COMMON if stage == 3 else DIFFERENT), make, dtype, clip=0.3
    )
    for stage in range(4)
    for make, dtype in ((adamw, torch.float64), (sgd, torch.float64), (sgd, torch.float32))
}
CHECKS = {
    **STAGES,
    **ACCUMULATIONS,
    "accumulation in step, stage 2": Training(Staged(2, micro_batches=COMMON), adamw, clip=0.3),
    **{
        f"accumulation, stage {stage}, a rank without samples": Training(
            Staged(stage, ratio=(0.5, 0.0, 0.5), owners=(0.3, 0.0, 0.7), micro_batches=IDLE), sgd
        )
        for stage in range(4)
    },
    "stage 2, one owner": Training(Staged(2, owners=(0.0, 1.0, 0.0)), adamw, clip=0.3),
    "stage 3, a rank without samples": Training(
        Staged(3, ratio=(0.5, 0.0, 0.5), owners=(0.1, 0.6, 0.3)), sgd
    ),
    "stage 2, a rank without samples": Training(Staged(2, ratio=(0.5, 0.0, 0.5), owners=(0.3, 0, 0.7)), sgd),
}
CHECKS |= {
    f.__name__.removeprefix("check_"): f
    for f in (
        check_held,
        check_held_between_micro_steps,
        check_pauses,
        check_checkpoints,
        check_an_optimizer_made_later,
        check_awkward_models,
        check_train,
        check_any_loop,
        check_scaler,
        check_autocast,
        check_refusals,
    )
}


@pytest.fixture(scope="module")
def results():
    return run_world(WORLD, CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_between_processes(results, name):
    assert_passed(results[name])


@pytest.mark.parametrize("stage", range(4))
def test_stages_are_programs(stage):
    made = program_of(stage)
    assert parse_program(str(made)) == made
    check_program(made)
    assert with_stage(made, 0, OWNERS).instructions == data_parallel_program().instructions or stage == 3


def test_what_the_backward_pass_does_not_read_is_gathered_once():
    again = {i.result: i.attr("reshard") for i in program_of(3).instructions if i.op == "all_gather"}
    once = {name for name, reshard in again.items() if not reshard}
    assert once == {"up.bias", "down.bias"} and "table.weight" in again


def test_what_is_not_a_stage():
    for stage, owners, message in (
        (4, OWNERS, "no such ZeRO"),
        (1, (1.0,), "another number"),
        (2, (0, 0, 0), "no ratio"),
    ):
        with pytest.raises(InputError, match=message):
            with_stage(data_parallel_program(), stage, owners)
    left_out = data_parallel_program(ratio=(0.5, 0.0, 0.5))
    with pytest.raises(PlanError, match="rank 1 cannot own"):
        with_stage(left_out, 2, (0.5, 0.5, 0.0))


def test_micro_batches_are_in_the_file():
    plan = accumulating(program_of(1), DIFFERENT)
    again = Plan.parse(str(plan))
    assert again == plan and again.micro_batches[1].sizes == (1, 1, 1, 1)
    older = Plan.parse("\n".join(line for line in str(plan).split("\n") if "micro_batches" not in line))
    assert older.micro_batches is None
    with pytest.raises(PlanError, match="micro_batches"):
        Plan.parse(str(plan).replace("[4, 2, 2]", "[4, 2]"))
    with pytest.raises(PlanError, match="micro_batches"):
        Plan.parse(str(plan).replace("[4, 2, 2]", "4"))


@pytest.mark.parametrize(
    ("stage", "micro_batches", "message"),
    [
        (0, ((3, 2, 2), (1, 4, 1), (2, 1, 2)), "not the ranks' shares"),
        (0, ((2, 3, 2), (1, 3, 3), (2, 1, 2)), "not the ranks' shares"),
        (0, ((2, 3, 2), (1, 4, 1)), "not the ranks' shares"),
        (3, DIFFERENT, "meet in every micro-batch"),
    ],
)
def test_micro_batches_that_do_not_fit(stage, micro_batches, message):
    with pytest.raises(PlanError, match=message):
        check_plan(accumulating(program_of(stage), micro_batches))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.fc(x)).square().mean()


def test_batch_statistics_need_the_whole_batch():
    graph = trace(Normed(), {"x": torch.randn(BATCH, 6)}).graph
    program = data_parallel(graph, CostModel(Cluster.parse(CLUSTER)), UNEVEN)
    with pytest.raises(PlanError, match="micro-batches cannot run") as caught:
        samples_of(program)
    assert "test_zero_runtime.py" in str(caught.value) and "group norm" in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('owned="z"', 'owned="q"', "unknown ratio 'q'"),
        ("stage=2", "stage=3", "no such stage"),
        ('param("scale")', 'param("scale") {owned="z"}', "only a replicated parameter with dims"),
    ],
)
def test_bad_owners_are_found(old, new, message):
    text = str(program_of(2)).replace(old, new)
    with pytest.raises(VerificationError, match=message):
        check_program(parse_program(text))
