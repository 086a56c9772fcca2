"""What a model's own Python does while it is traced: custom functions, checks of values, moves, aliases."""

from __future__ import annotations

import inspect
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from graph_eval import evaluate
from torch import nn

from mixmesh.api import plan
from mixmesh.cluster import Cluster
from mixmesh.errors import TraceError
from mixmesh.frontend.trace import overload, trace
from mixmesh.frontend.trace.simplify import ALIASES
from mixmesh.measure.verification import verify
from mixmesh.training.preparation.outside_loss import with_loss

CLUSTER = Cluster.parse('[[machine]]\ndevices = ["V100-16GB", "T4-16GB"]\n')


class Head(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.fc = nn.Linear(6, 5)
        self.loss = loss

    def forward(self, x):
        return self.loss(self, self.fc(x))


def ops(loss) -> list[str]:
    graph = trace(Head(loss), (torch.randn(8, 6),)).graph
    return [n.op for n in graph.nodes if not n.is_leaf]


def failing(loss) -> TraceError:
    with pytest.raises(TraceError) as caught:
        trace(Head(loss), (torch.randn(8, 6),))
    return caught.value


def cubed(x):
    return x * x * x


class Cube(torch.autograd.Function):
    """Its backward is the derivative of its forward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return cubed(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x * x * g


class Clipped(Cube):
    """Its backward is that of ``Cube`` where gradients are small."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return (3 * x * x * g).clamp(-10, 10)


class Masked(torch.autograd.Function):
    """A softmax that is masked in place, to save memory: autograd refuses that, its own backward does not."""

    @staticmethod
    def forward(ctx, x, hidden):
        output = x.masked_fill(hidden, -1e9).softmax(-1)
        output.masked_fill_(hidden, 0)
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx, g):
        (output,) = ctx.saved_tensors
        return torch._softmax_backward_data(g, output, -1, output.dtype), None


class Leaking(Masked):
    """Its backward leaves something out, and is not linear."""

    @staticmethod
    def backward(ctx, g):
        (output,) = ctx.saved_tensors
        return g.abs() * output, None


def test_a_custom_function_is_traced_if_its_backward_is_autograds():
    assert ops(lambda m, y: Cube.apply(y).mean()) == ops(lambda m, y: cubed(y).mean())
    assert "Clipped" in failing(lambda m, y: Clipped.apply(y).sum()).message


def test_a_custom_function_may_change_what_autograd_would_keep():
    assert "aten.softmax.int" in ops(lambda m, y: Masked.apply(y, y.detach() > 1).square().mean())
    assert "Leaking" in failing(lambda m, y: Leaking.apply(y, y.detach() > 1).sum()).message


def test_a_check_of_values_is_no_branch():
    def checked(m, y):
        if y.abs().max() > 1e6:
            raise ValueError("too large")
        assert torch.all(y > -1e6).item(), "too small"
        return y.mean()

    assert ops(checked) == ["aten.linear", "aten.mean"]

    def drawn(m, y):
        return torch.distributions.MultivariateNormal(torch.zeros(4), torch.eye(4)).log_prob(y[:, :4]).mean()

    # a test before this one may have used torch.compile, which turns these checks off
    torch.distributions.Distribution.set_default_validate_args(True)
    assert "aten.linear" in ops(drawn) and torch.distributions.Distribution._validate_args

    def branch(m, y):
        return y.mean() if y.sum() > 0 else y.sum()

    error = failing(branch)
    assert "y.mean() if y.sum() > 0" in error.where and "torch.where" in error.hint[0]


def test_a_check_of_a_library_routine_is_left_out():
    """``torch.linalg.solve`` checks that a matrix is regular, and export keeps such checks in order."""

    def solved(m, y):
        square = m.fc.weight.T @ m.fc.weight + torch.eye(6)
        twice = torch.linalg.solve(square, torch.linalg.inv(square))
        return (y @ m.fc.weight @ twice).square().mean()

    model, batch = Head(solved), (torch.randn(8, 6),)
    report = verify(model, batch, plan(model, batch, CLUSTER, planner="ddp-proportional"))
    assert report.ok, report


def test_a_module_may_be_moved_to_where_it_is():
    assert ops(lambda m, y: (m.fc.to(torch.float32).weight.sum() * y).sum()).count("aten.linear") == 1
    assert "fc.to(torch.float64)" in failing(lambda m, y: m.fc.to(torch.float64).weight.sum()).where


def test_aliases_take_the_same_arguments():
    for alias, name in ALIASES.items():
        one, other = (overload(op)._schema.arguments for op in (alias, name))
        assert [(a.name, str(a.type)) for a in one] == [(a.name, str(a.type)) for a in other], alias
    assert "aten.mul.Tensor" in ops(lambda m, y: torch.multiply(y, y).sum())


class LeavesOut(nn.Module):
    """Decides as models of transformers do; ``owner`` has the chance, or its configuration."""

    def __init__(self, owner: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.config = SimpleNamespace(layerdrop=0.1)
        self.chance = lambda: self.config.layerdrop
        if owner == "layer":
            self.layer.layerdrop = 0.2
            self.chance = lambda: self.layer.layerdrop

    def forward(self, x):
        skip_the_layer = torch.rand([]) < self.chance()
        if not skip_the_layer:
            x = self.layer(x)
        return x.square().mean()


@pytest.mark.parametrize(
    "owner, name", [("config", "model.config.layerdrop"), ("layer", "model.layer.layerdrop")]
)
def test_layers_that_are_left_out_at_random(owner, name):
    with pytest.raises(TraceError, match="leaves out layers") as caught:
        trace(LeavesOut(owner), {"x": torch.randn(6, 4)})
    assert caught.value.hint == (f"{name} = 0.0, before the model is prepared",)
    assert "if not skip_the_layer" in caught.value.where


def test_spans_that_are_masked_at_random():
    """By NumPy and by the lengths of the samples, as models of speech in transformers do."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Wav2Vec2Config(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=8,
        conv_dim=(4,), conv_stride=(5,), conv_kernel=(10,), num_feat_extract_layers=1,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_length=2, layerdrop=0.0,
    )  # fmt: skip
    model = transformers.Wav2Vec2ForCTC(config).train()
    batch = {
        "input_values": torch.randn(4, 100),
        "attention_mask": torch.ones(4, 100, dtype=torch.long),
        "labels": torch.ones(4, 2, dtype=torch.long),
    }
    with pytest.raises(TraceError, match="masks spans") as caught:
        trace(model, batch)
    assert caught.value.hint[0] == "model.config.apply_spec_augment = False, before the model is prepared"
    model.config.apply_spec_augment = False
    trace(model, batch)


class Noisy(nn.Module):
    """Draws noise as it is told to."""

    def __init__(self, draw) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(4, 4), draw

    def forward(self, x):
        return (self.layer(x) * self.draw()).square().mean()


@pytest.mark.parametrize(
    "draw, name",
    [
        (lambda: np.random.rand(), "numpy.random:"),  # noqa: PLW0108
        (lambda: random.uniform(0, 1), "random:"),
        (lambda: np.random.default_rng().random(), "a new numpy.random.Generator:"),
    ],
)
def test_draws_from_other_generators_are_refused_with_their_line(draw, name):
    with pytest.raises(TraceError, match=f"draws from {name}") as caught:
        trace(Noisy(draw), {"x": torch.randn(6, 4)})
    assert "test_trace_python.py" in caught.value.where and "lambda" in caught.value.where


def test_new_generators_with_a_seed_are_right():
    trace(Noisy(lambda: float(np.random.default_rng(3).random())), {"x": torch.randn(6, 4)})


@pytest.mark.parametrize(
    "loss, got, hint",
    [
        (lambda m, y: y.mean() * max(float(y.max()), 1.0), "a number that is read", "keep the tensor"),
        (lambda m, y: y.mean() * int(y.argmax()), "a number that is read", "keep the tensor"),
        (lambda m, y: y.mean() if len(print(f"{y.sum():.3f}") or ()) else y.sum(), "__format__", "outputs="),
    ],
)
def test_a_number_that_is_read_is_no_branch(loss, got, hint):
    error = failing(loss)
    assert got in error.got and hint in error.hint[0] and "torch.where" not in str(error)


class Queue(nn.Module):
    """Writes keys at a position that a buffer holds, as MoCo."""

    def __init__(self, push):
        super().__init__()
        self.fc = nn.Linear(6, 5)
        self.push = push
        self.register_buffer("queue", torch.randn(5, 24))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        h = self.fc(x)
        loss = (h @ self.queue.clone()).logsumexp(1).mean()
        with torch.no_grad():
            self.push(self, h)
        return loss


def at_a_number(self, keys):
    ptr = int(self.ptr)
    self.queue[:, ptr : ptr + len(keys)] = keys.T
    self.ptr[0] = (ptr + len(keys)) % 24


def at_a_tensor(self, keys):
    n, size = len(keys), 24
    at = (self.ptr + torch.arange(n, device=self.ptr.device)) % size
    self.queue[:, at] = keys.T
    self.ptr.copy_((self.ptr + n) % size)


def test_a_position_in_a_queue_is_refused_with_what_to_write():
    with pytest.raises(TraceError, match="cannot be traced") as caught:
        trace(Queue(at_a_number), (torch.randn(8, 6),))
    for line in inspect.getsource(at_a_tensor).splitlines()[2:]:
        assert line.strip() in caught.value.hint[0]
    assert "ptr = int(self.ptr)" in caught.value.where
    torch.manual_seed(0)
    one, model = Queue(at_a_number).double(), Queue(at_a_tensor).double()
    model.load_state_dict(one.state_dict())
    for n in range(4):
        x = torch.randn(8, 6, dtype=torch.float64)
        graph = trace(model, (x,)).graph
        loss, new = evaluate(graph, dict(model.named_parameters()) | dict(model.named_buffers()), {"0": x})
        torch.testing.assert_close(loss, one(x))
        model.load_state_dict({name: new.get(name, value) for name, value in model.state_dict().items()})
        assert all(torch.equal(b, dict(one.named_buffers())[name]) for name, b in model.named_buffers()), n


def test_a_detector_of_torchvision_is_refused_with_its_backbone(monkeypatch):
    monkeypatch.setattr(Head, "__module__", "torchvision.models.detection.retinanet")
    error = failing(lambda m, y: y.mean() * int(torch.empty(1).uniform_(0, 4).item()))
    assert "detector" in error.message and "model.backbone, body_optimizer, _ =" in error.hint[0]


class Classifier(nn.Module):
    """Asks the labels which loss is meant, unless its configuration says so, as transformers' DeBERTa."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(problem_type=None)
        self.fc = nn.Linear(6, 5)

    def forward(self, x, labels):
        logits = self.fc(x)
        if self.config.problem_type is None:
            kept = (labels >= 0).nonzero()
            if kept.size(0) == 0:
                return logits.sum() * 0
        return nn.functional.cross_entropy(logits, labels)


def test_labels_that_decide_on_the_loss_are_refused_with_the_setting():
    batch = {"x": torch.randn(8, 6), "labels": torch.randint(5, (8,))}
    model = Classifier()
    with pytest.raises(TraceError) as caught:
        trace(model, batch)
    (hint,) = caught.value.hint
    assert hint.startswith('model.config.problem_type = "single_label_classification"')
    model.config.problem_type = "single_label_classification"
    trace(model, batch)


class ReadsValues(nn.Module):
    def forward(self, h):
        return h if h.sum() > 0 else -h


def test_a_setting_is_no_remedy_for_what_an_inner_module_reads():
    model = Classifier()
    model.fc = nn.Sequential(model.fc, ReadsValues())
    with pytest.raises(TraceError) as caught:
        trace(model, {"x": torch.randn(8, 6), "labels": torch.randint(5, (8,))})
    assert "h.sum() > 0" in caught.value.where and "torch.where" in caught.value.hint[0]


def branches(out, labels):
    if (labels > 0).sum() > 2:
        return out.sum()
    return out.mean()


def compares(out, labels):
    return out.sum() if torch.equal(out, out + 1) else out.mean()


def misspells(out, labels):
    return out.meann()


@pytest.mark.parametrize(
    "loss, line, is_of_values",
    [
        (branches, "if (labels > 0).sum() > 2", True),
        (compares, "if torch.equal(out", True),
        (misspells, "out.meann()", False),
    ],
)
def test_errors_of_a_loss_name_its_line_and_the_loop(loss, line, is_of_values):
    batch = torch.randn(8, 6), torch.randint(5, (8,))
    with pytest.raises(TraceError) as caught:
        trace(with_loss(nn.Linear(6, 5), loss), batch)
    assert line in caught.value.where
    assert any("leave loss= out" in hint for hint in caught.value.hint) == is_of_values


def test_a_comparison_of_tensors():
    with pytest.raises(TraceError) as caught:
        trace(Head(lambda m, h: compares(h, None)), {"x": torch.randn(8, 6)})
    assert "compare before prepare" in caught.value.hint[0]
    assert not any("loss=" in hint for hint in caught.value.hint)


@pytest.mark.parametrize(
    "names, got, hint",
    [
        (("x", "labels", "index"), "x, labels, index", "leave index out of the batch"),
        (("x",), "x: missing", "put labels into the batch"),
        (3, "3 values", "a batch of 2 values"),
        (1, "1 values", "put labels into the batch"),
    ],
)
def test_a_batch_that_forward_does_not_take(names, got, hint):
    values = {"x": torch.randn(8, 6), "labels": torch.randint(5, (8,)), "index": torch.arange(8)}
    batch = tuple(values.values())[:names] if isinstance(names, int) else {n: values[n] for n in names}
    with pytest.raises(TraceError, match="does not take the batch") as caught:
        trace(Classifier(), batch)
    error = caught.value
    assert "Classifier.forward(x, labels)" in error.expected and "def forward" in error.where
    assert got in error.got and hint in error.hint[0] and "masks" not in str(error)


def test_an_error_within_forward_is_no_unfit_batch():
    assert "without mixmesh" in failing(lambda m, y: torch.nn.functional.relu(y, 1, 2)).hint[0]


def test_a_branch_in_library_code_says_what_can_be_done_about_it():
    transformers = pytest.importorskip("transformers")
    config = transformers.LongformerConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        attention_window=4,
        max_position_embeddings=20,
    )
    tokens = torch.randint(5, 50, (4, 8))
    with pytest.raises(TraceError) as caught:
        trace(transformers.LongformerForMaskedLM(config), {"input_ids": tokens, "labels": tokens})
    assert "modeling_longformer.py" in caught.value.where
    assert "that line is a library's" in caught.value.hint[0]


class Crops(nn.Module):
    """Runs crops of one size together, as the wrapper of DINO and SwAV for several crops does."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, *crops):
        sizes = torch.tensor([x.shape[-1] for x in crops])
        ends = torch.cumsum(torch.unique_consecutive(sizes, return_counts=True)[1], 0)
        start, out = 0, torch.empty(0)
        for end in ends:
            out = torch.cat((out, self.conv(torch.cat(crops[start:end])).mean((2, 3))))
            start = end
        return out.square().mean() * sizes.tolist()[-1]


def test_numbers_of_small_constant_tensors_are_known():
    batch = tuple(torch.randn(8, 3, size, size) for size in (8, 8, 6, 6, 6))
    model = Crops()
    assert verify(model, batch, plan(model, batch, CLUSTER, planner="ddp-proportional")).ok


def written_by_known_values(m, y):
    numbers = torch.tensor([1, 2, 3])
    numbers[1:].mul_(2)
    numbers[0] = 5
    return y.mean() * int(numbers[0]) * int(numbers[2])


def test_known_values_written_to_a_view_of_a_constant_are_known():
    nodes = trace(Head(written_by_known_values), (torch.randn(8, 6),)).graph.nodes
    assert [n.args[1] for n in nodes if n.op.startswith("aten.mul")] == [5, 6]


def written_by_entry(m, y):
    count = torch.tensor([1])
    count[0] = (y > 0).sum()
    return y.mean() * int(count[0])


def written_by_view(m, y):
    scale = torch.tensor([1.0])
    scale.view(()).add_(y.detach().mean())
    return y.mean() * scale.item()


def written_among_others(m, y):
    sizes = torch.tensor([1.0, 2.0])
    sizes[:1].copy_(y[0, :1].detach())
    return y.mean() * float(sizes[0])


@pytest.mark.parametrize("loss", [written_by_entry, written_by_view, written_among_others])
def test_a_constant_that_is_overwritten_by_a_view_is_no_constant(loss):
    """PyTorch returns its first value."""
    assert "read" in failing(loss).got
