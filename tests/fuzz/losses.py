"""Families of losses: the code of a scalar that depends on a floating-point value."""

from __future__ import annotations

import torch

from .draft import Draft


def mean(d: Draft, x: str) -> str:
    return d.rng.choice(
        (
            f"{x}.square().mean()",
            f"{x}.mean()",
            f"{x}.sin().sum() * 0.1",
            f"{x}.norm()",
            f"{x}.logsumexp(0).mean()",
        )
    )


def regression(d: Draft, x: str) -> str:
    y = d.like(x)
    name = d.rng.choice(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"))
    reduction = d.rng.choice(("mean", "mean", "sum", "none"))
    target = f"torch.ones_like({x})" if y == x else f"{y}.detach() * 0.5 + 0.1"
    text = f"F.{name}({x}, {target}, reduction={reduction!r})"
    return text + {"none": ".mean()", "sum": " * 0.1"}.get(reduction, "")


def classes(d: Draft, x: str) -> str | None:
    """Cross-entropy over dim 1, or nll of a log_softmax, with ignored labels, weights and smoothing."""
    shape = d.shape(x)
    if len(shape) < 2:
        return None
    labels = d.pick(lambda v: v.dtype == torch.int64 and tuple(v.shape) == (shape[0], *shape[2:]))
    wanted = labels and 0 <= int(d.values[labels].min()) and int(d.values[labels].max()) < shape[1]
    target = labels if wanted else f"{x}.detach().argmin(1)"
    options = d.rng.choice(
        ("", "", ", ignore_index=0", ", label_smoothing=0.1", ", reduction='sum'", "weight")
    )
    if options == "weight":
        options = f", weight={d.buffer(f'torch.rand({shape[1]}) + 0.5')}"
    if "ignore" in options and not wanted:
        options = ""
    if d.rng.random() < 0.3 and "smooth" not in options:
        return f"F.nll_loss(F.log_softmax({x}, 1), {target}{options})"
    return f"F.cross_entropy({x}, {target}{options})" + (" * 0.1" if "sum" in options else "")


def tokens(d: Draft, x: str) -> str | None:
    """Cross-entropy over the last dim of a flattened sequence, as language models have it."""
    shape = d.shape(x)
    if len(shape) != 3 or shape[-1] < 2:
        return None
    labels = d.pick(lambda v: v.dtype == torch.int64 and tuple(v.shape) == shape[:2])
    if not labels or int(d.values[labels].min()) < 0 or int(d.values[labels].max()) >= shape[-1]:
        labels = f"{x}.detach().argmin(-1)"
    if d.rng.random() < 0.4 and shape[1] > 1:
        ignored = d.rng.choice((-100, 0))
        return (
            f"F.cross_entropy({x}[:, :-1].flatten(0, 1), {labels}[:, 1:].flatten(), ignore_index={ignored})"
        )
    return f"F.cross_entropy({x}.flatten(0, 1), {labels}.flatten())"


def binary(d: Draft, x: str) -> str:
    target = f"({d.like(x)}.detach() > 0).double()"
    options = d.rng.choice(
        ("", "", f", pos_weight={d.buffer(f'torch.rand({d.shape(x)[-1]}) + 0.5')}", ", reduction='sum'")
    )
    return f"F.binary_cross_entropy_with_logits({x}, {target}{options}) * 0.5"


def divergence(d: Draft, x: str) -> str:
    y = d.like(x)
    reduction = d.rng.choice(("batchmean", "sum", "mean"))
    return f"F.kl_div(F.log_softmax({x}, -1), F.softmax({y}.detach() * 0.5, -1), reduction={reduction!r})"


def cosine(d: Draft, x: str) -> str | None:
    y = d.like(x)
    if len(d.shape(x)) < 2 or y == x:
        return None
    return f"(1 - F.cosine_similarity({x}, {y} + 0.3, dim=-1, eps=0.1)).mean()"


def contrastive(d: Draft, x: str) -> str | None:
    """Every sample against every other one of the whole batch."""
    if len(d.shape(x)) < 2:
        return None
    a = f"F.normalize({x}.flatten(1), dim=1, eps=0.1)"
    b = f"F.normalize({d.like(x)}.flatten(1) + 0.1, dim=1, eps=0.1)"
    return f"F.cross_entropy({a} @ {b}.t(), torch.arange({d.shape(x)[0]}))"


def margin(d: Draft, x: str) -> str | None:
    y = d.like(x)
    if len(d.shape(x)) != 2:
        return None
    return d.rng.choice(
        (f"F.triplet_margin_loss({x}, {y} + 0.5, {x}.flip(0) - 0.2, eps=0.1)",
         f"F.soft_margin_loss({x}, {y}.detach().sign() + 0.5)",
         f"F.gaussian_nll_loss({x}, {y}.detach(), {x}.square() + 0.5)",
         f"F.poisson_nll_loss({x}, {y}.detach().abs())")
    )  # fmt: skip


def penalty(d: Draft, x: str) -> str:
    """A value and a penalty on a parameter."""
    return f"{x}.mean() + 0.1 * {d.parameter(d.size(), d.size())}.square().sum()"


FAMILIES = (
    mean, mean, mean, regression, regression, classes, classes, tokens, tokens, binary, divergence, cosine,
    contrastive, margin, penalty,
)  # fmt: skip
