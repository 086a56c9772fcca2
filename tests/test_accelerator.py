"""Devices: what is PyTorch's own for a kind of device stands in one module for each concern, and the part
that every kind has alike runs here on the CPU."""

from __future__ import annotations

import ast
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

import mixmesh
from mixmesh.checkpoint.random_state import set_device_state
from mixmesh.frontend.trace.capture import beside
from mixmesh.runtime import accelerator, device_random, streams, versions
from mixmesh.runtime.comm import backend_for
from mixmesh.runtime.messages import meet

ROOT = Path(mixmesh.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
CPU = torch.device("cpu")
KINDS = ("cuda", "xpu", "mps", "mtia", "hpu")
# a concern's module -> the names of PyTorch that stand in it alone
CONCERNS = {
    "runtime/accelerator.py": {
        "torch.accelerator", "torch.get_device_module", *(f"torch.{kind}" for kind in KINDS),
    },
    "runtime/streams.py": {
        "torch.accelerator", "torch.Stream", "torch.Event", "record_stream", "pin_memory", "non_blocking",
    },
    "runtime/device_random.py": {"torch.accelerator", "torch.get_device_module"},
    "frontend/trace/autocast.py": {"torch.accelerator", "torch.autocast"},
    "frontend/job/optimizers.py": {"_get_fused_kernels_supported_devices"},
}  # fmt: skip
CONFINED = set().union(*CONCERNS.values())
# where a type of device is compared with a name: the kernels of PyTorch that only CUDA has
BY_NAME = {"runtime/accelerator.py"}
OWN_KERNELS = {"lang/operators/norms.py", "lang/operators/losses.py"}
# the name of a backend in a profile, which may have been measured elsewhere
IN_FILES = {"cost/collectives.py"}


def confined_names(path: Path) -> set[tuple[str, int]]:
    """The confined names that a file reads, with their lines."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr=attr):
                names.add((f"torch.{attr}", node.lineno))
            case ast.Attribute(attr=attr):
                names.add((attr, node.lineno))
            case ast.ImportFrom(module=module, names=aliases):
                names.update((f"{module}.{a.name}", node.lineno) for a in aliases)
                names.update((a.name, node.lineno) for a in aliases)
            case ast.keyword(arg="non_blocking"):
                names.add(("non_blocking", node.value.lineno))
    return {(name, line) for name, line in names if name in CONFINED}


def test_a_concern_of_devices_has_one_module():
    elsewhere = {
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in FILES
        for name, line in confined_names(path)
        if name not in CONCERNS.get(str(path.relative_to(ROOT)), ())
    }
    assert not elsewhere, f"{sorted(elsewhere)} belong into one of {', '.join(CONCERNS)}"


def test_confined_names_are_seen(tmp_path):
    """Each way of writing them, so that the test above can fail."""
    file = tmp_path / "x.py"
    file.write_text(
        "import torch\nfrom torch import cuda\ntorch.cuda.synchronize()\ns = torch.Stream()\n"
        "x.record_stream(s)\nx.to(d, non_blocking=True)\ntorch.get_device_module()\n"
    )
    assert confined_names(file) == {
        ("torch.cuda", 2), ("torch.cuda", 3), ("torch.Stream", 4), ("record_stream", 5), ("non_blocking", 6),
        ("torch.get_device_module", 7),
    }  # fmt: skip


def test_no_kind_of_device_is_asked_for_by_name():
    """``device.type == "cuda"`` leaves out the devices of others; so does a comparison with ``"nccl"``."""
    asked = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                sides = [n.value for n in (node.left, *node.comparators) if isinstance(n, ast.Constant)]
                if {*KINDS, "nccl", "xccl"}.intersection(map(str, sides)):
                    asked.add(str(path.relative_to(ROOT)))
            if isinstance(node, ast.Attribute) and node.attr == "is_cuda":
                asked.add(str(path.relative_to(ROOT)))
    assert asked == BY_NAME | OWN_KERNELS | IN_FILES


def test_a_group_without_a_named_backend_has_that_of_the_device(monkeypatch):
    """As the Trainer and Accelerate make it on a machine with only CPUs."""
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.get_backend() == accelerator.UNNAMED_BACKEND
        monkeypatch.setattr(accelerator, "accelerator_type", lambda: None)
        assert accelerator.backend_of() == "gloo" and not accelerator.is_on_device()
        meet()
        monkeypatch.setattr(accelerator, "accelerator_type", lambda: "cuda")
        assert accelerator.backend_of() == "nccl" and accelerator.is_on_device()
    finally:
        dist.destroy_process_group()


def test_the_device_of_a_process(monkeypatch):
    """A machine's accelerator counts if collectives have a backend for it."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    for kind, device, backend in (
        ("cuda", "cuda:1", "nccl"),
        ("xpu", "xpu:1", "xccl"),
        ("mps", "cpu", "gloo"),
    ):
        accelerator.accelerator_type.cache_clear()
        monkeypatch.setattr(
            torch.accelerator,
            "current_accelerator",
            lambda check_available=False, kind=kind: torch.device(kind),
        )
        local = accelerator.local_device()
        assert local == torch.device(device)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert backend_for(local) == backend
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # two processes share a device
        assert backend_for(local) == "gloo"
    monkeypatch.undo()
    accelerator.accelerator_type.cache_clear()


def test_numbers_of_a_device_go_on():
    """The state of a generator is that of the next numbers, and a seeded block leaves none of its own."""
    state = device_random.generator_state(CPU)
    first = torch.rand(3)
    with device_random.seeded(CPU, 7):
        seeded = torch.rand(3)
    second = torch.rand(3)
    device_random.set_generator_state(CPU, state)
    assert torch.equal(torch.rand(3), first) and torch.equal(torch.rand(3), second)
    assert torch.equal(seeded, torch.rand(3, generator=torch.Generator().manual_seed(7)))
    if not torch.accelerator.is_available():
        assert device_random.drawing_device() is None


def test_numbers_in_checkpoints_are_of_a_type_of_device(monkeypatch):
    """Those of another type are left alone; checkpoints of before held CUDA's, by that name."""
    calls = []
    monkeypatch.setattr(
        "mixmesh.checkpoint.random_state.set_generator_state", lambda *given: calls.append(given)
    )
    state, device = torch.arange(4, dtype=torch.uint8), torch.device("cuda", 1)
    set_device_state(device, {"device": ("cuda", state)})
    set_device_state(device, {"cuda": state})
    assert calls == [(device, state)] * 2
    set_device_state(device, {"device": ("xpu", state)})
    set_device_state(device, {"cuda": None})
    set_device_state(device, {"device": None})
    set_device_state(None, {"device": ("cuda", state)})
    assert len(calls) == 2


def test_moments_on_a_cpu_are_those_of_its_clock():
    clock = streams.Clock(CPU)
    before, moment = time.perf_counter(), clock.now()
    assert before <= clock.seconds(moment) <= time.perf_counter()


def test_a_copy_to_where_a_tensor_is_copies_nothing():
    x = torch.ones(3)
    assert streams.copied(x, CPU) is x


def test_nothing_is_awaited_on_a_cpu():
    for nothing_to_do in (accelerator.take, accelerator.synchronize, accelerator.empty_cache):
        nothing_to_do(CPU)
    assert accelerator.device_name(CPU) == "a CPU" and not accelerator.is_accelerator(torch.device("meta"))


def test_a_batch_is_traced_where_the_model_is():
    """A loader's batch is on the host, that of a call on a rank's device; the model may be on the other."""
    elsewhere = SimpleNamespace(is_meta=False, to=lambda device: f"on {device}")
    assert beside(nn.Linear(2, 2), (elsewhere,)) == ("on cpu",)
    tensors = [SimpleNamespace(is_meta=False, device=torch.device("cuda", n)) for n in range(2)]
    for own, found in ((tensors[1:], "on cuda:1"), (tensors, elsewhere)):
        model = SimpleNamespace(parameters=lambda own=own: own, buffers=list)
        assert beside(model, (elsewhere,)) == (found,)
    assert beside(nn.Linear(2, 2), (torch.empty(1, 2, device="meta"),))[0].is_meta


def test_a_source_tree_that_is_not_installed_has_a_version(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    assert versions.package_version.__wrapped__().startswith("not installed, digest")
    for path in Path(mixmesh.__file__).parent.rglob("*.py"):
        if path.name not in ("versions.py", "__main__.py"):
            assert "importlib.metadata" not in path.read_text(), path
