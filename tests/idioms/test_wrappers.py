"""S12: wrappers that would make a parallel model parallel once more, as Trainer and Accelerate do."""

from __future__ import annotations

import pytest
import torch
from gloo_world import assert_passed
from plans import PLANS, Mlp, batch, build, named, program
from torch import nn

from mixmesh.errors import InputError
from mixmesh.runtime.parallel import parallelize


def refused(use) -> None:
    with pytest.raises(InputError, match="parallel already") as caught:
        use()
    assert "leave the wrapper out" in str(caught.value)


def check_wrappers_are_refused(_) -> None:
    for name in PLANS:
        model = build(name)[2]
        refused(lambda m=model: nn.parallel.DistributedDataParallel(m))
        refused(lambda m=model: parallelize(m, None, program("fsdp"), device="cpu"))
        refused(lambda m=model: parallelize(nn.Sequential(m), None, program("fsdp"), device="cpu"))
        refused(lambda m=model: m._replicate_for_data_parallel())  # the first thing nn.DataParallel asks


def check_fully_shard_is_refused(_) -> None:
    from torch.distributed.fsdp import fully_shard

    for name in PLANS:
        original = Mlp(0)
        original.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
        model, _ = parallelize(original, None, program(name), device="cpu", timeout_s=20)
        with pytest.raises(InputError):
            fully_shard(model)
            model(**batch(0))


def check_accelerate_is_refused(_) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, optimizer = build("data_parallel")[2:]
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == 3
    refused(lambda: accelerator.prepare(model, optimizer))


def check_a_naive_trainer_is_refused(_) -> None:
    pytest.importorskip("accelerate")
    import tempfile

    import transformers

    model = build("data_parallel")[2]
    rows = [{k: v[n] for k, v in batch(0).items()} for n in range(12)]
    arguments = transformers.TrainingArguments(
        tempfile.mkdtemp(), use_cpu=True, report_to=[], max_steps=1, disable_tqdm=True
    )
    refused(lambda: transformers.Trainer(model, arguments, train_dataset=rows).train())


def _traced_call(model, x) -> None:
    """Calls the model while PyTorch traces, as ``torch.onnx.export(dynamo=False)`` does."""
    torch.jit.trace(lambda a: a * model(**x), torch.ones(()))


def check_tracing_and_exporting_are_refused(_) -> None:
    """Every way to record a model names itself, and the whole model, which can be recorded."""
    x = batch(0)
    ways = {
        "torch.jit.script": lambda m: torch.jit.script(m),
        "torch.jit.trace": lambda m: torch.jit.trace(m, example_kwarg_inputs=x),
        "torch.jit.trace, or": lambda m: _traced_call(m, x),
        "torch.export.export": lambda m: torch.export.export(m, (), x),
        "torch.fx.symbolic_trace": lambda m: torch.fx.symbolic_trace(m),
    }
    for name in ("data_parallel", "fsdp"):
        model = build(name)[2]
        for text, record in ways.items():
            with pytest.raises(InputError, match="cannot be traced or exported") as caught:
                record(model)
            assert text in str(caught.value) and "mixmesh.whole(model)" in str(caught.value)
        with model.whole() as whole:
            torch.export.export(whole, (), x)
            torch.jit.trace(whole, example_kwarg_inputs=x, check_trace=False)


IDIOMS = named(
    check_wrappers_are_refused, check_fully_shard_is_refused, check_tracing_and_exporting_are_refused
)
try:
    import accelerate  # noqa: F401

    IDIOMS |= named(check_accelerate_is_refused, check_a_naive_trainer_is_refused)
except ImportError:
    pass


@pytest.mark.parametrize("name", IDIOMS)
def test_wrappers(outcomes, name):
    assert_passed(outcomes[name])
