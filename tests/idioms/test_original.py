"""S6: the model that was handed to parallelize is taken over, under every plan alike, and says so."""

from __future__ import annotations

import copy

import pytest
import torch
from gloo_world import assert_passed
from plans import PLANS, Mlp, batch, close, named, program
from torch.optim.swa_utils import AveragedModel

from mixmesh.errors import InputError
from mixmesh.runtime.parallel import parallelize


def check_the_original_is_taken_over(_) -> None:
    for name in PLANS:
        original = Mlp(0)
        parallelize(original, None, program(name), device="cpu", timeout_s=20)
        uses = (
            lambda m=original: m(**batch(0)),
            lambda m=original: m.fc1(batch(0)["x"]),
            lambda m=original: m.state_dict(),
            lambda m=original: copy.deepcopy(m),
            lambda m=original: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0),
            lambda m=original: m.fc1.weight.sum(),
            lambda m=original: m.fc1.weight.requires_grad_(False),
        )
        for use in uses:
            with pytest.raises(InputError, match="taken over by parallelize") as caught:
                use()
            assert "mixmesh.parallelize(model, optimizer, plan)" in str(caught.value)
            assert ".py:" in caught.value.where
        assert original.fc1.weight.shape == (8, 6) and "TakenOver" in repr(original.fc1.weight)


class AveragesTheOriginal(torch.optim.SGD):
    """Its step reads the original, and calls its closure before it has read it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.original, self.average = [model], AveragedModel(model)

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        if closure is not None:
            closure()
        self.average.update_parameters(self.original[0])


def check_an_optimizer_s_own_step_cannot_read_it(_) -> None:
    """Its memory is gone: reading it would end the process."""
    original = Mlp(0)
    made = AveragesTheOriginal(original)
    model, optimizer = parallelize(original, made, program("data_parallel"), device="cpu", timeout_s=20)
    model(**batch(0)).backward()
    parameters = [*model.parameters()]
    kinds = {type(p) for p in parameters}
    seen = []
    with pytest.raises(InputError, match="taken over by parallelize"):
        optimizer.step(lambda: seen.extend(type(p) for p in parameters))
    assert set(seen) == kinds == {type(p) for p in parameters}


def check_the_original_holds_no_memory(_) -> None:
    original = Mlp(0)
    model, _ = parallelize(original, None, program("fsdp"), device="cpu", timeout_s=20)
    with torch._C.DisableTorchFunctionSubclass():
        assert all(p.untyped_storage().nbytes() == 0 for p in original.parameters())
    assert model.get_parameter("fc1.weight").to_local().untyped_storage().nbytes() < 8 * 6 * 8


def check_loading_makes_it_whole_again(_) -> None:
    for name in PLANS:
        original, twin = Mlp(0), Mlp(0)
        model, _ = parallelize(original, None, program(name), device="cpu", timeout_s=20)
        original.load_state_dict(model.full_state_dict())
        close(original(**batch(0)), twin(**batch(0)))
        original(**batch(0)).backward()
        assert type(original.fc1.weight) is torch.nn.Parameter and original.fc1.weight.grad is not None
        with torch.no_grad():
            original.fc1.weight.zero_()  # a copy: the parallel model keeps its own
        with torch.no_grad():
            close(model(**batch(0)), twin(**batch(0)))


IDIOMS = named(
    check_the_original_is_taken_over,
    check_an_optimizer_s_own_step_cannot_read_it,
    check_the_original_holds_no_memory,
    check_loading_makes_it_whole_again,
)


@pytest.mark.parametrize("name", IDIOMS)
def test_original(outcomes, name):
    assert_passed(outcomes[name])
