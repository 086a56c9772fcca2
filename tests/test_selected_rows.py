"""Rows that a mask selects: all rows stay, with the mask. Each model runs on shards and equals the module on
one device, or is refused with its line."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.on_shards import CLUSTER, assert_equals_one_device, assert_samples_stay
from torch import nn

from mixmesh.api import plan_traced
from mixmesh.errors import TraceError
from mixmesh.frontend.trace import trace
from mixmesh.measure.verification import verify
from mixmesh.runtime.interpret import interpret

SAMPLES, CLASSES = 10, 4
DRAW = torch.Generator().manual_seed(0)
X = torch.randn(SAMPLES, 6, 8, generator=DRAW)
LABELS = torch.randint(0, CLASSES, (SAMPLES, 6), generator=DRAW).masked_fill(
    torch.rand(SAMPLES, 6, generator=DRAW) < 0.4, -100
)
DEPTHS = torch.rand(SAMPLES, 6, 8, generator=DRAW).mul(2).sub(0.7).clamp(min=0)
BATCH = {"x": X, "labels": LABELS, "depths": DEPTHS}


class Model(nn.Module):
    def __init__(self, loss) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.loss = loss
        self.mix, self.head, self.deep = nn.Linear(8, 16), nn.Linear(16, CLASSES), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(16)
        self.register_buffer("kept", torch.tensor([True, False, True, True, False, True]))

    def forward(self, x, labels, depths):
        return self.loss(self, x, labels, depths)

    def scores(self, x):
        return self.head(torch.tanh(self.mix(x)))

    def predicted(self, x):
        return F.softplus(self.deep(torch.tanh(self.mix(x)))) + 1e-3


def cross_entropy(m, x, labels, _):
    scores = m.scores(x)
    return F.cross_entropy(scores[labels != -100], labels[labels != -100])


def flat_with_module(m, x, labels, _):
    active = (labels != -100).view(-1) == 1
    loss = nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.tensor([1.0, 2, 3, 4]))
    return loss(m.scores(x).view(-1, CLASSES)[active], labels.view(-1)[active])


def divided_by_length(m, x, labels, _):
    active = labels.view(-1) != -100
    scores, targets = m.scores(x).view(-1, CLASSES)[active], labels.view(-1)[active]
    return F.cross_entropy(scores, targets, reduction="sum") / len(targets)


def asked_for_gradients(m, x, labels, _):
    scores, rows = m.scores(x)[labels >= 0], x[labels >= 0]
    assert scores.requires_grad and not scores.is_leaf and scores.grad_fn is not None
    assert rows.is_leaf and not rows.requires_grad
    return scores.logsumexp(-1).mean() + (scores - scores.data).square().sum()


def soft_targets(m, x, labels, _):
    mask = labels >= 0
    targets = F.softmax(x[..., :CLASSES], -1)[mask]
    return F.cross_entropy(m.scores(x)[mask], targets) + F.kl_div(
        F.log_softmax(m.scores(x)[mask], -1), targets, reduction="batchmean"
    )


def of_valid_depths(m, x, _, depths):
    """Logarithms of zero where nothing is selected, and a root of what is zero there."""
    valid = depths > 0
    difference = m.predicted(x)[valid].log() - depths[valid].log()
    return (difference.square().mean() - 0.85 * difference.mean() ** 2).sqrt() + difference.var()


def of_losses(m, x, labels, _):
    each = F.cross_entropy(m.scores(x).transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return each[labels >= 0].mean() + each.masked_select(labels == 1).sum() / 10


def focal(m, x, labels, _):
    mask = labels >= 0
    each = F.log_softmax(m.scores(x)[mask], -1).gather(1, labels[mask].unsqueeze(1)).squeeze(1)
    return -((1 - each.exp()) ** 2 * each).mean()


def of_samples(m, x, labels, _):
    """Whole samples, through layers."""
    kept = x[:, 0, 0] > 0
    h = m.norm(F.gelu(m.mix(x[kept])))
    return F.nll_loss(F.log_softmax(m.head(h.mean(1)), -1), labels[kept][:, 0].clamp(min=0))


def of_pairs(m, x, labels, _):
    mask = labels >= 0
    one_hot = F.one_hot(labels[mask], CLASSES).float()
    scores = m.scores(x)[mask]
    weighted = F.binary_cross_entropy_with_logits(scores, one_hot, pos_weight=torch.tensor([1.0, 2, 3, 4]))
    return weighted + F.mse_loss(scores.sigmoid(), one_hot) + nn.HuberLoss()(scores, one_hot)


def written_back(m, x, labels, _):
    h, mask = m.mix(x), labels >= 0
    h[mask] = m.norm(h[mask] * 2) + 1
    h[labels < 0] += m.norm.bias
    return m.head(h).square().mean()


def by_bytes(m, x, labels, _):
    """Old masks, and rows that are written back broadcast."""
    h, mask = m.mix(x), (labels >= 0).byte()
    h[mask] = h[mask].mean(-1, keepdim=True)
    return m.head(h)[mask].square().mean()


def counted(m, x, labels, _):
    mask = labels >= 0
    scores = m.scores(x)[mask]
    right = (scores.argmax(-1) == labels[mask]).float().mean()
    return (
        scores.square().sum() / scores.shape[0] + scores.abs().sum() / scores.numel() + right * scores.mean()
    )


def of_those(m, x, labels, _):
    mask = labels >= 0
    scores, classes = m.scores(x)[mask], labels[mask]
    return scores[classes > 1].square().mean() + scores[classes == 0].sum() / 10


def of_columns(m, x, labels, _):
    scores, mask = m.scores(x), labels >= 0
    both = torch.cat([scores[mask], scores[mask] * 2], -1)
    return (scores[mask, 2] - scores[mask][:, 1]).square().mean() + both[..., 0:2].abs().mean()


def of_directions(m, x, labels, _):
    h, other = m.mix(x)[labels >= 0], x.repeat(1, 1, 2)[labels >= 0]
    near = F.cosine_similarity(h, other, dim=-1)
    return (1 - near).mean() + F.normalize(h, dim=-1).sum(0).square().mean()


def weighted(m, x, labels, _):
    mask = labels >= 0
    weights = torch.tensor([1.0, 2, 3, 4])[labels[mask]]
    each = F.cross_entropy(m.scores(x)[mask], labels[mask], reduction="none")
    return (each * weights).sum() / weights.sum()


def by_numbers(m, x, labels, _):
    """Rows by their numbers, as ``nonzero`` and ``where`` give them."""
    scores, flat = F.log_softmax(m.scores(x), -1).flatten(0, 1), labels.flatten()
    there = (flat >= 0).nonzero().squeeze(1)
    of_all = torch.where(labels >= 0)
    (others,) = (flat == 1).nonzero(as_tuple=True)
    h = m.mix(x)
    h[of_all] = m.norm(h[of_all])
    scores_of_one = scores.index_select(0, others)[:, 1].mean()
    return -scores[there, flat[there]].mean() - scores_of_one + m.head(h).square().mean() / len(X)


def by_a_buffer(m, x, *_):
    return m.mix(x).transpose(0, 1)[m.kept].square().mean()


def by_a_constant(m, x, *_):
    kept = torch.tensor([True, False, True, True, False, True])
    return m.mix(x)[:, kept].view(SAMPLES, 4, -1).square().mean()


def variances(m, x, labels, _):
    rows = m.scores(x)[labels >= 0]
    return (
        rows.var(1, correction=0).mean() + rows.std(-1, correction=2, keepdim=True).mean() + rows.std(False)
    )


def weights_of_elements(m, x, labels, _):
    """The mean of these two losses is by the sum of the weights."""
    mask = labels >= 0
    scores, other, weight = m.scores(x)[mask], x[..., :4][mask], x[..., 4:][mask].abs()
    absolute = F.l1_loss(scores, other, weight=weight)
    return F.mse_loss(scores, other, weight=weight) + absolute + F.huber_loss(scores, other, weight=weight)


def changed_by_views(m, x, labels, _):
    """Operators in place change the other names and the views of the rows, and not what they came from."""
    scores = m.scores(x)
    mask = labels >= 0
    rows = scores[mask]
    same, halves = rows, rows.view(-1, 2, 2)
    same += 1
    rows.mul_(2).clamp_(max=3)
    rows[:, 0] = 0.5
    rows[:, 1:3] = scores[mask][:, 2:]
    rows[rows < -1] = -1
    return halves.square().mean() + scores.mean()


def undefined_elsewhere(m, x, labels, depths):
    """What is computed of the rows has no logarithm or root where nothing is selected."""
    valid, scale = depths > 0, m.norm.weight[0]
    predicted = (m.predicted(x) + 1)[valid]
    powers = (predicted - 0.9).sqrt() + (predicted - 0.9).log() + (predicted - 0.9) ** 0.3
    return (scale * (powers + 1 / (predicted - 0.5) + (predicted + 0.4).sub(0.3).acosh())).mean()


def indices_out_of_bounds(m, x, labels, _):
    """Numbers of the rows that are not selected may lie outside a table."""
    far, mask = labels + 1000, labels >= 0
    ids = far[mask] - 1000
    chosen = m.scores(x)[mask].gather(1, ids[:, None]).mean() + (1000 // far[mask]).sum() / 100
    return (
        chosen
        + (F.one_hot(ids, CLASSES) * F.embedding(ids, m.head.bias[:, None])).mean()
        + m.head.bias[ids].sum()
    )


def numbers_first(m, x, labels, depths):
    """Functions of torch that also take a number first."""
    rows, large = m.scores(x)[labels >= 0], depths[depths > 0]
    chosen = torch.where(rows > 0, rows, 0.0) + torch.pow(rows, 2) + torch.remainder(rows, 2)
    return chosen.mean() + torch.float_power(large, 2).float().mean() * rows.mean()


def of_few_bits(m, x, labels, _):
    rows = (m.scores(x)[labels >= 0] * 3000).half()
    return rows.abs().mean().float() / 3000


def shapes(m, x, labels, _):
    rows, scores = m.scores(x)[x[:, 0, 0] > 0], m.scores(x)[labels >= 0]
    flat = rows.view(rows.size(0), -1) + rows.new_zeros(1, 24)
    assert rows.is_floating_point() and not rows.is_sparse
    whole = scores.sum(0, keepdim=True).square().mean() + F.mse_loss(scores, torch.ones_like(scores))
    return whole + F.dropout(flat, 0.5, training=False).mean() + scores[scores > 0].log1p().mean()


LOSSES = {
    f.__name__: f
    for f in (
        asked_for_gradients,
        cross_entropy, flat_with_module, soft_targets, of_valid_depths, of_losses, focal, of_samples,
        of_pairs, written_back, by_bytes, counted, of_those, of_columns, of_directions, weighted, by_numbers,
        by_a_buffer, by_a_constant, variances, weights_of_elements, changed_by_views, undefined_elsewhere,
        indices_out_of_bounds, numbers_first, of_few_bits, shapes, divided_by_length,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_equals_one_device(name):
    assert_samples_stay(assert_equals_one_device(Model(LOSSES[name]), BATCH))


def or_nothing(m, x, labels, _):
    """As the error for ``if mask.any():`` says."""
    mask = labels >= 0
    total = F.cross_entropy(m.scores(x)[mask], labels[mask], reduction="sum")
    return (total + m.mix(x)[mask].square().sum()) / mask.sum().clamp(min=1)


@pytest.mark.parametrize("loss", [cross_entropy, or_nothing], ids=lambda f: f.__name__)
def test_no_row_at_all_is_as_on_one_device(loss):
    model, batch = Model(loss), {**BATCH, "labels": torch.full_like(LABELS, -100)}
    traced = trace(model, BATCH)
    plan = plan_traced(traced, CLUSTER, planner="ddp-proportional")
    expected = model(**batch)
    assert expected.isnan() if loss is cross_entropy else expected == 0
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    loss = interpret(plan.program, tensors, batch).loss
    torch.testing.assert_close(loss, expected, equal_nan=True)


def compared(m, x, labels, _):
    rows = m.scores(x)[labels >= 0]
    return (rows @ rows.T).mean()


def sorted_rows(m, x, labels, _):
    return m.scores(x)[labels >= 0].flatten().sort().values[:3].mean()


def changed_in_place(m, x, labels, _):
    rows = m.scores(x)[labels >= 0]
    rows[0] = 0
    return rows.mean()


def drawn_in_place(m, x, labels, _):
    rows = m.scores(x)[labels >= 0]
    rows.normal_()
    return rows.mean()


def mask_changed(m, x, labels, _):
    mask = labels >= 0
    rows = x[mask]
    mask &= labels < 2
    return rows.mean() * m.scores(x).mean()


def paired_with_a_list(m, x, labels, _):
    rows = m.scores(x)[labels >= 0, [0]]
    return (rows - rows.mean()).square().sum() / rows.ndim


def asked_for(m, x, labels, _):
    rows = m.scores(x)[labels >= 0]
    return rows.mean() if len(rows) else rows.sum() * 0


def returned(m, x, labels, _):
    return {"loss": m.scores(x).mean(), "rows": m.scores(x)[labels >= 0]}


@pytest.mark.parametrize(
    "loss",
    [
        compared,
        sorted_rows,
        changed_in_place,
        drawn_in_place,
        mask_changed,
        paired_with_a_list,
        returned,
    ],
    ids=lambda f: f.__name__,
)
def test_what_needs_their_number_is_refused(loss):
    with pytest.raises(TraceError) as caught:
        trace(Model(loss), BATCH, outputs=("rows",) if loss is returned else ())
    assert "test_selected_rows.py:" in caught.value.where and caught.value.hint


def test_a_branch_on_their_number_equals_one_device():
    """A mean of the rows, or zero if there is none."""
    assert_equals_one_device(Model(asked_for), BATCH)


def test_masks_with_a_write_between_are_not_the_same():
    """Two masks that are written alike differ if what they are made of has changed."""

    def loss(m, x, labels, _):
        scores, labels = m.scores(x), labels.clone()
        first = scores[labels >= 0]
        labels.clamp_(max=0)
        labels.sub_(1).masked_fill_(labels == -1, 1)
        return F.cross_entropy(first, labels[labels >= 0])

    with pytest.raises(TraceError):
        trace(Model(loss), BATCH)


def test_a_source_that_changes_later_keeps_the_rows():
    """The selected rows themselves, where a function needs them, are those of before the change."""

    def loss(m, x, labels, _):
        scores, labels = m.scores(x).log_softmax(-1).transpose(0, 1).repeat(3, 1, 1), labels.clone()
        mask = labels > 0
        targets, lengths = labels[mask], mask.sum(-1)
        labels.zero_()
        return F.ctc_loss(scores, targets, torch.full((SAMPLES,), 18), lengths, zero_infinity=True)

    model = Model(loss)
    traced = trace(model, BATCH)
    report = verify(model, BATCH, plan_traced(traced, CLUSTER, planner="ddp-proportional"), traced=traced)
    assert report.max_loss_error < 1e-6 and report.max_gradient_error < 1e-4


def test_weights_of_an_l1_loss_of_whole_tensors():
    def loss(m, x, labels, _):
        return F.l1_loss(m.scores(x), x[..., :4], weight=x[..., 4:].abs())

    model = Model(loss)
    traced = trace(model, BATCH)
    report = verify(model, BATCH, plan_traced(traced, CLUSTER, planner="ddp-proportional"), traced=traced)
    assert report.ok, report


def test_masks_of_a_tensor_that_is_written_to_between_them_differ():
    """Through a view, before either mask is computed of what it is computed of."""

    def written(m, x, *_):
        x = x.clone()
        flat, before = x.view(-1), x.sum(-1)
        flat.mul_(-1)
        after = x.sum(-1)
        mask, other = before > 0, after > 0
        return (m.scores(x)[mask] * m.scores(x)[other]).sum()

    with pytest.raises(TraceError, match="known only at run time"):
        trace(Model(written), BATCH)


def test_an_index_keeps_its_dims_after_an_ellipsis():
    """``x[..., 0, :]`` is a row, not ``x[..., 0]``."""

    def loss(m, x, labels, depths):
        rows = m.mix(x).view(SAMPLES, 6, 4, 4)
        return (rows[..., 0, :] * rows[..., 1, :].detach()).sum() + rows[..., None, :, :].square().mean()

    assert_equals_one_device(Model(loss), BATCH)


def pairs(m, x, labels, _):
    """All but a sample's likeness to itself, as many write the loss of SimCLR."""
    rows = F.normalize(m.scores(x).flatten(1), dim=1)
    alike = rows @ rows.T
    same = torch.cat([torch.arange(len(x) // 2) for _ in range(2)])
    same = (same[None] == same[:, None]).float()
    itself = torch.eye(len(x), dtype=torch.bool)
    same, alike = same[~itself].view(len(x), -1), alike[~itself].view(len(x), -1)
    positive = alike[same.bool()].view(len(x), -1)
    scores = torch.cat([positive, alike[~same.bool()].view(len(x), -1)], dim=1)
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))


def partners(m, x, *_):
    rows = F.normalize(m.scores(x).flatten(1), dim=1)
    alike = rows @ rows.T
    partner = torch.eye(len(x), dtype=torch.bool).roll(shifts=len(x) // 2, dims=0)
    return (alike.logsumexp(-1) - alike[partner]).mean()


def pairs_beside_keys(m, x, *_):
    """Contexts are functions in the graph, and no operators."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        keys = F.normalize(m.scores(x).flatten(1), dim=1)
    alike = F.normalize(m.scores(x).flatten(1), dim=1) @ keys.T
    return alike[~torch.eye(len(x), dtype=torch.bool)].view(len(x), -1).logsumexp(1).mean()


@pytest.mark.parametrize("loss", [pairs, partners, pairs_beside_keys])
def test_a_mask_of_shapes_alone_selects_a_known_number_of_rows(loss):
    assert_equals_one_device(Model(loss), BATCH)


def test_a_mask_that_is_written_through_a_view_is_not_known():
    def loss(m, x, *_):
        rows = m.scores(x).flatten(1)
        mask = torch.ones(len(x), len(x), dtype=torch.bool)
        mask[0].logical_and_(rows[0, : len(x)] > 0)
        return (rows @ rows.T)[mask].view(len(x), -1).logsumexp(1).mean()

    with pytest.raises(TraceError):
        trace(Model(loss), BATCH)
