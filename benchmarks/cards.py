"""Predicted training throughputs of single cards, from their datasheets, compared with published ones.

The published programs differ from what PyTorch runs by itself: their BERT has fused kernels, their ResNet-50
holds channels last. So a model may be faster or slower on all cards alike. Shares of a mixed cluster depend
on how much faster one card is than another, which is what ``Score.spread`` says.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor, nn

from mixmesh.cluster import Cluster
from mixmesh.frontend.trace import Traced, trace
from mixmesh.planner import make_plan

from .layer_times import rank_correlation
from .published_cards import HALF, MODELS, THROUGHPUTS
from .revision import revision

TOKENS = 384  # of a sample of SQuAD
# about those that were published, which fill each card: 24 to 320, 8 to 112 and 128 to 1280 samples
BATCH = {"bert-base": 128, "bert-large": 48, "resnet50": 512}
MEMORY_GIB = 400  # no card's: the question is what fits in none of them


class Loss(nn.Module):
    """The loss of a model of transformers, under autocast if ``half``."""

    def __init__(self, net: nn.Module, half: bool) -> None:
        super().__init__()
        self.net, self.half = net, half

    def forward(self, **batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.half):
            return self.net(**batch).loss


@dataclass(frozen=True)
class Row:
    """Samples per second of a model on a card."""

    model: str
    dtype: str
    card: str
    published: float
    predicted: float


@dataclass(frozen=True)
class Score:
    """All cards with one model: ``bias`` is predicted over published (the geometric mean), ``spread`` the
    standard deviation of the logarithm of that, ``rank`` Spearman's correlation."""

    model: str
    dtype: str
    bias: float
    spread: float
    rank: float


def model_of(name: str) -> nn.Module:
    from transformers import (
        BertConfig,
        BertForQuestionAnswering,
        ResNetConfig,
        ResNetForImageClassification,
    )

    if name == "resnet50":
        return ResNetForImageClassification(ResNetConfig(num_labels=1000))
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    size = large | {"intermediate_size": 4096} if name == "bert-large" else {}
    # attention as in 2022, without a fused kernel
    return BertForQuestionAnswering(BertConfig(attn_implementation="eager", **size))


def batch_of(name: str) -> dict[str, Tensor]:
    size = BATCH[name]
    if name == "resnet50":
        labels = torch.zeros(size, dtype=torch.long)
        return {"pixel_values": torch.zeros(size, 3, 224, 224), "labels": labels}
    tokens = torch.zeros(size, TOKENS, dtype=torch.long)
    at = {"start_positions": tokens[:, 0].clone(), "end_positions": tokens[:, 0].clone()}
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **at}


def predict(traced: Traced, card: str) -> float:
    """Seconds of a step on a card, from its datasheet."""
    cluster = Cluster.parse(f'[[machine]]\ndevices = [{{ device = "{card}", memory_gib = {MEMORY_GIB} }}]\n')
    step_s = make_plan(traced, cluster, planner="ddp-even", tf32=True).predicted_step_s
    assert step_s is not None  # a plan just made has its prediction
    return step_s


def run() -> Iterator[Row]:
    """Yields a row for each model, dtype and card."""
    for dtype, published in THROUGHPUTS.items():
        for n, name in enumerate(MODELS):
            traced = trace(Loss(model_of(name), dtype == HALF), batch_of(name))
            for card, throughputs in published.items():
                yield Row(name, dtype, card, throughputs[n], BATCH[name] / predict(traced, card))


def score(rows: list[Row]) -> list[Score]:
    """A score for each model and dtype, in the order of the rows."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.model, row.dtype), []).append(row)
    return [_score(*key, group) for key, group in groups.items()]


def _score(model: str, dtype: str, rows: list[Row]) -> Score:
    logs = [math.log(row.predicted / row.published) for row in rows]
    published, predicted = np.array([(row.published, row.predicted) for row in rows]).T
    rank = rank_correlation(published, predicted)
    return Score(model, dtype, math.exp(statistics.fmean(logs)), statistics.pstdev(logs), rank)


def report(rows: list[Row], command: str) -> dict:
    return {
        "command": command,
        "revision": revision(),
        "scores": [asdict(each) for each in score(rows)],
        "rows": [asdict(row) for row in rows],
    }
