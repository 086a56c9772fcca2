"""``checkpoint.load_weights``: initial weights from files of safetensors: the model's own, or refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mixmesh import checkpoint
from mixmesh.checkpoint.matching import holds, renaming
from mixmesh.errors import InputError, PlanError
from mixmesh.frontend.trace.dtypes import TORCH_DTYPE

FLOATS = [dtype for dtype in TORCH_DTYPE.values() if dtype.is_floating_point]


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.ModuleDict({"one": nn.Linear(5, 4), "norm": nn.BatchNorm1d(4)})
        self.head = nn.Linear(5, 4, bias=False)
        self.head.weight = self.body["one"].weight
        self.register_buffer("empty", torch.empty(0, 3))


def state_of(model: nn.Module, **changes) -> dict[str, torch.Tensor]:
    """A state as ``save_pretrained`` writes it: a tied weight once."""
    state = {name: x.clone() for name, x in model.state_dict().items() if name != "head.weight"}
    return state | changes


def expect_weights(model: nn.Module, expected: nn.Module) -> None:
    for name, x in model.state_dict().items():
        assert torch.equal(x, expected.state_dict()[name].to(x.dtype)), name


def test_names_that_are_those_of_the_model(tmp_path):
    source, path = Net(1), tmp_path / "x.safetensors"
    with torch.no_grad():
        source.body["norm"].num_batches_tracked += 3
    state = state_of(source)
    tied = "body.one.weight"
    states = {
        "as they are": state,
        "the other name of a tied weight": {n.replace(tied, "head.weight"): x for n, x in state.items()},
        "both names": state | {"head.weight": state[tied].clone()},
        "a prefix": {f"model.{name}": x for name, x in state.items()},
        "another dtype": {n: x.half() if x.is_floating_point() else x for n, x in state.items()},
    }
    for name, values in states.items():
        save_file(values, path)
        if name == "another dtype":
            with torch.no_grad():
                source.load_state_dict(
                    {n: x.half() if x.is_floating_point() else x for n, x in source.state_dict().items()}
                )
        model = Net(2)
        checkpoint.load_weights(model, path)
        expect_weights(model, source)
    save_file(state_of(source), path)
    wrapped = nn.Sequential(nn.ModuleDict({"net": Net(2)}))  # the model's names have a prefix
    checkpoint.load_weights(wrapped, path)
    expect_weights(wrapped[0]["net"], source)


def test_weights_of_another_model_are_refused_and_change_nothing(tmp_path):
    state, path = state_of(Net(1)), tmp_path / "x.safetensors"
    weight, bias = state["body.one.weight"], state["body.one.bias"]
    cases = {
        "body.one.bias": ({n: x for n, x in state.items() if n != "body.one.bias"}, "another model"),
        "body.two.bias": (state | {"body.two.bias": bias.clone()}, "another model"),
        "model.body.one.bias": (
            {f"model.{n}": x for n, x in state.items()} | {"body.one.bias": bias.clone()},
            "another model",
        ),
        "[4, 5]": (state | {"body.one.weight": weight.T.contiguous()}, "other shapes or dtypes"),
        "f64": (state | {"body.one.bias": bias.double()}, "other shapes or dtypes"),
        "i64": (state | {"body.one.bias": bias.long()}, "other shapes or dtypes"),
        "head.weight": (state | {"head.weight": weight + 1}, "tied in the model"),
    }
    for named, (values, message) in cases.items():
        save_file(values, path)
        model = Net(2)
        with pytest.raises(PlanError, match=message) as refused:
            checkpoint.load_weights(model, path)
        assert refused.value.hint and refused.value.where == str(path)
        assert named.removeprefix("model.") in str(refused.value), str(refused.value)
        expect_weights(model, Net(2))


def test_files_that_are_no_weights_are_refused(tmp_path):
    folder = tmp_path / "many"
    model = Net(1)
    checkpoint.save(tmp_path / "run", step=1, model=model)
    checkpoint.export(tmp_path / "run", folder, max_shard_bytes=60)
    checkpoint.load_weights(Net(2), folder)
    index = folder / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    first, *_ = sorted(folder.glob("model-*"))
    whole = first.read_bytes()

    def refusal(place: Path) -> str:
        with pytest.raises(InputError) as refused:
            checkpoint.load_weights(model, place)
        return str(refused.value)

    for cut in (whole[:-1], whole[:20], b"", whole[:9] + b"{" + whole[10:], whole + b"x"):
        first.write_bytes(cut)
        assert "cannot be read" in refusal(folder) and first.name in refusal(index)
    first.unlink()
    assert "No such file" in refusal(folder)
    first.write_bytes(whole)
    for weight_map in (
        {},
        None,
        {"a": f"../{first.name}"},
        {"a": 3},
        {"a": first.name},
        told["weight_map"] | {"b": first.name},
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert "cannot be read" in refusal(folder)
    index.write_text("[" * 100000)
    assert "cannot be read" in refusal(folder)
    assert "mixmesh export" in refusal(tmp_path / "run")
    assert "no weights in this folder" in refusal(tmp_path)
    assert "no such file or folder" in refusal(tmp_path / "none")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "are read from safetensors" in refusal(tmp_path / "pytorch_model.bin")
    expect_weights(model, Net(1))


def test_a_dtype_holds_exactly_what_it_is_said_to_hold():
    """Every value of 16 bits or fewer, there and back."""
    for own, other in itertools.product(FLOATS, FLOATS):
        if other.itemsize > 2:
            assert holds(own, other) == (own.itemsize >= other.itemsize)
            continue
        bits = torch.arange(2 ** (8 * other.itemsize)).to(torch.int16 if other.itemsize == 2 else torch.uint8)
        values = bits.view(other)
        values = values[~values.double().isnan()]
        assert holds(own, other) == bool(torch.equal(values.to(own).double(), values.double())), (own, other)
    assert not holds(torch.int64, torch.int32) and not holds(torch.float32, torch.int8)


def test_one_prefix_at_most():
    own = {"model.a.weight", "model.b.0.weight", "model.b.1.weight"}
    cases = {
        "model.b.0.weight": own,
        "b.0.weight": {"a.weight", "b.0.weight", "b.1.weight"},
        "x.y.model.b.0.weight": {f"x.y.{name}" for name in own},
    }
    for name, held in cases.items():
        rename = renaming(own, held)
        assert {rename(n) for n in held} == own and rename(name) == "model.b.0.weight"
    assert renaming(own, {"c"})("c") == "c"
