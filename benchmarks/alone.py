"""One CPU device: PyTorch's own steps of known networks for images, and ours.

Each of the two has a process of its own, on one thread; they take turns, so that the comparison holds while
the speed of a machine drifts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .steps import Step, apart, our_step, step_of
from .vision import find_torchvision

NAMES = (
    "resnet18",
    "resnet50",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "densenet121",
    "regnet_y_400mf",
    "swin_t",
    "convnext_tiny",
)
CLUSTER = '[[machine]]\nname = "a"\ndevices = [{ cpu_share = 1.0, memory_gib = 16 }]\n'
CLASSES = 10
# relative difference of the first losses; after a step on few images, PyTorch's own in float32 and in float64
# differ by several percent, as batch norm enlarges rounding errors
SAME = 1e-5
ROUNDS, STEPS = 7, 2


@dataclass(frozen=True)
class Row:
    """A network: seconds of a step in each round, PyTorch's and ours."""

    name: str
    eager_s: tuple[float, ...]
    ours_s: tuple[float, ...]
    losses_agree: bool  # before any step

    @property
    def ratios(self) -> list[float]:
        return [ours / eager for ours, eager in zip(self.ours_s, self.eager_s)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


class Classifier(nn.Module):
    """A network of torchvision with its loss."""

    def __init__(self, name: str) -> None:
        super().__init__()
        find_torchvision()
        import torchvision

        torch.manual_seed(0)
        self.network = getattr(torchvision.models, name)(num_classes=CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.network(images), labels)


def run(
    names: Sequence[str], samples: int, pixels: int, rounds: int, say: Callable[[str], None] = lambda _: None
) -> Iterator[Row]:
    """Yields a row for each network, for ``samples`` square images of so many ``pixels`` a side."""
    for name in names:
        say(f"{name}: planning")
        makes = [partial(make, name, samples, pixels) for make in (eager_step, own_step)]
        with apart(makes[0]) as eager, apart(makes[1]) as ours:
            first, own = (steps(2)[1][0] for steps in (eager, ours))
            agree = abs(first - own) <= SAME * abs(first)
            times: tuple[list[float], list[float]] = ([], [])
            for number in range(rounds):
                say(f"{name}: round {number + 1} of {rounds}")
                for taken, steps in zip(times, (eager, ours)):
                    taken.append(steps(STEPS)[0] / STEPS)
        yield Row(name, tuple(times[0]), tuple(times[1]), agree)


def eager_step(name: str, samples: int, pixels: int) -> Step:
    model = model_of(name)
    return step_of(model, optimizer_of(model), batch_of(samples, pixels))


def own_step(name: str, samples: int, pixels: int) -> Step:
    return our_step(partial(model_of, name), optimizer_of, batch_of(samples, pixels), CLUSTER)


def model_of(name: str) -> nn.Module:
    """The network without dropout, whose random numbers would be drawn in another order."""
    model = Classifier(name)
    for module in model.modules():
        if hasattr(module, "p") and isinstance(module.p, float):
            module.p = 0.0
    return model.train()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def batch_of(samples: int, pixels: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    labels = torch.randint(CLASSES, (samples,))
    return {"images": torch.randn(samples, 3, pixels, pixels), "labels": labels}
