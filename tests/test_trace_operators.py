"""Operators that are written out or given a shape while a model is traced: each model has a rule for all of
them, runs on shards, and equals the module on one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.on_shards import CLUSTER, assert_equals_one_device
from torch import instance_norm, nn
from torch.export import exported_program

from mixmesh.api import plan_traced
from mixmesh.errors import TraceError, VerificationError
from mixmesh.frontend.trace import decompositions, rewrite, trace
from mixmesh.frontend.trace.draws import DRAW_RULES
from mixmesh.lang.ir import Graph, Node, Ref, ValueType
from mixmesh.lang.ir.samples import draws_numbers
from mixmesh.measure.verification import single_device, unsupported_ops, verify
from mixmesh.runtime.interpret import interpret
from mixmesh.runtime.random import RandomPolicy

SAMPLES = 10
X = torch.randn(SAMPLES, 6, 8, generator=torch.Generator().manual_seed(0))
ROWS = X[:, 0].clone()
IDS = torch.randint(0, 20, (SAMPLES, 6), generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(SAMPLES) % 4
TIMES = int(LABELS.sum())


class Model(nn.Module):
    """``loss(self, *batch)``, over some modules."""

    def __init__(self, loss, **modules: nn.Module) -> None:
        super().__init__()
        self.loss = loss
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *batch):
        return self.loss(self, *batch)


def classified(module, h, labels):
    return F.cross_entropy(module.head(h), labels)


def masked_writes(m, x):
    """One value, one vector and one row for all places that a mask chooses, written or added."""
    h, rows = m.mix(x), x[:, 0, 0] > 0
    h[x[..., 0] > 0] = m.own.bias
    h[h > 0.5] = -2
    h[rows, 2] = 0.25
    h = h.index_put([rows], m.own.weight[:6], accumulate=True)
    return m.head(h).square().mean()


def writes_of_another_dtype(m, x):
    """Values are cast as they are written, as under autocast: PyTorch has no derivative for such a copy."""
    h = m.mix(x)
    made = torch.zeros(*h.shape, dtype=torch.float64)
    made[:, 1:3] = h[:, :2]
    made[:, 0].copy_(h[:, 3].half())
    return m.head(made.to(h.dtype)).square().mean()


def cells(m, x, labels):
    h, a, c = x.new_zeros(SAMPLES, 12), x.new_zeros(SAMPLES, 5), x.new_zeros(SAMPLES, 5)
    for t in range(3):
        h = m.gru(x[:, t], h)
        a, c = m.lstm(h, (a, c))
    return classified(m, m.rnn(a), labels)


def bags(m, ids, labels):
    weights = torch.softmax(m.scores(ids).squeeze(-1), 1)
    weighted = F.embedding_bag(ids, m.table.weight, per_sample_weights=weights, mode="sum")
    return classified(m, torch.cat([m.mean(ids), m.largest(ids), m.padded(ids), weighted], 1), labels)


def ctc(reduction):
    def loss(m, x, targets, times, lengths):
        scores = m.head(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, targets, times, lengths, reduction=reduction, zero_infinity=True) / 7

    times, lengths = torch.full((SAMPLES,), 6), 3 - torch.arange(SAMPLES) % 2
    targets = torch.randint(1, 5, (SAMPLES, 3), generator=torch.Generator().manual_seed(3))
    return Model(loss, head=nn.Linear(8, 5)), (X, targets, times, lengths)


def selected(rows, mask):
    return rows.masked_select(mask)


def indexed(rows, mask):
    return rows[mask]


def ctc_of_selected(select):
    """Targets with what does not count anywhere in a row, and a row of which nothing counts."""
    targets = torch.randint(1, 5, (SAMPLES, 4), generator=torch.Generator().manual_seed(3))
    targets[2:6, 0], targets[4:8, 2], targets[5:7, 3], targets[9] = -100, 0, -100, -100

    def loss(m, x, targets):
        mask = (targets != -100) & (targets != 0)
        scores = m.head(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(
            scores, select(targets, mask), torch.full((SAMPLES,), 6), mask.sum(-1), zero_infinity=True
        )

    return Model(loss, head=nn.Linear(8, 5)), (X, targets)


def spectrum(m, x, labels):
    f = torch.fft.rfft(m.mix(x), dim=1) * torch.view_as_complex(m.filter.weight.view(4, 8, 2))
    s = torch.stft(x.flatten(1), 8, 4, window=torch.hann_window(8), return_complex=True).abs()
    return classified(m, torch.fft.irfft(f, n=6, dim=1).mean(1), labels) + m.audio(s.mean(-1)).pow(2).mean()


def fourier_layer(m, x, labels):
    """Products of some frequencies, written where they belong, as in Fourier neural operators."""
    f = torch.fft.rfft(m.mix(x), dim=1)
    out = torch.zeros_like(f)
    out[:, :2] = f[:, :2] * torch.view_as_complex(m.filter.weight.view(2, 8, 2))
    out[:, -1] = f[:, 2]
    out[:, :, 1::3] += f[:, :, ::3]
    return classified(m, torch.fft.irfft(out, n=6, dim=1).mean(1), labels)


def conjugates(m, x, labels):
    z = torch.complex(m.mix(x), x)
    pairs = torch.view_as_real(z.conj().resolve_conj() + z.mH.imag.mT).flatten(2)
    return classified(m, pairs.mean(1), labels)


def strided_pairs(m, x, labels):
    """Pairs that are neighbours in memory only in the model's own copy."""
    z = torch.view_as_complex(torch.complex(m.mix(x), x).real.view(SAMPLES, 6, 4, 2).contiguous())
    z = z * torch.view_as_complex(m.mix(x).view(SAMPLES, 6, 2, 4).mT.contiguous())
    return classified(m, torch.view_as_real(z).flatten(2).mean(1), labels)


def geometry(m, x, labels):
    distances = torch.cdist(m.mix(x), m.points.weight)
    pairs = distances[:, torch.tril_indices(6, 6)[0], torch.tril_indices(6, 6)[1]]
    return classified(m, torch.exp(-pairs), labels) + F.pairwise_distance(x[:, 0], m.mix(x)[:, 1]).mean()


def composites(m, x, labels):
    """Operators of PyTorch that are made of others."""
    h = m.mix(x)
    h = torch.linalg.norm(h, dim=-1) + torch.tensordot(h, torch.ones(8), 1) + torch.nanmean(h, -1)
    h = torch.take_along_dim(h, h.argsort(-1), -1).tile(1, 2) + torch.msort(h.T).T.repeat(1, 2)
    return classified(m, h.unflatten(1, (2, 6)).flatten(1), labels)


def own_instance_norm(norm, x):
    """Instance norm as a model may call it that imported the function when it was loaded."""
    return instance_norm(
        x, None, None, norm.running_mean, norm.running_var, use_input_stats=True, momentum=norm.momentum,
        eps=1e-3, cudnn_enabled=False,
    )  # fmt: skip


def checked(m, x, labels):
    """PyTorch's own checks of values are no branches."""
    mean, log_var = m.mix(x[:, 0]).chunk(2, -1)
    posterior = torch.distributions.Normal(mean, log_var.exp())
    prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    kl = torch.distributions.kl_divergence(posterior, prior).sum(-1).mean()
    policy = torch.distributions.Categorical(logits=m.head(mean))
    return kl - policy.log_prob(labels).mean()


def placeholders(m, ids, images, labels):
    """Features of images in the places of a token, as in models of pictures and words, whose number is
    checked."""
    words, features = m.words(ids), m.images(images)
    mask = (ids == 19).unsqueeze(-1)
    torch._check_tensor_all(mask.sum() * words.shape[-1] == features.numel())
    return classified(m, torch.tanh(words.masked_scatter(mask, features)).mean(1), labels)


def picked(m, x, ids, labels):
    """Entries of each sample: its last one, some of its own from either end, the same ones of all, and a
    padding mask as in transformers."""
    h, rows = m.mix(x), torch.arange(len(x))
    last = (ids % 6).amax(1)
    own = h[rows[:, None], torch.stack([last, -1 - last], 1)]
    shared = h[rows[:, None, None], torch.arange(2)[None, None]].sum(1)
    mask = (ids[:, :6] > 4)[rows[:, None, None, None], torch.arange(6)[None, None, None]]
    masked = (h * mask[:, 0, 0, :, None]).sum(1, keepdim=True)
    return classified(m, torch.cat([h[rows, last][:, None], own, shared, masked], 1).mean(1), labels)


def marked(m, x, ids, labels):
    """Writes to an entry of each sample: a mask up to its end, as in models of sound, and rows of values."""
    h, rows, last = m.mix(x), torch.arange(len(x)), (ids % 6).amax(1)
    mask = torch.zeros(len(x), 6, dtype=torch.long)
    mask[(rows, last)] = 1
    kept = mask.flip([-1]).cumsum(-1).flip([-1]).bool()
    written = h.clone()
    written[rows, -1 - last] = m.own(x[:, 0])
    return classified(m, (written * kept[..., None]).mean(1), labels)


def dense(*sizes: int) -> nn.Linear:
    return nn.Linear(*sizes)


MODELS = {
    "writes of another dtype": lambda: (
        Model(writes_of_another_dtype, mix=nn.Linear(8, 8), head=nn.Linear(8, 4)), (X,)
    ),
    "cells": lambda: (
        Model(
            cells,
            gru=nn.GRUCell(8, 12),
            lstm=nn.LSTMCell(12, 5),
            rnn=nn.RNNCell(5, 7, nonlinearity="relu"),
            head=dense(7, 4),
        ),
        (X, LABELS),
    ),
    "embedding bags": lambda: (
        Model(
            bags,
            table=nn.Embedding(20, 6),
            scores=nn.Embedding(20, 1),
            mean=nn.EmbeddingBag(20, 6, mode="mean"),
            largest=nn.EmbeddingBag(20, 6, mode="max"),
            padded=nn.EmbeddingBag(20, 6, mode="mean", padding_idx=3),
            head=dense(24, 4),
        ),
        (IDS, LABELS),
    ),
    "writes to an entry of each sample": lambda: (
        Model(marked, mix=dense(8, 8), own=dense(8, 8), head=dense(8, 4)), (X, IDS, LABELS)
    ),
    "entries of each sample": lambda: (
        Model(picked, mix=dense(8, 8), head=dense(8, 4)), (X, IDS, LABELS)
    ),
    "CTC, mean": lambda: ctc("mean"),
    "CTC, sum": lambda: ctc("sum"),
    "CTC, targets by masked_select": lambda: ctc_of_selected(selected),
    "CTC, targets by a mask as index": lambda: ctc_of_selected(indexed),
    "a loss that broadcasts": lambda: (
        Model(
            lambda m, x, y: F.mse_loss(m.head(x), y) + F.l1_loss(m.head(x)[:, 0], y[:, 0]), head=dense(8, 4)
        ),
        (ROWS, ROWS[:, :1].clone()),
    ),
    "spectra": lambda: (
        Model(
            spectrum, mix=dense(8, 8), filter=nn.Embedding(4, 16), head=dense(8, 4), audio=dense(5, 3)
        ),
        (X, LABELS),
    ),
    "writes into complex values": lambda: (
        Model(fourier_layer, mix=dense(8, 8), filter=nn.Embedding(2, 16), head=dense(8, 4)), (X, LABELS)
    ),
    "conjugates": lambda: (Model(conjugates, mix=dense(8, 8), head=dense(16, 4)), (X, LABELS)),
    "pairs that are strided": lambda: (
        Model(strided_pairs, mix=dense(8, 8), head=dense(8, 4)), (X, LABELS)
    ),
    "distances": lambda: (
        Model(geometry, mix=dense(8, 8), points=nn.Embedding(6, 8), head=dense(21, 4)),
        (X, LABELS),
    ),
    "composite operators": lambda: (Model(composites, mix=dense(8, 8), head=dense(12, 4)), (X, LABELS)),
    "checks of values": lambda: (Model(checked, mix=dense(8, 8), head=dense(4, 4)), (X, LABELS)),
    "a diagonal filled in place": lambda: (
        Model(lambda m, x: m.head(x).mm(m.head(x).T).fill_diagonal_(-1).exp().mean(), head=dense(8, 4)),
        (ROWS,),
    ),
    "writes by a mask": lambda: (
        Model(masked_writes, mix=dense(8, 8), own=dense(8, 8), head=dense(8, 4)), (X,)
    ),
    "repeats of each column": lambda: (
        Model(
            lambda m, x, y: classified(m, m.mix(x).repeat_interleave(torch.tensor([1, 0, 2, 3, 1, 1]), 1), y)
            + m.mix(x).repeat_interleave(y, 0, output_size=TIMES).square().mean(),
            mix=dense(8, 6),
            head=dense(8, 4),
        ),
        (ROWS, LABELS),
    ),
    "norms without arguments": lambda: (
        Model(lambda m, x: torch.linalg.vector_norm(m.head(x)) + m.head(x).norm(), head=dense(8, 4)),
        (ROWS,),
    ),
    "running statistics of instance norm": lambda: (
        Model(
            lambda m, x: (m.outer(m.inner(own_instance_norm(m.own, m.mix(x)))) ** 3).mean(),
            mix=dense(8, 8),
            own=nn.InstanceNorm1d(6, momentum=0.3, track_running_stats=True),
            inner=nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
            outer=nn.InstanceNorm1d(6, track_running_stats=True).eval(),
        ),
        (X,),
    ),
    "an eps that is that of the dtype": lambda: (
        Model(
            lambda m, x: m.norm(m.mix(x) * 1e-3).pow(3).mean(),
            mix=dense(8, 8),
            norm=nn.RMSNorm(8),
        ),
        (ROWS,),
    ),
    "a weight made anew in every pass": lambda: (
        Model(classified, head=nn.utils.weight_norm(nn.Linear(8, 4))),
        (ROWS, LABELS),
    ),
}  # fmt: skip


def test_other_targets_of_unknown_length_are_refused():
    """Lengths that are not what the mask counts: which targets are whose is then not known."""
    model, (x, targets) = ctc_of_selected(selected)

    def loss(m, x, targets):
        scores = m.head(x).log_softmax(-1).transpose(0, 1)
        lengths = (targets > 0).sum(-1)
        return F.ctc_loss(scores, targets.masked_select(targets > 1), torch.full((SAMPLES,), 6), lengths)

    model.loss = loss
    with pytest.raises(TraceError, match="cannot be traced") as caught:
        trace(model, (x, targets))
    assert "CTC loss" in caught.value.expected and "what counts first" in caught.value.hint[0]
    assert "test_trace_operators.py" in caught.value.where


def test_repeats_whose_number_is_unknown_are_refused():
    def loss(m, x, y):
        return m.head(x).repeat_interleave(y, 0).mean()

    with pytest.raises(TraceError, match="cannot be traced") as caught:
        trace(Model(loss, head=dense(8, 4)), (ROWS, LABELS))
    assert "output_size=n" in caught.value.hint[0]


def test_an_operator_that_looks_at_values_is_refused():
    def weighted(m, x):
        return torch.cov(m.mix(x).T, aweights=torch.ones(SAMPLES)).mean()

    with pytest.raises(TraceError, match="cannot be traced") as caught:
        trace(Model(weighted, mix=dense(8, 8)), (ROWS,))
    assert "looks at its tensor's values" in caught.value.got and "read no values" in caught.value.hint[0]


def test_an_operator_that_runs_on_values_alone():
    """Its types cannot be checked without values; it runs whole."""

    def loss(m, x, labels):
        return classified(m, torch.fake_quantize_per_tensor_affine(m.mix(x), 0.1, 0, -8, 7), labels)

    model, batch = Model(loss, mix=dense(8, 8), head=dense(8, 4)), (ROWS, LABELS)
    traced = trace(model, batch)
    plan = plan_traced(traced, CLUSTER, planner="ddp-proportional")
    assert "fake_quantize" in str(unsupported_ops(plan.program))
    assert verify(model, batch, plan, traced=traced).ok


def test_an_operator_without_a_kernel_for_float64_cannot_be_verified():
    scale, zero = torch.full((SAMPLES,), 0.1), torch.zeros(SAMPLES, dtype=torch.int32)

    def loss(m, x, labels):
        return classified(m, torch.fake_quantize_per_channel_affine(m.mix(x), scale, zero, 0, -8, 7), labels)

    model = Model(loss, mix=dense(8, 8), head=dense(8, 4))
    traced = trace(model, (ROWS, LABELS))
    plan = plan_traced(traced, CLUSTER, planner="ddp-proportional")
    with pytest.raises(VerificationError, match="fake_quantize_per_channel.* does not run in float64"):
        verify(model, (ROWS, LABELS), plan, traced=traced)


COMPLEX_NUMBERS = {
    "1j": lambda z: z * torch.exp(1j * torch.arange(8)),
    "(1+2j)": lambda z: z + torch.full_like(z, 1 + 2j),
    "complex constant of shape []": lambda z: z * torch.tensor(1 + 2j),
}


@pytest.mark.parametrize("got", COMPLEX_NUMBERS)
def test_complex_numbers_in_the_code_are_refused(got):
    def loss(m, x):
        return COMPLEX_NUMBERS[got](torch.complex(m.mix(x), x)).abs().mean()

    with pytest.raises(TraceError) as caught:
        trace(Model(loss, mix=dense(8, 8)), (ROWS,))
    assert got in caught.value.got and "test_trace_operators.py" in caught.value.where
    assert "register_buffer" in caught.value.hint[0]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")  # as is meant
def test_equals_one_device(name):
    torch.manual_seed(0)
    assert_equals_one_device(*MODELS[name]())


def test_entries_of_a_sample_need_no_other_sample():
    names = "entries of each sample", "writes to an entry of each sample", "writes by a mask"
    for name, inputs in zip(names, (3, 3, 1)):
        model, batch = MODELS[name]()
        plan = plan_traced(trace(model, batch), CLUSTER, planner="ddp-proportional")
        operators = [i.op for i in plan.program.instructions]
        assert operators.count("input") == inputs and "all_gather" not in operators


def test_only_indices_that_count_rows_are_taken_apart():
    """Rows of other numbers stay an index of the whole."""
    indices = {
        "from one": lambda x, i: x[torch.arange(1, len(x)), i[1:]],
        "in steps": lambda x, i: x[torch.arange(0, len(x), 2), i[::2]],
        "turned": lambda x, i: x[torch.arange(len(x)).flip(0), i],
        "of columns": lambda x, i: x[i, torch.arange(len(i))],
        "written in steps": lambda x, i: x.index_put((torch.arange(0, len(x), 2), i[::2]), x[0, 0]),
        "added": lambda x, i: x.index_put((torch.arange(len(x)), i), x[0, 0], accumulate=True),
    }
    for name, pick in indices.items():
        model = Model(lambda m, x, i, pick=pick: pick(m.head(x), i).square().mean(), head=dense(8, SAMPLES))
        graph = trace(model, (ROWS, torch.arange(SAMPLES).flip(0) % 4)).graph
        assert any(node.op in ("aten.index.Tensor", "aten.index_put") for node in graph.nodes), name


@pytest.mark.parametrize("name", ["composite operators", "distances", "running statistics of instance norm"])
def test_only_composites_of_the_program_are_marked(name, monkeypatch):
    """The graph is that of a trace which marks all composites of PyTorch."""
    num_marked: list[int] = []
    mark = exported_program._override_composite_implicit_decomp

    def count(composites):
        num_marked.append(len(composites))
        return mark(composites)

    monkeypatch.setattr(exported_program, "_override_composite_implicit_decomp", count)
    monkeypatch.setattr(decompositions, "functional_form", lambda program, table: None)
    model, batch = MODELS[name]()
    graph = trace(model, batch).graph
    assert max(num_marked) < 40
    monkeypatch.setattr(decompositions, "COLLECT", "a name of another version")
    assert str(trace(model, batch).graph) == str(graph)
    assert max(num_marked) > 400


def noisy(m, x, labels):
    t = torch.randint(2, 9, (SAMPLES,))
    x = (x + torch.normal(0.0, 0.1, x.shape)) * torch.empty(SAMPLES, 1).uniform_(0.9, 1.1) / t[:, None]
    h = F.rrelu(m.mix(x[torch.randperm(SAMPLES)]), training=True)
    codes = F.gumbel_softmax(h) + F.one_hot(torch.multinomial(h.softmax(-1), 2), 8).sum(1)
    return classified(m, codes, labels)


def recurrent(m, x, labels):
    h, _ = m.lstm(x)
    h, last = m.gru(h)
    return classified(m, h[:, -1], labels) + last.pow(2).mean()


RANDOM = {
    "noise": lambda: (Model(noisy, mix=dense(8, 8), head=dense(8, 4)), (ROWS, LABELS)),
    "dropout between layers": lambda: (
        Model(
            recurrent,
            lstm=nn.LSTM(8, 5, 3, dropout=0.3, bidirectional=True, batch_first=True),
            gru=nn.GRU(10, 7, 2, dropout=0.2, batch_first=True),
            head=dense(7, 4),
        ),
        (X, LABELS),
    ),
    "a draw without a rule": lambda: (
        Model(
            lambda m, x, y: classified(m, m.mix(x) * torch.poisson(torch.full((8,), 3.0)), y),
            mix=dense(8, 8),
            head=dense(8, 4),
        ),
        (ROWS, LABELS),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_those_of_one_device(name):
    torch.manual_seed(0)
    model, batch = RANDOM[name]()
    traced = trace(model, batch)
    for planner in ("hap", "ddp-proportional"):
        report = verify(model, batch, plan_traced(traced, CLUSTER, planner=planner), traced=traced)
        assert report.ok, f"{planner}: {report}"
        assert report.max_gradient_error_f64 < 1e-9, "the module drew other numbers"


def test_layers_without_dropout_stay_one_operator_and_equal_those_with():
    """In evaluation nothing is drawn; in training the layers written out are the module's."""
    module = nn.LSTM(8, 5, 3, dropout=1e-9, bidirectional=True, batch_first=True)
    model = Model(lambda m, x: sum(t.pow(2).mean() for t in (m.lstm(x)[0], *m.lstm(x)[1])), lstm=module)
    written = trace(model, (X,)).graph
    assert sum(n.op == "aten.lstm.input" for n in written.nodes) == 6
    tensors = {n: t.detach() for n, t in model.named_parameters()}
    out = interpret(single_device(written), tensors, {"0": X}, random=RandomPolicy())
    torch.testing.assert_close(out.loss, model(X).detach(), rtol=1e-5, atol=0)
    kept = trace(model.eval(), (X,)).graph
    assert [n.op for n in kept.nodes if n.op.startswith("aten.lstm")] == ["aten.lstm.input"] * 2


def numbers(op: str, *args, kind: ValueType, **leaves: tuple[float, ...]) -> torch.Tensor:
    """What a random operator gives on one device, as it is traced."""
    nodes = [Node((n,), (ValueType("f32", (len(v),)),), "const", (v,)) for n, v in leaves.items()]
    graph = Graph("draw", (*nodes, Node(("x",), (kind,), op, args)), "x")
    written = rewrite(graph, DRAW_RULES)
    assert all(n.op != op for n in written.nodes)
    return interpret(single_device(written), {}, {}, random=RandomPolicy()).loss


MANY = 20_000


def test_numbers_that_are_written_out_have_their_distribution():
    many = (MANY,)
    whole = numbers("aten.randint.low", -2, 5, many, kind=ValueType("i64", many))
    assert whole.unique().tolist() == [-2, -1, 0, 1, 2, 3, 4]
    assert whole.double().mean().item() == pytest.approx(1, abs=0.06)
    normal = numbers("aten.normal.float_float", 2.0, 3.0, many, kind=ValueType("f32", many))
    assert (normal.mean().item(), normal.std().item()) == (
        pytest.approx(2, abs=0.1),
        pytest.approx(3, abs=0.1),
    )
    ones = (1.0,) * MANY
    uniform = numbers("aten.uniform", Ref("p"), 1.0, 3.0, kind=ValueType("f32", many), p=ones)
    assert 1 <= uniform.min() < 1.01 and 2.99 < uniform.max() <= 3
    waits = numbers("aten.exponential", Ref("p"), 4.0, kind=ValueType("f32", many), p=ones)
    assert waits.min() > 0 and waits.mean().item() == pytest.approx(1 / 4, rel=0.05)
    order = numbers("aten.randperm", MANY, kind=ValueType("i64", many))
    assert order.sort().values.tolist() == list(range(MANY)) and order[:3].tolist() != [0, 1, 2]
    weights = (1.0, 0.0, 3.0, 4.0)
    found = numbers("aten.multinomial", Ref("p"), MANY, True, kind=ValueType("i64", many), p=weights)
    share = [found.eq(c).double().mean().item() for c in range(4)]
    assert share == [pytest.approx(w / 8, abs=0.02) for w in weights] and share[1] == 0
    three = numbers("aten.multinomial", Ref("p"), 3, kind=ValueType("i64", (3,)), p=weights)
    assert sorted(three.tolist()) == [0, 2, 3]


def test_every_functional_draw_of_pytorch_is_known():
    """By the tag that PyTorch gives to what draws numbers; attention and recurrent layers are written out."""
    written_out = ("attention", "rnn", "lstm", "gru")
    unknown = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in getattr(packet, "overloads", lambda: ())():
            op = getattr(packet, overload)
            draws = torch.Tag.nondeterministic_seeded in op.tags and not op._schema.is_mutable
            if draws and not any(word in name for word in written_out) and not draws_numbers(f"aten.{name}"):
                unknown.append(f"{name}.{overload}")
    assert unknown == []
    assert not draws_numbers("aten.poisson_nll_loss") and not draws_numbers("aten.lgamma")


def test_checks_of_values_are_left_out():
    """The operator after it has no rule, and runs whole: the number of a sample's images is not known."""
    torch.manual_seed(0)
    model = Model(placeholders, words=nn.Embedding(20, 5), images=dense(8, 5), head=dense(5, 4))
    ids = IDS.masked_fill(IDS == 19, 0).index_fill(1, torch.tensor([1, 4]), 19)
    batch = (ids, X[:, :2].clone(), LABELS)
    traced = trace(model, batch)
    for planner in ("hap", "fsdp-even"):
        plan = plan_traced(traced, CLUSTER, planner=planner)
        assert verify(model, batch, plan, traced=traced).ok


def test_a_value_that_more_than_a_check_reads_is_refused():
    def loss(m, x):
        return m.head(x).sum() * x.sum().item()

    with pytest.raises(TraceError, match="cannot be traced") as caught:
        trace(Model(loss, head=dense(8, 4)), (ROWS,))
    assert "reads a tensor's value" in caught.value.got and "item()" in caught.value.hint[0]


def test_a_loss_without_a_gradient_is_refused():
    head = nn.Linear(8, 4)
    with pytest.raises(TraceError, match="no trainable parameter") as caught:
        trace(Model(lambda m, x, y: F.cross_entropy(m.head(x).detach(), y), head=head), (ROWS, LABELS))
    assert "without gradients" in caught.value.got and "test_trace_operators" in caught.value.where
    frozen = Model(classified, head=head.requires_grad_(False))
    with pytest.raises(TraceError) as caught:
        trace(frozen, (ROWS, LABELS))
    assert "frozen" in caught.value.got
