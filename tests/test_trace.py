"""Traced graphs compute what the model computes: loss, gradients and buffers, in float64."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from graph_eval import evaluate
from torch import nn

from mixmesh.errors import TraceError
from mixmesh.frontend.trace import covariances, trace
from mixmesh.frontend.trace.simplify import (
    drop_dead,
    drop_identities,
    drop_useless_detach,
    leaves_at_first_use,
    normal_arguments,
    one_factory,
    static_shapes,
)
from mixmesh.lang.ir import Graph, Node, Ref, ValueType
from mixmesh.lang.ir.printing import print_arg

transformers = pytest.importorskip("transformers")
VOCAB = 64


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()


def flat_inputs(batch) -> dict[str, torch.Tensor]:
    pairs = torch.utils._pytree.tree_flatten_with_path(batch)[0]
    names = (".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path) for path, _ in pairs)
    return dict(zip(names, (x for _, x in pairs)))


def call(model, batch):
    out = model(**batch) if isinstance(batch, dict) else model(*batch)
    return out if isinstance(out, torch.Tensor) else out["loss"]


def check(model: nn.Module, batch, tolerance: float = 1e-12) -> Graph:
    """Trace; compare loss, every gradient and every updated buffer with the model's own; return the graph."""
    before = {name: b.clone() for name, b in model.named_buffers()}
    traced = trace(model, batch)
    graph = traced.graph
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers()), "trace changed a buffer"
    check_form(graph)
    params = dict(model.named_parameters())
    assert {n.args[0] for n in graph.params} == set(params)
    loss, updates = evaluate(graph, params | before, flat_inputs(batch))
    trainable = [p for p in params.values() if p.requires_grad]
    got = torch.autograd.grad(loss, trainable, allow_unused=True)
    expected_loss = call(model, batch)
    expected = torch.autograd.grad(expected_loss, trainable, allow_unused=True)
    torch.testing.assert_close(loss, expected_loss, rtol=tolerance, atol=tolerance)
    for name, g, e in zip((n for n, p in params.items() if p.requires_grad), got, expected):
        assert (g is None) == (e is None), f"{name}: gradient {g} expected {e}"
        if e is not None:
            torch.testing.assert_close(g, e, rtol=1e-9, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    changed = {name for name, b in model.named_buffers() if not torch.equal(b, before[name])}
    assert changed <= set(updates)
    for name, value in updates.items():
        torch.testing.assert_close(value, dict(model.named_buffers())[name], rtol=tolerance, atol=tolerance)
    return graph


def check_form(graph: Graph) -> None:
    """What every consumer of a graph may rely on."""
    known: set[str] = set()
    for node in graph.nodes:
        assert len(node.results) == len(node.types)
        assert all(name in known for name in node.inputs), node
        for result in (r for r in node.results if r is not None):
            assert re.fullmatch(r"[A-Za-z0-9_.]+", result) and result not in known
            known.add(result)
        assert node.op not in ("aten.reshape", "aten.clone", "aten.alias", "aten.native_batch_norm"), node
        if node.op in ("aten.view", "aten.expand"):
            assert node.args[1] == node.types[0].shape
        print_arg((node.args, tuple(v for _, v in node.kwargs)))  # has a text
        if node.is_leaf:
            assert node.location == "" and len(node.args) == 1
    assert graph.types[graph.loss].shape == ()
    alive = {graph.loss} | {name for n in graph.nodes for name in n.inputs}
    assert all(n.op in ("param", "update") or set(n.results) & alive for n in graph.nodes)


def ops(graph: Graph) -> Counter:
    return Counter(n.op for n in graph.nodes)


def ids(batch=4, time=10):
    return torch.randint(3, VOCAB, (batch, time))


def language(labels_ignored=False, padded=False):
    x = ids()
    batch = {"input_ids": x, "labels": x.clone()}
    if labels_ignored:
        batch["labels"][:, ::3] = -100
    if padded:
        batch["attention_mask"] = torch.ones_like(x)
        batch["attention_mask"][1, -3:] = 0
        batch["attention_mask"][2, -5:] = 0
    return batch


def images():
    return {"pixel_values": torch.randn(4, 3, 32, 32).double(), "labels": torch.tensor([0, 1, 2, 1])}


def gpt2():
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=VOCAB, n_positions=32,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), language()


def bert():
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config), language(labels_ignored=True, padded=True)


def llama():
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), language()


def t5():
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), language()


def vit():
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32,
        patch_size=8, num_labels=3, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config), images()


def resnet():
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=3
    )
    return transformers.ResNetForImageClassification(config), images()


class VGG(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AvgPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(8 * 64, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, pixel_values, labels):
        return F.cross_entropy(self.classifier(self.features(pixel_values)), labels)


def vgg():
    return VGG(), images()


class Translator(nn.Module):
    """``nn.Transformer`` with a causal mask for its decoder and padding, and a causal encoder behind it."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 16)
        self.layers = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.more = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, source, target):
        padding, given = source == 3, target[:, :-1]
        mask = nn.Transformer.generate_square_subsequent_mask(given.shape[1]).double()
        masks = dict(src_key_padding_mask=padding, memory_key_padding_mask=padding, tgt_mask=mask)
        h = self.layers(self.tokens(source), self.tokens(given), **masks)
        ahead = torch.triu(torch.ones(given.shape[1], given.shape[1], dtype=torch.bool), 1)
        logits = self.head(self.more(h, mask=ahead))
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())


def translator():
    source = ids()
    source[1, -3:] = 3
    return Translator(), {"source": source, "target": ids()}


@pytest.mark.parametrize(
    "make", [gpt2, bert, llama, t5, vit, resnet, vgg, translator], ids=lambda f: f.__name__
)
def test_whole_models(make):
    model, batch = make()
    graph = check(model.double().train(), batch)
    operators = [n for n in graph.nodes if not n.is_leaf and n.op != "update"]
    assert all(n.location for n in operators)


def test_batch_norm_uses_running_statistics_when_evaluating():
    model, batch = resnet()
    model = model.double()
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    graph = check(model.eval(), batch)
    assert not ops(graph)["update"]


def test_batch_norm_of_a_half_type_keeps_wide_statistics():
    model = VGG().bfloat16()
    batch = images() | {"pixel_values": images()["pixel_values"].bfloat16()}
    graph = trace(model, batch).graph
    loss, _ = evaluate(graph, dict(model.named_parameters()) | dict(model.named_buffers()), batch)
    torch.testing.assert_close(loss, call(model, batch), rtol=3e-2, atol=3e-2)
    (moments,) = (n for n in graph.nodes if n.op == "mixmesh.moments")
    assert moments.types[0].dtype == "f64"


# small models


class Head(nn.Module):
    """A linear layer and a loss given by a function of its output and the other inputs."""

    def __init__(self, loss, **buffers):
        super().__init__()
        self.fc = nn.Linear(6, 5)
        self.loss = loss
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x, *rest):
        return self.loss(self, self.fc(x), *rest)


def rows(batch=8):
    return torch.randn(batch, 6).double()


def targets(ignored=-100):
    return torch.tensor([0, 4, ignored, 2, 1, ignored, 3, 3])


WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.1]).double()
LOSSES = {
    "plain": lambda m, y, t: F.cross_entropy(y, t),
    "ignore_index": lambda m, y, t: F.cross_entropy(y, t.clamp(min=-1), ignore_index=-1),
    "smoothing": lambda m, y, t: F.cross_entropy(y, t, label_smoothing=0.2),
    "weights": lambda m, y, t: F.cross_entropy(y, t, weight=m.w),
    "weights and smoothing": lambda m, y, t: F.cross_entropy(y, t, weight=m.w, label_smoothing=0.2),
    "sum": lambda m, y, t: F.cross_entropy(y, t, weight=m.w, reduction="sum"),
    "none": lambda m, y, t: F.cross_entropy(y, t, reduction="none").pow(2).mean(),
    "nll": lambda m, y, t: F.nll_loss(y.log_softmax(-1), t, weight=m.w),
    "spatial": lambda m, y, t: F.cross_entropy(y.view(2, 4, 5).mT, t.view(2, 4), weight=m.w),
    "nll2d": lambda m, y, t: F.nll_loss(
        y.view(2, 2, 2, 5).permute(0, 3, 1, 2).log_softmax(1), t.view(2, 2, 2), m.w
    ),
    "one row": lambda m, y, t: F.cross_entropy(y[0], t[0]),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_class_losses(loss):
    graph = check(Head(loss, w=WEIGHTS).double(), (rows(), targets()))
    for node in graph.nodes:
        if node.op in ("aten.cross_entropy_loss", "aten.nll_loss_nd"):
            assert (node.args + (None, 1))[3] != 1, "a mean is left"


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_probabilities_as_targets(smoothing):
    probabilities = torch.rand(8, 5).double().softmax(-1)
    check(Head(lambda m, y, t: F.cross_entropy(y, t, m.w, label_smoothing=smoothing), w=WEIGHTS).double(),
          (rows(), probabilities))  # fmt: skip


POINTWISE = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": lambda y, t: F.smooth_l1_loss(y, t, beta=0.3),
    "huber": lambda y, t: F.huber_loss(y, t, reduction="sum", delta=0.7),
    "bce": lambda y, t: F.binary_cross_entropy(y.sigmoid(), t, weight=t + 1),
    "bce_logits": lambda y, t: F.binary_cross_entropy_with_logits(y, t, pos_weight=t[0] + 1),
    "kl": lambda y, t: F.kl_div(y.log_softmax(-1), t, reduction="batchmean"),
    "kl log": lambda y, t: F.kl_div(y.log_softmax(-1), t.log(), reduction="sum", log_target=True),
    "soft_margin": F.soft_margin_loss,
    "poisson": F.poisson_nll_loss,
    "cosine": lambda y, t: F.cosine_embedding_loss(y, t, torch.ones(8, dtype=torch.float64)),
}


@pytest.mark.parametrize("loss", POINTWISE.values(), ids=POINTWISE)
def test_pointwise_losses(loss):
    graph = check(Head(lambda m, y, t: loss(y, t)).double(), (rows(), torch.rand(8, 5).double()))
    assert {"aten.mean", "aten.sum"} & set(ops(graph))


GAUSSIAN = {
    "learned": lambda y, t: F.gaussian_nll_loss(y[:, :2], t[:, :2], y[:, 2:4].relu()),
    "of a module": lambda y, t: nn.GaussianNLLLoss(full=True, eps=0.3)(y[:, :2], t[:, :2], y[:, 2:4] ** 2),
    "one for each row": lambda y, t: F.gaussian_nll_loss(y, t, y[:, 0].abs(), reduction="sum"),
    "one for each row, kept": lambda y, t: F.gaussian_nll_loss(y, t, y[:, :1].exp(), reduction="none").sum(),
    "a number": lambda y, t: F.gaussian_nll_loss(y, t, 0.5),
}


@pytest.mark.parametrize("loss", GAUSSIAN.values(), ids=GAUSSIAN)
def test_gaussian_losses(loss):
    """Variances of 0 and below ``eps`` are among these, and have gradients."""
    check(Head(lambda m, y, t: loss(y, t)).double(), (rows(), torch.rand(8, 5).double()))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_negative_variance_makes_the_gaussian_loss_nan(reduction):
    """PyTorch raises an error, which a rank cannot do alone."""
    model = Head(lambda m, y, t: F.gaussian_nll_loss(y, t, t - 0.5, reduction=reduction)).double()
    batch = (rows(), torch.ones(8, 5).double())
    graph = trace(model, batch).graph
    for lowest, is_finite in ((0.5, True), (0.4, False)):
        batch[1][3, 2] = lowest
        loss, _ = evaluate(graph, dict(model.named_parameters()), flat_inputs(batch))
        assert bool(loss.isfinite()) == is_finite


COVARIANCES = {
    "of columns": lambda y, t: (torch.cov(y.T) - torch.cov(t.T)).square().sum(),
    "of all samples": lambda y, t: y.T.cov(correction=0).square().sum() + torch.cov(t[:, 0] * y[:, 0]),
    "correlations": lambda y, t: y.T.corrcoef().square().mean() + torch.corrcoef(y[:, 0]),
    "of a label and an output": lambda y, t: torch.corrcoef(torch.stack([y[:, 1], t[:, 0]]))[0, 1],
}


@pytest.mark.parametrize("loss", COVARIANCES.values(), ids=COVARIANCES)
def test_covariances(loss):
    check(Head(lambda m, y, t: loss(y, t)).double(), (rows(), torch.rand(8, 5).double()))


@pytest.mark.parametrize("shape", [(3, 6), (6,), (1, 6), (3, 1), (3, 0)])
@pytest.mark.parametrize("correction", [0, 1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_covariances_are_those_of_torch(shape, correction, dtype):
    x = torch.randn(shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more corrected than there are samples
        expected = torch.cov(x, correction=correction), torch.corrcoef(x)
        found = covariances.cov(x, correction=correction), covariances.corrcoef(x)
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_all_labels_ignored_is_nan_as_in_torch():
    model = Head(LOSSES["plain"]).double()
    batch = (rows(), torch.full((8,), -100))
    loss, _ = evaluate(trace(model, batch).graph, dict(model.named_parameters()), flat_inputs(batch))
    assert loss.isnan()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.unused = nn.Parameter(torch.zeros(3))
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.out = nn.Linear(8, VOCAB, bias=False)
        self.out.weight = self.embed.weight
        self.steps = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def forward(self, inputs, scale):
        self.steps += 1
        h = self.frozen(self.embed(inputs["tokens"])) * torch.tensor([1.0, 2.0] * 4).double() * scale
        keep = inputs["mask"][0].unsqueeze(-1)
        loss = F.cross_entropy(self.out(h * keep).flatten(0, 1), inputs["tokens"].flatten())
        return {"loss": loss, "logits": h}


def test_tied_unused_frozen_constant_and_nested():
    x = ids()
    batch = {"inputs": {"tokens": x, "mask": (torch.rand(4, 10) > 0.3,)}, "scale": 0.5}
    model = Tied().double()
    graph = check(model, batch)
    params = {n.args[0]: n for n in graph.params}
    assert list(params) == ["embed.weight", "frozen.weight", "frozen.bias", "unused"]
    assert params["frozen.bias"].kwargs == (("trainable", False),) and params["unused"].kwargs == ()
    assert {n.args[0] for n in graph.batch_inputs} == {"inputs.tokens", "inputs.mask.0"}
    (constant,) = (n for n in graph.nodes if n.op == "const")
    assert constant.args == ((1.0, 2.0) * 4,) and constant.types == (ValueType("f32", (8,)),)
    (update,) = (n for n in graph.nodes if n.op == "update")
    assert update.results == () and update.args[0] == "steps" and isinstance(update.args[1], Ref)
    traced = trace(model, batch)
    assert traced.output_has_loss and graph.name == "tied"
    assert traced.warnings == ("parameter unused gets no gradient: the loss does not depend on it",)


def test_many_parameters_without_a_gradient_are_one_warning():
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(6, 5), nn.ModuleList(nn.Linear(6, 5) for _ in range(9))

        def forward(self, x):
            return self.used(x).sum()

    (warning,) = trace(Parts(), (torch.randn(8, 6),)).warnings
    assert warning.startswith("18 parameters get no gradient") and warning.endswith("unused.1.weight, ...")


def test_the_same_tensor_twice_in_a_batch():
    x = rows()
    graph = check(Head(lambda m, y, t: F.mse_loss(y, t[:, :5])).double(), (x, x))
    assert [n.args[0] for n in graph.batch_inputs] == ["0", "1"]
    assert not trace(Head(lambda m, y: y.sum()), (torch.randn(8, 6),)).output_has_loss


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.average = nn.Buffer(torch.zeros(4))

    def forward(self, x):
        with torch.no_grad():
            teacher = self.a(x).tanh()
            self.average.mul_(0.9).add_(teacher.mean(0), alpha=0.1)
        with torch.autocast("cpu", enabled=False):
            y = self.a(x)
        z = torch.utils.checkpoint.checkpoint(self.b, y, use_reentrant=False)
        return ((z - teacher) ** 2).mean() + (z * self.average).sum() + (y.detach() * z).sum()


def test_no_grad_and_detach_stop_gradients_and_checkpoint_does_not():
    check(Blocks().double(), (torch.randn(3, 4).double(),))


SAME = {
    "float": lambda h: h.float(),
    "double": lambda h: h.double(),
    "device": lambda h: h.to(h.device),
    "flatten": lambda h: h.flatten(1),
    "two": lambda h: h.double().flatten(1),
    "of several": lambda h: torch.broadcast_tensors(h, h[:1])[0],
    "view": lambda h: h.view(3, 4),
    "complex": lambda h: torch.view_as_real(torch.view_as_complex(h.view(3, 2, 2))).flatten(1),
}


@pytest.mark.parametrize("block", ["no_grad", "inference_mode", "within_autocast", "around_autocast"])
@pytest.mark.parametrize("same", SAME)
def test_a_block_without_gradients_leaves_those_of_what_it_reads(same, block):
    """Most of these operators return their argument itself, in float64; it has a gradient after the block."""

    class Centered(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            h = self.fc(x)
            own = torch.autocast("cpu", dtype=torch.bfloat16)
            before, within = (own, own) if block == "within_autocast" else (contextlib.nullcontext(), own)
            stops = torch.inference_mode if block == "inference_mode" else torch.no_grad
            with before, stops(), within if block == "around_autocast" else contextlib.nullcontext():
                mean = SAME[same](h).mean()
            return (h - mean).tanh().sum()

    check(Centered().double(), (torch.randn(3, 4).double(),))


def test_complex_values_have_no_gradient_within_no_grad():
    class Spectrum(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            z = torch.view_as_complex(self.fc(x).view(3, 2, 2))
            with torch.no_grad():
                size = z.abs().mean()
            return torch.view_as_real(z / size).tanh().sum()

    check(Spectrum().double(), (torch.randn(3, 4).double(),))


def test_autocast_becomes_casts():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.fc(x)
            return y.float().pow(2).mean()

    model, x = Mixed(), torch.randn(3, 4)
    graph = trace(model, (x,)).graph
    loss, _ = evaluate(graph, dict(model.named_parameters()), {"0": x})
    assert loss == model(x) and graph.types["linear"].dtype == "bf16"


class Teacher(nn.Module):
    """Learns from itself, without a gradient on one side; a value stands beside each block of ``no_grad``."""

    def __init__(self, kind: str):
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(4, 4), nn.Linear(4, 4), kind

    def forward(self, x):
        own = {"none": contextlib.nullcontext, "enabled": self.autocast, "twice": self.autocast}[self.kind]
        with own():
            y = self.a(x)
            with torch.no_grad():
                teacher = self.b(y).tanh()
                with own() if self.kind == "twice" else torch.enable_grad():
                    also = self.b(x)
            z = (y - teacher) ** 2 + also
        with torch.no_grad(), own():
            last = self.a(x)
        return (z.float() * last.float()).mean()

    def autocast(self):
        return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize(("kind", "around"), [("none", True), ("enabled", False), ("twice", True)])
def test_no_grad_within_autocast_stops_gradients(kind, around):
    model, x = Teacher(kind), torch.randn(3, 4)
    graph = trace(model, (x,), autocast=("cpu", "bf16") if around else None).graph
    params = dict(model.named_parameters())
    loss, _ = evaluate(graph, params, {"0": x})
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around):
        expected = model(x)
    for value in (loss, expected):
        assert value.requires_grad
    got, want = (torch.autograd.grad(v, params.values(), allow_unused=True) for v in (loss, expected))
    for name, g, e in zip(params, got, want):
        assert (g is None) == (e is None), name
        if e is not None:
            torch.testing.assert_close(g, e, rtol=2e-2, atol=2e-3, msg=name)


def test_in_place_writes_and_slices():
    def loss(m, y):
        y = y.clone()
        y[:, 0] = 0
        y[:, 1:3] *= 2
        y += y.roll(1, 0)
        first, second = y[:, :4].chunk(2, -1)
        return (first * second).sum() + y[..., -1].unbind(0)[2]

    check(Head(loss).double(), (rows(),))


def fill_diagonal(y):
    pairs = y @ y.T
    pairs.fill_diagonal_(-torch.inf)
    return F.cross_entropy(pairs, torch.arange(len(y)).roll(1))


def fill_diagonal_again(y):
    return (y.repeat(4, 1)[:, :3].clone().fill_diagonal_(2, wrap=True) ** 3).sum()


def write_strided(y):
    y = y.clone()
    y.as_strided((2, 3), (y.shape[1], 1), 1).mul_(2)
    return (y**3).sum()


def call_scatter(y):
    return (torch.as_strided_scatter(y, y[0, :2] ** 2, (2,), (1,), 1) ** 3).sum()


@pytest.mark.parametrize("loss", [fill_diagonal, fill_diagonal_again, write_strided, call_scatter])
def test_writes_by_stride_have_the_gradients_of_one_device(loss):
    check(Head(lambda m, y: loss(y)).double(), (rows(),))


# attention with dropout


def attend(p, **options):
    def loss(m, y):
        q = y[:, :4].reshape(1, 4, 2, 4)
        kv = q[:, :2] if options.get("enable_gqa") else q
        mask = options.get("attn_mask")
        rest = {k: v for k, v in options.items() if k != "attn_mask"}
        return F.scaled_dot_product_attention(q, kv, kv * 2, mask, dropout_p=p, **rest).pow(2).sum()

    return Head(loss).double()


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.tensor([[True, False], [True, True]])},
    "a row fully masked": {"attn_mask": torch.tensor([[False, False], [True, True]])},
    "float": {"attn_mask": torch.tensor([[0.5, -1.0], [0.0, 2.0]]).double()},
    "gqa and scale": {"enable_gqa": True, "scale": 0.3},
}


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
def test_attention_with_dropout_is_written_out(options, monkeypatch):
    x = rows()
    kept = check(attend(0.0, **options), (x,))
    assert ops(kept)["aten.scaled_dot_product_attention"] == 1
    model = attend(0.3, **options)
    graph = trace(model, (x,)).graph
    assert ops(graph)["aten.native_dropout"] == 1
    assert "aten.scaled_dot_product_attention" not in ops(graph)
    # with the dropout taken out, it is the plain attention
    plain = Graph(graph.name, tuple(_without_dropout(n) for n in graph.nodes), graph.loss)
    params = dict(model.named_parameters())
    loss, _ = evaluate(plain, params, {"0": x})
    expected = attend(0.0, **options)
    expected.load_state_dict(model.state_dict())
    torch.testing.assert_close(loss, expected(x))
    got = torch.autograd.grad(loss, list(params.values()))
    want = torch.autograd.grad(expected(x), list(expected.parameters()))
    torch.testing.assert_close(got, want)


def _without_dropout(node: Node) -> Node:
    if node.op != "aten.native_dropout":
        return node
    return Node(node.results, node.types, node.op, (node.args[0], node.args[1], False))


def test_dropout_is_one_operator_and_none_when_evaluating():
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.drop, self.never = nn.Linear(6, 6), nn.Dropout(0.1), nn.Dropout(0.0)

        def forward(self, x):
            return self.never(self.drop(self.fc(x))).sum()

    model, state = Drops(), torch.random.get_rng_state()
    traced = trace(model, (torch.zeros(2, 6),))
    assert torch.equal(torch.random.get_rng_state(), state), "tracing draws nothing"
    (drop,) = (n for n in traced.graph.nodes if n.op == "aten.native_dropout")
    assert drop.args[1:] == (0.1, True) and drop.results[1] is None
    assert "aten.native_dropout" not in ops(trace(Drops().eval(), (torch.randn(2, 6),)).graph)


def test_helper_methods_are_located_themselves():
    def helper(y):
        return y.pow(2).sum()  # in a helper

    graph = trace(Head(lambda m, y: helper(y)), (torch.randn(8, 6),)).graph
    node = graph.producers[graph.loss]
    assert node.location.endswith(line_of("# in a helper")) and node.source.startswith("return y.pow(2)")


# passes on their own

F32 = ValueType("f32", (2, 3))


def graph_of(*nodes: Node) -> Graph:
    leaf = Node(("x",), (F32,), "input", ("x",))
    return Graph("g", (leaf, *nodes), nodes[-1].results[0])


def one(op, *args, shape=(2, 3), dtype="f32", **kwargs) -> Graph:
    return graph_of(Node(("y",), (ValueType(dtype, shape),), op, args, tuple(kwargs.items())))


X = Ref("x")


@pytest.mark.parametrize(
    "graph",
    [
        one("aten.clone", X), one("aten.view", X, (2, 3)), one("aten.slice.Tensor", X, 0, 0, 1 << 62),
        one("aten.native_dropout", X, 0.0, True), one("aten.dropout", X, 0.5, False),
        one("aten.add.Tensor", X, 0), one("aten.mul.Tensor", X, 1), one("aten.cat", (X,)),
        one("aten._to_copy", X), one("aten.expand", X, (2, 3)), one("aten.copy", X, X),
    ],
    ids=lambda g: g.nodes[-1].op,
)  # fmt: skip
def test_identities_are_dropped(graph):
    out = drop_identities(graph)
    assert out.loss == "x" and len(out.nodes) == 1


@pytest.mark.parametrize(
    "graph",
    [
        one("aten.view", X, (3, 2), shape=(3, 2)), one("aten.mul.Tensor", X, 2), one("aten.detach", X),
        one("aten.native_dropout", X, 0.1, True), one("aten.add.Tensor", X, X),
        one("aten.cat", (X, X), 0, shape=(4, 3)),
        one("aten.add.Tensor", X, 0.0, dtype="f64"),
    ],
    ids=lambda g: g.nodes[-1].op,
)  # fmt: skip
def test_what_does_something_stays(graph):
    assert drop_identities(graph) == graph


def test_cat_drops_empty_pieces():
    empty = Node(("e",), (ValueType("f32", (0,)),), "const", ((),))
    both = Node(("y",), (ValueType("f32", (4, 3)),), "aten.cat", ((Ref("e"), X, X), 0))
    assert drop_identities(graph_of(empty, both)).nodes[-1].args == ((X, X),)  # dim 0 is the default
    single = Node(("y",), (F32,), "aten.cat", ((Ref("e"), X), -2))
    assert drop_identities(graph_of(empty, single)).loss == "x"


def test_arguments_have_one_form():
    def arguments(*args, **kwargs):
        node = normal_arguments(one("aten.layer_norm", X, (3,), *args, **kwargs)).nodes[-1]
        return node.args, node.kwargs

    assert arguments(None, None, 1e-5, False) == ((X, (3,)), ())
    assert arguments(eps=0.1) == ((X, (3,), None, None, 0.1), ())
    softmax = normal_arguments(one("aten.softmax.int", X, dtype=None, dim=-1)).nodes[-1]
    assert softmax.args == (X, -1) and softmax.kwargs == ()
    assert normal_arguments(one("aten.add.Tensor", X, 2, alpha=1)).nodes[-1].kwargs == ()
    assert normal_arguments(one("aten.add.Tensor", X, 2, alpha=3)).nodes[-1].kwargs == (("alpha", 3),)
    arange = normal_arguments(one("aten.arange", 4, shape=(4,), dtype="i64", pin_memory=False)).nodes[-1]
    assert str(dict(arange.kwargs)["dtype"]) == "i64" and len(arange.kwargs) == 1


def test_shapes_are_static_and_factories_one():
    assert static_shapes(one("aten.reshape", X, (-1,), shape=(6,))).nodes[-1].args == (X, (6,))
    assert static_shapes(one("aten.expand", X, (4, -1, -1), shape=(4, 2, 3))).nodes[-1].args == (X, (4, 2, 3))
    for op, args, value in [
        ("aten.zeros", ((2, 3),), 0.0), ("aten.ones_like", (X,), 1.0), ("aten.new_full", (X, (2, 3), 7), 7.0),
        ("aten.empty", ((2, 3),), 0.0), ("aten.scalar_tensor", (4,), 4.0),
    ]:  # fmt: skip
        node = one_factory(one(op, *args)).nodes[-1]
        assert (node.op, node.args) == ("aten.full", ((2, 3), value)) and str(node.kwargs[0][1]) == "f32"


def test_dead_code_order_and_detach():
    p = Node(("p",), (F32,), "param", ("p",))
    idle = Node(("idle",), (F32,), "param", ("idle",))
    dead = Node(("dead",), (F32,), "aten.relu", (X,))
    made = Node(("made",), (F32,), "aten.full", ((2, 3), 1.0))
    useless = Node(("d",), (F32,), "aten.detach", (Ref("made"),))
    useful = Node(("e",), (F32,), "aten.detach", (Ref("p"),))
    of_batch = Node(("f",), (F32,), "aten.detach", (X,))  # a script may ask for the gradient of the batch
    total = Node(("y",), (F32,), "aten.add.Tensor", (Ref("f"), Ref("e")))
    update = Node((), (), "update", ("b", Ref("d")))
    graph = drop_dead(graph_of(idle, p, dead, made, useless, update, useful, of_batch, total))
    assert "dead" not in {r for n in graph.nodes for r in n.results}
    graph = leaves_at_first_use(drop_useless_detach(graph))
    assert [n.results[0] if n.results else n.op for n in graph.nodes] == [
        "made",
        "update",
        "p",
        "e",
        "x",
        "f",
        "y",
        "idle",
    ]


# errors


def failing(loss, *rest):
    with pytest.raises(TraceError) as caught:
        trace(Head(loss), (torch.randn(8, 6), *rest))
    return caught.value


def line_of(text: str) -> str:
    with open(__file__) as file:
        (line,) = (n for n, t in enumerate(file, 1) if text in t and "line_of" not in t)
    return f"test_trace.py:{line}"


def test_a_loss_must_be_a_scalar():
    error = failing(lambda m, y: y)
    assert "scalar" in error.message and "[8, 5]" in error.got and "scalar" in error.expected
    assert "test_trace.py" in error.where
    assert "loss.mean()" in failing(lambda m, y: y.sum(1)).hint[0]
    assert "tuple of 2" in failing(lambda m, y: (y, y.sum(0))).got
    assert "logits" in failing(lambda m, y: {"logits": y}).got
    model, batch = gpt2()
    with pytest.raises(TraceError) as caught:
        trace(model, {"input_ids": batch["input_ids"]})
    assert "labels" in caught.value.hint[0]
    with pytest.raises(TraceError, match="how the model is called"):
        trace(model, batch["input_ids"])


def test_control_flow_on_values():
    def loss(m, y):
        if y.sum() > 0:  # on a value
            return y.mean()
        return y.sum()

    error = failing(loss)
    assert line_of("# on a value") in error.where and "torch.where" in error.hint[0]
    assert len(str(error).splitlines()) <= 6 and "Traceback" not in str(error)


def test_sizes_and_numbers_from_values():
    def positive(m, y):
        return y[y > 0].cumsum(0).sum()  # a mask

    assert line_of("# a mask") in failing(positive).where
    assert "reads a tensor's value" in failing(lambda m, y: y.sum() * y.max().item()).got


def test_errors_of_the_model_itself():
    def loss(m, y):
        raise ValueError("no such thing")  # raised here

    error = failing(loss)
    assert "ValueError: no such thing" in error.got and line_of("# raised here") in error.where
    error = failing(lambda m, y: F.linear(y, m.fc.weight[:, :2]).sum())  # wrong shapes
    assert line_of("# wrong shapes") in error.where and "RuntimeError" in error.got


def test_gradients_that_would_be_wrong_are_refused():
    class Sign(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sign()

        @staticmethod
        def backward(ctx, g):
            return g.sign()

    error = failing(lambda m, y: Sign.apply(y).sum())
    assert "Sign" in error.message and "test_trace.py" in error.where
    assert Sign.apply(torch.ones(1)).item() == 1, "apply is as before"


def no_grad_write(m, y):
    with torch.no_grad():
        y.clamp_(min=0)
    return y.square().mean()


def no_grad_write_under_autocast(m, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return no_grad_write(m, F.linear(y, m.fc.weight[:, :5])).float()


def detached_write(m, y):
    first = (y * 2).detach()[:, :1]
    y.view(2, 4, 5).detach()[:, :, 1:].mul_(first.view(2, 4, 1))
    return y.square().mean() + m.fc.weight.sum()


@pytest.mark.parametrize("loss", [no_grad_write, no_grad_write_under_autocast, detached_write])
def test_writes_where_gradients_are_stopped_are_refused(loss):
    error = failing(loss)
    assert "changed in place where gradients are stopped" in error.message and "test_trace.py" in error.where


def gains_in_a_buffer(m, y):
    m.held.detach()[:4].copy_(y[0, :4])
    return y.sum()


def gains_through_the_detached_value(m, y):
    t = torch.zeros(8, 5).detach()
    t[:, 0] = y.sum(1)
    return (y * t).sum()


def gains_in_what_was_detached(m, y):
    t = torch.zeros(8, 5)
    t.detach().copy_(y)
    return (y * t).sum()


@pytest.mark.parametrize(
    "loss", [gains_in_a_buffer, gains_through_the_detached_value, gains_in_what_was_detached]
)
def test_gradients_written_where_they_are_stopped_are_refused(loss):
    with pytest.raises(TraceError, match="written where gradients are stopped") as caught:
        trace(Head(loss, held=torch.ones(5)), (torch.randn(8, 6),))
    assert "test_trace.py" in caught.value.where


def test_a_value_with_a_gradient_is_written_to_a_copy():
    def loss(m, y):
        t = y.detach().clone()
        t[:, 0] = y.sum(1)
        u = torch.zeros(8, 5).detach()
        u[:, 0] = y.detach().sum(1)
        return (y * t * u).sum()

    check(Head(loss).double(), (rows(),))


def test_what_has_only_the_shape_of_a_value_with_a_gradient_may_be_written():
    """A mask of the best entries, as in routers of mixtures of experts."""

    def loss(m, y):
        mask, scale, kept = torch.zeros_like(y), y.new_ones(8, 5), torch.full_like(y, 0.5)
        with torch.no_grad():
            mask.scatter_(1, y.topk(2, dim=1).indices, 1.0)
            scale[:, :2] = 3
        kept.detach().mul_(torch.ones_like(y))
        return (mask * scale * kept * y).square().sum()

    check(Head(loss).double(), (rows(),))
    error = failing(lambda m, y: ((z := torch.zeros_like(y)).copy_(y).detach().mul_(2), z.sum())[1])
    assert "changed in place where gradients are stopped" in error.message


def test_writes_to_what_has_no_gradient_or_is_a_copy_are_traced():
    def loss(m, y):
        with torch.no_grad():
            small = y * 2
            small.clamp_(max=1)
            m.held.mul_(0.9).add_(small.mean(0))
        y.detach().clone().zero_()
        return (y * small * m.held).sum()

    check(Head(loss, held=torch.ones(5)).double(), (rows(),))


class Named(nn.Linear):
    def __init__(self, read):
        super().__init__(6, 5)
        self.read = read

    def forward(self, input, names):
        return super().forward(input).square().mean() * self.read(names)


def test_lists_of_words_are_given_to_models_that_do_not_read_them():
    batch = {"input": torch.randn(8, 6), "names": ["a"] * 8}
    traced = trace(Named(lambda names: 2.0 if names is not None else 1.0), batch)
    assert traced.arguments == (("input", "tensor"), ("names", "words"))
    for read in (len, lambda names: len(names[0]), lambda names: len("".join(names)), lambda n: n.index("a")):
        with pytest.raises(TraceError, match="reads strings of the batch") as caught:
            trace(Named(read), batch)
        assert "names" in caught.value.got and "test_trace.py" in caught.value.where


def test_other_refusals():
    changed = failing(lambda m, y, t: (t.add_(1) * y).sum(), torch.ones(8, 5))
    assert changed.message.endswith("changes what it was given: 1")
    assert line_of("(t.add_(1) * y)") in changed.where
    limited = Head(lambda m, y: y.sum())
    limited.fc = nn.Embedding(5, 8, max_norm=1.0)
    with pytest.raises(TraceError, match="changes a parameter: fc.weight") as caught:
        trace(limited, (torch.arange(8) % 5,))
    of_parameter = caught.value
    assert "max_norm" in of_parameter.hint[1]
    counted = failing(lambda m, y: y.sum() * torch.bincount(y.argmax(1)).sum())
    assert "minlength=n" in counted.hint[0]
    for loss in (
        lambda m, y: y.sum() / len(torch.unique(y.argmax(1))),
        lambda m, y: y.sum() * torch.unique(y.argmax(1)).numel(),
        lambda m, y: sum(y[y.argmax(1) == c].mean() for c in y.argmax(1).unique()),
    ):
        assert "range(n)" in failing(loss).hint[0]
    big = torch.arange(300 * 300.0).reshape(300, 300)
    assert "register" in failing(lambda m, y: y.sum() * big.sum()).hint[0]


@pytest.mark.parametrize(
    "counts",
    [
        lambda y, best: torch.bincount(best, minlength=5),
        lambda y, best: best.bincount(minlength=5).double().square(),
        lambda y, best: torch.bincount(best, y.sum(1).detach(), 7),
        lambda y, best: torch.bincount(best[best > 1] * 2 + best[best > 1], minlength=16),
        lambda y, best: torch.bincount((y > 0).int()[y > -0.5], minlength=3),
    ],
)
def test_counts_of_values(counts):
    def loss(m, y):
        numbers = counts(y, y.argmax(1))
        return (numbers * torch.arange(1, len(numbers) + 1)).sum() * y.square().sum()

    graph = check(Head(loss).double(), (rows(),))
    assert "aten.index_add" in {n.op for n in graph.nodes}


def test_a_value_that_is_too_large_to_be_counted_raises_an_error():
    model = Head(lambda m, y, t: y.sum() * torch.bincount(t, minlength=3).sum())
    graph = trace(model, (torch.randn(8, 6), torch.zeros(8, dtype=torch.long))).graph
    inputs = {"0": torch.randn(8, 6), "1": torch.arange(8)}
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        evaluate(graph, dict(model.named_parameters()), inputs)


def test_weights_changed_in_forward_are_refused_with_their_module():
    class Clamped(nn.Linear):
        @torch.autocast("cpu", enabled=False)
        def forward(self, x):
            self.weight.data.clamp_(-0.1, 0.1)
            return super().forward(x)

    model = nn.Sequential(nn.Linear(6, 6), Clamped(6, 5))
    model.forward = lambda x: nn.Sequential.forward(model, x).sum()
    with pytest.raises(TraceError, match="changes a parameter: 1.weight") as caught:
        trace(model, (torch.randn(8, 6),))
    assert "self.weight.data.clamp_(-0.1, 0.1)" in caught.value.where
    assert "after optimizer.step()" in caught.value.hint[0]


def replaced_parameter(m, y):
    m.fc.bias.data = m.fc.bias.data * 0.9
    return y.sum()


def replaced_value(m, y):
    t = y.detach() * 2
    t.data = t + 1
    return (y * t).sum()


@pytest.mark.parametrize("loss", [replaced_parameter, replaced_value])
def test_data_that_is_replaced_is_refused_with_its_line(loss):
    error = failing(loss)
    name = "m.fc.bias.data =" if loss is replaced_parameter else "t.data ="
    assert name in error.where and ("a parameter: fc.bias" in error.message or "no program" in error.got)


def test_data_is_a_value_without_a_gradient():
    def loss(m, y):
        m.held.data.mul_(0.9).add_(y.data.mean(0), alpha=0.1)
        rounded = y + (y.round() - y).data
        return (rounded * m.held).square().sum() / m.fc.weight.data.norm()

    check(Head(loss, held=torch.ones(5)).double(), (rows(),))

    def written(m, y):
        t = torch.ones(8, 5, dtype=y.dtype)
        t.data *= 2
        m.held.data += y.data.mean(0)
        m.fc.bias.data = m.fc.bias.data
        return (y * t * m.held).sum()

    check(Head(written, held=torch.ones(5)).double(), (rows(),))
    error = failing(lambda m, y: ((z := y * 2).data.clamp_(0), z.square().sum())[1])
    assert "changed in place where gradients are stopped" in error.message


UPDATES = {
    "another dtype": lambda m, y: m.held.copy_((y > 0).sum(0)),
    "a scalar": lambda m, y: m.held.copy_(y.detach().mean()),
    "both, and fewer dims": lambda m, y: m.held.copy_((y > 0).sum()),
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_an_updated_buffer_keeps_its_dtype_and_shape(update):
    def loss(module, y):
        update(module, y)
        return y.square().mean()

    graph = check(Head(loss, held=torch.zeros(5)).double(), (rows(),))
    (last,) = (n for n in graph.nodes if n.op == "update")
    assert str(graph.types[last.inputs[0]]) == "f64[5]"


def test_updates_of_buffers_are_part_of_their_layers():
    """Each stands behind what makes its value, so that layers with batch norm are alike and planned once."""
    from mixmesh.search.synthesis.fold import fold

    class Squared(nn.Sequential):
        def forward(self, x):
            return super().forward(x).square().mean()

    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(12)]
    graph = trace(Squared(*layers), (torch.randn(16, 8),)).graph
    made: set[str] = set()
    for before, node in zip(graph.nodes, graph.nodes[1:]):
        if before.op != "update":
            made = {r for r in before.results if r is not None}
        if node.op == "update":
            assert set(node.inputs) <= made
    updates = [n for n in graph.nodes if n.op == "update"]
    assert len(updates) == 3 * len(layers) == len({n.args[0] for n in updates})
    (run,) = fold(graph).runs
    assert run.count >= 8
