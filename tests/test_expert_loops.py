"""Loops over experts, as people write them: each expert gets the rows of its mask. Every model runs on shards
and equals the module on one device, and what an expert computes of its rows is one operator."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.on_shards import CLUSTER, assert_equals_one_device, assert_samples_stay
from torch import nn

from mixmesh.api import plan_traced
from mixmesh.cost.work import call_flop
from mixmesh.errors import TraceError
from mixmesh.frontend.trace import trace
from mixmesh.lang.rules import RULES, SELECTED, call_of, selected_share, shard_units
from mixmesh.measure.profiler.operators import made_up_tensors, shard_program
from mixmesh.measure.verification import verify
from mixmesh.step.kept import extra_bytes

DIM, EXPERTS, CHOICES, WORDS = 8, 3, 2, 11
DRAW = torch.Generator().manual_seed(0)
BATCH = {"ids": torch.randint(0, WORDS, (10, 6), generator=DRAW)}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM, bias=False)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x):
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.norm(self.down(F.silu(gate) * up))


class Model(nn.Module):
    def __init__(self, mix) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.mix = mix
        self.embedding, self.head = nn.Embedding(WORDS, DIM), nn.Linear(DIM, WORDS)
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, ids):
        h, self.seen = self.embedding(ids), ids
        scores = self.head(h + self.mix(self, h))
        return F.cross_entropy(scores.view(-1, WORDS), ids.view(-1))

    def routed(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(CHOICES, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen


def repeated_rows(m, h):
    """DeepSeek's: every token once for each of its choices."""
    x = h.view(-1, DIM)
    weights, chosen = m.routed(x)
    x, flat = x.repeat_interleave(CHOICES, dim=0), chosen.view(-1)
    y = torch.empty_like(x)
    for n, expert in enumerate(m.experts):
        y[flat == n] = expert(x[flat == n])
    return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1).view(h.shape)


def added_at_tokens(m, h):
    """Mixtral's, of earlier versions of transformers."""
    x = h.view(-1, DIM)
    weights, chosen = m.routed(x)
    out = torch.zeros_like(x)
    masks = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
    for n in range(EXPERTS):
        choice, token = torch.where(masks[n])
        rows = x[None, token].reshape(-1, DIM)
        out.index_add_(0, token, m.experts[n](rows) * weights[token, choice, None])
    return out.reshape(h.shape)


def of_experts_that_are_hit(m, h):
    """Mixtral's, of later versions: a loop over numbers that are data."""
    x = h.view(-1, DIM)
    weights, chosen = m.routed(x)
    out = torch.zeros_like(x)
    masks = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
    for n in torch.greater(masks.sum(dim=(-1, -2)), 0).nonzero():
        choice, token = torch.where(masks[n].squeeze(0))
        out = out.index_add(0, token, m.experts[n](x[token]) * weights[token, choice, None])
    return out.reshape(h.shape)


def set_at_tokens(m, h):
    """Mistral's: ``out[tokens] += ...``, where a token has chosen an expert once at most."""
    x = h.view(-1, DIM)
    weights, chosen = m.routed(x)
    out = torch.zeros_like(x)
    for n, expert in enumerate(m.experts):
        token, choice = torch.where(chosen == n)
        out[token] += weights[token, choice, None] * expert(x[token])
    return out.view_as(h)


def skipped_if_empty(m, h):
    """A branch on whether there are any rows, and a mask of two shapes."""
    weights, chosen = m.routed(h)
    gates = torch.zeros(*h.shape[:2], EXPERTS).scatter(-1, chosen, weights).view(-1, EXPERTS)
    out, x = torch.zeros_like(h), h.view(-1, DIM)
    for n, expert in enumerate(m.experts):
        mask = (chosen == n).any(dim=-1)
        flat = mask.view(-1)
        if flat.any():
            out[mask] += expert(x[flat]) * gates[flat, n].unsqueeze(1)
    return out


def left_if_empty(m, h):
    """``continue`` on the number of rows; weights outside of the experts."""
    x = h.view(-1, DIM)
    weights, chosen = m.routed(x)
    out = torch.zeros_like(x)
    for n, expert in enumerate(m.experts):
        mask = (chosen == n).any(-1)
        if mask.sum() == 0:
            continue
        rows = F.dropout(expert(x[mask]), 0.0)
        out[mask] += rows * (weights * (chosen == n)).sum(-1)[mask][:, None]
    return out.view_as(h)


def in_dims_of_the_batch(m, h):
    """Rows of three dims, of one choice of each token."""
    best = m.gate(h).softmax(-1).max(-1)
    out = h.clone()
    for n, expert in enumerate(m.experts):
        places = torch.nonzero(best.indices == n, as_tuple=True)
        if places[0].numel() > 0:
            out[places] = expert(h[places]) * best.values[places].unsqueeze(-1)
    return out


def of_numbers_in_the_batch(m, h):
    """Heads for kinds of samples."""
    out = h * 1
    for n, expert in enumerate(m.experts):
        out[m.seen == n] = expert(h[m.seen == n])
    return out


def skipped_by_length(m, h):
    """``continue`` on ``len`` of the tokens."""
    x = h.view(-1, DIM)
    weights, chosen = m.routed(x)
    out = torch.zeros_like(x)
    for n, expert in enumerate(m.experts):
        token, choice = torch.where(chosen == n)
        if len(token) == 0:
            continue
        out.index_add_(0, token, expert(x[token]) * weights[token, choice, None])
    return out.view_as(h)


def recomputed_masks(m, h):
    """The mask of the branch is computed again for the rows; a number of rows that becomes Python's."""
    best = m.gate(h).argmax(-1)
    out = torch.zeros_like(h)
    for n, expert in enumerate(m.experts):
        if (best == n).any() if n else (best == n).sum().item() > 0:
            out[best == n, :] = expert(h[best == n, :])
    return out


def by_number_of_rows(m, h):
    x = h.view(-1, DIM)
    weights, chosen = m.routed(x)
    out = torch.zeros_like(x)
    for n, expert in enumerate(m.experts):
        token, choice = torch.where(chosen == n)
        rows = x[token, :]
        if rows.numel():
            out.index_add_(-2, token, expert(rows) * weights[token, choice, None], alpha=2)
    return out.view_as(h)


def one_weight_for_each(m, h):
    """MiniMind's: the weights of all choices, of which a token has one for an expert, and a product with zero
    for experts without tokens."""
    x = h.view(-1, DIM)
    weights, chosen = m.routed(x)
    y = torch.zeros_like(x)
    for n, expert in enumerate(m.experts):
        mask = chosen == n
        if mask.any():
            token = mask.any(dim=-1).nonzero().flatten()
            weight = weights[mask].view(-1, 1)
            y.index_add_(0, token, (expert(x[token]) * weight).to(y.dtype))
        elif m.training:
            y[0, 0] += 0 * sum(p.sum() for p in expert.parameters())
    return y.view_as(h)


def with_a_zero_where_empty(m, h):
    """MiniMind's, of an earlier version."""
    x = h.view(-1, DIM)
    weights, chosen = m.routed(x)
    x, flat = x.repeat_interleave(CHOICES, dim=0), chosen.view(-1)
    y = torch.empty_like(x)
    for n, expert in enumerate(m.experts):
        rows = expert(x[flat == n])
        if rows.shape[0] > 0:
            y[flat == n] = rows.to(y.dtype)
        else:
            y[flat == n] = rows.to(y.dtype) + 0 * sum(p.sum() for p in expert.parameters())
    return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1).view(h.shape)


LOOPS = [
    repeated_rows, added_at_tokens, of_experts_that_are_hit, set_at_tokens, skipped_if_empty, left_if_empty,
    in_dims_of_the_batch, of_numbers_in_the_batch, skipped_by_length, recomputed_masks, by_number_of_rows,
]  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_over_experts_equals_one_device_and_computes_their_rows_alone(loop):
    program = assert_equals_one_device(Model(loop), BATCH)
    assert_samples_stay(program)
    selected = [i for i in program.instructions if i.op == SELECTED]
    assert len(selected) == EXPERTS
    products = [i for i in program.instructions if i.op == "aten.linear" and "experts" in str(i.args)]
    assert not products, "experts compute outside of the operator of their rows"


def products_with_masks(m, h):
    """Every expert computes all tokens, as it is written."""
    weights, chosen = m.routed(h)
    out = torch.zeros_like(h)
    for n, expert in enumerate(m.experts):
        mask = (chosen == n).float()
        if mask.sum() > 0:
            out += expert(h) * (mask * weights).sum(-1, keepdim=True)
    return out


def rows_of_masked_inputs(m, h):
    """A loop over choices and experts."""
    weights, chosen = m.routed(h)
    out = torch.zeros_like(h)
    for k in range(CHOICES):
        for n, expert in enumerate(m.experts):
            mask = (chosen[:, :, k] == n).unsqueeze(-1)
            if not mask.any():
                continue
            out += expert(h * mask.float()) * weights[:, :, k].unsqueeze(-1) * mask.float()
    return out


def added_at_other_numbers(m, h):
    """Tokens repeated for their choices, and added at numbers in a table of them."""
    x = h.view(-1, DIM)
    weights, chosen = m.routed(x)
    repeated = x.unsqueeze(1).expand(-1, CHOICES, -1).reshape(-1, DIM)
    tokens = torch.arange(len(x)).unsqueeze(1).expand(-1, CHOICES).reshape(-1)
    out = torch.zeros_like(x)
    for n, expert in enumerate(m.experts):
        places = torch.nonzero(chosen.reshape(-1) == n, as_tuple=False).squeeze(-1)
        if places.numel() == 0:
            continue
        out.index_add_(0, tokens[places], expert(repeated[places]) * weights.view(-1)[places].unsqueeze(1))
    return out.view_as(h)


def mean_of_rows(m, h):
    mask = m.gate(h).argmax(-1) == 0
    out = h * 1
    if mask.any():
        out = out + m.experts[0](h[mask]).mean()
    return out


def squares_of_means(m, h):
    """A prototype for each class that the batch has (Snell et al., 2017), and others of its powers."""
    best, total = m.gate(h).argmax(-1), 0.0
    for n, expert in enumerate(m.experts):
        mask = best == n
        if mask.any():
            mean = expert(h[mask]).mean(0)
            total = total + mean.square().sum() + mean.tanh().pow(3).sum() + mean.relu().sum()
            total = total + sum(f(mean).sum() for f in (F.gelu, F.silu, F.elu, F.leaky_relu))
    if (best == EXPERTS).any():  # no token at all
        total = total + h[best == EXPERTS].mean(0).square().sum()
    return h + total


def mean_losses(m, h):
    """Terms of a loss for the samples that have one, or zero."""
    best, total = m.gate(h).argmax(-1), 0.0
    for n, expert in enumerate(m.experts):
        mask = best == n
        if mask.any():
            total = total + F.cross_entropy(expert(h[mask]), best[mask])
    empty = best == EXPERTS  # no token at all
    if empty.any():
        total = total + F.mse_loss(m.experts[0](h[empty]), h[empty])
    regression = F.smooth_l1_loss(h[empty], h[empty] * 2) if empty.sum() > 0 else torch.tensor(0.0)
    return h + total + regression


def quotient_of_the_number(m, h):
    mask = m.gate(h).argmax(-1) == 1
    number = mask.sum()
    if number > 0:
        term = (m.experts[0](h).square().mean(-1) * mask).sum() / number
    else:
        term = h.sum() * 0
    nothing = (m.gate(h).argmax(-1) == EXPERTS).sum()
    if nothing:
        term = term + torch.div((h * nothing).sum(), nothing) + h.sum() * nothing.true_divide(nothing) * 0
    return h + term


DENSE = [
    products_with_masks, rows_of_masked_inputs, added_at_other_numbers, mean_of_rows, mean_losses,
    squares_of_means, quotient_of_the_number,
]  # fmt: skip


@pytest.mark.parametrize("loop", DENSE, ids=lambda loop: loop.__name__)
def test_other_loops_equal_one_device(loop):
    assert_equals_one_device(Model(loop), BATCH)


def counts_in_python(m, h):
    """The branch has an effect that no mask limits."""
    out, used = torch.zeros_like(h), 0
    for n, expert in enumerate(m.experts):
        mask = m.gate(h).argmax(-1) == n
        if mask.any():
            out[mask] += expert(h[mask])
            used += 1
    return out / used


def first_is_different(m, h):
    out, first = torch.zeros_like(h), True
    for n, expert in enumerate(m.experts):
        mask = m.gate(h).argmax(-1) == n
        if mask.any():
            out = expert(h) if first else out
            first = False
            out[mask] += expert(h[mask])
    return out


def mean_after_the_branch(m, h):
    """It is not a number where nothing is selected, on one device too."""
    mask = m.gate(h).argmax(-1) == 0
    out = h * 1
    if mask.any():
        out[mask] = m.experts[0](h[mask])
    return out + h[mask].mean()


def quotient_of_another_number(m, h):
    mask = m.gate(h).argmax(-1) == 0
    if mask.sum() > 0:
        h = h + (h * mask[..., None]).sum() / (mask.sum() - 1)
    return h


def last_is_remembered(m, h):
    """Of an even number of masks, so that every second one does not show it."""
    out, last = torch.zeros_like(h), 0
    for n in range(4):
        mask = m.gate(h).argmax(-1) == n
        if mask.any():
            out[mask] += m.experts[n % EXPERTS](h[mask])
            last = n
    return out * last


def by_rounded_number(m, h):
    share = h.sum(-1).sigmoid()
    if share.long().any():
        h = h + share[..., None]
    return h


def draws_of_another(m, h):
    kept, mask = F.dropout(h), m.gate(h).argmax(-1) == 0
    other = F.dropout(h)
    return kept - (other if mask.any() else kept)


def summed_losses(m, h, number_of):
    best, losses = m.gate(h).argmax(-1), []
    for n, expert in enumerate(m.experts):
        mask = best == n
        if mask.any():
            losses.append(F.cross_entropy(expert(h[mask]), best[mask], reduction="sum"))
    return sum(losses) / number_of(losses)


def divided_by_their_number(m, h):
    """An error if no branch is taken, which makes none of them a check."""
    return h + summed_losses(m, h, len)


def raising_where_there_is_none(m, h):
    best, losses = m.gate(h).argmax(-1), []
    for n in range(EXPERTS):
        mask = best == n
        if mask.any():
            losses.append(h[mask].sum())
    if not losses:
        raise ValueError("no losses")
    return h + sum(losses) / len(losses)


def checked_and_counted(m, h):
    """A check beside the branches, in the same function."""
    best, used = m.gate(h).argmax(-1), 0
    if not (best >= 0).any():
        raise ValueError("no tokens")
    out = torch.zeros_like(h)
    for n, expert in enumerate(m.experts):
        mask = best == n
        if mask.any():
            out[mask], used = expert(h[mask]), used + 1
    return out / used


def reciprocal_of_the_number(m, h):
    """Zero times an infinite number, where one device skips it."""
    mask = m.gate(h).argmax(-1) == 0
    return h + (h.sum(-1) * mask).sum() * mask.sum().reciprocal() if mask.any() else h


def infinite_gradient_left_out(m, h):
    mask = m.gate(h).argmax(-1) == 0
    return h + torch.where(mask, h.sum(-1) / mask.sum().float(), 0)[..., None] if mask.any() else h


def softmax_of_nothing(m, h):
    mask = m.gate(h).argmax(-1) == 0
    if mask.any():
        h = h + (h.sum(-1).masked_fill(~mask, -torch.inf).softmax(-1) * mask)[..., None]
    return h


def share_of_a_mean(m, h):
    best, total = m.gate(h).argmax(-1), 0
    for n, expert in enumerate(m.experts):
        mask = best == n
        if mask.any():
            loss = F.cross_entropy(expert(h[mask]), best[mask], label_smoothing=0.1)
            total = total + mask.sum() / mask.numel() * loss
    return h + total


def gradient_of_zeros(m, h):
    """Weights that are zeros have no gradient on one device."""
    mask = h * m.head.bias.sum()
    return h + mask if mask.any() else h


def quotient_of_what_is_asked(m, h):
    """Numbers that are less than one."""
    mask = m.seen[..., None] - WORDS
    return h + h * mask / mask if mask.any() else h


def told_from_the_first_line_to_the_last(m, h):
    best, scale = m.gate(h).argmax(-1), 1
    mask = best == 0
    if mask.any():
        h, scale = h + h[mask].sum(), 2
    mask = best == 1
    if mask.any():
        h = h + h[mask].sum()
    mask = best == 2
    if mask.any():
        h = h + h[mask].sum() * scale
    return h


def told_from_call_to_call(m, h):
    """At one line."""

    def term(mask, scale):
        return h[mask].sum() * scale if mask.any() else 0

    best = m.gate(h).argmax(-1)
    first, second = term(best == 0, 1), term(best == 1, 1)
    return h + first + second + term(best == 2, 2 if torch.is_tensor(first) else 1)


def even_and_odd(m, h):
    best, is_odd = m.gate(h).argmax(-1), False
    for n in range(4):
        mask = best == n
        if mask.any():
            h, is_odd = h + h[mask].sum(), not is_odd
    return h if is_odd else h * 2


def share_of_another_number(m, h):
    """Zero by zero where there is neither."""
    mask = m.seen == 1
    return h + mask.sum() / m.seen.sum() * h[mask].mean() if mask.any() else h


def another_number_elsewhere(m, h):
    """Numbers that differ as those in place of rows that are not selected."""
    mask, number = m.gate(h).argmax(-1) == 0, 0.25
    if mask.any():
        number = 0.5
    return torch.where(m.seen[..., None] == 1, h, number)


REFUSED = [
    quotient_of_another_number, reciprocal_of_the_number, infinite_gradient_left_out, softmax_of_nothing,
    share_of_a_mean, gradient_of_zeros, quotient_of_what_is_asked, told_from_the_first_line_to_the_last,
    another_number_elsewhere, told_from_call_to_call, even_and_odd, share_of_another_number,
    counts_in_python, first_is_different, mean_after_the_branch, last_is_remembered, by_rounded_number,
    draws_of_another, divided_by_their_number, raising_where_there_is_none, checked_and_counted,
]  # fmt: skip


@pytest.mark.parametrize("loop", REFUSED, ids=lambda loop: loop.__name__)
def test_a_branch_that_changes_more_than_its_rows_is_refused(loop):
    with pytest.raises(TraceError, match=r"mask.any\(\)|share.long\(\).any\(\)"):
        trace(Model(loop), BATCH)


def test_a_branch_that_is_taken_always_says_what_differs_on_one_device():
    (warning,) = trace(Model(skipped_if_empty), BATCH).warnings
    assert "test_expert_loops.py" in warning and "weight decay" in warning


def test_checks_that_raise_are_no_branches():
    """They raise where a mask selects something, or where it does not, in a function with other branches."""

    def checked(m, h):
        if torch.isnan(h).any():
            raise ValueError("not a number")
        weights, chosen = m.routed(h)
        out = torch.zeros_like(h)
        for n, expert in enumerate(m.experts):
            mask = (chosen == n).any(-1)
            if (weights[mask] < 0).sum() > 0:
                raise ValueError("negative weights")
            if mask.any():
                out[mask] += expert(h[mask])
        if not (chosen >= 0).any():
            raise ValueError("no tokens")
        return out

    assert_equals_one_device(Model(checked), BATCH)


def test_losses_in_a_branch_are_summed_over_no_rows():
    assert_equals_one_device(Model(lambda m, h: h + summed_losses(m, h, lambda _: 60)), BATCH)


def test_an_expert_without_tokens_has_no_gradient_on_one_device_alone():
    def one_of_them(m, h):
        best, out = m.gate(h).argmax(-1) * 0, torch.zeros_like(h)
        for n, expert in enumerate(m.experts):
            if (mask := best == n).any():
                out[mask] = expert(h[mask])
        return out

    model = Model(one_of_them)
    plan = plan_traced(trace(model, BATCH), CLUSTER, planner="fsdp-even")
    assert verify(model, BATCH, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)).ok


def test_tensors_that_a_skipped_branch_leaves_in_attributes_are_known():
    def leaving(m, h):
        out = torch.zeros_like(h)
        for n, expert in enumerate(m.experts):
            if (mask := m.gate(h).argmax(-1) == n).any():
                out[mask] = expert(h[mask])
                m.last_out = out
        return out

    assert any("last_out" in name for name in trace(Model(leaving), BATCH).left)


def one_choice_written(scores):
    chosen = scores.topk(CHOICES).indices
    chosen[:, 0] = 1
    return chosen


CHOSEN = [
    lambda scores: scores.argsort(-1)[:, :2] % 2,
    one_choice_written,
    lambda scores: scores.topk(CHOICES).indices.bool(),
]


@pytest.mark.parametrize("choose", CHOSEN, ids=("of two", "written", "yes or no"))
def test_a_token_that_may_choose_an_expert_twice_is_refused(choose):
    """``out[tokens] = rows`` would write one place twice."""

    def twice(m, h):
        x, out = h.view(-1, DIM), torch.zeros(h.shape[0] * h.shape[1], DIM)
        chosen = choose(m.gate(x))
        token, _ = torch.where(chosen == 1)
        out[token] += m.experts[0](x[token])
        return out.view_as(h)

    with pytest.raises(TraceError, match="out\\[token\\]"):
        trace(Model(twice), BATCH)


def test_time_and_memory_are_those_of_the_rows():
    """A third of the tokens' two choices; the numbers of a batch may all be the same."""
    graph = trace(Model(repeated_rows), BATCH).graph
    calls = [call_of(node, graph.types) for node in graph.nodes if node.op == SELECTED]
    num_rows = BATCH["ids"].numel() * CHOICES
    products = DIM * 2 * DIM + DIM * DIM
    assert [call_flop(call) for call in calls] == [2 * num_rows * products // EXPERTS] * EXPERTS
    # the row, both halves of the first product, and the values after it
    kept = 4 * num_rows * 6 * DIM
    assert kept <= sum(map(extra_bytes, calls)) <= 1.2 * kept
    graph = trace(Model(of_numbers_in_the_batch), BATCH).graph
    (share,) = {selected_share(call_of(node, graph.types)) for node in graph.nodes if node.op == SELECTED}
    assert share == 1


def test_a_profile_times_an_operator_with_as_many_rows_as_expected():
    graph = trace(Model(repeated_rows), {"ids": torch.zeros(100, 10, dtype=torch.long)}).graph
    node = next(node for node in graph.nodes if node.op == SELECTED)
    program, _ = shard_program(graph, node, None, shard_units(graph, RULES), 1.0)
    mask = made_up_tensors(program, torch.device("cpu"))[node.inputs[0]]
    assert mask.sum().item() == pytest.approx(mask.numel() / EXPERTS, rel=0.15)


def test_rows_of_one_mask_alone_are_computed_of_all():
    """It may select every row, so that nothing would be saved."""

    def one_mask(m, h):
        out, mask = h * 1, m.gate(h)[..., 0] > 0
        out[mask] = m.experts[0](h[mask])
        return out

    assert SELECTED not in {node.op for node in trace(Model(one_mask), BATCH).graph.nodes}
    assert_equals_one_device(Model(one_mask), BATCH)


def test_a_batch_of_another_length_is_not_proved_again(monkeypatch):
    calls = []
    export = torch.export.export
    monkeypatch.setattr(
        torch.export, "export", lambda *args, **kwargs: calls.append(1) or export(*args, **kwargs)
    )
    model, of_each = Model(skipped_if_empty), []
    for length in (4, 6):
        trace(model, {"ids": torch.zeros(10, length, dtype=torch.long)})
        of_each.append(len(calls) - sum(of_each))
    assert of_each == [6, 1]
    trace(model.eval(), {"ids": torch.zeros(10, 4, dtype=torch.long)})
    assert len(calls) == 13
