"""Jobs that one CPU core trains at about a second per step: language models, experts, convolutional
classifiers, a perceptron. A command takes one as ``benchmarks/jobs.py:gpt``."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from mixmesh.frontend.job import Job
from mixmesh.frontend.job.workloads.images import CLASSES, VGG19, Bottleneck, Classifier, Widen
from mixmesh.frontend.job.workloads.language import LanguageModel, Llama, LlamaShape
from mixmesh.frontend.job.workloads.layers import Layer, MoeLayer

DATA_BATCHES = 8  # batches that the jobs of ``bench training`` repeat


def make(text: str) -> Job:
    """The job of ``gpt``, or of ``experts:5:8``: a function of this module and its whole numbers."""
    name, *numbers = text.split(":")
    return globals()[name](*map(int, numbers))


def gpt() -> Job:
    """4 causal layers of 256 over bytes, 3.3 million parameters; 32 sequences of 64."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [Layer(256, 4, 1024) for _ in range(4)]
    return _language(LanguageModel(layers, words=256, seq=64, width=256), samples=32, seq=64)


def moe() -> Job:
    """Two layers of 192, each followed by one with 6 experts, two per token; 24 sequences of 48."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [Layer(192, 4, 768), MoeLayer(192, 4, 768, experts=6, seq=48)]
    return _language(LanguageModel(layers, words=256, seq=48, width=192), samples=24, seq=48)


def vgg() -> Job:
    """Six convolutions on 64 images of 32 x 32, most parameters in the fully connected layers behind."""
    torch.manual_seed(0)
    features: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128):
        for _ in range(2):
            features += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        features.append(nn.MaxPool2d(2))
    head = nn.Sequential(
        nn.Flatten(), nn.Linear(128 * 16, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
        nn.Linear(1024, 10),
    )  # fmt: skip
    model = Classifier(nn.Sequential(*features), head)
    batch = {"images": torch.randn(64, 3, 32, 32), "labels": torch.randint(10, (64,))}
    return Job(model, batch, optimizer=adamw)


def resnet() -> Job:
    """Nine blocks of three convolutions, each with batch norm, on 32 images of 32 x 32: 31 norms."""
    torch.manual_seed(0)
    features: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    channels = 16
    for width in (16, 32, 64):
        for n in range(3):
            features.append(Bottleneck(channels, width, 2 if width > 16 and n == 0 else 1))
            channels = 4 * width
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    batch = {"images": torch.randn(32, 3, 32, 32), "labels": torch.randint(10, (32,))}
    return Job(Classifier(nn.Sequential(*features), head), batch, optimizer=slow_adamw)


def vgg19() -> Job:
    """HAP's VGG19 at a quarter of its width: 1.3 million parameters in 16 convolutions and 7.5 million (86 %)
    in a head of 6272, 1024, 1024 and 10; 64 images of 32 x 32 in all, which HAP gave each of its GPUs."""
    torch.manual_seed(0)
    features: list[nn.Module] = []
    channels = 3
    for width in VGG19:
        if width:
            features += [nn.Conv2d(channels, width // 4, 3, padding=1), nn.ReLU()]
            channels = width // 4
        else:
            features.append(nn.MaxPool2d(2))
    head = nn.Sequential(
        Widen(), nn.Linear(channels * 49, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
        nn.Linear(1024, CLASSES),
    )  # fmt: skip
    for layer in (*features, *head):  # torchvision's initialization
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out")
            nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)
    patterns = torch.randn(CLASSES, 3, 32, 32)  # something to learn: a constant loss would show nothing
    data = []
    for _ in range(DATA_BATCHES):
        labels = torch.randint(CLASSES, (64,))
        data.append({"images": patterns[labels] + torch.randn(64, 3, 32, 32), "labels": labels})
    return Job(Classifier(nn.Sequential(*features), head), data[0], optimizer=slow_adamw, data=data)


def bert() -> Job:
    """HAP's BERT-Base at a quarter of its width and half its depth: 4 layers of 192, an untied head over 4096
    words, half of the 3.4 million parameters at the words; 64 sequences of 32."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [Layer(192, 4, 768) for _ in range(4)]
    model = LanguageModel(layers, words=4096, seq=32, width=192)
    return _language(model, samples=64, seq=32, words=4096, batches=DATA_BATCHES)


def words() -> Job:
    """A language model that is mostly vocabulary: 2 layers of 128, an untied head over 32768 words, 8.8
    million parameters, 8.4 of them for the words; 48 sequences of 32."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [Layer(128, 4, 512) for _ in range(2)]
    model = LanguageModel(layers, words=32768, seq=32, width=128)
    return _language(model, samples=48, seq=32, words=32768, batches=DATA_BATCHES)


def llama(samples: int) -> Job:
    """Llama-like, 2 layers of 192 and 4096 words: 2.5 million parameters, and for every sequence of 64 about
    8 MB of activations: micro-batches, not parameters, fill the memory of a small device."""
    torch.manual_seed(0)
    shape = LlamaShape(192, 2, heads=4, key_heads=4, hidden=512, tied=False, words=4096, seq=64)
    return _language(Llama(shape), samples=samples, seq=64, words=4096, batches=DATA_BATCHES)


def experts(count: int, padded: int = 0) -> Job:
    """A layer of 192 with ``count`` experts, two per token; 48 sequences of 48. With ``padded``, that many
    experts of the same capacity each, as in a system that gives every device equally many."""
    torch.manual_seed(0)
    made = padded or count
    seq = 48
    capacity = math.ceil(seq / count * 2.5)
    # half a slot less, which rounding up restores
    mixture = MoeLayer(192, 4, 768, experts=made, seq=seq, factor=(capacity - 0.5) * made / seq)
    model = LanguageModel([mixture], words=256, seq=seq, width=192)
    return _language(model, samples=48, seq=seq, batches=DATA_BATCHES)


def mixtral() -> Job:
    """Mixtral at a twentieth of its width: 3 layers of 192 with 8 experts of 384 each, two per token; 6.0
    million parameters, 88 % of them in experts; 64 sequences of 64. It uses the implementation in
    ``transformers``, so its experts have that library's form."""
    import transformers

    class LossOfMixtral(transformers.MixtralForCausalLM):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            logits = super().forward(input_ids=tokens, use_cache=False).logits
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    model = LossOfMixtral(
        transformers.MixtralConfig(
            vocab_size=1024, hidden_size=192, intermediate_size=384, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
        )
    )  # fmt: skip
    # the library's own setting for these classes, and its fastest
    model.config._experts_implementation = "grouped_mm"
    return _language(model, samples=64, seq=64, words=1024, batches=DATA_BATCHES)


class SharedExpertLayer(MoeLayer):
    """A mixture of experts, and in addition one expert that takes every token (DeepSeekMoE: Dai et al.,
    2024)."""

    def __init__(self, width: int, heads: int, hidden: int, *, experts: int, seq: int) -> None:
        super().__init__(width, heads, hidden, experts=experts, seq=seq)
        self.shared = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))

    def forward(self, x):
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mixture(x) + self.shared(x))


def shared() -> Job:
    """Two layers of 192, each with 8 experts, two per token, and one that is shared; 48 sequences of 32."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [SharedExpertLayer(192, 4, 768, experts=8, seq=32) for _ in range(2)]
    model = LanguageModel(layers, words=256, seq=32, width=192)
    return _language(model, samples=48, seq=32, batches=DATA_BATCHES)


class TwoTowers(nn.Module):
    """An image tower of convolutions and a text tower over a large table of words, as in CLIP (Radford et
    al., 2021) and in recommenders. The table gets the text tower's last gradient, whose sum takes longest."""

    def __init__(self, images: nn.Module, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.images, self.words = images, nn.Embedding(words, width)
        self.text = nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())])
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, images: torch.Tensor, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen = self.images(images)
        read = self.text(self.words(tokens).mean(1))
        return F.cross_entropy(self.head(torch.cat([seen, read], 1)), labels)


def towers() -> Job:
    """Seven convolutions on 64 images of 32 x 32; 8 layers of 256 over a table of 8192 words, 80 % of the 2.9
    million parameters, for texts of 16."""
    torch.manual_seed(0)
    convolutions: list[nn.Module] = []
    channels = 3
    for n, width in enumerate((32, 32, 64, 64, 64, 64, 64)):
        convolutions += [nn.Conv2d(channels, width, 3, padding=1, stride=1 + (n == 2)), nn.ReLU()]
        channels = width
    images = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 256))
    batch = {
        "images": torch.randn(64, 3, 32, 32),
        "tokens": torch.randint(8192, (64, 16)),
        "labels": torch.randint(CLASSES, (64,)),
    }
    return Job(TwoTowers(images, words=8192, width=256, layers=8), batch, optimizer=adamw)


class Perceptron(nn.Module):
    """Wide layers and a squared error: many parameters for little work."""

    def __init__(self, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        widths = [width, *[hidden] * layers, width]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        return F.mse_loss(self.layers[-1](x), y)


def mlp() -> Job:
    """512 - 1536 - 1536 - 1536 - 512, 6.3 million parameters; 512 samples."""
    torch.manual_seed(0)
    x = torch.randn(512, 512)
    return Job(Perceptron(512, 1536, 3), {"x": x, "y": x.roll(1, 1)}, optimizer=adamw)


class OneProduct(nn.Module):
    """A linear layer without a bias, and a squared error."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, out, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.layer(x), y)


def product(rows: int, width: int = 1024, out: int = 1024) -> Job:
    """One linear layer on ``rows`` rows."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(rows, width), "y": torch.randn(rows, out)}
    return Job(OneProduct(width, out), batch, optimizer=sgd)


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4)


def slow_adamw(parameters) -> torch.optim.Optimizer:
    """AdamW at a rate at which it does not amplify the rounding of a step's gradients to 1e-4 of later
    losses."""
    return torch.optim.AdamW(parameters, lr=3e-5)


def _language(model: nn.Module, samples: int, seq: int, words: int = 256, batches: int = 1) -> Job:
    data = []
    for _ in range(batches):
        text = torch.randint(words, (samples, seq + 1))
        data.append({"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()})
    return Job(model, data[0], optimizer=adamw, data=data if batches > 1 else None)
