"""torchvision and timm without torchvision's binary.

A build of torchvision goes with one build of PyTorch, and some for CPUs have none. Models, transforms and
timm need its Python alone, which ``make setup`` puts into a folder of its own: inside the environment a
torchvision without a binary would break what looks for it, transformers for instance.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import torch

FOLDER = Path(sys.prefix) / "vision"
OPERATORS_WITH_RULES = ("nms", "qnms")  # torchvision registers shapes for these when it is imported
BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def has_torchvision() -> bool:
    """Whether ``find_torchvision`` would find it. Changes nothing."""
    return FOLDER.is_dir() or importlib.util.find_spec("torchvision") is not None


def find_torchvision() -> bool:
    """Makes ``import torchvision`` and ``import timm`` work in this process, and says whether they are there.
    Without torchvision's binary its operators on boxes exist by name only, and raise when they are called."""
    if importlib.util.find_spec("torchvision") is None and FOLDER.is_dir():
        sys.path.append(str(FOLDER))
        for name in OPERATORS_WITH_RULES:
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"torchvision::{name}", BOXES)
    return importlib.util.find_spec("torchvision") is not None
