"""A batch of one sample, cut along its sequence: rows of queries, each with all keys."""

from __future__ import annotations

import pytest
import torch
from mixture_models import cut_program

from benchmarks.coverage import CLUSTER
from mixmesh.cluster import Cluster
from mixmesh.frontend.job.workloads.language import LanguageModel
from mixmesh.frontend.job.workloads.layers import Layer
from mixmesh.frontend.trace import trace
from mixmesh.lang.ir import Shard
from mixmesh.measure.verification import verify
from mixmesh.runtime import kernels

ATTENTION = "aten.scaled_dot_product_attention"
LENGTH, WIDTH = 350, 48  # large enough for the search to cut; no share of the devices divides it
IDS = torch.randint(1, 50, (1, LENGTH), generator=torch.Generator().manual_seed(1))
THREE = Cluster.parse(CLUSTER)


def gpt():
    layers = [Layer(WIDTH, 4, 96, causal=True) for _ in range(2)]
    return LanguageModel(layers, words=50, seq=LENGTH, width=WIDTH), {"tokens": IDS, "targets": IDS}


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    mask = (torch.arange(LENGTH) < LENGTH - 40).long()[None]
    return transformers.BertForMaskedLM(config), {"input_ids": IDS, "labels": IDS, "attention_mask": mask}


def cut_along_sequence(graph):
    return cut_program(graph, THREE, ATTENTION, Shard(2), shard_params=False)


@pytest.mark.parametrize("make", [gpt, bert])
def test_a_sequence_is_cut_between_devices(make):
    torch.manual_seed(0)
    model, batch = make()
    traced = trace(model, batch)
    program = cut_along_sequence(traced.graph)
    rows = [i for i in program.instructions if i.op == ATTENTION]
    held = {tuple(str(program.types[n].placement) for n in i.inputs[:3]) for i in rows}
    assert len(rows) == 2 and held == {("S(2)", "R", "R")}
    report = verify(model, batch, program, traced=traced)
    assert report.ok
    assert max(report.max_loss_error_f64, report.max_gradient_error_f64) < 1e-9


def test_rows_of_a_causal_mask_count_from_their_first(monkeypatch):
    """The kernel is what makes it right."""
    model, batch = gpt()
    traced = trace(model, batch)
    assert any(n.op == ATTENTION and n.args[5] for n in traced.graph.nodes)
    monkeypatch.delitem(kernels.KERNELS, ATTENTION)
    assert not verify(model, batch, cut_along_sequence(traced.graph), traced=traced).ok
