"""The models of the papers as jobs: ``workload:vgg19:2048`` works wherever a JOB is expected.

They are plain modules with random weights and a random batch. ``make`` builds them on the meta device, with
shapes but no numbers: planning needs no more, and a billion parameters cost nothing there.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ....errors import JobError
from ..job import WORKLOAD, Job
from . import convolutional, images, language


@dataclass(frozen=True)
class Workload:
    """A model of a paper. ``published`` is its number of parameters in the paper, in multiples of ``unit``:
    HAP's M is 2**20."""

    make: Callable[[int], Job]
    published: float
    unit: float
    source: str


_HAP = "HAP (EuroSys'24), section 7.1, counted in units of 2**20"
WORKLOADS: dict[str, Workload] = {
    "vgg19": Workload(images.vgg19, 133, 2**20, _HAP),
    "vit": Workload(images.vit, 54, 2**20, _HAP),
    "bert-base": Workload(language.bert_base, 102, 2**20, _HAP),
    "bert-moe": Workload(language.bert_moe, 84, 2**20, _HAP + "; 36 more for every device's two experts"),
    "resnet50": Workload(images.resnet50, 25.6, 1e6, "He et al., 2016"),
    "transformer": Workload(
        language.transformer, 51.7, 1e6, "our own vocabulary of 32000; TAG gives no count"
    ),
    "bert-large": Workload(language.bert_large, 340, 1e6, "Devlin et al., 2019"),
    "bert-large-48": Workload(language.bert_large_48, 640, 1e6, "HeteroG's depth; our own count"),
    "vgg19-224": Workload(convolutional.vgg19_224, 143.7, 1e6, "Simonyan and Zisserman, 2015"),
    "resnet200": Workload(convolutional.resnet200, 64.7, 1e6, "He et al., 2016b"),
    "inception-v3": Workload(convolutional.inception_v3, 23.8, 1e6, "Szegedy et al., 2016; one head"),
    "mobilenet-v2": Workload(convolutional.mobilenet_v2, 3.5, 1e6, "Sandler et al., 2018"),
    "nasnet": Workload(convolutional.nasnet, 5.3, 1e6, "Zoph et al., 2018, 4 @ 1056"),
    "xlnet-large": Workload(language.xlnet_large, 361, 1e6, "Yang et al., 2019; the content stream"),
    "llama-0.5b": Workload(language.llama_05b, 500, 1e6, "Poplar (AAAI'25)"),
    "llama-1.1b": Workload(language.llama_11b, 1100, 1e6, "Poplar (AAAI'25)"),
}


def make(text: str, device: str = "meta") -> Job:
    """Makes the job of a name and a global batch, as in ``vgg19:2048``. Raises JobError.

    ``device`` is that of weights and batch: ``meta`` to plan, ``cpu`` to run.
    """
    name, _, batch = text.partition(":")
    if name not in WORKLOADS:
        near = difflib.get_close_matches(name, WORKLOADS, 2)
        raise JobError(
            f"there is no workload {name!r}",
            expected=", ".join(WORKLOADS),
            got=WORKLOAD + text,
            hint=tuple(f"{WORKLOAD}{n}:{batch or 256}" for n in near),
        )
    if not batch.isdecimal() or not 0 < int(batch) <= 2**20:
        raise JobError(
            "a workload needs its global batch",
            expected=f"{WORKLOAD}{name}:SAMPLES, with 1 to {2**20} samples",
            got=WORKLOAD + text,
            hint=f"{WORKLOAD}{name}:256",
        )
    # every rank of a run has to draw the same numbers
    with torch.random.fork_rng(devices=()), torch.device(device):
        torch.manual_seed(0)
        return WORKLOADS[name].make(int(batch))
