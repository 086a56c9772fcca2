"""Cross entropy whose classes may be cut: operators against PyTorch's, what a model is traced to, programs
that cut classes against the single device, and what they cost."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from gloo_world import assert_passed, assert_trains_alike, run_world
from small_graphs import THREE, cluster
from torch import nn

from mixmesh.cost import CostModel
from mixmesh.errors import VerificationError
from mixmesh.frontend.trace import losses, trace
from mixmesh.lang.check import check_program
from mixmesh.lang.ir import Partial, Shard, make_ratio, parse_program, samples_of
from mixmesh.lang.operators import (
    PIECE_BYTES,
    cross_entropy,
    cross_entropy_of_part,
    sum_exp,
    sum_exp_of_part,
)
from mixmesh.lang.optimizer_states import ADAM
from mixmesh.measure.verification import verify
from mixmesh.passes.recomputation import recomputed
from mixmesh.planner.hap import Synthesis, synthesised
from mixmesh.planner.task import Task
from mixmesh.planner.tried import Tried
from mixmesh.search.baselines import data_parallel
from mixmesh.search.synthesis import Choices, Problem, emit, search
from mixmesh.search.synthesis.choices import P
from mixmesh.simulator import simulate
from mixmesh.step.memory import Memory

NONE, SUM = 0, 2
IGNORED = -100
SHAPES = {"rows": (7, 13), "series": (4, 13, 3), "images": (2, 13, 3, 2)}
PARTS = {"uneven": (2, 10, 1), "halves": (6, 7), "alone": (13,)}
COSTS = CostModel(cluster(THREE))
# the last leaves a rank without classes, and one without samples
RATIOS = [(0.5, 0.3, 0.2), (0.6, 0.0, 0.4), (0.02, 0.9, 0.08)]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def few_classes(monkeypatch):
    """As if few classes were many."""
    monkeypatch.setattr(losses, "MANY_CLASSES", 2)


def whole(x, target, reduction=SUM, label_smoothing=0.0):
    return cross_entropy(x, sum_exp(x), target, reduction, IGNORED, label_smoothing)


def in_parts(x, target, sizes, reduction=SUM, label_smoothing=0.0):
    pieces, first, total = x.split(sizes, 1), 0, 0.0
    sums = sum(sum_exp_of_part(p) for p in pieces)
    for piece in pieces:
        options = (reduction, IGNORED, label_smoothing, first, x.shape[1])
        total = total + cross_entropy_of_part(piece, sums, target, *options)
        first += piece.shape[1]
    return total


def pytorchs(x, target, reduction=SUM, label_smoothing=0.0):
    name = {NONE: "none", SUM: "sum"}[reduction]
    return F.cross_entropy(x, target, reduction=name, label_smoothing=label_smoothing, ignore_index=IGNORED)


def rows(shape, dtype=torch.float64, scale=3.0):
    """Logits and labels, of which some do not count."""
    x = (torch.randn(shape, dtype=torch.float64) * scale).to(dtype).requires_grad_()
    target = torch.randint(shape[1], (shape[0], *shape[2:]))
    target.view(-1)[1::3] = IGNORED
    return x, target


def error(got, want) -> float:
    """Largest difference, relative to the largest entry."""
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()


# --- the operators -------------------------------------------------------------------------------------


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", [NONE, SUM])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_pytorchs_cross_entropy(shape, reduction, label_smoothing):
    x, target = rows(shape)
    options = (reduction, label_smoothing)
    want = pytorchs(x, target, *options)
    g = torch.randn_like(want)
    (want_dx,) = torch.autograd.grad(want, x, g)
    found = [whole(x, target, *options), *(in_parts(x, target, p, *options) for p in PARTS.values())]
    for got in found:
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        (dx,) = torch.autograd.grad(got, x, g)
        torch.testing.assert_close(dx, want_dx, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 30.0, 100.0])
def test_single_precision_is_as_good_as_pytorchs(scale):
    x, target = rows((40, 3000), torch.float32, scale)
    exact = x.detach().double().requires_grad_()
    want = pytorchs(exact, target)
    (want_dx,) = torch.autograd.grad(want, exact)
    errors = []
    for f in (whole, lambda x, t: in_parts(x, t, (1200, 1700, 100)), pytorchs):
        got = f(x, target)
        errors.append((error(got, want), error(torch.autograd.grad(got, x)[0], want_dx)))
    *ours, theirs = errors
    assert all(a < 1.5 * b + 3e-7 for mine in ours for a, b in zip(mine, theirs)), errors


@pytest.mark.parametrize("shift", [-3e38, -1e5, -700.0, 0.0, 650.0, 1e5, 1e30])
def test_whole_rows_have_any_logits(shift):
    """Sums that f64 cannot hold are told by their logarithm."""
    x, target = rows((9, 50), torch.float32)
    x = (x.detach() + shift).requires_grad_()
    x.data[:, 7] = -math.inf  # a class that is ruled out
    target[target == 7] = 8
    results = [f(x, target) for f in (whole, pytorchs)]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5 * max(1.0, abs(shift) * 1e-2))
    grads = [torch.autograd.grad(y, x)[0] for y in results]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6 * max(1.0, abs(shift)))


def test_parts_see_what_is_too_large_for_them():
    """No wrong number: the loss is not finite. What is very small beside the rest counts as nothing."""
    x, target = rows((4, 9))
    target[:] = 2
    assert in_parts(x + 800, target, (4, 5)).isinf() and whole(x + 800, target).isfinite()
    assert not in_parts(x - 800, target, (4, 5)).isfinite()
    for never in (-math.inf, -1e9, -650.0):
        ruled_out = torch.cat([x[:, :4], torch.full((4, 5), never, dtype=x.dtype)], 1)
        got = in_parts(ruled_out, target, (4, 5))
        torch.testing.assert_close(got, pytorchs(ruled_out, target), rtol=1e-12, atol=0)
    broken = x.detach().clone()
    broken[0, 0] = math.nan
    assert in_parts(broken, target, (4, 5)).isnan() and whole(broken, target).isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_have_wide_losses(dtype):
    x, target = rows((12, 400), dtype)
    exact = x.detach().double().requires_grad_()
    want = pytorchs(exact, target)
    (want_dx,) = torch.autograd.grad(want, exact)
    for got in (whole(x, target), in_parts(x, target, (150, 250))):
        assert got.dtype == torch.float32 and error(got, want) < 1e-6
        (dx,) = torch.autograd.grad(got, x)
        assert dx.dtype == dtype and error(dx, want_dx) < torch.finfo(dtype).eps


def test_logits_are_read_piece_by_piece():
    x, target = rows((30, 40000), torch.float32)
    assert x.nbytes > 2 * PIECE_BYTES
    exact = x.detach().double().requires_grad_()
    for f in (whole, lambda x, t: in_parts(x, t, (39000, 1000))):
        got, want = f(x, target), pytorchs(exact, target)
        assert error(got, want) < 1e-6
        assert error(torch.autograd.grad(got, x)[0], torch.autograd.grad(want, exact)[0]) < 1e-5
    strided = torch.randn(40000, 30).T.requires_grad_()
    torch.testing.assert_close(whole(strided, target), pytorchs(strided, target))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gpus_compute_the_same(dtype):
    x, target = rows((33, 5000), dtype)
    for f in (whole, lambda x, t: in_parts(x, t, (4000, 1000))):
        found = []
        for device in ("cpu", "cuda"):
            leaf = x.detach().to(device).requires_grad_()
            loss = f(leaf, target.to(device))
            found.append((loss.cpu(), torch.autograd.grad(loss, leaf)[0].cpu()))
        torch.testing.assert_close(*found)


def test_what_is_no_class_is_refused():
    x, target = rows((5, 6))
    for wrong in (6, -1):
        target[0] = wrong
        with pytest.raises((RuntimeError, IndexError)):
            whole(x, target)
        with pytest.raises(RuntimeError, match="none of 6 classes"):
            in_parts(x, target, (2, 4))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, s, t: sum_exp(x[0]),
        lambda x, s, t: sum_exp(x.long()),
        lambda x, s, t: cross_entropy(x, s[1:], t, SUM, IGNORED, 0.0),
        lambda x, s, t: cross_entropy(x, s, t[1:], SUM, IGNORED, 0.0),
        lambda x, s, t: cross_entropy(x, s, t, 1, IGNORED, 0.0),
    ],
)
def test_kernels_are_never_given_what_does_not_fit(call):
    x, target = rows((5, 6))
    with pytest.raises(RuntimeError):
        call(x, sum_exp(x), target)


# --- graphs --------------------------------------------------------------------------------------------

VOCAB = 13


class Language(nn.Module):
    """A few words, a table at one or both ends, and a loss of any kind."""

    def __init__(self, vocab=VOCAB, tied=False, bias=True, dtype=None, form="mean", **options) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, 6, dtype=dtype)
        self.up, self.down = nn.Linear(6, 8, dtype=dtype), nn.Linear(8, 6, dtype=dtype)
        self.head = nn.Linear(6, vocab, bias=bias, dtype=dtype)
        if tied:
            self.head.weight = self.table.weight
        self.form, self.options = form, options

    def forward(self, ids, labels):
        h = self.table(ids)
        logits = self.head(h + self.down(self.up(h).relu()))
        match self.form:
            case "mean":
                return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **self.options)
            case "series":  # classes are dim 1
                return F.cross_entropy(logits.mT, labels, **self.options)
            case "sum":
                return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 50
            case "none":
                each = F.cross_entropy(logits.mT, labels, reduction="none", **self.options)
                return (each * each.detach().sigmoid()).mean()
            case "wide":
                return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), **self.options)
            case "autocast":
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    logits = self.head(h + self.down(self.up(h).relu()))
                    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **self.options)


def words(vocab=VOCAB, samples=6, length=5, ignored=True) -> dict[str, torch.Tensor]:
    ids = torch.randint(vocab, (samples, length))
    labels = ids.roll(1, 1)
    if ignored:
        labels[:2, 1:4] = IGNORED
    return {"ids": ids, "labels": labels}


def ops_of(model, batch):
    return [n.op for n in trace(model, batch).graph.nodes]


def test_many_classes_are_two_operators():
    many = losses.MANY_CLASSES
    ops = ops_of(Language(many), words(many))
    assert ops.count("mixmesh.sum_exp") == ops.count("mixmesh.cross_entropy") == 1
    assert "aten.cross_entropy_loss" not in ops
    graph = trace(Language(many), words(many)).graph
    (sums,) = (n for n in graph.nodes if n.op == "mixmesh.sum_exp")
    assert sums.result not in graph.requires_grad and sums.inputs[0] in graph.requires_grad


@pytest.mark.parametrize("case", ["few", "weights", "probabilities", "one row"])
def test_other_losses_stay_as_they_are(case):
    vocab = losses.MANY_CLASSES - (case == "few")

    class Other(Language):
        def forward(self, ids, labels):
            logits, labels = self.head(self.table(ids)).flatten(0, 1), labels.flatten()
            if case == "weights":
                return F.cross_entropy(logits, labels, torch.ones(vocab))
            if case == "probabilities":
                return F.cross_entropy(logits, logits.detach().softmax(-1))
            if case == "one row":
                return F.cross_entropy(logits[0], labels[0])
            return F.cross_entropy(logits, labels)

    ops = ops_of(Other(vocab), words(vocab))
    assert "aten.cross_entropy_loss" in ops and "mixmesh.sum_exp" not in ops


# --- programs ------------------------------------------------------------------------------------------


def with_cut_classes(graph, ratio):
    """The cheapest program whose classes are cut, and with them the head."""
    (sums,) = (n for n in graph.nodes if n.op == "mixmesh.sum_exp")
    product = sums
    while product.op not in ("aten.linear", "aten.matmul"):
        product = graph.producers[product.inputs[0]]
    choices, cut_first = Choices(graph, COSTS), 2
    (loss,) = (n for n in graph.nodes if n.op == "mixmesh.cross_entropy")
    forced = {sums.result: P, loss.result: P, loss.inputs[0]: cut_first + 1}
    if graph.producers[product.inputs[1]].op == "param":  # a small copy of one is never cut
        forced[product.inputs[1]] = cut_first
    numbered = {choices.ids[name]: code for name, code in forced.items()}
    problem = Problem(graph, COSTS, make_ratio(ratio), choices=choices, forced=numbered)
    return emit(problem, search(problem))


def dealt(graph, ratio):
    return data_parallel(graph, COSTS, make_ratio(ratio))


def the(program, op: str):
    (instruction,) = (i for i in program.instructions if i.op == op)
    return instruction


def cuts_classes(program) -> bool:
    """Whether the classes of the logits are cut, for both operators."""
    logits = {the(program, f"mixmesh.{op}").inputs[0] for op in ("sum_exp", "cross_entropy")}
    placements = [program.types[name].placement for name in logits]
    return all(isinstance(p, Shard) and p.dim == 1 for p in placements)


FORMS = {
    "mean": {},
    "series": {"form": "series"},
    "sum": {"form": "sum"},
    "none": {"form": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "series with smoothing": {"form": "series", "label_smoothing": 0.3},
    "padding": {"ignore_index": 3},
    "tied": {"tied": True},
    "tied without bias": {"tied": True, "bias": False},
}


@pytest.mark.parametrize("ratio", RATIOS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_training_equals_one_device(form, ratio, few_classes):
    """Also with ranks without classes; classes are not divisible."""
    model, batch = Language(**FORMS[form]), words(ignored="sum" not in form)
    if form == "padding":
        batch["labels"][batch["labels"] == IGNORED] = 3
    traced = trace(model, batch)
    for made, is_cut in ((with_cut_classes, True), (dealt, False)):
        program = made(traced.graph, ratio)
        assert cuts_classes(program) == is_cut
        report = verify(model, batch, program, traced=traced, steps=3)
        assert report.ok and report.max_gradient_error_f64 < 1e-9


@pytest.mark.parametrize("form", ["mean", "wide", "autocast"])
def test_half_types_train(form, few_classes):
    dtype = None if form == "autocast" else torch.bfloat16
    model, batch = Language(form=form, dtype=dtype), words()
    traced = trace(model, batch)
    program = with_cut_classes(traced.graph, RATIOS[0])
    assert cuts_classes(program)
    report = verify(model, batch, program, traced=traced)
    assert report.ok and report.max_gradient_error_f64 < 1e-9


def test_all_targets_may_be_ignored_on_a_rank(few_classes):
    model, batch = Language(), words()
    batch["labels"][3:] = IGNORED
    traced = trace(model, batch)
    for made in (with_cut_classes, dealt):
        assert verify(model, batch, made(traced.graph, RATIOS[0]), traced=traced).ok


def huggingface(name: str):
    transformers = pytest.importorskip("transformers")
    common = dict(vocab_size=53)
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=1,
            n_head=2,
            n_embd=16,
            n_positions=16,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            **common,
        )
        model = transformers.GPT2LMHeadModel(config)
    elif name == "bert":
        config = transformers.BertConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=16, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **common,
        )  # fmt: skip
        model = transformers.BertForMaskedLM(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
            intermediate_size=32, max_position_embeddings=16, **common,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(3, 53, (4, 7))
    labels = ids.clone()
    labels[:, ::3] = IGNORED
    return model, {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_language_models_of_transformers(name, few_classes):
    model, batch = huggingface(name)
    traced = trace(model, batch)
    program = with_cut_classes(traced.graph, RATIOS[0])
    assert cuts_classes(program)
    report = verify(model, batch, program, traced=traced, steps=2)
    assert report.ok and report.max_gradient_error_f64 < 1e-9


@pytest.fixture
def program(few_classes):
    return with_cut_classes(trace(Language(), words()).graph, RATIOS[0])


def test_one_sum_of_a_number_per_row(program):
    sums = program.producers[the(program, "mixmesh.cross_entropy").inputs[1]]
    assert sums.op == "all_reduce" and sums.inputs == (the(program, "mixmesh.sum_exp").result,)
    assert str(sums.type.value) == "f64[30]" and isinstance(
        the(program, "mixmesh.sum_exp").type.placement, Partial
    )
    # in the forward pass of three ranks, and not in the backward pass
    events = simulate(program, COSTS, events=True).events
    assert sum(e.size_bytes == 8 * 30 and e.op == "all_reduce" for e in events) == 3


def test_programs_print_and_are_checked(program):
    text = str(program)
    assert parse_program(text) == program and "mixmesh.cross_entropy(" in text
    check_program(program)
    line = next(line for line in text.splitlines() if "mixmesh.sum_exp(" in line)
    with pytest.raises(VerificationError, match="another type"):
        check_program(parse_program(text.replace("f64[30]", "f32[30]")))
    with pytest.raises(VerificationError, match="cannot be computed with these placements"):
        check_program(parse_program(text.replace(line, line.replace("P(sum)", "R"))))


def test_activations_are_computed_again(few_classes):
    model, batch = Language(), words()
    traced = trace(model, batch)
    again = recomputed(with_cut_classes(traced.graph, RATIOS[0]))
    assert any(i.attrs for i in again.instructions)
    assert verify(model, batch, again, traced=traced).ok


def test_samples_may_be_micro_batches(few_classes):
    graph = trace(Language(), words()).graph
    samples = samples_of(dealt(graph, RATIOS[0]))
    (sums,) = (n.result for n in graph.nodes if n.op == "mixmesh.sum_exp")
    assert sums in samples.values


# --- costs ---------------------------------------------------------------------------------------------


def test_data_parallelism_costs_no_more(monkeypatch):
    """Than with PyTorch's operator, but for one kernel more: in the step, in memory."""
    vocab, found = 5000, []
    for many in (10**9, losses.MANY_CLASSES):
        monkeypatch.setattr(losses, "MANY_CLASSES", many)
        graph = trace(Language(vocab), words(vocab, 60, 20)).graph
        program = dealt(graph, RATIOS[0])
        step_s = simulate(program, COSTS).step_s
        found.append((step_s, Memory(program, ADAM).peaks(program)))
    (before_s, before_bytes), (after_s, after_bytes) = found
    assert after_s < before_s + 20e-6
    assert all(a <= b for a, b in zip(after_bytes, before_bytes))


def test_the_search_cuts_classes_where_that_is_faster():
    """A head of many words; whole classes are looked at as well."""
    vocab = 20000
    graph = trace(Language(vocab), words(vocab, 600)).graph
    task = Task(graph, CostModel(cluster(THREE, 40)), ADAM, lambda _: None)
    for whole_s in (None, 1.0):
        program, *_ = Synthesis(task).find(make_ratio(RATIOS[0]), 1.0, Tried(), whole_s=whole_s)
        assert cuts_classes(program) == (whole_s is None)
    assert Synthesis(task).find(make_ratio(RATIOS[0]), 1.0, Tried(), whole_s=1e-6)[0] is None
    proposals = list(synthesised(task))
    best = min(proposals, key=lambda p: p.key)
    assert cuts_classes(best.program)
    # once more at its price, after data parallelism
    assert [cuts_classes(p.program) for p in proposals][-2:] == [True, False]


# --- between processes ---------------------------------------------------------------------------------


class Training:
    """A class, since closures do not pickle."""

    def __init__(self, ratio, **options) -> None:
        self.ratio, self.options = ratio, options

    def __call__(self, _) -> None:
        losses.MANY_CLASSES = 2  # a process of its own
        torch.manual_seed(0)
        batches = [words(ignored=True) for _ in range(4)]
        single, mine = (Language(dtype=torch.float64, **self.options) for _ in range(2))
        mine.load_state_dict(single.state_dict())
        program = with_cut_classes(trace(mine, batches[0]).graph, self.ratio)
        assert cuts_classes(program)
        assert_trains_alike(single, mine, program, batches)


CHECKS = {
    f"{name} {ratio}": Training(ratio, **FORMS[name])
    for name in ("mean", "tied", "series with smoothing")
    for ratio in RATIOS
}


@pytest.fixture(scope="module")
def results():
    return run_world(3, CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_between_processes(results, name):
    assert_passed(results[name])
