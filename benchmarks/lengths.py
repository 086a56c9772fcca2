"""Texts padded to the longest of their batch: steps of BERT on two ranks, and what each new length costs.

Nearly every batch has a length of its own at first. PyTorch's DistributedDataParallel takes any length as it
is; ours traces a length when it first occurs, each alone (``each alone``) or with symbols for sizes
(``ours``). Each variant runs in processes of its own, all with the same batches, one after the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import mixmesh
from mixmesh.base.patch import patched
from mixmesh.cluster import Cluster
from mixmesh.runtime.shapes import traces

from .revision import revision

DDP, ALONE, OURS = "ddp", "each alone", "ours"
CLUSTER = '[[machine]]\nname = "a"\ndevices = [{ cpu_share = 1.0, count = 2 }]\n'
RANKS, SAMPLES, WORDS, LAYERS, WIDTH, HEADS = 2, 8, 1000, 12, 128, 4
MEDIAN_LENGTH, SPREAD, MOST = 40, 0.4, 128  # of texts, whose lengths are log-normal
SAME = 1e-4  # relative difference of losses in float32
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    """A variant: the seconds of each step, the losses, and the number of lengths that occurred."""

    name: str
    step_s: tuple[float, ...]
    losses: tuple[float, ...]
    num_lengths: int

    @property
    def total_s(self) -> float:
        return sum(self.step_s)

    @property
    def last_s(self) -> float:
        """The median of the last third of the steps."""
        return statistics.median(self.step_s[-len(self.step_s) // 3 :])


def made_model() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config).train()


def made_batches(count: int) -> list[Batch]:
    """Batches of texts of random lengths, each padded to its longest text. The first one is the longest, as
    planning wants it."""
    g = torch.Generator().manual_seed(1)
    drawn = torch.randn(count, SAMPLES, generator=g).mul(SPREAD).exp().mul(MEDIAN_LENGTH)
    lengths = drawn.long().clamp(4, MOST)
    lengths[0, 0] = MOST
    batches = []
    for row in lengths:
        ids = torch.randint(1, WORDS, (SAMPLES, int(row.max())), generator=g)
        mask = (torch.arange(ids.shape[1]) < row[:, None]).long()
        labels = torch.randint(2, (SAMPLES,), generator=g)
        batches.append({"input_ids": ids * mask, "attention_mask": mask, "labels": labels})
    return batches


def run(count: int, say: Callable[[str], None] = lambda _: None) -> list[Row]:
    """A row for each variant, with ``count`` steps."""
    rows = []
    for name in (DDP, ALONE, OURS):
        say(name)
        with TemporaryDirectory() as folder:
            found = mp.get_context("spawn").SimpleQueue()
            mp.spawn(train, (name, count, f"{folder}/store", found), RANKS)
            rows.append(found.get())
    return rows


def train(rank: int, name: str, count: int, store: str, found: mp.SimpleQueue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    model, batches = made_model(), made_batches(count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if name == DDP:
        per_rank = SAMPLES // RANKS
        batches = [{k: v[rank * per_rank :][:per_rank] for k, v in batch.items()} for batch in batches]
        model = nn.parallel.DistributedDataParallel(model)
    else:
        plan = mixmesh.plan(model, batches[0], Cluster.parse(CLUSTER), planner="ddp-even")
        model, optimizer = mixmesh.parallelize(model, optimizer, plan, check_model=False)
    step_s, losses = [], []
    with patched(traces, "OWN", count) if name == ALONE else nullcontext():
        for batch in batches:
            started = time.perf_counter()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            step_s.append(time.perf_counter() - started)
    if name == DDP:  # the mean over ranks with as many samples
        whole = torch.tensor(losses)
        dist.all_reduce(whole)
        losses = (whole / RANKS).tolist()
    if rank == 0:
        lengths = {batch["input_ids"].shape[1] for batch in batches}
        found.put(Row(name, tuple(step_s), tuple(losses), len(lengths)))
    dist.barrier()
    dist.destroy_process_group()


def report(rows: Sequence[Row], command: str) -> dict:
    """Everything that is written to the file of results."""
    reference = rows[0].losses
    agree = all(abs(a - b) <= SAME * abs(b) for row in rows for a, b in zip(row.losses, reference))
    shown = [vars(row) | {"total_s": row.total_s, "last_s": row.last_s} for row in rows]
    return {"command": command, "revision": revision(), "losses_agree": agree, "rows": shown}
