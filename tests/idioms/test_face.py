"""A parallel model shows the original's classes and attributes, and lends the original with whole weights."""

from __future__ import annotations

import copy
import gc
import io
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from gloo_world import assert_passed
from plans import PLANS, Mlp, batch, close, named, output_plan, plan_of, program
from torch import nn

import mixmesh
from mixmesh.errors import InputError
from mixmesh.frontend.trace import trace
from mixmesh.frontend.trace.reads import Number
from mixmesh.lang.plan_file import Plan
from mixmesh.runtime.parallel import parallelize
from mixmesh.training.integrations.lending import Lender
from mixmesh.training.preparation.outside_loss import with_loss


class Speaker(nn.Module):
    """A model with all that people hang on one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(width=8, name="speaker")
        self.scale = 2.0
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.0)), nn.Linear(8, 4)]
        )
        self.double()

    def logits(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.scale

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.logits(x), y)

    def num_weights(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def generate(self, x):
        return self.logits(x).argmax(-1)

    @property
    def width(self) -> int:
        return self.config.width


def inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return dict(
        x=torch.randn(12, 6, dtype=torch.float64, generator=g), y=torch.randint(4, (12,), generator=g)
    )


def speaker(stage: int):
    original = Speaker()
    plan = plan_of(original, inputs(), stage)
    model, _ = parallelize(original, None, plan, device="cpu", timeout_s=20, check_model=False)
    return Speaker(), original, model


def check_classes_and_attributes_are_the_originals(_) -> None:
    for stage in (0, 2):
        single, _, model = speaker(stage)
        assert isinstance(model, Speaker) and isinstance(model.layers[0][0], nn.Linear)
        assert len(model.layers) == 2 and isinstance(model.layers[0], nn.Sequential)
        assert model.config.name == "speaker" and model.scale == 2.0 and model.width == 8
        assert model.num_weights() == single.num_weights()
        assert model.layers[1].in_features == 8 and model.layers[1].bias is not None
        shown = repr(model).splitlines()
        assert shown[0] == "Speaker(" and f"rank {dist.get_rank()} of 3" in shown[1]
        assert [*shown[:1], *shown[2:]] == repr(single).splitlines()
        assert list(model.state_dict()) == list(single.state_dict())
        assert [n for n, _ in model.named_modules()] == [n for n, _ in single.named_modules()]
        close(model(**inputs()), single(**inputs()))


def check_what_would_run_pieces_is_refused(_) -> None:
    for stage in (0, 2):
        _, _, model = speaker(stage)
        for use in (model.layers[1], model.logits, model.generate):
            with pytest.raises(InputError) as caught:
                use(inputs()["x"])
            assert "with model.whole() as m" in str(caught.value)
        with pytest.raises(InputError, match="before it is parallel|apply on a parallel"):
            model.apply(lambda module: None)


def check_only_a_number_that_was_planned_can_change(_) -> None:
    for stage in (0, 2):
        single, original, model = speaker(stage)
        with pytest.raises(InputError, match="config was planned"):
            model.config = SimpleNamespace(width=9)
        with pytest.raises(InputError, match="inplace was planned"):
            model.layers[0][1].inplace = None
        for m in (single, model):
            m.scale = 3.0
        assert original.scale == 3.0
        close(model(**inputs()), single(**inputs()))
        model.scale, model.epoch = 3.0, 7  # the same value, and one that nothing depends on
        assert model.epoch == 7
        if dist.get_rank() == 0:  # where it has not traced the model, no change would be seen
            model._runtime.forms.reads.of.clear()
            with pytest.raises(InputError, match="scale was planned"):
                model.scale = 2.0
        model.eval()
        assert not model.layers[0].training


def check_the_whole_model_is_the_users_own(_) -> None:
    for stage in (0, 2):
        single, original, model = speaker(stage)
        sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (single, model)]
        for n in range(2):
            for m, optimizer in zip((single, model), sgd):
                optimizer.zero_grad()
                m(**inputs(n)).backward()
                optimizer.step()
        with model.whole() as m:
            assert m is original and type(m) is Speaker and type(m.layers[1].weight) is nn.Parameter
            few = inputs(5)["x"][:5]
            with torch.no_grad():
                close(m.logits(few), single.logits(few))
            assert torch.equal(m.eval().generate(few), single.generate(few))
            file = io.BytesIO()
            torch.save(m.state_dict(), file)
        assert model.training
        with pytest.raises(InputError, match="taken over by parallelize"):
            original.logits(few)
        file.seek(0)
        for name, value in torch.load(file).items():
            close(value, single.state_dict()[name], name)
        close(model(**inputs()), single(**inputs()))


def check_the_parallel_model_runs_what_is_lent(_) -> None:
    """Scripts evaluate the model by a global name, which the block does not change."""
    for stage in (0, 2):
        single, _, model = speaker(stage)
        few = inputs(5)["x"][:5]
        with mixmesh.whole(model) as m, torch.no_grad():
            model.eval()
            assert not m.training and not m.layers[0].training
            close(model(few, inputs(5)["y"][:5]), single(few, inputs(5)["y"][:5]))
            close(model.logits(few), single.logits(few))
            close(model.layers[1](few.new_ones(2, 8)), single.layers[1](few.new_ones(2, 8)))
            assert torch.equal(model.generate(few), single.generate(few))
        model.train()
        for use in (model.layers[0], model.generate):
            with pytest.raises(InputError, match="model.whole"):
                use(few)
        close(model(**inputs()), single(**inputs()))


def check_under_every_plan(_) -> None:
    for name in PLANS:
        single, original = Mlp(0), Mlp(0)
        model, _ = parallelize(original, None, program(name), device="cpu", timeout_s=20)
        with torch.no_grad(), model.whole() as m:
            close(m(**batch(3)), single(**batch(3)), name)
        with torch.no_grad():
            close(model(**batch(0)), single(**batch(0)), name)


def check_changes_within_are_given_back_or_refused(_) -> None:
    for stage in (0, 2):
        _, _, model = speaker(stage)
        with pytest.raises(InputError, match="weights were changed"), model.whole() as m:
            m.layers[1].weight.data.mul_(2)
        with pytest.raises(InputError, match="gradients would be lost"), model.whole() as m:
            m(**inputs()).backward()
        with pytest.raises(KeyError), model.whole() as m:
            m.layers[1].weight.data.mul_(2)
            raise KeyError("of the user")
        with model.whole() as m, torch.no_grad():
            m.layers[1].weight.mul_(3)
            model.load_full_state_dict(m.state_dict())
            tripled = m.layers[1].weight.detach().clone()
        close(model.full_state_dict()["layers.1.weight"], tripled)


def check_an_original_that_was_made_whole_stays(_) -> None:
    for stage in (0, 2):
        _, original, model = speaker(stage)
        original.load_state_dict(model.full_state_dict())
        with torch.no_grad():
            original.layers[1].weight.zero_()
        with model.whole() as m:
            assert m is not original and m.layers[1].weight.abs().sum() > 0
        assert original.layers[1].weight.abs().sum() == 0


class Collecting(nn.Module):
    """A model that collects garbage in the middle of its forward, as a large one may happen to."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 1)

    def forward(self, x):
        hidden = self.lin(x)
        gc.collect()
        return hidden.square().mean()


def check_a_lending_that_is_garbage_changes_nothing(_) -> None:
    for stage in (0, 2):
        single, original, model = speaker(stage)
        lender = Lender(model)
        module = lender.lend()
        lender.itself = lender  # a cycle
        del lender
        before = program_of_collecting()
        assert module is original and before == program_of_collecting()
        few = inputs(5)["x"][:5]
        with torch.no_grad():
            close(module.logits(few), single.logits(few))
        with model.whole() as m:  # another one, as of every original that is whole
            close(m.layers[1].weight, single.layers[1].weight)


def program_of_collecting() -> str:
    return trace(Collecting(), dict(x=torch.ones(12, 6))).graph.fingerprint


def check_a_block_that_is_left_within_a_trace_is_not_in_it(_) -> None:
    def evaluating(model):
        with model.whole() as m:
            yield m

    wanted = program_of_collecting()
    for stage in (0, 2):
        single, original, model = speaker(stage)
        block = evaluating(model)
        close(next(block).layers[1].weight, single.layers[1].weight)
        itself = [block]
        itself.append(itself)
        del block, itself
        assert program_of_collecting() == wanted
        with pytest.raises(InputError, match="taken over by parallelize"):
            original.logits(inputs()["x"])
        with model.whole() as m:
            assert m is original
            close(m.layers[1].weight, single.layers[1].weight)


class Balanced(nn.Module):
    """A layer that leaves an auxiliary loss for the training loop."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.aux_loss, self.calls = nn.Linear(6, 4), 0.0, 3

    def forward(self, x):
        shares = self.gate(x).softmax(-1)
        self.aux_loss = 4 * shares.mean(0).square().sum()
        return shares


class Noting(nn.Module):
    maps: list | None = None  # an attribute of the class

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.layers = nn.ModuleList([Balanced()])
        self.double()

    def forward(self, x, y):
        shares = self.layers[0](x)
        self.maps = [shares]
        return nn.functional.nll_loss(shares.log(), y)

    def penalty(self):
        return sum(layer.aux_loss for layer in self.layers)


def check_what_a_call_leaves_in_attributes_is_refused(_) -> None:
    for kind in ("data_parallel", "fsdp"):
        single, plan = Noting(), output_plan(kind, Noting(), inputs())
        model, _ = parallelize(Noting(), None, Plan.parse(str(plan)), device="cpu", timeout_s=20)
        for each in (model, copy.deepcopy(model)):
            close(each(**inputs()), single(**inputs()))
            for ask, path in ((Noting.penalty, "layers.0.aux_loss"), (attrgetter("maps"), "maps")):
                with pytest.raises(InputError, match=f"leaves a tensor in {path}") as caught:
                    ask(each)
                assert "test_face.py" in caught.value.where and "loss=lambda" in caught.value.hint[0]
            assert type(each).__name__ == "Noting" and isinstance(each.layers[0], Balanced)
            assert each.layers[0].calls == 3 and "gate" in repr(each)
        model.layers[0].aux_loss = 0.0  # before each call, as some loops do
        with pytest.raises(InputError, match="leaves a tensor in"):
            model.penalty()
        with model.whole() as m, torch.no_grad():
            m(**inputs())
            close(m.penalty(), single.penalty())
            close(model.penalty(), single.penalty())


def check_what_a_call_leaves_on_the_script_s_own_model_is_refused_too(_) -> None:
    single, original = Noting(), Noting()
    plan = output_plan("data_parallel", Noting(), inputs())
    model, _ = parallelize(original, None, plan, device="cpu", timeout_s=20)
    own = original.layers[0]

    def check_refused() -> None:
        for use in (
            original.penalty,
            lambda: torch.stack([own.aux_loss]),
            lambda: own.aux_loss.item(),
            lambda: isinstance(own.aux_loss, torch.Tensor),
            lambda: torch.is_tensor(own.aux_loss),
            lambda: own.aux_loss & torch.ones(1),
            lambda: f"{own.aux_loss:.3f}",
            lambda: original.maps[0],
        ):
            with pytest.raises(InputError, match="leaves a tensor in") as caught:
                use()
            assert "test_face.py" in caught.value.where and "own model" in caught.value.got

    check_refused()
    assert "NotLeft(layers.0.aux_loss" in repr(own.aux_loss)
    assert copy.deepcopy(own.aux_loss) == 0.0 and own.calls == 3
    own.aux_loss = 0.0  # before each call, as some loops do
    close(model(**inputs()), single(**inputs()))
    check_refused()
    few = {name: x[:7] for name, x in inputs().items()}
    close(model(**few), single(**few))  # traced again
    check_refused()
    with model.whole() as m, torch.no_grad():
        assert m.penalty() == 0.0
        with model.whole():
            pass
        m(**inputs())
        single(**inputs())
        close(m.penalty(), single.penalty())
    check_refused()
    original.load_state_dict(model.full_state_dict())
    original(**inputs())
    close(original.penalty(), single.penalty())


class Penalised(nn.Linear):
    penalty = 0.0

    def forward(self, x):
        out = super().forward(x)
        self.penalty = out.square().mean()
        return out


def check_a_loss_reads_what_the_script_s_own_model_leaves(_) -> None:
    torch.manual_seed(0)
    net = Penalised(6, 4, dtype=torch.float64)
    single = copy.deepcopy(net)
    whole = with_loss(net, lambda out, y: nn.functional.cross_entropy(out, y) + net.penalty)
    model, _ = parallelize(whole, None, output_plan("fsdp", whole, inputs()), device="cpu", timeout_s=20)
    for size in (12, 7, 12):
        x, y = (v[:size] for v in inputs().values())
        loss, expected = model(x=x, y=y), nn.functional.cross_entropy(single(x), y) + single.penalty
        close(loss, expected)
        with pytest.raises(InputError, match="leaves a tensor in penalty"):
            loss + net.penalty
    assert not model._runtime.forms.reads.changed(Number)  # so a size is traced once


def check_it_cannot_be_pickled(_) -> None:
    _, _, model = speaker(2)
    with pytest.raises(InputError, match="cannot be written as an object") as caught:
        torch.save(model, io.BytesIO())
    assert "full_state_dict" in str(caught.value)
    assert copy.copy(model.config) == model.config


IDIOMS = named(
    check_classes_and_attributes_are_the_originals,
    check_what_would_run_pieces_is_refused,
    check_only_a_number_that_was_planned_can_change,
    check_the_whole_model_is_the_users_own,
    check_the_parallel_model_runs_what_is_lent,
    check_under_every_plan,
    check_changes_within_are_given_back_or_refused,
    check_an_original_that_was_made_whole_stays,
    check_a_lending_that_is_garbage_changes_nothing,
    check_a_block_that_is_left_within_a_trace_is_not_in_it,
    check_what_a_call_leaves_in_attributes_is_refused,
    check_what_a_call_leaves_on_the_script_s_own_model_is_refused_too,
    check_a_loss_reads_what_the_script_s_own_model_leaves,
    check_it_cannot_be_pickled,
)


@pytest.mark.parametrize("name", IDIOMS)
def test_face(outcomes, name):
    assert_passed(outcomes[name])
