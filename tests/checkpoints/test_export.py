"""``mixmesh export``: weights of a checkpoint as ``save_pretrained`` writes them, whole or not at all."""

from __future__ import annotations

import json
import resource
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed, run_world
from idioms.plans import THREE
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from mixmesh import checkpoint
from mixmesh.__main__ import execute
from mixmesh.checkpoint import exporting
from mixmesh.checkpoint.manifest import Manifest
from mixmesh.checkpoint.target import shards_of
from mixmesh.checkpoint.tensor_files import SAFETENSORS, Part
from mixmesh.cli.export import config_files, parse_size
from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.errors import InputError, PlanError
from mixmesh.frontend.trace import trace
from mixmesh.frontend.trace.dtypes import TORCH_DTYPE
from mixmesh.lang.plan_file import Plan
from mixmesh.runtime.comm import initialise
from mixmesh.runtime.parallel import parallelize
from mixmesh.search.baselines import data_parallel, fully_sharded

SHARD_SIZE = "5KB"


# --- models of transformers ---------------------------------------------------------------------------------


def pretrained(name: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    if name == "tied":
        sizes = dict(vocab_size=50, n_positions=16, n_embd=12, n_layer=1, n_head=2)
        silent = dict(attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, bos_token_id=0, eos_token_id=0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **silent)).bfloat16()
    sizes = dict(vocab_size=50, hidden_size=12, intermediate_size=20, num_hidden_layers=1)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32)
    config = transformers.MixtralConfig(**sizes, **heads, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(50, (6, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def train_and_save(folder: Path, name: str, _) -> None:
    """Two steps on two ranks, with parameters cut 2 to 1."""
    model = pretrained(name)
    traced = trace(model, tokens())
    two = Cluster.parse(THREE.replace(", count = 2", ""))
    program = fully_sharded(data_parallel(traced.graph, CostModel(two), (2 / 3, 1 / 3)))
    plan = Plan(program, "test", 0.0, (), "", graph_fingerprint=traced.graph.fingerprint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = parallelize(model, optimizer, plan, device="cpu", timeout_s=60, check_model=False)
    for _ in range(2):
        model(**tokens()).backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(folder / name, step=2, model=model, optimizer=optimizer)
    whole = model.full_state_dict()
    if dist.get_rank() == 0:
        torch.save(whole, folder / f"{name}.pt")


MODELS = ("tied", "mixture")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a run of each of ``MODELS``, and the whole state that its first rank had."""
    folder = tmp_path_factory.mktemp("trained")
    checks = {name: partial(train_and_save, folder, name) for name in MODELS}
    for failures in run_world(2, checks, partial(initialise, 2, torch.device("cpu"), 60)).values():
        assert_passed(failures)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_loads_it_to_the_last_bit(trained, tmp_path, name):
    import transformers

    expected = pretrained(name)
    expected.load_state_dict(torch.load(trained / f"{name}.pt"))
    expected.save_pretrained(tmp_path / "theirs", save_original_format=False)
    for place, options in (("one", ()), ("many", ("--max-shard-size", SHARD_SIZE))):
        folder = tmp_path / place
        assert execute(["export", str(trained / name), "--to", str(folder), *options]) == 0
        assert (folder / "model.safetensors.index.json").exists() == (place == "many")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert {n: x.dtype for n, x in loaded.state_dict().items()} == {
            n: x.dtype for n, x in expected.state_dict().items()
        }
        with torch.no_grad():
            logits = [model.eval()(tokens()["input_ids"]).logits for model in (loaded, expected)]
        assert torch.equal(*logits)
        for file in ("config.json", "generation_config.json"):
            ours, theirs = ((place / file).read_text() for place in (folder, tmp_path / "theirs"))
            assert json.loads(ours) == json.loads(theirs)
    ours, theirs = (load_file(tmp_path / place / "model.safetensors") for place in ("one", "theirs"))
    assert ours.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in ours.items())


# --- any model ----------------------------------------------------------------------------------------------


class Kinds(nn.Module):
    """A tensor of every dtype that is kept; 0-dim, empty, tied and of a stride of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(40, 30), nn.Linear(40, 30, bias=False)
        self.two.weight = self.one.weight
        for name in SAFETENSORS:
            x = torch.arange(-6, 6).reshape(3, 4)
            self.register_buffer(name, (x % 2 == 0 if name == "bool" else x.to(TORCH_DTYPE[name])).T)
        self.register_buffer("number", torch.tensor(0.1, dtype=torch.float64))
        self.register_buffer("empty", torch.empty(0, 3, dtype=torch.int32))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A folder with two checkpoints of a training on one device."""
    model = Kinds()
    optimizer = torch.optim.AdamW([{"params": [model.one.weight]}, {"params": [model.one.bias], "lr": 0.1}])
    folder = tmp_path_factory.mktemp("run")
    for step in (1, 2):
        model.one(torch.ones(2, 40)).sum().backward()
        optimizer.step()
        checkpoint.save(folder, step=step, model=model, optimizer=optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "expected.pt")
    return folder


def expect_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert x.dtype == expected[name].dtype and x.shape == expected[name].shape, name
        flat, other = (t.contiguous().reshape(-1).view(torch.uint8) for t in (x, expected[name]))
        assert torch.equal(flat, other), name


def test_every_kind_of_tensor_and_the_optimizer(run, tmp_path, capsys):
    whole = torch.load(run / "expected.pt")
    del whole["model"]["two.weight"]
    place = tmp_path / "x.safetensors"
    assert execute(["export", str(run), "--to", str(place), "--optimizer", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step"] == 2 and told["num_tensors"] == len(whole["model"]) and not told["has_config"]
    assert {Path(f).name for f in told["files"]} == {p.name for p in tmp_path.iterdir()}
    expect_same(load_file(place), whole["model"])
    with safe_open(place, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    state = {
        f"state.{name}.{key}": x
        for number, name in enumerate(("one.weight", "one.bias"))
        for key, x in whole["optimizer"]["state"][number].items()
    }
    expect_same(load_file(tmp_path / "x.optimizer.safetensors"), state)
    settings = json.loads((tmp_path / "x.optimizer.json").read_text())
    assert settings["class"] == "AdamW"
    assert [(g["params"], g["lr"]) for g in settings["groups"]] == [
        (["one.weight"], 1e-3),
        (["one.bias"], 0.1),
    ]
    checkpoint.export(run / "000001-step-1", tmp_path / "first")
    assert not torch.equal(
        load_file(tmp_path / "first" / "model.safetensors")["one.bias"], whole["model"]["one.bias"]
    )


def test_files_are_as_large_as_huggingface_hub_makes_them():
    from huggingface_hub import split_torch_state_dict_into_shards

    generator = torch.Generator().manual_seed(0)
    for limit in (1, 30, 100, 10**6):
        sizes = torch.randint(0, 60, (40,), generator=generator).tolist()
        parts = [Part(f"{n:02d}", "u8", (size,)) for n, size in enumerate(sizes) if size]
        tensors = {part.name: torch.empty(part.shape, dtype=torch.uint8) for part in parts}
        theirs = split_torch_state_dict_into_shards(tensors, max_shard_size=limit)
        files = [[part.name for part in shard] for shard in shards_of(parts, limit)]
        assert files == [names for names in theirs.filename_to_tensors.values() if names]
    assert parse_size("5GB") == 5 * 10**9 and parse_size("1.5kb") == 1500
    for text in ("5", "0GB", "GB", "5GiB", "-1GB"):
        with pytest.raises(InputError, match="largest size of a file"):
            parse_size(text)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_there_stays_unless_it_is_forced(run, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    checkpoint.export(run, tmp_path, max_shard_bytes=1000, optimizer=True)
    before = contents(tmp_path)
    assert "model.safetensors.index.json" in before and "optimizer-00001-of-00003.safetensors" in before
    for folder in (run, run / "none"):  # before the checkpoint is looked for
        with pytest.raises(InputError, match="would be overwritten") as refused:
            checkpoint.export(folder, tmp_path)
        assert "--force" in str(refused.value)
    assert contents(tmp_path) == before
    checkpoint.export(run, tmp_path, force=True)  # whose files have other names
    assert {*contents(tmp_path)} == {"tokenizer.json", "optimizer.json", "model.safetensors"}
    config = tmp_path / "configured"
    config.mkdir()
    (config / "config.json").write_text('{"a": 1}')
    with pytest.raises(InputError, match="would be overwritten"):
        checkpoint.export(run, config, config={"config.json": "{}"})
    assert checkpoint.export(run, config).has_config and (config / "config.json").read_text() == '{"a": 1}'


def test_what_fails_in_the_middle_leaves_nothing(run, tmp_path, monkeypatch):
    checkpoint.export(run, tmp_path, max_shard_bytes=1000)
    before = contents(tmp_path)

    def interrupt(text: str) -> None:
        if "9 of" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.export(run, tmp_path, force=True, progress=interrupt)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))  # as of a disk that is full
    try:
        with pytest.raises(InputError, match="could not be written"):
            checkpoint.export(run, tmp_path, force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(tmp_path) == before
    (tmp_path / ".unfinished-model-export-dead").mkdir()  # of a process that was killed
    checkpoint.export(run, tmp_path, force=True)
    assert [*contents(tmp_path)] == ["model.safetensors"]


def test_a_mixture_of_two_exports_is_never_there(run, tmp_path, monkeypatch):
    """Cut off at any rename, what is left is one of the two or none that a reader begins with."""
    checkpoint.export(run, tmp_path / "new", max_shard_bytes=2000)
    new = contents(tmp_path / "new")
    renames = len(new)
    for number in range(renames):
        folder = tmp_path / str(number)
        checkpoint.export(run / "000001-step-1", folder, max_shard_bytes=2000)
        monkeypatch.setattr(Path, "rename", crash_at(number))
        with pytest.raises(InputError, match="a crash"):
            checkpoint.export(run, folder, max_shard_bytes=2000, force=True)
        monkeypatch.undo()
        assert not [name for name in contents(folder) if name.endswith((".json", "model.safetensors"))]


def crash_at(number: int):
    rename, left = Path.rename, [number]

    def renamed(self: Path, to: Path) -> Path:
        if not left[0]:
            raise OSError("a crash")
        left[0] -= 1
        return rename(self, to)

    return renamed


def test_a_damaged_checkpoint_is_refused_or_passed_over(run, tmp_path, capsys):
    for step in (1, 2):
        checkpoint.save(tmp_path / "run", step=step, model=nn.Linear(30, 20))
    newest = checkpoint.latest(tmp_path / "run")
    path = newest / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    status = execute(["export", str(newest), "--to", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert status == 2 and "another checksum" in error and f"mixmesh export {tmp_path / 'run'}" in error
    assert not (tmp_path / "out").exists()
    assert checkpoint.export(tmp_path / "run", tmp_path / "out").step == 1
    assert "is skipped" in capsys.readouterr().err
    for place, message in ((tmp_path / "none", "no such folder"), (tmp_path / "out", "without any")):
        with pytest.raises(InputError, match=message):
            checkpoint.export(place, tmp_path / "again")
    with pytest.raises(InputError, match="has no optimizer"):
        checkpoint.export(tmp_path / "run", tmp_path / "again", optimizer=True)
    assert not (tmp_path / "again").exists()
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written there"):
        checkpoint.export(tmp_path / "run", tmp_path / "file" / "out")
    for to in ("x.bin", "x.txt", "x.SAFETENSORS", "none/x.safetensors"):
        with pytest.raises(InputError):
            checkpoint.export(tmp_path / "run", tmp_path / to)
    assert not [*tmp_path.glob("x.*")]
    checkpoint.export(tmp_path / "run", tmp_path / "gpt-v1.5")  # the name of a folder


def test_pieces_that_are_not_the_whole_are_refused(run):
    path = checkpoint.latest(run)
    entry = Manifest.read(path).tensors["model:one.weight"]
    assert exporting.whole_tensor(path, "one.weight", entry).shape == (30, 40)
    part = type(entry)(entry.dtype, (31, 40), entry.pieces)
    with pytest.raises(InputError, match="does not hold all of one.weight"):
        exporting.whole_tensor(path, "one.weight", part)


# --- and back -----------------------------------------------------------------------------------------------


def test_weights_of_pretrained_models_go_in(tmp_path):
    """A model with a head from the files of one without, whose names have no prefix, and with names of
    earlier versions; several files. What transformers itself would rename is refused with what to type."""
    source = pretrained("tied")
    source.transformer.save_pretrained(tmp_path, max_shard_size=SHARD_SIZE)
    place = tmp_path / "model-00001-of-00002.safetensors"
    index = tmp_path / "model.safetensors.index.json"
    values, told = load_file(place), json.loads(index.read_text())
    mask = "h.0.attn.bias"
    save_file(values | {mask: torch.ones(1, 1, 16, 16)}, place)
    index.write_text(json.dumps({"weight_map": told["weight_map"] | {mask: place.name}}))
    model = pretrained("tied").float()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    checkpoint.load_weights(model, tmp_path)
    expect_same(model.state_dict(), {name: x.float() for name, x in source.state_dict().items()})
    assert model.lm_head.weight is model.transformer.wte.weight
    pretrained("mixture").save_pretrained(tmp_path / "theirs")
    with pytest.raises(PlanError, match="another model") as refused:
        checkpoint.load_weights(pretrained("mixture"), tmp_path / "theirs")
    assert "experts" in refused.value.got and "save_original_format=False" in str(refused.value)
    pretrained("mixture").save_pretrained(tmp_path / "ours", save_original_format=False)
    checkpoint.load_weights(pretrained("mixture"), tmp_path / "ours")


def test_a_config_that_is_no_json(tmp_path):
    """It was copied as it is, and from_pretrained failed later."""
    (tmp_path / "config.json").write_text("{")
    for text in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(InputError, match="the config cannot be read"):
            config_files(str(text))
