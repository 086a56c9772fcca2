"""S5: state dicts, torch.save, torch.distributed.checkpoint, sizes and printing, on uneven shards."""

from __future__ import annotations

import copy
import io
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo_world import assert_passed, shared_folder
from plans import CUT, PLANS, Mlp, batch, build, close, named, same_weights
from safetensors import torch as safetensors

import mixmesh
from mixmesh.errors import InputError, PlanError
from mixmesh.runtime.parallel import load_full_optimizer_state_dict


def trained(name: str):
    single, optimizer, model, sharded = build(name)
    single(**batch(0)).backward()
    model(**batch(0)).backward()
    optimizer.step()
    sharded.step()
    return single, optimizer, model, sharded


def check_sizes_and_printing_are_the_wholes(_) -> None:
    for name in PLANS:
        single, _, model, _ = build(name)
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in single.parameters())
        for (key, ours), (_, theirs) in zip(model.named_parameters(), single.named_parameters()):
            assert ours.shape == theirs.shape and ours.size(0) == len(theirs) and ours.ndim == theirs.ndim, (
                key
            )
        assert {k: v.shape for k, v in model.state_dict().items()} == {
            k: v.shape for k, v in single.state_dict().items()
        }
    weight = build("fsdp")[2].get_parameter("fc1.weight")
    rows = ["0 to 4", "4 to 7", "7 to 8"][dist.get_rank()]
    assert f"fc1.weight [8, 6], rank {dist.get_rank()} holds {rows} of dim 0" in repr(weight)


def check_torch_save(_) -> None:
    for name in CUT:
        model, optimizer = trained(name)[2:]
        for state in (model.state_dict(), optimizer.state_dict()):
            with pytest.raises(InputError, match="one rank's piece") as caught:
                torch.save(state, io.BytesIO())
            assert "mixmesh.save(state, path)" in str(caught.value)
            assert "full_state_dict()" in str(caught.value) and "checkpoint.save" in str(caught.value)
            assert "with mixmesh.whole(model, optimizer):" in str(caught.value)
    single, optimizer, model, sharded = trained("data_parallel")
    for ours, theirs in ((model, single), (sharded, optimizer)):
        file = io.BytesIO()
        torch.save(ours.state_dict(), file)
        file.seek(0)
        torch.testing.assert_close(
            torch.load(file)["fc1.weight"] if ours is model else torch.load(file)["state"][1]["exp_avg"],
            single.state_dict()["fc1.weight"]
            if ours is model
            else theirs.state_dict()["state"][1]["exp_avg"],
        )


def check_mixmesh_save_in_place_of_torch_save(_) -> None:
    """What a script puts together is written whole, once, under every plan."""
    for name in PLANS:
        single, optimizer, model, sharded = trained(name)
        folder = shared_folder()
        for of, made in ((single, optimizer), (model, sharded)):
            state = {"nets": [of.state_dict()], "optimizer": made.state_dict(), "epoch": (3, None)}
            if of is model:
                mixmesh.save(state, folder / "ours")
            elif not dist.get_rank():
                torch.save(state, folder / "plain")
        ours = torch.load(folder / "ours")
        plain = torch.load(folder / "plain") if not dist.get_rank() else ours
        assert ours["epoch"] == plain["epoch"] and ours["nets"][0]._metadata == plain["nets"][0]._metadata
        for key, value in plain["nets"][0].items():
            if key != "count":
                close(ours["nets"][0][key], value, key)
        assert list(ours["optimizer"]["state"]) == list(plain["optimizer"]["state"])
        for n, entries in plain["optimizer"]["state"].items():
            for key, value in entries.items():
                assert type(ours["optimizer"]["state"][n][key]) is torch.Tensor
                close(ours["optimizer"]["state"][n][key].to(value.dtype), value, f"{n} {key}")


def check_states_are_whole_in_a_block(_) -> None:
    """For the saver of a library, which holds the model and the optimizer, and saves on the first rank."""
    for name in PLANS:
        single, optimizer, model, sharded = trained(name)
        files = [shared_folder() / kind for kind in ("plain", "first", "ours")]
        with mixmesh.whole(model, sharded):
            if not dist.get_rank():
                for file, parts in zip(files, ((single, optimizer), (model, sharded))):
                    torch.save([part.state_dict() for part in parts], file)
            mixmesh.save([model.full_state_dict(), sharded.state_dict()], files[-1])
        plain, *others = [torch.load(file) for file in files]
        for own in others:
            assert own[0].keys() == plain[0].keys()
            for key, value in plain[0].items():
                if key != "count":
                    close(own[0][key], value, key)
            assert own[1]["param_groups"] == sharded.state_dict()["param_groups"]
            for n, entries in plain[1]["state"].items():
                for key, value in entries.items():
                    close(own[1]["state"][n][key].to(value.dtype), value, f"{n} {key}")
        assert "state_dict" not in {**vars(model), **vars(sharded)}
        model.load_state_dict(others[0][0])
        sharded.load_state_dict(others[0][1])
        same_weights(single, model)


def check_mixmesh_save_of_an_optimizer_alone(_) -> None:
    """It is whole without its model, as with it, under every plan."""
    for name in PLANS:
        _, _, model, optimizer = trained(name)
        folder = shared_folder()
        mixmesh.save(folder / "alone", optimizer=optimizer)
        mixmesh.save(folder / "both", model=model, optimizer=optimizer)
        alone, both = (torch.load(folder / file)["optimizer"] for file in ("alone", "both"))
        assert alone["param_groups"] == both["param_groups"] and list(alone["state"]) == list(both["state"])
        for n, entries in both["state"].items():
            for key, value in entries.items():
                assert type(alone["state"][n][key]) is torch.Tensor
                close(alone["state"][n][key].to(value.dtype), value, f"{name} {n} {key}")


def check_mixmesh_save_of_a_model_and_to_an_open_file(_) -> None:
    single, _, model, _ = trained("fsdp")
    folder = shared_folder()
    with open(folder / "model.pt", "wb") as file:
        mixmesh.save(model, file)
    dist.barrier()
    whole = torch.load(folder / "model.pt", weights_only=False)
    assert type(whole) is Mlp
    for key, value in single.state_dict().items():
        close(whole.state_dict()[key], value, key)


def check_mixmesh_save_refuses_unlike_states(_) -> None:
    model = trained("fsdp")[2]
    state = model.state_dict()
    if dist.get_rank() == 1:
        del state["fc1.weight"]
    with pytest.raises(InputError, match="pieces of other tensors") as caught:
        mixmesh.save(state, shared_folder() / "file")
    assert "fc1.weight" in str(caught.value)
    with pytest.raises(InputError, match="a state, or parts by name"):
        mixmesh.save(state, "file", epoch=3)


def check_tensors_of_a_parameters_dtype_and_device(_) -> None:
    """Scripts make the first state of a recurrent network so."""
    weight = build("fsdp")[2].get_parameter("fc1.weight")
    zeros, sevens = weight.new_zeros(2, 5), weight.new_full((3,), 7)
    assert type(zeros) is type(sevens) is torch.Tensor and zeros.dtype == weight.dtype
    assert zeros.shape == (2, 5) and not zeros.any() and sevens.tolist() == [7, 7, 7]
    assert weight.new_ones(3).sum() == 3 and weight.new_tensor([1, 2]).dtype == weight.dtype
    moved = weight + weight.new_ones(weight.shape)  # whole tensors are cut as the shard is
    assert torch.equal(moved.to_local(), weight.to_local() + 1)
    with pytest.raises(InputError, match="beside a plain tensor"):
        weight + weight.new_zeros(2, *weight.shape)


def check_files_of_safetensors_are_refused(_) -> None:
    model = build("fsdp")[2]
    weights = {"fc1.weight": model.state_dict()["fc1.weight"]}
    for write in (safetensors.save, lambda each: each["fc1.weight"].untyped_storage()):
        with pytest.raises(InputError, match="needs elements that other ranks hold"):
            write(weights)


def check_a_single_devices_state_is_cut(_) -> None:
    for name in PLANS:
        single, optimizer, _, _ = trained("data_parallel")
        _, _, model, sharded = build(name)
        model.load_state_dict(single.state_dict())
        sharded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for step in (1, 2):
            for m, o in ((single, optimizer), (model, sharded)):
                o.zero_grad()
                m(**batch(step)).backward()
                o.step()
        same_weights(single, model)


def check_distributed_checkpoint(_) -> None:
    """Saved under one plan and loaded under another, model and optimizer, by what PyTorch brings."""
    for saves, loads in (
        ("fsdp", "tensor_parallel"),
        ("levels_to_owners", "fsdp"),
        ("one_stage_each", "data_parallel"),
    ):
        single, optimizer, model, sharded = trained(saves)
        path = os.path.join(shared_folder(), "checkpoint")
        dcp.save({"model": model.state_dict(), "optimizer": sharded.state_dict()}, checkpoint_id=path)
        _, _, other, resumed = trained(loads)
        for p in other.parameters():
            p.data.zero_()
        state = {"model": other.state_dict(), "optimizer": resumed.state_dict()}
        dcp.load(state, checkpoint_id=path)
        other.load_state_dict(state["model"])
        resumed.load_state_dict(state["optimizer"])
        same_weights(single, other)
        for m, o in ((single, optimizer), (other, resumed)):
            o.zero_grad()
            m(**batch(1)).backward()
            o.step()
        same_weights(single, other)


def check_a_checkpoint_loaded_in_place_reaches_all_copies(_) -> None:
    """Shard owners load their rows; what others compute with is gathered again."""
    single, _, model, _ = trained("levels_to_owners")
    path = os.path.join(shared_folder(), "checkpoint")
    dcp.save(model.state_dict(), checkpoint_id=path)
    _, _, other, _ = build("levels_to_owners")
    with torch.no_grad():
        other(**batch(0))
    dcp.load(other.state_dict(), checkpoint_id=path)
    with torch.no_grad():
        close(other(**batch(1)), single(**batch(1)))


def check_asynchronous_checkpoint(_) -> None:
    single, _, model, _ = trained("fsdp")
    path = os.path.join(shared_folder(), "checkpoint")
    saving = dcp.async_save(model.state_dict(), checkpoint_id=path)
    saving.result()
    _, _, other, _ = build("tensor_parallel")
    state = other.state_dict()
    dcp.load(state, checkpoint_id=path)
    same_weights(single, other)


def check_a_checkpoint_is_whole_for_one_device(_) -> None:
    single, _, model, _ = trained("fsdp")
    path = os.path.join(shared_folder(), "checkpoint")
    dcp.save(model.state_dict(), checkpoint_id=path)
    plain = Mlp(5)
    dcp.load(plain.state_dict(), checkpoint_id=path)
    for key, value in plain.state_dict().items():
        if key != "count":
            close(value, single.state_dict()[key], key)


SPOILT_MODELS = {
    "a name lacks": lambda s: {k: v for k, v in s.items() if k != "fc1.weight"},
    "a name more": lambda s: {**s, "fc3.weight": torch.ones(2)},
    "another shape": lambda s: {**s, "fc1.bias": torch.ones(1)},
    "no tensor": lambda s: {**s, "fc1.bias": None},
    "no values": lambda s: {**s, "fc1.bias": s["fc1.bias"].to("meta")},
    "no dict": lambda s: list(s.items()),
}
SPOILT_OPTIMIZERS = {
    "no groups": lambda s: {"state": s["state"]},
    "fewer parameters": lambda s: {**s, "param_groups": [{**s["param_groups"][0], "params": [0, 1]}]},
    "a number of none": lambda s: {**s, "state": {**s["state"], -1: s["state"][1]}},
    "a state of a piece": lambda s: with_state(s, exp_avg=s["state"][1]["exp_avg"][:3]),
    "a state without values": lambda s: with_state(s, exp_avg=torch.ones(8, 6, device="meta")),
    "steps that are none": lambda s: with_state(s, step=[]),
    "a state of letters": lambda s: with_state(s, exp_avg="x"),
}


def with_state(packed: dict, **changes) -> dict:
    return {**packed, "state": {**packed["state"], 1: {**packed["state"][1], **changes}}}


def check_spoilt_states_change_nothing(_) -> None:
    for name in PLANS:
        single, optimizer, model, sharded = trained(name)
        for spoil in SPOILT_MODELS.values():
            with pytest.raises(PlanError, match="not of this model"):
                model.load_full_state_dict(spoil(Mlp(9).state_dict()))
        for spoil in SPOILT_OPTIMIZERS.values():
            packed = copy.deepcopy(optimizer.state_dict())
            for group in packed["param_groups"]:
                group["lr"] = 7.0
            with pytest.raises(PlanError, match="not of this optimizer"):
                load_full_optimizer_state_dict(model, sharded, spoil(packed))
            with pytest.raises(PlanError, match="not of this optimizer"):
                sharded.load_state_dict(spoil(packed))
        for m, o in ((single, optimizer), (model, sharded)):
            m(**batch(1)).backward()
            o.step()
        same_weights(single, model)


IDIOMS = named(
    check_sizes_and_printing_are_the_wholes,
    check_torch_save,
    check_mixmesh_save_in_place_of_torch_save,
    check_states_are_whole_in_a_block,
    check_mixmesh_save_of_an_optimizer_alone,
    check_mixmesh_save_of_a_model_and_to_an_open_file,
    check_mixmesh_save_refuses_unlike_states,
    check_tensors_of_a_parameters_dtype_and_device,
    check_files_of_safetensors_are_refused,
    check_a_single_devices_state_is_cut,
    check_distributed_checkpoint,
    check_a_checkpoint_loaded_in_place_reaches_all_copies,
    check_asynchronous_checkpoint,
    check_a_checkpoint_is_whole_for_one_device,
    check_spoilt_states_change_nothing,
)


@pytest.mark.parametrize("name", IDIOMS)
def test_saving(outcomes, name):
    assert_passed(outcomes[name])
