"""Training throughputs of single cards, as Lambda Labs published them: samples per second of NVIDIA's
DeepLearningExamples in its containers of 2022 and 2023 (github.com/lambdal/deeplearning-benchmark,
``pytorch/pytorch-train-throughput-*.csv``)."""

from __future__ import annotations

MODELS = "bert-base", "bert-large", "resnet50"
FLOAT32, HALF = "float32", "half"  # float32 runs in TF32 where a card has it, as in NVIDIA's containers
# The Quadro RTX 8000 is a TITAN RTX with twice its memory. Several machines with one card: the median.
THROUGHPUTS: dict[str, dict[str, tuple[int, int, int]]] = {
    FLOAT32: {
        "TITANRTX-24GB": (41, 12, 274),
        "V100-16GB": (42, 12, 369),
        "RTX3090-24GB": (85, 24, 513),
        "A10-24GB": (70, 19, 349),
        "A100-40GB": (179, 53, 882),
        "A100-80GB": (239, 75, 1066),
        "RTX6000Ada-48GB": (136, 44, 647),
        "RTXA6000-48GB": (101, 33, 514),
        "RTX4090-24GB": (137, 44, 721),
        "H100PCIe-80GB": (292, 97, 1197),
        "H100-80GB": (433, 147, 1893),
    },
    HALF: {
        "TITANRTX-24GB": (146, 50, 651),
        "V100-16GB": (189, 57, 833),
        "RTX3090-24GB": (172, 52, 905),
        "A10-24GB": (135, 42, 638),
        "A100-40GB": (368, 117, 1396),
        "A100-80GB": (443, 152, 1582),
        "RTX6000Ada-48GB": (255, 79, 1146),
        "RTXA6000-48GB": (198, 68, 916),
        "RTX4090-24GB": (297, 93, 1301),
        "H100PCIe-80GB": (567, 203, 1866),
        "H100-80GB": (867, 309, 2791),
    },
}
