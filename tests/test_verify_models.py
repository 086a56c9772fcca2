"""Whole models, planned for mixed clusters and held against the single device.

Each model is traced once; every planner's program is interpreted for three clusters of 2, 3 and 5 unequal
devices, in float32 against the module and in float64 against the graph.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from mixmesh.api import plan_traced
from mixmesh.cluster import Cluster
from mixmesh.frontend.trace import trace
from mixmesh.measure.verification import TOLERANCE, TOLERANCE_F64, single_device, unsupported_ops, verify

transformers = pytest.importorskip("transformers")

SAMPLES = 10  # no planner's shares divide it evenly
IDS = torch.randint(1, 50, (SAMPLES, 6), generator=torch.Generator().manual_seed(1))
PIXELS = torch.randn(SAMPLES, 3, 32, 32, generator=torch.Generator().manual_seed(2))
LABELS = torch.arange(SAMPLES) % 5

GPU = 'name = "{0}", tflop_per_s = {1}, memory_gib = {2}, memory_gbyte_per_s = {3}'
BIG, MIDDLE, SMALL = ("big", 0.02, 8, 20), ("middle", 0.01, 4, 10), ("small", 0.003, 2, 5)


def cluster(name: str, *machines: tuple) -> Cluster:
    lines = [f'name = "{name}"', "[network]", "bandwidth_gbit_per_s = 40", "latency_us = 1"]
    for devices in machines:
        tables = ", ".join("{ " + GPU.format(*d) + " }" for d in devices)
        lines += ["[[machine]]", "link_gbit_per_s = 100", "link_latency_us = 1", f"devices = [{tables}]"]
    return Cluster.parse("\n".join(lines))


CLUSTERS = (
    cluster("two", (BIG,), (SMALL,)),
    cluster("three", (BIG, MIDDLE), (SMALL,)),
    cluster("five", (BIG, BIG), (MIDDLE, SMALL, SMALL)),
)
PLANNERS = ("hap", "ddp-proportional", "fsdp-even")


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=24, n_layer=1, n_head=4, n_positions=16, resid_pdrop=0.1
    )
    return transformers.GPT2LMHeadModel(config), {"input_ids": IDS, "labels": IDS}


def bert():
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    mask = (torch.arange(6) < 6 - torch.arange(SAMPLES)[:, None] % 3).long()
    labels = IDS.masked_fill(IDS % 3 > 0, -100)
    return transformers.BertForMaskedLM(config), {"input_ids": IDS, "attention_mask": mask, "labels": labels}


def llama():
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=40,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), {"input_ids": IDS, "labels": IDS}


def t5():
    config = transformers.T5Config(
        vocab_size=50,
        d_model=24,
        d_kv=6,
        d_ff=40,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config), {"input_ids": IDS, "labels": IDS[:, :5]}


def vit():
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40, image_size=32,
        patch_size=8, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config), {"pixel_values": PIXELS, "labels": LABELS}


def resnet():
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12], depths=[1, 2], layer_type="basic", num_labels=5
    )
    return transformers.ResNetForImageClassification(config), {"pixel_values": PIXELS, "labels": LABELS}


class VGG(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers, channels = [], 3
        for width in (8, 12):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            channels = width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(12 * 8 * 8, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 5)
        )

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.classifier(self.features(x)), y)


def vgg():
    return VGG(), {"x": PIXELS, "y": LABELS}


MODELS = {f.__name__: f for f in (gpt2, bert, llama, t5, vit, resnet, vgg)}


@cache
def traced(name: str):
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.train()
    return model, batch, trace(model, batch)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("devices", CLUSTERS, ids=lambda c: c.name)
@pytest.mark.parametrize("name", MODELS)
def test_equals_single_device(name, devices, planner):
    model, batch, graph = traced(name)
    plan = plan_traced(graph, devices, planner=planner)
    report = verify(model, batch, plan, traced=graph)
    assert report.max_loss_error <= TOLERANCE and report.max_gradient_error <= TOLERANCE, report
    assert report.max_loss_error_f64 <= TOLERANCE_F64, report
    assert report.max_gradient_error_f64 <= TOLERANCE_F64, report
    assert report.ok


@pytest.mark.parametrize("name", MODELS)
def test_every_operator_has_a_rule(name):
    _, _, graph = traced(name)
    assert unsupported_ops(single_device(graph.graph)) == ()


def test_several_steps_of_an_optimizer():
    model, batch, graph = traced("llama")
    plan = plan_traced(graph, CLUSTERS[1], planner="hap")
    report = verify(model, batch, plan, traced=graph, steps=3, optimizer=torch.optim.AdamW)
    assert report.ok, report
