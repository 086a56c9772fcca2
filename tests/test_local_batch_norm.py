"""Batch norm whose statistics are each rank's own: that of PyTorch's DistributedDataParallel."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gloo_world import assert_passed, run_world
from small_graphs import THREE, cluster
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import mixmesh as mm
from mixmesh.__main__ import app
from mixmesh.cost import CostModel
from mixmesh.errors import InputError, PlanError, VerificationError
from mixmesh.frontend.trace import trace
from mixmesh.lang.check import check_program
from mixmesh.lang.ir import batch_norm_of, make_ratio, parse_program, samples_of
from mixmesh.lang.plan_file import Plan
from mixmesh.measure.verification import verify
from mixmesh.planner import make_plan
from mixmesh.planner.planners import BY_NAME
from mixmesh.planner.proposal import BASELINES
from mixmesh.runtime.interpret import interpret
from mixmesh.runtime.parallel import parallelize
from mixmesh.search.baselines import data_parallel

COSTS = CostModel(cluster(THREE))
UNEVEN = make_ratio([0.5, 0.3, 0.2])


class Net(nn.Module):
    """Two convolutions and a linear layer, each with batch norm, and a mean over the samples."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6, **options)
        self.second, self.norm2 = nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8, **options)
        self.head, self.norm3 = nn.Linear(8, 4), nn.BatchNorm1d(4, **options)

    def forward(self, x, y):
        x = self.norm1(self.first(x)).relu()
        x = self.norm2(self.second(x)).relu()
        return F.cross_entropy(self.norm3(self.head(x.mean((2, 3)))), y)


def images(samples: int = 20, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(samples, 3, 8, 8, dtype=torch.float64) + torch.arange(samples).view(-1, 1, 1, 1) / 4
    return {"x": x, "y": torch.arange(samples) % 4}


def net(**options) -> Net:
    torch.manual_seed(1)
    return Net(**options).double()


def local(ratio=UNEVEN, **options):
    traced = trace(net(**options), images(), batch_norm="local")
    return traced, data_parallel(traced.graph, COSTS, ratio)


CASES = {
    "uneven": (UNEVEN, {}),
    "rank 0 without samples": (make_ratio([0, 0.6, 0.4]), {}),
    "without parameters": (UNEVEN, {"affine": False}),
    "without running statistics": (UNEVEN, {"track_running_stats": False}),
    "means over all batches": (UNEVEN, {"momentum": None}),
}


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_one_device_that_normalises_every_ranks_samples_apart(name):
    ratio, options = CASES[name]
    traced, program = local(ratio, **options)
    report = verify(net(**options), images(), program, traced=traced, steps=2 if name == "uneven" else 1)
    assert report.ok and report.batch_norm == "local" and report.max_gradient_error_f64 < 1e-11


@pytest.mark.parametrize("ratio", [UNEVEN, make_ratio([1, 0, 0])], ids=str)
def test_the_numbers_are_those_of_the_single_device_on_one_rank_only(ratio):
    tensors = dict([*net().named_parameters(), *net().named_buffers()])
    exact = data_parallel(trace(net(), images()).graph, COSTS, ratio)
    losses = [interpret(p, tensors, images()).loss for p in (local(ratio)[1], exact)]
    assert torch.allclose(*losses, rtol=1e-9) == (ratio[0] == 1)


def test_statistics_of_other_samples_are_found_out(monkeypatch):
    """Held against another cut of the batch the same program is different. Without a trace, the model is
    traced as the program has it."""
    program = local()[1]
    assert verify(net(), images(), program).ok
    names = [i.results[0] for i in program.instructions if i.op == "mixmesh.local_batch_norm"]
    for wrong in ((8, 8, 4), (20,)):
        monkeypatch.setattr(
            "mixmesh.measure.verification.own_statistics.own_samples",
            lambda _, wrong=wrong: dict.fromkeys(names, wrong),
        )
        assert not verify(net(), images(), program).ok


def test_no_sum_is_between_ranks_in_the_forward_pass():
    program = local()[1]
    assert not [i for i in program.instructions if i.is_redistribution and i.op != "all_reduce"]
    sums = [i for i in program.instructions if i.op == "all_reduce"]
    made = {program.producers[i.inputs[0]].op for i in sums}
    assert "mixmesh.local_batch_norm" not in made and "mixmesh.moments" not in made


def test_the_plan_says_so_and_reads_back():
    made = mm.plan(net(), images(), cluster(THREE), planner="ddp-proportional", batch_norm="local")
    text = str(made)
    assert 'batch_norm = "local"' in text and "mixmesh.local_batch_norm(" in text
    assert Plan.parse(text) == made and made.batch_norm == "local"
    with pytest.raises(PlanError, match="whose statistics"):
        Plan.parse(text.replace('batch_norm = "local"', 'batch_norm = "exact"'))
    exact = mm.plan(net(), images(), cluster(THREE), planner="ddp-proportional")
    assert exact.batch_norm == "exact" and "batch_norm =" not in str(exact)
    assert made.predicted_step_s < exact.predicted_step_s


@pytest.mark.parametrize(
    "planner", ["auto", *(p for p in BY_NAME if p not in (*BASELINES, "heterog", "tag"))]
)
def test_every_planner_keeps_the_definition_or_says_why_not(planner):
    """What it plans is verified; what cannot be planned is an error with a hint."""
    traced = trace(net(), images(), batch_norm="local")
    try:
        plan = make_plan(traced, cluster(THREE), planner=planner, search_s=None if planner == "auto" else 0.5)
    except InputError as error:
        assert planner in ("two-level", "pipeline", "segments", "poplar") and error.hint
        return
    assert batch_norm_of(plan.program) == "local"
    assert verify(net(), images(), plan, traced=traced).ok


def test_a_rank_with_one_value_of_a_channel_is_refused():
    traced, program = local(make_ratio([0.5, 0.45, 0.05]))
    with pytest.raises(VerificationError, match="too few samples") as caught:
        check_program(program)
    assert "rank 2 has 1 of them" in str(caught.value)
    plan = make_plan(traced, cluster(THREE))
    check_program(plan.program)
    with pytest.raises(RuntimeError, match="more than one value"):
        torch.ops.mixmesh.local_batch_norm(torch.randn(1, 4), None, None, None, None, 0.1, 1e-5)


def test_micro_steps_are_refused():
    with pytest.raises(PlanError, match="all samples of a rank at once"):
        samples_of(local()[1])


def test_another_kind_is_refused(tmp_path):
    with pytest.raises(InputError, match="no batch norm 'global'"):
        mm.plan(net(), images(), cluster(THREE), batch_norm="global")
    path = tmp_path / "x.plan"
    mm.plan(net(), images(), cluster(THREE), planner="single").save(path)
    ran = CliRunner().invoke(app, ["run", "job.py", "--plan", str(path), "--batch-norm", "local"])
    assert ran.exit_code and "another kind of batch norm" in str(ran.output) + str(ran.exception)


STEPS = 4
SHARES = (10, 6, 4)


class LikeDdp:
    """Losses, parameters and rank 0's running statistics after steps of SGD are those of torch's own
    DistributedDataParallel, whose ranks scale their mean losses by their shares."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, _) -> None:
        program = parse_program(self.text)
        ours, sgd = net(), None
        sgd = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
        model, sgd = parallelize(ours, sgd, program, device="cpu", timeout_s=60)
        rank = dist.get_rank()
        torchs = DistributedDataParallel(net())
        torch_sgd = torch.optim.SGD(torchs.parameters(), lr=0.1, momentum=0.9)
        start = sum(SHARES[:rank])
        for step in range(STEPS):
            batch = images(seed=step)
            loss = model(**batch)
            loss.backward()
            sgd.step()
            sgd.zero_grad()
            mine = {name: x[start : start + SHARES[rank]] for name, x in batch.items()}
            share = torchs(**mine) * SHARES[rank] / sum(SHARES)
            (share * len(SHARES)).backward()  # DDP takes the mean over ranks
            torch_sgd.step()
            torch_sgd.zero_grad()
            total = share.detach().clone()
            dist.all_reduce(total)
            torch.testing.assert_close(loss.detach(), total, rtol=1e-6, atol=1e-9)
        state = model.full_state_dict()  # the same on all ranks
        wanted = torchs.module.state_dict()
        for name, value in wanted.items():
            dist.broadcast(value, src=0)
            torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-9, msg=name)
        del torchs, torch_sgd
        gc.collect()  # DistributedDataParallel holds process groups, which must go before the process does


class KeptOfTheFirst:
    """Where rank 0 holds no samples the running statistics of the next rank count, on all ranks."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, _) -> None:
        model, _ = parallelize(net(), None, parse_program(self.text), device="cpu", timeout_s=60)
        batch = images()
        model(**batch).backward()
        single = net()
        single(**{name: x[:12] for name, x in batch.items()})
        wanted = single.state_dict()
        for name, value in model.full_state_dict().items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-6, atol=1e-9, msg=name)


def test_processes_train_as_distributed_data_parallel_does():
    checks = {
        "like DDP": LikeDdp(str(local()[1])),
        "rank 0 without samples": KeptOfTheFirst(str(local(make_ratio([0, 0.6, 0.4]))[1])),
    }
    for failures in run_world(3, checks).values():
        assert_passed(failures)
